"""`TelemetryCallback` for the Stable-Baselines3 models and the TRL trainers of a script, each with its own run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from stable_baselines3.common.callbacks import BaseCallback

    from esper_telemetry.adapters import trl
    from esper_telemetry.adapters.sb3.callback import TelemetryCallback
    from esper_telemetry.telemetry import Telemetry

Callback = TypeVar("Callback", "TelemetryCallback", "trl.TelemetryCallback")


class ScriptModels:
    """Adds a `TelemetryCallback` to the callbacks of every `learn`, unless the script has one there itself.

    A model that learns again continues its run. Another model gets a new run, which ends the runs of models that are not learning.

    Args:
        make: makes the telemetry of the model with that number, from 1.
        say: writes a line for people.
        before_attach: called before a callback is attached to a model, or before the model is left to the script's own callback.

    Attributes:
        last: the callback that was attached last; None before the first.
        own: the script has its own `TelemetryCallback`.
    """

    def __init__(self, make: Callable[[int], Telemetry], say: Callable[[str], None], before_attach: Callable[[], None]) -> None:
        self.last: TelemetryCallback | trl.TelemetryCallback | None = None
        self.own = False
        self._make, self._say, self._before_attach = make, say, before_attach
        self._open: list[TelemetryCallback | trl.TelemetryCallback] = []
        self._count = 0
        self._refused: set[str] = set()
        self._pid = os.getpid()

    def joined(self, model: Any, callback: BaseCallback) -> BaseCallback:
        """Return the callback that `learn` continues with: the script's, which is initialised already, and ours."""
        from stable_baselines3.common.callbacks import CallbackList

        from esper_telemetry.adapters.sb3.callback import REQUIRED_ATTRIBUTES, TelemetryCallback

        if any(isinstance(part, TelemetryCallback) for part in callbacks_in(callback)):
            self._leave_alone()
            return callback
        if not self._understands(model, REQUIRED_ATTRIBUTES, "PPO, A2C, RecurrentPPO and MaskablePPO"):
            return callback
        known = [one for one in self._open if isinstance(one, TelemetryCallback)]
        ours = next((one for one in known if one.model is model), None)
        if ours is None:
            ours = self._attach(TelemetryCallback, model, [one for one in known if not one.learning])
        ours.init_callback(model)
        both = CallbackList([callback, ours])
        both.model = model  # instead of `init_callback`, which would initialise the script's callback again
        return both

    def watch(self, trainer: Any) -> None:
        """Add a callback to a trainer of transformers that is about to train, if it is TRL's `GRPOTrainer` without a callback."""
        from esper_telemetry.adapters.trl import TAPS, TelemetryCallback

        present = [part for part in trainer.callback_handler.callbacks if isinstance(part, TelemetryCallback)]
        if present and not set(present) & set(self._open):
            self._leave_alone()
        elif not present and self._understands(trainer, TAPS, "GRPOTrainer"):
            idle = [one for one in self._open if isinstance(one, TelemetryCallback)]
            trainer.add_callback(self._attach(TelemetryCallback, trainer, idle))

    def close(self, error: BaseException | None) -> None:
        """End all runs, by that exception or without one."""
        while self._open:
            self._open.pop().telemetry.__exit__(type(error) if error else None, error, None)

    def _leave_alone(self) -> None:
        """Leave the model to the script's own callback."""
        if os.getpid() == self._pid:
            self.own = True
            self._before_attach()

    def _understands(self, model: Any, required: Iterable[str], kinds: str) -> bool:
        """Return True for a model with these attributes, in the script's own process; say once which kinds have them."""
        name = type(model).__name__
        fits = all(hasattr(model, attribute) for attribute in required)
        if os.getpid() == self._pid and not fits and name not in self._refused:
            self._refused.add(name)
            self._say(f"{name} is not watched: TelemetryCallback understands {kinds}")
        return fits and os.getpid() == self._pid

    def _attach(self, kind: Callable[[Telemetry], Callback], model: Any, idle: Sequence[Any]) -> Callback:
        """Return a new callback of that kind for a model, and end the runs of idle ones."""
        for one in idle:
            self._open.remove(one)
            one.telemetry.close()
        self._before_attach()
        self._count += 1
        ours = kind(self._make(self._count))
        self.last = ours
        self._open.append(ours)
        self._say(f"attached TelemetryCallback to {type(model).__name__}; journal in {ours.telemetry.run_dir}")
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
