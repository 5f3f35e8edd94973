"""How the sizes of a gradient's entries are spread over powers of ten: fixed bins, so histograms of updates and ranks add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esper_telemetry.group import Counts, Metric, MetricGroup, label, reports
from esper_telemetry.metric import segment
from esper_telemetry.record import Level

DECADE_EDGES = tuple(float(edge) for edge in range(-13, 6))
"""log10 of sizes: 16 decades from 1e-12 to 1e4. The bin below them counts exact zeros, the one above them what is not finite."""

INNER_EDGES = tuple(10.0**edge for edge in DECADE_EDGES[2:-2])
"""Sizes between the decades."""


@dataclass(frozen=True, slots=True)
class GradientDecades(MetricGroup):
    """Sizes of all entries."""

    replicated: ClassVar[bool] = True
    decades: Counts | None = reports(
        Metric(
            key="grad/decades",
            number=548,
            unit="log10 of |entry|",
            question="How are the sizes of the gradient's entries spread? Lowest bin: exactly zero; highest: not finite.",
            level=Level.DEBUG,
            cost="debug",
            healthy="one hump; the lowest and the highest bin nearly empty",
            source="16 decades from 1e-12 to 1e4; smaller and larger entries stand in the outermost of them",
            undefined="no gradient was kept whole",
        )
    )


@dataclass(frozen=True, slots=True)
class LayerDecades(MetricGroup):
    """Sizes of the entries of every parameter tensor."""

    replicated: ClassVar[bool] = True
    layer: tuple[str, ...] = label()
    decades: Counts | None = reports(
        Metric(
            key="grad/layer/{layer}/decades",
            number=549,
            unit="log10 of |entry|",
            question="How are the sizes of this tensor's gradient spread? Lowest bin: exactly zero; highest: not finite.",
            level=Level.DEBUG,
            cost="debug",
            source="as grad/decades",
            undefined="the tensor has no gradient",
        )
    )


@torch.no_grad()
def gradient_decades(gradients: Sequence[Tensor], names: Sequence[str]) -> tuple[GradientDecades, LayerDecades]:
    """Histograms of log10 |entry|, overall and per tensor.

    Args:
        gradients: K tensors of any shape.
        names: their names, K.
    """
    if not gradients:
        return GradientDecades(), LayerDecades(())
    counts = torch.stack([decade_counts(gradient) for gradient in gradients])
    layers = LayerDecades(tuple(map(segment, names)), Counts(counts[None], DECADE_EDGES))
    return GradientDecades(Counts(counts.sum(0), DECADE_EDGES)), layers


def decade_counts(gradient: Tensor) -> Tensor:
    """[18] float64: exact zeros, finite entries by decade of their size, entries that are not finite.

    Counts what lies below each power of ten: a comparison costs a tenth of a logarithm, and rounds nothing.
    """
    size = gradient.detach().reshape(-1).abs()
    size = size.float() if size.dtype.itemsize < torch.float32.itemsize else size
    below = torch.stack([torch.count_nonzero(size < edge) for edge in (*INNER_EDGES, torch.inf)])
    zeros = size.numel() - torch.count_nonzero(size)
    ends = torch.cat([zeros[None], below, below.new_tensor([size.numel()])])
    return torch.cat([zeros[None], ends.diff()]).double()
