"""Running normalisers of observations and returns: whether they still describe the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.group import Last, Mean, MetricGroup, label, reports
from esper_telemetry.metric import Metric, segment
from esper_telemetry.metrics.masking import rows_of, sample


@dataclass(frozen=True, slots=True)
class NormalizerDrift(MetricGroup):
    """How far a normaliser moved."""

    normalizer: str = label()
    drift: Last = reports(
        Metric(
            key="norm/{normalizer}/drift",
            number=321,
            unit="σ or ln, the larger",
            question="How far did the normaliser's mean or scale move over the last 10 updates? The networks see shifted inputs.",
            low=0.0,
            healthy="< 0.1",
            warn="> 0.3",
            critical="> 1",
            source="heuristic",
            undefined="fewer than 10 updates, or no normaliser",
        )
    )


@torch.inference_mode()
def normalizer_drift(
    normalizer: str, mean: Tensor, std: Tensor, previous_mean: Tensor, previous_std: Tensor
) -> NormalizerDrift:
    """max(RMS_d((μ - μ') / σ'), RMS_d(ln(σ / σ'))) over dimensions d.

    Args:
        normalizer: what it normalises, `obs` or `ret`.
        mean, std: [D] now.
        previous_mean, previous_std: [D] k updates ago.
    """
    before = previous_std.detach().double()
    shift = (mean.detach().double() - previous_mean.detach().double()) / before
    scale = (std.detach().double() / before).log()
    rms = torch.stack([shift, scale]).square().mean(-1).sqrt()
    return NormalizerDrift(segment(normalizer), Last(rms.amax()))


@torch.no_grad()
def cut_entries(normalized: Tensor, limit: float, *, valid: Tensor | None = None) -> tuple[Tensor, Tensor | int]:
    """How many entries stand at the limit at which they were cut, 0-d, and how many there are.

    Args:
        normalized: [T, B, ...], after they were cut.
        limit: magnitude at which they were.
        valid: [T, B] bool; None where every row is.
    """
    at_limit = normalized.abs() >= limit
    if valid is None:
        return at_limit.sum(), at_limit.numel()
    per_row = at_limit.flatten(valid.dim()) if at_limit.dim() > valid.dim() else at_limit.unsqueeze(-1)
    return (per_row & valid.unsqueeze(-1)).sum(), valid.sum() * per_row.shape[-1]


@dataclass(frozen=True, slots=True)
class NormalizerClipping(MetricGroup):
    """How much a normaliser cuts off."""

    normalizer: str = label()
    clipped: Mean = reports(
        Metric(
            key="norm/{normalizer}/clip_frac",
            number=322,
            unit="fraction",
            question="Which share of the normalised entries is cut off at the normaliser's limit?",
            low=0.0,
            high=1.0,
            healthy="< 0.01",
            warn="> 0.05",
            source="heuristic",
            undefined="no valid entry",
        )
    )


@torch.inference_mode()
def normalizer_clipping(
    normalizer: str, normalized: Tensor, *, clip: float, valid: Tensor | None = None
) -> NormalizerClipping:
    """Share of entries beyond the limit, strictly.

    Args:
        normalizer: what it normalises, `obs` or `ret`.
        normalized: entries before they are cut, any shape.
        clip: the limit.
        valid: bool, same shape; None where every entry is.
    """
    s = sample(normalized, valid)
    return NormalizerClipping(segment(normalizer), s.share(rows_of(normalized, None).abs() > clip))
