"""Whether the entropy bonus or the policy loss steers the policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.group import Mean, MetricGroup, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.masking import rows_of, same_shape


@dataclass(frozen=True, slots=True)
class EntropyGradient(MetricGroup):
    """Gradient of the entropy bonus beside that of the policy loss."""

    ratio: Mean = reports(
        Metric(
            key="policy/entropy_grad_ratio",
            number=191,
            unit="ratio",
            question="Does the entropy bonus pull harder on the policy than the policy loss (above 1), or not at all (below 1e-3)?",
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
    policy = torch.where(kept, pull, 0.0).norm()
    return EntropyGradient(Mean(torch.where(policy > 0, bonus / policy, 0.0), policy > 0))


def entropy_slope(logits: Tensor) -> Tensor:
    """Gradient [.., A] of each row's entropy with respect to its logits."""
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1, keepdim=True)
    return -p * (log_p + entropy)
