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

from esper_telemetry.adapters.columns import numbers_by_key
from esper_telemetry.adapters.sb3.collection import CollectionPasses, Memory, copied_weights
from esper_telemetry.adapters.sb3.distributions import ActionHeads, DistributionRecorder
from esper_telemetry.adapters.sb3.facts import (
    ModelProgress,
    config_of,
    default_updates_per_record,
    facts_of,
    groups_of,
    nonfinite_candidates,
    parameters_by_name,
    progress_of,
)
from esper_telemetry.adapters.sb3.gradients import TrunkListener
from esper_telemetry.adapters.sb3.minibatches import MinibatchListener
from esper_telemetry.adapters.sb3.replay import CallbackReplay, stored_rollout
from esper_telemetry.adapters.sb3.rollouts import (
    CollectedRollout,
    RolloutRecorder,
    recurrent_event,
    rollout_episodes,
    rollout_event,
)
from esper_telemetry.adapters.taps import Listener, listen, listen_to_clipping
from esper_telemetry.core.clock import PhaseTimes
from esper_telemetry.core.record import Level
from esper_telemetry.events import (
    AfterUpdate,
    BeforeUpdate,
    Hooks,
    RecurrentForward,
    Remover,
    RolloutEnd,
    RunStart,
    TrunkBackward,
    UpdateEnd,
)
from esper_telemetry.recording.recorder import UpdateRecorder
from esper_telemetry.session import TelemetrySession
from esper_telemetry.telemetry import Telemetry, session_of
from esper_telemetry.updates.update import JoinedMinibatches


class ModelListener:
    """Emits the events of a model that is ready to learn until `stop`; `session` handles exceptions of the listeners.

    Args:
        before: progress before, as axes are to count it.
        updates_per_record: number of updates that share a record.
        needs_steps: as `RolloutRecorder.needs_steps` by now.

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
        *,
        before: ModelProgress,
        updates_per_record: int,
        needs_steps: bool,
    ) -> None:
        self.progress = before
        self._offset = before.env_step - model.num_timesteps
        self._session, self._model, self._heads, self._record, self._hooks = (
            session,
            model,
            heads,
            updates,
            updates.hooks,
        )
        distributions = DistributionRecorder(heads, model.policy)
        listen_to_policy = partial(self._listen, model.policy, "forward")
        self.recorder = RolloutRecorder(model, distributions, listen_to_policy, session.clock)
        self.recorder.needs_steps = needs_steps
        self.minibatches = MinibatchListener(model, heads, distributions, updates)
        self._last_values: Tensor | None = None
        self._updates_per_record, self._updates = updates_per_record, 0
        self._rollouts: list[CollectedRollout] = []
        self._rollout_event: RolloutEnd | None = None
        self._times = PhaseTimes()
        self._replay: CallbackReplay | None = None
        self._before_update: Callable[[], None] | None = None
        self._older_weights: list[Tensor] = []
        self._learning = False
        self._optimizer: Any = None
        self._stop_following: Remover = lambda: None
        self._always: list[Remover] = self._collecting_taps()
        self._for_update: list[Remover] = []

    def rollout_begins(self) -> None:
        """The update before it, if there is one, is over."""
        self.update_ends()
        self.recorder.begin(whole=self._session.samples_next)
        self._times.begin()

    def rollout_ends(self) -> None:
        """Prepare for the update that the rollout feeds; emit the rollouts of a record before the last of its updates."""
        model, recorder, before = self._model, self.recorder, self.progress
        self._times.end("rollout", environment=recorder.environment_seconds)
        self.progress = before._replace(update=before.update + 1, env_step=self._offset + model.num_timesteps)
        self._learning = True
        self._updates += 1
        assert self._last_values is not None
        self._rollouts.append(recorder.finish(self._last_values))
        if self._updates == self._updates_per_record:
            self._emit_rollouts()
            self._prepare_before_update()
        counted = self.progress.gradient_step
        self.minibatches.begin(len(self._rollouts) - 1, parameters_by_name(model.policy), gradient_step=counted)
        self._for_update = self._update_taps()

    def update_ends(self) -> None:
        """An update is over, and with it, perhaps, a record; nothing happens where none was under way."""
        if not self._learning:
            return
        self._learning = False
        _remove_all(self._for_update)
        self.minibatches.finish()
        self._times.end("update")
        self.progress = self.progress._replace(gradient_step=self.progress.gradient_step + self.minibatches.step)
        if self._updates == self._updates_per_record:
            self._record_ends()

    def training_ends(self) -> None:
        """Emit what is left, also where a record wants more updates."""
        self.update_ends()
        if self._updates:
            self._record_ends()

    def stop(self) -> None:
        """Listen to nothing any more; emit what is open first."""
        self.recorder.stop()
        _remove_all(self._for_update)
        _remove_all(self._always)
        self._emit_rest()

    def _record_ends(self) -> None:
        self._emit_rest()
        self._updates, model = 0, self._model
        self._before_update = None
        replay, self._replay = self._replay, None
        if replay is not None and self._hooks.wants(AfterUpdate):
            self._hooks.emit(AfterUpdate(self.progress.update, replay, model.policy))
        self._record.end(
            self.progress,
            [model.policy.optimizer],
            parameters_by_name(model.policy),
            lambda: groups_of(model.policy),
            self._times,
            epochs=self.minibatches.epoch + 1,
            # their value loss is the mean squared error, ours half of it
            coefficients={"value": 2 * float(model.vf_coef), "entropy": float(model.ent_coef)},
        )
        self.minibatches.record_ends()

    def _emit_rest(self) -> None:
        """Record the minibatches that are done, and emit the rollouts whose event is missing."""
        if self._rollout_event is None and self._rollouts:
            self._session.attempt(lambda listener: listener._emit_rollouts(), self)
        self._session.attempt(lambda minibatches: minibatches.record(), self.minibatches)
        self._rollouts, self._rollout_event = [], None

    def _emit_rollouts(self) -> None:
        """Emit what was collected for a record."""
        hooks, model, recorder, progress = self._hooks, self._model, self.recorder, self.progress
        axes = {"update": progress.update, "env_step": progress.env_step}
        event = rollout_event(model, self._rollouts, self._heads, recorder.states(), **axes)
        self._rollout_event = self.minibatches.rollout = event
        hooks.emit(event)
        if hooks.wants(RecurrentForward):
            recurrent = recurrent_event(model.policy, recorder, max(1, model.n_envs // 4))
            if recurrent is not None:
                hooks.emit(recurrent)
        episodes = rollout_episodes(self._rollouts, progress.env_step)
        if episodes is not None:
            hooks.emit(episodes)

    def _prepare_before_update(self) -> None:
        """Keep the last rollout's inputs, which the buffer will put in another order, until the first minibatch of its update."""
        hooks, model, last, recorder = self._hooks, self._model, self._rollout_event, self.recorder
        self._before_update = None
        if not (hooks.wants(BeforeUpdate) or hooks.wants(AfterUpdate)) or last is None:
            return
        if len(self._rollouts) > 1:
            axes = {"update": last.update, "env_step": last.env_step}
            last = rollout_event(model, self._rollouts[-1:], self._heads, recorder.states(), **axes)
        inputs = stored_rollout(model.rollout_buffer)
        replay = CallbackReplay(model, self._heads, last, inputs, recorder.states(after=True))
        stored = Memory.stored(model.rollout_buffer, model.device)
        passes = CollectionPasses(
            model,
            self._heads,
            inputs,
            acted=self._rollouts[-1].steps.acted,
            stored=recorder.first_memory if stored is None else stored,
            received=recorder.first_memory,
            after=recorder.recurrent_steps[0].after if recorder.recurrent_steps else None,
            older=self._older_weights,
        )
        modes = tuple([module.training for module in model.policy.modules()])
        self._before_update = partial(self._emit_before_update, last, replay, passes, modes)

    def _first_minibatch_comes(self, *_: Any) -> None:
        """A program may have set other weights since the rollout ended: those that it trains now begin the update."""
        emit, self._before_update = self._before_update, None
        if emit is not None:
            emit()

    def _emit_before_update(
        self, last: RolloutEnd, replay: CallbackReplay, passes: CollectionPasses, modes: tuple[bool, ...]
    ) -> None:
        """Emit the replay before the first step of the update, with the modes in which the policy has acted."""
        policy = self._model.policy
        self._replay, self._older_weights = replay, copied_weights(policy)
        self._hooks.emit(BeforeUpdate(last.update, replay, passes.event(last, self._model.device), policy, modes))

    def _collecting_taps(self) -> list[Remover]:
        """Taps on what is called while a rollout is collected."""
        model, recorder = self._model, self.recorder
        taps = [
            self._listen(model.rollout_buffer, "compute_returns_and_advantage", self._keep_last_values),
            *recorder.environment_taps(self._listen),
        ]
        if hasattr(model.policy, "lstm_actor"):
            taps.insert(0, self._listen(model.policy.lstm_actor, "forward", recorder.after_lstm))
        clipping = listen_to_clipping(self.minibatches, self._session.failed)
        return taps if clipping is None else [*taps, clipping]

    def _update_taps(self) -> list[Remover]:
        """Taps on what is called while minibatches are learned from."""
        model, minibatches = self._model, self.minibatches
        policy, buffer = model.policy, model.rollout_buffer
        self._optimizer = None
        self._follow_optimizer()
        taps = [
            self._listen(buffer, "get", self._first_minibatch_comes),
            self._listen(buffer, "_get_samples", self._first_minibatch_comes),
            self._listen(buffer, "get", minibatches.after_pass),
            self._listen(buffer, "_get_samples", minibatches.after_samples),
            self._listen(buffer, "_get_samples", self._follow_optimizer),
            self._listen(policy, "evaluate_actions", minibatches.after_evaluation),
            lambda: self._stop_following(),
        ]
        if self._hooks.wants(TrunkBackward):
            trunk = TrunkListener(policy, self._heads, self._hooks, minibatches.place, self._session.attempt)
            for head, network in {"actor": policy.action_net, "critic": policy.value_net}.items():
                taps.append(self._listen(network, "forward", partial(trunk.after_head, head)))
            if groups_of(policy).get("shared"):
                taps.append(self._listen(policy.features_extractor, "forward", trunk.after_features))
        if not minibatches.sees_clipping:
            minibatches.when_clipping_is_seen = self._listen(policy, "parameters", minibatches.after_parameters)
            taps.append(minibatches.when_clipping_is_seen)
        return taps

    def _follow_optimizer(self, *_: Any) -> None:
        """Listen to the steps of the policy's optimizer, which may be another object than in the last minibatch."""
        optimizer = self._model.policy.optimizer
        if optimizer is not self._optimizer:
            self._stop_following()
            self._optimizer = optimizer
            self._stop_following = optimizer.register_step_post_hook(self._after_optimizer_step).remove

    def _keep_last_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any) -> None:
        self._last_values = kwargs["last_values"] if "last_values" in kwargs else args[0]

    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            self.minibatches.after_optimizer_step(optimizer)
        except Exception as error:  # a bug of ours must not reach the trainer
            self._session.failed(self.minibatches.after_optimizer_step, error)

    def _listen(self, owner: object, name: str, listener: Listener) -> Remover:
        return listen(owner, name, listener, self._session.failed)


def _remove_all(taps: list[Remover]) -> None:
    while taps:
        taps.pop()()


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

    Raises:
        ValueError: for a number of updates below 1.
        TypeError: for something else than a `Telemetry`; from `learn`, for a model that is none of the four.
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
        self._listener: ModelListener | None = None
        self._log_copy: LogCopy | None = None
        self._progress: ModelProgress | None = None
        self._needs_steps = True
        self._recorder: UpdateRecorder | None = None
        self._minibatches: MinibatchListener | None = None

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
            self._progress, self._needs_steps = listener.progress, listener.recorder.needs_steps
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
                listener.recorder.after_step(self.locals)
            except Exception as error:  # a bug of ours must not reach the trainer
                self._session.failed(listener.recorder.after_step, error)
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
        if self._recorder is None:
            self.hooks.on(UpdateEnd, self._log_numbers)
            self._recorder = UpdateRecorder(self._session, self, self._joined)
            self._session.on_close(self.detach)
            self._session.search_on_failure(lambda: nonfinite_candidates(self.model))
        heads = ActionHeads(model.action_space, squash=bool(getattr(model.policy, "squash_output", False)))
        before = progress_of(model)
        if self._progress is not None:  # a callback that learns again: environment steps never go back
            before = self._progress._replace(env_step=max(self._progress.env_step, before.env_step))
        shared = self._updates_per_record or default_updates_per_record(model)
        self.hooks.emit(RunStart(config_of(model), facts_of(model, heads, shared), *before))
        self._log_copy = LogCopy(model.logger)
        self._listener = ModelListener(
            self._session,
            model,
            heads,
            self._recorder,
            before=before,
            updates_per_record=shared,
            needs_steps=self._needs_steps,
        )
        self._minibatches = self._listener.minibatches

    def _joined(self, blocks: Sequence[Any]) -> JoinedMinibatches:
        """Join the minibatches of the model that learns, or has learned last."""
        assert self._minibatches is not None
        return self._minibatches.joined(blocks)

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
