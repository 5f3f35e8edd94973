"""CartPole-v1 as RSL-RL wants it: Gymnasium's own vector implementation, resets within the step, signs for actions."""

from __future__ import annotations

from typing import Any

import torch
from native import NativeCartPole
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
        self._env = NativeCartPole(num_envs, seed)
        self.returns = self._env.returns
        self._observations = self._env.reset()

    def get_observations(self) -> TensorDict:
        """Return the observations to act on."""
        return TensorDict({"policy": torch.from_numpy(self._observations)}, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Takes one action everywhere."""
        outcome = self._env.step((actions[:, 0] > 0).long().numpy())
        self._observations = outcome.observations
        time_outs = torch.from_numpy(outcome.truncated & ~outcome.terminated)
        rewards, dones = torch.from_numpy(outcome.rewards), torch.from_numpy(outcome.done).long()
        return self.get_observations(), rewards, dones, {"time_outs": time_outs}
