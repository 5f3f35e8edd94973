"""The current update: the trainer's data, joined into one record when the update ends.

The recorder listens to the hooks of the bundled trainer and of loops that emit events. Adapters call `UpdateRecorder.minibatch`
with rows in their own format, and explain the format once per update. `minibatch` only keeps references. Between two minibatches
the caches hold the trainer's code, so a line takes three to six times as long as in a loop over all rows after the update.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from esper_telemetry.core.clock import PhaseTimes
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.rate_schedule import rate_fields
from esper_telemetry.core.record import Level
from esper_telemetry.events import (
    BackwardEnd,
    EpisodeEnd,
    EvaluationEnd,
    MinibatchEnd,
    RecurrentForward,
    Remover,
    Rollback,
    RolloutEnd,
    RunStart,
    TrunkBackward,
    UpdateEnd,
    UpdateStart,
)
from esper_telemetry.metrics.episodes import evaluation_stats
from esper_telemetry.recording.probes import MAX_TRAVELLING_ENTRIES, GradientProbe, ReplayProbe, TimedListener
from esper_telemetry.recording.step_probe import StepProbe
from esper_telemetry.session import TelemetrySession
from esper_telemetry.updates.equation_checks import collection_checks
from esper_telemetry.updates.extensions import (
    CheckpointedSource,
    EventSource,
    ExtendedSource,
    SearchedSource,
    SupportsProgress,
    UpdateExtension,
    update_extensions,
)
from esper_telemetry.updates.failure import Candidate, of_backward, of_minibatches, of_rollout
from esper_telemetry.updates.groups import gradient_sample
from esper_telemetry.updates.joining import (
    RolloutHistory,
    TrunkGradients,
    collected_rows,
    joined_minibatches,
    layers_of,
    stacked_backwards,
    without_critic,
)
from esper_telemetry.updates.update import (
    CollectedRows,
    Episodes,
    GradientSample,
    JoinedMinibatches,
    Layer,
    RolloutContext,
    TrainingProgress,
    Update,
)

JoinRows: TypeAlias = Callable[[Sequence[Any]], JoinedMinibatches]
"""Joins the rows of an update's minibatches, of which there is at least one."""

RECENT_EPISODES = 100
"""Episodes over which `episode/return_mean_100` is the mean."""

MAX_ROLLOUT_STEPS = 1 << 24
"""A number larger than the steps of any rollout, so that ends of a later rollout get larger numbers."""

MAX_EVIDENCE_ENTRIES = 1 << 22
"""Largest number of entries of a gradient that DEBUG shows layer by layer."""

PROGRESS_SECONDS = 0.5
"""Shortest time between two events about the current update; `watch` redraws its screen at this interval."""

MAX_FEATURE_ROWS = 512
"""Rows of features that suffice to estimate their rank (Moalla 2024)."""


class UpdateRecorder:
    """Collects the data of the current update, and submits them when it ends.

    Tensors do not change until the update ends, so only references are kept until then. Hooks of a shared trunk are added when
    `RunStart` shows that the run has one.

    Args:
        telemetry: receives the updates, at a level above OFF.
        source: emits the events. The checkpoints of a `CheckpointedSource` keep what later updates are compared with.
        join: joins the minibatches of a source that passes rows in its own format to `minibatch`, instead of emitting `MinibatchEnd`.

    Attributes:
        hooks: of the source.
    """

    def __init__(self, telemetry: TelemetrySession, source: EventSource, join: JoinRows | None = None) -> None:
        self._telemetry = telemetry
        self.hooks, self._source = source.hooks, source
        contained = partial(TimedListener, telemetry.clock, source.hooks, telemetry.attempt)
        self._replay_probe = ReplayProbe(telemetry, contained())
        self._gradient_probe = GradientProbe(contained())
        self._step_probe = StepProbe(telemetry, contained())
        self._listener = listener = TimedListener(telemetry.clock, source.hooks, telemetry.guard)
        self._history = RolloutHistory()
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_EPISODES)
        self._layers: tuple[Layer, ...] = ()
        self._features: Tensor | None = None
        self._env_step = 0
        self._collected: int | None = None
        self._waits_for: int | None = None  # update that has begun without its rollout
        self._ended = time.perf_counter()
        self._last_backward: BackwardEnd | None = None
        self._listens_to_trunk = self._keeps_critic = self._sampled = self._begun = False
        self._rollouts = listener.keep(RolloutEnd)
        self._episodes = listener.keep(EpisodeEnd)
        kinds = (*update_extensions(), *(source.extensions if isinstance(source, ExtendedSource) else ()))
        self._extensions: list[tuple[type[UpdateExtension], list[Any]]] = [(kind, listener.keep(kind.event_type)) for kind in kinds]
        self._progress_at = time.monotonic()
        for kind, events in self._extensions:
            if issubclass(kind, SupportsProgress) and telemetry.level >= Level.NORMAL:
                listener.untimed(kind.event_type, partial(self._follow, kind, events))
        self._join = join
        self._rows: list[Any] = listener.keep(MinibatchEnd, late=True) if join is None else []
        self._backwards = listener.keep(BackwardEnd, late=True)
        self._trunk: list[TrunkGradients] = []
        listener.on(RunStart, self._start)
        listener.on(RolloutEnd, self._begin)
        listener.on(UpdateStart, self._begin)
        listener.on(UpdateEnd, self._end)
        listener.on(EvaluationEnd, self._evaluated)
        listener.on(Rollback, self._rolled_back)
        telemetry.expect_updates(candidates=self.nonfinite_candidates, open_update=self.take)
        self._leave_checkpoints: Remover = lambda: None
        if isinstance(source, CheckpointedSource):
            self._leave_checkpoints = source.checkpointables.join("telemetry", self)

    def stop(self) -> None:
        """Listen to nothing any more."""
        self._leave_checkpoints()
        for part in (self._listener, self._replay_probe, self._gradient_probe, self._step_probe):
            part.stop()

    def minibatch(self, row: Any) -> None:
        """Keep a minibatch until the update ends."""
        self._rows.append(row)

    def end(
        self,
        progress: tuple[int, int, int],
        optimizers: Sequence[Optimizer],
        parameters: Mapping[str, Tensor],
        groups: Callable[[], Mapping[str, Sequence[str]]],
        times: PhaseTimes,
        **fields: Any,
    ) -> None:
        """Emit `UpdateEnd`, at which the record is written.

        Args:
            progress: update, environment steps and optimizer steps so far.
            optimizers: of the trainer. The first one gives the learning rate and beta2. Without any, `fields` have the rate.
            parameters: by name.
            groups: returns names of parameters by part of the network.
            times: of the phases.
            fields: further fields of `UpdateEnd`, which take precedence over the optimizers' values.
        """
        seconds, cpu_seconds = times.take()
        known = {**(rate_fields(optimizers, parameters, groups) if optimizers else {}), **fields}
        self.hooks.emit(UpdateEnd(*progress, seconds=seconds, cpu_seconds=cpu_seconds, **known))

    def take(self, progress: TrainingProgress | None = None) -> Update:
        """Return the data of the update since the last call."""
        try:
            return self._taken(progress)
        finally:
            self._drop_open_update()

    def _taken(self, progress: TrainingProgress | None) -> Update:
        self._telemetry.attempt(lambda probe: probe.finish(), self._step_probe)
        rollout = self._rollouts[-1] if self._rollouts else None
        minibatches = self._joined()
        if minibatches is not None and self._sampled:
            self._telemetry.attempt(self._replay_probe.after_minibatches, minibatches)
        collected: CollectedRows | None = None
        rows = None if minibatches is None else minibatches.rows
        if self._sampled and rollout is not None and rows is not None:
            collected = collected_rows(rollout, rows)
        compared: list[tuple[RolloutEnd, RolloutContext]] = []
        if rollout is not None:
            categorical = {} if minibatches is None else minibatches.logits
            take = partial(self._history.take, categorical=categorical, layers=self._layers, sampled=self._sampled)
            compares = self._telemetry.level > Level.MINIMAL
            self._telemetry.attempt(lambda event: compared.append(take(event, compared=compares)), rollout)
        trimmed, context = compared[0] if compared else (None, RolloutContext())
        if self._backwards:
            self._last_backward = self._backwards[-1]
        return Update(
            rollout=trimmed,
            context=context,
            episodes=self._take_episodes(progress),
            minibatches=minibatches,
            features=None if minibatches is None else self._features,
            collected=collected,
            gradients=stacked_backwards(self._backwards, self._trunk),
            sample=self._take_sample(),
            replay=self._replay_probe.take(),
            step=self._step_probe.take(),
            progress=progress,
            extensions=self._take_extensions(),
            sampled=self._sampled,
            origin=next((one.words for one in self._origins()), ""),
        )

    def _origins(self) -> list[Candidate]:
        """The first variable that was not finite, if the source searches for it and has found one."""
        origin = self._source.origin if isinstance(self._source, SearchedSource) else None
        return [] if origin is None else [origin]

    def state_dict(self) -> dict[str, Any]:
        """Return what the next update is compared with. When this returns, the records of all previous updates are in the journal.

        Averages and baselines are not included: they are read from the journal.
        """
        return {
            "counts": self._telemetry.state_dict(),
            "recent": list(self._recent),
            "rollouts": self._history.state_dict(),
            "sampling": self._telemetry.sampling.state(),
            "close_look": self._gradient_probe.state_dict(),
            "looks": self._replay_probe.samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._telemetry.load_state_dict(state["counts"])
        self._recent = deque(state["recent"], maxlen=RECENT_EPISODES)
        self._history.load_state_dict(state["rollouts"])
        if "sampling" in state:
            self._telemetry.sampling.restore(state["sampling"])
            self._gradient_probe.load_state_dict(state["close_look"])
        self._replay_probe.samples = state.get("looks", 0)

    def nonfinite_candidates(self) -> Iterator[Candidate]:
        """Yield the tensors of the current update in forward order; between updates, the current parameters."""
        yield from self._origins()
        for rollout in self._rollouts[-1:]:
            yield from of_rollout(rollout)
        minibatches = self._joined()
        if minibatches is not None:
            yield from of_minibatches(minibatches)
        backward = self._backwards[-1] if self._backwards else self._last_backward
        if backward is not None:
            yield from of_backward(backward)

    def _start(self, event: RunStart) -> None:
        """Announce the run with the trainer's config and facts; listen to events that only such runs have."""
        if event.update is not None:
            counts = {"update": event.update, "env_step": event.env_step, "gradient_step": event.gradient_step}
            self._telemetry.load_state_dict({name: count or 0 for name, count in counts.items()})
            self._env_step = event.env_step or 0
        self._ended = time.perf_counter()
        if self._join is not None:  # rows that come before their rollout
            self._drop_minibatches()
        self._telemetry.start(config=event.config, facts=event.facts)
        facts = Facts.of(event.facts)
        self._step_probe.precision = facts.precision
        self._step_probe.forget()
        if facts.groups.get("shared") and not self._listens_to_trunk:
            self._listener.on(TrunkBackward, self._keep_trunk_gradients)
            self._listens_to_trunk = True
        # if values are clipped, NORMAL measures the critic's change in every update
        level, clips_values = self._telemetry.level, facts.clip_value is not None
        self._keeps_critic = level >= Level.DEBUG or (level is Level.NORMAL and clips_values)

    def _begin(self, event: RolloutEnd | UpdateStart) -> None:
        actions = event.actions if isinstance(event, UpdateStart) else None
        is_found = actions is not None or isinstance(event, RolloutEnd)
        if self._begun and is_found and self._waits_for == event.update:  # found while the update is under way
            self._waits_for = None
            if self._sampled and actions is not None:
                self._telemetry.measure(collection_checks(actions, self._telemetry.facts))
            return
        if self._begun:
            self._drop_minibatches()
        self._begun = True
        self._waits_for = None if is_found else event.update
        self._telemetry.begin_update(event.env_step)
        self._collected = event.update
        traced = not isinstance(event, UpdateStart) or event.traced
        self._sampled = self._telemetry.sampling.begin(raised=self._telemetry.escalated, possible=traced)
        if not traced:
            self._history.skip()
        if self._sampled:
            self._gradient_probe.begin(every_step=self._telemetry.update_level is Level.DEBUG)
            self._replay_probe.begin()
            self._step_probe.begin()
            if actions is not None:
                self._telemetry.measure(collection_checks(actions, self._telemetry.facts))
            self._listener.once(RecurrentForward, self._keep_layers)
            self._listener.once(TrunkBackward, self._keep_features)

    def _drop_open_update(self) -> None:
        """Forget the update's data, so that they do not join the next one."""
        self._layers, self._features, self._sampled = (), None, False
        self._drop_minibatches()
        lists: list[list[Any]] = [self._rollouts, self._episodes]
        for events in (*lists, *(events for _, events in self._extensions)):
            events.clear()

    def _drop_minibatches(self) -> None:
        """Forget the minibatches, such as those of an update that an exception ended."""
        self._begun = False
        lists: list[list[Any]] = [self._rows, self._backwards, self._trunk]
        for events in lists:
            events.clear()

    def _end(self, event: UpdateEnd) -> None:
        now = time.perf_counter()
        progress = TrainingProgress(
            event, event.env_step - self._env_step, now - self._ended, self._collected, self._telemetry.sampling.period
        )
        self._env_step, self._ended = event.env_step, now
        self._telemetry.guard(self._submit, progress)
        self._telemetry.flush(env_step=event.env_step, update=event.update, gradient_step=event.gradient_step)

    def _submit(self, progress: TrainingProgress) -> None:
        self._telemetry.submit(self.take(progress))

    def _evaluated(self, event: EvaluationEnd) -> None:
        """Add an evaluation to the record of the update that ends next."""
        self._telemetry.measure([partial(evaluation_stats, event.returns, event.lengths)])

    def _follow(self, kind: type[UpdateExtension], events: Sequence[Any], _: object) -> None:
        """Report the update under way, if the last report is old enough."""
        now = time.monotonic()
        if now - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = now
            self._telemetry.report_progress(partial(kind.from_events, tuple(events)))

    def _rolled_back(self, event: Rollback) -> None:
        """Announce a jump of weights and moments, so that detectors do not report it as a fault."""
        self._step_probe.forget()
        self._telemetry.notify_intervention("the update was undone", update=event.update, rollbacks=event.rollbacks)

    def _keep_trunk_gradients(self, event: TrunkBackward) -> None:
        self._trunk.append(TrunkGradients(event.actor, event.critic))  # not the event, whose outputs hold the graph

    def _keep_layers(self, event: RecurrentForward) -> None:
        self._layers = layers_of(event)

    def _keep_features(self, event: TrunkBackward) -> None:
        features = event.outputs[0].detach()
        self._features = (features if event.valid is None else features[event.valid])[:MAX_FEATURE_ROWS]

    def _joined(self) -> JoinedMinibatches | None:
        """The minibatches so far, with columns of the critic if they are measured; None without any."""
        if not self._rows:
            return None
        minibatches: list[JoinedMinibatches] = []
        with_critic = self._keeps_critic or self._sampled
        join = self._join or partial(joined_minibatches, with_critic=with_critic)
        self._telemetry.attempt(lambda rows: minibatches.append(join(rows)), self._rows)
        if not minibatches:
            return None
        return minibatches[0] if with_critic and minibatches[0].has_critic else without_critic(minibatches[0])

    def _take_sample(self) -> GradientSample | None:
        """Return the sample, if it is small enough to travel; larger ones are measured here and now."""
        sample = self._gradient_probe.take()
        if sample is None or sample.entries <= MAX_TRAVELLING_ENTRIES:
            return sample
        self._telemetry.measure(gradient_sample(sample, self._telemetry.update_level))
        shown = self._telemetry.update_level is Level.DEBUG and sum(sample.numels) <= MAX_EVIDENCE_ENTRIES
        return sample.for_evidence() if shown else None

    def _take_extensions(self) -> tuple[UpdateExtension, ...]:
        """Return the records of plugins; one that raises costs its record and a warning."""
        records: list[UpdateExtension] = []
        for kind, events in self._extensions:
            if events:
                pair = kind, tuple(events)
                self._telemetry.attempt(lambda pair: records.append(pair[0].from_events(pair[1])), pair)
        return tuple(records)

    def _take_episodes(self, progress: TrainingProgress | None) -> Episodes | None:
        """Return the episodes so far; None without a rollout before the first episode has ended, as environments may not be observed."""
        ended = bool(self._episodes or self._recent)
        if self._rollouts:
            update = self._rollouts[-1].update
        elif progress is not None and (ended or any(events for _, events in self._extensions)):
            update = progress.end.update
        else:
            return None
        returns = tuple([value for event in self._episodes for value in event.returns])
        lengths = tuple([value for event in self._episodes for value in event.lengths])
        times: Sequence[int] = [step for event in self._episodes for step in event.times]
        if len(times) != len(returns):
            times = range(len(returns))
        self._recent.extend(zip([MAX_ROLLOUT_STEPS * update + step for step in times], returns, strict=True))
        recent_ends = tuple([end for end, _ in self._recent]) if self._telemetry.ranks > 1 else None
        return Episodes(returns, lengths, tuple([value for _, value in self._recent]), recent_ends)
