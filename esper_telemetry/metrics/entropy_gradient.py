"""Whether the entropy bonus or the policy loss steers the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.group import MetricGroup, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.masking import rows_of, same_shape
from esper_telemetry.metrics.ratio import EXP_LIMIT
from esper_telemetry.reduction import NAN, Array, Reduction, Slot, Statistic


@dataclass(frozen=True, slots=True)
class NormRatio(Reduction):
    """A mean over optimizer steps of the ratio of two norms; the squares of several ranks add.

    Attributes:
        total, count: of the ratio, over steps at which it is defined.
        above, below: squared norms, each summed over the rows.
    """

    total: Slot
    count: Slot
    above: Slot
    below: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"mean": lambda s: s[0] / s[1] if s[1] else NAN}

    @staticmethod
    def merge(rows: Array) -> Array:
        """Totals and counts add over steps; what they were made from has no meaning then."""
        merged: Array = rows.sum(axis=0)
        return merged

    @classmethod
    def join(cls, ranks: Array) -> Array:
        """The ratio over the rows of all ranks at one step."""
        above, below = ranks[..., 2].sum(axis=0), ranks[..., 3].sum(axis=0)
        with np.errstate(all="ignore"):
            ratio = np.sqrt(above / below)
        defined = np.isfinite(ratio) & (below > 0)
        return np.stack([np.where(defined, ratio, 0.0), defined, above, below], axis=-1)


@dataclass(frozen=True, slots=True)
class EntropyGradient(MetricGroup):
    """Gradient of the entropy bonus beside that of the policy loss."""

    ratio: NormRatio = reports(
        Metric(
            key="policy/entropy_grad_ratio",
            number=191,
            unit="ratio",
            question="Does the entropy bonus pull harder on the policy than the policy loss (above 1), or not at all (below 1e-3)?",
            cost="sampled",
            low=0.0,
            healthy="< 1",
            warn="> 1",
            critical="> 5 sustained",
            source="heuristic",
            undefined="the policy loss has no gradient",
        )
    )


@torch.inference_mode()
def entropy_gradient(
    logits: Tensor,
    policy_gradient: Tensor,
    *,
    entropy_coef: float,
    action_mask: Tensor | None = None,
    valid: Tensor | None = None,
) -> EntropyGradient:
    """‖c ∂H/∂z‖ / ‖∂L/∂z‖ at the logits z, for H the mean entropy: ∂H_row/∂z_i = -p_i (ln p_i + H_row).

    Args:
        logits: [.., A].
        policy_gradient: gradient of the mean policy loss with respect to the logits, same shape.
        entropy_coef: c, weight of the entropy bonus.
        action_mask: [.., A] bool, True where an action is valid; None where all are.
        valid: [..] bool; None where every row is.
    """
    same_shape(logits=logits, policy_gradient=policy_gradient, action_mask=action_mask)
    x = logits.detach().double()
    x = x if action_mask is None else x.masked_fill(~action_mask.bool(), torch.finfo(x.dtype).min)
    slope = entropy_slope(x.reshape(-1, x.shape[-1]))
    pull = policy_gradient.detach().double().reshape(slope.shape)
    kept = (slope.abs() < torch.inf).all(-1) & (pull.abs() < torch.inf).all(-1)
    kept = (kept if valid is None else kept & rows_of(valid, None).bool()).unsqueeze(-1)
    bonus = torch.where(kept, slope, 0.0).norm() * entropy_coef / kept.sum().clamp(min=1)
    return EntropyGradient(norm_ratio(bonus.square(), torch.where(kept, pull, 0.0).norm().square()))


def norm_ratio(above: Tensor, below: Tensor) -> NormRatio:
    """√(above / below) of squared norms [M], where it is defined."""
    ratio = (above / below).sqrt()
    defined = torch.isfinite(ratio) & (below > 0)
    return NormRatio(torch.where(defined, ratio, 0.0), defined, above, below)


@torch.inference_mode()
def entropy_gradients(
    logits: Mapping[str, Tensor],
    actions: Mapping[str, Tensor],
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    entropy_coef: float,
    relevant: Mapping[str, Tensor] | None = None,
    valid: Tensor | None = None,
) -> EntropyGradient:
    """The same for all categorical heads together, with the gradient of the clipped surrogate worked out.

    The loss of a row is max(-A r, -A clip(r)), so its gradient at the logits of a head is A r (p - δ_a), or 0 where the clip is
    active. One row per minibatch.

    Args:
        logits: per head [M, N, A]; forbidden actions hold a large negative number.
        actions: per head [M, N], indices.
        log_ratio, advantages: [M, N].
        clip: ε of the ratio's clip range.
        entropy_coef: c, weight of the entropy bonus.
        relevant: per head [M, N] bool; heads left out always take part.
        valid: [M, N] bool; None where every row is.
    """
    pull = _pull(log_ratio, advantages, clip)
    kept = torch.isfinite(pull) if valid is None else torch.isfinite(pull) & valid.bool()
    squares = [
        _squares(
            z.double(), actions[head], pull, kept if relevant is None or head not in relevant else kept & relevant[head]
        )
        for head, z in logits.items()
    ]
    bonus, policy = torch.stack(squares).sum(0).unbind()
    return EntropyGradient(norm_ratio(entropy_coef**2 * bonus, policy))


def _pull(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """A r [M, N], 0 where the clip is active."""
    a, r = advantages.detach().double(), log_ratio.detach().double().clamp(-EXP_LIMIT, EXP_LIMIT).exp()
    active = ((a > 0) & (r > 1 + clip)) | ((a < 0) & (r < 1 - clip))
    return torch.where(active, 0.0, a * r)


def _squares(z: Tensor, actions: Tensor, pull: Tensor, kept: Tensor) -> Tensor:
    """Squared norms [2, M] of the gradients of the entropy and of the policy loss at the logits, times the number of rows."""
    chosen = torch.nn.functional.one_hot(actions.long(), z.shape[-1])
    gradients = torch.stack([entropy_slope(z), pull.unsqueeze(-1) * (torch.softmax(z, -1) - chosen)])
    kept = kept & torch.isfinite(gradients).all(-1).all(0)
    return torch.where(kept.unsqueeze(-1), gradients, 0.0).square().sum((-1, -2))


def entropy_slope(logits: Tensor) -> Tensor:
    """Gradient [.., A] of each row's entropy with respect to its logits."""
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1, keepdim=True)
    return -p * (log_p + entropy)
