"""Collecting rollouts from environments on the host, with as few calls per step as possible.

A step needs only the actor. Noise is drawn for the whole rollout at once; values, log-probabilities and episode
statistics are computed after it, in one batch each: the weights have not changed meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esper_telemetry.environments.protocol import Step, VectorEnvironment
from esper_telemetry.ppo.episodes import EpisodeCounter
from esper_telemetry.ppo.policy import ActorCritic, Values
from esper_telemetry.ppo.rollout import Rollout

Array = npt.NDArray[Any]


class Final(NamedTuple):
    """Last observations [E, ...] of episodes that a limit cut at time `time` in the environments `rows` [E]."""

    time: int
    rows: Array
    observations: Array


class Collector:
    """Acts in the environments and remembers what happened, from one rollout to the next.

    Attributes:
        episodes: counts the episodes.
        seconds: what the last rollout spent in `environment` and in `inference`.
    """

    def __init__(self, env: VectorEnvironment, policy: ActorCritic, num_steps: int, seed: int) -> None:
        shape = (num_steps, env.num_envs)
        heads = {name: policy.head(name) for name in env.action_specs}
        self.env, self.policy, self.num_steps = env, policy, num_steps
        self.episodes = EpisodeCounter(env.num_envs)
        self.seconds: dict[str, float] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._observations = np.zeros((num_steps + 1, env.num_envs, *env.observation_shape), np.float32)
        self._scores = {name: np.zeros((*shape, head.size), np.float32) for name, head in heads.items()}
        self._actions = {name: head.action_buffer(shape) for name, head in heads.items()}
        self._rewards = np.zeros(shape, np.float32)
        self._terminated, self._truncated, self._valid = (np.zeros(shape, bool) for _ in range(3))
        self._finals: list[Final] = []
        self._observations[-1] = env.reset(seed)

    def collect(self) -> Rollout:
        """The next rollout; it holds until the next call."""
        self._observations[0] = self._observations[-1]
        self._valid.fill(True)
        self._finals.clear()
        scores, values = self.policy.acting()
        samplers = {name: self.policy.head(name).sampler() for name in self._actions}
        noise = self._noise()
        environment, start = 0.0, time.perf_counter()
        for t in range(self.num_steps):
            for name, score in scores(self._observations[t]).items():
                self._scores[name][t] = score
                self._actions[name][t] = samplers[name](score, noise[name][t])
            before = time.perf_counter()
            step = self.env.step({name: actions[t] for name, actions in self._actions.items()})
            environment += time.perf_counter() - before
            self._store(t, step)
        rollout = self._finish(values)
        self.seconds = {"environment": environment, "inference": time.perf_counter() - start - environment}
        return rollout

    def _noise(self) -> dict[str, Array]:
        shape = self._rewards.shape
        return {name: self.policy.head(name).noise(shape, self._generator).numpy() for name in self._actions}

    def _store(self, t: int, step: Step) -> None:
        self._observations[t + 1] = step.observations
        self._rewards[t] = step.rewards
        self._terminated[t] = step.terminated
        self._truncated[t] = step.truncated
        if step.valid is not None:
            self._valid[t] = step.valid
        if step.final_observations is not None:
            rows = np.flatnonzero(step.truncated & ~step.terminated)
            if len(rows):
                self._finals.append(Final(t, rows, step.final_observations[rows].astype(np.float32)))

    def _finish(self, values_of: Values) -> Rollout:
        self._check_finite()
        flat = self._observations.reshape(-1, *self.env.observation_shape)
        values = values_of(flat).reshape(self.num_steps + 1, -1)
        next_values = np.where(self._terminated, np.float32(0), values[1:])
        if self._finals:
            self._bootstrap(next_values, values_of)
        ended = self._terminated | self._truncated
        valid = None if self._valid.all() else self._valid
        self.episodes.count(self._rewards, ended, valid)
        return self._to_device(values[:-1], next_values, ended, valid)

    def _check_finite(self) -> None:
        """Raises FloatingPointError, naming the first, where an observation left the policy without finite scores."""
        for name, scores in self._scores.items():
            if not np.isfinite(scores).all():
                t, row = np.argwhere(~np.isfinite(scores).all(-1))[0]
                seen = self._observations[t, row]
                raise FloatingPointError(
                    f"environment {row} gave at step {t} of the rollout an observation for which the policy's scores "
                    f"for {name} are not finite: {np.array2string(seen, threshold=8)}"
                )

    def _bootstrap(self, next_values: Array, values_of: Values) -> None:
        """Writes the values of the states in which a limit ended an episode."""
        values = values_of(np.concatenate([final.observations for final in self._finals]))
        times = np.concatenate([np.full(len(final.rows), final.time) for final in self._finals])
        next_values[times, np.concatenate([final.rows for final in self._finals])] = values

    def _to_device(self, values: Array, next_values: Array, ended: Array, valid: Array | None) -> Rollout:
        device = self.policy.value.weight.device

        def tensor(array: Array) -> Tensor:
            return torch.from_numpy(array).to(device)

        actions = {name: tensor(array) for name, array in self._actions.items()}
        return Rollout(
            observations=tensor(self._observations[:-1]),
            actions=actions,
            log_probs=self._log_probs({name: tensor(array) for name, array in self._scores.items()}, actions),
            rewards=tensor(self._rewards),
            values=tensor(values),
            next_values=tensor(next_values),
            ended=tensor(ended),
            terminated=tensor(self._terminated),
            valid=None if valid is None else tensor(valid),
            transitions=self._rewards.size if valid is None else int(valid.sum()),
        )

    @torch.no_grad()
    def _log_probs(self, scores: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> Tensor:
        """Log-probabilities [T, B] of the actions under the scores they were sampled from."""
        normalized = self.policy.normalize({name: score.flatten(0, 1) for name, score in scores.items()})
        flat = self.policy.log_prob(normalized, {name: action.flatten(0, 1) for name, action in actions.items()})
        return flat.view(self._rewards.shape)
