"""`TelemetryCallback` for the Stable-Baselines3 models and the TRL trainers of a script, each with a run of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stable_baselines3.common.callbacks import BaseCallback

    from esper_telemetry.adapters import trl
    from esper_telemetry.adapters.sb3.callback import TelemetryCallback
    from esper_telemetry.telemetry import Telemetry


class ScriptModels:
    """Adds a `TelemetryCallback` to the callbacks of every `learn`, unless the script has one there itself.

    A model that learns again continues its run. Another model gets a run of its own, which ends the runs of models that do not learn
    at that moment.

    Args:
        make: makes the telemetry of the model with that number, from 1.
        say: writes a line for people.
        before_attach: called before a callback is attached to a model, or the model is left to a callback of the script's own.

    Attributes:
        last: the callback that was attached last; None before the first.
        own: the script has a `TelemetryCallback` of its own.
    """

    def __init__(
        self, make: Callable[[int], Telemetry], say: Callable[[str], None], before_attach: Callable[[], None]
    ) -> None:
        self.last: TelemetryCallback | trl.TelemetryCallback | None = None
        self.own = False
        self._make, self._say, self._before_attach = make, say, before_attach
        self._open: list[TelemetryCallback] = []
        self._trainers: list[trl.TelemetryCallback] = []
        self._count = 0
        self._refused: set[str] = set()
        self._pid = os.getpid()

    def joined(self, model: Any, callback: BaseCallback) -> BaseCallback:
        """Return the callback that `learn` continues with: the script's, which is initialised already, and ours."""
        from stable_baselines3.common.callbacks import CallbackList

        from esper_telemetry.adapters.sb3.callback import REQUIRED_ATTRIBUTES, TelemetryCallback

        if os.getpid() != self._pid:
            return callback
        if any(isinstance(part, TelemetryCallback) for part in callbacks_in(callback)):
            self.own = True
            self._before_attach()
            return callback
        kind = type(model).__name__
        if not all(hasattr(model, name) for name in REQUIRED_ATTRIBUTES):
            if kind not in self._refused:
                self._refused.add(kind)
                self._say(
                    f"{kind} is not watched: TelemetryCallback understands PPO, A2C, RecurrentPPO and MaskablePPO"
                )
            return callback
        ours = self._callback_of(model, kind)
        ours.init_callback(model)
        both = CallbackList([callback, ours])
        both.model = model  # instead of `init_callback`, which would initialise the script's callback again
        return both

    def watch(self, trainer: Any) -> None:
        """Add a callback to a trainer of transformers that is about to train, if it is TRL's `GRPOTrainer` and has none."""
        from esper_telemetry.adapters.trl import METHODS, TelemetryCallback

        if os.getpid() != self._pid:
            return
        present = [part for part in trainer.callback_handler.callbacks if isinstance(part, TelemetryCallback)]
        if present:  # one of ours continues its run
            if not set(present) & set(self._trainers):
                self.own = True
                self._before_attach()
            return
        kind = type(trainer).__name__
        if not all(hasattr(trainer, name) for name in METHODS):
            if kind not in self._refused:
                self._refused.add(kind)
                self._say(f"{kind} is not watched: TelemetryCallback understands GRPOTrainer")
            return
        for idle in self._trainers:
            idle.telemetry.close()
        self._before_attach()
        self._count += 1
        ours = self.last = TelemetryCallback(self._make(self._count))
        self._trainers = [ours]
        trainer.add_callback(ours)
        self._say(f"attached TelemetryCallback to {kind}; journal in {ours.telemetry.run_dir}")

    def close(self, error: BaseException | None) -> None:
        """End all runs, by that exception or without one."""
        for callback in self._trainers:
            callback.telemetry.__exit__(type(error) if error else None, error, None)
        while self._open:
            self._open.pop().telemetry.__exit__(type(error) if error else None, error, None)

    def _callback_of(self, model: Any, kind: str) -> TelemetryCallback:
        from esper_telemetry.adapters.sb3.callback import TelemetryCallback

        for callback in self._open:
            if callback.model is model:
                return callback
        for idle in [callback for callback in self._open if not callback.learning]:
            self._open.remove(idle)
            idle.telemetry.close()
        self._before_attach()
        self._count += 1
        ours = self.last = TelemetryCallback(self._make(self._count))
        self._open.append(ours)
        self._say(f"attached TelemetryCallback to {kind}; journal in {ours.telemetry.run_dir}")
        return ours


def callbacks_in(callback: object) -> Iterator[object]:
    """All callbacks in a callback, alone or in lists."""
    from stable_baselines3.common.callbacks import BaseCallback

    waiting, visited = [callback], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) in visited:
            continue
        visited.add(id(part))
        if isinstance(part, list | tuple):
            waiting += part
        elif isinstance(part, BaseCallback):
            yield part
            waiting += [value for value in vars(part).values() if isinstance(value, BaseCallback | list | tuple)]
