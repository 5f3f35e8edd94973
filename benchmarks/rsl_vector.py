"""CartPole-v1 for RSL-RL, with resets within the step and signs as actions: Gymnasium's vector implementation, or torch on a device."""

from __future__ import annotations

from typing import Any

import torch
from native import NativeCartPole
from rsl_rl.env import VecEnv
from tensordict import TensorDict
from torch import Tensor


class SignedCartPole(VecEnv):  # type: ignore[misc] # the package has no type information
    """CartPole-v1 in which a positive action pushes right.

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
        """Step all environments."""
        outcome = self._env.step((actions[:, 0] > 0).long().numpy())
        self._observations = outcome.observations
        time_outs = torch.from_numpy(outcome.truncated & ~outcome.terminated)
        rewards, dones = torch.from_numpy(outcome.rewards), torch.from_numpy(outcome.done).long()
        return self.get_observations(), rewards, dones, {"time_outs": time_outs}


class DeviceCartPole(VecEnv):  # type: ignore[misc] # the package has no type information
    """The same dynamics in torch, for thousands of environments whose tensors never leave the device, as in Isaac Lab."""

    def __init__(self, num_envs: int, seed: int, device: str = "cuda") -> None:
        self.num_envs, self.num_actions, self.max_episode_length = num_envs, 1, 500
        self.device = device
        self.cfg: dict[str, Any] = {}
        self._generator = torch.Generator(device).manual_seed(seed)
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long, device=device)
        self._state = self._initial_states()

    def get_observations(self) -> TensorDict:
        """Return the observations to act on."""
        return TensorDict({"policy": self._state.clone()}, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Step all environments."""
        _, velocity, angle, angular_velocity = self._state.unbind(-1)
        force = torch.where(actions[:, 0] > 0, 10.0, -10.0)
        sine, cosine = angle.sin(), angle.cos()
        thrust = (force + 0.05 * angular_velocity.square() * sine) / 1.1
        angular_acceleration = (9.8 * sine - cosine * thrust) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        acceleration = thrust - 0.05 * angular_acceleration * cosine / 1.1
        derivative = torch.stack([velocity, acceleration, angular_velocity, angular_acceleration], -1)
        self._state = self._state + 0.02 * derivative
        self.episode_length_buf += 1
        terminated = (self._state[:, 0].abs() > 2.4) | (self._state[:, 2].abs() > 0.2095)
        truncated = (self.episode_length_buf >= self.max_episode_length) & ~terminated
        done = terminated | truncated
        self._state = torch.where(done[:, None], self._initial_states(), self._state)
        self.episode_length_buf *= ~done
        rewards = torch.ones(self.num_envs, device=self.device)
        return self.get_observations(), rewards, done.long(), {"time_outs": truncated}

    def _initial_states(self) -> Tensor:
        uniform = torch.rand(self.num_envs, 4, generator=self._generator, device=self.device)
        return 0.1 * uniform - 0.05
