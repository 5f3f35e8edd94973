"""Environments that break in the middle of a run; importing this registers them, so `broken_environments:NanReward-v0` works."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

BREAKS_AT_STEP = 300
"""Counted over the steps of one environment: in the third rollout of 128 steps."""

KILLS_AT_STEP = 800
"""In the seventh rollout."""

STEP_SECONDS = 0.0005
STUCK_MARK = "stuck"
"""File that an environment makes before it hangs."""

KILLED = Path("killed")
"""File in the working directory that marks the kill."""


class Breaking(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole until its 300th step, counted over all episodes."""

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
    """In rank 0 only, creates a file in the working directory and then hangs for longer than a test waits."""

    def broken(self, observation: Any, reward: Any, *rest: Any) -> Any:
        if os.environ.get("RANK") == "0":
            Path(STUCK_MARK).touch()
            time.sleep(3600)
        return observation, reward, *rest


class Slow(Breaking):
    """Takes more than half a second per rollout, so that backends keep up with an endless run."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        time.sleep(STEP_SECONDS)
        return self.env.step(action)


class Killing(Breaking):
    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == KILLS_AT_STEP and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.env.step(action)


def register(name: str, wrapper: type[Breaking]) -> None:
    def make(**kwargs: Any) -> gym.Env[Any, Any]:
        return wrapper(gym.make("CartPole-v1", **kwargs))

    gym.register(name, entry_point=make)


register("Crashing-v0", Crashing)
register("Stuck-v0", Stuck)
register("NanReward-v0", NanReward)
register("NanObservation-v0", NanObservation)
register("Killing-v0", Killing)
register("Slow-v0", Slow)
