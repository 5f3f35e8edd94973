"""The terms of the PPO loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, MetricFamily, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Mean, Sum
from esper_telemetry.metrics.ratio import EXP_LIMIT
from esper_telemetry.metrics.statistics import same_shape, sample

LOSSES_FAMILY = MetricFamily(
    "loss",
    "Losses",
    "Quantities that the optimizer minimises. In PPO losses say little by themselves: the policy loss hovers around "
    "0 by construction and the value loss scales with the returns. Read `policy/surrogate_gain` and "
    "`value/loss_norm` instead.",
    place=90,
    question="What is being minimised?",
)


@dataclass(frozen=True, slots=True)
class LossTerms(MetricGroup):
    """Losses of the minibatches, weighted by their number of valid rows."""

    policy: Mean = reports(
        Metric.quantity("loss/policy", 921, "policy loss", unit="loss")
        .asks("What does the clipped surrogate loss read? Its sign and size say little: judge policy/surrogate_gain.")
        .bounds(source="PPO 1707.06347, eq. 7")
        .absent("no finite loss")
    )
    value: Mean = reports(
        Metric.quantity("loss/value", 922, "value loss", unit="loss (0.5 MSE, without coefficient)", low=0.0)
        .asks("How large is the critic's squared error? It scales with the returns: judge value/loss_norm.")
        .bounds(warn="robust z of log10 above 4", source="0.5 MSE, as CleanRL")
        .absent("no finite loss")
    )
    entropy: Mean | None = reports(
        Metric.quantity("loss/entropy", 923, "entropy loss", unit="nats (-entropy)")
        .asks("What does the entropy bonus read? It is the negative of policy/entropy.")
        .absent("no finite loss")
    )
    total: Mean | None = reports(
        Metric.quantity("loss/total", 924, "total loss", unit="loss", level=Level.MINIMAL)
        .asks("What does the optimizer minimise: policy loss plus weighted value loss and entropy bonus?")
        .absent("no finite loss")
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("loss/policy_nonfinite", 925, "non-finite inputs of policy loss").asks(
            "How many loss terms were NaN or infinite?"
        )
    )


@dataclass(frozen=True, slots=True)
class LossWeights(MetricGroup):
    """Weights of the losses in use."""

    replicated: ClassVar[bool] = True
    value: float | Tensor | None = reports(
        Metric.quantity("loss/value_coef", 918, "weight of the value loss", unit="1", low=0.0)
        .asks("How much does the value loss weigh in this update?")
        .absent("the weight is a constant of the run, or the trainer does not say")
    )
    entropy: float | Tensor | None = reports(
        Metric.quantity("loss/entropy_coef", 919, "weight of the entropy bonus", unit="1")
        .asks("How much does the entropy bonus weigh in this update? Below 0 it punishes exploring.")
        .absent("the weight is a constant of the run, or the trainer does not say")
    )


def loss_weights(coefficients: Mapping[str, float]) -> LossWeights:
    """The weights of `value` and `entropy`, as far as they are told."""
    return LossWeights(coefficients.get("value"), coefficients.get("entropy"))


@inference_mode
def loss_terms(
    policy: ArrayLike,
    value: ArrayLike,
    entropy: ArrayLike | None = None,
    total: ArrayLike | None = None,
    *,
    count: ArrayLike = 1.0,
) -> LossTerms:
    """Losses that the trainer computed.

    Args:
        policy: clipped surrogate loss, [] or [M], one per minibatch.
        value: 0.5 MSE, not scaled by its coefficient, same shape.
        entropy: negative mean entropy, not scaled, same shape; None where it is not known.
        total: what is minimised, same shape; None where it is not known.
        count: valid rows behind each, same shape, or one number for all.
    """
    known = {"policy": policy, "value": value, "entropy": entropy, "total": total}
    given = {name: as_tensor(term).detach() for name, term in known.items() if term is not None}
    same_shape(**given)
    terms = torch.stack(list(given.values())).double()
    finite = terms.abs() < torch.inf
    rows = as_tensor(count, terms).to(terms)
    same_shape(terms=terms[0], count=rows if rows.ndim else None)
    weights = finite * rows
    means = map(Mean, torch.where(finite, terms * weights, 0.0), weights)
    return LossTerms(**dict(zip(given, means, strict=True)), nonfinite=Sum(len(given) - finite.sum(0)))


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
) -> LossTerms:
    """The loss terms from what they are made of, for trainers that do not hand them out.

    policy = mean max(-A r, -A clip(r, 1 - ε, 1 + ε)); value = 0.5 mean (V - R)²; entropy = -mean H;
    total = policy + value_coef * value + entropy_coef * entropy.

    Args:
        log_ratio, advantages, values, returns, entropy: [N] or [M, N]; advantages as they multiply the ratio, entropy per row.
        clip: ε of the ratio's clip range.
        value_coef, entropy_coef: weights in the total.
        valid: bool, same shape; None where every entry is.
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
    negative = sample(-entropy.detach(), valid, dim=dim)
    policy, value, bonus = (s.values.sum(-1) / s.count for s in (surrogate, squared, negative))
    return LossTerms(
        policy=surrogate.mean(surrogate.values),
        value=squared.mean(squared.values),
        entropy=negative.mean(negative.values),
        total=_where_defined(policy + value_coef * value + entropy_coef * bonus, surrogate.count),
        nonfinite=Sum(surrogate.nonfinite + squared.nonfinite + negative.nonfinite),
    )


def _where_defined(value: Tensor, count: Tensor) -> Mean:
    """Mean `value` of `count` rows, empty where it is NaN."""
    defined = ~value.isnan()
    return Mean(torch.where(defined, value * count, 0.0), count * defined)
