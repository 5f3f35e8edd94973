"""`attach_runner`, which makes an RSL-RL runner emit events while it learns.

Every tap stands on an object that the runner holds, and all are removed when `learn` returns or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from esper_telemetry.adapters.columns import numbers_by_key
from esper_telemetry.adapters.rsl_rl.facts import config_of, facts_of, groups_of, nonfinite_candidates, parameters_of
from esper_telemetry.adapters.rsl_rl.minibatches import BatchesTap, StorageMinibatchListener
from esper_telemetry.adapters.rsl_rl.rollouts import StorageRolloutRecorder, recurrent_event
from esper_telemetry.adapters.taps import Listener, Tap, listen, listen_to_clipping
from esper_telemetry.core.clock import PhaseTimes
from esper_telemetry.core.record import Level
from esper_telemetry.events import Hooks, RecurrentForward, Remover, RolloutEnd, RunStart
from esper_telemetry.recording.recorder import UpdateRecorder
from esper_telemetry.telemetry import Telemetry, session_of
from esper_telemetry.updates.sources import ObservedSource
from esper_telemetry.updates.update import JoinedMinibatches

REQUIRED_ATTRIBUTES = ("actor", "critic", "storage", "optimizer", "clip_param", "compute_returns")
"""Attributes of an algorithm whose updates the adapter understands."""

GENERATORS = ("mini_batch_generator", "recurrent_mini_batch_generator")
"""Methods of a storage that give out its minibatches."""

PREFIX = "rsl_rl"
"""First segment of the keys of what RSL-RL logs itself."""


class RunnerListener:
    """Emits the events of a runner that learns, from `start` to `stop`.

    Args:
        runner: an `OnPolicyRunner` with PPO.

    Attributes:
        hooks: emits the events, also to listeners of your own.
    """

    def __init__(self, telemetry: Telemetry, runner: Any) -> None:
        self.hooks = Hooks()
        self._telemetry, self._session = telemetry, session_of(telemetry)
        self._runner, self._alg = runner, runner.alg
        # a runner keeps the number of its last update, from 0, which is 0 before the first one, too
        last = int(runner.current_learning_iteration)
        self._update = last + 1 if last > 0 or telemetry.state_dict().get("update", 0) == 1 else 0
        self._rollout_steps = runner.alg.storage.num_transitions_per_env * runner.alg.storage.num_envs
        self._ranks = int(getattr(runner, "gpu_world_size", 1))
        self._gradient_step = self._update * runner.alg.num_learning_epochs * runner.alg.num_mini_batches
        self._recorder = StorageRolloutRecorder(runner.alg, complete=self._update == 0)
        self._record = UpdateRecorder(self._session, self, self._joined)
        self._minibatches = StorageMinibatchListener(runner.alg, self._record)
        self._logged: dict[str, Any] = {}
        self._taps: list[Remover] = []
        self._update_taps: list[Remover] = []
        self._learned = False
        self._rollout: RolloutEnd | None = None
        self._times = PhaseTimes()

    @property
    def _env_step(self) -> int:
        steps: int = self._update * self._rollout_steps * self._ranks
        return steps

    def start(self, iterations: int | None) -> None:
        """The runner begins to learn for so many iterations; None where their number is not known."""
        self.stop()
        runner, alg, recorder = self._runner, self._alg, self._recorder
        total = None if iterations is None else self._update + iterations
        self.hooks.emit(
            RunStart(config_of(runner), facts_of(runner, total), self._update, self._env_step, self._gradient_step)
        )
        recorder.begin()
        self._times.begin()
        self._taps = [
            self._listen(alg, "act", recorder.after_action),
            self._listen(alg, "process_env_step", recorder.after_step),
            self._listen(alg.critic, "forward", recorder.after_values),
            self._listen(alg, "update", self._after_update),
            self._listen(runner.logger, "log", self._after_log),
            *[BatchesTap(alg.storage, name, self._after_batch, self._session.failed).remove for name in GENERATORS],
        ]
        clipping = listen_to_clipping(self._minibatches, self._session.failed)
        if clipping is not None:
            self._taps.append(clipping)

    def listen_to_writer(self) -> None:
        """Copy what RSL-RL's own writer receives, once there is one."""
        tap = self._listen(self._runner.logger, "init_logging_writer", self._after_writer)
        self._taps.append(tap)

    def add_scalar(self, tag: str, value: Any) -> None:
        """Add a number that RSL-RL logs to the record of the update under way."""
        self._logged[tag] = float(value)

    def stop(self) -> None:
        """Listen to nothing any more; emit what is open first."""
        _remove_all(self._update_taps)
        _remove_all(self._taps)
        if self._learned:
            self._session.attempt(lambda listener: listener._end_update(), self)
        self._rollout, self._learned = None, False

    def _after_batch(self, batch: Any) -> None:
        if self._rollout is None:
            self._begin_update()
        self._minibatches.after_batch(batch)

    def _begin_update(self) -> None:
        """Emit the rollout that is complete in the storage, and listen to the update."""
        alg, hooks, recorder = self._alg, self.hooks, self._recorder
        with self._session.clock:
            if self._learned:  # nobody has logged the update before
                self._end_update()
            self._times.end("rollout", environment=recorder.environment_seconds)
            self._update += 1
            self._rollout = rollout = recorder.event(update=self._update, env_step=self._env_step)
            hooks.emit(rollout)
            if hooks.wants(RecurrentForward):
                event = recurrent_event(alg, rollout.states)
                if event is not None:
                    hooks.emit(event)
            if rollout.ended.is_cpu:
                self._emit_episodes(rollout)
            minibatches = self._minibatches
            minibatches.begin()
            handle = alg.optimizer.register_step_post_hook(self._after_optimizer_step)
            self._update_taps = [
                self._listen(alg.actor, "get_output_log_prob", minibatches.after_log_probs),
                self._listen(alg.actor, "get_kl_divergence", minibatches.after_divergence),
                self._listen(alg.critic, "forward", minibatches.after_values),
                handle.remove,
            ]
            self._times.begin()

    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            self._minibatches.after_optimizer_step(optimizer)
        except Exception as error:  # a bug of ours must not reach the trainer
            self._session.failed(self._minibatches.after_optimizer_step, error)

    def _after_update(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The update is over; what RSL-RL logs of it comes next."""
        _remove_all(self._update_taps)
        if self._rollout is None:
            return
        with self._session.clock:
            self._times.end("update")
            if not self._rollout.ended.is_cpu:  # to read them before the update would wait for the device
                self._emit_episodes(self._rollout)
            self._rollout, self._learned = None, True
            self._gradient_step += self._minibatches.step
            self._recorder.begin()
            self._logged.update({f"Loss/{name}": value for name, value in result.items()})

    def _emit_episodes(self, rollout: RolloutEnd) -> None:
        episodes = self._recorder.episodes(rollout)
        if episodes is not None:
            self.hooks.emit(episodes)

    def _after_log(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if self._learned:
            with self._session.clock:
                self._end_update()
        self._times.begin()

    def _after_writer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        writer = self._runner.logger.writer
        if writer is not None:
            self._taps.append(self._listen(writer, "add_scalar", self._after_scalar))

    def _after_scalar(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        tag, value = (*args, *kwargs.values())[:2]
        if not tag.endswith("/time"):  # the same number over seconds
            self.add_scalar(tag, value)

    def _end_update(self) -> None:
        """Write the record of the update."""
        self._learned = False
        alg, minibatches = self._alg, self._minibatches
        rates = minibatches.learning_rates
        numbers = {
            **self._logged,
            **({"learning_rate/min": min(rates), "learning_rate/max": max(rates)} if rates else {}),
        }
        if minibatches.divergences:  # by which RSL-RL sets the rate, and which it does not log
            kls = torch.stack([rows.mean() for rows in minibatches.divergences]).tolist()
            numbers |= {"kl/mean": sum(kls) / len(kls), "kl/last": kls[-1]}
        self._logged = {}
        self._telemetry.log(numbers_by_key(PREFIX, numbers))
        mean_rate = {"learning_rate": sum(rates) / len(rates)} if rates else {}  # it may change with every step
        self._record.end(
            (self._update, self._env_step, self._gradient_step),
            [alg.optimizer],
            parameters_of(alg),
            lambda: groups_of(alg),
            self._times,
            epochs=alg.num_learning_epochs,
            # their value loss is the mean squared error, ours half of it
            coefficients={"value": 2 * float(alg.value_loss_coef), "entropy": float(alg.entropy_coef)},
            **mean_rate,
        )

    def _joined(self, rows: Sequence[Any]) -> JoinedMinibatches:
        return self._minibatches.joined(rows)

    def _listen(self, owner: object, name: str, listener: Listener) -> Remover:
        return listen(owner, name, listener, self._session.failed)


class LearnTap(Tap):
    """Stands before a runner's `learn`: calls `begin` with its arguments before it, and `end` after it, also where it raises."""

    def __init__(self, runner: Any, begin: Callable[[Any], object], end: Callable[[], object]) -> None:
        super().__init__(runner, "learn")
        self._begin, self._end = begin, end
        vars(runner)["learn"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method's result."""
        self._begin((*args, *kwargs.values())[:1])
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self._end()


def attach_runner(telemetry: Telemetry, runner: Any) -> ObservedSource:
    """Make `telemetry` record every update of an `OnPolicyRunner` with PPO; a call of the result ends this.

        runner = OnPolicyRunner(env, config, log_dir)
        attach_runner(telemetry, runner)
        runner.learn(1500)

    Nothing that the runner computes changes: weights are bit-identical. At level OFF nothing is installed.

    Raises:
        TypeError: for something else than a `Telemetry`, and for a runner whose algorithm is not PPO.
    """
    check_runner(runner)
    if not isinstance(telemetry, Telemetry):
        raise TypeError(f"attach_runner takes a Telemetry and a runner, got {type(telemetry).__name__}")
    if telemetry.level is Level.OFF:
        return ObservedSource(Hooks(), lambda: None)
    session = session_of(telemetry)
    listener = new_listener(telemetry, runner)

    def begin(arguments: tuple[Any, ...]) -> None:
        session.attempt(lambda one: one.start(int(arguments[0]) if arguments else None), listener)
        session.attempt(lambda one: one.listen_to_writer(), listener)

    tap = LearnTap(runner, begin, lambda: session.attempt(lambda one: one.stop(), listener))

    def detach() -> None:
        listener.stop()
        tap.remove()

    session.on_close(detach)
    return ObservedSource(listener.hooks, detach)


def new_listener(telemetry: Telemetry, runner: Any) -> RunnerListener:
    """Return a listener whose events `telemetry` receives."""
    listener = RunnerListener(telemetry, runner)
    session_of(telemetry).search_on_failure(lambda: nonfinite_candidates(runner.alg))
    return listener


def check_runner(runner: Any) -> None:
    """Raise TypeError for a runner whose algorithm is not PPO."""
    alg = getattr(runner, "alg", None)
    missing = [name for name in REQUIRED_ATTRIBUTES if not hasattr(alg, name)]
    if missing or not hasattr(runner, "logger"):
        raise TypeError(
            f"telemetry watches runners with PPO, got {type(runner).__name__} with {type(alg).__name__}, "
            f"which has no {missing[0] if missing else 'logger'}"
        )


def _remove_all(taps: list[Remover]) -> None:
    while taps:
        taps.pop()()
