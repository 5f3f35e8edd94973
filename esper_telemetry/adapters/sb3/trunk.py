"""The two losses' gradients where they meet: at the trunk's outputs, found in the middle of a backward pass that nothing alters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from esper_telemetry.adapters.sb3.facts import groups_of, trainable
from esper_telemetry.events import Hooks, TrunkBackward
from esper_telemetry.session import TelemetrySession


class CapturedTrunk:
    """Follows one forward pass at a time from the features to the heads and back.

    Gradients arrive at the outputs of the two heads first. From there a pass of their own takes each as far as the trunk's output,
    while the graph below is still untouched.
    """

    def __init__(
        self, policy: Any, hooks: Hooks, place: Callable[[], tuple[int, int]], telemetry: TelemetrySession
    ) -> None:
        self._policy, self._hooks, self._place, self._telemetry = policy, hooks, place, telemetry
        self._shared = groups_of(policy).get("shared", [])
        self._features: Tensor | None = None
        self._clear()

    def extracted(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The shared features were computed."""
        self._clear()
        self._features = result

    def head(self, which: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        """A head, `actor` or `critic`, read the trunk's output."""
        if not self._wanted() or not result.requires_grad:
            return
        output = self._features if self._shared and self._features is not None else args[0]
        self._outputs[which] = self._awaited[which] = output
        result.register_hook(lambda gradient: self._telemetry.attempt(partial(self._arrived, which, result), gradient))

    def _wanted(self) -> bool:
        """The first minibatch is enough where nothing is shared, and where such a pass goes through time."""
        _, step = self._place()
        enough = not self._shared or hasattr(self._policy, "lstm_actor")
        return torch.is_grad_enabled() and not (enough and step > 0) and self._hooks.wants(TrunkBackward)

    def _clear(self) -> None:
        self._features = None
        self._outputs: dict[str, Tensor] = {}
        self._awaited: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}

    def _arrived(self, which: str, scores: Tensor, gradient: Tensor) -> None:
        output = self._awaited.pop(which, None)
        if output is None:  # the pass that begins here comes by again
            return
        self._gradients[which] = self._through(scores, output, gradient)
        if len(self._gradients) == 2:
            self._emit()

    def _through(self, scores: Tensor, output: Tensor, gradient: Tensor) -> Tensor:
        if not output.requires_grad:
            return torch.zeros_like(output)
        (found,) = torch.autograd.grad(
            scores, output, gradient, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return found.detach()

    def _emit(self) -> None:
        actor, critic = self._outputs["actor"], self._outputs["critic"]
        outputs = (actor,) if actor is critic else (actor, critic)
        named = trainable(self._policy)
        shared = [named[name] for name in self._shared]
        gradients, epoch_step = self._gradients, self._place()
        self._clear()
        self._hooks.emit(TrunkBackward(*epoch_step, outputs, gradients["actor"], gradients["critic"], shared))
