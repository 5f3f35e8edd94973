"""Do gradients agree with each other: of minibatches (G6, G7; Ilyas 2020) and of successive updates (G6)?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esper_telemetry.group import Mean, Metric, MetricGroup, reports
from esper_telemetry.metrics.defined import defined
from esper_telemetry.metrics.gradients.interference import cosine


@dataclass(frozen=True, slots=True)
class SuccessiveAlignment(MetricGroup):
    """Agreement of an update's gradient with the one before."""

    replicated: ClassVar[bool] = True
    successive_cos: Mean | None = reports(
        Metric(
            key="grad/align/successive_cos",
            number=541,
            unit="cosine",
            question="Does this update go on in the direction of the one before? Judge its average only.",
            cost="sampled",
            low=-1.0,
            high=1.0,
            healthy="EMA > -0.1",
            warn="EMA < -0.3: updates undo each other",
            source="heuristic",
            undefined="the first update, or either gradient is zero or not finite",
        )
    )


@dataclass(frozen=True, slots=True)
class MinibatchAlignment(MetricGroup):
    """Agreement of the gradients of several minibatches."""

    replicated: ClassVar[bool] = True
    mean_pair_cos: Mean | None = reports(
        Metric(
            key="grad/align/mean_pair_cos",
            number=542,
            unit="cosine",
            question="Do minibatches agree on the direction? 0 is chance: the gradient is noise.",
            low=-1.0,
            high=1.0,
            cost="sampled",
            healthy="> 0; chance is 0 ± 1/√(parameters · pairs)",
            source="Ilyas 2020, 1811.02553",
            undefined="fewer than two minibatches, or a gradient is zero or not finite",
        )
    )
    direction_variance: Mean | None = reports(
        Metric(
            key="grad/align/direction_variance",
            number=543,
            unit="fraction",
            question="How much do the directions of minibatch gradients scatter? 0 is all the same.",
            low=0.0,
            high=1.0,
            cost="sampled",
            undefined="fewer than two minibatches, or a gradient is zero or not finite",
        )
    )
    sign_agreement: Mean | None = reports(
        Metric(
            key="grad/sign/agreement",
            number=544,
            unit="fraction",
            question="How far do minibatches agree on each gradient's sign? √(2/(πK)) is chance for K of them.",
            low=0.0,
            high=1.0,
            cost="sampled",
            undefined="fewer than two minibatches, or a gradient is not finite",
        )
    )


@torch.no_grad()
def successive_alignment(gradient: Tensor, previous: Tensor | None) -> SuccessiveAlignment:
    """Cosine of an update's gradient with the one before.

    Args:
        gradient: [d], flat, of this update.
        previous: [d], of the update before; None at the first.
    """
    if previous is None:
        return SuccessiveAlignment()
    return SuccessiveAlignment(defined(cosine(gradient.double(), previous.double())))


@torch.no_grad()
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


@torch.no_grad()
def weighted_pair_cosine(gradients: Tensor) -> Tensor:
    """Σ g_i·g_j / Σ |g_i||g_j| over the pairs of K gradients [K, d], 0-d: long ones count more."""
    gradients = gradients.double()
    sizes = torch.linalg.vector_norm(gradients, dim=1)
    own = sizes.square().sum()
    total: Tensor = (gradients.sum(0).square().sum() - own) / (sizes.sum().square() - own)
    return total
