"""CartPole-v1 as RSL-RL wants it: Gymnasium's own vector implementation, resets within the step, signs for actions."""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import numpy as np
import torch
from rsl_rl.env import VecEnv
from tensordict import TensorDict
from torch import Tensor


class SignedCartPole(VecEnv):  # type: ignore[misc] # the package has no type information
    """CartPole-v1 where a positive action pushes right.

    Attributes:
        returns: of the last hundred episodes.
    """

    def __init__(self, num_envs: int, seed: int) -> None:
        self.num_envs, self.num_actions, self.max_episode_length = num_envs, 1, 500
        self.device = "cpu"
        self.cfg: dict[str, Any] = {}
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long)
        self.returns: deque[float] = deque(maxlen=100)
        same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP, "copy": False}
        self._env = gymnasium.make_vec(
            "CartPole-v1", num_envs, vectorization_mode="sync", vector_kwargs=same_step, disable_env_checker=True
        )
        self._observations = self._env.reset(seed=seed)[0]
        self._open = np.zeros(num_envs)

    def get_observations(self) -> TensorDict:
        """What to act on."""
        return TensorDict({"policy": torch.from_numpy(self._observations.copy())}, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Takes one action everywhere."""
        choices = (actions[:, 0] > 0).long().numpy()
        self._observations, rewards, terminated, truncated, _ = self._env.step(choices)
        dones = terminated | truncated
        self._open += rewards
        if dones.any():
            self.returns.extend(self._open[dones].tolist())
            self._open[dones] = 0
        time_outs = torch.from_numpy(truncated & ~terminated)
        rewards = torch.from_numpy(rewards.astype(np.float32))
        return self.get_observations(), rewards, torch.from_numpy(dones).long(), {"time_outs": time_outs}
