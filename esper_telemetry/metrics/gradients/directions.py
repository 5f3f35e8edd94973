"""Agreement and noise of gradients, their concentration in few parameters (Hoyer 2004), and histograms of the sizes of their entries.

Agreement of minibatches (Ilyas 2020) and of successive updates, shares of zeros, signs, and the ingredients of the gradient noise scale
(McCandlish 2018, App. A). The minibatches of an epoch are taken at different parameters, so the noise scale uses shards of one minibatch,
before clipping; for a recurrent policy the unit is the sequence. Single estimates are useless: `history.gradients` averages them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from esper_telemetry.core.arrays import ArrayLike, as_tensors
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.metric import Metric, label, reports, segment
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Counts, Mean
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.metrics.gradients.actor_critic import cosine
from esper_telemetry.metrics.statistics import defined


@dataclass(frozen=True, slots=True)
class SuccessiveAlignment(MetricGroup):
    """Agreement of an update's first gradient with Adam's average before it, which covers the previous updates."""

    replicated: ClassVar[bool] = True
    successive_cos: Mean | None = reports(
        Metric.cosine("grad/align/successive_cos", 541, "agreement with the previous update", cost="sampled")
        .asks("Does this update continue in the direction of the previous one? Judge its average only.")
        .bounds(healthy="EMA > -0.1", warn="EMA < -0.3: updates undo each other", source="heuristic")
        .absent("the first update, or either gradient is zero or not finite")
    )


@dataclass(frozen=True, slots=True)
class MinibatchAlignment(MetricGroup, absent="fewer than two minibatches, or a gradient is zero or not finite", cost="sampled"):
    """Agreement of the gradients of several minibatches."""

    replicated: ClassVar[bool] = True
    mean_pair_cos: Mean | None = reports(
        Metric.cosine("grad/align/mean_pair_cos", 542, "agreement of minibatches")
        .asks("Do minibatches agree on the direction? 0 is the chance level: the gradient is noise.")
        .bounds(healthy="> 0; chance level 0 ± 1/√(parameters · pairs)", source="Ilyas 2020, 1811.02553")
    )
    direction_variance: Mean | None = reports(
        Metric.fraction("grad/align/direction_variance", 543, "scatter of minibatch directions").asks(
            "How much do the directions of minibatch gradients scatter? 0 if all are the same."
        )
    )
    sign_agreement: Mean | None = reports(
        Metric.fraction("grad/sign/agreement", 544, "agreement of minibatches on signs")
        .asks("How far do minibatches agree on each gradient's sign? The chance level is √(2/(πK)) for K minibatches.")
        .absent("fewer than two minibatches, or a gradient is not finite")
    )


@no_grad
def successive_alignment(gradient: Tensor, previous: Tensor | None) -> SuccessiveAlignment:
    """Return the cosine of an update's gradient with the previous one.

    Args:
        gradient: [d], flat, of this update.
        previous: [d], of the previous update; None at the first.
    """
    if previous is None:
        return SuccessiveAlignment()
    return SuccessiveAlignment(defined(cosine(gradient.double(), previous.double())))


@no_grad
def minibatch_alignment(gradients: Tensor) -> MinibatchAlignment:
    """Return the agreement of K gradients at the same parameters.

    Args:
        gradients: [K, d], one flat gradient per minibatch.

    The mean cosine of all pairs follows from the length R of the mean direction: (K R² - 1) / (K - 1).
    """
    count = len(gradients)
    if count < 2:
        return MinibatchAlignment()
    gradients = gradients.double()
    directions = gradients / torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
    length = torch.linalg.vector_norm(directions.mean(0))
    return MinibatchAlignment(
        mean_pair_cos=defined((count * length.square() - 1.0) / (count - 1)),
        direction_variance=defined((1.0 - length).clamp(min=0.0)),
        sign_agreement=defined((gradients.sign().sum(0).abs() / count).mean()),
    )


@no_grad
def weighted_pair_cosine(gradients: Tensor) -> Tensor:
    """Return Σ g_i·g_j / Σ |g_i||g_j| over the pairs of K gradients [K, d], 0-d: long gradients weigh more."""
    gradients = gradients.double()
    sizes = torch.linalg.vector_norm(gradients, dim=1)
    own = sizes.square().sum()
    total: Tensor = (gradients.sum(0).square().sum() - own) / (sizes.sum().square() - own)
    return total


@dataclass(frozen=True, slots=True)
class GradientZeros(MetricGroup):
    """Share of exact zeros among all entries."""

    replicated: ClassVar[bool] = True
    zero_frac: Mean | None = reports(
        Metric.fraction("grad/zero_frac", 545, "share of zeros in the gradient", cost="sampled")
        .asks("What share of the gradient is exactly zero: dead units, detached branches?")
        .bounds(healthy="< 0.3", warn="> 0.5", critical="> 0.9", source="heuristic; embedding rows are excluded by the caller")
        .absent("no parameter has a gradient")
    )


@dataclass(frozen=True, slots=True)
class LayerZeros(MetricGroup):
    """Share of exact zeros in every parameter tensor."""

    replicated: ClassVar[bool] = True
    layer: tuple[str, ...] = label()
    zero_frac: Mean | None = reports(
        Metric.fraction("grad/layer/{layer}/zero_frac", 546, "share of zeros in a layer's gradient", cost="sampled")
        .asks("What share of this tensor's gradient is exactly zero?")
        .bounds(healthy="< 0.3", warn="> 0.5", critical="> 0.9", source="heuristic")
        .absent("the tensor's gradient is missing")
    )


@dataclass(frozen=True, slots=True)
class GradientSigns(MetricGroup):
    """Share of positive entries among the non-zero ones."""

    replicated: ClassVar[bool] = True
    pos_frac: Mean | None = reports(
        Metric.fraction("grad/sign/pos_frac", 547, "share of positive entries", cost="sampled")
        .asks("Are positive and negative gradients balanced, or do most have one sign?")
        .bounds(healthy="0.4 to 0.6", warn="outside 0.25 to 0.75 for layers without bias", source="heuristic")
        .absent("every entry is zero")
        .advises("Centre and scale the inputs; look for features or targets that are always positive.")
    )


@checked_arguments()
@no_grad
def gradient_zeros(gradients: Sequence[ArrayLike], names: Sequence[str]) -> tuple[GradientZeros, LayerZeros]:
    """Return the shares of exact zeros, overall and per tensor, in one pass over the gradients; call it at most once per update.

    Args:
        gradients: K tensors of any shape.
        names: their names, K.
    """
    tensors = as_tensors(gradients)
    if len(tensors) != len(names):
        raise ValueError(f"every gradient needs a name, got {len(tensors)} gradients and {len(names)} names")
    if not tensors:
        return GradientZeros(), LayerZeros(())
    numels = [g.numel() for g in tensors]
    sizes = torch.tensor(numels, dtype=torch.float64)
    counts = torch.stack([torch.count_nonzero(g) for g in tensors])
    zeros = sizes.to(counts.device, non_blocking=True) - counts
    layers = LayerZeros(tuple(map(segment, names)), Mean(zeros[None], sizes.to(counts.device, non_blocking=True)[None]))
    return GradientZeros(Mean(zeros.sum(), float(sum(numels)))), layers


@no_grad
def gradient_signs(gradients: Sequence[Tensor]) -> GradientSigns:
    """Return the share of positive entries among the non-zero, non-NaN ones of all tensors."""
    if not gradients:
        return GradientSigns()
    positive = torch.stack([torch.count_nonzero(g > 0) for g in gradients]).sum()
    negative = torch.stack([torch.count_nonzero(g < 0) for g in gradients]).sum()
    return GradientSigns(Mean(positive, positive + negative))


@dataclass(frozen=True, slots=True)
class GradientNoise(MetricGroup, absent="fewer than two shards, or a gradient is not finite", cost="sampled"):
    """Unbiased estimates of the true gradient's squared norm and of the noise of one sample's gradient."""

    replicated: ClassVar[bool] = True
    g2: Mean | None = reports(
        Metric.quantity("grad/gns/g2", 560, "squared norm of the true gradient", unit="gradient norm²")
        .asks("How large is the squared norm of the true gradient, without noise? Single estimates may be negative.")
        .bounds(source="McCandlish 2018, 1812.06162")
    )
    tr_sigma: Mean | None = reports(
        Metric.quantity("grad/gns/tr_sigma", 561, "noise of a single sample's gradient", unit="gradient norm²")
        .asks("How large is the squared noise in the gradient of a single sample?")
        .bounds(source="McCandlish 2018, 1812.06162")
    )


@no_grad
def shard_noise(gradients: Tensor, batches: Sequence[int]) -> GradientNoise:
    """Return the noise from the unclipped gradients of K shards of one batch at the same parameters.

    Args:
        gradients: [K, d], mean gradient of each shard, flat.
        batches: K numbers of samples (of sequences for recurrent policies).

    With B = Σb, g = Σb_i g_i/B: tr Σ = (mean|g_i|² - |g|²) / (mean(1/b_i) - 1/B), |G|² = |g|² - tr Σ/B.
    """
    if len(gradients) != len(batches):
        raise ValueError(f"{len(gradients)} gradients need as many batch sizes, got {len(batches)}")
    if len(batches) < 2:
        return GradientNoise()
    gradients = gradients.double()
    sizes = torch.tensor(batches, dtype=torch.float64, device=gradients.device)
    whole = sizes.sum()
    big = ((sizes / whole) @ gradients).square().sum()
    small = gradients.square().sum(1).mean()
    noise = (small - big) / ((1.0 / sizes).mean() - 1.0 / whole)
    return GradientNoise(g2=defined(big - noise / whole), tr_sigma=defined(noise))


def two_batch_noise(sq_norm_small: Tensor, sq_norm_big: Tensor, *, b_small: int, b_big: int) -> GradientNoise:
    """Return the noise from mean squared gradient norms at two batch sizes: E|g_b|² = |G|² + tr Σ/b.

    Args:
        sq_norm_small: 0-d, mean over the small batches.
        sq_norm_big: 0-d, mean over the big ones.
        b_small: samples in a small batch.
        b_big: samples in a big one.
    """
    if not 0 < b_small < b_big:
        raise ValueError(f"batch sizes must satisfy 0 < b_small < b_big, got {b_small} and {b_big}")
    small, big = sq_norm_small.double(), sq_norm_big.double()
    return GradientNoise(
        g2=defined((b_big * big - b_small * small) / (b_big - b_small)), tr_sigma=defined((small - big) / (1.0 / b_small - 1.0 / b_big))
    )


@dataclass(frozen=True, slots=True)
class Concentration(MetricGroup, absent="the gradient is zero or not finite, or has one entry", cost="sampled"):
    """Evenness of the squared gradient over its entries."""

    replicated: ClassVar[bool] = True
    entropy: Mean | None = reports(
        Metric.fraction("grad/concentration/entropy", 550, "spread of the gradient over parameters")
        .asks("Is the gradient spread over all parameters (1) or concentrated in one (0)?")
        .bounds(healthy="> 0.8; Gaussian entries give 1 - 0.73/ln n", warn="< 0.6", critical="< 0.4", source="heuristic")
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
        Metric.quantity("grad/decades", 548, "sizes of the gradient's entries", unit="log10 of |entry|", level=Level.DEBUG, cost="debug")
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
