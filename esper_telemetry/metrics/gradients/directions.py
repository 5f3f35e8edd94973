"""Do gradients agree with each other: of minibatches (G6, G7; Ilyas 2020) and of successive updates (G6)?

How many entries of the gradients are exactly zero, and which way the others point (G7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from esper_telemetry.core.arrays import ArrayLike, as_tensors
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.metric import Metric, label, reports, segment
from esper_telemetry.core.reduction import Mean
from esper_telemetry.metrics.gradients.interference import cosine
from esper_telemetry.metrics.statistics import defined


@dataclass(frozen=True, slots=True)
class SuccessiveAlignment(MetricGroup):
    """Agreement of an update's gradient with the one before."""

    replicated: ClassVar[bool] = True
    successive_cos: Mean | None = reports(
        Metric.cosine("grad/align/successive_cos", 541, "agreement with the update before", cost="sampled")
        .asks("Does this update go on in the direction of the one before? Judge its average only.")
        .bounds(healthy="EMA > -0.1", warn="EMA < -0.3: updates undo each other", source="heuristic")
        .absent("the first update, or either gradient is zero or not finite")
    )


@dataclass(frozen=True, slots=True)
class MinibatchAlignment(MetricGroup):
    """Agreement of the gradients of several minibatches."""

    replicated: ClassVar[bool] = True
    mean_pair_cos: Mean | None = reports(
        Metric.cosine("grad/align/mean_pair_cos", 542, "agreement of minibatches", cost="sampled")
        .asks("Do minibatches agree on the direction? 0 is chance: the gradient is noise.")
        .bounds(healthy="> 0; chance is 0 ± 1/√(parameters · pairs)", source="Ilyas 2020, 1811.02553")
        .absent("fewer than two minibatches, or a gradient is zero or not finite")
    )
    direction_variance: Mean | None = reports(
        Metric.fraction("grad/align/direction_variance", 543, "scatter of minibatch directions", cost="sampled")
        .asks("How much do the directions of minibatch gradients scatter? 0 is all the same.")
        .absent("fewer than two minibatches, or a gradient is zero or not finite")
    )
    sign_agreement: Mean | None = reports(
        Metric.fraction("grad/sign/agreement", 544, "agreement of minibatches on signs", cost="sampled")
        .asks("How far do minibatches agree on each gradient's sign? √(2/(πK)) is chance for K of them.")
        .absent("fewer than two minibatches, or a gradient is not finite")
    )


@no_grad
def successive_alignment(gradient: Tensor, previous: Tensor | None) -> SuccessiveAlignment:
    """Cosine of an update's gradient with the one before.

    Args:
        gradient: [d], flat, of this update.
        previous: [d], of the update before; None at the first.
    """
    if previous is None:
        return SuccessiveAlignment()
    return SuccessiveAlignment(defined(cosine(gradient.double(), previous.double())))


@no_grad
def minibatch_alignment(gradients: Tensor) -> MinibatchAlignment:
    """Agreement of K gradients, taken at the same parameters.

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
    """Σ g_i·g_j / Σ |g_i||g_j| over the pairs of K gradients [K, d], 0-d: long ones count more."""
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
        .bounds(
            healthy="< 0.3",
            warn="> 0.5",
            critical="> 0.9",
            source="heuristic; embedding rows are excluded by the caller",
        )
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
        .absent("the tensor has no gradient")
    )


@dataclass(frozen=True, slots=True)
class GradientSigns(MetricGroup):
    """Share of positive entries among the non-zero ones."""

    replicated: ClassVar[bool] = True
    pos_frac: Mean | None = reports(
        Metric.fraction("grad/sign/pos_frac", 547, "share of positive entries", cost="sampled")
        .asks("Do gradients point up and down alike, or all one way?")
        .bounds(healthy="0.4 to 0.6", warn="outside 0.25 to 0.75 for layers without bias", source="heuristic")
        .absent("every entry is zero")
        .advises("Centre and scale the inputs; look for features or targets that are always positive.")
    )


@no_grad
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


@no_grad
def gradient_signs(gradients: Sequence[Tensor]) -> GradientSigns:
    """Share of positive entries among the non-zero, non-NaN ones of all tensors."""
    if not gradients:
        return GradientSigns()
    positive = torch.stack([(g > 0).sum() for g in gradients]).sum()
    negative = torch.stack([(g < 0).sum() for g in gradients]).sum()
    return GradientSigns(Mean(positive, positive + negative))
