"""Gymnasium's vectorised CartPole-v1 for every trainer, so that all step the same implementation.

The bundled trainer uses it unchanged, with a row for each reset. Other trainers do not support such rows, so resets happen in the step.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv


class Outcome(NamedTuple):
    """A step of all environments, arrays [B] and [B, 4]; `last` is the observation before the resets."""

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
        """Return observations [B, 4]."""
        return self.env.reset(seed=self._seed)[0]

    def step(self, actions: Any) -> Outcome:
        """Step all environments."""
        last, rewards, terminated, truncated, _ = self.env.step(actions)
        self._open += rewards
        done = terminated | truncated
        if not done.any():
            return Outcome(last, rewards, terminated, truncated, last)
        self.returns.extend(self._open[done].tolist())
        self._open[done] = 0.0
        return Outcome(self._begin(done), rewards, terminated, truncated, last)

    def _begin(self, done: Any) -> Any:
        """Begin episodes in these environments, as the environment does in its next step; return observations [B, 4]."""
        env = self.env
        assert env.state is not None
        env.state[:, done] = env.np_random.uniform(env.low, env.high, (4, int(done.sum())))
        env.steps[done] = 0
        env.prev_done = np.zeros(self.num_envs, dtype=np.bool_)
        return env.state.T.astype(np.float32)
