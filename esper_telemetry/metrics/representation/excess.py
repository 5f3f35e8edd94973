"""How far clipped samples travel beyond the trust region: clipping stops their gradient, not the steps of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.group import Mean, MetricGroup, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.masking import sample
from esper_telemetry.metrics.ratio import EXP_LIMIT

MOALLA = "Moalla 2024, 2405.00662"


@dataclass(frozen=True, slots=True)
class ExcessRatio(MetricGroup):
    """Distance from the clip range of the ratios outside it."""

    high: Mean = reports(
        Metric(
            key="repr/excess_ratio/high",
            number=761,
            unit="ratio",
            question="How far above the clip range are the ratios that left it? Large: clipping no longer holds the policy.",
            low=0.0,
            healthy="< 0.1",
            warn="> 0.3",
            critical="> 1",
            source=MOALLA,
            undefined="no ratio above the clip range",
        )
    )
    low: Mean = reports(
        Metric(
            key="repr/excess_ratio/low",
            number=762,
            unit="ratio",
            question="How far below the clip range are the ratios that left it?",
            low=0.0,
            high=1.0,
            healthy="< 0.1",
            warn="> 0.3",
            source=MOALLA,
            undefined="no ratio below the clip range",
        )
    )


@torch.inference_mode()
def excess_ratio(log_ratio: Tensor, *, clip: float, valid: Tensor | None = None, dim: int | None = None) -> ExcessRatio:
    """Mean of r - 1 - ε where r > 1 + ε, and of 1 - ε - r where r < 1 - ε.

    Args:
        log_ratio: [N] or [M, N], log-probability now minus at collection.
        clip: ε.
        valid: bool, same shape; None where every entry is.
        dim: axis to reduce; None reduces all axes to one row, -1 keeps the leading axis as optimizer steps.
    """
    s = sample(log_ratio, valid, dim=dim)
    e = s.values.clamp(-EXP_LIMIT, EXP_LIMIT).expm1()
    return ExcessRatio(_above(e, clip), _above(-e, clip))


def _above(x: Tensor, clip: float) -> Mean:
    return Mean((x - clip).clamp(min=0).sum(-1), (x > clip).sum(-1))
