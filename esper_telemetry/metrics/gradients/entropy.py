"""The gradient of the entropy bonus where it enters the policy: at the logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from esper_telemetry import ops
from esper_telemetry.metrics.entropy_gradient import entropy_slope
from esper_telemetry.metrics.gradients.groups import TermGradients
from esper_telemetry.metrics.gradients.norms import term_gradients


@torch.no_grad()
def bonus_gradient(
    logits: Mapping[str, Tensor],
    *,
    entropy_coef: float,
    action_masks: Mapping[str, Tensor] | None = None,
    relevant: Mapping[str, Tensor] | None = None,
    valid: Tensor | None = None,
) -> TermGradients:
    """Its norm c ‖∂H/∂z‖ over the logits z of all heads, H the mean over the rows of the heads' entropies.

    Args:
        logits: per categorical head [M, N, A].
        entropy_coef: c, weight of the bonus; without one there is no gradient and nothing is reported.
        action_masks: per restricted head [M, N, A], bool.
        relevant: per head that is not always relevant [M, N], bool.
        valid: [M, N], bool; None where every row counts.
    """
    if not logits or not entropy_coef > 0:
        return term_gradients()
    masks, matters = action_masks or {}, relevant or {}
    squares = []
    for head, scores in logits.items():
        slope = entropy_slope(ops.mask_logits(scores.double(), masks.get(head)))
        square = slope.square().sum(-1)
        flags = [flag for flag in (matters.get(head), valid) if flag is not None]
        squares.append(torch.where(torch.stack(flags).all(0), square, 0.0) if flags else square)
    rows = torch.full_like(squares[0][..., 0], squares[0].shape[-1]) if valid is None else valid.sum(-1)
    return term_gradients(entropy=entropy_coef * torch.stack(squares).sum((0, -1)).sqrt() / rows)
