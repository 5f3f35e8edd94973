"""One step of the optimizer in a sampled update, and the checks of its gradient, its clip and the change of the weights.

The training thread makes one copy of each tensor (`CheckedStep`); the checks run where the update is measured. A gradient is recomputed
there with a copy of the policy (`PolicyPass`), in a process that does not share the interpreter's lock: a pass of Stable-Baselines3's
RecurrentPPO takes 35 ms, and to pickle what it needs 1 ms.
Shapes: d entries of K parameters, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_telemetry.core.containment import Measurement
from esper_telemetry.core.minibatch_objective import LossRows, MinibatchForward
from esper_telemetry.equations.clipping import compare_clipping
from esper_telemetry.equations.comparison import EquationCheck, explained, unchecked
from esper_telemetry.equations.equation import Explanation
from esper_telemetry.equations.gradient import GRADIENT, GradientInputs, GradientsByName, LossGradients, compare_gradient, same_gradient
from esper_telemetry.equations.optimizer_step import OPTIMIZER_STEP, ParameterStep, StepSettings, compare_step
from esper_telemetry.updates.pickles import ContentUnpickler, PolicyPickle, TensorPickler, left_out

RowsPass: TypeAlias = Callable[[], AbstractContextManager[LossRows]]


class MinibatchLoss(NamedTuple):
    """Gradients of a minibatch's loss, with the random numbers of the trainer's own pass.

    Attributes:
        gradients: of its terms and of alternatives to them.
        total: [d], of the whole loss, float64.
        rows: of the minibatch; None if they are not known.
        of_errors: see `LossGradients.of_errors`.
        detached: returns for each of the K parameters True if an output depends on it that is detached from it.
    """

    gradients: GradientsByName
    total: Tensor
    rows: int | None
    detached: Callable[[], Sequence[bool]] = tuple
    of_errors: Callable[[Tensor], Tensor | None] = lambda _: None

    @classmethod
    def of(cls, gradients: LossGradients, coefficients: Mapping[str, float]) -> MinibatchLoss:
        """Return the loss with these weights of its terms."""
        return cls(gradients, *gradients.total(coefficients), gradients.detached, gradients.of_errors)


class LossTermGradients(NamedTuple):
    """Gradients [d] of the terms of a loss and of alternatives, float64, from a source that does not replay the policy."""

    terms: Mapping[str, Tensor]

    def loss(self, step: CheckedStep) -> MinibatchLoss:
        """Return the gradients of the loss."""
        weights = {name: weight for name, weight in step.coefficients.items() if name in self.terms}
        total = torch.stack([weight * self.terms[name] for name, weight in weights.items()]).sum(0)
        return MinibatchLoss(lambda name: self.terms.get(name), total, None)


class PolicyPass(NamedTuple):
    """A pass of a minibatch through a copy of the policy.

    Attributes:
        pickle: of the policy, without its optimizer, and of the pass; without the trained parameters.
        generator: state of the random numbers before the trainer's own pass; None for their state when the pass is loaded.
    """

    pickle: PolicyPickle
    generator: Tensor | None

    def loss(self, step: CheckedStep) -> MinibatchLoss:
        """Take the pass; return the gradients of the loss."""
        # Views into one vector are not aligned, and kernels round differently on them.
        parameters = [nn.Parameter(weights.clone()) for weights in step.parts(step.weights)]
        content = ContentUnpickler(self.pickle.content, [*parameters, *self.pickle.tensors], self.pickle.references)
        policy, rows = content.load(), content.load()
        gradients = LossGradients(with_generators(partial(rows, policy), parameters, self.generator), parameters)
        return MinibatchLoss.of(gradients, step.coefficients)


def policy_pass(forward: MinibatchForward, parameters: Sequence[Tensor], optimizer: Optimizer, *, local: bool = False) -> PolicyPass | None:
    """Return the pass with copies of the tensors that training changes; None if another process cannot load it.

    That is a policy of a class that only the script has, one with attributes that cannot be pickled, or one on a device.

    Args:
        forward: the pass.
        parameters: that are trained.
        optimizer: of the policy, left out.
        local: this process loads it, before the trainer takes its own pass.

    Raises:
        TypeError: if it is local and the policy cannot be copied.
    """
    pickler = TensorPickler({type(optimizer): left_out}, parameters, local=local)
    if not pickler.dump(forward.policy):
        return None
    count = len(pickler.tensors)
    whole = local or pickler.reached >= set(range(len(parameters)))
    if not (whole and pickler.dump(forward.rows) and pickler.is_portable):
        return None
    changing, fixed = pickler.tensors[len(parameters) : count], pickler.tensors[count:]
    kept = (*(tensor.detach().clone() for tensor in changing), *(tensor.detach() for tensor in fixed))
    content = PolicyPickle(pickler.content, kept, tuple(pickler.references))
    return PolicyPass(content, None if local else torch.get_rng_state())


class CheckedStep(NamedTuple):
    """A step that is checked. Vectors are [d], copies in the parameters' type.

    Attributes:
        shapes, dtypes: of the K parameters.
        weights, after: before and after the step.
        previous: gradient in `.grad` before the backward pass; None if it was empty.
        gradient: after the backward pass; None if its loss is not known.
        applied: that the optimizer read.
        missing: parameters without a gradient at the optimizer's step.
        settings: of each parameter's step; None if the optimizer does not have it.
        default: after the step, of parameters that the optimizer does not have; None if its update rule is not known.
        rule: class of the optimizer.
        state_names: of each parameter's state before the step.
        state: its tensors, one after the other.
        counts: steps that each state has counted.
        lost: steps that the optimizer has taken and its state has not counted.
        learning_rate: by the trainer's settings; None for the optimizer's own rate.
        coefficients: weights of the terms of the loss.
        max_norm: limit of the gradient's global norm by the trainer's settings; None if nothing is clipped.
        by_name: as of `MinibatchObjective`.
        loss: inputs of the recomputed gradient; None if the gradient is not recomputed, or is already.
        value_gradient: of the trainer's loss at the values, [N]; None if it is not known.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    weights: Tensor
    after: Tensor
    previous: Tensor | None
    gradient: Tensor | None
    applied: Tensor
    missing: tuple[bool, ...]
    settings: tuple[StepSettings | None, ...]
    default: StepSettings | None
    rule: str
    state_names: tuple[tuple[str, ...], ...]
    state: Tensor
    counts: tuple[int, ...]
    lost: int
    learning_rate: float | None
    coefficients: Mapping[str, float]
    max_norm: float | None
    by_name: bool
    loss: PolicyPass | LossTermGradients | None = None
    value_gradient: Tensor | None = None

    @property
    def numels(self) -> tuple[int, ...]:
        """Entries of each parameter."""
        return tuple(map(math.prod, self.shapes))

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Return a tensor of each parameter's shape and type."""
        parts = zip(vector.split(list(self.numels)), self.shapes, self.dtypes, strict=True)
        return [part.view(shape).to(dtype) for part, shape, dtype in parts]

    def parameter_steps(self) -> Iterator[ParameterStep]:
        """Yield what each parameter's step is computed from."""
        counts = [numel for numel, names in zip(self.numels, self.state_names, strict=True) for _ in names]
        entries = iter(self.state.double().split(counts) if counts else ())
        weights, applied = self.weights.double().split(self.numels), self.applied.double().split(self.numels)
        for place, shape in enumerate(self.shapes):
            yield ParameterStep(
                weights[place].view(shape),
                None if self.missing[place] else applied[place].view(shape),
                self.settings[place],
                {name: next(entries).view(shape) for name in self.state_names[place]},
                self.counts[place],
            )


def step_checks(step: CheckedStep, precision: str | None) -> Iterator[Measurement]:
    """Yield the checks of a step; `precision` is the trainer's arithmetic precision."""
    if step.loss is not None and step.gradient is not None:
        loss, gradient = step.loss, step.gradient
        yield lambda: gradient_check(step, loss.loss(step), gradient, precision)
    if step.gradient is not None:
        yield partial(_clipping_check, step, step.gradient, precision)
    yield partial(_step_check, step, precision)


def gradient_check(step: CheckedStep, loss: MinibatchLoss, gradient: Tensor, precision: str | None) -> EquationCheck:
    """Return the comparison of the gradient after the backward pass with the loss's gradient."""
    claimed, bound = gradient.double(), GRADIENT.tolerance_at(precision)
    if not torch.isfinite(claimed).all():
        return unchecked(GRADIENT, "some of the numbers are NaN or infinite")
    error = same_gradient(claimed, loss.total, step.numels)
    if error <= bound:
        # a detached part is missing from the trainer's gradient and from the recomputed one
        silent = any(not part.any() for part in gradient.split(list(step.numels)) if len(part))
        detached = silent and not step.by_name and any(loss.detached())
        return replace(explained(GRADIENT, "parts_missing") if detached else EquationCheck(GRADIENT, error, bound), tolerance=bound)
    terms = {name: term for name in step.coefficients if (term := loss.gradients(name)) is not None}
    inputs = GradientInputs(
        claimed,
        terms,
        step.coefficients,
        step.numels,
        previous=None if step.previous is None else step.previous.double(),
        weights=step.weights.double(),
        rows=loss.rows,
        max_norm=step.max_norm,
        alternatives=loss.gradients,
    )
    check = compare_gradient(inputs, precision=precision)
    if not check.explained and step.value_gradient is not None:
        check = _with_other_errors(check, step, loss, claimed)
    return _certain(check) if step.by_name else check


def _with_other_errors(check: EquationCheck, step: CheckedStep, loss: MinibatchLoss, claimed: Tensor) -> EquationCheck:
    """Return the check. If only the value loss is another function of the errors, it is explained by that."""
    value, reference = ((None if step.value_gradient is None else loss.of_errors(step.value_gradient)), loss.gradients("value"))
    if value is None or reference is None:
        return check
    error = same_gradient(claimed, loss.total - step.coefficients.get("value", 0.0) * reference + value, step.numels)
    if error > check.tolerance:
        return check
    return replace(check, explanations=(Explanation(GRADIENT["other_errors"], error),))


def _clipping_check(step: CheckedStep, gradient: Tensor, precision: str | None) -> EquationCheck:
    check = compare_clipping(gradient.double(), step.applied.double(), step.numels, step.max_norm, precision=precision)
    if step.by_name and step.max_norm is None and bool(step.applied.any()):
        check = replace(check, explanations=())  # a script may clip with its own function, which leaves a gradient
    return _certain(check) if step.by_name else check


def _step_check(step: CheckedStep, precision: str | None) -> EquationCheck:
    if step.default is None:
        return unchecked(OPTIMIZER_STEP, f"the update rule of {step.rule} is not known")
    return compare_step(
        list(step.parameter_steps()),
        step.parts(step.after),
        step.default,
        epsilon=max(torch.finfo(dtype).eps for dtype in step.dtypes),
        learning_rate=step.learning_rate,
        lost=step.lost,
        precision=precision,
    )


def _certain(check: EquationCheck) -> EquationCheck:
    """Return the check of columns that were found by name, in which an unexplained difference is inconclusive."""
    return check if check.explained else unchecked(check.equation, "the variables that were found do not fit it")


def with_generators(rows: RowsPass, parameters: Sequence[Tensor], host: Tensor | None = None) -> RowsPass:
    """Return `rows` with the current random state, which the trainer's next pass uses; `host` replaces the CPU's state if given."""
    devices = {parameter.device for parameter in parameters if parameter.is_cuda}
    state = torch.get_rng_state() if host is None else host
    others = {device: torch.cuda.get_rng_state(device) for device in devices}

    @contextmanager
    def repeated() -> Iterator[LossRows]:
        with torch.random.fork_rng(devices=[device.index or 0 for device in devices]):
            torch.set_rng_state(state)
            for device, saved in others.items():
                torch.cuda.set_rng_state(saved, device)
            with rows() as result:
                yield result

    return repeated
