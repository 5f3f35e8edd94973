"""How much of the gradient is noise: the ingredients of the gradient noise scale (G9; McCandlish 2018, App. A).

Traps: minibatches of one epoch are taken at different parameters, so use shards of one minibatch; the unit of
recurrent policies is the sequence; gradients must not be clipped before. Single estimates are hopeless: `series.noise`
averages them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.metric import Metric, reports
from esper_telemetry.core.reduction import Mean
from esper_telemetry.metrics.statistics import defined


@dataclass(frozen=True, slots=True)
class GradientNoise(MetricGroup):
    """Unbiased estimates of the true gradient's squared norm and of the noise of one sample's gradient."""

    replicated: ClassVar[bool] = True
    g2: Mean | None = reports(
        Metric.quantity("grad/gns/g2", 560, "squared norm of the true gradient", unit="gradient norm²", cost="sampled")
        .asks("How large is the true gradient, squared, noise removed? Single estimates may be negative.")
        .bounds(source="McCandlish 2018, 1812.06162")
        .absent("fewer than two shards, or a gradient is not finite")
    )
    tr_sigma: Mean | None = reports(
        Metric.quantity(
            "grad/gns/tr_sigma", 561, "noise of a single sample's gradient", unit="gradient norm²", cost="sampled"
        )
        .asks("How large is the noise in the gradient of a single sample, squared?")
        .bounds(source="McCandlish 2018, 1812.06162")
        .absent("fewer than two shards, or a gradient is not finite")
    )


@no_grad
def shard_noise(gradients: Tensor, batches: Sequence[int]) -> GradientNoise:
    """Noise from the gradients of K shards of one batch, taken at the same parameters, not clipped.

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
    """Noise from mean squared gradient norms at two batch sizes: E|g_b|² = |G|² + tr Σ/b.

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
        g2=defined((b_big * big - b_small * small) / (b_big - b_small)),
        tr_sigma=defined((small - big) / (1.0 / b_small - 1.0 / b_big)),
    )
