"""Collecting rollouts from tensor environments without leaving the device.

The host learns once per rollout where episodes ended and what they returned, and never waits within one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from esper_telemetry.core.tensors import mask_logits
from esper_telemetry.ppo.checkpoint import new_seed
from esper_telemetry.ppo.collectors.base import EVERY, FIRST, EpisodeCounter, ProcessorClock
from esper_telemetry.ppo.collectors.choices import Chosen, chosen, on_device, restrictors
from esper_telemetry.ppo.environments.protocol import Masked, Saveable, TensorEnvironment, TensorStep
from esper_telemetry.ppo.networks.recurrent import RecurrentTrunk
from esper_telemetry.ppo.normalizer import PLAIN, Normalizers
from esper_telemetry.ppo.policy import ActorCritic
from esper_telemetry.ppo.rollout import Rollout, RolloutRecurrence

Resets = Callable[[Any], Any]


class TensorCollector:
    """Acts in tensor environments and remembers what happened; the twin of `Collector`.

    Args:
        greedy: takes the likeliest choices instead of drawing them.

    Attributes:
        episodes: counts the episodes.
        seconds: wall time that the last rollout spent in `environment` and in `inference`, as far as the host can tell.
        cpu_seconds: processor time of the last `rollout`, and of these two parts of it.
    """

    def __init__(
        self,
        env: TensorEnvironment,
        policy: ActorCritic,
        num_steps: int,
        seed: int,
        normalizers: Normalizers = PLAIN,
        *,
        greedy: bool = False,
    ) -> None:
        self._greedy = greedy
        self.env, self.policy, self.num_steps = env, policy, num_steps
        self.episodes = EpisodeCounter(env.num_envs)
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        self._device = policy.value.weight.device
        self._normalizers = normalizers
        self._generator = torch.Generator().manual_seed(seed)
        self._raw = env.reset(seed)
        self._masks: Callable[[], Mapping[str, Tensor]] | None = env.action_masks if isinstance(env, Masked) else None
        self._restrictors = {
            name: on_device(part, self._device) for name, part in restrictors(env.action_specs, env.num_envs).items()
        }
        heads = {name: policy.head(name) for name in env.action_specs}
        self._squashes = {name: head.squash for name, head in heads.items() if head.squash is not None}
        shapes = {name: core.state_shape(env.num_envs) for name, core in policy.cores().items()}
        self._states = {name: torch.zeros(shape, device=self._device) for name, shape in shapes.items()}
        self._fresh = torch.ones(env.num_envs, dtype=torch.bool, device=self._device)

    @torch.no_grad()
    def collect(self, resets: Resets = lambda ended: ended) -> Rollout:
        """The next rollout.

        Args:
            resets: where memory begins anew, from where episodes ended, [B] bool both.
        """
        clock = ProcessorClock()
        start, environment = time.perf_counter(), 0.0
        course = Course(self._states)
        noise = self._noise()
        for t in range(self.num_steps):
            observations = self._normalized(self._raw)
            features, after = self._advance(observations)
            actions = self._choose(course, self.policy.scores(features[0]), {name: noise[name][t] for name in noise})
            before = time.perf_counter()
            chosen = self._squashed(actions)
            step = clock.step(self.env.step, chosen) if t % EVERY == FIRST else self.env.step(chosen)
            environment += time.perf_counter() - before
            course.keep(self._raw, observations, step, features=features[-1], fresh=self._fresh, after=after)
            self._raw, self._fresh = step.observations, resets(step.terminated | step.truncated)
            cleared = self._fresh.unsqueeze(-1)
            self._states = {name: state.masked_fill(cleared, 0.0) for name, state in after.items()}
        rollout = self._finish(course)
        self.seconds = {"environment": environment, "inference": time.perf_counter() - start - environment}
        self.cpu_seconds = clock.seconds(self.num_steps)
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """What the next rollout goes on from; the environment's state is None where it cannot be saved."""
        return {
            "environment": self.env.state_dict() if isinstance(self.env, Saveable) else None,
            "observations": self._raw,
            "fresh": self._fresh,
            "memories": self._states,
            "episodes": {name: sums.clone() for name, sums in self.episodes.state_dict().items()},
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state; begins new episodes where the environment could not be saved."""
        self._generator.set_state(state["generator"])
        if state["environment"] is None:
            self._begin_anew()
            return
        assert isinstance(self.env, Saveable)
        self.env.load_state_dict(state["environment"])
        self._raw, self._fresh = state["observations"].to(self._device), state["fresh"].to(self._device)
        self._states = {name: memory.to(self._device) for name, memory in state["memories"].items()}
        self.episodes.load_state_dict(state["episodes"])

    def _begin_anew(self) -> None:
        """Begins episodes everywhere, other ones than at the start of the run."""
        self._raw = self.env.reset(new_seed(self._generator))
        self._fresh = torch.ones_like(self._fresh)
        self._states = {name: torch.zeros_like(state) for name, state in self._states.items()}
        self.episodes.forget()
        self._normalizers.forget()

    def _noise(self) -> dict[str, Tensor]:
        shape = (self.num_steps, self.env.num_envs)
        heads = {name: self.policy.head(name) for name in self.env.action_specs}
        noise = {name: head.noise(shape, self._generator).to(self._device) for name, head in heads.items()}
        return {name: torch.zeros_like(part) for name, part in noise.items()} if self._greedy else noise

    def _normalized(self, observations: Tensor) -> Tensor:
        normalizer = self._normalizers.observations
        return observations if normalizer is None else normalizer(observations)

    def _advance(self, observations: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Features of the trunks, the critic's last, and the states after this step."""
        features, after = [], {}
        with self.policy.autocast():
            for name, trunk in self.policy.named_trunks().items():
                if isinstance(trunk, RecurrentTrunk):
                    found, after[name] = trunk.step(observations, self._states[name])
                else:
                    found = trunk(observations)
                features.append(found.float())
        return features, after

    def _choose(self, course: Course, scores: Mapping[str, Tensor], noise: Mapping[str, Tensor]) -> dict[str, Tensor]:
        masks = self._masks() if self._masks else {}
        taken: dict[str, Tensor] = {}
        relevance: dict[str, Tensor] = {}
        for name, score in scores.items():
            mask, relevant = self._restrictors[name](masks.get(name), taken, relevance)
            action = self.policy.head(name).sample(mask_logits(score, mask), noise[name])
            if relevant is not None:
                relevance[name] = relevant
                action = action * relevant.view(-1, *[1] * (action.dim() - 1))
            taken[name] = action
            course.choose(name, score, action, mask=mask, relevance=relevant)
        return taken

    def _squashed(self, actions: dict[str, Tensor]) -> dict[str, Tensor]:
        return actions | {name: squash(actions[name]) for name, squash in self._squashes.items()}

    def _finish(self, course: Course) -> Rollout:
        steps = {name: torch.stack(column) for name, column in course.columns.items()}
        terminated, truncated = steps["terminated"], steps["truncated"]
        ended = terminated | truncated
        values = self.policy.values(steps["features"])
        last, _ = self._advance(self._normalized(self._raw))
        next_values = torch.cat([values[1:], self.policy.values(last[-1]).unsqueeze(0)]).masked_fill(terminated, 0.0)
        if course.finals:
            self._for_limits(course, next_values, truncated & ~terminated)
        self.episodes.count(steps["rewards"].cpu().numpy(), ended.cpu().numpy(), None)
        rollout = Rollout(
            observations=steps["observations"],
            rewards=steps["rewards"],
            values=values,
            next_values=next_values,
            ended=ended,
            terminated=terminated,
            valid=None,
            transitions=ended.numel(),
            recurrence=self._recurrence(course),
            **course.chosen(self.policy)._asdict(),
        )
        return self._normalizers.finish(rollout, steps["raw"])

    def _for_limits(self, course: Course, next_values: Tensor, cut: Tensor) -> None:
        """Writes to [T, B] the values of the states in which a limit ended an episode."""
        for t, final in course.finals.items():
            self._states, kept = {name: after[t] for name, after in course.after.items()}, self._states
            features, _ = self._advance(self._normalized(final))
            self._states = kept
            next_values[t] = torch.where(cut[t], self.policy.values(features[-1]), next_values[t])

    def _recurrence(self, course: Course) -> RolloutRecurrence | None:
        if not course.states:
            return None
        fresh = torch.stack(course.fresh).cpu().numpy()
        return RolloutRecurrence(course.states, fresh, torch.stack(course.after["actor"]), None)


class Course:
    """What happened in a rollout, as lists of one tensor per step."""

    def __init__(self, states: Mapping[str, Tensor]) -> None:
        self.states = dict(states)
        self.columns: dict[str, list[Tensor]] = defaultdict(list)
        self.choices: dict[str, dict[str, list[Tensor]]] = {
            kind: defaultdict(list) for kind in ("scores", "actions", "masks", "relevance")
        }
        self.after: dict[str, list[Tensor]] = defaultdict(list)
        self.fresh: list[Tensor] = []
        self.finals: dict[int, Tensor] = {}

    def keep(
        self,
        raw: Tensor,
        observations: Tensor,
        step: TensorStep,
        *,
        features: Tensor,
        fresh: Tensor,
        after: Mapping[str, Tensor],
    ) -> None:
        """Adds a step: what was seen, what came of it, and what was remembered."""
        if step.final_observations is not None:
            self.finals[len(self.fresh)] = step.final_observations
        found = {"raw": raw, "observations": observations, "features": features}
        outcome = {"rewards": step.rewards, "terminated": step.terminated, "truncated": step.truncated}
        for name, tensor in (found | outcome).items():
            self.columns[name].append(tensor)
        for name, state in after.items():
            self.after[name].append(state)
        self.fresh.append(fresh)

    def choose(
        self, name: str, score: Tensor, action: Tensor, *, mask: Tensor | None, relevance: Tensor | None
    ) -> None:
        """Adds a choice of the part `name`."""
        kinds = {"scores": score, "actions": action, "masks": mask, "relevance": relevance}
        for kind, tensor in kinds.items():
            if tensor is not None:
                self.choices[kind][name].append(tensor)

    def chosen(self, policy: ActorCritic) -> Chosen:
        """All choices."""
        stacked = {
            kind: {name: torch.stack(parts) for name, parts in heads.items()} for kind, heads in self.choices.items()
        }
        return chosen(
            policy, stacked["scores"], stacked["actions"], masks=stacked["masks"], relevance=stacked["relevance"]
        )
