"""Equations of the entropy loss, the negative mean entropy of the joint action, and of the total loss, the sum of its terms.

Shapes: M minibatches with R rows in total, concatenated; A actions, D action dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from esper_telemetry.core.arrays import ArrayLike, as_tensor, by_head, masks_by_head
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.minibatch_objective import LossRows
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.comparison import EquationCheck, compare, unchecked
from esper_telemetry.equations.equation import Equation, mistake, variant
from esper_telemetry.equations.minibatch_losses import (
    LOSS_TOLERANCE,
    Minibatches,
    OneMinibatch,
    added,
    divided,
    informative,
    rescaled,
    with_padding,
)
from esper_telemetry.metrics.statistics import same_shape

GAUSSIAN_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)
"""Entropy of a Gaussian of standard deviation 1, in nats."""

ROUNDED_SHARE = 0.2
"""Share of a logit's magnitude that replaces a smaller entropy as divisor of an error: rounding is then a tenth of the tolerance."""


@dataclass(frozen=True, slots=True)
class EntropyInputs:
    """Rows [R] that the entropy loss is computed from: float64, or one minibatch with its graph.

    Attributes:
        entropies: of each head [R], in nats, including rows in which the head is irrelevant.
        unmasked: entropies without masks; None if there are no masks.
        log_probs: per categorical head log-probabilities [R, A]; -inf if an action is masked.
        log_std: per Gaussian head [R, D].
        relevance: per head that is not always relevant [R], bool.
        sampled: log-probabilities of the actions taken [R] under these distributions.
        trained: the current log-probabilities [R] in the ratio, if a squash makes them different from `sampled`.
        weight: of the entropy loss in the total.
    """

    minibatches: Minibatches
    entropies: Mapping[str, Tensor]
    unmasked: Mapping[str, Tensor] | None = None
    log_probs: Mapping[str, Tensor] = field(default_factory=dict)
    log_std: Mapping[str, Tensor] = field(default_factory=dict)
    relevance: Mapping[str, Tensor] = field(default_factory=dict)
    sampled: Tensor | None = None
    trained: Tensor | None = None
    weight: float | None = None

    @classmethod
    def of(cls, rows: LossRows) -> EntropyInputs:
        """Return the rows of one minibatch."""
        unmasked = None if rows.unmasked_entropy is None else {"": rows.unmasked_entropy}
        batch = OneMinibatch.like(rows.log_probs)
        return cls(batch, {"": rows.entropy}, unmasked, sampled=rows.log_probs)

    def summed(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the mean [M] of the sum over the relevant heads of rows [R] of each head."""
        parts = [torch.where(self.relevance[head], part, 0.0) if head in self.relevance else part for head, part in rows.items()]
        return self.minibatches.mean(torch.stack(parts).sum(0))

    def sizes(self) -> dict[str, int]:
        """Number of actions or of action dimensions of each head."""
        return {head: column.shape[-1] for head, column in {**self.log_probs, **self.log_std}.items()}


def entropy_of(log_probs: Tensor) -> Tensor:
    """Return -Σ p log p [R] of log-probabilities [R, A]; an impossible action contributes 0."""
    return -(log_probs.exp() * log_probs.clamp(min=-1e30)).sum(-1)


def entropy_loss(inputs: EntropyInputs) -> Tensor:
    """Return the negative mean [M] of the entropy of the joint action: the sum over the heads that are relevant."""
    return -inputs.summed(inputs.entropies)


def _mean_of_entries(x: EntropyInputs) -> Tensor | None:
    sizes = x.sizes()
    several = any(size > 1 for size in sizes.values())
    return -x.summed({head: rows / sizes[head] for head, rows in x.entropies.items()}) if several else None


def _sum_of_rows(x: EntropyInputs) -> Tensor | None:
    means = _mean_of_entries(x)
    return None if means is None else means * x.minibatches.counts


def _over_relevant_rows(x: EntropyInputs) -> Tensor:
    batches = x.minibatches
    relevant = {head: batches.valid & x.relevance.get(head, batches.valid) for head in x.entropies}
    means = [replace(batches, valid=relevant[head]).mean(rows) for head, rows in x.entropies.items()]
    return -torch.stack(means).sum(0)


def _of_std(change: Callable[[Tensor], Tensor]) -> Callable[[EntropyInputs], Tensor | None]:
    """Return the result of `change` for the log standard deviations [R, D] of Gaussian heads; None if there are other heads."""
    return lambda x: None if x.log_probs else -x.summed({head: change(std) for head, std in x.log_std.items()})


ENTROPY_LOSS = Equation(
    name="entropy_loss",
    rank=56,
    quantity="the entropy losses",
    equation="L = -mean Σ_heads H(π)",
    source="1602.01783, section 4",
    inputs="entropy losses, and logits or standard deviations of the minibatches",
    check="check_entropy",
    shown_by="test_entropy_and_total",
    compute=entropy_loss,
    tolerance=LOSS_TOLERANCE,
    advice="Compare the line that computes the entropy with the entropy of the distribution.",
    hypotheses=(
        mistake("sign", "the entropy without its minus sign: gradient descent lowers it")
        .predicts("L = mean H", lambda x: -entropy_loss(x))
        .advises("Subtract the entropy from the loss, so that the bonus rewards exploration.")
        .cites("program: script-entropy_sign"),
        mistake("sample", "the log-probability of the chosen action, whose gradient is noise")
        .predicts("L = mean log π(a)", lambda x: x.minibatches.mean(x.sampled))
        .given(needs="sampled", gradient="entropy_of_sample")
        .advises("Take the entropy of the distribution: the expected gradient of log π(a) is 0.")
        .cites("program: loop-entropy_sample"),
        mistake("sample_sign", "the negative log-probability of the chosen action")
        .predicts("L = -mean log π(a)", lambda x: -x.minibatches.mean(x.sampled))
        .given(needs="sampled", gradient="entropy_of_sample_sign")
        .advises("Take the entropy of the distribution: the expected gradient of log π(a) is 0."),
        mistake("chosen_term", "the term p log p of the chosen action, without the other actions")
        .predicts("L = mean π(a) log π(a)", lambda x: x.minibatches.mean(x.sampled.exp() * x.sampled))
        .given(needs="sampled")
        .advises("Sum -p log p over all actions of each row.", source="program: test_script_styles"),
        variant(
            "squashed_sample", "the log-probability of the chosen action after a squash, because the entropy does not have a closed form"
        )
        .predicts("L = mean log π(a)", lambda x: x.minibatches.mean(x.trained))
        .given(needs="trained")
        .cites("Stable-Baselines3, PPO.train"),
        mistake("sum", "the sum of the entropies over the rows instead of the mean")
        .predicts("L = -Σ H", lambda x: entropy_loss(x) * x.minibatches.counts)
        .advises("Take the mean, so that the bonus does not grow with the minibatch."),
        mistake("sum_of_rows", "the sum of the entropies over the rows, averaged over the actions: the axes are swapped")
        .predicts("L = mean_actions Σ_rows p log p", _sum_of_rows)
        .advises("Sum -p log p over the actions of each row (the last axis), and take the mean over the rows."),
        mistake("unmasked", "the negative entropy over all choices, including masked choices")
        .predicts("L = -mean H(π without its mask)", lambda x: -x.summed(x.unmasked))
        .given(needs="unmasked", gradient="entropy_unmasked")
        .advises("Take the entropy of the masked distribution.", source="2006.14171 (invalid action masking)"),
        mistake("irrelevant_heads", "the negative entropy of all heads, including irrelevant heads")
        .predicts("L = -mean Σ_{all heads} H", lambda x: entropy_loss(replace(x, relevance={})))
        .given(needs="relevance")
        .advises("Count a head only in rows in which its choice matters."),
        variant("relevant_rows", "each head's negative entropy, averaged over the rows where the head is relevant")
        .predicts("L = -Σ_heads mean_{relevant rows} H", _over_relevant_rows)
        .given(needs="relevance"),
        variant("mean_of_heads", "the mean of the heads' negative entropies instead of their sum").predicts(
            "L = -mean mean_heads H", lambda x: entropy_loss(x) / len(x.sizes()) if len(x.sizes()) > 1 else None
        ),
        variant("mean_of_entries", "the mean over the actions or dimensions of each head instead of the sum")
        .predicts("L = mean_{rows, actions} p log p", _mean_of_entries)
        .cites("https://github.com/openai/spinningup, ppo.py"),
        variant("bits", "the negative entropy in bits").predicts("L = -mean H / log 2", lambda x: entropy_loss(x) / math.log(2)),
        variant("normalized", "the negative entropy divided by its largest value").predicts(
            "L = -mean Σ_heads H / log A",
            lambda x: (
                None
                if x.log_std or min(x.sizes().values()) < 2
                else -x.summed({head: rows / math.log(x.sizes()[head]) for head, rows in x.entropies.items()})
            ),
        ),
        mistake("std", "the negative standard deviation instead of the entropy")
        .predicts("L = -mean Σ σ", _of_std(lambda log_std: log_std.exp().sum(-1)))
        .given(needs="log_std")
        .advises("Take the entropy, which grows with log σ."),
        mistake("mean_std", "the negative mean of the standard deviations instead of the entropy")
        .predicts("L = -mean σ", _of_std(lambda log_std: log_std.exp().mean(-1)))
        .given(needs="log_std")
        .advises("Take the entropy, which grows with log σ."),
        mistake("variance", "the entropy with the variance instead of the standard deviation")
        .predicts("L = -mean Σ (2 log σ + ½ log 2πe)", _of_std(lambda log_std: (2 * log_std + GAUSSIAN_ENTROPY).sum(-1)))
        .given(needs="log_std")
        .advises("Pass the standard deviation to the distribution, not its square."),
        variant("log_std", "the negative log standard deviation, which equals the entropy up to a constant")
        .predicts("L = -mean Σ log σ", _of_std(lambda log_std: log_std.sum(-1)))
        .given(needs="log_std"),
        mistake("probabilities", "the sum of the squared probabilities")
        .predicts(
            "L = mean Σ p²", lambda x: None if x.log_std else x.summed({head: p.exp().square().sum(-1) for head, p in x.log_probs.items()})
        )
        .advises("Multiply the probabilities by their logarithms."),
        variant("weighted", "the negative entropy times the weight of its bonus")
        .predicts("L = -c mean H", lambda x: x.weight * entropy_loss(x))
        .given(needs="weight", of="weight"),
        with_padding(entropy_loss, "-H")[0],
        *rescaled(entropy_loss, "the negative entropy", "-mean H", scale=variant),
    ),
)


@checked_arguments(tolerance=0)
@inference_mode
def check_entropy(
    loss: ArrayLike,
    *,
    logits: Mapping[str, ArrayLike] | None = None,
    log_std: Mapping[str, ArrayLike] | None = None,
    masks: Mapping[str, ArrayLike] | None = None,
    relevance: Mapping[str, ArrayLike] | None = None,
    valid: ArrayLike | None = None,
    counts: Sequence[int] | None = None,
    chosen_log_probs: ArrayLike | None = None,
    log_probs: ArrayLike | None = None,
    weight: float | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of entropy losses with the negative mean entropy of the policy, in nats.

    Args:
        loss: 0-d, or [M], one per minibatch: the negative mean entropy, without its weight.
        logits: per categorical head [N, A], or [M, N, A], or [R, A] with `counts`.
        log_std: per Gaussian head [N, D], or [M, N, D], or [R, D] with `counts`.
        masks: per categorical head of the shape of its logits, bool: allowed choices.
        relevance: per head that is not always relevant [N], or [M, N], or [R], bool.
        valid: of the same shape, bool; None if every row counts.
        counts: rows of each minibatch, if the columns are [R].
        chosen_log_probs: of the same shape: log-probabilities of the actions taken, under these distributions.
        log_probs: of the same shape: the log-probabilities in the ratio, if a squash makes them different.
        weight: of the entropy loss in the total; None if it is not known.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision if it is None.

    Raises:
        ValueError: shapes do not fit, or there are no heads.
    """
    categorical, gaussian = by_head(logits), by_head(log_std)
    heads = {**categorical, **gaussian}
    if not heads:
        raise ValueError("give the logits or the log_std of at least one head")
    first = next(iter(heads.values()))
    same_shape(**{head: column[..., 0] for head, column in heads.items()})
    allowed = masks_by_head(masks)
    for head, mask in allowed.items():
        same_shape(**{f"masks of {head}": mask, f"logits of {head}": categorical.get(head)})
    relevant = masks_by_head(relevance)
    columns = {"entropy": first[..., 0], "chosen_log_probs": chosen_log_probs, "log_probs": log_probs, **relevant}
    claimed, minibatches, rows = divided(loss, counts, valid, **columns)

    def flat(column: Tensor) -> Tensor:
        return column.detach().reshape(-1, column.shape[-1]).double()

    unmasked = {head: flat(column).log_softmax(-1) for head, column in categorical.items()}
    masked = {}
    for head, mask in allowed.items():
        choices = mask.reshape(-1, mask.shape[-1])
        choices = choices | ~choices.any(-1, keepdim=True)  # rows of padding do not allow any action
        masked[head] = flat(categorical[head]).masked_fill(~choices, -torch.inf).log_softmax(-1)
    spreads = {head: flat(column) for head, column in gaussian.items()}
    of_spreads = {head: (column + GAUSSIAN_ENTROPY).sum(-1) for head, column in spreads.items()}
    inputs = EntropyInputs(
        minibatches=minibatches,
        entropies={head: entropy_of(masked.get(head, column)) for head, column in unmasked.items()} | of_spreads,
        unmasked={head: entropy_of(column) for head, column in unmasked.items()} | of_spreads if masked else None,
        log_probs={**unmasked, **masked},
        log_std=spreads,
        relevance={head: rows[head].bool() for head in relevant},
        sampled=rows.get("chosen_log_probs"),
        trained=rows.get("log_probs"),
        weight=weight,
    )
    # if one action is certain, its log-probability is rounded like its logit, and the entropy is almost 0
    sizes = {head: 1 + (inputs.log_probs[head].exp() * flat(z).abs()).sum(-1) for head, z in categorical.items()}
    sizes |= {head: (column.abs() + 1).sum(-1) for head, column in inputs.log_std.items()}
    magnitudes = (inputs.summed({head: ROUNDED_SHARE * size for head, size in sizes.items()}),)
    return compare(ENTROPY_LOSS, inputs, claimed, magnitudes=magnitudes, precision=precision, tolerance=tolerance)


@dataclass(frozen=True, slots=True)
class TotalLossInputs:
    """Terms of the total loss [M] in float64, and their weights; `entropy` is the negative mean entropy."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    value_weight: float
    entropy_weight: float

    def total(self, *, policy: float = 1.0, value: float | None = None, entropy: float | None = None) -> Tensor:
        """Return the sum of the terms [M] (1707.06347, eq. 9); arguments replace the weights of the settings."""
        value_weight = self.value_weight if value is None else value
        entropy_weight = self.entropy_weight if entropy is None else entropy
        return policy * self.policy + value_weight * self.value + entropy_weight * self.entropy


def _other_weight(inputs: TotalLossInputs, claimed: Tensor, term: Tensor, rest: Tensor) -> tuple[float, Tensor] | None:
    return added(rest, term, claimed) if informative(claimed, inputs.total()) else None


TOTAL_LOSS = Equation(
    name="total_loss",
    rank=58,
    quantity="the total losses",
    equation="L = L_policy + c_value L_value + c_entropy L_entropy, L_entropy = -mean H",
    source="1707.06347, eq. 9",
    inputs="the total loss, its terms, and their weights",
    check="check_total_loss",
    shown_by="test_entropy_and_total",
    compute=TotalLossInputs.total,
    tolerance=LOSS_TOLERANCE,
    hypotheses=(
        mistake("entropy_sign", "the sum with the entropy added instead of subtracted: the bonus punishes exploration")
        .predicts("L = L_policy + c_value L_value + c_entropy mean H", lambda x: x.total(entropy=-x.entropy_weight))
        .given(needs="entropy_weight")
        .advises("Subtract the weighted entropy.", source="program: loop-entropy_sign"),
        mistake("value_sign", "the sum with the value loss subtracted: the critic increases its error")
        .predicts("L = L_policy - c_value L_value + c_entropy L_entropy", lambda x: x.total(value=-x.value_weight))
        .advises("Add the weighted value loss: eq. 9 subtracts it because its objective is maximised."),
        mistake("policy_sign", "the sum with the policy loss subtracted")
        .predicts("L = -L_policy + c_value L_value + c_entropy L_entropy", lambda x: x.total(policy=-1.0))
        .advises("Add the policy loss, which is the negative surrogate."),
        mistake("sign", "the sum with the opposite sign")
        .predicts("L = -(L_policy + c_value L_value + c_entropy L_entropy)", lambda x: -x.total())
        .advises("Minimise the loss."),
        mistake("entropy_missing", "the sum without the entropy bonus of the settings")
        .predicts("L = L_policy + c_value L_value", lambda x: x.total(entropy=0.0))
        .given(needs="entropy_weight")
        .advises("Add the entropy loss times its weight."),
        variant("value_missing", "the sum without the value loss")
        .predicts("L = L_policy + c_entropy L_entropy", lambda x: x.total(value=0.0))
        .cites("separate optimizers of actor and critic"),
        mistake("policy_missing", "the sum without the policy loss")
        .predicts("L = c_value L_value + c_entropy L_entropy", lambda x: x.total(policy=0.0))
        .advises("Add the policy loss."),
        variant("value_doubled", "the sum with the value loss as the mean squared error without the factor ½")
        .predicts("L = L_policy + 2 c_value L_value + c_entropy L_entropy", lambda x: x.total(value=2 * x.value_weight))
        .cites("Stable-Baselines3, PPO.train"),
        variant("value_halved", "the sum with an additional factor ½ of the value loss").predicts(
            "L = L_policy + ½ c_value L_value + c_entropy L_entropy", lambda x: x.total(value=x.value_weight / 2)
        ),
        variant("value_unweighted", "the sum with an unweighted value loss")
        .predicts("L = L_policy + L_value + c_entropy L_entropy", lambda x: x.total(value=1.0))
        .cites("program: loop-value_weight"),
        mistake("entropy_unweighted", "the sum with an unweighted entropy")
        .predicts("L = L_policy + c_value L_value + L_entropy", lambda x: x.total(entropy=1.0))
        .given(needs="entropy_weight")
        .advises("Multiply the entropy by its weight."),
        mistake("weights_swapped", "the sum with the two weights swapped")
        .predicts("L = L_policy + c_entropy L_value + c_value L_entropy", lambda x: x.total(value=x.entropy_weight, entropy=x.value_weight))
        .given(needs="entropy_weight")
        .advises("Compare the weights with the terms that they multiply."),
        mistake("entropy_alone_weighted", "the sum with the entropy's weight for the value loss too")
        .predicts("L = L_policy + c_entropy (L_value + L_entropy)", lambda x: x.total(value=x.entropy_weight))
        .given(needs="entropy_weight")
        .advises("Compare the weights with the terms that they multiply."),
        variant("entropy_weight", "the sum with a different entropy weight than the setting, annealed or set elsewhere,")
        .fits(
            "L = L_policy + c_value L_value + c L_entropy",
            "c",
            lambda x, claimed: _other_weight(x, claimed, x.entropy, x.total(entropy=0.0)),
        )
        .cites("program: loop-entropy_weight"),
        variant("value_weight", "the sum with a different weight of the value loss than the setting,").fits(
            "L = L_policy + c L_value + c_entropy L_entropy", "c", lambda x, claimed: _other_weight(x, claimed, x.value, x.total(value=0.0))
        ),
        *rescaled(TotalLossInputs.total, "the sum", "L_policy + c_value L_value + c_entropy L_entropy", scale=variant),
    ),
)


@checked_arguments(tolerance=0)
@inference_mode
def check_total_loss(
    loss: ArrayLike,
    policy: ArrayLike,
    value: ArrayLike,
    entropy: ArrayLike | None = None,
    *,
    value_coef: float,
    entropy_coef: float = 0.0,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of total losses with the weighted sum of their terms.

    A difference that no known mistake explains comes from further terms: then the total is not checked.

    Args:
        loss: 0-d, or [M], one per minibatch.
        policy, value: of the same shape, without weights.
        entropy: of the same shape: the negative mean entropy; it may be None if `entropy_coef` is 0.
        value_coef, entropy_coef: weights.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision if it is None.

    Raises:
        ValueError: shapes differ, or the entropy has a weight but is not given.
    """
    if entropy is None and entropy_coef:
        raise ValueError(f"an entropy_coef of {entropy_coef!r} needs the entropy loss")
    claimed = as_tensor(loss)
    terms = [as_tensor(term, claimed) for term in (policy, value, *([] if entropy is None else [entropy]))]
    same_shape(loss=claimed, policy=terms[0], value=terms[1], entropy=None if entropy is None else terms[2])
    columns = [term.detach().reshape(-1).double() for term in terms]
    inputs = TotalLossInputs(
        policy=columns[0],
        value=columns[1],
        entropy=torch.zeros_like(columns[0]) if entropy is None else columns[2],
        value_weight=value_coef,
        entropy_weight=entropy_coef,
    )
    # if terms have opposite signs, rounding follows their magnitude, not the magnitude of the sum
    magnitudes = (inputs.policy, value_coef * inputs.value, entropy_coef * inputs.entropy)
    total = claimed.detach().reshape(-1)
    check = compare(TOTAL_LOSS, inputs, total, magnitudes=magnitudes, precision=precision, tolerance=tolerance)
    if check.error is None or check.matches or check.explanations:
        return check
    return unchecked(TOTAL_LOSS, "it has further terms, or other weights than the settings")
