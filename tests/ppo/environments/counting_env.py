"""Small environments whose episodes can be worked out by hand."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

Observation = np.ndarray[Any, np.dtype[np.float32]]


class Counting(gymnasium.Env[Observation, Any]):
    """Observes and pays the number of steps so far, and ends after `length` steps: alternately by termination and truncation.

    It also observes a number drawn at the reset, which reveals a skipped or doubled reset.
    """

    def __init__(self, length: int = 3, *, action_space: gymnasium.Space[Any] | None = None) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = action_space or gymnasium.spaces.Discrete(2)
        self.length, self.count, self.episode, self.start = length, 0, 0, 0.0
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.episode, self.start = 0, self.episode + 1, float(self.np_random.uniform())
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self.count += 1
        over = self.count >= self.length
        limit = self.episode % 2 == 0
        return self._observe(), float(self.count), over and not limit, over and limit, {}

    def _observe(self) -> Observation:
        return np.array([self.count, self.start], np.float32)


def counting_vector(mode: AutoresetMode, lengths: tuple[int, ...] = (3, 5)) -> SyncVectorEnv:
    """Return a vector environment with one counting environment per length."""
    return SyncVectorEnv([partial(Counting, length) for length in lengths], autoreset_mode=mode)
