"""Concentration of the gradient in few parameters (Hoyer 2004), and histograms of the sizes of its entries by powers of ten."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.metric import Metric, label, reports, segment
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Counts, Mean
from esper_telemetry.metrics.statistics import defined


@dataclass(frozen=True, slots=True)
class Concentration(MetricGroup, absent="the gradient is zero or not finite, or has one entry", cost="sampled"):
    """Evenness of the squared gradient over its entries."""

    replicated: ClassVar[bool] = True
    entropy: Mean | None = reports(
        Metric.fraction("grad/concentration/entropy", 550, "spread of the gradient over parameters")
        .asks("Is the gradient spread over all parameters (1) or concentrated in one (0)?")
        .bounds(
            healthy="> 0.8; Gaussian entries give 1 - 0.73/ln n", warn="< 0.6", critical="< 0.4", source="heuristic"
        )
    )
    participation: Mean | None = reports(
        Metric.fraction("grad/concentration/participation", 551, "share of parameters that learn")
        .asks("What share of the parameters takes part in learning? Gaussian entries give 1/3.")
        .bounds(warn="< 0.01", source="heuristic")
        .absent("the gradient is zero or not finite")
    )
    hoyer: Mean | None = reports(
        Metric.fraction("grad/concentration/hoyer", 552, "sparsity of the gradient")
        .asks("How sparse is the gradient: 0 even, 1 a single entry? Gaussian entries give 0.2.")
        .bounds(source="Hoyer 2004")
    )


@dataclass(frozen=True, slots=True)
class LayerConcentration(MetricGroup):
    """Evenness of the squared gradient over the parameter tensors."""

    replicated: ClassVar[bool] = True
    layer_entropy: Mean | None = reports(
        Metric.fraction("grad/concentration/layer_entropy", 553, "spread of the gradient over layers")
        .asks("Is the gradient spread over all layers (1) or concentrated in one (0)?")
        .bounds(healthy="> 0.5", warn="< 0.2", critical="< 0.1", source="heuristic")
        .absent("the gradient is zero or not finite, or there is one tensor")
    )


CHUNK_ENTRIES = 1 << 16
"""Entries whose powers are summed at once on a CPU: float64 copies of this size fit its cache, which takes a third of the time."""


@no_grad
def concentration(gradients: Sequence[Tensor]) -> Concentration:
    """Return the spread of the squared entries p = g²/Σg² of all tensors: entropy/ln n, 1/(n Σp²) and Hoyer's sparsity.

    Args:
        gradients: tensors of any shape; n entries in all.
    """
    count = sum(gradient.numel() for gradient in gradients)
    if count == 0:
        return Concentration()
    sums = []  # [4] float64 of each tensor: Σ|g|, Σg², Σg⁴, Σg² ln g²
    for gradient in gradients:
        for chunk in gradient.reshape(-1).split(CHUNK_ENTRIES if gradient.device.type == "cpu" else count):
            size = chunk.double().abs()
            g2 = size.square()
            logs = size.log().clamp(min=-1e4)  # 0 ln 0 is 0
            sums.append(torch.stack([size.sum(), size @ size, g2 @ g2, 2.0 * (g2 @ logs)]))
    first, squares, fourth, logs = torch.stack(sums).sum(0).unbind()
    if count == 1:
        return Concentration(participation=defined(squares.square() / fourth))
    root = math.sqrt(count)
    entropy = (squares.log() - logs / squares) / math.log(count)
    return Concentration(
        entropy=defined(entropy.clamp(0.0, 1.0)),
        participation=defined(squares.square() / (count * fourth)),
        hoyer=defined(((root - first / squares.sqrt()) / (root - 1.0)).clamp(0.0, 1.0)),
    )


def layer_concentration(norms: Tensor) -> LayerConcentration:
    """Return the entropy of the squared norms over the tensors, relative to its maximum ln K.

    Args:
        norms: [M, K] or [K], norm of each of K gradients at each of M steps.
    """
    count = norms.shape[-1]
    if count < 2:
        return LayerConcentration()
    squares = norms.double().square()
    shares = squares / squares.sum(-1, keepdim=True)
    return LayerConcentration(defined(torch.special.entr(shares).sum(-1) / math.log(count)))


DECADE_EDGES = tuple(float(edge) for edge in range(-13, 6))
"""log10 of sizes: 16 decades from 1e-12 to 1e4. The bin below them counts exact zeros, the bin above them non-finite entries."""

INNER_EDGES = tuple(10.0**edge for edge in DECADE_EDGES[2:-2])
"""Sizes between the decades."""


@dataclass(frozen=True, slots=True)
class GradientDecades(MetricGroup):
    """Sizes of all entries."""

    replicated: ClassVar[bool] = True
    decades: Counts | None = reports(
        Metric.quantity(
            "grad/decades",
            548,
            "sizes of the gradient's entries",
            unit="log10 of |entry|",
            level=Level.DEBUG,
            cost="debug",
        )
        .asks("How are the sizes of the gradient's entries distributed? Lowest bin: exactly zero; highest: not finite.")
        .bounds(
            healthy="one hump; the lowest and the highest bin nearly empty",
            source="16 decades from 1e-12 to 1e4; smaller and larger entries count in the outermost decades",
        )
        .absent("no whole gradient was kept")
    )


@dataclass(frozen=True, slots=True)
class LayerDecades(MetricGroup):
    """Sizes of the entries of every parameter tensor."""

    replicated: ClassVar[bool] = True
    layer: tuple[str, ...] = label()
    decades: Counts | None = reports(
        Metric.quantity(
            "grad/layer/{layer}/decades",
            549,
            "sizes of the entries of a layer's gradient",
            unit="log10 of |entry|",
            level=Level.DEBUG,
            cost="debug",
        )
        .asks("How are the sizes of this tensor's gradient distributed? Lowest bin: exactly zero; highest: not finite.")
        .bounds(source="as grad/decades")
        .absent("the tensor's gradient is missing")
    )


@no_grad
def gradient_decades(gradients: Sequence[Tensor], names: Sequence[str]) -> tuple[GradientDecades, LayerDecades]:
    """Return histograms of log10 |entry|, overall and per tensor.

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
    """Return [18] float64: numbers of exact zeros, of finite entries by decade of their size, and of non-finite entries.

    Entries below each power of ten are counted by comparisons, which take a tenth of the time of a logarithm and do not round.
    """
    size = gradient.detach().reshape(-1).abs()
    size = size.float() if size.dtype.itemsize < torch.float32.itemsize else size
    below = torch.stack([torch.count_nonzero(size < edge) for edge in (*INNER_EDGES, torch.inf)])
    zeros = size.numel() - torch.count_nonzero(size)
    ends = torch.cat([zeros[None], below, below.new_tensor([size.numel()])])
    return torch.cat([zeros[None], ends.diff()]).double()
