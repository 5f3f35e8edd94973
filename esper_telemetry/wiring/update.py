"""One update from its events: what happened is kept as it comes, taken as one snapshot, and flushed as one record."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from esper_telemetry.events import (
    BackwardEnd,
    BackwardsEnd,
    EpisodeEnd,
    EvaluationEnd,
    GrowthStep,
    MinibatchEnd,
    MinibatchesEnd,
    RecurrentForward,
    Rollback,
    RolloutEnd,
    RunStart,
    TrunkBackward,
    UpdateEnd,
)
from esper_telemetry.failure import Candidate
from esper_telemetry.metrics.evaluation import evaluation_stats
from esper_telemetry.record import Level
from esper_telemetry.summary import (
    Details,
    Episodes,
    Gradients,
    GradientSample,
    Layer,
    Minibatches,
    Progress,
    Rollout,
    Snapshot,
    gradient_sample,
)
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.wiring import gradients, growth
from esper_telemetry.wiring.candidates import of_backward, of_minibatches, of_rollout
from esper_telemetry.wiring.close_look import MOST_TRAVELLING, CloseLook
from esper_telemetry.wiring.details import DetailJoining
from esper_telemetry.wiring.listener import Listener
from esper_telemetry.wiring.minibatches import Joining
from esper_telemetry.wiring.replays import Replays
from esper_telemetry.wiring.rollouts import Rollouts, layers_of

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
        self, telemetry: Telemetry, replays: Replays, close_look: CloseLook, for_this_update: Listener
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

    def listen(self, listener: Listener, *, joined: Collection[type]) -> None:
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
        self._leaves: list[gradients.Leaf] = []
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
        self._leaves.append(gradients.Leaf(event.actor, event.critic))

    def _keep_layers(self, event: RecurrentForward) -> None:
        """Keeps the weights as they are before the update."""
        self._layers = layers_of(event)

    def _keep_features(self, event: TrunkBackward) -> None:
        """Keeps what the policy's heads read before the first step."""
        self._features = event.outputs[0].detach()[:MOST_ROWS]

    def end(self, event: UpdateEnd) -> None:
        """Writes the update's record."""
        now = time.perf_counter()
        progress = Progress(
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

    def take(self, progress: Progress | None = None) -> Snapshot:
        """What has happened since the last call; nothing is left behind."""
        self._join()
        rollouts: list[Rollout] = []
        self._telemetry.attempt(self._take_rollout, rollouts)
        snapshot = Snapshot(
            rollout=rollouts[0] if rollouts else None,
            episodes=self._take_episodes(progress),
            minibatches=self._take_minibatches(),
            gradients=self._take_gradients(),
            progress=progress,
            sample=self._take_sample(),
            growth=growth.joined(self._growth),
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

    def _hear_details(self, listener: Listener) -> None:
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
            self._backwards.append(gradients.joined(self._passes))
            self._passes.clear()

    def _take_minibatches(self) -> Minibatches | None:
        details = self._take_details()
        if not self._minibatches:
            return None
        columns = self._minibatches[-1]._asdict()
        known = {name: columns[name] for name in Minibatches._fields if name in columns}
        return Minibatches(**known, features=self._features, details=details)

    def _take_gradients(self) -> tuple[Gradients, ...]:
        return gradients.gradient_parts(self._backwards[-1], self._leaves) if self._backwards else ()

    def _take_details(self) -> Details | None:
        """More columns of the minibatches, in updates that are looked at closely with what the rollout knows of them."""
        return self._details.take(self._rollouts[-1] if self._looks_closely and self._rollouts else None)

    def _take_sample(self) -> GradientSample | None:
        """What was looked at closely; large samples are measured here and now, where no copy travels."""
        sample = self._close_look.take()
        if sample is None or sample.entries <= MOST_TRAVELLING:
            return sample
        self._telemetry.measure(gradient_sample(sample, self._telemetry.update_level))
        shown = self._telemetry.update_level is Level.DEBUG and sum(sample.numels) <= MOST_SHOWN
        return sample.for_evidence() if shown else None

    def _take_rollout(self, taken: list[Rollout]) -> None:
        """Adds the update's rollout, if there is one."""
        if not self._rollouts:
            return
        logits = self._minibatches[-1].logits if self._minibatches else {}
        sizes = {head: scores.shape[-1] for head, scores in logits.items()}
        layers, self._layers = self._layers, ()
        taken.append(self._before.take(self._rollouts[-1], sizes=sizes, layers=layers))

    def _take_episodes(self, progress: Progress | None) -> Episodes | None:
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
