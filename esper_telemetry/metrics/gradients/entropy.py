"""The gradient of the entropy bonus where it enters the policy: at the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from esper_telemetry import ops
from esper_telemetry.group import Metric, MetricGroup, reports
from esper_telemetry.metrics.entropy_gradient import entropy_slope
from esper_telemetry.reduction import NAN, Array, Reduction, Slot, Statistic


@dataclass(frozen=True, slots=True)
class BonusNorm(Reduction):
    """A mean over optimizer steps of the norm √(Σ squares) / rows; the squares and the rows of several ranks add.

    Attributes:
        total, count: of the norm, over steps at which it is defined.
        squares: summed over the rows, times the square of the bonus's weight.
        rows: over which the mean entropy is.
    """

    total: Slot
    count: Slot
    squares: Slot
    rows: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"mean": lambda s: s[0] / s[1] if s[1] else NAN}

    @staticmethod
    def merge(rows: Array) -> Array:
        """Totals and counts add over steps; what they were made from has no meaning then."""
        merged: Array = rows.sum(axis=0)
        return merged

    @classmethod
    def join(cls, ranks: Array) -> Array:
        """The norm over the rows of all ranks at one step."""
        squares, rows = ranks[..., 2].sum(axis=0), ranks[..., 3].sum(axis=0)
        norm = np.sqrt(squares) / np.maximum(rows, 1)
        defined = np.isfinite(norm) & (rows > 0)
        return np.stack([np.where(defined, norm, 0.0), defined, squares, rows], axis=-1)


@dataclass(frozen=True, slots=True)
class BonusGradient(MetricGroup):
    """The gradient of the entropy bonus, one value per optimizer step."""

    entropy: BonusNorm | None = reports(
        Metric(
            key="grad/entropy/norm",
            number=523,
            unit="gradient norm",
            question="How large is the gradient of the entropy bonus, where it enters the policy?",
            low=0.0,
            healthy="near its own history",
            undefined="no entropy bonus, or no categorical head",
        )
    )


@torch.no_grad()
def bonus_gradient(
    logits: Mapping[str, Tensor],
    *,
    entropy_coef: float,
    action_masks: Mapping[str, Tensor] | None = None,
    relevant: Mapping[str, Tensor] | None = None,
    valid: Tensor | None = None,
) -> BonusGradient:
    """Its norm c ‖∂H/∂z‖ over the logits z of all heads, H the mean over the rows of the heads' entropies.

    Args:
        logits: per categorical head [M, N, A].
        entropy_coef: c, weight of the bonus; without one there is no gradient and nothing is reported.
        action_masks: per restricted head [M, N, A], bool.
        relevant: per head that is not always relevant [M, N], bool.
        valid: [M, N], bool; None where every row counts.
    """
    if not logits or not entropy_coef > 0:
        return BonusGradient()
    masks, matters = action_masks or {}, relevant or {}
    squares = []
    for head, scores in logits.items():
        slope = entropy_slope(ops.mask_logits(scores.double(), masks.get(head)))
        square = slope.square().sum(-1)
        flags = [flag for flag in (matters.get(head), valid) if flag is not None]
        squares.append(torch.where(torch.stack(flags).all(0), square, 0.0) if flags else square)
    rows = torch.full_like(squares[0][..., 0], squares[0].shape[-1]) if valid is None else valid.sum(-1)
    total = entropy_coef**2 * torch.stack(squares).sum((0, -1))
    norm = total.sqrt() / rows
    defined = torch.isfinite(norm)
    return BonusGradient(BonusNorm(torch.where(defined, norm, 0.0), defined, total, rows))
