"""Forms of the policy loss: the clipped surrogate, its variants, and fits of their parameters.

Shapes: M minibatches of R rows in all, one minibatch after the other; N rows of one minibatch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.metrics.integrity.losses.losses import Minibatches, added, bisected, informative

DUAL_CLIP: Final = 3.0
"""Bound of the ratio where advantages are negative, in the paper of dual-clip PPO."""


@dataclass(frozen=True, slots=True)
class PolicyLossInputs:
    """Rows [R] that the policy loss is computed from, float64.

    Attributes:
        log_ratio: log-probability now minus at collection.
        advantages: as they multiply the ratio.
        raw_advantages: before normalisation, where the settings ask for it.
        log_probs: now.
        head_log_ratios: of each head, where there are several.
        bonus: [M], the entropy loss times its weight.
    """

    log_ratio: Tensor
    advantages: Tensor
    minibatches: Minibatches
    clip: float
    raw_advantages: Tensor | None = None
    log_probs: Tensor | None = None
    head_log_ratios: tuple[Tensor, ...] = ()
    bonus: Tensor | None = None

    @property
    def ratio(self) -> Tensor:
        """Probability of the action now over that at collection, [R]."""
        return self.log_ratio.exp()

    def clipped(self, low: float | None = None, high: float | None = None) -> Tensor:
        """Return the ratio [R] within 1 ± clip, or within other bounds."""
        return self.ratio.clamp(1 - self.clip if low is None else low, 1 + self.clip if high is None else high)


def clipped_surrogate(inputs: PolicyLossInputs) -> Tensor:
    """Return the clipped surrogate loss [M] (1707.06347, eq. 7)."""
    return pessimistic(inputs, inputs.clipped())


def pessimistic(inputs: PolicyLossInputs, clipped: Tensor) -> Tensor:
    """Return the mean [M] of -min(r A, c A) for other clipped ratios c [R]."""
    gains = torch.minimum(inputs.ratio * inputs.advantages, clipped * inputs.advantages)
    return -inputs.minibatches.mean(gains)


def between(inputs: PolicyLossInputs, low: float, high: float) -> Tensor:
    """Return the clipped surrogate loss [M] with these bounds of the ratio."""
    return pessimistic(inputs, inputs.clipped(low, high))


def surrogate_of_all_pairs(inputs: PolicyLossInputs) -> Tensor:
    """Mean over all pairs of a ratio and an advantage: the sign of the advantage decides which bound counts."""
    ratio, mean = inputs.ratio, inputs.minibatches.mean
    gains = mean(inputs.advantages.clamp(min=0)) * mean(ratio.clamp(max=1 + inputs.clip))
    costs = mean((-inputs.advantages).clamp(min=0)) * mean(ratio.clamp(min=1 - inputs.clip))
    return costs - gains


def dual_clipped(inputs: PolicyLossInputs, bound: float = DUAL_CLIP) -> Tensor:
    """Return the loss [M] with gains that are at least `bound` times the advantage where it is negative."""
    advantages = inputs.advantages
    gains = torch.minimum(inputs.ratio * advantages, inputs.clipped() * advantages)
    return -inputs.minibatches.mean(torch.where(advantages < 0, torch.maximum(gains, bound * advantages), gains))


def per_head(inputs: PolicyLossInputs) -> Tensor | None:
    """Return the sum [M] of the heads' clipped surrogates, each with its own ratio; None where there is one head."""
    losses = [clipped_surrogate(replace(inputs, log_ratio=ratio)) for ratio in inputs.head_log_ratios]
    return torch.stack(losses).sum(0) if len(losses) > 1 else None


def _if_padded(inputs: PolicyLossInputs) -> PolicyLossInputs | None:
    batches = inputs.minibatches
    return None if bool(batches.valid.all()) else replace(inputs, minibatches=batches.with_padding())


def with_padding_rows(inputs: PolicyLossInputs) -> Tensor | None:
    """Return the mean [M] over all rows, padding included; None where there is none."""
    padded = _if_padded(inputs)
    return None if padded is None else clipped_surrogate(padded)


def over_padding(inputs: PolicyLossInputs) -> Tensor | None:
    """Return the sum over the valid rows, divided by the number of all rows, [M]; None where there is no padding."""
    padded, batches = _if_padded(inputs), inputs.minibatches
    return None if padded is None else clipped_surrogate(inputs) * batches.counts / padded.minibatches.counts


def kl_penalty(inputs: PolicyLossInputs, claimed: Tensor, plain: Tensor) -> tuple[float, Tensor] | None:
    """Fit the weight of each estimator of the divergence (http://joschu.net/blog/kl-approx.html) and keep the closest."""
    log_ratio, mean = inputs.log_ratio, inputs.minibatches.mean
    terms = (mean(-log_ratio), mean(log_ratio.square() / 2), mean(log_ratio.expm1() - log_ratio))
    fits = [fit for term in terms if (fit := added(plain, term, claimed)) is not None and fit[0] > 0]
    return min(fits, key=lambda fit: float((fit[1] - claimed)[::2].abs().max()), default=None)


def other_range(inputs: PolicyLossInputs, claimed: Tensor, *, wider: bool) -> tuple[float, Tensor] | None:
    """Fit a clip range that is wider than the one that is set, or narrower."""
    if not informative(claimed, clipped_surrogate(inputs)):
        return None
    widest = max(float((inputs.ratio - 1).abs().max()), inputs.clip)
    bounds = (inputs.clip, widest) if wider else (0.0, inputs.clip)
    return bisected(lambda clip: between(inputs, 1 - clip, 1 + clip), claimed, *bounds)


def other_upper_bound(inputs: PolicyLossInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Fit an upper bound of the ratio, beside the lower one that is set."""
    if not informative(claimed, clipped_surrogate(inputs)):
        return None
    highest = max(float(inputs.ratio.max()) - 1, inputs.clip)
    return bisected(lambda clip: between(inputs, 1 - inputs.clip, 1 + clip), claimed, 0.0, highest)


def other_dual_clip(inputs: PolicyLossInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Fit the bound of dual clipping."""
    if not informative(claimed, clipped_surrogate(inputs)):
        return None
    return bisected(lambda bound: dual_clipped(inputs, bound), claimed, 1.0, max(float(inputs.ratio.max()), 1.0))
