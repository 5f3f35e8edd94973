"""Equation of the policy loss, the clipped surrogate of PPO: the losses of all minibatches, or one minibatch with its graph.

Shapes: M minibatches with R rows in total, concatenated; N rows of one minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from esper_telemetry.core.arrays import ArrayLike, as_tensor
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.minibatch_objective import LossRows
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.comparison import EquationCheck, compare
from esper_telemetry.equations.equation import Equation, mistake, variant
from esper_telemetry.equations.minibatch_losses import (
    LOSS_TOLERANCE,
    Minibatches,
    OneMinibatch,
    added,
    bisected,
    divided,
    informative,
    rescaled,
    with_padding,
)
from esper_telemetry.metrics.ratio import EXP_LIMIT

DUAL_CLIP: Final = 3.0
"""Bound of the ratio for negative advantages in the dual-clip paper (1912.09729)."""


@dataclass(frozen=True, slots=True)
class PolicyLossInputs:
    """Rows [R] that the policy loss is computed from: float64, or one minibatch with its graph.

    Attributes:
        log_ratio: current log-probability minus log-probability at collection.
        advantages: as they multiply the ratio.
        clip: range of the ratio; None for a policy gradient without a ratio.
        raw_advantages: before normalisation, if the settings enable it.
        log_probs: current log-probabilities.
        head_log_ratios: of each head, if there are several.
        bonus: [M], the entropy loss times its weight.
        returns, values: the critic's targets, and its current estimates.
    """

    log_ratio: Tensor
    advantages: Tensor
    minibatches: Minibatches
    clip: float | None
    raw_advantages: Tensor | None = None
    log_probs: Tensor | None = None
    head_log_ratios: tuple[Tensor, ...] = ()
    bonus: Tensor | None = None
    returns: Tensor | None = None
    values: Tensor | None = None

    @classmethod
    def of(cls, rows: LossRows) -> PolicyLossInputs:
        """Return the rows of one minibatch."""
        return cls(
            log_ratio=rows.log_ratio,
            advantages=rows.advantages,
            minibatches=OneMinibatch.like(rows.log_ratio),
            clip=rows.clip,
            raw_advantages=rows.raw_advantages,
            log_probs=rows.log_probs,
            returns=rows.returns,
            values=rows.values,
        )

    @property
    def ratio(self) -> Tensor:
        """Current probability of the action divided by its probability at collection, [R]."""
        return self.log_ratio.exp()

    @property
    def width(self) -> float:
        """Clip range; 0 without a ratio."""
        return self.clip or 0.0

    @property
    def raw(self) -> Tensor | None:
        """Advantages before normalisation [R]; None unless they differ from the advantages in use."""
        raw = self.raw_advantages
        return None if raw is None or torch.equal(raw, self.advantages) else raw

    def clipped(self, low: float | None = None, high: float | None = None) -> Tensor:
        """Return the ratio [R], clipped to 1 ± clip or to other bounds."""
        return self.ratio.clamp(1 - self.width if low is None else low, 1 + self.width if high is None else high)

    def mean(self, rows: Tensor) -> Tensor:
        """Return the negative means [M] of gains [R], because gains are maximised."""
        return -self.minibatches.mean(rows)

    def of_advantages(self, advantages: Tensor) -> Tensor:
        """Return the loss [M] of other advantages [R]."""
        return clipped_surrogate(replace(self, advantages=advantages))


def clipped_surrogate(x: PolicyLossInputs) -> Tensor:
    """Return the clipped surrogate loss [M] (1707.06347, eq. 7), or -A log π if there is no ratio."""
    if x.clip is None and x.log_probs is not None:
        return x.mean(x.advantages * x.log_probs)
    return pessimistic(x, x.clipped())


def pessimistic(x: PolicyLossInputs, clipped: Tensor) -> Tensor:
    """Return the mean [M] of -min(r A, c A) for other clipped ratios c [R]."""
    return x.mean(torch.minimum(x.ratio * x.advantages, clipped * x.advantages))


def between(x: PolicyLossInputs, low: float, high: float) -> Tensor:
    """Return the clipped surrogate loss [M] with these bounds of the ratio."""
    return pessimistic(x, x.clipped(low, high))


def _of_all_pairs(x: PolicyLossInputs) -> Tensor:
    """Loss over all pairs of a ratio and an advantage; the sign of the advantage decides which bound applies."""
    mean = x.minibatches.mean
    if x.clip is None and x.log_probs is not None:
        return -mean(x.advantages) * mean(x.log_probs)
    gains = mean(x.advantages.clamp(min=0)) * mean(x.clipped(low=0.0))
    costs = mean((-x.advantages).clamp(min=0)) * mean(x.clipped(high=torch.inf))
    return costs - gains


def _of_negated_advantages(x: PolicyLossInputs) -> Tensor | None:
    """Loss of negated advantages; None if no ratio is clipped, because then it equals the negative loss."""
    clips = bool(((x.clipped() != x.ratio) & (x.advantages != 0)).any())
    return x.of_advantages(-x.advantages) if clips else None


def _dual_clipped(x: PolicyLossInputs, bound: float = DUAL_CLIP) -> Tensor:
    """Return the loss [M] with gains of at least `bound` times a negative advantage."""
    gains = torch.minimum(x.ratio * x.advantages, x.clipped() * x.advantages)
    return x.mean(torch.where(x.advantages < 0, torch.maximum(gains, bound * x.advantages), gains))


def _per_head(x: PolicyLossInputs) -> Tensor | None:
    losses = [clipped_surrogate(replace(x, log_ratio=ratio)) for ratio in x.head_log_ratios]
    return torch.stack(losses).sum(0) if len(losses) > 1 else None


def _per_dimension(x: PolicyLossInputs) -> Tensor | None:
    losses = _per_head(x)
    return None if losses is None else losses / len(x.head_log_ratios)


KL_ESTIMATES: Final[Mapping[str, Callable[[PolicyLossInputs], Tensor]]] = {
    "kl_difference": lambda x: x.mean(x.log_ratio),
    "kl_square": lambda x: 0.5 * x.minibatches.mean(x.log_ratio.square()),
    "kl_expectation": lambda x: x.minibatches.mean(
        x.log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT).expm1() - x.log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT)
    ),
}
"""Estimators of the divergence by name (http://joschu.net/blog/kl-approx.html)."""


def _kl_penalty(x: PolicyLossInputs, claimed: Tensor, plain: Tensor) -> tuple[float, Tensor] | None:
    """Fit the weight of each estimator and return the closest."""
    fits = [added(plain, estimate(x), claimed) for estimate in KL_ESTIMATES.values()]
    known = [fit for fit in fits if fit is not None and fit[0] > 0]
    return min(known, key=lambda fit: float((fit[1] - claimed)[::2].abs().max()), default=None)


def _bound(
    loss: Callable[[PolicyLossInputs, float], Tensor], ends: Callable[[PolicyLossInputs], tuple[float, float]]
) -> Callable[[PolicyLossInputs, Tensor], tuple[float, Tensor] | None]:
    """Return a fit of a bound of the ratio between the given limits."""

    def fit(x: PolicyLossInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
        known = informative(claimed, clipped_surrogate(x))
        return bisected(lambda bound: loss(x, bound), claimed, *ends(x)) if known else None

    return fit


POLICY_LOSS = Equation(
    name="policy_loss",
    rank=52,
    quantity="the policy losses",
    equation="L = -mean min(r A, clip(r, 1 - ε, 1 + ε) A)",
    source="1707.06347, eq. 7",
    inputs="policy losses, log-ratios and advantages of the minibatches",
    check="check_policy_loss",
    shown_by="test_losses",
    compute=clipped_surrogate,
    tolerance=LOSS_TOLERANCE,
    advice="Compare the line that computes the policy loss with the equation, term by term.",
    hypotheses=(
        mistake("sign", "the clipped surrogate without its minus sign: gradient descent lowers the gain")
        .predicts("L = mean min(r A, clip(r) A)", lambda x: -clipped_surrogate(x))
        .advises("Minimise the negative of the surrogate.", source="program: loop-pg_sign"),
        mistake("negated_advantages", "the clipped surrogate of negated advantages")
        .predicts("L = mean max(r A, clip(r) A)", _of_negated_advantages)
        .given(needs="clip", gradient="advantages_negated")
        .advises("Use max only with the two negative terms: max(-r A, -clip(r) A).")
        .cites("program: bundled-loss_sign"),
        mistake("optimistic", "the larger of the two gains instead of the smaller")
        .predicts("L = -mean max(r A, clip(r) A)", lambda x: x.mean(torch.maximum(x.ratio * x.advantages, x.clipped() * x.advantages)))
        .given(needs="clip", gradient="maximum")
        .advises("Take min of the gains, or max of the losses."),
        mistake("no_minimum", "only the clipped term, without the minimum")
        .predicts("L = -mean clip(r, 1 - ε, 1 + ε) A", lambda x: x.mean(x.clipped() * x.advantages))
        .given(needs="clip", gradient="no_minimum")
        .advises("Take the minimum of r A and clip(r) A: without it, a clipped ratio has a gradient of 0 and cannot return.")
        .cites("program: loop-pg_no_minimum"),
        mistake("no_clip", "the surrogate without clipping")
        .predicts("L = -mean r A", lambda x: x.mean(x.ratio * x.advantages))
        .given(needs="clip", gradient="no_clip")
        .advises("Clip the ratio in the second term.", source="1707.06347, eq. 6"),
        mistake("minimum_of_ratios", "the advantage times the smaller ratio, for positive and negative advantages")
        .predicts("L = -mean min(r, clip(r)) A", lambda x: x.mean(torch.minimum(x.ratio, x.clipped()) * x.advantages))
        .advises("Multiply both ratios by the advantage before the minimum."),
        mistake("inverted_ratio", "the clipped surrogate with the inverted ratio: the old probability divided by the new")
        .predicts("L = -mean min(A / r, clip(1 / r) A)", lambda x: clipped_surrogate(replace(x, log_ratio=-x.log_ratio)))
        .given(needs="clip", gradient="ratio_inverted")
        .advises("Take exp(new log-probability - old log-probability).", source="program: script-pg_ratio_inverted"),
        mistake("no_exponential", "the clipped surrogate with the log-ratio instead of the ratio")
        .predicts(
            "L = -mean min(log r A, clip(log r, 1 - ε, 1 + ε) A)",
            lambda x: x.mean(torch.minimum(x.log_ratio * x.advantages, x.log_ratio.clamp(1 - x.clip, 1 + x.clip) * x.advantages)),
        )
        .given(needs="clip", gradient="probability_difference")
        .advises("Take the exponential of the difference of the log-probabilities."),
        mistake("log_ratio_as_clip", "the smaller of the gain and the advantage times the log-ratio clipped to 1 ± ε")
        .predicts("L = -mean min(r A, clip(log r, 1 - ε, 1 + ε) A)", lambda x: pessimistic(x, x.log_ratio.clamp(1 - x.width, 1 + x.width)))
        .given(needs="clip")
        .advises("Clip the ratio, which is the exponential of the log-ratio: 1 ± ε are bounds of the ratio."),
        mistake("log_prob", "the policy gradient of the log-probability, without a ratio")
        .predicts("L = -mean log π(a) A", lambda x: x.mean(x.log_probs * x.advantages))
        .given(needs="log_probs", doubtful_without="ratio", gradient="no_ratio")
        .advises("Multiply the advantage by the ratio: over several epochs, the gradient of the log-probability is biased.")
        .cites("1602.01783 (A2C)"),
        mistake("clip_around_zero", "the clipped surrogate with the ratio clipped to ±ε instead of 1 ± ε")
        .predicts("L = -mean min(r A, clip(r, -ε, ε) A)", lambda x: between(x, -x.clip, x.clip))
        .advises("Clip to 1 - ε and 1 + ε."),
        mistake("upper_clip_only", "the clipped surrogate without the lower bound of the ratio")
        .predicts("L = -mean min(r A, min(r, 1 + ε) A)", lambda x: between(x, -torch.inf, 1 + x.clip))
        .advises("Clip the ratio on both sides."),
        mistake("lower_clip_only", "the clipped surrogate without the upper bound of the ratio")
        .predicts("L = -mean min(r A, max(r, 1 - ε) A)", lambda x: between(x, 1 - x.clip, torch.inf))
        .advises("Clip the ratio on both sides."),
        mistake("clipped_product", "the smaller of the gain and the gain clipped to 1 ± ε: the product is clipped instead of the ratio")
        .predicts("L = -mean min(r A, clip(r A, 1 - ε, 1 + ε))", lambda x: x.mean((x.ratio * x.advantages).clamp(max=1 + x.clip)))
        .advises("Clip the ratio before multiplying it by the advantage."),
        mistake("clipped_log_ratio", "the clipped surrogate with the log-ratio clipped to ±ε")
        .predicts("L = -mean min(r A, exp(clip(log r, -ε, ε)) A)", lambda x: pessimistic(x, x.log_ratio.clamp(-x.clip, x.clip).exp()))
        .advises("Clip the ratio; the matching bounds of the log-ratio are log(1 - ε) and log(1 + ε)."),
        mistake("broadcast", "the mean over all pairs of a ratio or a log-probability and an advantage: [N] was broadcast against [N, 1]")
        .predicts("L = -mean_ij min(r_i A_j, clip(r_i) A_j)", _of_all_pairs)
        .given(gradient="advantages_broadcast")
        .advises("Flatten both log-probabilities and advantages to [N].")
        .cites("PacktPublishing/Deep-Reinforcement-Learning-Hands-On#33"),
        mistake("sum", "the sum over the rows instead of the mean")
        .predicts("L = -Σ min(r A, clip(r) A)", lambda x: clipped_surrogate(x) * x.minibatches.counts)
        .advises("Take the mean, so that the step does not grow with the minibatch.", source="program: loop-pg_sum"),
        mistake("unnormalized", "the clipped surrogate of the advantages before normalisation")
        .predicts("L = -mean min(r A_raw, clip(r) A_raw)", lambda x: x.of_advantages(x.raw_advantages))
        .given(needs="raw_advantages", gradient="advantages_raw")
        .advises("Use the normalised advantages in the loss.")
        .cites("Huang et al. 2022, The 37 implementation details of PPO"),
        mistake("shifted_rows", "the clipped surrogate with each ratio times the previous row's advantage")
        .predicts("L = -mean min(r_i A_{i-1}, clip(r_i) A_{i-1})", lambda x: x.of_advantages(x.advantages[x.minibatches.followers(-1)]))
        .given(gradient="advantages_shifted")
        .advises("Index ratios and advantages with the same rows."),
        mistake("following_rows", "the clipped surrogate with each ratio times the next row's advantage")
        .predicts("L = -mean min(r_i A_{i+1}, clip(r_i) A_{i+1})", lambda x: x.of_advantages(x.advantages[x.minibatches.followers(1)]))
        .advises("Index ratios and advantages with the same rows."),
        mistake("reversed_rows", "the clipped surrogate with the advantages in reverse order")
        .predicts("L = -mean min(r_i A_{N-i}, clip(r_i) A_{N-i})", lambda x: x.of_advantages(x.advantages[x.minibatches.reversed()]))
        .given(gradient="advantages_reversed")
        .advises("Index ratios and advantages with the same rows."),
        variant("normalized_again", "the clipped surrogate of the advantages, normalised over each minibatch")
        .predicts(
            "L = -mean min(r Â, clip(r) Â), Â = (A - mean A) / std A", lambda x: x.of_advantages(x.minibatches.normalized(x.advantages))
        )
        .cites("Huang et al. 2022, The 37 implementation details of PPO"),
        variant("per_head", "the sum of the heads' clipped surrogates, each with its own ratio")
        .predicts("L = -Σ_h mean min(r_h A, clip(r_h) A)", _per_head)
        .cites("1903.01344 (H-PPO)"),
        mistake("per_dimension", "the mean over action dimensions, each with its own ratio")
        .predicts("L = -1/D Σ_i mean min(r_i A, clip(r_i) A)", _per_dimension)
        .advises("Sum the log-probabilities over the action dimensions, so that each row has one ratio."),
        variant("dual_clip", "the surrogate with dual clipping at 3")
        .predicts("L = -mean max(min(r A, clip(r) A), 3 A) if A < 0", _dual_clipped)
        .given(needs="clip", gradient="dual_clip")
        .cites("1912.09729 (dual-clip PPO)"),
        variant("truncated", "the surrogate with the ratio truncated at 1")
        .predicts("L = -mean min(r, 1) A", lambda x: x.mean(x.ratio.clamp(max=1.0) * x.advantages))
        .cites("1802.01561 (V-trace)"),
        variant("with_entropy", "the clipped surrogate plus the entropy bonus")
        .predicts("L = -mean min(r A, clip(r) A) - c H", lambda x: clipped_surrogate(x) + x.bonus)
        .given(needs="bonus", of="bonus"),
        variant("annealed_clip", "the clipped surrogate with a smaller clip range than the setting, annealed or set elsewhere,")
        .fits(
            "L = -mean min(r A, clip(r, 1 - ε', 1 + ε') A)",
            "ε",
            _bound(lambda x, clip: between(x, 1 - clip, 1 + clip), lambda x: (0.0, x.width)),
        )
        .cites("Huang et al. 2022, The 37 implementation details of PPO"),
        mistake("clip_range", "the clipped surrogate with a larger clip range than the setting,")
        .fits(
            "L = -mean min(r A, clip(r, 1 - ε', 1 + ε') A)",
            "ε",
            _bound(lambda x, clip: between(x, 1 - clip, 1 + clip), lambda x: (x.width, max(float((x.ratio - 1).abs().max()), x.width))),
        )
        .advises("Compare the bounds in the loss with the setting."),
        variant("decoupled_clip", "the clipped surrogate with a separate upper bound,")
        .fits(
            "L = -mean min(r A, clip(r, 1 - ε, 1 + ε_high) A)",
            "ε_high",
            _bound(lambda x, clip: between(x, 1 - x.width, 1 + clip), lambda x: (0.0, max(float(x.ratio.max()) - 1, x.width))),
        )
        .cites("2503.14476 (DAPO), eq. 10"),
        variant("other_dual_clip", "the surrogate with dual clipping,")
        .fits(
            "L = -mean max(min(r A, clip(r) A), c A) if A < 0", "c", _bound(_dual_clipped, lambda x: (1.0, max(float(x.ratio.max()), 1.0)))
        )
        .cites("1912.09729 (dual-clip PPO)"),
        variant("kl_penalty", "the clipped surrogate with a penalty on the divergence,")
        .fits("L = -mean min(r A, clip(r) A) + β KL", "β", lambda x, claimed: _kl_penalty(x, claimed, clipped_surrogate(x)))
        .cites("1707.06347, eq. 8"),
        variant("kl_penalty_alone", "the surrogate without clipping and with a penalty on the divergence,")
        .fits("L = -mean r A + β KL", "β", lambda x, claimed: _kl_penalty(x, claimed, x.mean(x.ratio * x.advantages)))
        .cites("1707.06347, eq. 8"),
        *with_padding(clipped_surrogate, "-min(r A, clip(r) A)"),
        *rescaled(clipped_surrogate, "the clipped surrogate", "-mean min(r A, clip(r) A)"),
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

    A single minibatch in which all ratios are 1 is weak evidence: pass all minibatches of an update at once.

    Args:
        loss: 0-d, or [M], one per minibatch.
        log_ratio: [N], or [M, N], or [R] with `counts`: current log-probability of the action minus its log-probability at collection.
        advantages: of the same shape: as they multiply the ratio, after any normalisation.
        clip: ε, above 0.
        valid: bool, of the same shape; None if every row counts.
        counts: rows of each minibatch, if the columns are [R].
        raw_advantages: of the same shape: before normalisation, if the advantages should be normalised.
        log_probs: of the same shape: current log-probabilities of the actions.
        head_log_ratios: each of the same shape: log-ratios of the heads of a policy with several heads.
        bonus: of the shape of the loss: the entropy loss times its weight.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision if it is None.

    Raises:
        ValueError: shapes do not fit, or the clip range is not above 0.
    """
    if not clip > 0:
        raise ValueError(f"clip must be above 0, got {clip!r}")
    heads = {f"head_{place}": ratio for place, ratio in enumerate(head_log_ratios)}
    columns = {"log_ratio": log_ratio, "advantages": advantages, "raw_advantages": raw_advantages, "log_probs": log_probs, **heads}
    claimed, minibatches, rows = divided(loss, counts, valid, **columns)
    head_rows = tuple([rows.pop(head) for head in heads])
    weighted = None if bonus is None else as_tensor(bonus, claimed).detach().reshape(-1).double()
    inputs = PolicyLossInputs(minibatches=minibatches, clip=float(clip), head_log_ratios=head_rows, bonus=weighted, **rows)
    terms = minibatches.mean(inputs.advantages.abs() * inputs.ratio.clamp(min=1))
    return compare(POLICY_LOSS, inputs, claimed, magnitudes=(terms,), precision=precision, tolerance=tolerance)
