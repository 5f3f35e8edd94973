"""Copies one optimizer step of each sampled update, so that its gradient, clipping and weight change can be recomputed.

The gradient of the whole loss takes a forward and a backward pass with a copy of the policy, in the worker if there is one, else here.
Only if the gradient differs from the trainer's, each term and each alternative to it takes a separate backward pass. Everything else is
arithmetic on copies of vectors as long as the gradient.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper_telemetry.core.minibatch_objective import MinibatchForward, MinibatchObjective
from esper_telemetry.core.record import Level
from esper_telemetry.equations.gradient import OTHER_LOSSES
from esper_telemetry.equations.optimizer_step import settings_of
from esper_telemetry.events import AfterUpdate, BackwardEnd, OptimizerStep
from esper_telemetry.recording.probes import TimedListener
from esper_telemetry.session import TelemetrySession
from esper_telemetry.updates.steps import (
    CheckedStep,
    LossTermGradients,
    MinibatchLoss,
    PolicyPass,
    gradient_check,
    policy_pass,
    step_checks,
)

MAX_CHECKED_ENTRIES = 1 << 23
"""Entries of the gradients of networks whose steps are checked: some twenty vectors of them in float64 are 1.3 GB."""

MAX_TRAVELLING_ENTRIES = 1 << 21
"""Entries of the gradients of networks whose steps are checked in the worker: seven vectors and a minibatch, some 60 MB, wait for it."""

EXPENSIVE_PASS_SECONDS = 0.02
"""Processor time of a minibatch pass above which gradients are checked less often than steps, for example with a recurrent policy."""

EXPENSIVE_PASS_PERIOD = 8
"""Number of samples from one with such a pass to the next, except at DEBUG. It keeps the other samples frequent."""


class StepProbe:
    """Checks the second-to-last step of each sampled update, when ratios are clipped and parameters already have a gradient.

    If an update stops early, the next update's check uses the index of the last step taken.

    Attributes:
        precision: of the trainer's arithmetic; None if it is not known.
    """

    def __init__(self, telemetry: TelemetrySession, listener: TimedListener) -> None:
        self._telemetry, self._listener = telemetry, listener
        self.precision: str | None = None
        self._last_seen, self._checking = 0, False
        self._last_possible: int | None = None
        self._objective_event: MinibatchObjective | None = None
        self._step: CheckedStep | None = None
        self._loss: MinibatchLoss | None = None
        self._taken = False
        self._finished: CheckedStep | None = None
        self._uncounted: dict[int, int] = {}  # of each optimizer, by its first parameter
        self._samples_without_pass = 0
        self._travels = self._copies_locally = True

    def begin(self) -> None:
        """Check a step of the update that begins now."""
        self.stop()
        self._last_seen, self._checking = 0, True
        self._listener.on(MinibatchObjective, self._objective)
        self._listener.once(AfterUpdate, lambda event: self.finish())

    def finish(self) -> None:
        """End the update: check its last step. If the update stopped before the step to be checked, remember its number of steps."""
        if self._checking:
            self._last_possible = None if self._taken else max(0, self._last_seen - 1)
            self._end()

    def take(self) -> CheckedStep | None:
        """Return the step that the worker is to check; None if it is checked already, or no step was taken."""
        step, self._finished = self._finished, None
        return step

    def stop(self) -> None:
        """Check nothing any more."""
        self._listener.stop()
        self._objective_event = self._step = self._loss = None
        self._checking = self._taken = False

    def forget(self) -> None:
        """Forget how many steps the optimizer had counted: its state is set on purpose."""
        self._uncounted.clear()

    def _objective(self, event: MinibatchObjective) -> None:
        """Begin the check at the chosen step; the next minibatch ends it. Further passes of the step add their terms, or replace the
        terms of passes whose gradients were cleared.
        """
        if self._step is not None:
            terms = None if self._taken or event.terms is None else event.terms()
            if terms is None or not isinstance(self._step.loss, LossTermGradients):
                self._last_possible = None
                self._end()
                return
            if event.passes:
                terms = _added_terms((self._step.loss.terms, self._step.coefficients), terms, cleared=event.cleared)
            self._step = self._step._replace(loss=LossTermGradients(terms[0]), coefficients=terms[1])
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
        previous = None if all(p.grad is None for p in parameters) else _gradient_of(parameters)
        self._objective_event, self._step = event, begun_step(event, parameters)._replace(previous=previous)
        self._telemetry.attempt(partial(self._prepare_loss, parameters=parameters), event)
        if self._loss is not None or self._step.loss is not None:
            self._listener.once(BackwardEnd, self._backward)
        self._listener.once(OptimizerStep, self._optimizer_step)

    def _prepare_loss(self, event: MinibatchObjective, parameters: Sequence[Tensor]) -> None:
        """Keep the inputs of the recomputed gradient, or recompute it now. Do nothing if the source cannot do it, or if it is not due."""
        assert self._step is not None
        if event.forward is None:
            terms = None if event.terms is None else event.terms()
            if terms is not None:
                self._step = self._step._replace(loss=LossTermGradients(terms[0]), coefficients=terms[1])
            return
        if self._samples_without_pass or not self._copies_locally:
            self._samples_without_pass -= self._samples_without_pass > 0
            return
        forward = event.forward()
        travelling = self._policy_pass(forward, parameters, event.optimizer)
        if travelling is not None:
            self._step = self._step._replace(loss=travelling)
            return
        began = time.thread_time()
        try:
            own = policy_pass(forward, parameters, event.optimizer, local=True)
        except TypeError:
            self._copies_locally = False
            raise
        assert own is not None
        self._loss = own.loss(self._step)
        expensive = time.thread_time() - began > EXPENSIVE_PASS_SECONDS
        if expensive and self._telemetry.update_level < Level.DEBUG:
            self._samples_without_pass = EXPENSIVE_PASS_PERIOD - 1

    def _policy_pass(self, forward: MinibatchForward, parameters: Sequence[Tensor], optimizer: Optimizer) -> PolicyPass | None:
        """Return the pass for the worker; None without a pass, or if the policy is too large or cannot be copied."""
        few = sum(parameter.numel() for parameter in parameters) <= MAX_TRAVELLING_ENTRIES
        if not (self._telemetry.has_worker and few and self._travels):
            return None
        travelling = policy_pass(forward, parameters, optimizer)
        self._travels = travelling is not None
        return travelling

    def _backward(self, event: BackwardEnd) -> None:
        """Keep the gradient, and check it if this takes a pass through the policy."""
        step, objective = self._step, self._objective_event
        if step is None or objective is None:
            return
        gradient = _gradient_of(objective.parameters.values())
        if step.previous is None or not torch.equal(gradient, step.previous):  # else the backward pass is still to come
            self._step = step = step._replace(gradient=gradient, value_gradient=objective.value_gradient())
            if self._loss is not None:
                self._telemetry.measure([partial(gradient_check, step, self._loss, gradient, self.precision)])

    def _optimizer_step(self, event: OptimizerStep) -> None:
        """Keep the gradient that the optimizer reads. The weights are read when the next step begins, to see changes after this one."""
        step, objective = self._step, self._objective_event
        if step is None or objective is None:
            return
        if event.optimizer is not objective.optimizer:  # another network's step comes first
            self._listener.once(OptimizerStep, self._optimizer_step)
            return
        parameters = list(objective.parameters.values())
        missing = tuple([parameter.grad is None for parameter in parameters])
        self._taken, self._step = True, step._replace(applied=_gradient_of(parameters), missing=missing)
        if step.by_name:
            self._step = self._step._replace(learning_rate=_only_rate(event.optimizer))

    def _end(self) -> None:
        """Read the weights after the step, and check it or leave it to the worker."""
        step, objective, taken = self._step, self._objective_event, self._taken
        self.stop()
        if step is None or objective is None or not taken:
            return
        rate, own = step.learning_rate, {one.lr for one in step.settings if one is not None}
        # A rate that was set or reset after the backward pass is not the rate in the trainer's settings.
        if step.by_name and _only_rate(objective.optimizer) == (own.pop() if len(own) == 1 else None):
            rate = objective.learning_rate
        weights = _flat([parameter.detach() for parameter in objective.parameters.values()])
        default = settings_of(objective.optimizer, objective.optimizer.param_groups[0])
        step = step._replace(after=weights, default=default, learning_rate=rate, lost=self._lost(step, objective))
        few = len(weights) <= MAX_TRAVELLING_ENTRIES
        if self._telemetry.has_worker and few:
            self._finished = step
        else:
            self._telemetry.measure(step_checks(step, self.precision))

    def _lost(self, step: CheckedStep, objective: MinibatchObjective) -> int:
        """Steps that the optimizer has taken and its state has not counted."""
        if step.default is None or step.default.kind != "adam" or objective.gradient_step is None:
            return 0
        of_optimizer = zip(step.counts, step.settings, strict=True)
        counted = max([count for count, settings in of_optimizer if settings is not None], default=0)
        uncounted, own = objective.gradient_step - counted, id(next(iter(objective.parameters.values())))
        self._uncounted[own] = min(uncounted, self._uncounted.get(own, uncounted))
        return uncounted - self._uncounted[own]


@torch.no_grad()
def begun_step(event: MinibatchObjective, parameters: Sequence[Tensor]) -> CheckedStep:
    """Return copies of the parameters and of the optimizer's state, before the step and without gradients."""
    optimizer = event.optimizer
    settings = [settings_of(optimizer, group) for group in optimizer.param_groups]
    of_group = {id(p): one for one, group in zip(settings, optimizer.param_groups, strict=True) for p in group["params"]}
    states: list[Mapping[str, Any]] = [optimizer.state.get(parameter, {}) if id(parameter) in of_group else {} for parameter in parameters]
    entries = [
        {name: value for name, value in state.items() if isinstance(value, Tensor) and name != "step"}
        for state in (states if settings[0] is not None else [{} for _ in states])
    ]
    weights = _flat(parameters)
    return CheckedStep(
        shapes=tuple([tuple(parameter.shape) for parameter in parameters]),
        dtypes=tuple([parameter.dtype for parameter in parameters]),
        weights=weights,
        after=weights,
        previous=None,
        gradient=None,
        applied=weights,
        missing=(),
        settings=tuple([of_group.get(id(parameter)) for parameter in parameters]),
        default=settings[0],
        rule=type(optimizer).__name__,
        state_names=tuple([tuple(state) for state in entries]),
        state=_flat([value for state in entries for value in state.values()]),
        counts=tuple([int(state.get("step", 0)) for state in states]),
        lost=0,
        learning_rate=event.learning_rate,
        coefficients=event.coefficients,
        max_norm=event.max_norm,
        by_name=event.by_name,
    )


Terms = tuple[Mapping[str, Tensor], Mapping[str, float]]
"""Gradients [d] of the terms of a loss and of alternatives, and the weights of the terms."""


def _added_terms(first: Terms, second: Terms, *, cleared: bool) -> Terms:
    """Return the terms of two passes together, with the sums of their weights. An alternative that a pass lacks is its term there.

    If the gradients of the first pass were cleared, the gradient of the second one is the alternative `last_pass`.
    """
    weights = {name: first[1].get(name, 0.0) + second[1].get(name, 0.0) for name in (*first[1], *second[1])}
    sums: dict[str, Tensor] = {}
    for gradients, own in (first, second):
        for name in dict.fromkeys((*first[0], *second[0])):
            term = OTHER_LOSSES[name].term if name in OTHER_LOSSES else name
            gradient = gradients.get(name, gradients.get(term))
            if gradient is not None:
                sums[name] = own.get(term, 1.0) * gradient + sums.get(name, 0.0)
    known = {name: one / (weights.get(OTHER_LOSSES[name].term if name in OTHER_LOSSES else name) or 1.0) for name, one in sums.items()}
    last = torch.stack([weight * second[0][name] for name, weight in second[1].items() if name in second[0]]).sum(0)
    return {**known, **({"last_pass": last} if cleared else {})}, weights


def _only_rate(optimizer: Optimizer) -> float | None:
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    return rates.pop() if len(rates) == 1 else None


@torch.no_grad()
def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors one after the other, a copy."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def _gradient_of(parameters: Iterable[Tensor]) -> Tensor:
    """Return a copy of the gradients [d] of all parameters; a missing gradient is 0."""
    return _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
