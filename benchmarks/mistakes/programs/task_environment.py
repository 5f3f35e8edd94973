"""Environments of long runs: a Gymnasium task whose true returns are written to a file, optionally in a wrapper with a mistake.

`make(env_id)` reads two environment variables. `TRUE_RETURNS` is a file that gets a line per episode: the steps of all environments so far,
and the return. `WRONG_WRAPPER` is a name in `MISTAKES`. Discrete observations become one-hot vectors; the 128 bytes of an Atari console
become numbers from 0 to 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

Env = gym.Env[Any, Any]

KEYWORDS: dict[str, dict[str, Any]] = {
    "FrozenLake-v1": {"is_slippery": False, "desc": ["SFF", "FHF", "FFG"]},
    "CliffWalking-v1": {"max_episode_steps": 100},
    "ALE/Boxing-v5": {"obs_type": "ram", "max_episode_steps": 400},
}


class TrueReturns(gym.Wrapper[Any, Any, Any, Any]):
    """Write a line per episode, below all wrappers of the program."""

    steps = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._total = 0.0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Add the reward."""
        result = self.env.step(action)
        TrueReturns.steps += 1
        self._total += float(result[1])
        if (result[2] or result[3]) and (path := os.environ.get("TRUE_RETURNS")):
            with open(path, "a") as file:  # noqa: PTH123 - a line per episode, in the program's own process
                file.write(f"{TrueReturns.steps} {self._total:.6g}\n")
        return result


class Mistake(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper with a mistake in one direction.

    Args:
        env: wrapped.
        observe: maps an observation to the wrong one.
        pay: maps a reward to the wrong one.
        act: maps an action to the wrong one.
    """

    def __init__(
        self,
        env: Env,
        *,
        observe: Callable[[Any], Any] = lambda x: x,
        pay: Callable[[float], float] = lambda x: x,
        act: Callable[[Any], Any] = lambda x: x,
    ) -> None:
        super().__init__(env)
        self._observe, self._pay, self._act = observe, pay, act

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(**kwargs)
        return self._observe(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step with the mistake."""
        observation, reward, ended, cut, info = self.env.step(self._act(action))
        return self._observe(observation), self._pay(float(reward)), ended, cut, info


def _sampled(env: Env) -> Callable[[Any], Any]:
    return lambda action: env.action_space.sample()


def _noise(env: Env) -> Callable[[float], float]:
    rng = np.random.default_rng(0)
    return lambda reward: float(rng.normal())


MISTAKES: dict[str, Callable[[Env], Env]] = {
    "constant_observation": lambda env: Mistake(env, observe=np.zeros_like),
    "frozen_statistics": lambda env: Mistake(env, observe=lambda x: ((x - 50) / 0.01).clip(-10, 10).astype(np.float32)),
    "unscaled_feature": lambda env: Mistake(env, observe=_first_times(1e5)),
    "zero_reward": lambda env: Mistake(env, pay=lambda reward: 0.0),
    "noise_reward": lambda env: Mistake(env, pay=_noise(env)),
    "huge_reward": lambda env: Mistake(env, pay=lambda reward: 1e5 * reward),
    "negative_reward": lambda env: Mistake(env, pay=lambda reward: -reward),
    "sampled_action": lambda env: Mistake(env, act=_sampled(env)),
    "large_action": lambda env: Mistake(env, act=lambda action: np.sign(action) * env.action_space.high),  # type: ignore[attr-defined]
}


def _first_times(factor: float) -> Callable[[Any], Any]:
    def scaled(x: Any) -> Any:
        x = np.array(x, np.float32)
        x[0] *= factor
        return x

    return scaled


def make(env_id: str) -> Env:
    """Return a task for the programs."""
    if env_id.startswith("ALE/"):
        import ale_py

        gym.register_envs(ale_py)
    env: Env = TrueReturns(gym.make(env_id, **KEYWORDS.get(env_id, {})))
    space = env.observation_space
    if isinstance(space, spaces.Discrete):
        count = int(space.n)
        one_hot = spaces.Box(0, 1, (count,), np.float32)
        env = gym.wrappers.TransformObservation(env, lambda state: np.eye(count, dtype=np.float32)[state], one_hot)
    elif isinstance(space, spaces.Box) and space.dtype == np.uint8:
        scaled = spaces.Box(0, 1, space.shape, np.float32)
        env = gym.wrappers.TransformObservation(env, lambda ram: (ram / 255).astype(np.float32), scaled)
    name = os.environ.get("WRONG_WRAPPER")
    return MISTAKES[name](env) if name else env
