"""Recurrent states: their size, the staleness of stored ones, and the resets of memory between episodes.

Over time: gradients through a sequence, growth of the cell state with its age, and the effect of memory on the policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, no_grad, torch
from esper_telemetry.core.metric import Metric, MetricFamily, label, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import NAN, AdditiveReduction, Array, Max, Mean, Slot, Statistic, Sum
from esper_telemetry.metrics.kl import joint_kl
from esper_telemetry.metrics.statistics import defined, keep, rows_of, same_shape

PARTS = ("h", "c")
"""Parts of a recurrent state: hidden state and, of an LSTM, cell state."""


MEMORY_FAMILY = MetricFamily(
    "lstm",
    "Memory",
    "Memory of a recurrent policy: sizes of its hidden state h and cell state c, openness of its gates i (write), f "
    "(keep) and o (read), how long it remembers, and whether memory is reset with episodes.",
    place=110,
    question="Does memory work?",
    first=("lstm/reset_rate", "lstm/timescale/median", "lstm/{part}/rms"),
)


@dataclass(frozen=True, slots=True)
class RootMeanSquare(AdditiveReduction):
    """Root of a mean of squares, from their sum and number."""

    squares: Slot
    count: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"rms": lambda s: math.sqrt(s[0] / s[1]) if s[1] else NAN}


@dataclass(frozen=True, slots=True)
class StateStats(MetricGroup, absent="no valid, finite state, or a policy without memory"):
    """Size of the parts of a recurrent state; all layers together."""

    part: tuple[str, ...] = label()
    rms: RootMeanSquare = reports(
        Metric.magnitude("lstm/{part}/rms", 701, "typical size of the recurrent state", unit="state")
        .asks("How large is a typical entry of the recurrent state?")
        .bounds(
            healthy="h: 0.05 to 0.9; c: < 5",
            warn="c > 10, or a robust z of log10 above 4",
            critical="c > 50, or a robust z of log10 above 12",
            source="heuristic; |h| < 1 by construction; the norm would grow with the number of units",
        )
    )
    absmax: Max = reports(
        Metric.magnitude("lstm/{part}/absmax", 702, "largest magnitude of the recurrent state", unit="state")
        .asks("How large is the largest entry of the recurrent state?")
        .bounds(critical="c > 50", source="heuristic")
    )
    mean: Mean = reports(
        Metric.quantity("lstm/{part}/mean", 703, "mean of the recurrent state", unit="state")
        .asks("Is the recurrent state biased to one side?")
        .bounds(healthy="near 0", warn="above 0.8 times the rms in magnitude", source="heuristic")
        .advises("States drift to one side: check resets, and centre the inputs of the memory.")
    )
    env_rms: Max = reports(
        Metric.magnitude("lstm/{part}/env_rms/max", 704, "largest size of the state in an environment", unit="state")
        .asks("How large is the state in the environment with the largest state? Far above the rms: one environment went astray.")
        .bounds(healthy="close to the rms", source="heuristic")
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("lstm/{part}/rms_nonfinite", 705, "non-finite inputs of typical size of the recurrent state")
        .asks("How many of the states held a NaN or an infinity?")
        .absent("none did")
    )


class StateSize(NamedTuple):
    """Sums of recurrent states over layers and units: the input of their statistics, which takes at most a sixteenth of their memory.

    Attributes:
        width: entries of one part of one state, over all layers.
        total, squares, absolute: [parts, T, B], sums of the entries, of their squares and of their magnitudes.
        largest: [parts, T, B], largest magnitude.
    """

    width: int
    total: Tensor
    squares: Tensor
    absolute: Tensor
    largest: Tensor

    @property
    def empty(self) -> Tensor:
        """Mask [T, B] of states that are exactly zero.

        Resets are read from the states and not from the flags that should cause them, to detect a trainer that forgets to reset.
        """
        return (self.largest == 0).all(0)


@no_grad
def state_size(states: Tensor) -> StateSize:
    """Return sums over layers and units of states [T, layers, parts, B, H]."""
    magnitudes = states.abs()  # its sum and maximum take a tenth of the time of norms of order 1 and ∞
    return StateSize(
        states.shape[1] * states.shape[-1],
        states.sum(-1).sum(1).movedim(1, 0),
        torch.linalg.vector_norm(states, dim=-1).square().sum(1).movedim(1, 0),
        magnitudes.sum(-1).sum(1).movedim(1, 0),
        magnitudes.amax(-1).amax(1).movedim(1, 0),
    )


@inference_mode
def state_stats(size: StateSize, *, valid: Tensor | None = None) -> StateStats:
    """Return root mean square, largest magnitude and signed mean of each part of the state.

    Args:
        size: sums for T states of B environments, from `state_size`.
        valid: [T, B] bool; None if every state counts.
    """
    allowed = None if valid is None else valid.bool().t()
    squares = keep(size.squares.double().mT, allowed)
    count = squares.count * size.width
    sums = squares.values.sum(-1)
    totals = keep(size.total.double().mT, squares.mask).values
    largest = keep(size.largest.double().mT, squares.mask).where(-math.inf)
    by_env = torch.where(count > 0, sums / count, -math.inf).amax(-1)
    return StateStats(
        part=PARTS[: len(size.squares)],
        rms=RootMeanSquare(sums.sum(-1), count.sum(-1)),
        absmax=Max(largest.amax((-1, -2))),
        mean=Mean(totals.sum((-1, -2)), count.sum(-1)),
        env_rms=Max(by_env.sqrt()),
        nonfinite=Sum(squares.nonfinite.sum(-1)),
    )


SOURCE = "Kapturowski 2019 (R2D2); sb3-contrib#265; ikostrikov#278"


@dataclass(frozen=True, slots=True)
class RelativeDistance(AdditiveReduction):
    """Length of a difference relative to the length of a reference; the slots hold squares."""

    difference: Slot
    reference: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"relative": lambda s: math.sqrt(s[0] / s[1]) if s[1] else NAN}


@dataclass(frozen=True, slots=True)
class Staleness(MetricGroup):
    """Distance of all stored states of a rollout from the states that the current weights reach.

    They include the states at the beginnings of sequences, and show a wrong first state before an episode's end hides it.
    """

    distance: RelativeDistance = reports(
        Metric.magnitude("lstm/staleness", 731, "staleness of stored states", unit="relative error", cost="sampled")
        .asks("How far are the stored states from the states that the current weights would have reached, after the last step?")
        .bounds(healthy="< 0.1", warn="> 0.3", critical="> 1", source=SOURCE)
        .absent("the stored states are zero, or they are not recomputed")
    )


@dataclass(frozen=True, slots=True)
class FirstStaleness(MetricGroup):
    """Distance between the states in training and in acting, with the same weights."""

    distance: RelativeDistance = reports(
        Metric.magnitude(
            "lstm/staleness_first", 735, "staleness of stored states before the first step", unit="relative error", cost="sampled"
        )
        .asks(
            "Does training reach the stored states before the first step of an update? Any difference, up to "
            "rounding, means another first state, other observations or other resets than in acting."
        )
        .bounds(healthy="about 0", critical="> 1e-4", source=SOURCE)
        .absent("the stored states are zero, or they are not recomputed")
    )


@inference_mode
def state_staleness(stored: Tensor, recomputed: Tensor) -> Staleness:
    """Return the length of `recomputed` - `stored`, relative to the length of `stored`, all entries together.

    Args:
        stored: states at the beginnings of sequences, as the collector left them; any shape.
        recomputed: the same states, unrolled with the current weights since the last reset of memory.
    """
    return Staleness(_distance(stored, recomputed))


@inference_mode
def first_staleness(stored: Tensor, recomputed: Tensor) -> FirstStaleness:
    """Return the distance before the first step, with the weights under which the states were stored."""
    return FirstStaleness(_distance(stored, recomputed))


def _distance(stored: Tensor, recomputed: Tensor) -> RelativeDistance:
    same_shape(stored=stored, recomputed=recomputed)
    norm = torch.linalg.vector_norm
    reference = stored.double()
    return RelativeDistance(norm(recomputed.double() - reference).square(), norm(reference).square())


@dataclass(frozen=True, slots=True)
class ResetStats(MetricGroup, absent="no valid step, or a policy without memory"):
    """Rate of resets and age of the memory."""

    rate: Mean = reports(
        Metric.fraction("lstm/reset_rate", 741, "rate of resets", level=Level.MINIMAL)
        .asks("At what share of the steps is memory reset? 0 although episodes end: it leaks across episodes.")
        .bounds(healthy="1 over the mean length of episodes", critical="0 while episodes end", source="identity")
    )
    unbroken: Mean = reports(
        Metric.fraction("lstm/chunk_no_reset_frac", 742, "share of environments without a reset").asks(
            "In what share of the environments was memory never reset in this rollout?"
        )
    )
    age: Mean = reports(
        Metric.steps("lstm/age/mean", 743, "mean of the memory's age").asks("How many steps does memory reach back on average?")
    )
    oldest: Max = reports(
        Metric.steps("lstm/age/max", 744, "largest of the memory's age").asks("How many steps does the oldest memory reach back?")
    )


@no_grad
def state_ages(resets: Tensor, start: Tensor | None = None) -> Tensor:
    """Return the steps since memory was last reset, [T, B], 0 at resets.

    Args:
        resets: [T, B] bool: the step begins without memory.
        start: [B] age at the first step, unless that is a reset; None counts from the first step on. The next
            rollout starts with the last ages plus 1.
    """
    steps = torch.arange(len(resets), device=resets.device).unsqueeze(-1)
    last = torch.where(resets.bool(), steps, -1).cummax(0).values
    before = 0 if start is None else start
    return torch.where(last < 0, steps + before, steps - last)


@inference_mode
def reset_stats(resets: Tensor, ages: Tensor, *, valid: Tensor | None = None) -> ResetStats:
    """Return rate of resets, share of environments without one, and ages.

    Args:
        resets: [T, B] bool: the step begins without memory.
        ages: [T, B], from `state_ages`.
        valid: [T, B] bool; None if every step is valid.
    """
    same_shape(resets=resets, ages=ages, valid=valid)
    counts = torch.ones_like(resets, dtype=torch.bool) if valid is None else valid.bool()
    steps, resets = counts.sum(), resets.bool() & counts
    present = counts.any(0)
    age = torch.where(counts, ages.double(), 0.0)
    return ResetStats(
        rate=Mean(resets.sum(), steps),
        unbroken=Mean((present & ~resets.any(0)).sum(), present.sum()),
        age=Mean(age.sum(), steps),
        oldest=Max(torch.where(counts, age, -math.inf).amax()),
    )


PASCANU = "Pascanu 2013, 1211.5063"


@dataclass(frozen=True, slots=True)
class BpttStats(MetricGroup):
    """Gradients of the loss at the recurrent state h."""

    first: Mean = reports(
        Metric.gradient_norm("lstm/bptt/h0_grad_norm", 732, "gradient at the first state of a sequence", cost="sampled")
        .asks("How much of the loss's gradient reaches the state at the start of a sequence?")
        .bounds(healthy="1e-4 to 10", critical="> 100: gradients explode through time", source=PASCANU)
        .absent("no recurrent policy, or every environment was reset")
        .advises("Open the forget gate (bias 1), train on shorter sequences, or give the policy what it has to remember.")
    )
    profile: Mean = reports(
        Metric.ratio(
            "lstm/bptt/profile_ratio",
            733,
            "gradient at the beginning of a sequence, divided by the gradient at its end",
            level=Level.DEBUG,
            cost="debug",
        )
        .asks(
            "How much larger is the gradient at the beginning of a sequence than at its end? Far above 1 it "
            "explodes on the way, near 0 it vanishes."
        )
        .bounds(source=PASCANU)
        .absent("no recurrent policy, or every environment was reset, or the gradient of the last step is missing")
    )


@inference_mode
def bptt_stats(first: Tensor, last: Tensor) -> BpttStats:
    """Return the norm of the gradient before the first step, and the ratio of its last layer's norm to the norm after the last step.

    Args:
        first: ∂L/∂h before the first step, [layers, envs, H].
        last: ∂L/∂h of the last layer after the last step, [envs, H].
    """
    norm = torch.linalg.vector_norm
    return BpttStats(first=defined(norm(first.double())), profile=defined(norm(first[-1].double()) / norm(last.double())))


BUCKETS = 64
"""Maximum number of buckets of ages; older states count in the last bucket."""


@dataclass(frozen=True, slots=True)
class AgeProfile(AdditiveReduction):
    """Size of the cell state by age.

    Attributes:
        count: [K] number of states in each bucket of ages.
        age: [K] sum of their ages.
        size: [K] sum of their sizes.
    """

    count: Tensor
    age: Tensor
    size: Tensor

    statistics: ClassVar[Mapping[str, Statistic]] = {"growth": lambda s: _growth(np.array(s).reshape(3, -1))}

    def slots(self) -> tuple[Slot, ...]:
        """Return all counts, then all ages, then all sizes."""
        return (*self.count.unbind(-1), *self.age.unbind(-1), *self.size.unbind(-1))


def _growth(profile: Array) -> float:
    count, *sums = profile[:, profile[0] > 0]
    if len(count) < 2:
        return NAN
    age, size = sums[0] / count, sums[1] / count
    typical = float(np.median(size))
    return theil_sen_slope(age, size) * float(age.max()) / typical if typical else NAN


def theil_sen_slope(x: Array, y: Array) -> float:
    """Return the median slope over all pairs of points (Sen 1968); needs at least two points, with distinct x."""
    i, j = np.triu_indices(len(x), 1)
    return float(np.median((y[j] - y[i]) / (x[j] - x[i])))


@dataclass(frozen=True, slots=True)
class CellGrowth(MetricGroup):
    """Dependence of the cell state's size on its age."""

    growth: AgeProfile = reports(
        Metric.ratio("lstm/c_growth", 745, "growth of the cell state with age", low=None)
        .asks("By how many times its median does the cell state grow from a fresh memory to the oldest?")
        .bounds(
            healthy="< 2",
            warn="> 2",
            critical="> 5",
            source="Theil-Sen slope of mean |c| against age, times the largest age, over the median; heuristic",
        )
        .absent("memory of fewer than two ages, or a cell state of zero")
    )


@inference_mode
def cell_growth(sizes: Tensor, ages: Tensor, *, width: int = 1, valid: Tensor | None = None) -> CellGrowth:
    """Return the profile of the cell state's size over its age.

    Args:
        sizes: mean |c| of each state, [T, B] or [N].
        ages: steps since memory was reset, same shape.
        width: number of neighbouring ages per bucket.
        valid: bool, same shape; None if every state counts.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    same_shape(sizes=sizes, ages=ages, valid=valid)
    s = keep(rows_of(sizes, None).double(), None if valid is None else rows_of(valid, None).bool())
    age = rows_of(ages, None)
    bucket = (age.long() // width).clamp(0, BUCKETS - 1)
    columns = torch.stack([s.weight, age * s.weight, s.values])
    profile = columns.new_zeros(3, BUCKETS).index_add_(1, bucket, columns)
    return CellGrowth(AgeProfile(*profile))


def bucket_width(steps: int) -> int:
    """Return the number of ages per bucket so that the buckets cover the last four rollouts of `steps`."""
    return max(1, -(-4 * steps // BUCKETS))


@dataclass(frozen=True, slots=True)
class MemoryUse(MetricGroup):
    """Effect of memory on the policy."""

    kl: Mean = reports(
        Metric.nats("lstm/ablate_kl", 734, "KL divergence without memory", level=Level.DEBUG, cost="debug")
        .asks("How differently would the policy act if it remembered nothing? Near 0: memory is ignored.")
        .bounds(healthy="> 1e-3 if the task needs memory", source="KL(π(·|x,h)‖π(·|x,0)); heuristic")
        .absent("no recurrent policy, or no valid row")
    )


@inference_mode
def memory_use(rows: Mapping[str, Tensor], *, relevant: Mapping[str, Tensor] | None = None) -> MemoryUse:
    """Return the mean KL between the policy with memory and without.

    Args:
        rows: per head [n], from `categorical_kl` or `gaussian_kl`, of the same weights with memory and without.
        relevant: per head [n] bool; other heads always take part.
    """
    return MemoryUse(joint_kl(rows, relevant))
