"""Episodes: returns and lengths in training and in evaluation, and their endings by termination or by a time limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from esper_telemetry.core.arrays import ArrayLike, as_tensor
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, MetricFamily, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import NAN, Array, Max, Mean, Min, Moments, Reduction, Slot, Statistic, Sum
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.metrics.statistics import moments, same_shape, sample

RECENT = 100
"""Number of episodes averaged in `episode/return_mean_100`."""


EPISODES_FAMILY = MetricFamily(
    "episode",
    "Episodes",
    "Returns of the episodes that the policy finished while training: the only numbers that say whether the task is "
    "being solved. They come late: most faults show in the other families many updates before the return falls.",
    place=20,
    question="Is it learning?",
    axis="axis/env_step",
    first=("episode/return_mean_100", "episode/length_mean"),
)
TASK_FAMILY = MetricFamily(
    "task",
    "Task",
    "Numbers of the task itself, which you log under keys that begin with task/.",
    place=220,
    question="How does the task go?",
    axis="axis/env_step",
)
EVALUATION_FAMILY = MetricFamily(
    "eval",
    "Evaluation",
    "Whole episodes with the most likely actions, between updates.",
    place=30,
    question="How good is it without exploring?",
    axis="axis/env_step",
    first=("eval/return_mean",),
)


def _mean_of_latest(slots: Sequence[float]) -> float:
    values = [value for end, value in zip(slots[:RECENT], slots[RECENT:], strict=True) if end > -math.inf]
    return math.fsum(values) / len(values) if values else NAN


@dataclass(frozen=True, slots=True)
class Latest(Reduction):
    """The latest values of several processes, at most `RECENT`.

    Attributes:
        ends: when each value was observed, ascending; -inf for unused slots.
        values: in the same order, 0 for unused slots.
    """

    ends: tuple[float, ...]
    values: tuple[float, ...]

    statistics: ClassVar[Mapping[str, Statistic]] = {"mean": _mean_of_latest}

    def slots(self) -> tuple[Slot, ...]:
        """Return all times, then all values."""
        return (*self.ends, *self.values)

    @staticmethod
    def merge(rows: Array) -> Array:
        """Return the latest values of all rows; at equal times, values of earlier rows are older."""
        ends, values = rows[..., :RECENT], rows[..., RECENT:]
        ends, values = (np.concatenate(list(part), axis=-1) for part in (ends, values))
        order = np.argsort(ends, axis=-1, kind="stable")[:, -RECENT:]
        return np.concatenate([np.take_along_axis(part, order, -1) for part in (ends, values)], axis=-1)


def latest(ends: Sequence[float], values: Sequence[float]) -> Latest:
    """Return the last `RECENT` finite values with their times."""
    finite = [(end, value) for end, value in zip(ends, values, strict=True) if math.isfinite(value)][-RECENT:]
    filled = [(-math.inf, 0.0)] * (RECENT - len(finite)) + finite
    return Latest(tuple([float(end) for end, _ in filled]), tuple([float(value) for _, value in filled]))


@dataclass(frozen=True, slots=True)
class EpisodeStats(MetricGroup, absent="no episode finished"):
    """Episodes that finished in a rollout."""

    returns: Moments = reports(
        Metric.quantity("episode/return_mean", 931, "mean return", unit="return", level=Level.MINIMAL).asks(
            "How well does the policy do, over the episodes that finished in this update?"
        ),
        Metric.std("episode/return_std", 932, "spread of returns", unit="return").asks("How much do episodes differ in return?"),
    )
    smallest: Min = reports(
        Metric.quantity("episode/return_min", 933, "lowest return", unit="return").asks("How bad was the worst episode of this update?")
    )
    largest: Max = reports(
        Metric.quantity("episode/return_max", 934, "highest return", unit="return").asks("How good was the best episode of this update?")
    )
    lengths: Mean = reports(
        Metric.steps("episode/length_mean", 935, "mean length of episodes", level=Level.MINIMAL).asks("How long do episodes last?")
    )
    count: Sum = reports(
        Metric.count("episode/count", 936, "finished episodes", level=Level.MINIMAL)
        .asks("How many episodes finished in this update?")
        .absent("")
    )
    recent: Mean | Latest = reports(
        Metric.quantity("episode/return_mean_100", 937, "mean return of the last 100 episodes", unit="return", level=Level.MINIMAL)
        .asks("How well does the policy do, over the last 100 finished episodes?")
        .absent("no episode has finished yet")
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("episode/return_mean_nonfinite", 938, "non-finite inputs of mean return")
        .asks("How many episodes had a return that is NaN or infinite?")
        .absent("none had")
    )


@checked_arguments()
def episode_stats(
    returns: ArrayLike, lengths: ArrayLike, *, recent_returns: ArrayLike | Iterable[float] = (), recent_ends: ArrayLike | None = None
) -> EpisodeStats:
    """Return statistics of the episodes that finished in a rollout; without any, only their count.

    Args:
        returns: undiscounted sums of raw rewards, one per episode.
        lengths: steps, one per episode.
        recent_returns: returns of the last 100 finished training episodes, including these.
        recent_ends: when each of these ended, in numbers that all processes share, such as steps of their environments. Several
            processes then report the last 100 episodes overall; if it is None, the mean of each process's last 100, weighted by number.

    Raises:
        ValueError: for different numbers of returns and lengths, and more than one axis.
    """
    paid, steps, recent = _floats(returns), _floats(lengths), _floats(recent_returns)
    if len(paid) != len(steps):
        raise ValueError(f"every episode needs a return and a length, got {len(paid)} returns and {len(steps)} lengths")
    ends = None if recent_ends is None else _floats(recent_ends)
    if ends is not None and len(ends) != len(recent):
        raise ValueError(f"every recent return needs an end, got {len(recent)} returns and {len(ends)} ends")
    if any(length < 0 for length in steps):
        raise ValueError(f"the length of an episode must not be negative, got {min(steps):g}")
    finite = [value for value in paid if math.isfinite(value)]
    mean = math.fsum(finite) / max(1, len(finite))
    finite_recent = [value for value in recent if math.isfinite(value)]
    return EpisodeStats(
        returns=Moments(float(len(finite)), mean, math.fsum((x - mean) ** 2 for x in finite), math.nan, math.nan),
        smallest=Min(min(finite, default=math.inf)),
        largest=Max(max(finite, default=-math.inf)),
        lengths=Mean(sum(steps), float(len(steps))),
        count=Sum(float(len(paid))),
        recent=Mean(math.fsum(finite_recent), float(len(finite_recent))) if ends is None else latest(ends, recent),
        nonfinite=Sum(float(len(paid) - len(finite))),
    )


def _floats(values: ArrayLike | Iterable[float]) -> list[float]:
    """Return one number per episode."""
    if isinstance(values, Iterable) and not isinstance(values, Tensor | np.ndarray | str):
        values = list(values)
        if all(type(value) is float for value in values):
            return values
    tensor = as_tensor(values)
    if tensor.ndim != 1:
        raise ValueError(f"episodes must be a list of numbers, one for each, got shape {list(tensor.shape)}")
    numbers: list[float] = tensor.double().tolist()
    return numbers


@dataclass(frozen=True, slots=True)
class EvaluationStats(MetricGroup, absent="no evaluation since the last record"):
    """Whole episodes without exploration."""

    returns: Moments = reports(
        Metric.quantity("eval/return_mean", 941, "mean return in evaluation", unit="return", level=Level.MINIMAL).asks(
            "How much does the policy earn when it takes its most likely actions? Far above the training return: exploration is expensive."
        ),
        Metric.std("eval/return_std", 942, "spread of returns in evaluation", unit="return").asks(
            "How much do the returns of evaluation episodes differ?"
        ),
    )
    smallest: Min = reports(
        Metric.quantity("eval/return_min", 943, "lowest return in evaluation", unit="return").asks(
            "What does the worst evaluation episode earn?"
        )
    )
    largest: Max = reports(
        Metric.quantity("eval/return_max", 944, "highest return in evaluation", unit="return").asks(
            "What does the best evaluation episode earn?"
        )
    )
    length: Mean = reports(
        Metric.steps("eval/length_mean", 945, "mean length of evaluation episodes", level=Level.MINIMAL).asks(
            "How long do evaluation episodes last?"
        )
    )
    count: Sum = reports(
        Metric.count("eval/count", 946, "evaluated episodes", level=Level.MINIMAL).asks("How many episodes were evaluated?")
    )


@inference_mode
def evaluation_stats(returns: Sequence[float], lengths: Sequence[int]) -> EvaluationStats:
    """Return mean, population std and extremes of the returns, and the mean length.

    Args:
        returns: undiscounted return of each evaluated episode.
        lengths: its number of steps.
    """
    if len(returns) != len(lengths):
        raise ValueError(f"every episode needs a return and a length, got {len(returns)} and {len(lengths)}")
    s = sample(torch.tensor(returns, dtype=torch.float64))
    return EvaluationStats(
        returns=moments(s),
        smallest=Min(s.where(torch.inf).amin()),
        largest=Max(s.where(-torch.inf).amax()),
        length=Mean(float(sum(lengths)), float(len(lengths))),
        count=Sum(float(len(returns))),
    )


@dataclass(frozen=True, slots=True)
class EpisodeEnds(MetricGroup, absent="no episode was cut off"):
    """Episodes that finished in a rollout, by termination or by a time limit."""

    truncated: Mean = reports(
        Metric.fraction("episode/truncated_frac", 926, "share of episodes that are cut off")
        .asks("What share of the episodes was cut off by a time limit? Their returns continue with the critic's estimate.")
        .absent("no episode finished")
    )
    shortest_cut: Min | None = reports(
        Metric.steps("episode/truncated_length_min", 927, "shortest episode that was cut off").asks(
            "How short was the shortest episode that was cut off? A time limit cannot cut off a shorter one."
        )
    )
    longest_cut: Max | None = reports(
        Metric.steps("episode/truncated_length_max", 928, "longest episode that was cut off").asks(
            "How long was the longest episode that was cut off?"
        )
    )
    shortest: Min | None = reports(
        Metric.steps("episode/terminated_length_min", 929, "shortest episode that terminated")
        .asks("How short was the shortest episode that terminated?")
        .absent("no episode terminated")
    )
    longest: Max | None = reports(
        Metric.steps("episode/terminated_length_max", 930, "longest episode that terminated")
        .asks("How long was the longest episode that terminated? If it is as long as the time limit, it was probably cut off.")
        .absent("no episode terminated")
    )


@inference_mode
def episode_ends(ended: Tensor, terminated: Tensor, lengths: Sequence[int], *, valid: Tensor | None = None) -> EpisodeEnds:
    """Return the share of a rollout's episodes that were cut off, and the lengths of these and of the others.

    Args:
        ended, terminated: [T, B] bool.
        lengths: lengths of the episodes in the order in which they ended; within one step, in the order of the environments. Lengths are
            left out if their number differs from the number of ends in `ended`.
        valid: bool, same shape; None if every entry is valid.
    """
    same_shape(ended=ended, terminated=terminated, valid=valid)
    over = ended.bool() if valid is None else ended.bool() & valid.bool()
    cut = over & ~terminated.bool()
    share = Mean(cut.sum().double(), over.sum().double())
    if not lengths:
        return EpisodeEnds(share)
    place = over.flatten().cumsum(0) - 1
    all_lengths = torch.tensor(lengths, dtype=torch.float64, device=ended.device)
    steps = all_lengths[place.clamp(0, len(all_lengths) - 1)].view_as(over)
    matched = over & (place[-1] + 1 == len(all_lengths))
    by_limit, by_itself = matched & cut, matched & ~cut
    return EpisodeEnds(
        share,
        shortest_cut=Min(torch.where(by_limit, steps, torch.inf).amin()),
        longest_cut=Max(torch.where(by_limit, steps, -torch.inf).amax()),
        shortest=Min(torch.where(by_itself, steps, torch.inf).amin()),
        longest=Max(torch.where(by_itself, steps, -torch.inf).amax()),
    )
