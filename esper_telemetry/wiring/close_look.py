"""A close look at one update in k: whole gradients and the optimizer's state, kept as copies.

Nothing here is heard of in the other updates: the hooks are registered when an update begins that is looked at, and gone when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from esper_telemetry.events import BackwardEnd, MinibatchStart, OptimizerStep, TrunkBackward
from esper_telemetry.metrics.adam import AdamState, adam_held, adam_state, flat
from esper_telemetry.metrics.gradients import gradients_of
from esper_telemetry.metrics.optimizer import weight_norm
from esper_telemetry.summary import GradientSample
from esper_telemetry.wiring.listener import Listener

SHARDS = 2
"""Parts of the first minibatch whose gradients tell noise from signal. Each is a pass of its own, and by far the dearest of a close look;
two are enough, because estimates are averaged over updates anyway."""

MOST_ENTRIES = 1 << 26
"""Numbers that are copied at most; of larger networks two minibatches are, besides what steps there are."""

MOST_TRAVELLING = 1 << 20
"""Numbers that may go to another process: four megabytes."""

BESIDES_STEPS = 8
"""Vectors as long as the gradient for which there is room besides those of the optimizer's steps, of which each has four."""


class CloseLook:
    """Looks at updates closely, when asked.

    Args:
        listener: registers its hooks.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._backward = listener.another()
        self._initial_norm: Tensor | None = None
        self._steps: Tensor | None = None
        self._clear()

    def begin(self, *, every_step: bool) -> None:
        """Looks at the update that begins now: at every step of the optimizer that there is room for, or the first one only."""
        self._listener.on(MinibatchStart, self._keep_shards)
        self._listener.on(TrunkBackward, self._keep_shared)
        self._backward.on(BackwardEnd, self._keep_gradient)
        if every_step:
            self._listener.on(OptimizerStep, self._keep_state)
        else:
            self._listener.once(OptimizerStep, self._keep_state)

    def take(self) -> GradientSample | None:
        """What was seen of the update; None where none was looked at."""
        self._stop_listening()
        if not self._minibatches and not self._states:
            return None
        sample = GradientSample(
            names=self._names,
            numels=self._numels,
            minibatches=tuple(self._minibatches),
            shards=self._shards,
            samples=self._samples,
            actor=self._actor,
            critic=self._critic,
            states=tuple(self._states),
            state_names=self._state_names,
            previous_steps=self._steps,
            initial_norm=self._initial_norm,
        )
        if self._states:
            self._steps = self._states[-1].step
        self._clear()
        return sample

    def state_dict(self) -> dict[str, Tensor | None]:
        """What later looks are compared with."""
        return {"initial_norm": self._initial_norm, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        """Goes on from a saved state."""
        self._initial_norm, self._steps = state["initial_norm"], state["steps"]

    def stop(self) -> None:
        """Looks at nothing any more."""
        self._stop_listening()
        self._clear()

    def _stop_listening(self) -> None:
        self._listener.stop()
        self._backward.stop()

    def _clear(self) -> None:
        self._names: tuple[str, ...] = ()
        self._numels: tuple[int, ...] = ()
        self._minibatches: list[Tensor] = []
        self._shards: tuple[Tensor, ...] = ()
        self._samples: tuple[int, ...] = ()
        self._actor: Tensor | None = None
        self._critic: Tensor | None = None
        self._states: list[AdamState] = []
        self._state_names: tuple[str, ...] = ()
        self._stride = 1

    def _keep_shards(self, event: MinibatchStart) -> None:
        shards = event.shards(SHARDS)
        self._shards = tuple(shard.gradient for shard in shards)
        self._samples = tuple(shard.samples for shard in shards)

    def _keep_shared(self, event: TrunkBackward) -> None:
        """Takes the two losses' gradients on to the parameters that they share, through the first minibatch's graph."""
        shared = [parameter for parameter in event.shared if parameter.requires_grad]
        if event.step > 0 or not shared or len(event.outputs) != 1 or not event.outputs[0].requires_grad:
            return
        self._actor = _through(event.outputs[0], event.actor, shared)
        self._critic = _through(event.outputs[0], event.critic, shared)

    @torch.no_grad()
    def _keep_gradient(self, event: BackwardEnd) -> None:
        """Copies the gradients of the first epoch's minibatches, as far as they are of the same parameters."""
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
            self._names, self._numels = event.names, numels
        same = (event.names, numels) == (self._names, self._numels) and len(numels) == len(event.names)
        if same and self._fits(len(self._minibatches) + 1, least=2):
            self._minibatches.append(flat(gradients))

    @torch.no_grad()
    def _keep_state(self, event: OptimizerStep) -> None:
        if not self._due(event.step):
            return
        held = adam_held(event.optimizer)
        if held and not self._states:
            named = {id(parameter): name for name, parameter in event.parameters.items()}
            names = [named.get(id(entry.parameter), f"parameter_{place}") for place, entry in enumerate(held)]
            self._state_names = tuple(names)
        if len(held) == len(self._state_names) > 0:
            self._states.append(adam_state(held))

    def _due(self, step: int) -> bool:
        """Whether this step is kept: every one, or where there is no room for so many every second, fourth and so on from the first."""
        vectors = BESIDES_STEPS + 4 * len(self._states) + 4
        if self._states and step % self._stride == 0 and vectors * sum(self._numels) > MOST_TRAVELLING:
            del self._states[1::2]
            self._stride *= 2
        return step % self._stride == 0

    def _fits(self, vectors: int, *, least: int) -> bool:
        return vectors <= least or vectors * sum(self._numels) <= MOST_ENTRIES


def _through(output: Tensor, gradient: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """Gradient [s] of a loss with respect to parameters below an output, of which the loss has this gradient."""
    found = torch.autograd.grad(
        output, list(parameters), grad_outputs=gradient, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return flat(found)
