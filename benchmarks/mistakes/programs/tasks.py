"""Small environments in which every mistake can show: rewards vary in size and sign, episodes end by termination and by a time limit.

`gymnasium.make("tasks:Drift-v0")` has three choices, `tasks:MaskedDrift-v0` masked choices, `tasks:PairDrift-v0` two choices at once, and
`tasks:BitDrift-v0` three bits. `tasks:Push-v0` has one force, and `tasks:WidePush-v0` three forces with different bounds. The observations
of `tasks:DictDrift-v0` have several parts.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

TIME_LIMIT = 17
"""Steps of an episode; odd, so that time limits occur on all rows of a rollout."""


class Drift(gym.Env[Any, Any]):
    """A point with inertia between two walls that end the episode. It should stay near a target, drawn again in each episode."""

    observation_space: spaces.Space[Any] = spaces.Box(-4, 4, (4,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._position, self._speed = self.np_random.uniform(-0.3, 0.3, 2)
        self._target = self.np_random.uniform(-0.6, 0.6)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Push the point; the reward is between -6 and 2."""
        self._speed += 0.12 * self.force(action) + self.np_random.normal(0, 0.05)
        self._position += self._speed
        outside = bool(abs(self._position) > 1)
        reward = 2 - 4 * abs(self._position - self._target) - 2.5 * outside
        return self._observation(), float(np.clip(reward, -6, 2)), outside, False, {}

    def force(self, action: Any) -> float:
        """Return the force of an action, about between -1 and 1."""
        return float(action) - 1

    def _observation(self) -> Any:
        numbers = (self._position, self._speed, self._target, self._position - self._target)
        return np.array(numbers, np.float32).clip(-4, 4)


class Push(Drift):
    """`Drift` with a continuous force."""

    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def force(self, action: Any) -> float:
        """Return the force, clipped to the bounds."""
        return float(np.clip(action[0], -1, 1))


class WidePush(Drift):
    """`Drift` with three forces that are added."""

    action_space = spaces.Box(np.array([-1, -0.5, 0], np.float32), np.array([1, 0.5, 2], np.float32))

    def force(self, action: Any) -> float:
        """Return the sum of the forces, between -1 and 1."""
        return float(np.clip(action.sum() / 2, -1, 1))


class PairDrift(Drift):
    """`Drift` with two choices at once: a direction and one of four strengths."""

    action_space = spaces.MultiDiscrete([3, 4])

    def force(self, action: Any) -> float:
        """Return direction times strength."""
        return float(action[0] - 1) * float(action[1]) / 3


class BitDrift(Drift):
    """`Drift` with three bits: to the left, to the right, and twice as strong."""

    action_space = spaces.MultiBinary(3)

    def force(self, action: Any) -> float:
        """Return the sum of both directions."""
        return float(int(action[1]) - int(action[0])) * (1 + int(action[2])) / 2


class DictDrift(Drift):
    """`Drift` with observations of three parts."""

    observation_space: spaces.Space[Any] = spaces.Dict(
        {
            "motion": spaces.Box(-4, 4, (2,), np.float32),
            "target": spaces.Box(-4, 4, (2,), np.float32),
            "side": spaces.Discrete(2),
        }
    )

    def _observation(self) -> Any:
        numbers = super()._observation()
        return {"motion": numbers[:2], "target": numbers[2:], "side": int(numbers[0] > 0)}


class MaskedDrift(Drift):
    """`Drift` that forbids pushing away from the middle."""

    def action_masks(self) -> Any:
        """Return the mask of allowed choices, [3]."""
        return np.array([self._position > -0.2, True, self._position < 0.2])


for task in (Drift, Push, WidePush, PairDrift, BitDrift, DictDrift, MaskedDrift):
    gym.register(f"{task.__name__}-v0", task, max_episode_steps=TIME_LIMIT)
