"""Environments that break in the middle of a run; importing this registers them, so `broken_environments:NanReward-v0` works."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np

BREAKS_AT_STEP = 300
"""Steps of one environment: in the third rollout of 128 steps."""


class Breaking(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole until its 300th step, over all episodes."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.steps = 0

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        result = self.env.step(action)
        return self.broken(*result) if self.steps >= BREAKS_AT_STEP else result

    def broken(self, observation: Any, reward: Any, *rest: Any) -> Any:
        raise NotImplementedError


class Crashing(Breaking):
    def broken(self, observation: Any, reward: Any, *rest: Any) -> Any:
        raise RuntimeError("the simulator crashed")


class NanReward(Breaking):
    def broken(self, observation: Any, reward: Any, *rest: Any) -> Any:
        return observation, float("nan"), *rest


class NanObservation(Breaking):
    def broken(self, observation: Any, reward: Any, *rest: Any) -> Any:
        return np.full_like(observation, np.nan), reward, *rest


class Stuck(Breaking):
    """In rank 0 only, and for longer than anybody waits."""

    def broken(self, observation: Any, reward: Any, *rest: Any) -> Any:
        if os.environ.get("RANK") == "0":
            time.sleep(3600)
        return observation, reward, *rest


def register(name: str, wrapper: type[Breaking]) -> None:
    def make(**kwargs: Any) -> gym.Env[Any, Any]:
        return wrapper(gym.make("CartPole-v1", **kwargs))

    gym.register(name, entry_point=make)


register("Crashing-v0", Crashing)
register("Stuck-v0", Stuck)
register("NanReward-v0", NanReward)
register("NanObservation-v0", NanObservation)
