"""The actions themselves: how likely the chosen ones were, whether the policy still prefers them, and how their mix shifts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.group import Mean, MetricGroup, Min, Sum, label, reports
from esper_telemetry.metric import Metric, segment
from esper_telemetry.metrics.masking import rows_of, sample
from esper_telemetry.record import Level
from esper_telemetry.reduction import NAN, Array, Reduction, Slot, Statistic

NO_ROWS = "no valid row"


@dataclass(frozen=True, slots=True)
class LogProbStats(MetricGroup):
    """Log-probabilities of the chosen actions at collection."""

    smallest: Min = reports(
        Metric(
            key="policy/logp/min",
            number=171,
            unit="nats (log-probability)",
            question="How unlikely was the unlikeliest action taken? Very unlikely ones make the next update's ratios explode.",
            healthy="> -10",
            warn="< -13 (p < 2e-6)",
            source="heuristic; ray#21297",
            undefined=NO_ROWS,
        )
    )
    nonfinite: Sum = reports(
        Metric(
            key="policy/logp/min_nonfinite",
            number=172,
            unit="count",
            question="How many valid log-probabilities were NaN or infinite?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="absent",
            critical="> 0",
            undefined="none was",
            when_positive=True,
        )
    )


@torch.inference_mode()
def log_prob_stats(log_probs: Tensor, *, valid: Tensor | None = None) -> LogProbStats:
    """The smallest log-probability of a chosen action.

    Args:
        log_probs: at collection, summed over heads, [T, B] or [N].
        valid: bool, same shape; None where every entry is.
    """
    s = sample(log_probs, valid)
    return LogProbStats(Min(s.where(math.inf).amin(-1)), Sum(s.nonfinite))


@dataclass(frozen=True, slots=True)
class GreedyAgreement(MetricGroup):
    """Whether the favourite actions stayed the same."""

    agreement: Mean = reports(
        Metric(
            key="policy/greedy_agreement",
            number=173,
            unit="fraction",
            question="In which share of the states does the policy still prefer the action it preferred before the update?",
            low=0.0,
            high=1.0,
            cost="sampled",
            healthy="> 0.9",
            warn="< 0.9",
            critical="< 0.7",
            source="heuristic; policy churn",
            undefined="no valid row, or a continuous head",
        )
    )


@torch.inference_mode()
def greedy_agreement(
    old_logits: Mapping[str, Tensor],
    logits: Mapping[str, Tensor],
    action_masks: Mapping[str, Tensor] | None = None,
    *,
    relevant: Mapping[str, Tensor] | None = None,
    valid: Tensor | None = None,
) -> GreedyAgreement:
    """Share of rows on which every head that takes part has the same favourite before and after.

    Args:
        old_logits, logits: per categorical head [.., A], before and after the update, same rows.
        action_masks: per head [.., A] bool; heads left out have no mask.
        relevant: per head [..] bool; heads left out always take part.
        valid: [..] bool; None where every row is.
    """
    masks, relevant = action_masks or {}, relevant or {}
    same = [_same_favourite(old_logits[h], x, masks.get(h), relevant.get(h)) for h, x in logits.items()]
    s = sample(torch.stack(same).all(0), valid)
    return GreedyAgreement(s.mean(s.values))


def _same_favourite(old: Tensor, new: Tensor, mask: Tensor | None, relevant: Tensor | None) -> Tensor:
    if mask is not None:
        old, new = (x.masked_fill(~mask.bool(), -torch.inf) for x in (old, new))
    same = old.argmax(-1) == new.argmax(-1)
    return same if relevant is None else same | ~relevant.bool()


@dataclass(frozen=True, slots=True)
class HistogramShift(Reduction):
    """Jensen-Shannon divergence of two histograms over ln 2: 0 for the same mix, 1 for disjoint ones.

    Attributes:
        counts, previous: [A], over the same actions.
    """

    counts: Tensor
    previous: Tensor

    statistics: ClassVar[Mapping[str, Statistic]] = {"shift": lambda s: _divergence(np.array(s).reshape(2, -1))}

    def slots(self) -> tuple[Slot, ...]:
        """All counts, then all previous counts."""
        return (*self.counts.unbind(-1), *self.previous.unbind(-1))

    @staticmethod
    def merge(rows: Array) -> Array:
        """Counts add."""
        merged: Array = rows.sum(axis=0)
        return merged


def _divergence(counts: Array) -> float:
    totals = counts.sum(axis=1, keepdims=True)
    if not totals.all():
        return NAN
    p = counts / totals
    return min(1.0, max(0.0, (_entropy(p.mean(axis=0)) - (_entropy(p[0]) + _entropy(p[1])) / 2) / math.log(2)))


def _entropy(p: Array) -> float:
    positive = p[p > 0]
    return float(-positive @ np.log(positive))


@dataclass(frozen=True, slots=True)
class ActionShift(MetricGroup):
    """How the mix of one head's actions changed since the last rollout."""

    head: str = label()
    shift: HistogramShift = reports(
        Metric(
            key="policy/head/{head}/action_shift_js",
            number=174,
            unit="fraction of ln 2",
            question="How much did the mix of this head's actions change since the last rollout?",
            low=0.0,
            high=1.0,
            healthy="< 0.02",
            warn="> 0.10",
            critical="> 0.25",
            source="measured on healthy and broken runs",
            undefined="the first rollout, or no action taken",
        )
    )


@torch.no_grad()
def action_counts(actions: Tensor, num_actions: int, *, valid: Tensor | None = None) -> Tensor:
    """How often each action was taken, [num_actions] float64.

    Args:
        actions: indices [..].
        num_actions: number of actions of the head.
        valid: [..] bool; None where every row is.
    """
    index = rows_of(actions, None).long()
    if index.is_cpu:
        counted = index if valid is None else index[rows_of(valid, None).bool()]
        return torch.bincount(counted, minlength=num_actions)[:num_actions].double()
    weight = torch.ones_like(index, dtype=torch.float64) if valid is None else rows_of(valid, None).double()
    counts = torch.zeros(num_actions, dtype=torch.float64, device=actions.device)
    return counts.scatter_add(0, torch.where(weight > 0, index, 0), weight)


def action_shift(head: str, counts: Tensor, previous: Tensor) -> ActionShift:
    """Divergence of this rollout's actions from the last one's; both [A], from `action_counts`."""
    return ActionShift(segment(head), HistogramShift(counts.detach(), previous.detach()))


@dataclass(frozen=True, slots=True)
class StandardizedShift(Reduction):
    """Mean over dimensions of the distance between two mean actions, in units of σ.

    Attributes:
        count: number of actions.
        previous_count: number of the last rollout's actions.
        total: [D] sum of the actions.
        previous: [D] sum of the last rollout's actions.
        spread: [D] σ that the distance is measured in, summed over the actions.
    """

    count: Slot
    previous_count: Slot
    total: Tensor
    previous: Tensor
    spread: Tensor

    statistics: ClassVar[Mapping[str, Statistic]] = {
        "shift": lambda s: _distance(s[0], s[1], np.array(s[2:]).reshape(3, -1))
    }

    def slots(self) -> tuple[Slot, ...]:
        """Both counts, then all three sums."""
        return (
            self.count, self.previous_count, *self.total.unbind(-1), *self.previous.unbind(-1), *self.spread.unbind(-1)
        )  # fmt: skip

    @staticmethod
    def merge(rows: Array) -> Array:
        """Counts and sums add, over ranks too, each of which knows its own last rollout."""
        merged: Array = rows.sum(axis=0)
        return merged


def _distance(count: float, previous_count: float, parts: Array) -> float:
    total, previous, spread = parts
    if not (count and previous_count and (spread > 0).all()):
        return NAN
    return float(np.mean(np.abs(total / count - previous / previous_count) / (spread / count)))


@dataclass(frozen=True, slots=True)
class GaussianShift(MetricGroup):
    """How far one continuous head's mean action moved since the last rollout."""

    head: str = label()
    shift: StandardizedShift = reports(
        Metric(
            key="policy/head/{head}/action_shift",
            number=175,
            unit="σ",
            question="How far did this head's mean action move since the last rollout, in its own standard deviations?",
            low=0.0,
            source="heuristic",
            undefined="the first rollout, or no action taken",
        )
    )


class ActionTotal(NamedTuple):
    """Actions of a continuous head in one rollout.

    Attributes:
        mean: [D] float64; 0 where there are none.
        number: how many there are, 0-d.
    """

    mean: Tensor
    number: Tensor


@torch.inference_mode()
def gaussian_action_shift(
    head: str,
    actions: Tensor,
    previous_mean: Tensor,
    std: Tensor,
    *,
    previous_count: Slot = 1.0,
    valid: Tensor | None = None,
) -> GaussianShift:
    """Distance of the mean action from the last rollout's.

    Args:
        head: name of the head.
        actions: [.., D].
        previous_mean: [D] mean action of the last rollout.
        std: [D] or [.., D] standard deviations of the policy.
        previous_count: how many actions that is the mean of; matters where several processes know one each.
        valid: [..] bool; None where every row is.
    """
    total, count = _total_action(actions, valid)
    spread = std.detach().double()
    spread = spread * count if spread.ndim == 1 else _total_action(spread, valid)[0]
    previous = previous_mean.detach().double() * previous_count
    return GaussianShift(segment(head), StandardizedShift(count, previous_count, total, previous, spread))


@torch.no_grad()
def mean_action(actions: Tensor, *, valid: Tensor | None = None) -> ActionTotal:
    """Mean of the valid, finite rows of actions [.., D], and their number."""
    total, count = _total_action(actions, valid)
    return ActionTotal(total / count.clamp(min=1), count)


def _total_action(actions: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum [D] and number of the valid, finite rows."""
    rows = actions.detach().double().reshape(-1, actions.shape[-1])
    kept = (rows.abs() < math.inf).all(-1)
    if valid is not None:
        kept &= rows_of(valid, None).bool()
    return torch.where(kept.unsqueeze(-1), rows, 0.0).sum(0), kept.sum()
