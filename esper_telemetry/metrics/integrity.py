"""Identities that hold in every correct trainer: any violation is a bug, and shows at once, without history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor, as_tensors, by_head, masks_by_head
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, MetricFamily, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Max, Mean, Reduction, Slot, Statistic, Sum
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.metrics.statistics import Sample, deviations, keep, rows_of, same_shape, sample, where_any

INTEGRITY_FAMILY = MetricFamily(
    "integrity",
    "Integrity",
    "Identities that hold exactly in a correct trainer, for every task. They do not depend on history and give zero false "
    "alarms: any value other than about 0 is a bug, even while the return still rises.",
    place=70,
    question="Does the update compute what it should?",
    first=("integrity/ratio_init", "integrity/gae_identity", "integrity/adv_norm"),
)
NUMERICS_FAMILY = MetricFamily(
    "numerics",
    "Numerics",
    "NaN and infinite numbers, wherever they appear.",
    place=100,
    question="Are all numbers finite?",
    first=("numerics/nonfinite",),
)
BUFFER_FAMILY = MetricFamily(
    "buffer",
    "Buffer",
    "Age of the data: how many updates ago the policy that collected a batch was replaced.",
    place=210,
    question="How old is the data?",
)


@dataclass(frozen=True, slots=True)
class RelativeError(Reduction):
    """Largest error divided by the largest magnitude, or by 1 if that is smaller; NaN without data."""

    error: Slot
    scale: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"relative": lambda s: s[0] / max(1.0, s[1])}
    merge = staticmethod(Max.merge)


@dataclass(frozen=True, slots=True)
class GaeIdentity(MetricGroup):
    """Agreement of advantages, values and returns."""

    error: RelativeError = reports(
        Metric.magnitude(
            "integrity/gae_identity", 803, "advantages plus values against returns", unit="relative error", level=Level.MINIMAL
        )
        .asks("Are the returns advantages plus values, A + V = R, as they must be? Otherwise the buffer holds stale or shuffled rows.")
        .bounds(healthy="< 1e-5", critical="> 1e-4", source="identity of GAE, 1506.02438")
        .absent("no valid row, or targets that are not A + V (PopArt, separate targets)")
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("integrity/gae_identity_nonfinite", 804, "non-finite inputs of advantages plus values against returns")
        .asks("How many valid rows held a NaN or an infinity in advantage, value or return?")
        .absent("none did")
    )


MIN_NORMALIZED_ROWS = 8
"""Minimum number of rows to recognise advantages as normalised over all of them; with fewer, any might be."""


@checked_arguments()
@inference_mode
def gae_identity(advantages: ArrayLike, values: ArrayLike, returns: ArrayLike, *, valid: ArrayLike | None = None) -> GaeIdentity:
    """Return max|A + V - R| / max(1, max|R|) over the rows about to be used.

    Advantages that were normalised over all rows after the returns were computed are compared as A = (R - V - mean) / std.

    Args:
        advantages: before minibatches are normalised, [T, B] or [N].
        values: critic's estimates at collection, same shape.
        returns: regression targets, same shape.
        valid: bool, same shape; None if every entry is valid.
    """
    advantages = as_tensor(advantages)
    values, returns = as_tensor(values, advantages), as_tensor(returns, advantages)
    valid = as_mask(valid, advantages)
    same_shape(advantages=advantages, values=values, returns=returns, valid=valid)
    s = sample(advantages.detach().double() + values.detach().double() - returns.detach().double(), valid)
    scale = keep(rows_of(returns, None).double(), s.mask).values.abs().amax(-1)
    largest = s.values.abs().amax(-1)
    if len(s.values) >= MIN_NORMALIZED_ROWS:
        largest = torch.minimum(largest, _normalized_error(advantages, returns.detach().double() - values, s))
    error = where_any(largest, s.count)
    return GaeIdentity(RelativeError(error, scale), Sum(s.nonfinite))


def _normalized_error(advantages: Tensor, estimates: Tensor, s: Sample) -> Tensor:
    """Return the largest error, 0-d, of advantages that are the normalised estimates R - V; infinity if they are not normalised."""
    stored, raw = (keep(rows_of(x, None).double(), s.mask) for x in (advantages, estimates))
    (mean, distances), (raw_mean, raw_distances) = deviations(stored), deviations(raw)
    count = s.count.clamp(min=2)
    std = (distances.square().sum(-1) / count).sqrt()
    normalized = (mean.abs() < 0.1) & ((std - 1).abs() < 0.1) & (s.count >= MIN_NORMALIZED_ROWS)
    squares = raw_distances.square().sum(-1)
    errors = [
        ((stored.values * (squares / divisor).sqrt() + raw_mean - raw.values) * s.weight).abs().amax(-1)
        for divisor in (count, count - 1)  # a biased and an unbiased standard deviation
    ]
    return torch.where(normalized, torch.minimum(*errors), torch.inf)


@dataclass(frozen=True, slots=True)
class MaskViolation(MetricGroup):
    """Chosen actions that their mask forbids."""

    count: Sum = reports(
        Metric.count("integrity/mask_violation", 805, "forbidden actions", level=Level.MINIMAL)
        .asks("How many of the actions taken were forbidden by their action mask?")
        .bounds(healthy="0", critical="> 0", source="identity")
    )


@checked_arguments()
@inference_mode
def mask_violation(
    actions: Mapping[str, ArrayLike],
    action_masks: Mapping[str, ArrayLike],
    *,
    relevant: Mapping[str, ArrayLike] | None = None,
    valid: ArrayLike | None = None,
) -> MaskViolation:
    """Return the number of chosen actions that are masked, in rows in which their head is relevant.

    Args:
        actions: per categorical head, indices [..].
        action_masks: per head, [.., A] bool; heads without a mask are left out.
        relevant: per head, [..] bool: rows in which the head takes part; other heads always take part.
        valid: [..] bool; None if every row is valid.
    """
    chosen, relevance, rows = by_head(actions), masks_by_head(relevant), as_mask(valid)
    masks = masks_by_head(action_masks)
    for head in masks:
        if head not in chosen:
            raise ValueError(f"head {head!r} has a mask but lacks actions: heads with actions are {[*chosen]}")
    counts = [_violations(chosen[head], mask, relevance.get(head), rows) for head, mask in masks.items()]
    return MaskViolation(Sum(torch.stack(counts).sum() if counts else 0.0))


def _violations(actions: Tensor, mask: Tensor, relevant: Tensor | None, valid: Tensor | None) -> Tensor:
    if mask.shape[:-1] != actions.shape:
        raise ValueError(f"a mask must have the shape of its actions and one more axis, got {list(mask.shape)} and {list(actions.shape)}")
    same_shape(actions=actions, relevant=relevant, valid=valid)
    forbidden = ~mask.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)
    for condition in (relevant, valid):
        if condition is not None:
            forbidden = forbidden & condition
    return forbidden.sum()


@dataclass(frozen=True, slots=True)
class BufferAge(MetricGroup):
    """Age of the data in policy updates."""

    age: Max = reports(
        Metric.magnitude("buffer/age_updates", 806, "age of the data", unit="updates", level=Level.MINIMAL)
        .asks("How many policy updates ago were the oldest of these data collected?")
        .bounds(healthy="0 (on-policy)", critical="> 0, unless the trainer reuses data on purpose", source="Jones 2021, sample staleness")
    )


@checked_arguments()
def buffer_age(policy_version: int, collected_at: int) -> BufferAge:
    """Return the difference between the present policy version and the version that collected the oldest data in the buffer."""
    return BufferAge(Max(float(policy_version - collected_at)))


@dataclass(frozen=True, slots=True)
class RowsRepeated(MetricGroup):
    """Transitions that occur repeatedly in one pass over the rollout."""

    share: Mean | None = reports(
        Metric.fraction("integrity/rows_repeated", 808, "rows that come again in a pass", unit="share", level=Level.MINIMAL)
        .asks("What share of the rows in the first pass over the rollout had already occurred in that pass? Other rows were then left out.")
        .bounds(
            healthy="0",
            warn="0.37, which is drawing with replacement",
            critical="> 0.45",
            source="a pass is a permutation of the rollout, 1707.06347",
        )
        .absent("the trainer does not say which transitions the rows are")
    )


@checked_arguments()
@inference_mode
def rows_repeated(rows: ArrayLike, *, valid: ArrayLike | None = None) -> RowsRepeated:
    """Return the share of the rows of a pass whose transition occurred earlier in it: 0 if each occurs once.

    Args:
        rows: numbers of transitions, any shape, from 0.
        valid: bool, same shape; None if every entry is valid.
    """
    rows = as_tensor(rows)
    valid = as_mask(valid, rows)
    same_shape(rows=rows, valid=valid)
    numbers = rows.flatten() if valid is None else rows.masked_fill(~valid, -1).flatten()
    if not numbers.numel():
        return RowsRepeated(None)
    ordered = numbers.sort().values
    counted = ordered >= 0
    repeated = (ordered[1:] == ordered[:-1]) & counted[1:]
    return RowsRepeated(Mean(repeated.sum(), counted.sum()))


@dataclass(frozen=True, slots=True)
class Numerics(MetricGroup):
    """Numbers that are NaN or infinite."""

    nonfinite: Sum = reports(
        Metric.count("numerics/nonfinite", 807, "numbers that are not finite", level=Level.MINIMAL)
        .asks("How many NaN or infinite numbers are in the data, losses, gradients or weights of this update?")
        .bounds(healthy="0", critical="> 0", source="always an error; ray#28283")
    )


@checked_arguments()
@inference_mode
def nonfinite_count(tensors: Iterable[ArrayLike], *, valid: ArrayLike | None = None) -> Numerics:
    """Return the number of NaN and infinite entries in all `tensors` together; masked entries do not count.

    Args:
        tensors: any shapes; tensors with the shape of `valid` are masked by it.
        valid: bool; None if every entry is valid.
    """
    mask = as_mask(valid)
    counts = []
    for x in as_tensors(tensors):
        bad = ~torch.isfinite(x.detach())
        counts.append((bad & mask if mask is not None and mask.shape == bad.shape else bad).sum())
    return Numerics(Sum(torch.stack(counts).sum() if counts else 0.0))
