"""Equation of the entropy loss: the negative mean entropy of the joint action.

Shapes: M minibatches of R rows in all, one minibatch after the other; A actions, D action dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from esper_telemetry.core.arrays import ArrayLike, as_tensor, by_head, masks_by_head
from esper_telemetry.core.borders import checked_arguments
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.equations.comparison import EquationCheck, compare
from esper_telemetry.equations.equation import Equation, Hypothesis
from esper_telemetry.equations.total_loss import LOSS_TOLERANCE, Minibatches, divided, rescaled, with_padding
from esper_telemetry.metrics.statistics import same_shape

GAUSSIAN_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)
"""Entropy of a Gaussian of standard deviation 1, in nats."""

ROUNDED_SHARE = 0.2
"""Share of the size of a logit that an error is divided by, where the entropy is smaller: then rounding is a tenth of the tolerance."""


@dataclass(frozen=True, slots=True)
class EntropyInputs:
    """Rows [R] that the entropy loss is computed from, float64.

    Attributes:
        log_probs: per categorical head log-probabilities [R, A]; -inf where an action is masked.
        unmasked: the same without masks.
        log_std: per Gaussian head [R, D].
        relevance: per head that is not always relevant [R], bool.
        sampled: log-probabilities of the actions taken [R] under these distributions.
        trained: the log-probabilities now [R] that the ratio is computed from, where a squash makes them others than `sampled`.
        weight: of the entropy loss in the total.
    """

    minibatches: Minibatches
    log_probs: Mapping[str, Tensor]
    unmasked: Mapping[str, Tensor]
    log_std: Mapping[str, Tensor]
    relevance: Mapping[str, Tensor]
    sampled: Tensor | None = None
    trained: Tensor | None = None
    weight: float | None = None

    def entropies(self) -> dict[str, Tensor]:
        """Return the entropy [R] of each head, in nats, whether it is relevant or not."""
        categorical = {head: entropy_of(log_probs) for head, log_probs in self.log_probs.items()}
        gaussian = {head: (log_std + GAUSSIAN_ENTROPY).sum(-1) for head, log_std in self.log_std.items()}
        return categorical | gaussian

    def summed(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the mean [M] of the sum over the relevant heads of rows [R] of each head."""
        parts = [
            torch.where(self.relevance[head], part, 0.0) if head in self.relevance else part
            for head, part in rows.items()
        ]
        return self.minibatches.mean(torch.stack(parts).sum(0))

    def sizes(self) -> dict[str, int]:
        """Number of actions or of action dimensions of each head."""
        return {head: column.shape[-1] for head, column in {**self.log_probs, **self.log_std}.items()}


def entropy_of(log_probs: Tensor) -> Tensor:
    """Return -Σ p log p [R] of log-probabilities [R, A]; an impossible action adds nothing."""
    return -(log_probs.exp() * log_probs.clamp(min=-1e30)).sum(-1)


def entropy_loss(inputs: EntropyInputs) -> Tensor:
    """Return the negative mean [M] of the entropy of the joint action: the sum over the heads that are relevant."""
    return -inputs.summed(inputs.entropies())


def _unmasked(inputs: EntropyInputs) -> Tensor | None:
    return None if inputs.unmasked is inputs.log_probs else entropy_loss(replace(inputs, log_probs=inputs.unmasked))


def _gaussian_only(inputs: EntropyInputs, rows: Mapping[str, Tensor]) -> Tensor | None:
    return None if inputs.log_probs or not rows else -inputs.summed(rows)


def _mean_of_entries(inputs: EntropyInputs) -> Tensor | None:
    sizes = inputs.sizes()
    if not any(size > 1 for size in sizes.values()):
        return None
    return -inputs.summed({head: rows / sizes[head] for head, rows in inputs.entropies().items()})


def _over_relevant_rows(inputs: EntropyInputs) -> Tensor | None:
    if not inputs.relevance:
        return None
    batches, total = inputs.minibatches, torch.zeros(inputs.minibatches.number, dtype=torch.float64)
    for head, rows in inputs.entropies().items():
        relevant = inputs.relevance.get(head, batches.valid)
        total = total.to(rows.device) + replace(batches, valid=batches.valid & relevant).mean(rows)
    return -total


def _of_sample(inputs: EntropyInputs, log_probs: Tensor | None) -> Tensor | None:
    return None if log_probs is None else inputs.minibatches.mean(log_probs)


ENTROPY_LOSS = Equation(
    name="entropy_loss",
    rank=56,
    quantity="the entropy losses",
    equation="L = -mean Σ_heads H(π)",
    source="1602.01783, section 4",
    inputs="entropy losses, and logits or standard deviations of the minibatches",
    compute=entropy_loss,
    tolerance=LOSS_TOLERANCE,
    advice="Compare the line of the entropy with the distribution's.",
    hypotheses=(
        Hypothesis(
            name="sign",
            says="the entropy itself, without its minus sign: descent lowers it",
            equation="L = mean H",
            compute=lambda x: -entropy_loss(x),
            advice="Subtract the entropy from the loss, so that the bonus rewards exploring.",
        ),
        Hypothesis(
            name="sample",
            says="the log-probability of the chosen action, whose gradient is noise",
            equation="L = mean log π(a)",
            compute=lambda x: _of_sample(x, x.sampled),
            advice="Take the entropy of the distribution: the expected gradient of log π(a) is 0.",
        ),
        Hypothesis(
            name="sample_sign",
            says="the negative log-probability of the chosen action",
            equation="L = -mean log π(a)",
            compute=lambda x: None if x.sampled is None else -x.minibatches.mean(x.sampled),
            advice="Take the entropy of the distribution: the expected gradient of log π(a) is 0.",
        ),
        Hypothesis(
            name="squashed_sample",
            says="the log-probability of the chosen action after a squash, whose entropy has no closed form",
            equation="L = mean log π(a)",
            compute=lambda x: _of_sample(x, x.trained),
            variant=True,
            source="Stable-Baselines3, PPO.train",
        ),
        Hypothesis(
            name="sum",
            says="the sum of the entropies over the rows in place of the mean",
            equation="L = -Σ H",
            compute=lambda x: entropy_loss(x) * x.minibatches.counts,
            advice="Take the mean, so that the bonus does not grow with the minibatch.",
        ),
        Hypothesis(
            name="unmasked",
            says="the negative entropy over all choices, masked ones included",
            equation="L = -mean H(π without its mask)",
            compute=_unmasked,
            source="2006.14171 (invalid action masking)",
            advice="Take the entropy of the masked distribution.",
        ),
        Hypothesis(
            name="irrelevant_heads",
            says="the negative entropy of all heads, irrelevant ones included",
            equation="L = -mean Σ_{all heads} H",
            compute=lambda x: None if not x.relevance else entropy_loss(replace(x, relevance={})),
            advice="Count a head in the rows where its choice matters.",
        ),
        Hypothesis(
            name="relevant_rows",
            says="the negative entropy of each head, as a mean over the rows where it is relevant",
            equation="L = -Σ_heads mean_{relevant rows} H",
            compute=_over_relevant_rows,
            variant=True,
        ),
        Hypothesis(
            name="mean_of_heads",
            says="the mean of the heads' negative entropies in place of their sum",
            equation="L = -mean mean_heads H",
            compute=lambda x: entropy_loss(x) / len(x.sizes()) if len(x.sizes()) > 1 else None,
            variant=True,
        ),
        Hypothesis(
            name="mean_of_entries",
            says="the mean over the actions or dimensions of each head in place of the sum",
            equation="L = mean_{rows, actions} p log p",
            compute=_mean_of_entries,
            variant=True,
            source="https://github.com/openai/spinningup, ppo.py",
        ),
        Hypothesis(
            name="bits",
            says="the negative entropy in bits",
            equation="L = -mean H / log 2",
            compute=lambda x: entropy_loss(x) / math.log(2),
            variant=True,
        ),
        Hypothesis(
            name="normalized",
            says="the negative entropy over its largest value",
            equation="L = -mean Σ_heads H / log A",
            compute=lambda x: (
                None
                if x.log_std or min(x.sizes().values()) < 2
                else -x.summed({head: rows / math.log(x.sizes()[head]) for head, rows in x.entropies().items()})
            ),
            variant=True,
        ),
        Hypothesis(
            name="std",
            says="the negative standard deviation in place of the entropy",
            equation="L = -mean Σ σ",
            compute=lambda x: _gaussian_only(x, {head: std.exp().sum(-1) for head, std in x.log_std.items()}),
            advice="Take the entropy, which grows with log σ.",
        ),
        Hypothesis(
            name="mean_std",
            says="the negative mean of the standard deviations in place of the entropy",
            equation="L = -mean σ",
            compute=lambda x: _gaussian_only(x, {head: std.exp().mean(-1) for head, std in x.log_std.items()}),
            advice="Take the entropy, which grows with log σ.",
        ),
        Hypothesis(
            name="variance",
            says="the entropy with the variance in place of the standard deviation",
            equation="L = -mean Σ (2 log σ + ½ log 2πe)",
            compute=lambda x: _gaussian_only(
                x, {head: (2 * std + GAUSSIAN_ENTROPY).sum(-1) for head, std in x.log_std.items()}
            ),
            advice="Pass the standard deviation to the distribution, and not its square.",
        ),
        Hypothesis(
            name="log_std",
            says="the negative log standard deviation, which is the entropy but for a constant",
            equation="L = -mean Σ log σ",
            compute=lambda x: _gaussian_only(x, {head: std.sum(-1) for head, std in x.log_std.items()}),
            variant=True,
        ),
        Hypothesis(
            name="probabilities",
            says="the sum of the squared probabilities",
            equation="L = mean Σ p²",
            compute=lambda x: (
                None if x.log_std else x.summed({head: p.exp().square().sum(-1) for head, p in x.log_probs.items()})
            ),
            advice="Multiply the probabilities by their logarithms.",
        ),
        Hypothesis(
            name="weighted",
            says="the negative entropy times the weight of its bonus",
            equation="L = -c mean H",
            compute=lambda x: x.weight * entropy_loss(x) if x.weight else None,
            variant=True,
        ),
        with_padding(entropy_loss, "-H")[0],
        *rescaled(entropy_loss, "the negative entropy", "-mean H", variant=True),
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
        valid: of the same shape, bool; None where every row counts.
        counts: rows of each minibatch, where the columns are [R].
        chosen_log_probs: of the same shape: log-probabilities of the actions taken, under these distributions.
        log_probs: of the same shape: those that the ratio is computed from, where a squash makes them others.
        weight: of the entropy loss in the total; None where it is not known.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision where it is None.

    Raises:
        ValueError: shapes do not fit, or there is no head.
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
    given = {"chosen_log_probs": chosen_log_probs, "log_probs": log_probs, **relevant}
    columns = {name: as_tensor(column, first) for name, column in given.items() if column is not None}
    claimed, minibatches, rows = divided(as_tensor(loss), counts, valid, entropy=first[..., 0], **columns)

    def flat(column: Tensor) -> Tensor:
        return column.detach().reshape(-1, column.shape[-1]).double()

    unmasked = {head: flat(column).log_softmax(-1) for head, column in categorical.items()}
    masked = {}
    for head, mask in allowed.items():
        choices = mask.reshape(-1, mask.shape[-1])
        choices = choices | ~choices.any(-1, keepdim=True)  # rows of padding allow nothing
        masked[head] = flat(categorical[head]).masked_fill(~choices, -torch.inf).log_softmax(-1)
    inputs = EntropyInputs(
        minibatches=minibatches,
        log_probs={**unmasked, **masked} if masked else unmasked,
        unmasked=unmasked,
        log_std={head: flat(column) for head, column in gaussian.items()},
        relevance={head: rows[head].bool() for head in relevant},
        sampled=rows.get("chosen_log_probs"),
        trained=rows.get("log_probs"),
        weight=weight,
    )
    # where one action is certain, its log-probability is rounded at the size of its logit, and the entropy itself is almost 0
    sizes = {head: 1 + (inputs.log_probs[head].exp() * flat(z).abs()).sum(-1) for head, z in categorical.items()}
    sizes |= {head: (column.abs() + 1).sum(-1) for head, column in inputs.log_std.items()}
    magnitudes = (inputs.summed({head: ROUNDED_SHARE * size for head, size in sizes.items()}),)
    return compare(ENTROPY_LOSS, inputs, claimed, magnitudes=magnitudes, precision=precision, tolerance=tolerance)
