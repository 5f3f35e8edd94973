"""Collecting rollouts from environments on the host, with as few calls per step as possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from esper_telemetry.ppo.collectors.actions import ActionBuffer
from esper_telemetry.ppo.collectors.base import Resets, RolloutCollector
from esper_telemetry.ppo.collectors.inference import LimitedEpisodes, StateBuffer, advance_critic, estimate, host_policy
from esper_telemetry.ppo.environments.protocol import Array, Step, VectorEnvironment, layout_of
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
        rollout = Rollout(
            observations=self._tensor(self._observations[:-1]),
            rewards=self._tensor(self._rewards),
            values=self._tensor(values),
            next_values=self._tensor(next_values),
            ended=self._tensor(ended),
            terminated=self._tensor(self._terminated),
            valid=None if valid is None else self._tensor(valid),
            transitions=self._rewards.size if valid is None else int(valid.sum()),
            recurrence=self._recurrence(valid),
            **self._actions.finish(self._device)._asdict(),
        )
        return self._normalizers.finish(rollout, self._tensor(self._raw[:-1]))

    def _recurrence(self, valid: Array | None) -> RolloutRecurrence | None:
        if not self._states:
            return None
        initial = {name: self._tensor(states.initial) for name, states in self._states.items()}
        return RolloutRecurrence(initial, self._fresh[:-1], self._tensor(self._states["actor"].after), valid)

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
