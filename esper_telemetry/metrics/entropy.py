"""Entropy of the policy, with action masks, relevance masks and several heads, and the gradient of the entropy bonus.

A head of a factored policy is *relevant* in the rows in which its choice has an effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from esper_telemetry.core.arrays import ArrayLike, as_mask, by_head, masks_by_head
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, no_grad, torch
from esper_telemetry.core.metric import Metric, label, reports, segment
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import NAN, Array, Mean, Reduction, Slot, Statistic, Sum
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.metrics.statistics import Sample, keep, rows_of, same_shape, sample


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Entropy of one head for every row: the input of the joint and of the per-head group.

    Attributes:
        entropy: [..] nats.
        uniform: [..] float64, ln of the number of valid actions, or one number for all rows; None for a continuous head.
        probabilities: [A, ..], actions first; None for a continuous head.
        allowed: [A, ..] bool, valid actions; None if all are valid.
        relevant: [..] bool, rows in which the head takes part; None if it always does.
    """

    entropy: Tensor
    uniform: Tensor | float | None = None
    probabilities: Tensor | None = None
    allowed: Tensor | None = None
    relevant: Tensor | None = None


@no_grad
def categorical_rows(logits: Tensor, action_mask: Tensor | None = None, *, relevant: Tensor | None = None) -> HeadRows:
    """Return the entropy -Σ p ln p over the valid actions of every row.

    Args:
        logits: [.., A]; masked actions may have any value.
        action_mask: [.., A] bool, True for a valid action; None if all are valid.
        relevant: [..] bool, rows in which the head takes part; None if it always does.
    """
    same_shape(logits=logits, action_mask=action_mask)
    x = _actions_first(logits.detach() if logits.dtype == torch.float64 else logits.detach().float())
    if action_mask is None:
        log_p = torch.log_softmax(x, 0)
        p = log_p.exp()
        return HeadRows(_plogp(p, log_p), math.log(x.shape[0]), p, None, relevant)
    allowed = _actions_first(action_mask.bool())
    log_p = torch.log_softmax(x.masked_fill_(~allowed, torch.finfo(x.dtype).min), 0)
    p = log_p.exp() * allowed
    largest = allowed.sum(0, dtype=torch.float64).clamp_(min=1).log_()
    return HeadRows(_plogp(p, log_p), largest, p, allowed, relevant)


def _actions_first(x: Tensor) -> Tensor:
    """Return [A, ..] from [.., A], copied: softmax over a short last axis is ten times slower."""
    return x.movedim(-1, 0).clone(memory_format=torch.contiguous_format)


def _plogp(p: Tensor, log_p: Tensor) -> Tensor:
    return -(p * log_p.clamp(min=_LOWEST)).sum(0)


_LOWEST = -1e30
"""Replaces ln 0, so that 0 ln 0 is 0; e^-1e30 is 0 in every precision."""


@no_grad
def gaussian_rows(log_std: Tensor, *, relevant: Tensor | None = None) -> HeadRows:
    """Return the differential entropy Σ_d (ln σ_d + ½ ln 2πe) of a diagonal Gaussian head, in nats; it may be negative.

    Args:
        log_std: [.., D]; if σ does not depend on the state, one row is enough: [D] or [M, 1, D].
        relevant: [..] bool, rows in which the head takes part; None if it always does.
    """
    return HeadRows((log_std.detach().double() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1), relevant=relevant)


@checked_arguments()
@inference_mode
def entropy_rows(
    logits: Mapping[str, ArrayLike],
    action_masks: Mapping[str, ArrayLike] | None = None,
    *,
    log_std: Mapping[str, ArrayLike] | None = None,
    relevant: Mapping[str, ArrayLike] | None = None,
) -> dict[str, HeadRows]:
    """Return the entropy of every head for every row, the input of `policy_entropy` and `head_entropy`.

    Args:
        logits: per categorical head [.., A].
        action_masks: per categorical head [.., A] bool; other heads are not masked.
        log_std: per Gaussian head [.., D].
        relevant: per head [..] bool; other heads always take part.
    """
    masks, relevance = masks_by_head(action_masks), masks_by_head(relevant)
    by_name = by_head(logits)
    categorical = by_name.items()
    for head, x in categorical:
        if head in relevance and relevance[head].shape != x.shape[:-1]:
            shapes = f"{list(relevance[head].shape)} for logits {list(x.shape)}"
            raise ValueError(f"relevant must have a number for every row of logits, got {shapes} of head {head!r}")
    rows = {}
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[str]] = {}
    for head, x in categorical:
        if head in masks or head in relevance:
            rows[head] = categorical_rows(x, masks.get(head), relevant=relevance.get(head))
        else:
            alike.setdefault((x.shape, x.dtype, x.device), []).append(head)
    for names in alike.values():  # one call for all heads of a size, as each call has a fixed cost
        together = categorical_rows(torch.stack([by_name[head] for head in names]))
        entropy, probabilities = together.entropy.unbind(), cast(Tensor, together.probabilities).unbind(1)
        rows |= {head: HeadRows(x, together.uniform, p) for head, x, p in zip(names, entropy, probabilities, strict=True)}
    rows = {head: rows[head] for head in by_name}
    for head, x in by_head(log_std).items():
        rows[head] = gaussian_rows(x, relevant=relevance.get(head))
    if not rows:
        raise ValueError("a policy must have at least one head, got none")
    return rows


@dataclass(frozen=True, slots=True)
class MeanEntropy(Mean):
    """A mean entropy. If all heads are categorical, `perplexity` is its exponential, the effective number of actions."""

    continuous: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {
        **Mean.statistics,
        "perplexity": lambda s: math.exp(s[0] / s[1]) if s[1] and not s[2] else NAN,
    }


@dataclass(frozen=True, slots=True)
class Marginals(Reduction):
    """Action probabilities of each head, summed over states; they give the entropy of the mean policy.

    The slots begin with the number of heads and their numbers of actions. Then follow the rows, the sum of their entropies, and for each
    head its rows, the summed probabilities and the number of rows in which each action was valid.

    Attributes:
        rows: [..] rows that count.
        entropy: [..] sum of their entropies over rows and heads.
        head_rows: per head [..], rows in which it took part.
        probabilities: per head [A, ..], summed over rows.
        allowed: per head [A, ..], rows in which the action was valid.
    """

    rows: Tensor
    entropy: Tensor
    head_rows: tuple[Tensor, ...]
    probabilities: tuple[Tensor, ...]
    allowed: tuple[Tensor, ...]

    statistics: ClassVar[Mapping[str, Statistic]] = {
        "entropy": lambda s: _over_heads(s).entropy,
        "normalized": lambda s: _over_heads(s).normalized,
        "information": lambda s: _over_heads(s).information,
    }

    def slots(self) -> tuple[Slot, ...]:
        """Return the header, then the slots of each head."""
        parts: list[Slot] = [float(len(self.probabilities)), *(float(len(p)) for p in self.probabilities)]
        parts += [self.rows, self.entropy]
        for rows, p, allowed in zip(self.head_rows, self.probabilities, self.allowed, strict=True):
            parts += [rows, *p.unbind(), *allowed.unbind()]
        return tuple(parts)

    @staticmethod
    def merge(rows: Array) -> Array:
        """Add everything but the header."""
        merged: Array = rows.sum(axis=0)
        header = 1 + int(rows[0, 0, 0])
        merged[:, :header] = rows[0, :, :header]
        return merged


class MarginalEntropy(NamedTuple):
    """Entropy of the mean policy in nats, as a fraction of its maximum, and minus the mean entropy."""

    entropy: float
    normalized: float
    information: float


def _over_heads(slots: Sequence[float]) -> MarginalEntropy:
    """Return sums over heads, each weighted by the share of rows in which it is relevant; NaN if undefined."""
    sizes = [int(size) for size in slots[1 : 1 + int(slots[0])]]
    rows, entropy = slots[1 + len(sizes) : 3 + len(sizes)]
    if not rows:
        return MarginalEntropy(NAN, NAN, NAN)
    marginal = largest = 0.0
    start = 3 + len(sizes)
    for size in sizes:  # for each head: its rows, summed probabilities and counts of validity
        middle, end = start + 1 + size, start + 1 + 2 * size
        head_rows, p, allowed = slots[start], np.array(slots[start + 1 : middle]), np.array(slots[middle:end])
        start = end
        positive = p[p > 0] / head_rows
        marginal -= head_rows / rows * float(positive @ np.log(positive))
        largest += head_rows / rows * math.log(max(1, int((allowed > 0).sum())))
    return MarginalEntropy(marginal, min(1.0, marginal / largest) if largest else NAN, max(0.0, marginal - entropy / rows))


@dataclass(frozen=True, slots=True)
class PolicyEntropy(MetricGroup, absent="no valid row, or a continuous head"):
    """Entropy of the whole policy: in each row, the sum over the heads that take part."""

    entropy: MeanEntropy = reports(
        Metric.nats("policy/entropy", 131, "entropy", low=None)
        .asks("How undecided is the policy, state by state? Continuous actions have a differential entropy, which may be negative.")
        .bounds(healthy="falls slowly, then flattens", source="Jones 2021")
        .absent("no valid, finite row"),
        Metric.quantity("policy/perplexity", 132, "perplexity", unit="actions", low=1.0, of="perplexity").asks(
            "Between how many equally likely actions does the policy effectively choose?"
        ),
    )
    normalized: Mean | None = reports(
        Metric.fraction("policy/entropy_norm", 133, "normalised entropy", unit="fraction of ln n_valid", level=Level.MINIMAL)
        .asks("How undecided is the policy, as a share of the maximum? Rows with a single valid action do not count.")
        .bounds(
            healthy="> 0.3; lower is fine once the task is solved",
            warn="< 0.3 with policy/entropy_marginal_norm < 0.5",
            critical="< 0.1 with policy/entropy_marginal_norm < 0.5",
            source="bounds of esper-lite; solved runs end at .05-.08 with marginal .96-.99",
        )
        .absent("every row has only one valid action, or the head is continuous")
    )
    marginals: Marginals | None = reports(
        Metric.nats("policy/entropy_marginal", 134, "entropy of the mix of actions", of="entropy").asks(
            "How varied are the policy's actions over all states together?"
        ),
        Metric.fraction(
            "policy/entropy_marginal_norm",
            135,
            "normalised entropy of the mix of actions",
            unit="fraction of ln n",
            of="normalized",
            level=Level.MINIMAL,
        )
        .asks(
            "How varied are the policy's actions over all states, as a share of the maximum? If policy/entropy_norm is low too, "
            "the policy does the same everywhere."
        )
        .bounds(healthy="> 0.5", warn="< 0.5", critical="< 0.2 with low policy/entropy_norm", source="heuristic")
        .absent("every row has only one valid action, or the head is continuous"),
        Metric.nats("policy/action_mi", 136, "information of the state about the action", of="information")
        .asks("How much does the action depend on the state? Rising: skill. Falling to 0 with low entropy: collapse.")
        .bounds(source="I(S; A) = H(mean π) - mean H(π)"),
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("policy/entropy_nonfinite", 137, "non-finite inputs of entropy")
        .asks("In how many valid rows was the entropy NaN or infinite?")
        .absent("in none")
    )


@dataclass(frozen=True, slots=True)
class HeadEntropy(MetricGroup):
    """Entropy of one head in the rows in which it takes part."""

    head: tuple[str, ...] = label()
    entropy: Mean = reports(
        Metric.nats("policy/head/{head}/entropy", 138, "entropy of a head", low=None)
        .asks("How undecided is this head when it takes part?")
        .absent("no valid, finite row")
    )
    normalized: Mean = reports(
        Metric.fraction("policy/head/{head}/entropy_norm", 139, "normalised entropy of a head", unit="fraction of ln n_valid")
        .asks("How undecided is this head, as a share of the maximum, when it has a choice?")
        .bounds(
            healthy="> 0.3; lower is fine once the task is solved",
            warn="< 0.3 with policy/head/{head}/entropy_marginal_norm < 0.5",
            critical="< 0.1 with policy/head/{head}/entropy_marginal_norm < 0.5",
            source="as policy/entropy_norm",
        )
        .absent("every row has only one valid action, or the head is continuous")
        .changed("after 0.2.0: bounds hold only for a small `policy/head/{head}/entropy_marginal_norm`")
    )
    decision: Mean = reports(
        Metric.fraction("policy/head/{head}/decision_frac", 140, "share of rows in which a head decides")
        .asks("In what share of the rows does this head really have a choice?")
        .bounds(warn="< 0.05: its statistics are noise", source="heuristic")
        .absent("no valid row, or a continuous head")
    )


@dataclass(frozen=True, slots=True)
class HeadMix(MetricGroup):
    """Action mix of one head over all states in which it takes part."""

    head: str = label()
    marginals: Marginals = reports(
        Metric.fraction(
            "policy/head/{head}/entropy_marginal_norm",
            868,
            "normalised entropy of the mix of a head's actions",
            unit="fraction of ln n",
            of="normalized",
        )
        .asks("How varied are this head's actions over all states, as a share of the maximum?")
        .bounds(healthy="> 0.5", warn="< 0.5 with a low policy/head/{head}/entropy_norm", source="as policy/entropy_marginal_norm")
        .absent("the policy has one head, or the head never has a choice")
    )


@checked_arguments()
def entropy_stats(
    logits: Mapping[str, ArrayLike],
    action_masks: Mapping[str, ArrayLike] | None = None,
    *,
    log_std: Mapping[str, ArrayLike] | None = None,
    relevant: Mapping[str, ArrayLike] | None = None,
    valid: ArrayLike | None = None,
    dim: int | None = None,
) -> PolicyEntropy:
    """Return the entropy of the whole policy: `policy_entropy` of `entropy_rows`, which take these arguments."""
    rows = entropy_rows(logits, action_masks, log_std=log_std, relevant=relevant)
    return policy_entropy(rows, valid=valid, dim=dim)


@checked_arguments()
@inference_mode
def policy_entropy(heads: Mapping[str, HeadRows], *, valid: ArrayLike | None = None, dim: int | None = None) -> PolicyEntropy:
    """Return the entropy of the joint policy: in each row, the sum over its relevant heads.

    Args:
        heads: rows [N] or [M, N] of every head, from `entropy_rows`.
        valid: bool, same shape as the rows; None if every row is valid.
        dim: None reduces all rows to one, -1 keeps the leading axis as optimizer steps.
    """
    valid = as_mask(valid)
    flat = _aligned(list(heads.values()), valid, dim)
    discrete = [head for head in flat if head.probabilities is not None]
    joint = sample(_total(flat, _entropy), None if valid is None else rows_of(valid, dim), dim=-1)
    continuous = len(discrete) < len(flat)
    chosen = joint
    if continuous and discrete:
        chosen = joint._replace(values=torch.where(joint.mask, _total(discrete, _entropy).double(), 0.0))
    marginals = None
    if discrete:
        rows, sums, allowed = zip(*(_marginal(head, chosen) for head in discrete), strict=True)
        marginals = Marginals(chosen.count, chosen.values.sum(-1), rows, sums, allowed)
    return PolicyEntropy(
        entropy=MeanEntropy(joint.values.sum(-1), joint.count, joint.count if continuous else 0.0),
        normalized=_normalized(discrete, chosen) if discrete else None,
        marginals=marginals,
        nonfinite=Sum(joint.nonfinite),
    )


@checked_arguments()
@inference_mode
def head_entropy(heads: Mapping[str, HeadRows], *, valid: ArrayLike | None = None, dim: int | None = None) -> HeadEntropy:
    """Return the entropy of every head over the rows in which it is relevant; arguments as for `policy_entropy`."""
    valid = as_mask(valid)
    flat = _aligned(list(heads.values()), valid, dim)
    allowed = None if valid is None else rows_of(valid, dim)
    parts = [_head_means(head, allowed) for head in flat]
    return HeadEntropy(tuple(map(segment, heads)), *map(_side_by_side, zip(*parts, strict=True)))


@inference_mode
def head_mix(name: str, heads: Mapping[str, HeadRows], *, valid: ArrayLike | None = None, dim: int | None = None) -> HeadMix:
    """Return the action mix of a categorical head; other arguments as for `policy_entropy`."""
    valid = as_mask(valid)
    (head,) = _aligned([heads[name]], valid, dim)
    chosen = sample(_entropy(head), None if valid is None else rows_of(valid, dim), dim=-1)
    rows, sums, allowed = _marginal(head, chosen)
    return HeadMix(segment(name), Marginals(chosen.count, chosen.values.sum(-1), (rows,), (sums,), (allowed,)))


def _head_means(head: HeadRows, allowed: Tensor | None) -> tuple[Mean, Mean, Mean]:
    """Return mean entropy and mean normalised entropy of the rows that count, and the share of all rows with a choice."""
    every = keep(_entropy(head).double(), allowed)
    took_part = every.mask if head.relevant is None else every.mask & head.relevant
    entropy = Mean(every.values.sum(-1), took_part.sum(-1))
    if head.uniform is None:
        nothing = torch.zeros_like(every.count)
        return entropy, Mean(nothing, nothing), Mean(nothing, nothing)
    largest = head.uniform * took_part
    choice = largest > 0
    share = torch.where(choice, every.values / largest, 0.0).clamp_(max=1)
    decisions = choice.sum(-1)
    return entropy, Mean(share.sum(-1), decisions), Mean(decisions, every.count)


def _side_by_side(means: Sequence[Mean]) -> Mean:
    """Return means of single heads as one mean of [.., H]."""
    totals = [torch.as_tensor(mean.total, dtype=torch.float64) for mean in means]
    counts = [torch.as_tensor(mean.count, dtype=torch.float64) for mean in means]
    return Mean(torch.stack(totals, -1), torch.stack(counts, -1))


def _aligned(heads: Sequence[HeadRows], valid: Tensor | None, dim: int | None) -> list[HeadRows]:
    """Return all heads with the same rows: a single row for all is expanded."""
    shapes = [head.entropy.shape for head in heads] + ([] if valid is None else [valid.shape])
    shape = max(shapes, key=lambda candidate: candidate.numel())
    try:
        rows = [head.entropy.expand(shape) for head in heads]
    except RuntimeError:
        rows = []
    if not rows or (valid is not None and valid.shape != shape):
        raise ValueError(f"all heads and valid must have the same rows, got shapes {[list(shape) for shape in shapes]}")
    if dim not in (None, -1, len(shape) - 1):
        raise ValueError(f"dim must be -1 or None, got {dim}")
    aligned = [replace(head, entropy=x) for head, x in zip(heads, rows, strict=True)]
    return aligned if dim is not None else [_on_one_axis(head) for head in aligned]


def _on_one_axis(head: HeadRows) -> HeadRows:
    """Return the head with all its rows on one axis."""
    return HeadRows(
        head.entropy.reshape(-1),
        head.uniform.reshape(-1) if isinstance(head.uniform, Tensor) else head.uniform,
        None if head.probabilities is None else head.probabilities.reshape(len(head.probabilities), -1),
        None if head.allowed is None else head.allowed.reshape(len(head.allowed), -1),
        None if head.relevant is None else head.relevant.reshape(-1),
    )


def _entropy(head: HeadRows) -> Tensor:
    """Return the entropy [.., N] of the head, zero in irrelevant rows."""
    return head.entropy if head.relevant is None else torch.where(head.relevant, head.entropy, 0.0)


def _largest(head: HeadRows) -> Tensor | float:
    """Return the maximum entropy [.., N], zero in irrelevant rows."""
    uniform = head.uniform or 0.0 if not isinstance(head.uniform, Tensor) else head.uniform
    return uniform if head.relevant is None else uniform * head.relevant


def _total(heads: Sequence[HeadRows], read: Callable[[HeadRows], Any]) -> Any:
    total = read(heads[0])
    for head in heads[1:]:
        total = total + read(head)
    return total


def _normalized(heads: Sequence[HeadRows], joint: Sample) -> Mean:
    """Return the mean, over rows with a choice, of the entropy divided by its maximum; a forced action adds 0 to both."""
    largest = _total(heads, _largest)
    if not isinstance(largest, Tensor):
        if largest == 0:
            return Mean(0.0, 0.0)
        return Mean(torch.minimum(joint.values.sum(-1) / largest, joint.count), joint.count)  # rounding may exceed 1
    choice = joint.mask & (largest > 0)
    return Mean(torch.where(choice, joint.values / largest, 0.0).clamp_(max=1).sum(-1), choice.sum(-1))


def _marginal(head: HeadRows, joint: Sample) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows [..] in which the head took part, and probabilities and validity [A, ..] summed over them."""
    mask = joint.mask if head.relevant is None else joint.mask & head.relevant
    rows = joint.count if head.relevant is None else mask.sum(-1)
    sums = _over_rows(head.probabilities, mask)
    return rows, sums, rows.expand_as(sums) if head.allowed is None else _over_rows(head.allowed, mask)


def _over_rows(x: Tensor | None, mask: Tensor) -> Tensor:
    """Return the sum [A, ..] of `x` [A, .., N] over the rows of the mask."""
    if x is None:
        raise ValueError("action probabilities need a categorical head, got a continuous one")
    return torch.where(mask, x, 0).sum(-1, dtype=torch.float64)
