"""How many dimensions the features use: four definitions that must never be mixed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.group import Mean, MetricGroup, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.defined import defined_together
from esper_telemetry.metrics.masking import keep

SMALL = 0.01
"""Singular values over √N up to this do not count (Lyle 2022)."""
VARIANCE = 0.99
"""Share of the squared singular values that `pca99` covers."""

TOO_FEW = "fewer valid rows than features, features that are not finite, or nobody sampled them"


@dataclass(frozen=True, slots=True)
class FeatureRank(MetricGroup):
    """Ranks of the features that the heads read."""

    effective_rank: Mean | None = reports(
        Metric(
            key="repr/effective_rank",
            number=754,
            unit="dimensions",
            question="How many dimensions do the features use, weighted by how much? A collapse precedes that of the policy.",
            low=1.0,
            cost="sampled",
            healthy="rising, then level",
            critical="below half of its own median",
            source="e to the entropy of σ / Σσ: Roy & Vetterli 2007; Moalla 2024, 2405.00662",
            undefined=TOO_FEW,
        )
    )
    srank: Mean | None = reports(
        Metric(
            key="repr/srank",
            number=755,
            unit="dimensions",
            question="How many singular values make up 99 % of their sum?",
            low=1.0,
            cost="sampled",
            source="Kumar 2021, 2010.14498",
            undefined=TOO_FEW,
        )
    )
    pca99: Mean | None = reports(
        Metric(
            key="repr/pca99",
            number=756,
            unit="dimensions",
            question="How many directions carry 99 % of the features' squared length?",
            low=1.0,
            cost="sampled",
            source="Moalla 2024, 2405.00662",
            undefined=TOO_FEW,
        )
    )
    feature_rank: Mean | None = reports(
        Metric(
            key="repr/feature_rank",
            number=757,
            unit="dimensions",
            question="How many directions of the features are longer than 0.01 for a typical state?",
            low=0.0,
            cost="sampled",
            source="Lyle 2022, 2204.09560",
            undefined=TOO_FEW,
        )
    )


@torch.inference_mode()
def feature_rank(features: Tensor, *, delta: float = 0.01, valid: Tensor | None = None) -> FeatureRank:
    """Ranks from the singular values of the features, which are not centred.

    Args:
        features: [N, D], what the heads read; at least D rows.
        delta: share of the sum of singular values that `srank` leaves out.
        valid: [N] bool; None where every row is.

    One decomposition of [N, D]; rows that are not valid are zero and change no singular value.
    """
    rows, width = features.shape
    if rows < width:
        return FeatureRank()
    s = keep(features.detach().double().t(), None if valid is None else valid.bool())
    sigma = _singular_values(s.values)
    if sigma is None:
        return FeatureRank()
    used = (s.count.amin() >= width) & (s.nonfinite.sum() == 0)
    found = _ranks(sigma, s.count.amax(), delta)
    return FeatureRank(*defined_together(*(torch.where(used, rank, torch.nan) for rank in found)))


def _singular_values(features: Tensor) -> Tensor | None:
    """In descending order; None where they do not converge."""
    try:
        sigma: Tensor = torch.linalg.svdvals(features)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, but torch's stubs leave it out
        return None
    return sigma


def _ranks(sigma: Tensor, rows: Tensor, delta: float) -> tuple[Tensor, ...]:
    """Effective rank, srank, pca99 and feature rank, float64; NaN where all singular values are zero."""
    p = sigma / sigma.sum()
    effective = torch.special.entr(p).sum().exp()
    return effective, _covering(sigma, 1 - delta), _covering(sigma**2, VARIANCE), _longer(sigma, rows)


def _covering(parts: Tensor, share: float) -> Tensor:
    """How many of the descending `parts` make up that share of their sum; NaN where it is zero."""
    covered = parts.cumsum(0) / parts.sum()
    return (covered < share).sum() + 1 + 0 * covered[-1]


def _longer(sigma: Tensor, rows: Tensor) -> Tensor:
    return (sigma / rows.sqrt() > SMALL).sum().double()
