"""Collectors of rollouts from environments on the host and from tensor environments on a device.

The collector on the host makes as few calls per step as possible. The collector on a device does not synchronise within a rollout: the
host learns once per rollout which episodes ended and what they returned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.core.tensors import mask_logits
from esper_telemetry.ppo.collectors.base import Resets, RolloutCollector, at_ends
from esper_telemetry.ppo.collectors.inference import (
    ActionBuffer,
    LimitedEpisodes,
    StateBuffer,
    action_columns,
    advance_critic,
    estimate,
    host_policy,
    restrictors,
)
from esper_telemetry.ppo.environments.environment_protocol import (
    Array,
    Environment,
    Step,
    TensorEnvironment,
    TensorStep,
    VectorEnvironment,
    layout_of,
)
from esper_telemetry.ppo.environments.wrappers import on_host
from esper_telemetry.ppo.networks import RecurrentTrunk
from esper_telemetry.ppo.normalizer import PLAIN, Normalizers
from esper_telemetry.ppo.policy import ActorCritic
from esper_telemetry.ppo.rollout import Rollout, RolloutRecurrence


class Collector(RolloutCollector):
    """Collector from environments on the host, into arrays that every rollout overwrites."""

    def __init__(
        self,
        env: VectorEnvironment,
        policy: ActorCritic,
        num_steps: int,
        seed: int,
        normalizers: Normalizers = PLAIN,
        *,
        greedy: bool = False,
    ) -> None:
        super().__init__(env, policy, num_steps, seed, normalizers, greedy=greedy)
        shape = (num_steps, env.num_envs)
        self._layout = layout_of(env)
        self._observations = np.zeros((num_steps + 1, env.num_envs, *env.observation_shape), self._layout.dtype)
        self._rewards = np.zeros(shape, np.float32)
        self._terminated, self._truncated, self._valid = (np.zeros(shape, bool) for _ in range(3))
        self._fresh = np.zeros((num_steps + 1, env.num_envs), bool)
        self._limited: list[LimitedEpisodes] = []
        self._states = {name: StateBuffer(core, *shape) for name, core in policy.cores().items()}
        self._raw = np.zeros_like(self._observations) if normalizers.observations else self._observations
        self._normalize: Callable[[Array], Array] | None = None
        self._begin_episodes(env.reset(seed))
        self._actions = ActionBuffer(env, policy, num_steps, tuple(self._action_masks()), greedy=greedy)
        self._host_policy = host_policy(policy)

    def _begin(self) -> None:
        self._raw[0] = self._raw[-1]
        if self._normalizers.observations:
            self._normalize = self._normalizers.observations.as_numpy()
            self._observations[0] = self._normalize(self._raw[0])
        self._fresh[0] = self._fresh[-1]
        self._valid.fill(True)
        self._limited.clear()
        self._actions.begin(self._generator)
        if self._states:
            self._states["actor"].begin()
        self._host_policy = host_policy(self.policy)

    def _act(self, t: int) -> dict[str, Array]:
        policy = self._host_policy
        state = self._states["actor"].state if self._states else None
        scores = policy.scores(policy.actor(self._observations[t], state))
        return self._actions.choose(t, scores, self._action_masks())

    def _store(self, t: int, step: Step, resets: Resets) -> None:
        self._raw[t + 1] = step.observations
        if self._normalize:
            self._observations[t + 1] = self._normalize(self._raw[t + 1])
        self._rewards[t] = step.rewards
        self._terminated[t] = step.terminated
        self._truncated[t] = step.truncated
        if step.valid is not None:
            self._valid[t] = step.valid
        if step.final_observations is not None:
            rows = np.flatnonzero(step.truncated & ~step.terminated)
            if len(rows):
                last = step.final_observations[rows].astype(self._layout.dtype)
                self._limited.append(LimitedEpisodes(t, rows, self._normalize(last) if self._normalize else last))
        if self._states:
            self._fresh[t + 1] = resets(self._terminated[t] | self._truncated[t] | ~self._valid[t])
            self._states["actor"].store(t, self._fresh[t + 1])

    def _finish(self) -> Rollout:
        self._actions.check_finite(self._raw, self._layout)
        if "critic" in self._states:
            advance_critic(self._host_policy, self._observations, self._states["critic"], self._fresh)
        states = self._states.get("critic", self._states.get("actor"))
        values, next_values = estimate(self._host_policy, self._observations, self._terminated, self._limited, states)
        ended = self._terminated | self._truncated
        valid = None if self._valid.all() else self._valid
        self.episodes.count(self._rewards, ended, valid)
        recurrence = None
        if self._states:
            initial = {name: self._tensor(buffer.initial) for name, buffer in self._states.items()}
            after = self._tensor(self._states["actor"].after)
            recurrence = RolloutRecurrence(initial, self._fresh[:-1], after, valid)
        rollout = Rollout(
            observations=self._tensor(self._observations[:-1]),
            rewards=self._tensor(self._rewards),
            values=self._tensor(values),
            next_values=self._tensor(next_values),
            ended=self._tensor(ended),
            terminated=self._tensor(self._terminated),
            valid=None if valid is None else self._tensor(valid),
            transitions=self._rewards.size if valid is None else int(valid.sum()),
            recurrence=recurrence,
            **self._actions.finish(self._device)._asdict(),
        )
        return self._normalizers.finish(rollout, self._tensor(self._raw[:-1]))

    def _tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _begin_episodes(self, observations: Array) -> None:
        self._raw[-1] = observations
        self._fresh[-1] = True
        for states in self._states.values():
            states.state.fill(0.0)

    def _position(self) -> dict[str, Any]:
        return {
            "observations": torch.from_numpy(self._raw[-1].copy()),
            "fresh": torch.from_numpy(self._fresh[-1].copy()),
            "memories": {name: torch.from_numpy(states.state.copy()) for name, states in self._states.items()},
        }

    def _load_position(self, state: Mapping[str, Any]) -> None:
        self._raw[-1], self._fresh[-1] = state["observations"].numpy(), state["fresh"].numpy()
        for name, states in self._states.items():
            states.state[:] = state["memories"][name].numpy()


Columns = defaultdict[str, list[Tensor]]


class TensorRollout:
    """A rollout in progress, as lists of one tensor per step.

    Attributes:
        initial_states: per trunk [layers, parts, B, H], at the beginning of the rollout.
        steps: columns of the steps.
        scores, actions, masks, relevance: columns per part of the action.
        states: per trunk after each step.
        fresh: [B], bool: the step began without memory.
        final_observations: [B, ...] by step, if a limit cut an episode.
    """

    def __init__(self, initial_states: Mapping[str, Tensor]) -> None:
        self.initial_states = dict(initial_states)
        self.steps, self.scores, self.actions, self.masks, self.relevance, self.states = (Columns(list) for _ in range(6))
        self.fresh: list[Tensor] = []
        self.final_observations: dict[int, Tensor] = {}


class TensorCollector(RolloutCollector):
    """Collector from tensor environments on the device of the policy."""

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
        super().__init__(env, policy, num_steps, seed, normalizers, greedy=greedy)
        self._heads = {name: policy.head(name) for name in env.action_specs}
        parts = restrictors(env.action_specs, env.num_envs)
        self._restrictors = {name: part.to(self._device) for name, part in parts.items()}
        self._shape = (num_steps, env.num_envs)
        self._states: dict[str, Tensor] = {}
        self._begin_episodes(env.reset(seed))
        self._rollout = TensorRollout(self._states)
        self._noise: dict[str, Tensor] = {}

    @torch.no_grad()
    def collect(self, resets: Resets = at_ends) -> Rollout:
        """Return the next rollout, see `RolloutCollector`; `resets` takes and returns tensors."""
        return super().collect(resets)

    def _begin(self) -> None:
        self._rollout = TensorRollout(self._states)
        noise = {name: head.noise(self._shape, self._generator).to(self._device) for name, head in self._heads.items()}
        self._noise = {name: torch.zeros_like(part) for name, part in noise.items()} if self._greedy else noise

    def _act(self, t: int) -> dict[str, Tensor]:
        rollout, observations = self._rollout, self._normalized(self._raw)
        features, after = self._advance(observations, self._states)
        columns = {"raw": self._raw, "observations": observations, "features": features[-1]}
        for name, column in columns.items():
            rollout.steps[name].append(column)
        for name, state in after.items():
            rollout.states[name].append(state)
        rollout.fresh.append(self._fresh)
        actions = self._draw(self.policy.scores(features[0]), {name: noise[t] for name, noise in self._noise.items()})
        squashes = {name: head.squash for name, head in self._heads.items() if head.squash is not None}
        return actions | {name: squash(actions[name]) for name, squash in squashes.items()}

    def _draw(self, scores: Mapping[str, Tensor], noise: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sample and store the parts of the action, one after the other."""
        rollout, masks = self._rollout, self._action_masks()
        actions: dict[str, Tensor] = {}
        relevance: dict[str, Tensor] = {}
        for name, score in scores.items():
            mask, relevant = self._restrictors[name](masks.get(name), actions, relevance)
            action = self._heads[name].sample(mask_logits(score, mask), noise[name])
            if relevant is not None:
                relevance[name] = relevant
                action = action * relevant.view(-1, *[1] * (action.dim() - 1))
                rollout.relevance[name].append(relevant)
            if mask is not None:
                rollout.masks[name].append(mask)
            actions[name] = action
            rollout.scores[name].append(score)
            rollout.actions[name].append(action)
        return actions

    def _store(self, t: int, step: TensorStep, resets: Resets) -> None:
        rollout = self._rollout
        if step.final_observations is not None:
            rollout.final_observations[t] = step.final_observations
        for name in ("rewards", "terminated", "truncated"):
            rollout.steps[name].append(getattr(step, name))
        self._raw, self._fresh = step.observations, resets(step.terminated | step.truncated)
        cleared = self._fresh.unsqueeze(-1)
        self._states = {name: states[t].masked_fill(cleared, 0.0) for name, states in rollout.states.items()}

    def _finish(self) -> Rollout:
        rollout = self._rollout
        steps, scores, actions, masks, relevance = (
            {name: torch.stack(column) for name, column in columns.items()}
            for columns in (rollout.steps, rollout.scores, rollout.actions, rollout.masks, rollout.relevance)
        )
        terminated, truncated = steps["terminated"], steps["truncated"]
        ended, limited = terminated | truncated, truncated & ~terminated
        values = self.policy.values(steps["features"])
        last = self._value(self._raw, self._states).unsqueeze(0)
        next_values = torch.cat([values[1:], last]).masked_fill(terminated, 0.0)
        for t, final in rollout.final_observations.items():
            final_values = self._value(final, {name: after[t] for name, after in rollout.states.items()})
            next_values[t] = torch.where(limited[t], final_values, next_values[t])
        self.episodes.count(steps["rewards"].cpu().numpy(), ended.cpu().numpy(), None)
        recurrence = None
        if rollout.states:
            fresh = torch.stack(rollout.fresh).cpu().numpy()
            recurrence = RolloutRecurrence(rollout.initial_states, fresh, torch.stack(rollout.states["actor"]), None)
        finished = Rollout(
            observations=steps["observations"],
            rewards=steps["rewards"],
            values=values,
            next_values=next_values,
            ended=ended,
            terminated=terminated,
            valid=None,
            transitions=ended.numel(),
            recurrence=recurrence,
            **action_columns(self.policy, scores, actions, masks=masks, relevance=relevance)._asdict(),
        )
        return self._normalizers.finish(finished, steps["raw"])

    def _normalized(self, observations: Tensor) -> Tensor:
        normalizer = self._normalizers.observations
        return observations if normalizer is None else normalizer(observations)

    def _value(self, observations: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        """Return the critic's estimates [B] of raw observations [B, ...], given the states before them."""
        features, _ = self._advance(self._normalized(observations), states)
        return self.policy.values(features[-1])

    def _advance(self, observations: Tensor, states: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the features of the trunks, the critic's last, and the states after this step."""
        features, after = [], {}
        with self.policy.autocast():
            for name, trunk in self.policy.named_trunks().items():
                if isinstance(trunk, RecurrentTrunk):
                    outputs, after[name] = trunk.step(observations, states[name])
                else:
                    outputs = trunk(observations)
                features.append(outputs.float())
        return features, after

    def _begin_episodes(self, observations: Tensor) -> None:
        num_envs = len(observations)
        shapes = {name: core.state_shape(num_envs) for name, core in self.policy.cores().items()}
        self._raw = observations
        self._fresh = torch.ones(num_envs, dtype=torch.bool, device=self._device)
        self._states = {name: torch.zeros(shape, device=self._device) for name, shape in shapes.items()}

    def _position(self) -> dict[str, Any]:
        return {"observations": self._raw, "fresh": self._fresh, "memories": self._states}

    def _load_position(self, state: Mapping[str, Any]) -> None:
        self._raw, self._fresh = state["observations"].to(self._device), state["fresh"].to(self._device)
        self._states = {name: states.to(self._device) for name, states in state["memories"].items()}


def collector_for(
    env: Environment, policy: ActorCritic, normalizers: Normalizers, *, num_steps: int, seed: int, greedy: bool = False
) -> Collector | TensorCollector:
    """Return the collector for that kind of environment; tensor environments on the host are stepped as arrays."""
    if not isinstance(env, TensorEnvironment):
        return Collector(env, policy, num_steps, seed, normalizers, greedy=greedy)
    if env.device.type == policy.value.weight.device.type == "cpu":
        return Collector(on_host(env), policy, num_steps, seed, normalizers, greedy=greedy)
    return TensorCollector(env, policy, num_steps, seed, normalizers, greedy=greedy)
