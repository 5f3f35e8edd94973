"""Gymnasium's own vectorised CartPole-v1 for every trainer: the same arithmetic for all, whoever steps it.

This trainer steps it as it comes, with a row for each reset. The others know no such rows, so here resets happen within the step.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv


class Outcome(NamedTuple):
    """A step of all environments, arrays [B] and [B, 4]; `last` is what was observed before the resets."""

    observations: Any
    rewards: Any
    terminated: Any
    truncated: Any
    last: Any

    @property
    def done(self) -> Any:
        """Environments [B] whose episode ended."""
        return self.terminated | self.truncated


class NativeCartPole:
    """CartPole-v1, reset within the step.

    Attributes:
        returns: of the last hundred episodes.
    """

    def __init__(self, num_envs: int, seed: int) -> None:
        self.num_envs, self.returns = num_envs, deque[float](maxlen=100)
        self.env = CartPoleVectorEnv(num_envs, max_episode_steps=500)
        self._seed = seed
        self._open = np.zeros(num_envs)

    def reset(self) -> Any:
        """Observations [B, 4]."""
        return self.env.reset(seed=self._seed)[0]

    def step(self, actions: Any) -> Outcome:
        """Takes one action everywhere."""
        last, rewards, terminated, truncated, _ = self.env.step(actions)
        self._open += rewards
        done = terminated | truncated
        if not done.any():
            return Outcome(last, rewards, terminated, truncated, last)
        self.returns.extend(self._open[done].tolist())
        self._open[done] = 0.0
        return Outcome(self._begin(done), rewards, terminated, truncated, last)

    def _begin(self, done: Any) -> Any:
        """Begins episodes there, as the environment itself would in the next step; observations [B, 4]."""
        env = self.env
        assert env.state is not None
        env.state[:, done] = env.np_random.uniform(env.low, env.high, (4, int(done.sum())))
        env.steps[done] = 0
        env.prev_done = np.zeros(self.num_envs, dtype=np.bool_)
        return env.state.T.astype(np.float32)
