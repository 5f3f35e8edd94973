"""Exact KL divergence of the update, from whole distributions instead of sampled actions, and so without Monte-Carlo noise.

It is sampled: it needs another pass of the policy over the rollout, or columns that would double the payload of an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, no_grad, torch
from esper_telemetry.core.metric import Metric, label, reports, segment
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Mean, Sum
from esper_telemetry.metrics.ratio import MOVED_TOO_FAR, joint_log_ratio
from esper_telemetry.metrics.statistics import keep, rows_of, same_shape, sample


@dataclass(frozen=True, slots=True)
class ExactKl(MetricGroup, cost="sampled"):
    """KL(old‖new) of the joint policy."""

    kl: Mean = reports(
        Metric.nats("policy/kl_exact", 161, "KL divergence over all actions")
        .asks("How far did the update move the policy, over all actions and not only the chosen ones?")
        .bounds(healthy="0.002 to 0.02", warn="> 0.03", critical="> 0.1", source="as policy/kl")
        .absent("no valid, finite row, or the trainer does not keep old distributions")
        .advises(MOVED_TOO_FAR)
    )
    nonfinite: Sum = reports(
        Metric.count(
            "policy/kl_exact_nonfinite", 162, "non-finite inputs of KL divergence over all actions", level=Level.MINIMAL, when_positive=True
        )
        .asks("In how many valid rows was the exact KL NaN or infinite?")
        .bounds(healthy="absent", critical="> 0")
        .absent("in none")
    )


@dataclass(frozen=True, slots=True)
class HeadExactKl(MetricGroup):
    """KL(old‖new) of every head, in the rows in which it takes part."""

    head: tuple[str, ...] = label()
    kl: Mean = reports(
        Metric.nats("policy/head/{head}/kl_exact", 163, "KL divergence of a head over all its actions", cost="sampled")
        .asks("How far did the update move this head, over all its actions?")
        .bounds(healthy="0.002 to 0.02", warn="> 0.03", critical="> 0.1", source="as policy/kl")
        .absent("no valid, finite row, or the trainer does not keep old distributions")
        .advises(MOVED_TOO_FAR)
    )


@dataclass(frozen=True, slots=True)
class KlAfterUpdate(MetricGroup):
    """KL(old‖new) after the last optimizer step."""

    kl: Mean = reports(
        Metric.nats("policy/kl_post", 164, "KL divergence after the update", cost="sampled")
        .asks("How far did the whole update move the policy in the end?")
        .bounds(healthy="0.002 to 0.02", warn="> 0.03", critical="> 0.1", source="as policy/kl")
        .absent("no valid, finite row, or the trainer does not keep old distributions")
        .advises(MOVED_TOO_FAR)
    )


@no_grad
def categorical_kl(old_logits: Tensor, logits: Tensor) -> Tensor:
    """Return Σ_a p_old (ln p_old - ln p_new), [..] nats, of logits or log-probabilities [.., A] at collection and now.

    An action that was impossible adds 0.
    """
    same_shape(old_logits=old_logits, logits=logits)
    old, new = (torch.log_softmax(x.detach().double(), -1) for x in (old_logits, logits))
    p = old.exp()
    return torch.where(p > 0, p * (old - new), 0.0).sum(-1)


@no_grad
def gaussian_kl(old_mean: Tensor, old_log_std: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the sum over dimensions of ln(σ'/σ) + (σ² + (μ - μ')²) / 2σ'² - ½, [..] nats. All [.., D]."""
    ratio = (old_log_std.detach().double() - log_std.detach().double()).exp()
    shift = (old_mean.detach().double() - mean.detach().double()) / log_std.detach().double().exp()
    return ((ratio.square() + shift.square() - 1) / 2 - ratio.log()).sum(-1)


@inference_mode
def exact_kl(
    rows: Mapping[str, Tensor], *, relevant: Mapping[str, Tensor] | None = None, valid: Tensor | None = None, dim: int | None = None
) -> ExactKl:
    """Return the exact KL of the joint policy: the sum over the relevant heads.

    Args:
        rows: per head [N] or [M, N], from `categorical_kl` or `gaussian_kl`.
        relevant: per head, bool, same shape; other heads always take part.
        valid: bool, same shape; None if every row is valid.
        dim: axis to reduce; None reduces all axes to one row, -1 keeps the leading axis as optimizer steps.
    """
    mean, nonfinite = _joint(rows, relevant, valid, dim)
    return ExactKl(mean, nonfinite)


@inference_mode
def kl_after_update(rows: Mapping[str, Tensor], relevant: Mapping[str, Tensor] | None = None) -> KlAfterUpdate:
    """Return the exact KL of a forward pass after the last optimizer step."""
    return KlAfterUpdate(joint_kl(rows, relevant))


@inference_mode
def joint_kl(rows: Mapping[str, Tensor], relevant: Mapping[str, Tensor] | None = None) -> Mean:
    """Return the mean over rows of the joint policy's KL; arguments as for `exact_kl`."""
    return _joint(rows, relevant, None, None)[0]


def _joint(rows: Mapping[str, Tensor], relevant: Mapping[str, Tensor] | None, valid: Tensor | None, dim: int | None) -> tuple[Mean, Sum]:
    s = sample(joint_log_ratio(rows, relevant), valid, dim=dim)  # a sum over heads, as for log-ratios
    return s.mean(s.values), Sum(s.nonfinite)


@inference_mode
def head_exact_kl(
    rows: Mapping[str, Tensor], *, relevant: Mapping[str, Tensor] | None = None, valid: Tensor | None = None, dim: int | None = None
) -> HeadExactKl:
    """Return the exact KL of every head in the rows in which it is relevant; arguments as for `exact_kl`."""
    totals, counts = [], []
    for head, x in rows.items():
        masks = [rows_of(mask, dim).bool() for mask in ((relevant or {}).get(head), valid) if mask is not None]
        s = keep(rows_of(x, dim).double(), torch.stack(masks).all(0) if masks else None)
        totals.append(s.values.sum(-1))
        counts.append(s.count)
    return HeadExactKl(tuple(map(segment, rows)), Mean(torch.stack(totals, -1), torch.stack(counts, -1)))


class HeadDistributions(Protocol):
    """Distributions of a policy by head; a source may leave out any of them."""

    @property
    def logits(self) -> Mapping[str, Tensor]:
        """Per categorical head [..., A]."""

    @property
    def means(self) -> Mapping[str, Tensor]:
        """Per Gaussian head [..., D]."""

    @property
    def log_std(self) -> Mapping[str, Tensor]:
        """Per Gaussian head [..., D] or [D]."""


def kl_rows(old: HeadDistributions, new: HeadDistributions) -> dict[str, Tensor]:
    """Return KL(old‖new) of every head that both sides have, in every row [...]."""
    rows = {head: categorical_kl(old.logits[head], logits) for head, logits in new.logits.items() if head in old.logits}
    for head in [head for head in new.means if all(head in part for part in (old.means, old.log_std, new.log_std))]:
        old_std, new_std = (side.log_std[head].expand_as(new.means[head]) for side in (old, new))
        rows[head] = gaussian_kl(old.means[head], old_std, new.means[head], new_std)
    return rows
