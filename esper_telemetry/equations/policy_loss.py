"""Equation of the policy loss: the clipped surrogate of PPO.

Shapes: M minibatches of R rows in all, one minibatch after the other; N rows of one minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from esper_telemetry.core.arrays import ArrayLike, as_tensor
from esper_telemetry.core.borders import checked_arguments
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.equations.comparison import EquationCheck, compare
from esper_telemetry.equations.equation import Equation, Hypothesis
from esper_telemetry.equations.total_loss import (
    LOSS_TOLERANCE,
    Minibatches,
    added,
    bisected,
    divided,
    informative,
    rescaled,
    with_padding,
)

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


PPO_SOURCE: Final = "1707.06347, eq. 7"
DETAILS_SOURCE: Final = "Huang et al. 2022, The 37 implementation details of PPO"


def _of_negated_advantages(inputs: PolicyLossInputs) -> Tensor | None:
    """The loss of advantages with the other sign; None where no ratio is clipped, because that is the negative loss then."""
    clips = bool((inputs.clipped() != inputs.ratio).any())
    return clipped_surrogate(replace(inputs, advantages=-inputs.advantages)) if clips else None


POLICY_LOSS = Equation(
    name="policy_loss",
    rank=52,
    quantity="the policy losses",
    equation="L = -mean min(r A, clip(r, 1 - ε, 1 + ε) A)",
    source=PPO_SOURCE,
    inputs="policy losses, log-ratios and advantages of the minibatches",
    compute=clipped_surrogate,
    tolerance=LOSS_TOLERANCE,
    advice="Compare the line of the policy loss with the equation, term by term.",
    hypotheses=(
        Hypothesis(
            name="sign",
            says="the clipped surrogate without its minus sign, so that descent lowers the gain",
            equation="L = mean min(r A, clip(r) A)",
            compute=lambda x: -clipped_surrogate(x),
            advice="Minimise the negative of the surrogate.",
        ),
        Hypothesis(
            name="negated_advantages",
            says="the clipped surrogate of the advantages with the opposite sign",
            equation="L = mean max(r A, clip(r) A)",
            compute=_of_negated_advantages,
            advice="Use max only with the two negative terms: max(-r A, -clip(r) A).",
        ),
        Hypothesis(
            name="optimistic",
            says="the larger of the two gains in place of the smaller",
            equation="L = -mean max(r A, clip(r) A)",
            compute=lambda x: -x.minibatches.mean(torch.maximum(x.ratio * x.advantages, x.clipped() * x.advantages)),
            advice="Take min of the gains, or max of the losses.",
        ),
        Hypothesis(
            name="no_minimum",
            says="the clipped term alone, without the minimum",
            equation="L = -mean clip(r, 1 - ε, 1 + ε) A",
            compute=lambda x: -x.minibatches.mean(x.clipped() * x.advantages),
            advice="Take the minimum of r A and clip(r) A: the clipped term alone has no gradient that brings a ratio back.",
        ),
        Hypothesis(
            name="no_clip",
            says="the surrogate without clipping",
            equation="L = -mean r A",
            compute=lambda x: -x.minibatches.mean(x.ratio * x.advantages),
            source="1707.06347, eq. 6",
            advice="Clip the ratio in the second term.",
        ),
        Hypothesis(
            name="minimum_of_ratios",
            says="the advantage times the smaller ratio, whatever the sign of the advantage",
            equation="L = -mean min(r, clip(r)) A",
            compute=lambda x: -x.minibatches.mean(torch.minimum(x.ratio, x.clipped()) * x.advantages),
            advice="Multiply both ratios by the advantage before the minimum.",
        ),
        Hypothesis(
            name="inverted_ratio",
            says="the clipped surrogate with the ratio inverted: the old probability over the new one",
            equation="L = -mean min(A / r, clip(1 / r) A)",
            compute=lambda x: clipped_surrogate(replace(x, log_ratio=-x.log_ratio)),
            advice="Take exp(new log-probability - old log-probability).",
        ),
        Hypothesis(
            name="no_exponential",
            says="the clipped surrogate with the log-ratio in place of the ratio",
            equation="L = -mean min(log r A, clip(log r, 1 - ε, 1 + ε) A)",
            compute=lambda x: (
                -x.minibatches.mean(
                    torch.minimum(x.log_ratio * x.advantages, x.log_ratio.clamp(1 - x.clip, 1 + x.clip) * x.advantages)
                )
            ),
            advice="Take the exponential of the difference of the log-probabilities.",
        ),
        Hypothesis(
            name="log_prob",
            says="the policy gradient of the log-probability, without a ratio",
            equation="L = -mean log π(a) A",
            compute=lambda x: None if x.log_probs is None else -x.minibatches.mean(x.log_probs * x.advantages),
            source="1602.01783 (A2C)",
            advice="Multiply the advantage by the ratio: over several epochs the log-probability is biased.",
        ),
        Hypothesis(
            name="clip_around_zero",
            says="the clipped surrogate with the ratio clipped to ±ε in place of 1 ± ε",
            equation="L = -mean min(r A, clip(r, -ε, ε) A)",
            compute=lambda x: between(x, -x.clip, x.clip),
            advice="Clip to 1 - ε and 1 + ε.",
        ),
        Hypothesis(
            name="upper_clip_only",
            says="the clipped surrogate without the lower bound of the ratio",
            equation="L = -mean min(r A, min(r, 1 + ε) A)",
            compute=lambda x: between(x, -torch.inf, 1 + x.clip),
            advice="Clip the ratio on both sides.",
        ),
        Hypothesis(
            name="lower_clip_only",
            says="the clipped surrogate without the upper bound of the ratio",
            equation="L = -mean min(r A, max(r, 1 - ε) A)",
            compute=lambda x: between(x, 1 - x.clip, torch.inf),
            advice="Clip the ratio on both sides.",
        ),
        Hypothesis(
            name="clipped_product",
            says="the smaller of the gain and the gain clipped to 1 ± ε: the product is clipped and not the ratio",
            equation="L = -mean min(r A, clip(r A, 1 - ε, 1 + ε))",
            compute=lambda x: -x.minibatches.mean((x.ratio * x.advantages).clamp(max=1 + x.clip)),
            advice="Clip the ratio before it is multiplied by the advantage.",
        ),
        Hypothesis(
            name="clipped_log_ratio",
            says="the clipped surrogate with the log-ratio clipped to ±ε",
            equation="L = -mean min(r A, exp(clip(log r, -ε, ε)) A)",
            compute=lambda x: pessimistic(x, x.log_ratio.clamp(-x.clip, x.clip).exp()),
            advice="Clip the ratio: bounds of the log-ratio are log(1 - ε) and log(1 + ε).",
        ),
        Hypothesis(
            name="broadcast",
            says="the mean over all pairs of a ratio and an advantage: [N] was broadcast against [N, 1]",
            equation="L = -mean_ij min(r_i A_j, clip(r_i) A_j)",
            compute=surrogate_of_all_pairs,
            source="PacktPublishing/Deep-Reinforcement-Learning-Hands-On#33",
            advice="Flatten log-probabilities and advantages to [N] both.",
        ),
        Hypothesis(
            name="sum",
            says="the sum over the rows in place of the mean",
            equation="L = -Σ min(r A, clip(r) A)",
            compute=lambda x: clipped_surrogate(x) * x.minibatches.counts,
            advice="Take the mean, so that the step does not grow with the minibatch.",
        ),
        Hypothesis(
            name="unnormalized",
            says="the clipped surrogate of the advantages before normalisation",
            equation="L = -mean min(r A_raw, clip(r) A_raw)",
            compute=lambda x: (
                None if x.raw_advantages is None else clipped_surrogate(replace(x, advantages=x.raw_advantages))
            ),
            source=DETAILS_SOURCE,
            advice="Use the normalised advantages in the loss.",
        ),
        Hypothesis(
            name="shifted_rows",
            says="the clipped surrogate with each ratio beside the advantage of the row before",
            equation="L = -mean min(r_i A_{i-1}, clip(r_i) A_{i-1})",
            compute=lambda x: clipped_surrogate(replace(x, advantages=x.advantages[x.minibatches.followers(-1)])),
            advice="Index ratios and advantages with the same rows.",
        ),
        Hypothesis(
            name="following_rows",
            says="the clipped surrogate with each ratio beside the advantage of the row after",
            equation="L = -mean min(r_i A_{i+1}, clip(r_i) A_{i+1})",
            compute=lambda x: clipped_surrogate(replace(x, advantages=x.advantages[x.minibatches.followers(1)])),
            advice="Index ratios and advantages with the same rows.",
        ),
        Hypothesis(
            name="reversed_rows",
            says="the clipped surrogate with the advantages in the reverse order of the rows",
            equation="L = -mean min(r_i A_{N-i}, clip(r_i) A_{N-i})",
            compute=lambda x: clipped_surrogate(replace(x, advantages=x.advantages[x.minibatches.reversed()])),
            advice="Index ratios and advantages with the same rows.",
        ),
        Hypothesis(
            name="normalized_again",
            says="the clipped surrogate of the advantages, normalised over each minibatch",
            equation="L = -mean min(r Â, clip(r) Â), Â = (A - mean A) / std A",
            compute=lambda x: clipped_surrogate(replace(x, advantages=x.minibatches.normalized(x.advantages))),
            variant=True,
            source=DETAILS_SOURCE,
        ),
        Hypothesis(
            name="per_head",
            says="the sum of the heads' clipped surrogates, each with its own ratio",
            equation="L = -Σ_h mean min(r_h A, clip(r_h) A)",
            compute=per_head,
            variant=True,
            source="1903.01344 (H-PPO)",
        ),
        Hypothesis(
            name="dual_clip",
            says="the surrogate with dual clipping at 3",
            equation="L = -mean max(min(r A, clip(r) A), 3 A) where A < 0",
            compute=dual_clipped,
            variant=True,
            source="1912.09729 (dual-clip PPO)",
        ),
        Hypothesis(
            name="truncated",
            says="the surrogate with the ratio truncated at 1",
            equation="L = -mean min(r, 1) A",
            compute=lambda x: -x.minibatches.mean(x.ratio.clamp(max=1.0) * x.advantages),
            variant=True,
            source="1802.01561 (V-trace)",
        ),
        Hypothesis(
            name="with_entropy",
            says="the clipped surrogate with the entropy bonus in it",
            equation="L = -mean min(r A, clip(r) A) - c H",
            compute=lambda x: None if x.bonus is None else clipped_surrogate(x) + x.bonus,
            variant=True,
        ),
        Hypothesis(
            name="annealed_clip",
            says="the clipped surrogate with a smaller clip range than the setting, annealed or set elsewhere,",
            equation="L = -mean min(r A, clip(r, 1 - ε', 1 + ε') A)",
            fit=lambda x, claimed: other_range(x, claimed, wider=False),
            parameter="ε",
            variant=True,
            source=DETAILS_SOURCE,
        ),
        Hypothesis(
            name="clip_range",
            says="the clipped surrogate with a larger clip range than the setting,",
            equation="L = -mean min(r A, clip(r, 1 - ε', 1 + ε') A)",
            fit=lambda x, claimed: other_range(x, claimed, wider=True),
            parameter="ε",
            advice="Compare the bounds in the loss with the setting.",
        ),
        Hypothesis(
            name="decoupled_clip",
            says="the clipped surrogate with an upper bound of its own,",
            equation="L = -mean min(r A, clip(r, 1 - ε, 1 + ε_high) A)",
            fit=other_upper_bound,
            parameter="ε_high",
            variant=True,
            source="2503.14476 (DAPO), eq. 10",
        ),
        Hypothesis(
            name="other_dual_clip",
            says="the surrogate with dual clipping,",
            equation="L = -mean max(min(r A, clip(r) A), c A) where A < 0",
            fit=other_dual_clip,
            parameter="c",
            variant=True,
            source="1912.09729 (dual-clip PPO)",
        ),
        Hypothesis(
            name="kl_penalty",
            says="the clipped surrogate with a penalty on the divergence,",
            equation="L = -mean min(r A, clip(r) A) + β KL",
            fit=lambda x, claimed: kl_penalty(x, claimed, clipped_surrogate(x)),
            parameter="β",
            variant=True,
            source="1707.06347, eq. 8",
        ),
        Hypothesis(
            name="kl_penalty_alone",
            says="the surrogate without clipping and with a penalty on the divergence,",
            equation="L = -mean r A + β KL",
            fit=lambda x, claimed: kl_penalty(x, claimed, -x.minibatches.mean(x.ratio * x.advantages)),
            parameter="β",
            variant=True,
            source="1707.06347, eq. 8",
        ),
        *with_padding(clipped_surrogate, "-min(r A, clip(r) A)"),
        *rescaled(clipped_surrogate, "the clipped surrogate", "-mean min(r A, clip(r) A)", variant=False),
    ),
)


@checked_arguments(clip=0, tolerance=0)
@inference_mode
def check_policy_loss(
    loss: ArrayLike,
    log_ratio: ArrayLike,
    advantages: ArrayLike,
    *,
    clip: float,
    valid: ArrayLike | None = None,
    counts: Sequence[int] | None = None,
    raw_advantages: ArrayLike | None = None,
    log_probs: ArrayLike | None = None,
    head_log_ratios: Sequence[ArrayLike] = (),
    bonus: ArrayLike | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of policy losses with the clipped surrogate of PPO.

    One minibatch of ratios that are all 1 tells little: give all minibatches of an update at once.

    Args:
        loss: 0-d, or [M], one per minibatch.
        log_ratio: [N], or [M, N], or [R] with `counts`: log-probability of the action now minus at collection.
        advantages: of the same shape: as they multiply the ratio, that is normalised where they are.
        clip: ε, above 0.
        valid: bool, of the same shape; None where every row counts.
        counts: rows of each minibatch, where the columns are [R].
        raw_advantages: of the same shape: before normalisation, where the advantages should be normalised.
        log_probs: of the same shape: log-probabilities of the actions now.
        head_log_ratios: of the same shape each: of the heads of a policy with several.
        bonus: of the shape of the loss: the entropy loss times its weight.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision where it is None.

    Raises:
        ValueError: shapes do not fit, or the clip range is not above 0.
    """
    if not clip > 0:
        raise ValueError(f"clip must be above 0, got {clip!r}")
    ratios = as_tensor(log_ratio)
    given = {"advantages": advantages, "raw_advantages": raw_advantages, "log_probs": log_probs}
    given |= {f"head_{place}": ratio for place, ratio in enumerate(head_log_ratios)}
    columns = {name: as_tensor(column, ratios) for name, column in given.items() if column is not None}
    claimed, minibatches, rows = divided(as_tensor(loss), counts, valid, log_ratio=ratios, **columns)
    inputs = PolicyLossInputs(
        log_ratio=rows["log_ratio"],
        advantages=rows["advantages"],
        minibatches=minibatches,
        clip=float(clip),
        raw_advantages=rows.get("raw_advantages"),
        log_probs=rows.get("log_probs"),
        head_log_ratios=tuple(rows[f"head_{place}"] for place in range(len(head_log_ratios))),
        bonus=None if bonus is None else as_tensor(bonus, ratios).detach().reshape(-1).double(),
    )
    terms = minibatches.mean(inputs.advantages.abs() * inputs.ratio.clamp(min=1))
    return compare(POLICY_LOSS, inputs, claimed, magnitudes=(terms,), precision=precision, tolerance=tolerance)
