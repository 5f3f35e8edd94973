"""The optimizer: learning rate, sizes of its steps, and Adam's state.

Adam's state is sampled, although its tensors exist anyway. Its statistics take one thread as long as one to four training steps, mostly
to copy and correct the moments in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.metric import Metric, MetricFamily, label, reports, segment
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Last, Max, Mean, Sum
from esper_telemetry.metrics.statistics import defined

if TYPE_CHECKING:
    from torch.optim import Optimizer


MAX_PIECE_NUMBERS = 1 << 18
"""Numbers processed at once, or one larger parameter, so that memory does not grow with the network."""


OPTIMIZER_FAMILY = MetricFamily(
    "opt",
    "Optimizer",
    "Effect of the optimizer on the gradients: size of its steps relative to the weights, and fit of its memory of past "
    "gradients. Measured at one optimizer step of a sampled update.",
    place=120,
    question="Are the optimizer's steps the right size?",
    first=("opt/update_to_weight", "opt/stable_rms", "opt/lr"),
)


class ParameterState(NamedTuple):
    """A parameter with its optimizer state and parameter group."""

    parameter: Tensor
    state: dict[str, Any]
    group: dict[str, Any]


class AdamState(NamedTuple):
    """A copy of Adam's state of K parameters after a step, d numbers in all, one parameter after the other.

    Attributes:
        shapes: shapes of the K parameters.
        weights: [d], after the step.
        gradient: [d], as used by the step, after any clipping; NaN for parameters without a gradient by now, None if all lack one.
        exp_avg, exp_avg_sq: [d], first and second moment, as the optimizer keeps them.
        step: [K], number of steps so far, float64.
        lr, beta1, beta2, eps: [K] each, as in the optimizer, float64.
    """

    shapes: tuple[tuple[int, ...], ...]
    weights: Tensor
    gradient: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    lr: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor

    @property
    def numels(self) -> list[int]:
        """Return the number of entries of each parameter, [K]."""
        return [math.prod(shape) for shape in self.shapes]

    def tensors(self) -> list[Tensor]:
        """Return the K weights in their shapes."""
        return [part.view(shape) for part, shape in zip(self.weights.split(self.numels), self.shapes, strict=True)]

    def denominator(self) -> tuple[Tensor, Tensor]:
        """Return √exp_avg_sq and ε √(1 - β₂ᵗ), [d] each: the terms of √v + ε, multiplied by √(1 - β₂ᵗ)."""
        return self.exp_avg_sq.sqrt(), self.spread(self.eps * self.bias(self.beta2).sqrt())

    def update(self) -> Tensor:
        """Return the step's change of the weights without weight decay, -lr m / (√v + ε), [d]."""
        root, floor = self.denominator()
        rate = self.lr * self.bias(self.beta2).sqrt() / self.bias(self.beta1)
        return -self.spread(rate) * self.exp_avg / (root + floor)

    def moment_before(self) -> Tensor:
        """Return the first moment before the step, [d] float64, up to a factor: exp_avg minus the contribution of the step's gradient."""
        assert self.gradient is not None
        return self.exp_avg.double() - self.spread(1.0 - self.beta1).double() * self.gradient.double()

    def bias(self, beta: Tensor) -> Tensor:
        """Return [K], Adam's bias correction 1 - βᵗ."""
        return 1.0 - beta**self.step

    def spread(self, column: Tensor) -> Tensor:
        """Return [d] from [K]: each parameter's number repeated for all its entries, in their type."""
        counts = torch.tensor(self.numels).to(column.device, non_blocking=True)
        return column.to(self.weights.dtype).repeat_interleave(counts, output_size=len(self.weights))

    def pieces(self) -> Iterator[AdamState]:
        """Yield the state in pieces of at most `MAX_PIECE_NUMBERS` numbers, or of one parameter."""
        numels = self.numels
        begin = 0
        for first, last in _together(numels):
            end = begin + sum(numels[first:last])
            gradient = None if self.gradient is None else self.gradient[begin:end]
            vectors = (self.weights[begin:end], gradient, self.exp_avg[begin:end], self.exp_avg_sq[begin:end])
            columns = [column[first:last] for column in self[5:]]
            yield AdamState(self.shapes[first:last], *vectors, *columns)
            begin = end


def adam_parameters(optimizer: Optimizer) -> list[ParameterState]:
    """Return every parameter that has Adam state, in the optimizer's order."""
    entries = [
        ParameterState(parameter, optimizer.state.get(parameter, {}), group)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    return [entry for entry in entries if "exp_avg" in entry.state and "exp_avg_sq" in entry.state]


def adam_state(entries: Sequence[ParameterState]) -> AdamState:
    """Return copies in at least single precision, which later steps do not change.

    Args:
        entries: from `adam_parameters`, at least one.
    """
    device = entries[0].parameter.device
    gradients = [parameter.grad for parameter, _, _ in entries]
    missing = [gradient is None for gradient in gradients]
    present = [
        torch.full_like(entry.parameter, torch.nan) if gradient is None else gradient
        for entry, gradient in zip(entries, gradients, strict=True)
    ]
    return AdamState(
        shapes=tuple([tuple(entry.parameter.shape) for entry in entries]),
        weights=flat([entry.parameter.detach() for entry in entries]),
        gradient=None if all(missing) else flat(present),
        exp_avg=flat([entry.state["exp_avg"] for entry in entries]),
        exp_avg_sq=flat([entry.state["exp_avg_sq"] for entry in entries]),
        step=_column([entry.state["step"] for entry in entries], device),
        lr=_column([entry.group["lr"] for entry in entries], device),
        beta1=_column([entry.group["betas"][0] for entry in entries], device),
        beta2=_column([entry.group["betas"][1] for entry in entries], device),
        eps=_column([entry.group["eps"] for entry in entries], device),
    )


def adam_pieces(optimizer: Optimizer) -> Iterator[AdamState]:
    """Yield copies of the optimizer's state in pieces of at most `MAX_PIECE_NUMBERS` numbers, or of one parameter."""
    entries = adam_parameters(optimizer)
    for first, last in _together([entry.parameter.numel() for entry in entries]):
        yield adam_state(entries[first:last])


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of the concatenated tensors, [d], in at least single precision."""
    joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return joined.float() if joined.dtype.itemsize < torch.float32.itemsize else joined


def first_moment_weight(beta: Tensor, step: Tensor) -> Tensor:
    """Return the sum κ of the squared weights of past gradients in the bias-corrected first moment, of the arguments' shape."""
    decay = beta**step
    return (1.0 - beta) / (1.0 + beta) * (1.0 + decay) / (1.0 - decay)


def _together(numels: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last) of parameters with at most `MAX_PIECE_NUMBERS` numbers together, or of one parameter."""
    first = total = 0
    for place, numel in enumerate(numels):
        if place > first and total + numel > MAX_PIECE_NUMBERS:
            yield first, place
            first, total = place, 0
        total += numel
    if first < len(numels):
        yield first, len(numels)


def _column(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Return [K], float64, from numbers that may be 0-d tensors, without synchronising."""
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)
    tensors = [torch.as_tensor(value, dtype=torch.float64).to(device, non_blocking=True) for value in values]
    return torch.stack(tensors)


EPSILON_MULTIPLE = 10.0  # below this many epsilons, Adam's denominator is mostly epsilon


@dataclass(frozen=True, slots=True)
class LearningRate(MetricGroup):
    """The learning rate in use."""

    replicated: ClassVar[bool] = True
    lr: float | Tensor | None = reports(
        Metric.magnitude("opt/lr", 600, "learning rate", unit="learning rate", level=Level.MINIMAL)
        .asks("What is the nominal size of the optimizer's steps?")
        .absent("the optimizer is without parameters")
    )


@dataclass(frozen=True, slots=True)
class GroupLearningRates(MetricGroup):
    """The learning rates of several optimizers or parameter groups."""

    replicated: ClassVar[bool] = True
    group: tuple[str, ...] = label()
    lr: Last | None = reports(
        Metric.magnitude("opt/lr/{group}", 611, "learning rate of a group", unit="learning rate")
        .asks("What is the nominal size of the optimizer's steps for this part of the network?")
        .absent("all parameter groups of all optimizers have the rate `opt/lr`")
    )


@dataclass(frozen=True, slots=True)
class AdamMemory(MetricGroup):
    """Reach of Adam's memory of squared gradients."""

    replicated: ClassVar[bool] = True
    beta2: float | Tensor | None = reports(
        Metric.fraction("opt/beta2", 610, "reach of Adam's memory of squares", unit="1")
        .asks("With what weight does Adam keep its average of squared gradients? It reaches back 1 / (1 - beta2) steps.")
        .bounds(healthy="0.99 to 0.999", warn="< 0.9", source="Kingma 2015, 1412.6980")
        .absent("the optimizer is not Adam, or the trainer does not say")
    )


@dataclass(frozen=True, slots=True)
class AdamStep(MetricGroup, cost="sampled"):
    """The step that Adam has just taken, over all parameters."""

    replicated: ClassVar[bool] = True
    update_to_weight: Mean | None = reports(
        Metric.ratio("opt/update_to_weight", 601, "step size next to the weights")
        .asks("How large is an optimizer step relative to the weights? About 0.001 is usual.")
        .bounds(healthy="1e-4 to 1e-2", warn="> 0.03", critical="> 0.1", source="CS231n")
        .absent("the optimizer is not Adam, or has taken no step, or all weights were zero")
    )
    update_rms_over_lr: Mean | None = reports(
        Metric.magnitude("opt/update_rms_over_lr", 602, "use of the learning rate", unit="1")
        .asks("How much of its learning rate does Adam use? About 1 for consistent gradients, less for noisy ones.")
        .absent("the optimizer is not Adam, or has taken no step, or the learning rate is zero")
    )
    stable_rms: Max | None = reports(
        Metric.magnitude("opt/stable_rms", 603, "gradient next to Adam's memory of it", unit="1")
        .asks("Is Adam's second moment out of date for some tensor? Above 1 the gradient has outgrown it.")
        .bounds(healthy="< 1.7", warn="> 2.3: loss spikes follow within 1 to 8 steps", critical="> 5", source="Wortsman 2023, 2304.13013")
        .absent("the optimizer is not Adam, or has taken no step, or no parameter has a gradient")
    )
    snr_share: Mean | None = reports(
        Metric.quantity("opt/snr_share", 604, "share of signal by Adam's state", unit="fraction")
        .asks("What share of the gradient is signal, according to Adam's state? For the trend only: biased under PPO.")
        .bounds(source="derivation and simulation; reads 0.128 for 0 with 4 epochs of 4 minibatches")
        .absent("the optimizer is not Adam, or has taken no step or only one, or its second moment is zero")
    )
    eps_dominated_frac: Mean | None = reports(
        Metric.fraction("opt/eps_dominated_frac", 605, "share of parameters that epsilon dominates")
        .asks("For what share of the parameters is Adam only a tiny plain gradient step?")
        .bounds(healthy="< 0.5", warn="> 0.9", source="heuristic")
        .absent("the optimizer is not Adam, or has taken no step")
        .advises("Gradients are tiny compared with Adam's eps: lower eps (1e-8), or find why they vanish.")
    )


@dataclass(frozen=True, slots=True)
class LayerSteps(MetricGroup, cost="sampled"):
    """The step that Adam has just taken, for every parameter tensor, and the tensor's size."""

    replicated: ClassVar[bool] = True
    layer: tuple[str, ...] = label()
    update_to_weight: Mean | None = reports(
        Metric.ratio("opt/update_to_weight/{layer}", 606, "step size next to a layer's weights")
        .asks("How large is an optimizer step relative to this tensor's weights? Exactly 0 for a frozen tensor.")
        .bounds(healthy="1e-4 to 1e-2", warn="> 0.03", critical="> 0.1", source="CS231n")
        .absent("the optimizer is not Adam, or has taken no step, or the tensor was zero")
    )
    weight_norm: Last | None = reports(
        Metric.magnitude("opt/weight_norm/{layer}", 607, "norm of a layer's weights", unit="weight norm")
        .asks("How large are this tensor's weights?")
        .absent("the optimizer state of the tensor is missing")
    )


@dataclass(frozen=True, slots=True)
class WeightGrowth(MetricGroup):
    """Growth of the weights since the start."""

    replicated: ClassVar[bool] = True
    growth: Last | None = reports(
        Metric.quantity("opt/weight_growth", 608, "growth of the weights", unit="ln", cost="sampled")
        .asks("How much have the weights grown since training began? Growth precedes the loss of plasticity.")
        .bounds(healthy="< 1", warn="> 2", source="Moalla 2024, 2405.00662")
        .absent("the weights are or were all zero")
    )


@dataclass(frozen=True, slots=True)
class StateReset(MetricGroup):
    """Parameters whose optimizer state was lost."""

    replicated: ClassVar[bool] = True
    reset: Sum | None = reports(
        Metric.count("opt/state_reset", 609, "parameters with lost optimizer state", cost="sampled")
        .asks("For how many parameters was the optimizer state lost in the middle of training?")
        .bounds(healthy="0", warn="> 0: the optimizer was created again, momentum is lost")
        .absent("the optimizer is not Adam, or was not measured before")
    )


def learning_rate(optimizer: Optimizer) -> LearningRate:
    """Return the learning rate of the optimizer's first parameter group."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return LearningRate(rates[0] if rates else None)


def group_learning_rates(rates: Mapping[str, float | Tensor]) -> GroupLearningRates:
    """Return the learning rates of optimizers or parameter groups by name."""
    device = next((rate.device for rate in rates.values() if isinstance(rate, Tensor)), None)
    values = [torch.as_tensor(rate, dtype=torch.float64).to(device, non_blocking=True) for rate in rates.values()]
    return GroupLearningRates(tuple(map(segment, rates)), Last(torch.stack(values)[None]) if values else None)


@no_grad
def adam_step(state: Optimizer | AdamState) -> AdamStep:
    """Return the latest step of Adam or a related optimizer.

    The signal share debiases ρ = |m|²/Σv by the sum κ of squared weights of m's average: (ρ - κ)/(1 - κ).
    The result is absent for optimizers without `exp_avg` and `exp_avg_sq`.

    Args:
        state: the optimizer after `step` and before `zero_grad`, or the result of `adam_state` at that time.
    """
    return _whole(_sums(state))


@no_grad
def adam_steps(state: Optimizer | AdamState, names: Sequence[str]) -> tuple[AdamStep, LayerSteps]:
    """Return the latest step of Adam as a whole and for every parameter, from one pass.

    Args:
        state: as for `adam_step`.
        names: names of the K parameters with a state, in the optimizer's order.
    """
    sums = _sums(state)
    return _whole(sums), _by_layer(sums, names)


class _StepSums(NamedTuple):
    """Sums over the entries of each of K parameters, [K] each, float64.

    Attributes:
        step, weights, before: squared numbers of the step, of the weights after it and before it.
        m, v: squared first moments, and second moments, without bias.
        stable: squared gradients divided by second moments; NaN if the gradient is gone.
        small: second moments whose root is below 10 ε.
        numbers: number of entries.
        lr: learning rate.
        kappa: see `first_moment_weight`.
    """

    step: Tensor
    weights: Tensor
    before: Tensor
    m: Tensor
    v: Tensor
    stable: Tensor
    small: Tensor
    numbers: Tensor
    lr: Tensor
    kappa: Tensor


def _sums(state: Optimizer | AdamState) -> _StepSums | None:
    """Return the sums, computed piece by piece; None without parameters."""
    pieces = state.pieces() if isinstance(state, AdamState) else adam_pieces(state)
    sums = [_sums_of_piece(piece) for piece in pieces]
    return _StepSums(*map(torch.cat, zip(*sums, strict=True))) if sums else None


def _sums_of_piece(piece: AdamState) -> _StepSums:
    """Return the sums of one piece: entries in the state's own type, as Adam computes its step; sums in float64."""
    from esper_telemetry.core.tensors import choose_norms  # imported here, because that module imports torch

    update = piece.update()
    root, floor = piece.denominator()
    stable = root * torch.nan if piece.gradient is None else piece.gradient / torch.maximum(root, floor)
    small = (root < EPSILON_MULTIPLE * floor).to(root.dtype)
    vectors = (update, piece.weights, piece.weights - update, piece.exp_avg, root, stable, small)
    parts = [part for vector in vectors for part in vector.split(piece.numels)]
    norms = choose_norms(root.device)(parts, torch.float64).view(len(vectors), -1)
    step, weights, before, m, v, stable, small = norms.square().unbind()
    count = torch.tensor(piece.numels, dtype=torch.float64).to(root.device, non_blocking=True)
    kappa = first_moment_weight(piece.beta1, piece.step)
    m, v, stable = m / piece.bias(piece.beta1).square(), v / piece.bias(piece.beta2), stable * piece.bias(piece.beta2)
    return _StepSums(step, weights, before, m, v, stable, small, count, piece.lr, kappa)


def _whole(sums: _StepSums | None) -> AdamStep:
    if sums is None:
        return AdamStep()
    kappa, count = sums.kappa[0], sums.numbers.sum()
    over_lr = sums.step / sums.lr.square()
    stable = (sums.stable / sums.numbers).sqrt()
    return AdamStep(
        update_to_weight=defined((sums.step.sum() / sums.before.sum()).sqrt()),
        update_rms_over_lr=defined((over_lr.sum() / count).sqrt()),
        stable_rms=Max(torch.where(torch.isfinite(stable), stable, -torch.inf).max()),
        snr_share=defined((sums.m.sum() / sums.v.sum() - kappa) / (1.0 - kappa)),
        eps_dominated_frac=Mean(sums.small.sum(), count),
    )


def _by_layer(sums: _StepSums | None, names: Sequence[str]) -> LayerSteps:
    if sums is None:
        return LayerSteps(())
    return LayerSteps(
        tuple(map(segment, names)),
        update_to_weight=defined((sums.step / sums.before).sqrt()[None]),
        weight_norm=Last(sums.weights.sqrt()[None]),
    )


@no_grad
def weight_growth(weights: Sequence[Tensor], initial_norm: Tensor) -> WeightGrowth:
    """Return the logarithm of the ratio of the weights' norm to `initial_norm` (0-d, from `weight_norm` at the start)."""
    growth = (weight_norm(weights) / initial_norm).log()
    return WeightGrowth(Last(torch.where(torch.isfinite(growth), growth, torch.nan)))


@no_grad
def weight_norm(weights: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all weights together, 0-d float64."""
    norms = [torch.linalg.vector_norm(weight, dtype=torch.float64) for weight in weights]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def state_reset(steps: Tensor, previous: Tensor | None) -> StateReset:
    """Return the number of parameters whose step count fell since the previous sampled update.

    Args:
        steps: [K], counted now.
        previous: [K], counted earlier; None the first time, when a comparison is impossible.
    """
    if previous is None or previous.shape != steps.shape:
        return StateReset()
    return StateReset(Sum((steps < previous).sum().double()))
