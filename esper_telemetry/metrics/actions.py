"""Actions: probability of the chosen ones, change of the preferred ones, shift of the action mix, and exploration of continuous heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, no_grad, torch
from esper_telemetry.core.metric import Metric, label, reports, segment
from esper_telemetry.core.reduction import NAN, AdditiveReduction, Array, Max, Mean, Min, Slot, Statistic, Sum
from esper_telemetry.metrics.ratio import MOVED_TOO_FAR, RARE_ACTIONS
from esper_telemetry.metrics.statistics import keep, rows_of, sample


@dataclass(frozen=True, slots=True)
class LogProbStats(MetricGroup):
    """Log-probabilities of the chosen actions at collection."""

    smallest: Min = reports(
        Metric.quantity("policy/logp/min", 171, "log-probability of the unlikeliest action", unit="nats (log-probability)")
        .asks("How unlikely was the least likely action taken? Very unlikely actions make the ratios of the next update explode.")
        .bounds(healthy="> -10", warn="< -13 (p < 2e-6)", source="heuristic; ray#21297")
        .absent("no valid row")
        .advises(RARE_ACTIONS)
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("policy/logp/min_nonfinite", 172, "non-finite inputs of log-probability of the unlikeliest action").asks(
            "How many valid log-probabilities were NaN or infinite?"
        )
    )


@inference_mode
def log_prob_stats(log_probs: Tensor, *, valid: Tensor | None = None) -> LogProbStats:
    """Return the smallest log-probability of a chosen action.

    Args:
        log_probs: at collection, summed over heads, [T, B] or [N].
        valid: bool, same shape; None if every entry is valid.
    """
    s = sample(log_probs, valid)
    return LogProbStats(Min(s.where(math.inf).amin(-1)), Sum(s.nonfinite))


@dataclass(frozen=True, slots=True)
class GreedyAgreement(MetricGroup):
    """Agreement of the preferred actions before and after the update."""

    agreement: Mean = reports(
        Metric.fraction("policy/greedy_agreement", 173, "agreement on the preferred action", cost="sampled")
        .asks("In what share of the states does the policy still prefer the same action as before the update?")
        .bounds(healthy="> 0.9", warn="< 0.9", critical="< 0.7", source="heuristic; policy churn")
        .absent("no valid row, or a continuous head")
        .advises(MOVED_TOO_FAR)
    )


@inference_mode
def greedy_agreement(
    old_logits: Mapping[str, Tensor],
    logits: Mapping[str, Tensor],
    action_masks: Mapping[str, Tensor] | None = None,
    *,
    relevant: Mapping[str, Tensor] | None = None,
) -> GreedyAgreement:
    """Return the share of rows on which every relevant head prefers the same action before and after.

    Args:
        old_logits, logits: per categorical head [.., A], before and after the update, same rows.
        action_masks: per head [.., A] bool; other heads are not masked.
        relevant: per head [..] bool; other heads always take part.
    """
    masks, relevant = action_masks or {}, relevant or {}
    same = []
    for head, new in logits.items():
        both = [old_logits[head], new]
        if masks.get(head) is not None:
            both = [x.masked_fill(~masks[head].bool(), -torch.inf) for x in both]
        old_best, best = (x.argmax(-1) for x in both)
        agrees = old_best == best
        same.append(agrees | ~relevant[head].bool() if relevant.get(head) is not None else agrees)
    s = sample(torch.stack(same).all(0))
    return GreedyAgreement(s.mean(s.values))


def _divergence(slots: Sequence[float]) -> float:
    counts = np.array(slots).reshape(2, -1)
    totals = counts.sum(axis=1, keepdims=True)
    if not totals.all():
        return NAN
    p = counts / totals
    return min(1.0, max(0.0, (_entropy(p.mean(axis=0)) - (_entropy(p[0]) + _entropy(p[1])) / 2) / math.log(2)))


def _entropy(p: Array) -> float:
    positive = p[p > 0]
    return float(-positive @ np.log(positive))


@dataclass(frozen=True, slots=True)
class HistogramShift(AdditiveReduction):
    """Jensen-Shannon divergence of two histograms, divided by ln 2: 0 for the same mix, 1 for disjoint mixes.

    Attributes:
        counts, previous: [A], over the same actions.
    """

    counts: Tensor
    previous: Tensor

    statistics: ClassVar[Mapping[str, Statistic]] = {"shift": _divergence}

    def slots(self) -> tuple[Slot, ...]:
        """Return all counts, then all previous counts."""
        return (*self.counts.unbind(-1), *self.previous.unbind(-1))


@dataclass(frozen=True, slots=True)
class ActionShift(MetricGroup):
    """Change of one head's action mix since the last rollout."""

    head: str = label()
    shift: HistogramShift = reports(
        Metric.fraction("policy/head/{head}/action_shift_js", 174, "shift of a head's mix of actions", unit="fraction of ln 2")
        .asks("How much did this head's action mix change since the last rollout?")
        .bounds(healthy="< 0.02", warn="> 0.10", critical="> 0.25", source="measured on healthy and broken runs")
        .absent("the first rollout, or no action taken")
    )


@no_grad
def action_counts(actions: Tensor, num_actions: int, *, valid: Tensor | None = None) -> Tensor:
    """Return the number of times that each action was taken, [num_actions] float64.

    Args:
        actions: indices [..].
        num_actions: number of actions of the head.
        valid: [..] bool; None if every row is valid.
    """
    index = rows_of(actions, None).long()
    if index.is_cpu:
        counted = index if valid is None else index[rows_of(valid, None).bool()]
        return torch.bincount(counted, minlength=num_actions)[:num_actions].double()
    weight = torch.ones_like(index, dtype=torch.float64) if valid is None else rows_of(valid, None).double()
    counts = torch.zeros(num_actions, dtype=torch.float64, device=actions.device)
    return counts.scatter_add(0, torch.where(weight > 0, index, 0), weight)


def action_shift(head: str, counts: Tensor, previous: Tensor) -> ActionShift:
    """Return the divergence of this rollout's actions from the last rollout's; both [A], from `action_counts`."""
    return ActionShift(segment(head), HistogramShift(counts.detach(), previous.detach()))


def _distance(slots: Sequence[float]) -> float:
    count, previous_count = slots[:2]
    total, previous, spread = np.array(slots[2:]).reshape(3, -1)
    if not (count and previous_count and (spread > 0).all()):
        return NAN
    return float(np.mean(np.abs(total / count - previous / previous_count) / (spread / count)))


@dataclass(frozen=True, slots=True)
class StandardizedShift(AdditiveReduction):
    """Mean over dimensions of the distance between two mean actions, in units of σ.

    Attributes:
        count: number of actions.
        previous_count: number of the last rollout's actions.
        total: [D] sum of the actions.
        previous: [D] sum of the last rollout's actions.
        spread: [D] σ, the unit of the distance, summed over the actions.
    """

    count: Slot
    previous_count: Slot
    total: Tensor
    previous: Tensor
    spread: Tensor

    statistics: ClassVar[Mapping[str, Statistic]] = {"shift": _distance}

    def slots(self) -> tuple[Slot, ...]:
        """Return both counts, then all three sums."""
        return (
            self.count, self.previous_count, *self.total.unbind(-1), *self.previous.unbind(-1), *self.spread.unbind(-1)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GaussianShift(MetricGroup):
    """Movement of one continuous head's mean action since the last rollout."""

    head: str = label()
    shift: StandardizedShift = reports(
        Metric.magnitude("policy/head/{head}/action_shift", 175, "shift of a head's mean action", unit="σ")
        .asks("How far did this head's mean action move since the last rollout, in its own standard deviations?")
        .bounds(source="heuristic")
        .absent("the first rollout, or no action taken")
    )


class ActionTotal(NamedTuple):
    """Actions of a continuous head in one rollout.

    Attributes:
        mean: [D] float64; 0 without actions.
        number: number of actions, 0-d.
    """

    mean: Tensor
    number: Tensor


@inference_mode
def gaussian_action_shift(
    head: str, actions: Tensor, previous_mean: Tensor, std: Tensor, *, previous_count: Slot = 1.0, valid: Tensor | None = None
) -> GaussianShift:
    """Return the distance of the mean action from the last rollout's.

    Args:
        head: name of the head.
        actions: [.., D].
        previous_mean: [D] mean action of the last rollout.
        std: [D] or [.., D] standard deviations of the policy.
        previous_count: number of actions behind `previous_mean`; needed if several processes each have one.
        valid: [..] bool; None if every row is valid.
    """
    total, count = _total_action(actions, valid)
    spread = std.detach().double()
    spread = spread * count if spread.ndim == 1 else _total_action(spread, valid)[0]
    previous = previous_mean.detach().double() * previous_count
    return GaussianShift(segment(head), StandardizedShift(count, previous_count, total, previous, spread))


@no_grad
def mean_action(actions: Tensor, *, valid: Tensor | None = None) -> ActionTotal:
    """Return the mean of the valid, finite rows of actions [.., D], and their number."""
    total, count = _total_action(actions, valid)
    return ActionTotal(total / count.clamp(min=1), count)


def _total_action(actions: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum [D] and the number of the valid, finite rows."""
    rows = actions.detach().double().reshape(-1, actions.shape[-1])
    mask = (rows.abs() < math.inf).all(-1)
    if valid is not None:
        mask &= rows_of(valid, None).bool()
    return torch.where(mask.unsqueeze(-1), rows, 0.0).sum(0), mask.sum()


@dataclass(frozen=True, slots=True)
class GaussianStats(MetricGroup, absent="no valid row"):
    """Standard deviations, saturation and size of one continuous head."""

    head: str = label()
    std: Mean | None = reports(
        Metric.magnitude("policy/head/{head}/std/mean", 181, "mean of a head's spread", unit="action units")
        .asks("How widely does this head explore on average?")
        .bounds(source="Andrychowicz 2021")
    )
    smallest: Min | None = reports(
        Metric.magnitude("policy/head/{head}/std/min", 182, "smallest of a head's spread", unit="action units")
        .asks("How narrowly does this head explore in its narrowest dimension or state?")
        .bounds(critical="< 0.05 of its initial value while the return does not improve", source="heuristic")
    )
    bound: Mean | None = reports(
        Metric.fraction("policy/head/{head}/bound_frac", 183, "share of actions at their bounds")
        .asks("What share of the action components is at or beyond the bounds of the action space (squashed: within 1 %)?")
        .bounds(healthy="< 0.1", warn="> 0.3", critical="> 0.6", source="heuristic")
        .absent("the action space is unbounded")
    )
    empty: Mean | None = reports(
        Metric.fraction("policy/head/{head}/empty_range_frac", 185, "share of action dimensions without a choice")
        .asks("In what share of the dimensions does the action space have low = high, so that all actions are the same?")
        .bounds(healthy="0", warn="> 0", source="gymnasium.utils.passive_env_checker")
        .absent("the action space is unbounded")
    )
    used: Mean | None = reports(
        Metric.ratio("policy/head/{head}/range_used", 186, "spread of the actions over half their range")
        .asks("How widely do the actions of this head vary, if 1 is the distance from the middle of the range to its bounds?")
        .bounds(healthy="0.05 to 1", warn="< 0.03 in the first updates", source="published initial deviations: 0.037 and more")
        .absent("the action space is unbounded, or its bounds are beyond 1e6")
    )
    reached: Max | None = reports(
        Metric.ratio("policy/head/{head}/range_reached", 187, "largest distance of an action from the middle of its range")
        .asks("How far from the middle do the actions of this head go in any dimension, if 1 is the distance from there to the bounds?")
        .absent("the action space is unbounded, or its bounds are beyond 1e6")
    )
    dimensions: Max | None = reports(
        Metric.count("policy/head/{head}/dimensions", 184, "dimensions of a continuous head")
        .asks("Over how many dimensions is this head's KL divergence summed?")
        .absent("the standard deviations are not known")
    )


@inference_mode
def gaussian_stats(
    head: str,
    log_std: Tensor | None = None,
    *,
    actions: Tensor | None = None,
    low: Tensor | float | None = None,
    high: Tensor | float | None = None,
    valid: Tensor | None = None,
) -> GaussianStats:
    """Return the mean and smallest σ over rows and dimensions, their number, the share of components at or beyond the bounds, and the
    part of the range that actions use.

    Args:
        head: name of the head.
        log_std: [D] or [.., D]; None if only the bounds matter.
        actions: [.., D] as sampled, before they are clipped to the bounds.
        low, high: bounds of the action space, [D] or one number; None if it is unbounded.
        valid: [..] bool, rows of `actions` and of a `log_std` that depends on the state; None if every row is valid.
    """
    std = None if log_std is None else keep(*_columns(log_std.detach().double().exp(), valid if log_std.ndim > 1 else None))
    ranges = actions is not None and low is not None and high is not None
    empty, used, reached = _range_use(actions, low, high, valid) if ranges else (None, None, None)
    return GaussianStats(
        head=segment(head),
        std=None if std is None else std.mean(std.values),
        smallest=None if std is None else Min(std.where(math.inf).amin(-1)),
        bound=None if actions is None or (low is None and high is None) else _at_bounds(actions, low, high, valid),
        empty=empty,
        used=used,
        reached=reached,
        dimensions=None if std is None or log_std is None else Max(std.values.new_tensor(log_std.shape[-1])),
    )


def _at_bounds(actions: Tensor, low: Tensor | float | None, high: Tensor | float | None, valid: Tensor | None) -> Mean:
    x = actions.detach()
    outside = torch.zeros_like(x, dtype=torch.bool)
    if low is not None:
        outside = outside | (x <= low)
    if high is not None:
        outside = outside | (x >= high)
    counted = keep(*_columns(x.double(), valid))
    return counted.share(outside.reshape(-1))


MAX_RANGE = 1e6
"""Half of a range above which bounds only say that there are none."""


def _range_use(actions: Any, low: Any, high: Any, valid: Tensor | None) -> tuple[Mean, Mean, Max]:
    """Return the share of dimensions with low = high, and over half the range of the others the mean standard deviation of the actions and
    the largest distance from the middle.
    """
    rows = actions.detach().double().reshape(-1, actions.shape[-1])
    counted = (rows.abs() < math.inf).all(-1, keepdim=True)
    if valid is not None:
        counted &= rows_of(valid, None).bool().unsqueeze(-1)
    half = (torch.as_tensor(high - low, device=rows.device).double() / 2).expand(rows.shape[-1])
    count = counted.sum().clamp(min=1)
    mean = torch.where(counted, rows, 0.0).sum(0) / count
    std = (torch.where(counted, rows - mean, 0.0).square().sum(0) / count).sqrt()
    bounded = (half > 0) & (half <= MAX_RANGE) & counted.any()
    middle = torch.where(bounded, torch.as_tensor(low, device=rows.device).double().expand_as(half) + half, 0.0)
    extent = torch.where(counted, (rows - middle).abs(), 0.0).amax(0)
    used, reached = (torch.where(bounded, size / half.clamp(min=torch.finfo(half.dtype).tiny), 0.0) for size in (std, extent))
    empty = Mean((half <= 0).sum().double(), float(half.numel()))
    return empty, Mean(used.sum(), bounded.sum().double()), Max(torch.where(bounded.any(), reached.amax(), -math.inf))


@dataclass(frozen=True, slots=True)
class SpreadOverRange(MetricGroup):
    """Standard deviations of one continuous head relative to the range of its actions."""

    head: str = label()
    spread: Mean = reports(
        Metric.ratio("policy/head/{head}/std_of_range", 866, "spread of a head over half the range of its actions")
        .asks("How large is this head's standard deviation, if 1 is the distance from the middle of the range to its bounds?")
        .bounds(healthy="0.05 to 2.5", warn="> 10: nearly all actions are clipped", source="heuristic")
        .absent("the action space is unbounded")
    )


@inference_mode
def spread_over_range(head: str, log_std: Tensor, *, low: Tensor, high: Tensor, valid: Tensor | None = None) -> SpreadOverRange:
    """Return the mean of σ divided by half the range, over rows and bounded dimensions.

    Args:
        head: name of the head.
        log_std: [D] or [.., D].
        low, high: bounds of the action space, [D].
        valid: [..] bool, rows of a `log_std` that depends on the state; None if every row is valid.
    """
    std = log_std.detach().double().exp() / ((high - low).double() / 2)
    ratios, counted = _columns(std, valid if std.ndim > 1 else None)
    bounded = ratios > 0  # σ over an infinite range is 0
    rows = keep(ratios, bounded if counted is None else counted & bounded)
    return SpreadOverRange(segment(head), rows.mean(rows.values))


def _columns(x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return all components of [.., D] on one axis, and the mask of the valid ones."""
    return x.reshape(-1), None if valid is None else valid.bool().unsqueeze(-1).expand_as(x).reshape(-1)
