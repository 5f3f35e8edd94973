"""Environments that fail after some steps, for Stable-Baselines3 and for scripts."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

AFTER = 40
"""Steps of an environment before its fault."""


class Broken(gym.Env[Any, Any]):
    """Random observations, [4], until step `AFTER`. Then the environment at this index observes or pays NaN, or crashes."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fault: str = "none", place: int = 0) -> None:
        self._fault = fault if place == 2 else "none"
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        broken = self._steps > AFTER
        if broken and self._fault == "crash":
            raise KeyError("the simulator lost joint 7")
        observation = self._observed()
        if broken and self._fault == "observation":
            observation[:3] = np.nan
        reward = float("nan") if broken and self._fault == "reward" else float(action)
        return observation, reward, False, self._steps % 13 == 0, {}

    def _observed(self) -> Any:
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)
