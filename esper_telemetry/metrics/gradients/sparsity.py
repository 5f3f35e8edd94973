"""How many entries of the gradients are exactly zero, and which way the others point (G7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esper_telemetry.conversion import ArrayLike, as_tensors
from esper_telemetry.group import Mean, Metric, MetricGroup, label, reports
from esper_telemetry.metric import segment


@dataclass(frozen=True, slots=True)
class GradientZeros(MetricGroup):
    """Share of exact zeros among all entries."""

    replicated: ClassVar[bool] = True
    zero_frac: Mean | None = reports(
        Metric(
            key="grad/zero_frac",
            number=545,
            unit="fraction",
            question="What share of the gradient is exactly zero: dead units, detached branches?",
            low=0.0,
            high=1.0,
            cost="sampled",
            healthy="< 0.3",
            warn="> 0.5",
            critical="> 0.9",
            source="heuristic; embedding rows are excluded by the caller",
            undefined="no parameter has a gradient",
        )
    )


@dataclass(frozen=True, slots=True)
class LayerZeros(MetricGroup):
    """Share of exact zeros in every parameter tensor."""

    replicated: ClassVar[bool] = True
    layer: tuple[str, ...] = label()
    zero_frac: Mean | None = reports(
        Metric(
            key="grad/layer/{layer}/zero_frac",
            number=546,
            unit="fraction",
            question="What share of this tensor's gradient is exactly zero?",
            low=0.0,
            high=1.0,
            cost="sampled",
            healthy="< 0.3",
            warn="> 0.5",
            critical="> 0.9",
            source="heuristic",
            undefined="the tensor has no gradient",
        )
    )


@dataclass(frozen=True, slots=True)
class GradientSigns(MetricGroup):
    """Share of positive entries among the non-zero ones."""

    replicated: ClassVar[bool] = True
    pos_frac: Mean | None = reports(
        Metric(
            key="grad/sign/pos_frac",
            number=547,
            unit="fraction",
            question="Do gradients point up and down alike, or all one way?",
            low=0.0,
            high=1.0,
            cost="sampled",
            healthy="0.4 to 0.6",
            warn="outside 0.25 to 0.75 for layers without bias",
            source="heuristic",
            undefined="every entry is zero",
        )
    )


@torch.no_grad()
def gradient_zeros(gradients: Sequence[ArrayLike], names: Sequence[str]) -> tuple[GradientZeros, LayerZeros]:
    """Shares of exact zeros, overall and per tensor; one cheap pass, meant for once per update at most.

    Args:
        gradients: K tensors of any shape.
        names: their names, K.
    """
    tensors = as_tensors(gradients)
    if len(tensors) != len(names):
        raise ValueError(f"every gradient has a name, got {len(tensors)} gradients and {len(names)} names")
    if not tensors:
        return GradientZeros(), LayerZeros(())
    numels = [g.numel() for g in tensors]
    sizes = torch.tensor(numels, dtype=torch.float64)
    counts = torch.stack([torch.count_nonzero(g) for g in tensors])
    zeros = sizes.to(counts.device, non_blocking=True) - counts
    layers = LayerZeros(tuple(map(segment, names)), Mean(zeros[None], sizes.to(counts.device, non_blocking=True)[None]))
    return GradientZeros(Mean(zeros.sum(), float(sum(numels)))), layers


@torch.no_grad()
def gradient_signs(gradients: Sequence[Tensor]) -> GradientSigns:
    """Share of positive entries among the non-zero, non-NaN ones of all tensors."""
    if not gradients:
        return GradientSigns()
    positive = torch.stack([(g > 0).sum() for g in gradients]).sum()
    negative = torch.stack([(g < 0).sum() for g in gradients]).sum()
    return GradientSigns(Mean(positive, positive + negative))
