"""What the optimizer makes of the gradients: learning rate, sizes of its steps and Adam's state (O1 to O5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper_telemetry.group import Last, Max, Mean, Metric, MetricGroup, Sum, label, reports
from esper_telemetry.metric import segment
from esper_telemetry.metrics.adam import AdamState, AdamTensor, adam_states, first_moment_weight, stable_rms
from esper_telemetry.metrics.defined import defined
from esper_telemetry.record import Level

EPSILON_MULTIPLE = 10.0  # below this many epsilons, Adam's denominator is mostly epsilon
NOT_ADAM = "the optimizer is not Adam, or has taken no step"


@dataclass(frozen=True, slots=True)
class LearningRate(MetricGroup):
    """The learning rate in use."""

    replicated: ClassVar[bool] = True
    lr: float | Tensor | None = reports(
        Metric(
            key="opt/lr",
            number=600,
            unit="learning rate",
            question="How large are the optimizer's steps meant to be now?",
            low=0.0,
            level=Level.MINIMAL,
            undefined="the optimizer has no parameters",
        )
    )


@dataclass(frozen=True, slots=True)
class AdamMemory(MetricGroup):
    """How far Adam's memory of squared gradients reaches."""

    replicated: ClassVar[bool] = True
    beta2: float | Tensor | None = reports(
        Metric(
            key="opt/beta2",
            number=610,
            unit="1",
            question="With which weight does Adam keep its average of squared gradients? It reaches back 1 / (1 - beta2) steps.",
            low=0.0,
            high=1.0,
            healthy="0.99 to 0.999",
            warn="< 0.9",
            source="Kingma 2015, 1412.6980",
            undefined="the optimizer is not Adam, or the trainer does not say",
        )
    )


@dataclass(frozen=True, slots=True)
class AdamStep(MetricGroup):
    """The step that Adam has just taken, over all parameters."""

    replicated: ClassVar[bool] = True
    update_to_weight: Mean | None = reports(
        Metric(
            key="opt/update_to_weight",
            number=601,
            unit="ratio",
            question="How large is an optimizer step next to the weights? About 0.001 is usual.",
            cost="sampled",
            low=0.0,
            healthy="1e-4 to 1e-2",
            warn="> 0.03",
            critical="> 0.1",
            source="CS231n",
            undefined=f"{NOT_ADAM}, or all weights were zero",
        )
    )
    update_rms_over_lr: Mean | None = reports(
        Metric(
            key="opt/update_rms_over_lr",
            number=602,
            unit="1",
            question="How far does Adam use its learning rate? About 1 for consistent gradients, less for noisy ones.",
            cost="sampled",
            low=0.0,
            undefined=f"{NOT_ADAM}, or the learning rate is zero",
        )
    )
    stable_rms: Max | None = reports(
        Metric(
            key="opt/stable_rms",
            number=603,
            unit="1",
            question="Is Adam's second moment out of date for some tensor? Above 1 the gradient has outgrown it.",
            cost="sampled",
            low=0.0,
            healthy="< 1.7",
            warn="> 2.3: loss spikes follow within 1 to 8 steps",
            critical="> 5",
            source="Wortsman 2023, 2304.13013",
            undefined=f"{NOT_ADAM}, or no parameter has a gradient",
        )
    )
    snr_share: Mean | None = reports(
        Metric(
            key="opt/snr_share",
            number=604,
            unit="fraction",
            question="What share of the gradient is signal, by Adam's state? For the trend only: biased under PPO.",
            cost="sampled",
            source="derivation and simulation; reads 0.128 for 0 with 4 epochs of 4 minibatches",
            undefined=f"{NOT_ADAM} or only one, or its second moment is zero",
        )
    )
    eps_dominated_frac: Mean | None = reports(
        Metric(
            key="opt/eps_dominated_frac",
            number=605,
            unit="fraction",
            question="For what share of the parameters is Adam only a tiny plain gradient step?",
            low=0.0,
            high=1.0,
            cost="sampled",
            healthy="< 0.5",
            warn="> 0.9",
            source="heuristic",
            undefined=NOT_ADAM,
        )
    )


@dataclass(frozen=True, slots=True)
class LayerSteps(MetricGroup):
    """The step that Adam has just taken, for every parameter tensor, and the tensor's size."""

    replicated: ClassVar[bool] = True
    layer: tuple[str, ...] = label()
    update_to_weight: Mean | None = reports(
        Metric(
            key="opt/update_to_weight/{layer}",
            number=606,
            unit="ratio",
            question="How large is an optimizer step next to this tensor's weights? Exactly 0 is a frozen tensor.",
            cost="sampled",
            low=0.0,
            healthy="1e-4 to 1e-2",
            warn="> 0.03",
            critical="> 0.1",
            source="CS231n",
            undefined=f"{NOT_ADAM}, or the tensor was zero",
        )
    )
    weight_norm: Last | None = reports(
        Metric(
            key="opt/weight_norm/{layer}",
            number=607,
            unit="weight norm",
            question="How large are this tensor's weights?",
            cost="sampled",
            low=0.0,
            undefined="the tensor has no optimizer state",
        )
    )


@dataclass(frozen=True, slots=True)
class WeightGrowth(MetricGroup):
    """How the weights have grown since the start."""

    replicated: ClassVar[bool] = True
    growth: Last | None = reports(
        Metric(
            key="opt/weight_growth",
            number=608,
            unit="ln",
            question="How much have the weights grown since training began? Growth precedes the loss of plasticity.",
            cost="sampled",
            healthy="< 1",
            warn="> 2",
            source="Moalla 2024, 2405.00662",
            undefined="the weights are or were all zero",
        )
    )


@dataclass(frozen=True, slots=True)
class StateReset(MetricGroup):
    """Parameters whose optimizer state was lost."""

    replicated: ClassVar[bool] = True
    reset: Sum | None = reports(
        Metric(
            key="opt/state_reset",
            number=609,
            unit="count",
            question="For how many parameters does the optimizer start from nothing in the middle of training?",
            cost="sampled",
            low=0.0,
            healthy="0",
            warn="> 0: the optimizer was made anew, momentum is lost",
            undefined="the optimizer is not Adam, or was never looked at before",
        )
    )


def learning_rate(optimizer: Optimizer) -> LearningRate:
    """The learning rate of the optimizer's first parameter group."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return LearningRate(rates[0] if rates else None)


@torch.no_grad()
def adam_step(state: Optimizer | Iterable[AdamState]) -> AdamStep:
    """The step that Adam, or a relative of it, has just taken.

    Args:
        state: the optimizer after `step` and before `zero_grad`, or what `adam_states` found there.

    The signal share debiases ρ = |m|²/Σv by the sum κ of squared weights of m's average: (ρ - κ)/(1 - κ).
    Absent for optimizers without `exp_avg` and `exp_avg_sq`.
    """
    return _whole(_measured(state))


@torch.no_grad()
def layer_steps(state: Optimizer | Iterable[AdamState], names: Sequence[str]) -> LayerSteps:
    """The step that Adam has just taken, tensor by tensor.

    Args:
        state: as for `adam_step`.
        names: K names of the parameters that have a state, in the optimizer's order.
    """
    return _by_layer(_measured(state), names)


@torch.no_grad()
def adam_steps(state: Optimizer | Iterable[AdamState], names: Sequence[str]) -> tuple[AdamStep, LayerSteps]:
    """Both of them from one pass; arguments as for `layer_steps`."""
    measured = _measured(state)
    return _whole(measured), _by_layer(measured, names)


def _whole(measured: _Measured) -> AdamStep:
    tensors, parts = measured
    if parts is None:
        return AdamStep()
    step, before, over_lr, m, v, small, count = parts.sum(0).unbind()
    kappa = first_moment_weight(tensors[0].betas[0], tensors[0].step)
    return AdamStep(
        update_to_weight=defined((step / before).sqrt()),
        update_rms_over_lr=defined((over_lr / count).sqrt()),
        stable_rms=_largest([stable_rms(tensor) for tensor in tensors if tensor.gradient is not None]),
        snr_share=defined((m / v - kappa) / (1.0 - kappa)),
        eps_dominated_frac=Mean(small, count),
    )


def _by_layer(measured: _Measured, names: Sequence[str]) -> LayerSteps:
    tensors, parts = measured
    if parts is None:
        return LayerSteps(())
    weights = torch.stack([torch.linalg.vector_norm(tensor.weights, dtype=torch.float64) for tensor in tensors])
    return LayerSteps(
        tuple(map(segment, names)),
        update_to_weight=defined((parts[:, 0] / parts[:, 1]).sqrt()[None]),
        weight_norm=Last(weights[None]),
    )


@torch.no_grad()
def weight_growth(weights: Sequence[Tensor], initial_norm: Tensor) -> WeightGrowth:
    """Logarithm of the weights' norm over `initial_norm` (0-d, from `weight_norm` at the start)."""
    growth = (weight_norm(weights) / initial_norm).log()
    return WeightGrowth(Last(torch.where(torch.isfinite(growth), growth, torch.nan)))


@torch.no_grad()
def weight_norm(weights: Sequence[Tensor]) -> Tensor:
    """L2 norm of all weights together, 0-d float64."""
    norms = [torch.linalg.vector_norm(weight, dtype=torch.float64) for weight in weights]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def state_reset(steps: Tensor, previous: Tensor | None) -> StateReset:
    """Parameters whose optimizer counts fewer steps than when it was looked at before.

    Args:
        steps: [K], counted now.
        previous: [K], counted at an earlier look; None at the first, which has nothing to compare with.
    """
    if previous is None or previous.shape != steps.shape:
        return StateReset()
    return StateReset(Sum((steps < previous).sum().double()))


class _Measured(NamedTuple):
    """Parameters with a state, and their `_sums`, [K, 7]; None without any."""

    tensors: list[AdamTensor]
    sums: Tensor | None


def _measured(state: Optimizer | Iterable[AdamState]) -> _Measured:
    tensors = [found.corrected() for found in _states(state)]
    return _Measured(tensors, torch.stack([_sums(tensor) for tensor in tensors]) if tensors else None)


def _states(state: Optimizer | Iterable[AdamState]) -> Iterable[AdamState]:
    return adam_states(state) if isinstance(state, Optimizer) else state


def _sums(tensor: AdamTensor) -> Tensor:
    """[7]: squared step, squared weights before it, squared step over lr, |m|², Σv, entries below 10 ε, entries."""
    update = tensor.update()
    step = _square(update)
    small = (tensor.v < (EPSILON_MULTIPLE * tensor.eps) ** 2).sum().double()
    over_lr = step / tensor.lr / tensor.lr
    before = _square(tensor.weights.double() - update)
    count = torch.full_like(small, tensor.weights.numel())
    return torch.stack([step, before, over_lr, _square(tensor.m), tensor.v.sum(), small, count])


def _square(values: Tensor) -> Tensor:
    """Sum of squares, 0-d."""
    flat = values.flatten()
    return flat.dot(flat)


def _largest(values: Sequence[Tensor]) -> Max | None:
    """The largest finite value, if there is any."""
    if not values:
        return None
    stacked = torch.stack(tuple(values))
    return Max(torch.where(torch.isfinite(stacked), stacked, -torch.inf).max())
