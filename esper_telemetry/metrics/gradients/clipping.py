"""What clipping the global norm does to the gradients (G3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esper_telemetry.group import Mean, Metric, MetricGroup, reports
from esper_telemetry.ops import CLIP_EPSILON
from esper_telemetry.record import Level


@dataclass(frozen=True, slots=True)
class Clipping(MetricGroup):
    """Clip coefficient, frequency and excess, one value per optimizer step."""

    replicated: ClassVar[bool] = True
    coef: Mean | None = reports(
        Metric(
            key="grad/clip/coef",
            number=510,
            unit="fraction",
            question="By what factor does clipping shrink the gradient? 1 leaves it as it is.",
            low=0.0,
            high=1.0,
            level=Level.MINIMAL,
            healthy="> 0.3",
            warn="< 0.1",
            critical="< 0.01",
            source="heuristic",
            undefined="no limit, or a gradient is not finite",
        ),
        Metric(
            key="grad/clip/coef_min",
            number=511,
            unit="fraction",
            question="By what factor did clipping shrink the gradient at worst?",
            over="min",
            low=0.0,
            high=1.0,
            level=Level.MINIMAL,
            healthy="> 0.1",
            warn="< 0.05",
            critical="< 0.01",
            source="heuristic",
            undefined="no limit, or no step with finite gradients",
        ),
    )
    freq: Mean | None = reports(
        Metric(
            key="grad/clip/freq",
            number=512,
            unit="fraction",
            question="In what share of the optimizer steps was the gradient clipped? High alone is normal for PPO.",
            low=0.0,
            high=1.0,
            healthy="0.05 to 0.95; healthy runs 0.06 to 0.94",
            source="measured on a recurrent PPO",
            undefined="no limit, or no step with finite gradients",
        )
    )
    excess_log10: Mean | None = reports(
        Metric(
            key="grad/clip/excess_log10",
            number=513,
            unit="decades",
            question="How many powers of ten is the gradient above the clip limit? 0 is within it.",
            low=0.0,
            healthy="< 0.7",
            warn="> 1 (ten times the limit)",
            critical="> 2 (a hundred times)",
            source="heuristic",
            undefined="no limit, or no step with finite gradients",
        )
    )


def check_limit(max_norm: float) -> None:
    """Raises ValueError for a limit of the global norm that is not positive."""
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")


def clip_coefficients(norms: Tensor, max_norm: float) -> Tensor:
    """The factor min(1, max_norm / (norm + 1e-6)) of `clip_grad_norm_`, of global norms [..] in float64; NaN of NaN."""
    check_limit(max_norm)
    return torch.clamp(max_norm / (norms + CLIP_EPSILON), max=1.0)


def coefficients(clip: Clipping) -> Tensor | float:
    """The clip coefficient of each step, [M], NaN where it is undefined; 1 where nothing is clipped."""
    if clip.coef is None:
        return 1.0
    total, usable = torch.as_tensor(clip.coef.total), torch.as_tensor(clip.coef.count)
    return torch.where(usable > 0, total, torch.nan)


def clipping(norms: Tensor, usable: Tensor, coefs: Tensor, *, max_norm: float | None) -> Clipping:
    """Statistics of clipping global norms.

    Args:
        norms: [M] global norms before clipping, float64, finite.
        usable: [M], 1 where the gradients of the step are all finite; where they are not, 0, the step does not count.
        coefs: [M] from `clip_coefficients`, 0 where a step does not count.
        max_norm: the limit; None where nobody knows it, and only what clipping did.
    """
    excess = None if max_norm is None else (norms / max_norm).log10().clamp(min=0.0)
    return Clipping(
        coef=Mean(coefs, usable),
        freq=Mean((coefs < 1.0) * usable, usable),
        excess_log10=None if excess is None else Mean(excess * usable, usable),
    )
