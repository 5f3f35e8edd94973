"""The features that the heads read: how long they are, and how far they turn within an update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.group import Mean, MetricGroup, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.masking import same_shape, sample


@dataclass(frozen=True, slots=True)
class FeatureNorm(MetricGroup):
    """How long the features are."""

    norm: Mean = reports(
        Metric(
            key="repr/feature_norm",
            number=758,
            unit="feature norm",
            question="How long are the features before the last nonlinearity? The norm grows, then the rank falls, then the policy"
            " collapses.",
            low=0.0,
            cost="sampled",
            warn="twice its baseline",
            critical="five times its baseline",
            source="Moalla 2024, 2405.00662",
            undefined="no valid row, or nobody sampled features",
        )
    )


@torch.inference_mode()
def feature_norm(preactivations: Tensor, *, valid: Tensor | None = None) -> FeatureNorm:
    """Mean Euclidean length of rows [N, D] before the last nonlinearity; `valid` [N] bool, None where every row is."""
    s = sample(torch.linalg.vector_norm(preactivations.detach().double(), dim=-1), valid)
    return FeatureNorm(s.mean(s.values))


@dataclass(frozen=True, slots=True)
class FeatureDrift(MetricGroup):
    """How far the features turned."""

    cosine: Mean = reports(
        Metric(
            key="repr/drift_cos",
            number=759,
            unit="cosine",
            question="Do the features of a state still point where they did before the update? Otherwise the trunk moves away under the"
            " heads.",
            low=-1.0,
            high=1.0,
            cost="sampled",
            healthy="> 0.95",
            critical="< 0.8",
            source="heuristic",
            undefined="only features of zero, or nobody sampled them",
        )
    )


@torch.inference_mode()
def feature_drift(old: Tensor, new: Tensor, *, valid: Tensor | None = None) -> FeatureDrift:
    """Mean cosine between features before and after.

    Args:
        old, new: [N, D], of the same states; rows of zeros have no direction and do not count.
        valid: [N] bool; None where every row is.
    """
    same_shape(old=old, new=new)
    before, after = old.detach().double(), new.detach().double()
    norm = torch.linalg.vector_norm
    s = sample(torch.linalg.vecdot(before, after) / norm(before, dim=-1) / norm(after, dim=-1), valid)
    return FeatureDrift(s.mean(s.values))
