"""Equation of the optimizer's step: the new weights follow from the old weights, the gradient, the optimizer's state and its settings.

Adam, AdamW, SGD and RMSprop are implemented here in float64 from their papers, independently of torch. Each parameter's steps are divided
by the parameter's largest step plus the rounding error of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from esper_telemetry.core.arrays import as_floats, shown
from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.comparison import EquationCheck, compare, distinguished, explained, unchecked
from esper_telemetry.equations.equation import Equation, mistake, variant
from esper_telemetry.equations.gradient import fitted, largest_entries, spread

if TYPE_CHECKING:
    from torch.optim import Optimizer

Weights: TypeAlias = "Mapping[str, Tensor] | Sequence[Tensor]"

ROUNDINGS: Final = 2.0
"""Rounding errors of a weight in a step, in units of its type's epsilon: weight decay and the step, with a margin of the same size."""


class StepSettings(NamedTuple):
    """Settings of the step of a parameter, as in `torch.optim`.

    Attributes:
        kind: adam, sgd or rmsprop.
        decoupled: weight decay acts on the weights (AdamW), not through the gradient.
        epsilon_inside: ε is added to the average of squares, not to its root (TensorFlow's RMSprop).
        corrects_bias: corrects the bias of Adam's averages, which begin at 0.
    """

    kind: str
    lr: float
    weight_decay: float = 0.0
    decoupled: bool = False
    maximize: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    amsgrad: bool = False
    corrects_bias: bool = True
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    alpha: float = 0.99
    centered: bool = False
    epsilon_inside: bool = False


State: TypeAlias = "Mapping[str, Tensor]"


@dataclass(frozen=True, slots=True, eq=False)
class ParameterStep:
    """A parameter before a step, float64.

    Attributes:
        weights: before the step, any shape.
        gradient: that the optimizer reads; None if the parameter does not have a gradient, and stays.
        settings: None if the optimizer does not have the parameter.
        state: of the optimizer before the step, by torch's names; empty before the first step.
        count: number of steps that the state has counted.
    """

    weights: Tensor
    gradient: Tensor | None
    settings: StepSettings | None
    state: State
    count: int


def next_state(step: ParameterStep, settings: StepSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the change of the weights in a step, and the state after the step."""
    assert step.gradient is not None
    weights, gradient = step.weights, -step.gradient if settings.maximize else step.gradient
    decay = torch.zeros_like(weights)
    if settings.decoupled:
        decay = -settings.lr * settings.weight_decay * weights
    else:
        gradient = gradient + settings.weight_decay * weights
    zero = torch.zeros_like(weights)
    state = dict(step.state)
    match settings.kind:
        case "adam":
            state["exp_avg"] = settings.beta1 * step.state.get("exp_avg", zero) + (1 - settings.beta1) * gradient
            squares = settings.beta2 * step.state.get("exp_avg_sq", zero) + (1 - settings.beta2) * gradient.square()
            state["exp_avg_sq"] = squares
            if settings.amsgrad:
                squares = state["max_exp_avg_sq"] = torch.maximum(step.state.get("max_exp_avg_sq", zero), squares)
            count = step.count + 1
            bias1, bias2 = (1 - settings.beta1**count, 1 - settings.beta2**count) if settings.corrects_bias else (1, 1)
            direction = state["exp_avg"] / bias1 / ((squares / bias2).sqrt() + settings.eps)
        case "sgd":
            direction = gradient
            if settings.momentum:
                before = step.state.get("momentum_buffer")
                buffer = gradient if before is None else settings.momentum * before + (1 - settings.dampening) * gradient
                state["momentum_buffer"] = buffer
                direction = gradient + settings.momentum * buffer if settings.nesterov else buffer
        case _:
            begin = torch.ones_like(zero) if settings.epsilon_inside else zero
            squares = settings.alpha * step.state.get("square_avg", begin) + (1 - settings.alpha) * gradient.square()
            state["square_avg"] = squares
            if settings.centered:
                state["grad_avg"] = settings.alpha * step.state.get("grad_avg", zero) + (1 - settings.alpha) * gradient
                squares = squares - state["grad_avg"].square()
            inside = settings.epsilon_inside
            root = (squares + settings.eps).sqrt() if inside else squares.sqrt() + settings.eps
            direction = gradient / root
            if settings.momentum:
                direction = settings.momentum * step.state.get("momentum_buffer", zero) + direction
                state["momentum_buffer"] = direction
    return decay - settings.lr * direction, state


Change: TypeAlias = Callable[[StepSettings], StepSettings]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """Inputs of the weights after a step.

    Attributes:
        steps: of the K parameters.
        settings: of parameters that the optimizer does not have.
        scale: [d], divisor of the changes of the weights.
        lost: number of steps that the optimizer has taken but its state has not counted.
        stands_still: the optimizer's own learning rate is 0.
    """

    steps: tuple[ParameterStep, ...]
    settings: StepSettings
    scale: Tensor | float = 1.0
    lost: int = 0
    stands_still: bool = False

    def next(self, step: ParameterStep, change: Change = lambda settings: settings, *, lost: int | None = None) -> tuple[Tensor, State]:
        """Return the change of a parameter's weights with changed settings, and its state after the step."""
        if step.gradient is None:
            return torch.zeros_like(step.weights), step.state
        counted = replace(step, count=step.count + (self.lost if lost is None else lost))
        return next_state(counted, change(step.settings or self.settings))

    def changed(self, change: Change = lambda settings: settings, *, lost: int | None = None) -> Tensor:
        """Return the change [d] of the weights with changed settings, divided by `scale`."""
        return torch.cat([self.next(step, change, lost=lost)[0].flatten() for step in self.steps]) / self.scale

    def any(self, condition: Callable[[StepSettings], bool]) -> bool:
        """Return True if the condition is true for the settings of some parameters."""
        return any(condition(step.settings or self.settings) for step in self.steps)


def _twice(inputs: StepInputs) -> Tensor:
    first = [inputs.next(step) for step in inputs.steps]
    after = [
        replace(step, weights=step.weights + change, state=state, count=step.count + 1)
        for step, (change, state) in zip(inputs.steps, first, strict=True)
    ]
    return torch.cat([change.flatten() for change, _ in first]) / inputs.scale + replace(inputs, steps=tuple(after)).changed()


def _cleared(inputs: StepInputs) -> Tensor | None:
    if not any(step.state for step in inputs.steps):
        return None
    return replace(inputs, steps=tuple([replace(step, state={}, count=0) for step in inputs.steps])).changed(lost=0)


def _left_out(inputs: StepInputs) -> Tensor | None:
    """Return the change without the parameters that the optimizer lacks."""
    if all(step.settings is not None for step in inputs.steps):
        return None
    kept = tuple([step if step.settings is not None else replace(step, gradient=None) for step in inputs.steps])
    return replace(inputs, steps=kept).changed()


def _if(condition: Callable[[StepSettings], bool], change: Change) -> Callable[[StepInputs], Tensor | None]:
    """Return the prediction of a change of settings, which applies if some parameters satisfy the condition."""
    return lambda inputs: inputs.changed(change) if inputs.any(condition) else None


def _plain(settings: StepSettings) -> StepSettings:
    return StepSettings("sgd", settings.lr)


def _fit_rate(inputs: StepInputs, numbers: Tensor) -> tuple[float, Tensor] | None:
    direction = inputs.changed(lambda settings: settings._replace(lr=1.0))
    return fitted(torch.zeros_like(numbers), direction, numbers)


def _fit_decay(inputs: StepInputs, numbers: Tensor) -> tuple[float, Tensor] | None:
    """Fit a decay of the weights before or after the step, depending on which explains the numbers better."""
    before = torch.cat([step.weights.flatten() for step in inputs.steps]) / inputs.scale
    change = inputs.changed()
    fits = [fit for weights in (before, before + change) if (fit := fitted(change, -weights, numbers)) is not None]
    return min(fits, key=lambda fit: float((fit[1] - numbers).abs().max()), default=None)


OPTIMIZER_STEP = Equation(
    name="optimizer_step",
    rank=70,
    quantity="the optimizer's steps",
    equation="θ' - θ of the optimizer's update rule, its state and its settings",
    source="1412.6980, algorithm 1 (Adam); 1711.05101 (AdamW); Sutskever et al. 2013 (momentum); Hinton 2012, lecture 6 (RMSprop)",
    inputs="the weights before and after a step, the gradient and the optimizer",
    check="check_optimizer_step",
    shown_by="test_optimizer_step",
    tolerance=10.0,  # errors of healthy runs: 1e-5 to 3.1e-4, most of it rounding of the weights to fp32
    compute=StepInputs.changed,
    advice="Look for code outside the step that changes weights, the learning rate or the optimizer's state",
    hypotheses=(
        mistake("no_gradients", "zero, because none of its parameters has a gradient")
        .predicts("θ' = θ without g", lambda _: None)  # the rule itself: `compare_step` recognises it by the gradients
        .advises("Call backward() of the loss of these parameters after zero_grad() and before the step"),
        mistake("no_step", "zero")
        .predicts("θ' = θ", lambda inputs: None if inputs.stands_still else torch.zeros_like(inputs.changed()))
        .advises("The optimizer has parameters of another policy, or the weights are restored after the step"),
        mistake("left_out", "the steps of an optimizer without some of the parameters")
        .predicts("θ' = θ for some parameters with a gradient", _left_out)
        .advises("Pass all parameters of the policy to the optimizer, after the last layer is created")
        .cites("program: loop-missing_parameter"),
        mistake("twice", "two steps with one gradient").predicts("θ' = step(step(θ))", _twice).advises("optimizer.step() is called twice"),
        mistake("state_lost", "the steps of an optimizer whose state was reset in the middle of training")
        .predicts("t less than the number of steps", lambda inputs: inputs.changed(lost=0) if inputs.lost else None)
        .advises("Create the optimizer once, not in every update", source="program: subclass-state_lost"),
        mistake("state_cleared", "the steps of an optimizer whose state was cleared just before the step")
        .predicts("m = v = 0, t = 0", _cleared)
        .advises("Create the optimizer once, not in every step", source="program: loop-state_lost"),
        mistake("ascent", "the opposite of the optimizer's steps")
        .predicts("θ' = θ + lr step", lambda inputs: -inputs.changed())
        .advises("The learning rate is negative, or the step is added with the wrong sign"),
        mistake("negated_gradient", "the steps with the opposite gradient")
        .predicts("g = ∇(-L)", lambda inputs: inputs.changed(lambda settings: settings._replace(maximize=not settings.maximize)))
        .advises("The optimizer maximises: compare its maximize flag with the sign of the loss"),
        mistake("gradient_descent", "the steps of plain gradient descent")
        .predicts("θ' = θ - lr g", _if(lambda settings: settings.kind != "sgd" or settings.momentum != 0, _plain))
        .advises("The optimizer differs from the settings", source="program: loop-other_optimizer"),
        mistake("no_bias_correction", "the steps of Adam without bias correction")
        .predicts(
            "θ' = θ - lr m / (√v + ε)",
            _if(lambda settings: settings.kind == "adam", lambda settings: settings._replace(corrects_bias=False)),
        )
        .advises("Divide m by 1 - β₁ᵗ and v by 1 - β₂ᵗ", source="1412.6980, section 3"),
        mistake("decay_coupling", "the steps with weight decay through the gradient instead of the weights, or the reverse")
        .predicts(
            "g + λ θ instead of (1 - lr λ) θ, or the reverse",
            _if(lambda settings: settings.weight_decay != 0, lambda settings: settings._replace(decoupled=not settings.decoupled)),
        )
        .advises("AdamW decays the weights, Adam adds the decay to the gradient", source="1711.05101"),
        mistake("no_decay", "the steps without the configured weight decay")
        .predicts("λ = 0", _if(lambda settings: settings.weight_decay != 0, lambda settings: settings._replace(weight_decay=0.0)))
        .advises("The optimizer ignores its weight_decay"),
        variant("epsilon_inside", "the steps of RMSprop with ε under the root")
        .predicts(
            "θ' = θ - lr g / √(v + ε)",
            _if(
                lambda settings: settings.kind == "rmsprop" and not settings.epsilon_inside,
                lambda settings: settings._replace(epsilon_inside=True),
            ),
        )
        .cites("stable-baselines3, RMSpropTFLike"),
        mistake("learning_rate", "the steps with a different learning rate than configured,")
        .fits("θ' = θ - c step", "lr", _fit_rate)
        .advises("Set the scheduled rate in every parameter group of the optimizer before each update")
        .cites("program: subclass-lr_other"),
        mistake("weight_decay", "the optimizer's steps plus a decay of the weights by the fraction")
        .fits("θ' = step(θ) - c θ", "c", _fit_decay)
        .advises("Something else shrinks the weights after the step", source="program: loop-decay"),
    ),
)


def settings_of(optimizer: Optimizer, group: Mapping[str, Any]) -> StepSettings | None:
    """Return the settings of a parameter group; None if the optimizer's rule is not implemented here."""
    common: dict[str, Any] = {
        "lr": float(group["lr"]),
        "weight_decay": float(group.get("weight_decay", 0.0)),
        "maximize": bool(group.get("maximize", False)),
        "eps": float(group.get("eps", 1e-8)),
        "momentum": float(group.get("momentum", 0.0)),
        "centered": bool(group.get("centered", False)),
        "alpha": float(group.get("alpha", 0.99)),
    }
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        beta1, beta2 = map(float, group["betas"])
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        return StepSettings("adam", **common, beta1=beta1, beta2=beta2, amsgrad=bool(group["amsgrad"]), decoupled=bool(decoupled))
    if isinstance(optimizer, torch.optim.SGD):
        dampening, nesterov = float(group["dampening"]), bool(group["nesterov"])
        return StepSettings("sgd", **common, dampening=dampening, nesterov=nesterov)
    if isinstance(optimizer, torch.optim.RMSprop):
        return StepSettings("rmsprop", **common)
    if type(optimizer).__name__ == "RMSpropTFLike":
        return StepSettings("rmsprop", **common, epsilon_inside=True)
    return None


def state_before(state: Mapping[str, Any]) -> tuple[State, int]:
    """Return float64 copies of the tensors of a parameter's state, and the number of steps that the state has counted."""
    tensors = {name: value.detach().double().clone() for name, value in state.items() if isinstance(value, Tensor) and name != "step"}
    return tensors, int(state.get("step", 0))


@no_grad
def compare_step(
    steps: Sequence[ParameterStep],
    after: Sequence[Tensor],
    settings: StepSettings,
    *,
    epsilon: float,
    learning_rate: float | None = None,
    lost: int = 0,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of the weights after a step with the equation of the step.

    Args:
        steps: of the K parameters.
        after: K tensors, after the step.
        settings: of parameters that the optimizer does not have.
        epsilon: of the weights' type.
        learning_rate: from the trainer's settings; the optimizer's own rate if it is None or groups have different rates.
        lost: number of steps that the optimizer has taken but its state has not counted.
        precision: of the trainer's arithmetic.
        tolerance: largest relative error; by precision if it is None.
    """
    if all(step.gradient is None for step in steps):
        return explained(OPTIMIZER_STEP, "no_gradients")
    own = [step.settings for step in steps if step.settings is not None]
    if learning_rate is not None and len({one.lr for one in own}) <= 1:
        settings = settings._replace(lr=learning_rate)
        steps = [step if step.settings is None else replace(step, settings=step.settings._replace(lr=learning_rate)) for step in steps]
    numels = [step.weights.numel() for step in steps]
    claimed = torch.cat([(new.double() - step.weights).flatten() for new, step in zip(after, steps, strict=True)])
    weights = torch.cat([step.weights.flatten() for step in steps])
    stands_still = bool(own) and all(one.lr == 0 for one in own)
    inputs = StepInputs(tuple(steps), settings, lost=lost, stands_still=stands_still)
    expected = inputs.changed()
    bound = OPTIMIZER_STEP.tolerance_at(precision) if tolerance is None else tolerance
    sizes, steps_taken, steps_expected = (largest_entries(vector, numels) for vector in (weights, claimed, expected))
    scale = spread(torch.maximum(steps_taken, steps_expected) + ROUNDINGS * epsilon / bound * sizes, numels)
    scale = torch.where(scale > 0, scale, 1.0)
    inputs = replace(inputs, scale=scale)
    unit = torch.ones(1)  # else a step that is small next to rounding would be compared with itself
    return distinguished(compare(OPTIMIZER_STEP, inputs, claimed / scale, magnitudes=[unit], precision=precision, tolerance=bound))


@checked_arguments(tolerance=0)
@no_grad
def check_optimizer_step(
    before: Weights,
    after: Weights,
    gradients: Mapping[str, Tensor | None] | Sequence[Tensor | None],
    optimizer: Optimizer,
    *,
    state: Mapping[str, Any] | None = None,
    learning_rate: float | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of the weights after a step with the equation of Adam, AdamW, SGD or RMSprop.

    Tensors of the K parameters are a mapping by name or a sequence, always in the same order. If `after` holds the parameters themselves,
    parameters that the optimizer lacks are recognised. Copies must cover all of the optimizer's parameters, in its order.

    Args:
        before, after: weights before and after the step.
        gradients: that the step reads, after any clipping; None for a parameter without a gradient.
        optimizer: its settings, and its state before the step unless `state` is given.
        state: a deep copy of `optimizer.state_dict()` from before the step; needed after the first step, because a step changes it.
        learning_rate: of the settings; None for the optimizer's own.
        precision: of the trainer's arithmetic.
        tolerance: largest relative error; by precision if it is None.

    Raises:
        ValueError: if numbers or shapes of tensors differ.
    """
    old, new = (as_floats(x.values() if isinstance(x, Mapping) else x) for x in (before, after))
    listed = gradients.values() if isinstance(gradients, Mapping) else gradients
    read = [None if gradient is None else as_floats([gradient])[0] for gradient in listed]
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"check_optimizer_step needs a torch optimizer, got {shown(optimizer)}")
    if not len(old) == len(new) == len(read) > 0:
        counts = f"{len(old)}, {len(new)} and {len(read)}"
        raise ValueError(f"before, after and gradients must have the same number of tensors, got {counts}")
    for place, row in enumerate(zip(old, new, read, strict=True)):
        shapes = [list((row[0] if x is None else x).shape) for x in row]
        if shapes != shapes[:1] * 3:
            raise ValueError("shapes must agree, got before {}, after {} and gradient {} at {}".format(*shapes, place))
    members = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    saved: Mapping[Any, Any] = optimizer.state
    if state is not None:
        by_number = state["state"]
        saved = {parameter: by_number.get(number, {}) for number, (parameter, _) in enumerate(members)}
    groups = {id(parameter): (parameter, group) for parameter, group in members}
    if not any(id(one) in groups for one in new):
        if len(members) != len(new):
            raise ValueError(
                f"copies must cover all {len(members)} parameters of the optimizer, got {len(new)}: pass the parameters themselves as after"
            )
        groups = {id(one): member for one, member in zip(new, members, strict=True)}
    default = settings_of(optimizer, optimizer.param_groups[0])
    if default is None:
        return unchecked(OPTIMIZER_STEP, f"the update rule of {type(optimizer).__name__} is not known")
    steps = []
    for one, other, gradient in zip(old, new, read, strict=True):
        member = groups.get(id(other))
        held = ({}, 0) if member is None else state_before(saved.get(member[0], {}))
        own = None if member is None else settings_of(optimizer, member[1])
        steps.append(ParameterStep(one.double(), None if gradient is None else gradient.double(), own, *held))
    epsilon = max(torch.finfo(one.dtype).eps for one in new)
    options: dict[str, Any] = {"learning_rate": learning_rate, "precision": precision, "tolerance": tolerance}
    return compare_step(steps, new, default, epsilon=epsilon, **options)
