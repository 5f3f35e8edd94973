"""Equation of the policy loss, the clipped surrogate of PPO: values of the losses of all minibatches, and the graph of one.

Shapes: M minibatches of R rows in all, one minibatch after the other; N rows of one minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from esper_telemetry.core.arrays import ArrayLike, as_tensor
from esper_telemetry.core.borders import checked_arguments
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.minibatch_objective import LossRows
from esper_telemetry.equations.comparison import EquationCheck, compare
from esper_telemetry.equations.equation import Equation, Fit, hypothesis_table
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
"""Bound of the ratio where advantages are negative, in the paper of dual-clip PPO (1912.09729)."""


@dataclass(frozen=True, slots=True)
class PolicyLossInputs:
    """Rows [R] that the policy loss is computed from: float64, or one minibatch with its graph.

    Attributes:
        log_ratio: log-probability now minus at collection.
        advantages: as they multiply the ratio.
        clip: range of the ratio; None for a policy gradient without a ratio.
        raw_advantages: before normalisation, where the settings ask for it.
        log_probs: now.
        head_log_ratios: of each head, where there are several.
        bonus: [M], the entropy loss times its weight.
        returns, values: the critic's targets, and its estimates now.
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
        """Probability of the action now over that at collection, [R]."""
        return self.log_ratio.exp()

    @property
    def width(self) -> float:
        """Clip range, 0 without a ratio."""
        return self.clip or 0.0

    @property
    def raw(self) -> Tensor | None:
        """Advantages before normalisation [R]; None unless they differ from those in use."""
        raw = self.raw_advantages
        return None if raw is None or torch.equal(raw, self.advantages) else raw

    def clipped(self, low: float | None = None, high: float | None = None) -> Tensor:
        """Return the ratio [R] within 1 ± clip, or within other bounds."""
        return self.ratio.clamp(1 - self.width if low is None else low, 1 + self.width if high is None else high)

    def mean(self, rows: Tensor) -> Tensor:
        """Return the means [M] of rows [R], negative: gains are maximised."""
        return -self.minibatches.mean(rows)

    def of_advantages(self, advantages: Tensor) -> Tensor:
        """Return the loss [M] of other advantages [R]."""
        return clipped_surrogate(replace(self, advantages=advantages))


def clipped_surrogate(x: PolicyLossInputs) -> Tensor:
    """Return the clipped surrogate loss [M] (1707.06347, eq. 7), or -A log π where there is no ratio."""
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
    """Mean over all pairs of a ratio and an advantage: the sign of the advantage decides which bound counts."""
    mean = x.minibatches.mean
    if x.clip is None and x.log_probs is not None:
        return -mean(x.advantages) * mean(x.log_probs)
    gains = mean(x.advantages.clamp(min=0)) * mean(x.clipped(low=0.0))
    costs = mean((-x.advantages).clamp(min=0)) * mean(x.clipped(high=torch.inf))
    return costs - gains


def _of_negated_advantages(x: PolicyLossInputs) -> Tensor | None:
    """The loss of advantages with the other sign; None if no ratio is clipped, because that is the negative loss then."""
    clips = bool(((x.clipped() != x.ratio) & (x.advantages != 0)).any())
    return x.of_advantages(-x.advantages) if clips else None


def _dual_clipped(x: PolicyLossInputs, bound: float = DUAL_CLIP) -> Tensor:
    """The loss [M] with gains that are at least `bound` times the advantage where it is negative."""
    gains = torch.minimum(x.ratio * x.advantages, x.clipped() * x.advantages)
    return x.mean(torch.where(x.advantages < 0, torch.maximum(gains, bound * x.advantages), gains))


def _per_head(x: PolicyLossInputs) -> Tensor | None:
    losses = [clipped_surrogate(replace(x, log_ratio=ratio)) for ratio in x.head_log_ratios]
    return torch.stack(losses).sum(0) if len(losses) > 1 else None


KL_ESTIMATES: Final[Mapping[str, Callable[[PolicyLossInputs], Tensor]]] = {
    "kl_difference": lambda x: x.mean(x.log_ratio),
    "kl_square": lambda x: 0.5 * x.minibatches.mean(x.log_ratio.square()),
    "kl_expectation": lambda x: x.minibatches.mean(
        x.log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT).expm1() - x.log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT)
    ),
}
"""Estimators of the divergence by name (http://joschu.net/blog/kl-approx.html)."""


def _kl_penalty(x: PolicyLossInputs, claimed: Tensor, plain: Tensor) -> tuple[float, Tensor] | None:
    """Fit the weight of each estimator and keep the closest."""
    fits = [added(plain, estimate(x), claimed) for estimate in KL_ESTIMATES.values()]
    known = [fit for fit in fits if fit is not None and fit[0] > 0]
    return min(known, key=lambda fit: float((fit[1] - claimed)[::2].abs().max()), default=None)


def _bound(
    loss: Callable[[PolicyLossInputs, float], Tensor], ends: Callable[[PolicyLossInputs], tuple[float, float]]
) -> Callable[[PolicyLossInputs, Tensor], tuple[float, Tensor] | None]:
    """Return a fit of a bound of the ratio, between the ends."""

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
    compute=clipped_surrogate,
    tolerance=LOSS_TOLERANCE,
    advice="Compare the line of the policy loss with the equation, term by term.",
    hypotheses=hypothesis_table(
        "sign: the clipped surrogate without its minus sign, so that descent lowers the gain // L = mean min(r A, clip(r) A)"
        " // Minimise the negative of the surrogate. // program: loop-pg_sign",
        lambda x: -clipped_surrogate(x),
        "negated_advantages (needs clip, gradient advantages_negated): the clipped surrogate of the advantages with the opposite sign // "
        "L = mean max(r A, clip(r) A) // Use max only with the two negative terms: max(-r A, -clip(r) A). // program: bundled-loss_sign",
        _of_negated_advantages,
        "optimistic (needs clip, gradient maximum): the larger of the two gains in place of the smaller // L = -mean max(r A, clip(r) A)"
        " // Take min of the gains, or max of the losses. // program: test_losses",
        lambda x: x.mean(torch.maximum(x.ratio * x.advantages, x.clipped() * x.advantages)),
        "no_minimum (needs clip, gradient no_minimum): the clipped term alone, without the minimum // L = -mean clip(r, 1 - ε, 1 + ε) A"
        " // Take the minimum of r A and clip(r) A: the clipped term alone has no gradient that brings a ratio back."
        " // program: loop-pg_no_minimum",
        lambda x: x.mean(x.clipped() * x.advantages),
        "no_clip (needs clip, gradient no_clip): the surrogate without clipping // L = -mean r A // Clip the ratio in the second term."
        " // 1707.06347, eq. 6",
        lambda x: x.mean(x.ratio * x.advantages),
        "minimum_of_ratios: the advantage times the smaller ratio, whatever the sign of the advantage // L = -mean min(r, clip(r)) A"
        " // Multiply both ratios by the advantage before the minimum. // program: test_losses",
        lambda x: x.mean(torch.minimum(x.ratio, x.clipped()) * x.advantages),
        "inverted_ratio (needs clip, gradient ratio_inverted): the clipped surrogate with the ratio inverted: the old probability over "
        "the new one // L = -mean min(A / r, clip(1 / r) A) // Take exp(new log-probability - old log-probability). // program: "
        "script-pg_ratio_inverted",
        lambda x: clipped_surrogate(replace(x, log_ratio=-x.log_ratio)),
        "no_exponential (needs clip, gradient probability_difference): the clipped surrogate with the log-ratio in place of the ratio"
        " // L = -mean min(log r A, clip(log r, 1 - ε, 1 + ε) A) // Take the exponential of the difference of the log-probabilities."
        " // program: test_losses",
        lambda x: x.mean(
            torch.minimum(x.log_ratio * x.advantages, x.log_ratio.clamp(1 - x.clip, 1 + x.clip) * x.advantages)
        ),
        "log_prob (needs log_probs, doubtful_without ratio, gradient no_ratio): the policy gradient of the log-probability, without a "
        "ratio // L = -mean log π(a) A // Multiply the advantage by the ratio: over several epochs the log-probability is biased. // "
        "1602.01783 (A2C)",
        lambda x: x.mean(x.log_probs * x.advantages),
        "clip_around_zero: the clipped surrogate with the ratio clipped to ±ε in place of 1 ± ε // L = -mean min(r A, clip(r, -ε, ε) A)"
        " // Clip to 1 - ε and 1 + ε. // program: test_losses",
        lambda x: between(x, -x.clip, x.clip),
        "upper_clip_only: the clipped surrogate without the lower bound of the ratio // L = -mean min(r A, min(r, 1 + ε) A)"
        " // Clip the ratio on both sides. // program: test_losses",
        lambda x: between(x, -torch.inf, 1 + x.clip),
        "lower_clip_only: the clipped surrogate without the upper bound of the ratio // L = -mean min(r A, max(r, 1 - ε) A)"
        " // Clip the ratio on both sides. // program: test_losses",
        lambda x: between(x, 1 - x.clip, torch.inf),
        "clipped_product: the smaller of the gain and the gain clipped to 1 ± ε: the product is clipped and not the ratio // L = -mean "
        "min(r A, clip(r A, 1 - ε, 1 + ε)) // Clip the ratio before it is multiplied by the advantage. // program: test_losses",
        lambda x: x.mean((x.ratio * x.advantages).clamp(max=1 + x.clip)),
        "clipped_log_ratio: the clipped surrogate with the log-ratio clipped to ±ε // L = -mean min(r A, exp(clip(log r, -ε, ε)) A)"
        " // Clip the ratio: bounds of the log-ratio are log(1 - ε) and log(1 + ε). // program: test_losses",
        lambda x: pessimistic(x, x.log_ratio.clamp(-x.clip, x.clip).exp()),
        "broadcast (gradient advantages_broadcast): the mean over all pairs of a ratio and an advantage: [N] was broadcast against [N, 1]"
        " // L = -mean_ij min(r_i A_j, clip(r_i) A_j) // Flatten log-probabilities and advantages to [N] both."
        " // PacktPublishing/Deep-Reinforcement-Learning-Hands-On#33",
        _of_all_pairs,
        "sum: the sum over the rows in place of the mean // L = -Σ min(r A, clip(r) A)"
        " // Take the mean, so that the step does not grow with the minibatch. // program: loop-pg_sum",
        lambda x: clipped_surrogate(x) * x.minibatches.counts,
        "unnormalized (needs raw_advantages, gradient advantages_raw): the clipped surrogate of the advantages before normalisation"
        " // L = -mean min(r A_raw, clip(r) A_raw) // Use the normalised advantages in the loss."
        " // Huang et al. 2022, The 37 implementation details of PPO",
        lambda x: x.of_advantages(x.raw_advantages),
        "shifted_rows (gradient advantages_shifted): the clipped surrogate with each ratio beside the advantage of the row before"
        " // L = -mean min(r_i A_{i-1}, clip(r_i) A_{i-1}) // Index ratios and advantages with the same rows. // program: test_losses",
        lambda x: x.of_advantages(x.advantages[x.minibatches.followers(-1)]),
        "following_rows: the clipped surrogate with each ratio beside the advantage of the row after"
        " // L = -mean min(r_i A_{i+1}, clip(r_i) A_{i+1}) // Index ratios and advantages with the same rows. // program: test_losses",
        lambda x: x.of_advantages(x.advantages[x.minibatches.followers(1)]),
        "reversed_rows (gradient advantages_reversed): the clipped surrogate with the advantages in the reverse order of the rows"
        " // L = -mean min(r_i A_{N-i}, clip(r_i) A_{N-i}) // Index ratios and advantages with the same rows. // program: test_losses",
        lambda x: x.of_advantages(x.advantages[x.minibatches.reversed()]),
        "normalized_again (variant): the clipped surrogate of the advantages, normalised over each minibatch"
        " // L = -mean min(r Â, clip(r) Â), Â = (A - mean A) / std A //  // Huang et al. 2022, The 37 implementation details of PPO",
        lambda x: x.of_advantages(x.minibatches.normalized(x.advantages)),
        "per_head (variant): the sum of the heads' clipped surrogates, each with its own ratio // L = -Σ_h mean min(r_h A, clip(r_h) A)"
        " //  // 1903.01344 (H-PPO)",
        _per_head,
        "dual_clip (variant, needs clip, gradient dual_clip): the surrogate with dual clipping at 3"
        " // L = -mean max(min(r A, clip(r) A), 3 A) where A < 0 //  // 1912.09729 (dual-clip PPO)",
        _dual_clipped,
        "truncated (variant): the surrogate with the ratio truncated at 1 // L = -mean min(r, 1) A //  // 1802.01561 (V-trace)",
        lambda x: x.mean(x.ratio.clamp(max=1.0) * x.advantages),
        "with_entropy (variant, needs bonus, of bonus): the clipped surrogate with the entropy bonus in it"
        " // L = -mean min(r A, clip(r) A) - c H //  // program: test_losses",
        lambda x: clipped_surrogate(x) + x.bonus,
        "annealed_clip (variant): the clipped surrogate with a smaller clip range than the setting, annealed or set elsewhere,"
        " // L = -mean min(r A, clip(r, 1 - ε', 1 + ε') A) //  // Huang et al. 2022, The 37 implementation details of PPO",
        Fit("ε", _bound(lambda x, clip: between(x, 1 - clip, 1 + clip), lambda x: (0.0, x.width))),
        "clip_range: the clipped surrogate with a larger clip range than the setting, // L = -mean min(r A, clip(r, 1 - ε', 1 + ε') A)"
        " // Compare the bounds in the loss with the setting. // program: test_losses",
        Fit(
            "ε",
            _bound(
                lambda x, clip: between(x, 1 - clip, 1 + clip),
                lambda x: (x.width, max(float((x.ratio - 1).abs().max()), x.width)),
            ),
        ),
        "decoupled_clip (variant): the clipped surrogate with an upper bound of its own,"
        " // L = -mean min(r A, clip(r, 1 - ε, 1 + ε_high) A) //  // 2503.14476 (DAPO), eq. 10",
        Fit(
            "ε_high",
            _bound(
                lambda x, clip: between(x, 1 - x.width, 1 + clip),
                lambda x: (0.0, max(float(x.ratio.max()) - 1, x.width)),
            ),
        ),
        "other_dual_clip (variant): the surrogate with dual clipping, // L = -mean max(min(r A, clip(r) A), c A) where A < 0 // "
        " // 1912.09729 (dual-clip PPO)",
        Fit("c", _bound(_dual_clipped, lambda x: (1.0, max(float(x.ratio.max()), 1.0)))),
        "kl_penalty (variant): the clipped surrogate with a penalty on the divergence, // L = -mean min(r A, clip(r) A) + β KL // "
        " // 1707.06347, eq. 8",
        Fit("β", lambda x, claimed: _kl_penalty(x, claimed, clipped_surrogate(x))),
        "kl_penalty_alone (variant): the surrogate without clipping and with a penalty on the divergence, // L = -mean r A + β KL // "
        " // 1707.06347, eq. 8",
        Fit("β", lambda x, claimed: _kl_penalty(x, claimed, x.mean(x.ratio * x.advantages))),
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
        valid: bool, of the same shape; None if every row counts.
        counts: rows of each minibatch, where the columns are [R].
        raw_advantages: of the same shape: before normalisation, where the advantages should be normalised.
        log_probs: of the same shape: log-probabilities of the actions now.
        head_log_ratios: of the same shape each: of the heads of a policy with several.
        bonus: of the shape of the loss: the entropy loss times its weight.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision if it is None.

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
