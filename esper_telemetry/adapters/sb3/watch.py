"""One `learn` of one model, as events: from the taps on its policy, its buffer and its optimizer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from esper_telemetry.adapters.sb3.clipping import listen_to_clipping
from esper_telemetry.adapters.sb3.columns import Columns
from esper_telemetry.adapters.sb3.drawn import drawn_by
from esper_telemetry.adapters.sb3.facts import ModelProgress, coefficients_of, groups_of, optimizer_settings, trainable
from esper_telemetry.adapters.sb3.head_rows import HeadColumns
from esper_telemetry.adapters.sb3.heads import Heads
from esper_telemetry.adapters.sb3.minibatches import MinibatchListener
from esper_telemetry.adapters.sb3.mirror import Mirror
from esper_telemetry.adapters.sb3.passes import stored
from esper_telemetry.adapters.sb3.replay import CallbackReplay
from esper_telemetry.adapters.sb3.rollouts import (
    CollectedRollout,
    collected,
    episodes_event,
    recurrent_event,
    rollout_event,
)
from esper_telemetry.adapters.sb3.steps import Steps
from esper_telemetry.adapters.sb3.taps import Heard, listen
from esper_telemetry.adapters.sb3.trunk import CapturedTrunk
from esper_telemetry.events import (
    AfterUpdate,
    BeforeUpdate,
    Hooks,
    RecurrentForward,
    Remover,
    RolloutEnd,
    TrunkBackward,
    UpdateEnd,
)
from esper_telemetry.session import TelemetrySession


class ModelListener:
    """Follows a model until `leave`.

    Args:
        telemetry: is told what the model logs, and contains what goes wrong here.
        model: of Stable-Baselines3, ready to learn.
        heads: of its actions.
        hooks: where events go.
        before: what was done before, as axes are to count it.
        updates_per_record: how many updates share one.

    Attributes:
        progress: what is done by now.
    """

    def __init__(
        self,
        telemetry: TelemetrySession,
        model: Any,
        heads: Heads,
        hooks: Hooks,
        before: ModelProgress,
        *,
        updates_per_record: int,
    ) -> None:
        self.progress = before
        self._offset = before.env_step - model.num_timesteps
        self._telemetry, self._model, self._heads, self._hooks = telemetry, model, heads, hooks
        self._drawn = drawn_by(model.policy, heads)
        self._steps = Steps(model, self._drawn)
        self._minibatches = MinibatchListener(
            model, self._drawn, Columns(model, heads, self._drawn), HeadColumns(model.policy, heads), hooks
        )
        self._mirror = Mirror(model.logger)
        self._last_values: Tensor | None = None
        self._updates_per_record, self._updates = updates_per_record, 0
        self._rollouts: list[CollectedRollout] = []
        self._told: RolloutEnd | None = None
        self._seconds: dict[str, float] = defaultdict(float)
        self._cpu_seconds: dict[str, float] = defaultdict(float)
        self._replay: CallbackReplay | None = None
        self._learning = False
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        self._always: list[Remover] = self._collecting_taps()
        self._for_update: list[Remover] = []

    def rollout_begins(self) -> None:
        """The update before it, if there is one, is over."""
        self.update_ends()
        self._steps.begin()
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def stepped(self, given: Mapping[str, Any]) -> None:
        """The environments answered; `given` are the local variables of the collecting loop."""
        self._steps.stepped(given)

    def rollout_ends(self) -> None:
        """Prepares for the update that the rollout feeds; tells of the rollouts of a record before the last of its updates."""
        model, steps, before = self._model, self._steps, self.progress
        steps.finish()
        passed, cpu = self._passed()
        self._seconds["environment"] += steps.environment_seconds
        self._seconds["inference"] += max(0.0, passed - steps.environment_seconds)
        self._cpu_seconds["rollout"] += cpu
        self.progress = before._replace(update=before.update + 1, env_step=self._offset + model.num_timesteps)
        self._learning = True
        self._updates += 1
        assert self._last_values is not None
        self._rollouts.append(collected(model, steps, self._last_values))
        if self._updates == self._updates_per_record:
            self._tell_rollouts()
            self._tell_before()
        self._minibatches.begin(len(self._rollouts) - 1, trainable(model.policy))
        self._for_update = self._update_taps()

    def update_ends(self) -> None:
        """An update is over, and with it, perhaps, a record; nothing where none was under way."""
        if not self._learning:
            return
        self._learning = False
        self._drop(self._for_update)
        self._minibatches.finish()
        passed, cpu = self._passed()
        self._seconds["update"] += passed
        self._cpu_seconds["update"] += cpu
        self.progress = self.progress._replace(gradient_step=self.progress.gradient_step + self._minibatches.step)
        if self._updates == self._updates_per_record:
            self._record_ends()

    def training_ends(self) -> None:
        """Tells of what is left, also where a record wants more updates."""
        self.update_ends()
        if self._updates:
            self._record_ends()

    def leave(self) -> None:
        """Listens to nothing any more; what is open is told of first."""
        self._drop(self._for_update)
        self._drop(self._always)
        self._mirror.leave()
        self._tell_rest()

    def _record_ends(self) -> None:
        """Tells that the updates of a record are over."""
        self._tell_rest()
        self._updates, minibatches = 0, self._minibatches
        replay, self._replay = self._replay, None
        if replay is not None and self._hooks.wants(AfterUpdate):
            self._hooks.emit(AfterUpdate(self.progress.update, replay))
        self._telemetry.log(self._mirror.take())
        epochs, weights = minibatches.epoch + 1, coefficients_of(self._model)
        found = optimizer_settings(self._model.policy.optimizer)
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        processor, self._cpu_seconds = dict(self._cpu_seconds), defaultdict(float)
        end = UpdateEnd(*self.progress, found.learning_rate, seconds, epochs, weights, processor, found.beta2)
        self._hooks.emit(end)

    def _passed(self) -> tuple[float, float]:
        """Seconds of the wall and of the processor since the phase began; the next one begins."""
        before = self._began, self._cpu_began
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        return self._began - before[0], self._cpu_began - before[1]

    def _tell_rest(self) -> None:
        """Tells of the minibatches that are done, and of rollouts that nobody was told of."""
        if self._told is None and self._rollouts:
            self._telemetry.attempt(lambda watch: watch._tell_rollouts(), self)
        self._telemetry.attempt(lambda minibatches: minibatches.tell(self._told), self._minibatches)
        self._rollouts, self._told = [], None

    def _tell_rollouts(self) -> None:
        """Tells of what was collected for a record."""
        hooks, model, steps, progress = self._hooks, self._model, self._steps, self.progress
        places = {"update": progress.update, "env_step": progress.env_step}
        self._told = rollout_event(model, self._rollouts, self._heads, steps.states(), **places)
        hooks.emit(self._told)
        if hooks.wants(RecurrentForward):
            event = recurrent_event(model.policy, steps, max(1, model.n_envs // 4))
            if event is not None:
                hooks.emit(event)
        episodes = episodes_event(self._rollouts, progress.env_step)
        if episodes is not None:
            hooks.emit(episodes)

    def _tell_before(self) -> None:
        """Shows the last rollout before the first step of its update."""
        hooks, model, last = self._hooks, self._model, self._told
        if not (hooks.wants(BeforeUpdate) or hooks.wants(AfterUpdate)) or last is None:
            return
        if len(self._rollouts) > 1:
            places = {"update": last.update, "env_step": last.env_step}
            last = rollout_event(model, self._rollouts[-1:], self._heads, self._steps.states(), **places)
        self._replay = CallbackReplay(
            model, self._heads, last, stored(model.rollout_buffer), self._steps.states_after()
        )
        hooks.emit(BeforeUpdate(last.update, self._replay))

    def _collecting_taps(self) -> list[Remover]:
        """On what is called while a rollout is collected."""
        model, steps, listen = self._model, self._steps, self._listen
        taps = [
            listen(model.policy, "forward", steps.acted),
            listen(model.rollout_buffer, "compute_returns_and_advantage", self._keep_last_values),
        ]
        if hasattr(model.policy, "lstm_actor"):
            taps.insert(0, listen(model.policy.lstm_actor, "forward", steps.lstm))
        clipping = listen_to_clipping(self._minibatches, self._telemetry.failed)
        return taps if clipping is None else [*taps, clipping]

    def _update_taps(self) -> list[Remover]:
        """On what is called while minibatches are learned from."""
        model, minibatches, listen = self._model, self._minibatches, self._listen
        policy, buffer, optimizer = model.policy, model.rollout_buffer, model.policy.optimizer
        handle = optimizer.register_step_post_hook(self._optimizer_stepped)
        taps = [
            listen(buffer, "get", minibatches.passed),
            listen(buffer, "_get_samples", minibatches.given),
            listen(policy, "evaluate_actions", minibatches.evaluated),
            handle.remove,
            *self._trunk_taps(),
        ]
        return taps if minibatches.hears_clipping else [*taps, listen(policy, "parameters", minibatches.asked)]

    def _trunk_taps(self) -> list[Remover]:
        """On what lies between the trunk and the heads."""
        policy, minibatches = self._model.policy, self._minibatches
        if not self._hooks.wants(TrunkBackward):
            return []
        trunk = CapturedTrunk(
            policy, self._hooks, lambda: (max(minibatches.epoch, 0), minibatches.step), self._telemetry
        )
        heads = {"actor": policy.action_net, "critic": policy.value_net}
        taps = [self._listen(net, "forward", partial(trunk.head, which)) for which, net in heads.items()]
        if groups_of(policy).get("shared"):
            taps.append(self._listen(policy.features_extractor, "forward", trunk.extracted))
        return taps

    def _keep_last_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any) -> None:
        self._last_values = kwargs["last_values"] if "last_values" in kwargs else args[0]

    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            self._minibatches.stepped(optimizer)
        except Exception as error:  # whatever a bug raises
            self._telemetry.failed(self._minibatches.stepped, error)

    def _listen(self, owner: object, name: str, heard: Heard) -> Remover:
        """Calls `heard` after every call of that method of that object, and keeps to itself what it raises."""
        return listen(owner, name, heard, self._telemetry.failed)

    @staticmethod
    def _drop(taps: list[Callable[[], None]]) -> None:
        while taps:
            taps.pop()()
