"""The beginning, the end and the accidents of a run: facts, flushes, and where to look for the first non-finite tensor."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from esper_telemetry.events import BackwardEnd, MinibatchEnd, RolloutEnd, RunStart, UpdateEnd
from esper_telemetry.metrics.optimizer import LearningRate
from esper_telemetry.metrics.performance import update_performance
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.wiring.family import Listener


class Run:
    """Announces the run with the trainer's config and facts."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def listen(self, listener: Listener) -> None:
        """Hears `RunStart`."""
        listener.on(RunStart, lambda event: self._telemetry.start(config=event.config, facts=event.facts))


class Updates:
    """Ends each update's record. On CUDA the record of the update before is made when the next rollout has ended."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._env_step = 0
        self._ended = time.perf_counter()

    def listen(self, listener: Listener) -> None:
        """Hears `RolloutEnd` and `UpdateEnd`."""
        listener.on(RolloutEnd, lambda _: self._telemetry.materialise())
        listener.on(UpdateEnd, self._flush)

    def _flush(self, event: UpdateEnd) -> None:
        steps = event.env_step - self._env_step
        self._env_step = event.env_step
        now = time.perf_counter()
        elapsed, self._ended = now - self._ended, now
        self._telemetry.observe(
            LearningRate(lr=event.learning_rate),
            update_performance(event.update, env_steps=steps, elapsed=elapsed, seconds=event.seconds),
        )
        self._telemetry.flush(env_step=event.env_step, update=event.update, gradient_step=event.gradient_step)


class Suspects:
    """Remembers the tensors of the update, in forward order, for the case that training raises."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._rollout: RolloutEnd | None = None
        self._minibatch: MinibatchEnd | None = None
        self._backward: BackwardEnd | None = None
        telemetry.suspects(self._tensors)

    def listen(self, listener: Listener) -> None:
        """Hears what holds tensors."""
        listener.on(RolloutEnd, self._keep_rollout)
        listener.on(MinibatchEnd, self._keep_minibatch)
        listener.on(BackwardEnd, self._keep_backward)

    def _keep_rollout(self, event: RolloutEnd) -> None:
        self._rollout, self._minibatch = event, None

    def _keep_minibatch(self, event: MinibatchEnd) -> None:
        self._minibatch = event

    def _keep_backward(self, event: BackwardEnd) -> None:
        self._backward = event

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self._rollout is not None:
            for name in ("rewards", "values", "log_probs", "next_values", "advantages", "returns"):
                yield name, getattr(self._rollout, name)
        if self._minibatch is not None:
            yield "log_ratio", self._minibatch.log_ratio
            yield from ((f"loss/{name}", loss) for name, loss in self._minibatch.losses.items())
        if self._backward is not None:
            yield from zip(self._backward.names, self._backward.norms, strict=True)
            yield from self._backward.parameters.items()
