"""Probes of sampled updates: whole gradients, the optimizer's state, and passes of the policy over its rollout before and after them.

The hooks of these probes exist only while an update is sampled, so other updates are not slowed down. Each hook is removed as soon
as its sample is complete. Copies and measurements do not change training. Optimizer states and zeros in gradients are sampled
because copying and correcting Adam's moments in float64 takes as long as one to four training steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from esper_telemetry.core.clock import Clock
from esper_telemetry.core.event_parts import CollectionReplay, FirstMinibatch, PolicyReplay, UsedAdvantages
from esper_telemetry.core.record import Level
from esper_telemetry.events import (
    AfterUpdate,
    BackwardEnd,
    BeforeUpdate,
    HeadsBackward,
    Hooks,
    MinibatchStart,
    OptimizerStep,
    Remover,
    TrunkBackward,
)
from esper_telemetry.metrics.gradients.actor_critic import MAX_COMPARED_HEADS
from esper_telemetry.metrics.gradients.gradient_health import gradients_of
from esper_telemetry.metrics.optimizer import AdamState, adam_parameters, adam_state, flat, weight_norm
from esper_telemetry.session import TelemetrySession
from esper_telemetry.updates.pickles import pickled_policy
from esper_telemetry.updates.replays import CollectionProbe, FirstPasses, UpdateReplay, update_replay, used_advantages
from esper_telemetry.updates.update import GradientSample, JoinedMinibatches

Event = TypeVar("Event")

SHARDS = 2
"""Parts of the first minibatch whose gradients separate noise from signal. Each takes a separate pass, by far the most expensive
part of a sample. Two are enough, because estimates are averaged over updates. Whole minibatches would not work: the parameters
change between them, which inflates the noise.
"""

MAX_SAMPLE_ENTRIES = 1 << 26
"""Largest number of entries in a sample's gradients. Of larger networks two minibatches are copied, next to the optimizer's states."""

MAX_TRAVELLING_ENTRIES = 1 << 22
"""Entries of a sample that may travel to the worker: sixteen megabytes. Larger samples are measured in the trainer's process."""

VECTORS_BESIDES_STATES = 8
"""Number of gradient-sized vectors that fit in addition to the optimizer's states, which take four vectors each."""

CAPACITY_PERIOD = 10
"""Number of samples from one that trains a copy of the network to the next."""


class TimedListener:
    """Registers hooks, adds their time to telemetry's clock, and removes them together.

    Args:
        clock: telemetry's.
        hooks: of the source.
        attempt: calls a hook with an event and contains its exceptions. Without it, exceptions are raised in the trainer.
    """

    def __init__(self, clock: Clock, hooks: Hooks, attempt: Callable[[Callable[[Any], None], Any], None] = lambda f, x: f(x)) -> None:
        self._clock = clock
        self._attempt = attempt
        self._hooks = hooks
        self._removers: list[Remover] = []

    def on(self, event_type: type[Event], hook: Callable[[Event], None]) -> None:
        """Call `hook` with every event of that type."""

        def timed(event: Event) -> None:
            with self._clock:
                self._attempt(hook, event)

        self._removers.append(self._hooks.on(event_type, timed))

    def once(self, event_type: type[Event], hook: Callable[[Event], None]) -> None:
        """Call `hook` with the next event of that type only: the source need not build later ones."""

        def timed(event: Event) -> None:
            remove()
            self._removers.remove(remove)
            with self._clock:
                self._attempt(hook, event)

        remove = self._hooks.on(event_type, timed)
        self._removers.append(remove)

    def untimed(self, event_type: type[Event], hook: Callable[[Event], None]) -> None:
        """Call a hook that takes less time than timing it would."""
        self._removers.append(self._hooks.on(event_type, hook))

    def keep(self, event_type: type[Event], *, late: bool = False) -> list[Event]:
        """Return a list that every event of that type is appended to; `late` as of `Hooks.on`."""
        events: list[Event] = []
        self._removers.append(self._hooks.on(event_type, events.append, late=late))
        return events

    def another(self) -> TimedListener:
        """Return a listener like this one that may end earlier; it ends no later than this one."""
        listener = TimedListener(self._clock, self._hooks, self._attempt)
        self._removers.append(listener.stop)
        return listener

    def stop(self) -> None:
        """Remove every hook that was registered here."""
        while self._removers:
            self._removers.pop()()


class GradientProbe:
    """Copies whole gradients and the optimizer's states of sampled updates.

    Args:
        listener: registers its hooks.
    """

    def __init__(self, listener: TimedListener) -> None:
        self._listener = listener
        self._backward = listener.another()
        self._initial_norm: Tensor | None = None
        self._steps: Tensor | None = None
        self._clear()

    def begin(self, *, every_step: bool) -> None:
        """Sample the update that begins now: as many optimizer steps as fit, or only the first."""
        self._listener.on(MinibatchStart, self._keep_shards)
        self._listener.on(TrunkBackward, self._keep_shared)
        self._backward.on(BackwardEnd, self._keep_gradient)
        if every_step:
            self._listener.once(HeadsBackward, self._keep_heads)
            self._listener.on(OptimizerStep, self._keep_state)
        else:
            self._listener.once(OptimizerStep, self._keep_state)

    def take(self) -> GradientSample | None:
        """Return the sample of the update; None if it was not sampled."""
        self._stop_listening()
        sample = self._sample._replace(
            minibatches=tuple(self._minibatches), states=tuple(self._states), previous_steps=self._steps, initial_norm=self._initial_norm
        )
        if not sample.minibatches and not sample.states:
            return None
        if sample.states:
            self._steps = sample.states[-1].step
        self._clear()
        return sample

    def state_dict(self) -> dict[str, Tensor | None]:
        """Return the state that later samples are compared with."""
        return {"initial_norm": self._initial_norm, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        """Continue from a saved state."""
        self._initial_norm, self._steps = state["initial_norm"], state["steps"]

    def stop(self) -> None:
        """Sample nothing any more."""
        self._stop_listening()
        self._clear()

    def _stop_listening(self) -> None:
        self._listener.stop()
        self._backward.stop()

    def _clear(self) -> None:
        self._sample = GradientSample((), ())
        self._minibatches: list[Tensor] = []
        self._states: list[AdamState] = []
        self._shared: list[Tensor] = []
        self._stride = 1

    def _keep_shards(self, event: MinibatchStart) -> None:
        shards = event.shards(SHARDS)
        self._sample = self._sample._replace(shards=tuple(x.gradient for x in shards), samples=tuple(x.samples for x in shards))

    def _keep_shared(self, event: TrunkBackward) -> None:
        """Take the gradients of both losses with respect to their shared parameters, through the first minibatch's graph."""
        shared = [parameter for parameter in event.shared if parameter.requires_grad]
        if event.step > 0 or not shared or len(event.outputs) != 1 or not event.outputs[0].requires_grad:
            return
        through = partial(gradient_through, event.outputs[0], shared)
        self._shared = shared
        self._sample = self._sample._replace(actor=through(event.actor), critic=through(event.critic))

    def _keep_heads(self, event: HeadsBackward) -> None:
        """Take each head's gradient with respect to the trunk's parameters, through the first minibatch's graph."""
        trunk = {name: parameter for name, parameter in event.parameters.items() if parameter.requires_grad}
        if not trunk:
            return
        through = partial(gradient_through, event.output, list(trunk.values()))
        heads = {head: through(gradient) for head, gradient in list(event.heads.items())[:MAX_COMPARED_HEADS]}
        sizes = tuple([(name, parameter.numel()) for name, parameter in trunk.items()])
        self._sample = self._sample._replace(heads=heads, trunk=sizes)

    @torch.no_grad()
    def _keep_gradient(self, event: BackwardEnd) -> None:
        """Copy the gradients of the first epoch's minibatches that have the same parameters."""
        if self._initial_norm is None:
            self._initial_norm = weight_norm(list(event.parameters.values()))
        if event.epoch > 0:
            self._backward.stop()
            return
        if not event.names:
            return
        gradients = gradients_of([event.parameters[name] for name in event.names])
        numels = tuple(gradient.numel() for gradient in gradients)
        if not self._minibatches:
            names = {id(parameter): name for name, parameter in event.parameters.items()}
            sizes = [(names.get(id(p), f"shared_{place}"), p.numel()) for place, p in enumerate(self._shared)]
            self._sample = self._sample._replace(names=event.names, numels=numels, shared=tuple(sizes))
        same = (event.names, numels) == self._sample[:2] and len(numels) == len(event.names)
        vectors = len(self._minibatches) + 1
        if same and (vectors <= 2 or vectors * sum(numels) <= MAX_SAMPLE_ENTRIES):
            self._minibatches.append(flat(gradients))

    @torch.no_grad()
    def _keep_state(self, event: OptimizerStep) -> None:
        """Copy the state after this step. If not all states fit, only every second, fourth and so on is copied, from the first."""
        vectors = VECTORS_BESIDES_STATES + 4 * len(self._states) + 4
        due = event.step % self._stride == 0
        if self._states and due and vectors * sum(self._sample.numels) > MAX_TRAVELLING_ENTRIES:
            del self._states[1::2]
            self._stride *= 2
            due = event.step % self._stride == 0
        if not due:
            return
        states = adam_parameters(event.optimizer)
        if states and not self._states:
            named = {id(parameter): name for name, parameter in event.parameters.items()}
            names = [named.get(id(entry.parameter), f"parameter_{index}") for index, entry in enumerate(states)]
            self._sample = self._sample._replace(state_names=tuple(names))
        if len(states) == len(self._sample.state_names) > 0:
            self._states.append(adam_state(states))


class ReplayProbe:
    """Shows copies of the policy its rollout before and after sampled updates, here or in the worker.

    Exact divergences after the last step, churn, stale recurrent states and gradients through time need the policy itself. As
    columns of an event they would add a pass to every update.

    Attributes:
        samples: number of sampled updates so far; a checkpoint keeps it.
    """

    def __init__(self, telemetry: TelemetrySession, listener: TimedListener) -> None:
        self._telemetry = telemetry
        self._listener = listener
        self.samples = 0
        self._collection = CollectionProbe()
        self._passes: FirstPasses | None = None
        self._replay: UpdateReplay | None = None
        self._local_replay: UpdateReplay | None = None
        self._travels = self._copies_locally = True

    def begin(self) -> None:
        """Sample the update that begins now."""
        self.stop()
        self._listener.on(BeforeUpdate, self._before_update)
        self._listener.once(FirstMinibatch, self._first_minibatch)
        self._listener.once(UsedAdvantages, self._used_advantages)
        self._listener.on(AfterUpdate, self._after_update)

    def take(self) -> UpdateReplay | None:
        """Return what the worker is to measure; None if everything is measured already."""
        replay, self._replay = self._replay, None
        return replay

    def after_minibatches(self, minibatches: JoinedMinibatches) -> None:
        """Compare the first minibatch of a sampled update with the outputs used in acting."""
        self._telemetry.measure(self._collection.after_minibatches(minibatches, self._telemetry.precision))

    def stop(self) -> None:
        """Sample nothing any more."""
        self._listener.stop()
        self._passes = self._replay = self._local_replay = None

    def _before_update(self, event: BeforeUpdate) -> None:
        with_capacity = self._telemetry.update_level >= Level.DEBUG and self.samples % CAPACITY_PERIOD == 0
        self.samples += 1
        has_modes = self._collection.needs_modes or (event.collection is not None and event.collection.has_modes)
        if event.network is None:
            self._take_passes(event.policy, event.collection, with_capacity=with_capacity)
            return
        if self._travels and self._telemetry.has_worker and not has_modes:
            self._replay = update_replay(event, with_capacity=with_capacity)
            if self._replay is not None:
                self._collection.leave_to_worker(self._replay)
                return
            self._travels = False
        if self._copies_locally:
            try:
                self._local_replay = update_replay(event, with_capacity=with_capacity, local=True)
            except TypeError:
                self._copies_locally = False
                raise
            assert self._local_replay is not None
            self._take_passes(*self._local_replay.load(), with_capacity=with_capacity)

    def _take_passes(self, policy: PolicyReplay, collection: CollectionReplay | None, *, with_capacity: bool) -> None:
        self._passes = passes = FirstPasses.take(policy, collection)
        level, precision = self._telemetry.update_level, self._telemetry.precision
        self._telemetry.measure(passes.measurements(self._collection, precision, level, with_capacity=with_capacity))

    def _first_minibatch(self, event: FirstMinibatch) -> None:
        self._telemetry.measure(self._collection.first_minibatch(event, self._telemetry.precision))

    def _used_advantages(self, event: UsedAdvantages) -> None:
        self._telemetry.measure(used_advantages(event, self._telemetry.precision))

    def _after_update(self, event: AfterUpdate) -> None:
        if self._replay is not None and event.network is not None:
            self._replay = self._replay._replace(after=pickled_policy(event.network))
        elif self._passes is not None:
            after = event.policy
            if self._local_replay is not None and event.network is not None:
                after = self._local_replay._replace(after=pickled_policy(event.network, local=True)).load_after()
            self._telemetry.measure(self._passes.compared(after))
        self._passes = self._local_replay = None
        self._listener.stop()


def gradient_through(output: Tensor, parameters: Sequence[Tensor], gradient: Tensor) -> Tensor:
    """Return the gradients of the parameters below `output`, concatenated, from the gradient at `output`. The graph is kept."""
    options: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return flat(torch.autograd.grad(output, parameters, grad_outputs=gradient, **options))
