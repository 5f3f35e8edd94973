"""`TelemetryCallback`: what Stable-Baselines3 calls while it learns."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from stable_baselines3.common.callbacks import BaseCallback

from esper_telemetry.adapters.attach import attach
from esper_telemetry.adapters.sb3.candidates import nonfinite_candidates
from esper_telemetry.adapters.sb3.facts import ModelProgress, config_of, facts_of, progress_of, updates_per_record
from esper_telemetry.adapters.sb3.heads import Heads
from esper_telemetry.adapters.sb3.watch import ModelListener
from esper_telemetry.core.record import Level
from esper_telemetry.events import Hooks, MinibatchesEnd, RunStart
from esper_telemetry.telemetry import Telemetry, session_of

NEEDED = ("rollout_buffer", "normalize_advantage", "max_grad_norm", "n_steps")
"""What a model has whose updates are understood."""


class TelemetryCallback(BaseCallback):
    """Telemetry for PPO, A2C, RecurrentPPO and MaskablePPO, one record per update; of A2C's small updates several share one.

        with Telemetry([TensorBoardSink()], run_dir="runs/a") as telemetry:
            PPO("MlpPolicy", "CartPole-v1").learn(100_000, callback=TelemetryCallback(telemetry))

    It listens to the policy, the buffer and the optimizer of one model while that learns and alters nothing: weights are the same to
    the last bit with it and without. Records stand at the step where their data were collected, the last update's too. What
    Stable-Baselines3 logs joins them under `sb3/`. A model can be saved, and a policy pickled, while it listens.

    It goes when training ends, when `telemetry` is closed, after an exception too, and when told to: by `detach`, or at the end
    of `with TelemetryCallback(telemetry) as callback:`. One that learns again goes on in the same run.

    Args:
        telemetry: gets the records; stays open when training ends.
        updates_per_record: how many updates share a record. By default one has its own; of A2C, which makes a single step with every
            rollout, as many share one as collect 2048 transitions. Sums are those of all of them, and what is left when training ends
            has a record too.
        verbose: see `BaseCallback`.

    Attributes:
        telemetry: as given.
        hooks: who is told of what happens, besides telemetry.
        joins: it emits these once per update, and no `MinibatchEnd`.

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
        self._updates_per_record = updates_per_record
        self.hooks = Hooks()
        self._watch: ModelListener | None = None
        self._progress: ModelProgress | None = None
        self._attached = False

    @property
    def learning(self) -> bool:
        """Whether it listens to a model that learns."""
        return self._watch is not None

    @property
    def updates(self) -> int:
        """Updates of the model so far."""
        progress = self._progress if self._watch is None else self._watch.progress
        return 0 if progress is None else progress.update

    def detach(self) -> None:
        """Listens to nothing any more; before or after training, twice, or after an exception."""
        watch, self._watch = self._watch, None
        if watch is not None:
            self._progress = watch.progress
            watch.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.detach()

    def _init_callback(self) -> None:
        missing = [name for name in NEEDED if not hasattr(self.model, name)]
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
        if self._watch is not None:
            self._attempt(self._watch.rollout_begins)

    def _on_step(self) -> bool:
        watch = self._watch
        if watch is not None:
            try:
                watch.stepped(self.locals)
            except Exception as error:  # whatever a bug raises
                session_of(self.telemetry).failed(watch.stepped, error)
        return True

    def _on_rollout_end(self) -> None:
        if self._watch is not None:
            self._attempt(self._watch.rollout_ends)

    def _on_training_end(self) -> None:
        if self._watch is not None:
            self._attempt(self._watch.training_ends)
        self.detach()

    def _start(self) -> None:
        model: Any = self.model
        if not self._attached:
            attach(self.telemetry, self)
            session_of(self.telemetry).on_close(self.detach)
            session_of(self.telemetry).search_on_failure(lambda: nonfinite_candidates(self.model))
            self._attached = True
        heads = Heads(model.action_space, squash=bool(getattr(model.policy, "squash_output", False)))
        before = self._continued(progress_of(model))
        together = self._updates_per_record or updates_per_record(model)
        self.hooks.emit(RunStart(config_of(model), facts_of(model, heads, together), *before))
        self._watch = ModelListener(
            session_of(self.telemetry), model, heads, self.hooks, before, updates_per_record=together
        )

    def _continued(self, known: ModelProgress) -> ModelProgress:
        """What was done before: by this callback, or by a model that was loaded. Steps never count backwards."""
        if self._progress is None:
            return known
        return self._progress._replace(env_step=max(self._progress.env_step, known.env_step))

    def _attempt(self, function: Callable[[], None]) -> None:
        """Calls it on telemetry's clock; what it raises costs what it would have told, and a warning."""
        session = session_of(self.telemetry)
        with session.clock:
            session.attempt(lambda call: call(), function)
