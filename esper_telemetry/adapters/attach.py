"""`attach` makes telemetry listen to a source of events, the bundled trainer or an adapter, and turns each update into one record.

`watch_pair` measures a module beside the network that hosts it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from esper_telemetry.adapters.sampled import MAX_TRAVELLING_ENTRIES, GradientProbe, ReplayProbe, TimedListener
from esper_telemetry.adapters.step_checks import StepProbe
from esper_telemetry.core.metric import segment
from esper_telemetry.core.record import Level
from esper_telemetry.events import (
    BackwardEnd,
    BackwardsEnd,
    EpisodeEnd,
    EvaluationEnd,
    Hooks,
    MinibatchEnd,
    MinibatchesEnd,
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
from esper_telemetry.metrics.gradients.actor_critic import pair_gradients
from esper_telemetry.session import TelemetrySession
from esper_telemetry.telemetry import Telemetry, session_of
from esper_telemetry.updates.data import (
    CollectedRows,
    Episodes,
    GradientSample,
    Layer,
    RolloutContext,
    TrainingProgress,
    UpdateData,
)
from esper_telemetry.updates.equations import collection_checks
from esper_telemetry.updates.extensions import SupportsProgress, UpdateExtension, update_extensions
from esper_telemetry.updates.failure import Candidate, of_backward, of_minibatches, of_rollout
from esper_telemetry.updates.groups import gradient_sample
from esper_telemetry.updates.joining import (
    COLUMNS,
    CRITIC_COLUMNS,
    MinibatchBuffer,
    RolloutHistory,
    TrunkGradients,
    collected_rows,
    joined_backwards,
    joined_minibatches,
    layers_of,
    stacked_backwards,
    with_critic,
    without_critic,
)

__all__ = ["CheckpointedSource", "EventSource", "JoiningSource", "attach", "watch_pair"]

logger = logging.getLogger("esper_telemetry")

RECENT_EPISODES = 100
"""Episodes over which `episode/return_mean_100` is the mean."""

MAX_ROLLOUT_STEPS = 1 << 24
"""More steps than a rollout has, so that ends of a later rollout are larger numbers."""

MAX_EVIDENCE_ENTRIES = 1 << 22
"""Entries of a gradient up to which DEBUG shows it layer by layer."""

PROGRESS_SECONDS = 0.5
"""Shortest time between two events about an update under way: `watch` redraws its screen as often."""

MAX_FEATURE_ROWS = 512
"""Rows of features that are enough to tell their rank (Moalla 2024)."""


@runtime_checkable
class EventSource(Protocol):
    """Anything that emits events: a trainer, an environment, an adapter."""

    @property
    def hooks(self) -> Hooks:
        """Hooks that the events are emitted on."""


@runtime_checkable
class JoiningSource(Protocol):
    """A source that joins events itself, and need not build a `MinibatchEnd` or a `BackwardEnd` each time."""

    @property
    def joins(self) -> Collection[type]:
        """Types that it emits once per update: `MinibatchesEnd`, `BackwardsEnd` or both."""


@runtime_checkable
class ExtendedSource(Protocol):
    """A source that emits events beyond those of `events`, and says what joins them."""

    @property
    def extensions(self) -> Collection[type[UpdateExtension]]:
        """Classes that join its own events; those of plugins are asked as well."""


class Checkpointable(Protocol):
    """State that a checkpoint saves and loads."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""


class CheckpointRegistry(Protocol):
    """Objects that a source saves and loads with itself."""

    def join(self, name: str, member: Checkpointable) -> Remover:
        """Add an object; returns the function that ends this."""


@runtime_checkable
class CheckpointedSource(Protocol):
    """A source whose checkpoints keep the history of what is measured."""

    @property
    def checkpointables(self) -> CheckpointRegistry:
        """Objects that are saved and loaded with it."""


class UpdateCollector:
    """Collects the events of the update under way, and submits it when it ends.

    Hooks of minibatches only keep references, because tensors of an event do not change until the update ends. Everything is joined once,
    when it is over.

    Args:
        telemetry: receives the updates.
        source: emits the events; hooks of a shared trunk and of clipped values follow when `RunStart` shows that the run has them.
    """

    def __init__(self, telemetry: TelemetrySession, source: EventSource) -> None:
        self._telemetry = telemetry
        contained = partial(TimedListener, telemetry.clock, source.hooks, telemetry.attempt)
        self._replay_probe = ReplayProbe(telemetry, contained())
        self._gradient_probe = GradientProbe(contained())
        self._step_probe = StepProbe(telemetry, contained())
        self._for_this_update = contained()
        self._listener = listener = TimedListener(telemetry.clock, source.hooks)
        joins = source.joins if isinstance(source, JoiningSource) else ()
        self._history = RolloutHistory()
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_EPISODES)
        self._layers: tuple[Layer, ...] = ()
        self._features: Tensor | None = None
        self._env_step = 0
        self._collected: int | None = None
        self._ended = time.perf_counter()
        self._last_backwards: BackwardsEnd | None = None
        self._listens_to_trunk = self._keeps_critic = self._sampled = False
        self._rollouts = listener.keep(RolloutEnd)
        self._episodes = listener.keep(EpisodeEnd)
        kinds = (*update_extensions(), *(source.extensions if isinstance(source, ExtendedSource) else ()))
        self._extensions: list[tuple[type[UpdateExtension], list[Any]]] = [
            (kind, listener.keep(kind.event_type)) for kind in kinds
        ]
        self._progress_at = time.monotonic()
        for kind, events in self._extensions:
            if issubclass(kind, SupportsProgress) and telemetry.level >= Level.NORMAL:
                listener.untimed(kind.event_type, partial(self._follow, kind, events))
        self._columns, self._critic = MinibatchBuffer(COLUMNS), MinibatchBuffer(CRITIC_COLUMNS)
        self._minibatches = listener.keep(MinibatchesEnd)
        if MinibatchesEnd not in joins:
            listener.untimed(MinibatchEnd, self._columns.add)
        self._backwards = listener.keep(BackwardsEnd)
        self._passes = [] if BackwardsEnd in joins else listener.keep(BackwardEnd)
        self._trunk: list[TrunkGradients] = []
        listener.on(RunStart, self._start)
        listener.on(RolloutEnd, self._begin)
        listener.on(UpdateStart, self._begin)
        listener.on(UpdateEnd, self._end)
        listener.on(EvaluationEnd, self._evaluated)
        listener.on(Rollback, self._rolled_back)

    def stop(self) -> None:
        """Listen to nothing any more."""
        for part in (self._listener, self._replay_probe, self._gradient_probe, self._step_probe, self._for_this_update):
            part.stop()

    def take(self, progress: TrainingProgress | None = None) -> UpdateData:
        """Return the data of the update since the last call."""
        self._join()
        self._telemetry.attempt(lambda probe: probe.finish(), self._step_probe)
        rollout = self._rollouts[-1] if self._rollouts else None
        minibatches = self._minibatches[-1] if self._minibatches else None
        collected: CollectedRows | None = None
        if minibatches is not None:
            keeps_critic = self._keeps_critic or self._sampled
            minibatches = with_critic(minibatches, self._critic) if keeps_critic else without_critic(minibatches)
            rows = None if minibatches.values is None else minibatches.rows
            if self._sampled and rollout is not None and rows is not None:
                collected = collected_rows(rollout, rows)
        compared: list[tuple[RolloutEnd, RolloutContext]] = []
        if rollout is not None:
            categorical = {} if minibatches is None else minibatches.logits
            take = partial(self._history.take, categorical=categorical, layers=self._layers, sampled=self._sampled)
            self._telemetry.attempt(lambda event: compared.append(take(event)), rollout)
        trimmed, context = compared[0] if compared else (None, RolloutContext())
        update = UpdateData(
            rollout=trimmed,
            context=context,
            episodes=self._take_episodes(progress),
            minibatches=minibatches,
            features=None if minibatches is None else self._features,
            collected=collected,
            gradients=stacked_backwards(self._backwards[-1], self._trunk) if self._backwards else (),
            sample=self._take_sample(),
            replay=self._replay_probe.take(),
            step=self._step_probe.take(),
            progress=progress,
            extensions=self._take_extensions(),
            sampled=self._sampled,
        )
        self._layers, self._features, self._sampled = (), None, False
        self._for_this_update.stop()
        if self._backwards:
            self._last_backwards = self._backwards[-1]
        lists: list[list[Any]] = [self._rollouts, self._episodes, self._minibatches, self._trunk, self._backwards]
        for events in (*lists, *(events for _, events in self._extensions)):
            events.clear()
        return update

    def state_dict(self) -> dict[str, Any]:
        """Return what the next update is compared with; the journal holds the records of those before when this returns.

        Averages and baselines are not among it: they are read from the journal.
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
        """Go on from a saved state."""
        self._telemetry.load_state_dict(state["counts"])
        self._recent = deque(state["recent"], maxlen=RECENT_EPISODES)
        self._history.load_state_dict(state["rollouts"])
        if "sampling" in state:
            self._telemetry.sampling.restore(state["sampling"])
            self._gradient_probe.load_state_dict(state["close_look"])
        self._replay_probe.samples = state.get("looks", 0)

    def nonfinite_candidates(self) -> Iterator[Candidate]:
        """Yield the tensors of the update under way, in forward order; between updates the parameters that the last one left."""
        for rollout in self._rollouts[-1:]:
            yield from of_rollout(rollout)
        self._join()
        for minibatches in self._minibatches:
            yield from of_minibatches(minibatches)
        backwards = self._backwards[-1] if self._backwards else self._last_backwards
        if backwards is not None:
            yield from of_backward(backwards)

    def _start(self, event: RunStart) -> None:
        """Announce the run with the trainer's config and facts; listen to events that only such runs have."""
        if event.update is not None:
            counts = {"update": event.update, "env_step": event.env_step, "gradient_step": event.gradient_step}
            self._telemetry.load_state_dict({name: count or 0 for name, count in counts.items()})
            self._env_step = event.env_step or 0
        self._ended = time.perf_counter()
        self._telemetry.start(config=event.config, facts=event.facts)
        self._step_probe.precision = event.facts.get("precision")
        self._step_probe.forget()
        if event.facts.get("groups", {}).get("shared") and not self._listens_to_trunk:
            self._listener.on(TrunkBackward, self._keep_trunk_gradients)
            self._listens_to_trunk = True
        level = self._telemetry.level
        clips_values = (
            event.facts.get("clip_value") is not None
        )  # then NORMAL measures the critic's move in every update
        if (level >= Level.DEBUG or (level is Level.NORMAL and clips_values)) and not self._keeps_critic:
            self._listener.untimed(MinibatchEnd, self._critic.add)
            self._keeps_critic = True

    def _begin(self, event: RolloutEnd | UpdateStart) -> None:
        self._telemetry.begin_update(event.env_step)
        self._collected = event.update
        self._sampled = self._telemetry.sampling.begin(raised=self._telemetry.escalated)
        if self._sampled:
            if not self._keeps_critic:
                self._for_this_update.untimed(MinibatchEnd, self._critic.add)
            self._gradient_probe.begin(every_step=self._telemetry.update_level is Level.DEBUG)
            self._replay_probe.begin()
            self._step_probe.begin()
            if isinstance(event, UpdateStart) and event.actions is not None:
                self._telemetry.measure(collection_checks(event.actions, self._telemetry.facts))
            self._listener.once(RecurrentForward, self._keep_layers)
            self._listener.once(TrunkBackward, self._keep_features)

    def _end(self, event: UpdateEnd) -> None:
        """Submit the update."""
        now = time.perf_counter()
        progress = TrainingProgress(
            event, event.env_step - self._env_step, now - self._ended, self._collected, self._telemetry.sampling.period
        )
        self._env_step, self._ended = event.env_step, now
        self._telemetry.submit(self.take(progress))
        self._telemetry.flush(env_step=event.env_step, update=event.update, gradient_step=event.gradient_step)

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
        """Announce that weights and moments jump, so that no detector takes it for a fault."""
        self._step_probe.forget()
        self._telemetry.notify_intervention("the update was undone", update=event.update, rollbacks=event.rollbacks)

    def _keep_trunk_gradients(self, event: TrunkBackward) -> None:
        self._trunk.append(TrunkGradients(event.actor, event.critic))  # not the event, whose outputs hold the graph

    def _keep_layers(self, event: RecurrentForward) -> None:
        self._layers = layers_of(event)

    def _keep_features(self, event: TrunkBackward) -> None:
        features = event.outputs[0].detach()
        self._features = (features if event.valid is None else features[event.valid])[:MAX_FEATURE_ROWS]

    def _join(self) -> None:
        """Join the events that the source has not joined itself."""
        minibatches = joined_minibatches(self._columns)
        if minibatches is not None:
            self._minibatches.append(minibatches)
        if self._passes:
            self._backwards.append(joined_backwards(self._passes))
            self._passes.clear()

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


def attach(telemetry: Telemetry, source: EventSource) -> Remover:
    """Make `telemetry` observe and flush the events of `source`; returns the function that ends this.

    At level OFF nothing is registered, so the trainer does no extra work. See `JoiningSource` and `CheckpointedSource` for what a source
    may offer besides its hooks.

    Raises:
        TypeError: for anything else than a Telemetry and something that emits events.
    """
    emits = isinstance(source, EventSource) and isinstance(source.hooks, Hooks)
    if not isinstance(telemetry, Telemetry) or not emits:
        raise TypeError(
            f"attach takes a Telemetry and a trainer with hooks, got {type(telemetry).__name__} and {type(source).__name__}: "
            "telemetry.watch(model, optimizer) is for a loop of your own, TelemetryCallback for Stable-Baselines3"
        )
    if telemetry.level is Level.OFF:
        return lambda: None
    session = session_of(telemetry)
    collector = UpdateCollector(session, source)
    session.expect_updates(candidates=collector.nonfinite_candidates, open_update=collector.take)
    removers = [collector.stop]
    if isinstance(source, CheckpointedSource):
        removers.append(source.checkpointables.join("telemetry", collector))

    def stop() -> None:
        for remove in removers:
            remove()

    return stop


def watch_pair(telemetry: Telemetry, source: EventSource, name: str, *, module: nn.Module, host: nn.Module) -> Remover:
    """Compare the gradients of `module` and `host` at every optimizer step; returns the function that ends this.

    Use it if you doubt that a module learns: a head, a new block, an adapter, a gated branch. It costs a few tensor operations per step.
    Below NORMAL nothing is measured.

    Args:
        source: the bundled trainer, the callback of Stable-Baselines3 or TRL, or the result of `attach_runner`, `attach_loss`,
            `attach_trainer` or `Telemetry.watch`.
        name: of the pair, in the keys `grad/pair/{pair}/...`.
        module, host: parts of the network that one optimizer trains. If there is a gradient scaler, `upstream` has its scale.

    Raises:
        ValueError: one of them lacks parameters, or they share some.
    """
    own, hosts = ({id(parameter) for parameter in part.parameters()} for part in (module, host))
    if not own or not hosts:
        raise ValueError(f"pair {name!r} needs a module and a host with parameters, and one of them has none")
    if own & hosts:
        raise ValueError(f"pair {name!r} needs a module and a host apart, and they share {len(own & hosts)} parameters")
    if telemetry.level < Level.NORMAL:
        return lambda: None
    probe = PairProbe(telemetry, segment(name), module, host)
    listener = TimedListener(session_of(telemetry).clock, source.hooks)
    listener.on(BackwardEnd, probe.observe)
    handle = module.register_forward_hook(probe.follow)

    def stop() -> None:
        listener.stop()
        handle.remove()

    return stop


class PairProbe:
    """Observes one pair. The gradient at the module's output is the last that came before all gradients were there."""

    def __init__(self, telemetry: Telemetry, name: str, module: nn.Module, host: nn.Module) -> None:
        self._telemetry = telemetry
        self._name = name
        self._module, self._host = module, host
        self._upstream: Tensor | None = None
        self._warned = False

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "pair %r is not measured: its module and its host need parameters that the same optimizer trains",
                self._name,
            )

    def __reduce__(self) -> tuple[type[_NoProbe], tuple[()]]:
        return _NoProbe, ()

    def follow(self, _: nn.Module, __: object, output: object) -> None:
        """Wait for the gradient of an output."""

        def arrived(gradient: Tensor) -> None:
            self._upstream = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)

        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(arrived)

    @torch.no_grad()
    def observe(self, event: BackwardEnd) -> None:
        """Measure one step, unless another optimizer trains one of the parts."""
        upstream, self._upstream = self._upstream, None
        trained = {id(parameter) for parameter in event.parameters.values()}
        for part in (self._module, self._host):
            learning = {id(parameter) for parameter in part.parameters() if parameter.requires_grad}
            if learning and learning.isdisjoint(trained):
                self._warn()
                return
        own, hosts = (_gradients(event, part.parameters()) for part in (self._module, self._host))
        norms = (event.norms[list(own)], event.norms[list(hosts)])
        group = pair_gradients(self._name, list(own.values()), list(hosts.values()), norms=norms, upstream=upstream)
        self._telemetry.observe(group, epoch=event.epoch, step=event.step)


class _NoProbe:
    """Replacement of a `PairProbe` in copies and pickles of its module."""

    def follow(self, *_: object) -> None:
        """Do nothing."""


def _gradients(event: BackwardEnd, parameters: Iterable[Tensor]) -> Mapping[int, Tensor]:
    """Gradients of these parameters, as far as they exist, by their index in the event."""
    wanted = {id(parameter) for parameter in parameters}
    trained = {index: event.parameters[name] for index, name in enumerate(event.names)}
    return {index: p.grad for index, p in trained.items() if id(p) in wanted and p.grad is not None}
