"""Where events meet telemetry: `attach` makes it listen to whatever emits them, the bundled trainer or an adapter.

One update from its events: what happened is kept as it comes, taken as one snapshot, and flushed as one record.

A close look at one update in k: whole gradients and the optimizer's state, kept as copies.

Shows the policy its rollout once more, before and after the updates that are looked at closely.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from esper_telemetry.adapters.listener import TimedListener
from esper_telemetry.adapters.pairs import watch_pair as watch_pair
from esper_telemetry.core.record import Level
from esper_telemetry.events import (
    AfterUpdate,
    BackwardEnd,
    BackwardsEnd,
    BeforeUpdate,
    EpisodeEnd,
    EvaluationEnd,
    GrowthStep,
    MinibatchEnd,
    MinibatchesEnd,
    MinibatchStart,
    OptimizerStep,
    Outputs,
    RecurrentForward,
    Rollback,
    RolloutEnd,
    RunStart,
    TrunkBackward,
    UpdateEnd,
)
from esper_telemetry.events import Hooks as Hooks
from esper_telemetry.events import Remover as Remover
from esper_telemetry.metrics.episodes import evaluation_stats
from esper_telemetry.metrics.gradients.health import gradients_of
from esper_telemetry.metrics.optimizer import AdamState, adam_held, adam_state, flat, weight_norm
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.updates import groups as replayed
from esper_telemetry.updates.columns import (
    DetailJoining,
    Joining,
    Rollouts,
    TensorLeaf,
    gradient_parts,
    joined_gradients,
    joined_growth,
    layers_of,
)
from esper_telemetry.updates.data import (
    BackwardGradients,
    Details,
    Episodes,
    GradientSample,
    Layer,
    Minibatches,
    RolloutData,
    Snapshot,
    TrainingProgress,
)
from esper_telemetry.updates.failure import Candidate, of_backward, of_minibatches, of_rollout
from esper_telemetry.updates.groups import gradient_sample

SHARDS = 2
"""Parts of the first minibatch whose gradients tell noise from signal. Each is a pass of its own, and by far the dearest of a close look;
two are enough, because estimates are averaged over updates anyway."""

MOST_ENTRIES = 1 << 26
"""Numbers that are copied at most; of larger networks two minibatches are, besides what steps there are."""

MOST_TRAVELLING = 1 << 20
MOST_SENT = MOST_TRAVELLING
"""Numbers that may go to another process: four megabytes."""

BESIDES_STEPS = 8
"""Vectors as long as the gradient for which there is room besides those of the optimizer's steps, of which each has four."""


class CloseLook:
    """Looks at updates closely, when asked.

    Args:
        listener: registers its hooks.
    """

    def __init__(self, listener: TimedListener) -> None:
        self._listener = listener
        self._backward = listener.another()
        self._initial_norm: Tensor | None = None
        self._steps: Tensor | None = None
        self._clear()

    def begin(self, *, every_step: bool) -> None:
        """Looks at the update that begins now: at every step of the optimizer that there is room for, or the first one only."""
        self._listener.on(MinibatchStart, self._keep_shards)
        self._listener.on(TrunkBackward, self._keep_shared)
        self._backward.on(BackwardEnd, self._keep_gradient)
        if every_step:
            self._listener.on(OptimizerStep, self._keep_state)
        else:
            self._listener.once(OptimizerStep, self._keep_state)

    def take(self) -> GradientSample | None:
        """What was seen of the update; None where none was looked at."""
        self._stop_listening()
        if not self._minibatches and not self._states:
            return None
        sample = GradientSample(
            names=self._names,
            numels=self._numels,
            minibatches=tuple(self._minibatches),
            shards=self._shards,
            samples=self._samples,
            actor=self._actor,
            critic=self._critic,
            states=tuple(self._states),
            state_names=self._state_names,
            previous_steps=self._steps,
            initial_norm=self._initial_norm,
        )
        if self._states:
            self._steps = self._states[-1].step
        self._clear()
        return sample

    def state_dict(self) -> dict[str, Tensor | None]:
        """What later looks are compared with."""
        return {"initial_norm": self._initial_norm, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        """Goes on from a saved state."""
        self._initial_norm, self._steps = state["initial_norm"], state["steps"]

    def stop(self) -> None:
        """Looks at nothing any more."""
        self._stop_listening()
        self._clear()

    def _stop_listening(self) -> None:
        self._listener.stop()
        self._backward.stop()

    def _clear(self) -> None:
        self._names: tuple[str, ...] = ()
        self._numels: tuple[int, ...] = ()
        self._minibatches: list[Tensor] = []
        self._shards: tuple[Tensor, ...] = ()
        self._samples: tuple[int, ...] = ()
        self._actor: Tensor | None = None
        self._critic: Tensor | None = None
        self._states: list[AdamState] = []
        self._state_names: tuple[str, ...] = ()
        self._stride = 1

    def _keep_shards(self, event: MinibatchStart) -> None:
        shards = event.shards(SHARDS)
        self._shards = tuple(shard.gradient for shard in shards)
        self._samples = tuple(shard.samples for shard in shards)

    def _keep_shared(self, event: TrunkBackward) -> None:
        """Takes the two losses' gradients on to the parameters that they share, through the first minibatch's graph."""
        shared = [parameter for parameter in event.shared if parameter.requires_grad]
        if event.step > 0 or not shared or len(event.outputs) != 1 or not event.outputs[0].requires_grad:
            return
        self._actor = _through(event.outputs[0], event.actor, shared)
        self._critic = _through(event.outputs[0], event.critic, shared)

    @torch.no_grad()
    def _keep_gradient(self, event: BackwardEnd) -> None:
        """Copies the gradients of the first epoch's minibatches, as far as they are of the same parameters."""
        if self._initial_norm is None:
            self._initial_norm = weight_norm(list(event.parameters.values()))
        if event.epoch > 0:
            self._backward.stop()
            return
        if not event.names:
            return
        gradients = gradients_of([event.parameters[name] for name in event.names])
        numels = tuple(gradient.numel() for gradient in gradients)
        if not self._minibatches:
            self._names, self._numels = event.names, numels
        same = (event.names, numels) == (self._names, self._numels) and len(numels) == len(event.names)
        if same and self._fits(len(self._minibatches) + 1, least=2):
            self._minibatches.append(flat(gradients))

    @torch.no_grad()
    def _keep_state(self, event: OptimizerStep) -> None:
        if not self._due(event.step):
            return
        held = adam_held(event.optimizer)
        if held and not self._states:
            named = {id(parameter): name for name, parameter in event.parameters.items()}
            names = [named.get(id(entry.parameter), f"parameter_{place}") for place, entry in enumerate(held)]
            self._state_names = tuple(names)
        if len(held) == len(self._state_names) > 0:
            self._states.append(adam_state(held))

    def _due(self, step: int) -> bool:
        """Whether this step is kept: every one, or where there is no room for so many every second, fourth and so on from the first."""
        vectors = BESIDES_STEPS + 4 * len(self._states) + 4
        if self._states and step % self._stride == 0 and vectors * sum(self._numels) > MOST_TRAVELLING:
            del self._states[1::2]
            self._stride *= 2
        return step % self._stride == 0

    def _fits(self, vectors: int, *, least: int) -> bool:
        return vectors <= least or vectors * sum(self._numels) <= MOST_ENTRIES


def _through(output: Tensor, gradient: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """Gradient [s] of a loss with respect to parameters below an output, of which the loss has this gradient."""
    found = torch.autograd.grad(
        output, list(parameters), grad_outputs=gradient, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return flat(found)


CAPACITY_EVERY = 10
"""Looks from one at which a copy of the network is trained to the next."""


class Replays:
    """Observes the replays of updates, when asked.

    Attributes:
        looks: how many there were; a checkpoint keeps it.
    """

    def __init__(self, telemetry: Telemetry, listener: TimedListener) -> None:
        self._telemetry = telemetry
        self._listener = listener
        self.looks = 0
        self._stored: Outputs | None = None
        self._before: Outputs | None = None

    def begin(self) -> None:
        """Looks at the update that begins now."""
        self.stop()
        self._listener.on(BeforeUpdate, self._look)
        self._listener.on(AfterUpdate, self._look_again)

    def stop(self) -> None:
        """Looks at nothing any more."""
        self._listener.stop()
        self._stored = self._before = None

    def _look(self, event: BeforeUpdate) -> None:
        self._stored, self._before = event.policy.stored(), event.policy.outputs()
        self._telemetry.measure(replayed.before_update(self._stored, self._before))
        self._telemetry.measure(replayed.responses(event.policy.activations(), self._telemetry.update_level))
        self._telemetry.measure(replayed.through_time(event.policy))
        if self._telemetry.update_level >= Level.DEBUG and self.looks % CAPACITY_EVERY == 0:
            self._telemetry.measure(replayed.capacity(event.policy.copy()))
        self.looks += 1

    def _look_again(self, event: AfterUpdate) -> None:
        if self._stored is not None and self._before is not None:
            self._telemetry.measure(replayed.after_update(self._stored, self._before, event.policy.outputs()))
        self.stop()


RECENT = 100
"""Episodes over which `episode/return_mean_100` is the mean."""

MOST_STEPS = 1 << 24
"""More than a rollout has: what ends in a later rollout ended later."""

MOST_SHOWN = 1 << 22
"""Entries of a gradient up to which DEBUG shows it layer by layer."""

MOST_ROWS = 512
"""Rows of features that are enough to tell their rank (Moalla 2024)."""


class Update:
    """The update under way.

    The hooks of minibatches only keep references: tensors of an event do not change until the update ends. Everything is
    joined once, when it is over.
    """

    def __init__(
        self, telemetry: Telemetry, replays: Replays, close_look: CloseLook, for_this_update: TimedListener
    ) -> None:
        self._telemetry = telemetry
        self._replays = replays
        self._close_look = close_look
        self._for_this_update = for_this_update
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._recent_ends: deque[float] = deque(maxlen=RECENT)
        self._before = Rollouts()
        self._layers: tuple[Layer, ...] = ()
        self._features: Tensor | None = None
        self._env_step = 0
        self._collected: int | None = None
        self._ended = time.perf_counter()
        self._last_backwards: BackwardsEnd | None = None
        self._details = DetailJoining()
        self._hears_trunk = self._hears_details = self._looks_closely = False

    def listen(self, listener: TimedListener, *, joined: Collection[type]) -> None:
        """Keeps what happens from now on; `joined` says what the source joins itself."""
        self._rollouts = listener.keep(RolloutEnd)
        self._episodes = listener.keep(EpisodeEnd)
        self._growth = listener.keep(GrowthStep)
        self._joining = Joining()
        self._minibatches = listener.keep(MinibatchesEnd)
        if MinibatchesEnd not in joined:
            listener.untimed(MinibatchEnd, self._joining.add)
        self._backwards = listener.keep(BackwardsEnd)
        self._passes = [] if BackwardsEnd in joined else listener.keep(BackwardEnd)
        self._leaves: list[TensorLeaf] = []
        self._listener = listener
        listener.on(RunStart, self.start)
        listener.on(RolloutEnd, self._begin)
        listener.on(UpdateEnd, self.end)
        listener.on(EvaluationEnd, self._evaluated)
        listener.on(Rollback, self._rolled_back)

    def start(self, event: RunStart) -> None:
        """Announces the run with the trainer's config and facts; listens to what only such runs have."""
        if event.update is not None:
            counts = {"update": event.update, "env_step": event.env_step, "gradient_step": event.gradient_step}
            self._telemetry.load_state_dict({name: count or 0 for name, count in counts.items()})
            self._env_step = event.env_step or 0
        self._ended = time.perf_counter()
        self._telemetry.start(config=event.config, facts=event.facts)
        if event.facts.get("groups", {}).get("shared") and not self._hears_trunk:
            self._listener.on(TrunkBackward, self._keep_leaf)
            self._hears_trunk = True
        if self._wants_details(event.facts) and not self._hears_details:
            self._hear_details(self._listener)
            self._hears_details = True

    def _begin(self, event: RolloutEnd) -> None:
        self._telemetry.begin_update(event.env_step)
        self._collected = event.update
        raised = self._telemetry.escalated
        self._looks_closely = self._telemetry.sampling.begin(raised=raised)
        if self._looks_closely:
            if not self._hears_details:
                self._hear_details(self._for_this_update)
            self._close_look.begin(every_step=self._telemetry.update_level is Level.DEBUG)
            self._replays.begin()
            self._listener.once(RecurrentForward, self._keep_layers)
            self._listener.once(TrunkBackward, self._keep_features)

    def _evaluated(self, event: EvaluationEnd) -> None:
        """Joins the record of the update that ends next."""
        self._telemetry.measure([partial(evaluation_stats, event.returns, event.lengths)])

    def _rolled_back(self, event: Rollback) -> None:
        """Weights and moments jump: that is no surprise."""
        self._telemetry.notify_intervention("the update was undone", update=event.update, rollbacks=event.rollbacks)

    def _keep_leaf(self, event: TrunkBackward) -> None:
        """Keeps the two gradients and not the event, whose outputs hold the graph."""
        self._leaves.append(TensorLeaf(event.actor, event.critic))

    def _keep_layers(self, event: RecurrentForward) -> None:
        """Keeps the weights as they are before the update."""
        self._layers = layers_of(event)

    def _keep_features(self, event: TrunkBackward) -> None:
        """Keeps what the policy's heads read before the first step."""
        self._features = event.outputs[0].detach()[:MOST_ROWS]

    def end(self, event: UpdateEnd) -> None:
        """Writes the update's record."""
        now = time.perf_counter()
        progress = TrainingProgress(
            update=event.update,
            env_steps=event.env_step - self._env_step,
            learning_rate=event.learning_rate,
            elapsed=now - self._ended,
            seconds=event.seconds,
            coefficients=event.coefficients,
            collected=self._collected,
            cpu_seconds=event.cpu_seconds,
            beta2=event.beta2,
            sample_every=self._telemetry.sampling.period,
        )
        self._env_step, self._ended = event.env_step, now
        self._telemetry.submit(self.take(progress))
        self._telemetry.flush(env_step=event.env_step, update=event.update, gradient_step=event.gradient_step)

    def take(self, progress: TrainingProgress | None = None) -> Snapshot:
        """What has happened since the last call; nothing is left behind."""
        self._join()
        rollouts: list[RolloutData] = []
        self._telemetry.attempt(self._take_rollout, rollouts)
        snapshot = Snapshot(
            rollout=rollouts[0] if rollouts else None,
            episodes=self._take_episodes(progress),
            minibatches=self._take_minibatches(),
            gradients=self._take_gradients(),
            progress=progress,
            sample=self._take_sample(),
            growth=joined_growth(self._growth),
        )
        self._features = None
        self._for_this_update.stop()
        if self._backwards:
            self._last_backwards = self._backwards[-1]
        for kept in (self._rollouts, self._episodes, self._minibatches, self._leaves, self._backwards, self._growth):
            kept.clear()
        return snapshot

    def state_dict(self) -> dict[str, Any]:
        """What the next update must know of those before; the journal holds their records when it returns."""
        return {
            "counts": self._telemetry.state_dict(),
            "recent": list(zip(self._recent_ends, self._recent, strict=True)),
            "rollouts": self._before.state_dict(),
            "sampling": self._telemetry.sampling.state(),
            "close_look": self._close_look.state_dict(),
            "looks": self._replays.looks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state."""
        self._telemetry.load_state_dict(state["counts"])
        self._recent_ends = deque((end for end, _ in state["recent"]), maxlen=RECENT)
        self._recent = deque((value for _, value in state["recent"]), maxlen=RECENT)
        self._before.load_state_dict(state["rollouts"])
        if "sampling" in state:
            self._telemetry.sampling.restore(state["sampling"])
            self._close_look.load_state_dict(state["close_look"])
        self._replays.looks = state.get("looks", 0)

    def nonfinite_candidates(self) -> Iterator[Candidate]:
        """The tensors of the update under way, in forward order; between updates the parameters that the last one left."""
        for rollout in self._rollouts[-1:]:
            yield from of_rollout(rollout)
        self._join()
        for minibatches in self._minibatches:
            yield from of_minibatches(minibatches)
        backwards = self._backwards[-1] if self._backwards else self._last_backwards
        if backwards is not None:
            yield from of_backward(backwards)

    def _hear_details(self, listener: TimedListener) -> None:
        listener.untimed(MinibatchEnd, self._details.add)
        listener.untimed(MinibatchesEnd, self._details.add_all)

    def _wants_details(self, facts: Mapping[str, Any]) -> bool:
        """In every update: at DEBUG, and at NORMAL where values are clipped, for what that is judged by."""
        level = self._telemetry.level
        return level >= Level.DEBUG or (level is Level.NORMAL and facts.get("clip_value") is not None)

    def _join(self) -> None:
        """Joins what the source has not joined itself."""
        minibatches = self._joining.take()
        if minibatches is not None:
            self._minibatches.append(minibatches)
        if self._passes:
            self._backwards.append(joined_gradients(self._passes))
            self._passes.clear()

    def _take_minibatches(self) -> Minibatches | None:
        details = self._take_details()
        if not self._minibatches:
            return None
        columns = self._minibatches[-1]._asdict()
        known = {name: columns[name] for name in Minibatches._fields if name in columns}
        return Minibatches(**known, features=self._features, details=details)

    def _take_gradients(self) -> tuple[BackwardGradients, ...]:
        return gradient_parts(self._backwards[-1], self._leaves) if self._backwards else ()

    def _take_details(self) -> Details | None:
        """More columns of the minibatches, in updates that are looked at closely with what the rollout knows of them."""
        return self._details.take(self._rollouts[-1] if self._looks_closely and self._rollouts else None)

    def _take_sample(self) -> GradientSample | None:
        """What was looked at closely; large samples are measured here and now, where no copy travels."""
        sample = self._close_look.take()
        if sample is None or sample.entries <= MOST_SENT:
            return sample
        self._telemetry.measure(gradient_sample(sample, self._telemetry.update_level))
        shown = self._telemetry.update_level is Level.DEBUG and sum(sample.numels) <= MOST_SHOWN
        return sample.for_evidence() if shown else None

    def _take_rollout(self, taken: list[RolloutData]) -> None:
        """Adds the update's rollout, if there is one."""
        if not self._rollouts:
            return
        logits = self._minibatches[-1].logits if self._minibatches else {}
        sizes = {head: scores.shape[-1] for head, scores in logits.items()}
        layers, self._layers = self._layers, ()
        taken.append(self._before.take(self._rollouts[-1], sizes=sizes, layers=layers))

    def _take_episodes(self, progress: TrainingProgress | None) -> Episodes | None:
        """Of the episodes so far; without steps in the environments there is nothing to say, not even that none has ended."""
        update = self._rollouts[-1].update if self._rollouts else progress.update if progress and self._growth else None
        if update is None:
            return None
        returns = tuple([value for event in self._episodes for value in event.returns])
        lengths = tuple([value for event in self._episodes for value in event.lengths])
        times = [time for event in self._episodes for time in event.times] or range(len(returns))
        start = MOST_STEPS * update
        self._recent.extend(returns)
        self._recent_ends.extend([start + time for time in times])
        recent_ends = tuple(self._recent_ends) if self._telemetry.ranks > 1 else None
        return Episodes(returns, lengths, tuple(self._recent), recent_ends)


__all__ = ["EventSource", "attach", "watch_pair"]


class CheckpointJoin(Protocol):
    """What a source saves and loads with itself."""

    def join(self, name: str, companion: Update) -> Callable[[], None]:
        """Adds one more; returns the function that ends this."""


class EventSource(Protocol):
    """Anything that emits events.

    One that has `companions` keeps the history of what is measured in its checkpoints. One that has `joins` emits these types of events,
    `MinibatchesEnd` and `BackwardsEnd` or one of them, and need not build a `MinibatchEnd` or a `BackwardEnd` each time.
    """

    @property
    def hooks(self) -> Hooks:
        """Where to listen."""


def attach(telemetry: Telemetry, source: EventSource) -> Remover:
    """Makes `telemetry` observe and flush what happens in `source`; returns the function that ends this.

    At level OFF nothing is registered, so the trainer does no extra work.

    Raises:
        TypeError: for anything else than a Telemetry and something that emits events.
    """
    if not isinstance(telemetry, Telemetry) or not isinstance(getattr(source, "hooks", None), Hooks):
        raise TypeError(
            f"attach takes a Telemetry and a trainer with hooks, got {type(telemetry).__name__} and {type(source).__name__}: "
            "telemetry.watch(model, optimizer) is for a loop of your own, TelemetryCallback for Stable-Baselines3"
        )
    if telemetry.level is Level.OFF:
        return lambda: None
    contained = partial(TimedListener, telemetry.clock, source.hooks, telemetry.attempt)
    replays = Replays(telemetry, contained())
    close_look = CloseLook(contained())
    for_this_update = contained()
    update = Update(telemetry, replays, close_look, for_this_update)
    listener = TimedListener(telemetry.clock, source.hooks)
    update.listen(listener, joined=getattr(source, "joins", ()))
    telemetry.expect_updates(candidates=update.nonfinite_candidates, open_update=update.take)
    companions: CheckpointJoin | None = getattr(source, "companions", None)
    leave = None if companions is None else companions.join("telemetry", update)

    def stop() -> None:
        listener.stop()
        replays.stop()
        close_look.stop()
        for_this_update.stop()
        if leave is not None:
            leave()

    return stop
