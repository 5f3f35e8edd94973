"""CartPole-v1 for Stable-Baselines3 on Gymnasium's vector implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
from native import NativeCartPole
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn


class NativeVecEnv(VecEnv):
    """Reports episodes as Stable-Baselines3's monitor does."""

    def __init__(self, num_envs: int, seed: int) -> None:
        self._native = NativeCartPole(num_envs, seed)
        env = self._native.env
        super().__init__(num_envs, env.single_observation_space, env.single_action_space)
        self._actions: Any = None

    def reset(self) -> Any:
        """Return observations [B, 4]."""
        return self._native.reset()

    def step_async(self, actions: Any) -> None:
        """Keep the actions for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step with the kept actions."""
        outcome = self._native.step(self._actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        ended = np.flatnonzero(outcome.done)
        returns = list(self._native.returns)[-len(ended) :] if len(ended) else []
        for index, value in zip(ended[-len(returns) :], returns, strict=True):
            cut = bool(outcome.truncated[index] and not outcome.terminated[index])
            episode = {"r": value, "l": int(value), "t": 0.0}
            infos[index] = {"terminal_observation": outcome.last[index], "TimeLimit.truncated": cut, "episode": episode}
        return outcome.observations, outcome.rewards, outcome.done, infos

    def close(self) -> None:
        """Close nothing."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return the same attribute for all environments."""
        return [getattr(self._native.env, attr_name)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set nothing."""

    def env_method(self, method_name: str, *arguments: Any, indices: Any = None, **named: Any) -> list[Any]:
        """Call nothing, because single environments do not exist."""
        raise NotImplementedError(method_name)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Return False for all environments."""
        return [False] * self.num_envs
