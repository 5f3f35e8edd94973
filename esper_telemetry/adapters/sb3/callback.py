"""`TelemetryCallback`, the callback that makes Stable-Baselines3 emit events.

Each `learn` has a `ModelListener`, which turns calls of the model's policy, buffer and optimizer into events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

try:
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.logger import KVWriter, Logger
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "TelemetryCallback needs stable-baselines3: pip install 'esper-telemetry[sb3]'", name=missing.name
    ) from missing

from torch import Tensor

from esper_telemetry.adapters.columns import episodes_event, numbers_by_key
from esper_telemetry.adapters.sb3.sb3_facts import (
    ActionHeads,
    ModelProgress,
    config_of,
    default_updates_per_record,
    facts_of,
    groups_of,
    nonfinite_candidates,
    progress_of,
)
from esper_telemetry.adapters.sb3.sb3_minibatches import MinibatchListener
from esper_telemetry.adapters.sb3.sb3_replay import RolloutReplay, copied_weights
from esper_telemetry.adapters.sb3.sb3_rollouts import RolloutRecorder, joined_rollouts
from esper_telemetry.adapters.taps import Listener, listen, listen_to_clipping, remove_all
from esper_telemetry.core.clock import PhaseTimes
from esper_telemetry.core.event_parts import PolicyReplay
from esper_telemetry.core.record import Level
from esper_telemetry.events import AfterUpdate, BeforeUpdate, Hooks, RecurrentForward, Remover, RunStart, UpdateEnd
from esper_telemetry.recording.recorder import UpdateRecorder
from esper_telemetry.session import TelemetrySession
from esper_telemetry.telemetry import Telemetry, session_of
from esper_telemetry.updates.update import JoinedMinibatches


class ModelListener:
    """Emits the events of a model that is ready to learn until `stop`; `session` handles exceptions of the listeners.

    Args:
        progress: so far, in the units of the axes.
        updates_per_record: number of updates that share a record.

    Attributes:
        progress: progress by now.
        recorder: of the steps in the environments; its `after_step` is called after each.
        minibatches: that are learned from.
    """

    def __init__(
        self,
        session: TelemetrySession,
        model: Any,
        heads: ActionHeads,
        updates: UpdateRecorder,
        progress: ModelProgress,
        *,
        updates_per_record: int,
    ) -> None:
        self.progress = progress
        self._offset = progress.env_step - model.num_timesteps
        self._session, self._model, self._heads = session, model, heads
        self._record, self._hooks = updates, updates.hooks
        self.recorder = RolloutRecorder(model, heads, self._listen, session.clock)
        self.minibatches = MinibatchListener(model, heads, updates, self._listen, session.attempt)
        self._last_values: Tensor | None = None
        self._updates_per_record, self._updates = updates_per_record, 0
        self._times = PhaseTimes()
        self._before_update: BeforeUpdate | None = None
        self._replay: PolicyReplay | None = None
        self._older_weights: list[Tensor] = []
        self._learning = False
        returns = self._listen(model.rollout_buffer, "compute_returns_and_advantage", self._keep_last_values)
        clipping = listen_to_clipping(self.minibatches, session.failed)
        self._always = [returns, *self.recorder.taps(), *([] if clipping is None else [clipping])]
        self._for_update: list[Remover] = []

    def rollout_begins(self) -> None:
        """End the previous update, if there is one."""
        self.update_ends()
        self.recorder.begin(whole=self._session.samples_next)
        self._times.begin()

    def rollout_ends(self) -> None:
        """Prepare for the update that the rollout feeds; emit the rollouts of a record before the last of its updates."""
        model, before = self._model, self.progress
        self._times.end("rollout", environment=self.recorder.environment_seconds)
        steps = self._offset + model.num_timesteps
        self.progress = before._replace(update=before.update + 1, env_step=steps)
        self._learning = True
        self._updates += 1
        assert self._last_values is not None
        self.recorder.finish(self._last_values, update=self.progress.update, env_step=steps)
        self._before_update = None
        if self._updates == self._updates_per_record:
            self._emit_rollouts(update_follows=True)
        self.minibatches.begin(self._updates - 1, gradient_step=before.gradient_step)
        buffer, first = model.rollout_buffer, self._first_minibatch_comes
        taps = [self._listen(buffer, name, first) for name in ("get", "_get_samples")]
        self._for_update = [*taps, *self.minibatches.taps()]

    def update_ends(self) -> None:
        """End an update, and perhaps its record. Nothing happens between updates."""
        if not self._learning:
            return
        self._learning = False
        remove_all(self._for_update)
        self.minibatches.finish()
        self._times.end("update")
        self.progress = self.progress._replace(gradient_step=self.progress.gradient_step + self.minibatches.step)
        if self._updates == self._updates_per_record:
            self._record_ends()

    def training_ends(self) -> None:
        """Emit the remaining events, even if the record is incomplete."""
        self.update_ends()
        if self._updates:
            self._record_ends()

    def stop(self) -> None:
        """Emit the remaining events, then stop listening."""
        self.recorder.stop()
        remove_all(self._for_update)
        remove_all(self._always)
        self._emit_rest()

    def _record_ends(self) -> None:
        self._emit_rest()
        self._updates, model = 0, self._model
        replay, self._replay = self._replay, None
        if replay is not None and self._hooks.wants(AfterUpdate):
            self._hooks.emit(AfterUpdate(self.progress.update, replay, model.policy))
        self._record.end(
            self.progress,
            [model.policy.optimizer],
            dict(model.policy.named_parameters()),
            lambda: groups_of(model.policy),
            self._times,
            epochs=self.minibatches.epoch + 1,
            # their value loss is the mean squared error, ours half of it
            coefficients={"value": 2 * float(model.vf_coef), "entropy": float(model.ent_coef)},
        )
        self.minibatches.record_ends()

    def _emit_rest(self) -> None:
        """Record the minibatches that are done, and emit the rollouts whose event is missing."""
        if self.recorder.rollouts:
            self._session.attempt(lambda listener: listener._emit_rollouts(), self)
        self._session.attempt(lambda minibatches: minibatches.record(), self.minibatches)

    def _emit_rollouts(self, *, update_follows: bool = False) -> None:
        """Emit the collected rollouts of a record. Keep the last rollout's inputs, which the buffer will reorder."""
        hooks, model, recorder = self._hooks, self._model, self.recorder
        rollouts, recorder.rollouts = recorder.rollouts, []
        episodes, recorder.episodes = recorder.episodes, []
        joined = partial(joined_rollouts, model, self._heads, states=recorder.states())
        event = self.minibatches.rollout = joined(rollouts)
        hooks.emit(event)
        recurrent = recorder.recurrent_forward(max(1, model.n_envs // 4)) if hooks.wants(RecurrentForward) else None
        for one in (recurrent, episodes_event(episodes, event.env_step)):
            if one is not None:
                hooks.emit(one)
        if update_follows and (hooks.wants(BeforeUpdate) or hooks.wants(AfterUpdate)):
            replay = RolloutReplay(
                model,
                self._heads,
                event if len(rollouts) == 1 else joined(rollouts[-1:]),
                acted=recorder.steps.acted(),
                received=recorder.first_memory,
                after=recorder.states(after=True),
                older=self._older_weights,
            )
            modes = tuple([module.training for module in model.policy.modules()])  # in which it has acted
            self._before_update = BeforeUpdate(event.update, replay, replay.collection(), model.policy, modes)

    def _first_minibatch_comes(self, *_: Any) -> None:
        """A program may have set other weights since the rollout ended, so the update begins with the current weights."""
        event, self._before_update = self._before_update, None
        if event is not None:
            self._replay, self._older_weights = event.policy, copied_weights(self._model.policy)
            self._hooks.emit(event)

    def _keep_last_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any) -> None:
        self._last_values = kwargs["last_values"] if "last_values" in kwargs else args[0]

    def _listen(self, owner: object, name: str, listener: Listener) -> Remover:
        return listen(owner, name, listener, self._session.failed)


REQUIRED_ATTRIBUTES = ("rollout_buffer", "normalize_advantage", "max_grad_norm", "n_steps")
"""Attributes of a model whose updates the callback understands."""


class TelemetryCallback(BaseCallback):
    """Telemetry for PPO, A2C, RecurrentPPO and MaskablePPO: one record per update; several of A2C's small updates share one.

        with Telemetry([TensorBoardSink()], run_dir="runs/a") as telemetry:
            PPO("MlpPolicy", "CartPole-v1").learn(100_000, callback=TelemetryCallback(telemetry))

    The callback listens to the policy, the buffer and the optimizer of one model while it learns. It does not change training:
    weights are bit-identical with and without it. Every record has the environment step at which its data were collected.
    Numbers that Stable-Baselines3 logs are in the record under `sb3/`. A model that trains can be saved, and its policy pickled.

    It detaches when training ends, when `telemetry` is closed, after an exception, on `detach()` and at the end of
    `with TelemetryCallback(telemetry) as callback:`. A callback that learns again continues its run.

    Args:
        telemetry: receives the records; stays open when training ends.
        updates_per_record: number of updates that share a record; by default 1. A2C takes a single step per rollout, so its default
            is the number of updates that collect 2048 transitions. Sums are over all updates of a record. The updates left when
            training ends have a record too.
        verbose: see `BaseCallback`.

    Attributes:
        telemetry: as above.
        hooks: emits the events, also to listeners of your own.
        learning: it listens to a model that learns.

    Raises:
        ValueError: for a number of updates below 1.
        TypeError: if `telemetry` is not a `Telemetry`; from `learn`, for a model of another algorithm.
    """

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
        self.learning = False
        self._listener: ModelListener | None = None  # of the model that learns, or has learned last
        self._log_copy: LogCopy
        self._recorder: UpdateRecorder | None = None

    @property
    def updates(self) -> int:
        """Updates of the model so far."""
        return 0 if self._listener is None else self._listener.progress.update

    def detach(self) -> None:
        """Stop listening. It can be called at any time and repeatedly, also after an exception."""
        learning, self.learning = self.learning, False
        if learning and self._listener is not None:
            self._log_copy.remove()
            self._listener.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.detach()

    def _init_callback(self) -> None:
        missing = [name for name in REQUIRED_ATTRIBUTES if not hasattr(self.model, name)]
        if missing:
            kind = type(self.model).__name__
            raise TypeError(f"TelemetryCallback watches PPO, A2C, RecurrentPPO and MaskablePPO, got {kind}, which has no {missing[0]}")

    def _on_training_start(self) -> None:
        self.detach()
        if self.telemetry.level > Level.OFF:
            self._attempt(TelemetryCallback._start, self)

    def _on_rollout_start(self) -> None:
        if self.learning:
            self._attempt(ModelListener.rollout_begins, self._listener)

    def _on_step(self) -> bool:
        if self.learning and self._listener is not None:
            try:
                self._listener.recorder.after_step(self.locals)
            except Exception as error:  # a bug of ours must not reach the trainer
                self._session.failed(self._listener.recorder.after_step, error)
        return True

    def _on_rollout_end(self) -> None:
        if self.learning:
            self._attempt(ModelListener.rollout_ends, self._listener)

    def _on_training_end(self) -> None:
        if self.learning:
            self._attempt(ModelListener.training_ends, self._listener)
        self.detach()

    def _start(self) -> None:
        model: Any = self.model
        if self._recorder is None:
            self.hooks.on(UpdateEnd, lambda _: self.telemetry.log(self._log_copy.take()))
            self._recorder = UpdateRecorder(self._session, self, self._joined)
            self._session.on_close(self.detach)
            self._session.search_on_failure(lambda: nonfinite_candidates(self.model))
        heads = ActionHeads(model.action_space, squash=bool(getattr(model.policy, "squash_output", False)))
        progress, previous = progress_of(model), self._listener
        if previous is not None:  # a callback that learns again: environment steps never go back
            progress = previous.progress._replace(env_step=max(previous.progress.env_step, progress.env_step))
        shared = self._updates_per_record or default_updates_per_record(model)
        self.hooks.emit(RunStart(config_of(model), facts_of(model, heads, shared), *progress))
        self._log_copy = LogCopy(model.logger)
        listener = ModelListener(self._session, model, heads, self._recorder, progress, updates_per_record=shared)
        if previous is not None:
            listener.recorder.needs_steps = previous.recorder.needs_steps
        self._listener, self.learning = listener, True

    def _joined(self, blocks: Sequence[Any]) -> JoinedMinibatches:
        assert self._listener is not None
        return self._listener.minibatches.joined(blocks)

    def _attempt(self, function: Callable[[Any], None], owner: object) -> None:
        """Call a method on telemetry's clock. If it raises, its events are lost and a warning is logged."""
        with self._session.clock:
            self._session.attempt(function, owner)


class LogCopy(KVWriter):
    """An additional output of a model's logger that keeps the logged numbers; the other outputs are not affected."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._numbers: dict[str, float] = {}
        logger.output_formats.append(self)

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Keep the numbers of a dump."""
        self._numbers.update(numbers_by_key("sb3", key_values))

    def take(self) -> dict[str, float]:
        """Return the numbers that were dumped since the last call, and the newer ones that wait for the next dump."""
        numbers = {**self._numbers, **numbers_by_key("sb3", self._logger.name_to_value)}
        self._numbers = {}
        return numbers

    def remove(self) -> None:
        """Leave the logger's outputs."""
        if self in self._logger.output_formats:
            self._logger.output_formats.remove(self)

    def close(self) -> None:
        """Do nothing: nothing is open."""
