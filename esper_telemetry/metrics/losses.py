"""Terms of the PPO loss, and the gradient of the entropy bonus compared with the policy loss's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, MetricFamily, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Array, Mean, Slot, Sum
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.metrics.ratio import EXP_LIMIT
from esper_telemetry.metrics.statistics import defined, rows_of, same_shape, sample

LOSSES_FAMILY = MetricFamily(
    "loss",
    "Losses",
    "Quantities that the optimizer minimises. In PPO the losses themselves say little: the policy loss hovers around "
    "0 by construction and the value loss scales with the returns. Read `policy/surrogate_gain` and "
    "`value/loss_norm` instead.",
    place=90,
    question="What is being minimised?",
)


@dataclass(frozen=True, slots=True)
class LossComponents(MetricGroup, absent="no finite loss"):
    """Losses of the minibatches, weighted by their number of valid rows."""

    policy: Mean = reports(
        Metric.quantity("loss/policy", 921, "policy loss", unit="loss")
        .asks("How large is the clipped surrogate loss? Its sign and size say little: judge policy/surrogate_gain.")
        .bounds(source="PPO 1707.06347, eq. 7")
    )
    value: Mean = reports(
        Metric.magnitude("loss/value", 922, "value loss", unit="loss (0.5 MSE, without coefficient)")
        .asks("How large is the critic's squared error? It scales with the returns: judge value/loss_norm.")
        .bounds(warn="robust z of log10 above 4", source="0.5 MSE, as CleanRL")
    )
    entropy: Mean | None = reports(
        Metric.quantity("loss/entropy", 923, "entropy loss", unit="nats (-entropy)").asks(
            "How large is the entropy loss? It is the negative of policy/entropy."
        )
    )
    total: Mean | None = reports(
        Metric.quantity("loss/total", 924, "total loss", unit="loss", level=Level.MINIMAL).asks(
            "What does the optimizer minimise: policy loss plus weighted value loss and entropy bonus?"
        )
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("loss/policy_nonfinite", 925, "non-finite inputs of policy loss").asks("How many loss terms were NaN or infinite?")
    )


@dataclass(frozen=True, slots=True)
class LossWeights(MetricGroup, absent="the weight is a constant of the run, or the trainer does not say"):
    """Weights of the losses in use."""

    replicated: ClassVar[bool] = True
    value: float | Tensor | None = reports(
        Metric.magnitude("loss/value_coef", 918, "weight of the value loss", unit="1").asks(
            "What weight does the value loss have in this update?"
        )
    )
    entropy: float | Tensor | None = reports(
        Metric.quantity("loss/entropy_coef", 919, "weight of the entropy bonus", unit="1").asks(
            "What weight does the entropy bonus have in this update? Below 0 it punishes exploration."
        )
    )
    penalty: float | Tensor | None = reports(
        Metric.magnitude("loss/penalty_coef", 920, "weight of the KL penalty", unit="1").asks(
            "What weight does a penalty on the KL divergence have in this update? A very large one holds the policy still."
        )
    )


def loss_weights(coefficients: Mapping[str, float]) -> LossWeights:
    """Return the weights of `value`, `entropy` and the KL `penalty` that the trainer reports."""
    return LossWeights(*(coefficients.get(name) for name in ("value", "entropy", "penalty")))


@checked_arguments()
@inference_mode
def loss_terms(
    policy: ArrayLike, value: ArrayLike, entropy: ArrayLike | None = None, total: ArrayLike | None = None, *, count: ArrayLike = 1.0
) -> LossComponents:
    """Return the losses that the trainer computed.

    Args:
        policy: clipped surrogate loss, [] or [M], one per minibatch.
        value: 0.5 MSE, not scaled by its coefficient, same shape.
        entropy: negative mean entropy, not scaled, same shape; None if it is unknown.
        total: the minimised loss, same shape; None if it is unknown.
        count: valid rows of each, same shape, or one number for all.
    """
    by_name = {"policy": policy, "value": value, "entropy": entropy, "total": total}
    given = {name: as_tensor(term).detach() for name, term in by_name.items() if term is not None}
    same_shape(**given)
    terms = torch.stack(list(given.values())).double()
    finite = terms.abs() < torch.inf
    rows = as_tensor(count, terms).to(terms)
    same_shape(terms=terms[0], count=rows if rows.ndim else None)
    weights = finite * rows
    means = map(Mean, torch.where(finite, terms * weights, 0.0), weights)
    return LossComponents(**dict(zip(given, means, strict=True)), nonfinite=Sum(len(given) - finite.sum(0)))


@checked_arguments(clip=0)
@inference_mode
def ppo_losses(
    log_ratio: ArrayLike,
    advantages: ArrayLike,
    values: ArrayLike,
    returns: ArrayLike,
    entropy: ArrayLike,
    *,
    clip: float,
    value_coef: float,
    entropy_coef: float,
    valid: ArrayLike | None = None,
    dim: int | None = None,
) -> LossComponents:
    """Return the loss terms computed from their inputs, for trainers that do not report them.

    policy = mean max(-A r, -A clip(r, 1 - ε, 1 + ε)); value = 0.5 mean (V - R)²; entropy = -mean H;
    total = policy + value_coef * value + entropy_coef * entropy.

    Args:
        log_ratio, advantages, values, returns, entropy: [N] or [M, N]; advantages as they multiply the ratio, entropy per row.
        clip: ε of the ratio's clip range.
        value_coef, entropy_coef: weights in the total.
        valid: bool, same shape; None if every entry is valid.
        dim: axis to reduce; None reduces all axes to one row, -1 keeps the leading axis as optimizer steps.
    """
    log_ratio = as_tensor(log_ratio)
    advantages, values = as_tensor(advantages, log_ratio), as_tensor(values, log_ratio)
    returns, entropy = as_tensor(returns, log_ratio), as_tensor(entropy, log_ratio)
    valid = as_mask(valid, log_ratio)
    same_shape(log_ratio=log_ratio, advantages=advantages, values=values, returns=returns, entropy=entropy, valid=valid)
    r = log_ratio.detach().double().clamp(-EXP_LIMIT, EXP_LIMIT).exp()
    a = advantages.detach().double()
    surrogate = sample(torch.maximum(-a * r, -a * r.clamp(1 - clip, 1 + clip)), valid, dim=dim)
    squared = sample((values.detach().double() - returns.detach().double()).square() / 2, valid, dim=dim)
    negative = sample(-entropy.detach().double(), valid, dim=dim)
    policy, value, bonus = (s.values.sum(-1) / s.count for s in (surrogate, squared, negative))
    total = policy + value_coef * value + entropy_coef * bonus
    defined = ~total.isnan()
    return LossComponents(
        policy=surrogate.mean(surrogate.values),
        value=squared.mean(squared.values),
        entropy=negative.mean(negative.values),
        total=Mean(torch.where(defined, total * surrogate.count, 0.0), surrogate.count * defined),
        nonfinite=Sum(surrogate.nonfinite + squared.nonfinite + negative.nonfinite),
    )


@dataclass(frozen=True, slots=True)
class NormRatio(Mean):
    """A mean over optimizer steps of the ratio of two norms; the squares of several ranks add up.

    Attributes:
        total, count: sum and number of the ratios, over steps at which they are defined.
        above, below: squared norms, each summed over the rows.
    """

    above: Slot
    below: Slot

    @classmethod
    def join(cls, ranks: Array) -> Array:
        """Return the ratio over the rows of all ranks at one step."""
        above, below = ranks[..., 2].sum(axis=0), ranks[..., 3].sum(axis=0)
        with np.errstate(all="ignore"):
            ratio = np.sqrt(above / below)
        defined = np.isfinite(ratio)
        return np.stack([np.where(defined, ratio, 0.0), defined, above, below], axis=-1)


@dataclass(frozen=True, slots=True)
class EntropyGradient(MetricGroup):
    """Gradient of the entropy bonus relative to the gradient of the policy loss."""

    ratio: NormRatio = reports(
        Metric.ratio("policy/entropy_grad_ratio", 191, "pull of the entropy bonus", cost="sampled")
        .asks("Does the entropy bonus pull harder on the policy than the policy loss (above 1), or is it negligible (below 1e-3)?")
        .bounds(healthy="< 1", warn="> 1", critical="> 5 sustained", source="heuristic")
        .absent("the policy loss's gradient is missing or zero")
    )


@inference_mode
def entropy_gradient(
    logits: Tensor, policy_gradient: Tensor, *, entropy_coef: float, action_mask: Tensor | None = None, valid: Tensor | None = None
) -> EntropyGradient:
    """Return ‖c ∂H/∂z‖ / ‖∂L/∂z‖ at the logits z, for H the mean entropy: ∂H_row/∂z_i = -p_i (ln p_i + H_row).

    Args:
        logits: [.., A].
        policy_gradient: gradient of the mean policy loss with respect to the logits, same shape.
        entropy_coef: c, weight of the entropy bonus.
        action_mask: [.., A] bool, True for a valid action; None if all are valid.
        valid: [..] bool; None if every row is valid.
    """
    same_shape(logits=logits, policy_gradient=policy_gradient, action_mask=action_mask)
    x = logits.detach().double()
    x = x if action_mask is None else x.masked_fill(~action_mask.bool(), torch.finfo(x.dtype).min)
    slope = entropy_slope(x.reshape(-1, x.shape[-1]))
    pull = policy_gradient.detach().double().reshape(slope.shape)
    mask = (slope.abs() < torch.inf).all(-1) & (pull.abs() < torch.inf).all(-1)
    mask = (mask if valid is None else mask & rows_of(valid, None).bool()).unsqueeze(-1)
    bonus = torch.where(mask, slope, 0.0).norm() * entropy_coef / mask.sum().clamp(min=1)
    return EntropyGradient(norm_ratio(bonus.square(), torch.where(mask, pull, 0.0).norm().square()))


def norm_ratio(above: Tensor, below: Tensor) -> NormRatio:
    """Return √(above / below) of squared norms [M]."""
    mean = defined((above / below).sqrt())
    return NormRatio(mean.total, mean.count, above, below)


@inference_mode
def entropy_gradients(
    logits: Mapping[str, Tensor],
    actions: Mapping[str, Tensor],
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    entropy_coef: float,
    relevant: Mapping[str, Tensor] | None = None,
    valid: Tensor | None = None,
) -> EntropyGradient:
    """Return the ratio for all categorical heads together, with the gradient of the clipped surrogate in closed form.

    The loss of a row is max(-A r, -A clip(r)), so its gradient at the logits of a head is A r (p - δ_a), or 0 if the clip is
    active. One row per minibatch.

    Args:
        logits: per head [M, N, A]; forbidden actions hold a large negative number.
        actions: per head [M, N], indices.
        log_ratio, advantages: [M, N].
        clip: ε of the ratio's clip range.
        entropy_coef: c, weight of the entropy bonus.
        relevant: per head [M, N] bool; other heads always take part.
        valid: [M, N] bool; None if every row is valid.
    """
    a, r = advantages.detach().double(), log_ratio.detach().double().clamp(-EXP_LIMIT, EXP_LIMIT).exp()
    clipped = ((a > 0) & (r > 1 + clip)) | ((a < 0) & (r < 1 - clip))
    pull = torch.where(clipped, 0.0, a * r)
    mask = torch.isfinite(pull) if valid is None else torch.isfinite(pull) & valid.bool()
    squares = []  # squared norms [2, M] of both gradients at each head's logits, times the number of rows
    for head, z in logits.items():
        policy_slope = torch.softmax(z.double(), -1) - torch.nn.functional.one_hot(actions[head].long(), z.shape[-1])
        gradients = torch.stack([entropy_slope(z.double()), pull.unsqueeze(-1) * policy_slope])
        counted = mask if relevant is None or head not in relevant else mask & relevant[head]
        counted = counted & torch.isfinite(gradients).all(-1).all(0)
        squares.append(torch.where(counted.unsqueeze(-1), gradients, 0.0).square().sum((-1, -2)))
    bonus, policy = torch.stack(squares).sum(0).unbind()
    return EntropyGradient(norm_ratio(entropy_coef**2 * bonus, policy))


def entropy_slope(logits: Tensor) -> Tensor:
    """Return the gradient [.., A] of each row's entropy with respect to its logits."""
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1, keepdim=True)
    return -p * (log_p + entropy)
