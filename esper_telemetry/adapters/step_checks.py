"""Sampled updates: one step of the optimizer, recomputed: its gradient, the clip, and the change of the weights.

The gradient of the whole loss takes a forward and a backward pass. Only where it differs from the trainer's, each term and each alternative
to it takes a backward pass of its own. Everything else is arithmetic on copies of vectors as long as the gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper_telemetry.adapters.sampled import TimedListener
from esper_telemetry.core.equations.objective import LossRows, MinibatchObjective
from esper_telemetry.core.record import Level
from esper_telemetry.events import AfterUpdate, BackwardEnd, OptimizerStep
from esper_telemetry.metrics.integrity.equations import EquationCheck, unchecked
from esper_telemetry.metrics.integrity.steps.gradient_equation import GRADIENT
from esper_telemetry.metrics.integrity.steps.gradients import compare_clipping, compare_gradient, same_gradient
from esper_telemetry.metrics.integrity.steps.loss_gradients import GradientsByName, LossGradients, flat64
from esper_telemetry.metrics.integrity.steps.optimizer_step import (
    OPTIMIZER_STEP,
    ParameterStep,
    compare_step,
    settings_of,
    state_before,
)
from esper_telemetry.session import TelemetrySession

RowsPass: TypeAlias = Callable[[], AbstractContextManager[LossRows]]

MAX_CHECKED_ENTRIES = 1 << 23
"""Entries of the gradients of networks whose steps are checked: some twenty vectors of them in float64 are 1.3 GB."""


EXPENSIVE_PASS_SECONDS = 0.02
"""Processor time of a pass over a minibatch from which on gradients are checked less often than steps, as of a recurrent policy."""

EXPENSIVE_PASS_PERIOD = 8
"""Samples from one with such a pass to the next, except at DEBUG: samples of everything else would come as rarely as it costs."""


class MinibatchLoss(NamedTuple):
    """Gradients of a minibatch's loss, with the random numbers of the trainer's own pass.

    Attributes:
        gradients: of its terms and of alternatives to them.
        total: [d], of the whole loss.
        rows: of the minibatch; None where they are not known.
        coefficients: weights of the terms.
    """

    gradients: GradientsByName
    total: Tensor
    rows: int | None
    coefficients: Mapping[str, float]


@dataclass(slots=True)
class CheckedStep:
    """A step that is checked, as far as it got.

    Attributes:
        objective: of its minibatch.
        parameters: K tensors that it trains.
        loss: gradients of the minibatch's loss; None where the source cannot pass it through the policy.
        previous: [d], that stood in `.grad` before the backward pass; None where nothing did.
        before: the parameters and the optimizer's state before the step, without gradients.
        gradient: [d], after the backward pass; None before it.
        steps: the same with the gradients that the optimizer read, once it has taken its step.
        rate: learning rate of that step, of an objective that was found by name; None where there are several.
    """

    objective: MinibatchObjective
    parameters: list[Tensor]
    loss: MinibatchLoss | None
    previous: Tensor | None
    before: list[ParameterStep]
    gradient: Tensor | None = None
    steps: list[ParameterStep] = field(default_factory=list)
    rate: float | None = None

    @property
    def numels(self) -> tuple[int, ...]:
        """Entries of each parameter."""
        return tuple([parameter.numel() for parameter in self.parameters])


class StepProbe:
    """Checks the last step but one of each sampled update, where ratios are clipped and a gradient has been there before.

    Where an update stops early, the step that is checked in the next one is the last that this one has taken.

    Attributes:
        precision: of the trainer's arithmetic; None where it is not known.
    """

    def __init__(self, telemetry: TelemetrySession, listener: TimedListener) -> None:
        self._telemetry, self._listener = telemetry, listener
        self.precision: str | None = None
        self._last_seen, self._checking = 0, False
        self._last_possible: int | None = None
        self._open: CheckedStep | None = None
        self._uncounted: int | None = None
        self._samples_without_pass = 0

    def begin(self) -> None:
        """Check a step of the update that begins now."""
        self.stop()
        self._last_seen, self._checking = 0, True
        self._listener.on(MinibatchObjective, self._objective)
        self._listener.once(AfterUpdate, lambda event: self.finish())

    def finish(self) -> None:
        """The update is over: check its last step, or remember how many steps it had where it stopped before the one that was due."""
        if self._checking:
            reached = self._open is not None and bool(self._open.steps)
            self._last_possible = None if reached else max(0, self._last_seen - 1)
            self._end()

    def stop(self) -> None:
        """Check nothing any more."""
        self._listener.stop()
        self._open, self._checking = None, False

    def forget(self) -> None:
        """Forget how many steps the optimizer had counted: its state is set on purpose."""
        self._uncounted = None

    def _objective(self, event: MinibatchObjective) -> None:
        """Begin with the step whose turn it is; the minibatch after it ends the check."""
        if self._open is not None:
            self._last_possible = None
            self._end()
            return
        self._last_seen = event.step
        steps = event.steps or 2
        due = max(min(1, steps - 1), steps - 2)
        if event.step < (due if self._last_possible is None else min(due, self._last_possible)):
            return
        if sum(parameter.numel() for parameter in event.parameters.values()) > MAX_CHECKED_ENTRIES:
            self.stop()
            return
        parameters = list(event.parameters.values())
        loss = self._loss_of(event, parameters)
        if loss is not None:
            self._listener.once(BackwardEnd, self._backward)
        previous = None if all(p.grad is None for p in parameters) else _gradient_of(parameters)
        before = list(parameter_steps(parameters, event.optimizer))
        self._open = CheckedStep(event, parameters, loss, previous, before)
        self._listener.once(OptimizerStep, self._optimizer_step)

    def _loss_of(self, event: MinibatchObjective, parameters: Sequence[Tensor]) -> MinibatchLoss | None:
        """Return the gradients of the minibatch's loss; None where the source cannot give them, or an expensive pass is not due."""
        if event.rows is not None and self._samples_without_pass:
            self._samples_without_pass -= 1
            return None
        if event.rows is not None:
            began = time.thread_time()
            gradients = LossGradients(with_generators(event.rows, parameters), parameters)
            loss = MinibatchLoss(gradients, *gradients.total(event.coefficients), event.coefficients)
            expensive = time.thread_time() - began > EXPENSIVE_PASS_SECONDS
            if expensive and self._telemetry.update_level < Level.DEBUG:
                self._samples_without_pass = EXPENSIVE_PASS_PERIOD - 1
            return loss
        terms = None if event.terms is None else event.terms()
        if terms is None:
            return None
        own, weights = terms
        total = torch.stack([weights[name] * gradient for name, gradient in own.items()]).sum(0)
        return MinibatchLoss(lambda name: own.get(name), total, None, weights)

    def _backward(self, event: BackwardEnd) -> None:
        """Check the gradient."""
        step = self._open
        if step is None or step.loss is None:
            return
        claimed = _gradient_of(step.parameters)
        if step.previous is None or not torch.equal(claimed, step.previous):  # else the backward pass is still to come
            step.gradient = claimed
            self._telemetry.measure([partial(self._gradient_check, step, step.loss, claimed)])

    def _gradient_check(self, step: CheckedStep, loss: MinibatchLoss, claimed: Tensor) -> EquationCheck:
        if not torch.isfinite(claimed).all():
            return unchecked(GRADIENT, "some of the numbers are NaN or infinite")
        error, bound = same_gradient(claimed, loss.total, step.numels), GRADIENT.tolerance_at(self.precision)
        if error <= bound:
            return EquationCheck(GRADIENT, error, bound)
        terms = {name: gradient for name in loss.coefficients if (gradient := loss.gradients(name)) is not None}
        check = compare_gradient(
            claimed,
            terms,
            loss.coefficients,
            step.numels,
            previous=step.previous,
            weights=flat64(step.parameters),
            rows=loss.rows,
            max_norm=step.objective.max_norm,
            alternatives=loss.gradients,
            precision=self.precision,
        )
        return _certain(check) if step.objective.by_name else check

    def _optimizer_step(self, event: OptimizerStep) -> None:
        """Check the clip; the weights are read when the next step begins, so that changes after this one are seen."""
        step = self._open
        if step is None:
            return
        applied = _gradient_of(step.parameters)
        limit, by_name = step.objective.max_norm, step.objective.by_name
        if step.gradient is not None and not (by_name and limit is None):
            check = partial(compare_clipping, step.gradient, applied, step.numels, limit, precision=self.precision)
            self._telemetry.measure([(lambda: _certain(check())) if by_name else check])
        parts = zip(step.before, step.parameters, applied.split(list(step.numels)), strict=True)
        step.steps = [
            replace(before, gradient=None if parameter.grad is None else part.view_as(before.weights))
            for before, parameter, part in parts
        ]
        if by_name:
            step.rate = _only_rate(event.optimizer)

    def _end(self) -> None:
        """Check the weights after the step."""
        step = self._open
        self.stop()
        if step is not None and step.steps:
            self._telemetry.measure([partial(self._step_check, step)])

    def _step_check(self, step: CheckedStep) -> EquationCheck:
        objective, rate = step.objective, step.objective.learning_rate
        rates = {float(one.settings.lr) for one in step.steps if one.settings is not None}
        if objective.by_name and _only_rate(objective.optimizer) != (rates.pop() if len(rates) == 1 else None):
            # programs may set the rate after the backward pass; one that is back already was another one
            rate = step.rate
        default = settings_of(objective.optimizer, objective.optimizer.param_groups[0])
        if default is None:
            return unchecked(OPTIMIZER_STEP, f"the update rule of {type(objective.optimizer).__name__} is not known")
        counted = max([one.count for one in step.steps if one.settings is not None], default=0)
        lost = 0
        if default.kind == "adam" and objective.gradient_step is not None:
            uncounted = objective.gradient_step - counted
            self._uncounted = uncounted if self._uncounted is None else min(uncounted, self._uncounted)
            lost = uncounted - self._uncounted
        return compare_step(
            step.steps,
            [parameter.detach() for parameter in step.parameters],
            default,
            epsilon=max(torch.finfo(parameter.dtype).eps for parameter in step.parameters),
            learning_rate=rate,
            lost=lost,
            precision=self.precision,
        )


def _certain(check: EquationCheck) -> EquationCheck:
    """Return the check of columns that were found by name, in which a difference without an explanation says nothing."""
    known = check.matches or check.explanations
    return check if known else unchecked(check.equation, "the variables that were found do not fit it")


def _only_rate(optimizer: Optimizer) -> float | None:
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    return rates.pop() if len(rates) == 1 else None


@torch.no_grad()
def parameter_steps(parameters: Sequence[Tensor], optimizer: Optimizer) -> Iterator[ParameterStep]:
    """Yield copies of the parameters and of the optimizer's state, without gradients."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in parameters:
        group = groups.get(id(parameter))
        state, count = ({}, 0) if group is None else state_before(optimizer.state.get(parameter, {}))
        settings = None if group is None else settings_of(optimizer, group)
        yield ParameterStep(parameter.detach().double().clone(), None, settings, state, count)


def with_generators(rows: RowsPass, parameters: Sequence[Tensor]) -> RowsPass:
    """Return `rows` with the random numbers of now, which are those of the pass that the trainer takes next."""
    devices = {parameter.device for parameter in parameters if parameter.is_cuda}
    host, others = torch.get_rng_state(), {device: torch.cuda.get_rng_state(device) for device in devices}

    @contextmanager
    def repeated() -> Iterator[LossRows]:
        with torch.random.fork_rng(devices=[device.index or 0 for device in devices]):
            torch.set_rng_state(host)
            for device, state in others.items():
                torch.cuda.set_rng_state(state, device)
            with rows() as result:
                yield result

    return repeated


def _gradient_of(parameters: Sequence[Tensor]) -> Tensor:
    """Gradients [d] of all parameters, a copy in float64; 0 where there is none."""
    return flat64([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
