"""`TelemetryCallback`, the callback that makes Stable-Baselines3 emit events."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from numbers import Real
from types import TracebackType
from typing import Any, Self

try:
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.logger import KVWriter, Logger
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "TelemetryCallback needs stable-baselines3: pip install 'esper-telemetry[sb3]'", name=missing.name
    ) from missing

from esper_telemetry.adapters.attach import attach
from esper_telemetry.adapters.sb3.distributions import ActionHeads
from esper_telemetry.adapters.sb3.facts import (
    ModelProgress,
    config_of,
    default_updates_per_record,
    facts_of,
    nonfinite_candidates,
    progress_of,
)
from esper_telemetry.adapters.sb3.model_listener import ModelListener
from esper_telemetry.core.record import Level
from esper_telemetry.events import Hooks, MinibatchesEnd, RunStart, UpdateEnd
from esper_telemetry.telemetry import Telemetry, session_of

REQUIRED_ATTRIBUTES = ("rollout_buffer", "normalize_advantage", "max_grad_norm", "n_steps")
"""Attributes of a model whose updates the callback understands."""


class TelemetryCallback(BaseCallback):
    """Telemetry for PPO, A2C, RecurrentPPO and MaskablePPO: one record per update; several of A2C's small updates share one.

        with Telemetry([TensorBoardSink()], run_dir="runs/a") as telemetry:
            PPO("MlpPolicy", "CartPole-v1").learn(100_000, callback=TelemetryCallback(telemetry))

    The callback listens to the policy, the buffer and the optimizer of one model while that learns and alters nothing: weights are
    bit-identical with it and without. A record, the last one too, has the environment step at which its data were collected. What
    Stable-Baselines3 logs joins it under `sb3/`. A model can be saved, and a policy pickled, during training.

    It detaches when training ends, when `telemetry` is closed, after an exception, on `detach()` and at the end of
    `with TelemetryCallback(telemetry) as callback:`. A callback that learns again continues its run.

    Args:
        telemetry: receives the records; stays open when training ends.
        updates_per_record: how many updates share a record. By default each has its own; of A2C, which makes a single step with every
            rollout, as many share one as collect 2048 transitions. Sums are those of all of them. The updates left when training ends
            have a record too.
        verbose: see `BaseCallback`.

    Attributes:
        telemetry: as above.
        hooks: emits the events, also to listeners of your own.
        joins: event types that are emitted once per update, in place of one `MinibatchEnd` per minibatch.

    Raises:
        ValueError: for a number of updates below 1.
        TypeError: for something else than a `Telemetry`; from `learn`, for a model that is none of the four.
    """

    joins = (MinibatchesEnd,)

    def __init__(self, telemetry: Telemetry, *, updates_per_record: int | None = None, verbose: int = 0) -> None:
        super().__init__(verbose)
        if not isinstance(telemetry, Telemetry):
            raise TypeError(f"TelemetryCallback takes a Telemetry, got {type(telemetry).__name__}")
        if updates_per_record is not None and updates_per_record < 1:
            raise ValueError(f"updates_per_record must be 1 or more, got {updates_per_record}")
        self.telemetry = telemetry
        self._session = session_of(telemetry)
        self._updates_per_record = updates_per_record
        self.hooks = Hooks()
        self._listener: ModelListener | None = None
        self._log_copy: LogCopy | None = None
        self._progress: ModelProgress | None = None
        self._attached = False

    @property
    def learning(self) -> bool:
        """True while it listens to a model that learns."""
        return self._listener is not None

    @property
    def updates(self) -> int:
        """Updates of the model so far."""
        progress = self._progress if self._listener is None else self._listener.progress
        return 0 if progress is None else progress.update

    def detach(self) -> None:
        """Listen to nothing any more; harmless before and after training, twice, and after an exception."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._progress = listener.progress
            if self._log_copy is not None:
                self._log_copy.remove()
            listener.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.detach()

    def _init_callback(self) -> None:
        missing = [name for name in REQUIRED_ATTRIBUTES if not hasattr(self.model, name)]
        if missing:
            kind = type(self.model).__name__
            raise TypeError(
                f"TelemetryCallback watches PPO, A2C, RecurrentPPO and MaskablePPO, got {kind}, which has no {missing[0]}"
            )

    def _on_training_start(self) -> None:
        self.detach()
        if self.telemetry.level > Level.OFF:
            self._attempt(self._start)

    def _on_rollout_start(self) -> None:
        if self._listener is not None:
            self._attempt(self._listener.rollout_begins)

    def _on_step(self) -> bool:
        listener = self._listener
        if listener is not None:
            try:
                listener.after_step(self.locals)
            except Exception as error:  # a bug of ours must not reach the trainer
                self._session.failed(listener.after_step, error)
        return True

    def _on_rollout_end(self) -> None:
        if self._listener is not None:
            self._attempt(self._listener.rollout_ends)

    def _on_training_end(self) -> None:
        if self._listener is not None:
            self._attempt(self._listener.training_ends)
        self.detach()

    def _start(self) -> None:
        model: Any = self.model
        if not self._attached:
            self.hooks.on(UpdateEnd, self._log_numbers)
            attach(self.telemetry, self)
            self._session.on_close(self.detach)
            self._session.search_on_failure(lambda: nonfinite_candidates(self.model))
            self._attached = True
        heads = ActionHeads(model.action_space, squash=bool(getattr(model.policy, "squash_output", False)))
        before = progress_of(model)
        if self._progress is not None:  # a callback that learns again: environment steps never go back
            before = self._progress._replace(env_step=max(self._progress.env_step, before.env_step))
        shared = self._updates_per_record or default_updates_per_record(model)
        self.hooks.emit(RunStart(config_of(model), facts_of(model, heads, shared), *before))
        self._log_copy = LogCopy(model.logger)
        self._listener = ModelListener(
            self._session, model, heads, self.hooks, before=before, updates_per_record=shared
        )

    def _log_numbers(self, _: UpdateEnd) -> None:
        """Add what the model logged to the record that is about to be written."""
        if self._log_copy is not None:
            self.telemetry.log(self._log_copy.take())

    def _attempt(self, function: Callable[[], None]) -> None:
        """Call a function on telemetry's clock; what it raises costs its events and a warning."""
        with self._session.clock:
            self._session.attempt(lambda call: call(), function)


class LogCopy(KVWriter):
    """One more output of a model's logger, which keeps the numbers that pass; the other outputs notice nothing."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._numbers: dict[str, float] = {}
        logger.output_formats.append(self)

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Keep the numbers of a dump."""
        self._numbers.update(_numbers(key_values))

    def take(self) -> dict[str, float]:
        """Return the numbers that were dumped since the last call, and the newer ones that wait for the next dump."""
        numbers = {**self._numbers, **_numbers(self._logger.name_to_value)}
        self._numbers = {}
        return numbers

    def remove(self) -> None:
        """Leave the logger's outputs."""
        if self in self._logger.output_formats:
            self._logger.output_formats.remove(self)

    def close(self) -> None:
        """Nothing is open."""


def _numbers(key_values: Mapping[str, Any]) -> dict[str, float]:
    """Single numbers under keys that every backend takes: `rollout/ep_rew_mean` becomes `sb3/rollout/ep_rew_mean`."""
    numbers = {}
    for name, value in key_values.items():
        if isinstance(value, Real):
            segments = [re.sub(r"[^a-z0-9_]+", "_", part) for part in str(name).lower().split("/") if part]
            numbers["/".join(["sb3", *segments])] = float(value)
    return numbers
