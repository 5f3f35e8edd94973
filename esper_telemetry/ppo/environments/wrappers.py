"""Wrappers of environments: tensors on the host as arrays, and classic control without its velocities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.ppo.environments.environment_protocol import (
    Array,
    Masked,
    Step,
    Task,
    TensorEnvironment,
    VectorEnvironment,
    horizon_of,
    layout_of,
    restore_state,
    reward_threshold_of,
    saved_state,
)


class Wrapper:
    """Base of wrappers; passes calls on to the wrapped environments `env`."""

    def __init__(self, env: Task) -> None:
        self._inner = env
        self.num_envs, self.observation_shape, self.action_specs = env.num_envs, env.observation_shape, env.action_specs

    def close(self) -> None:
        """Close the environments."""
        self._inner.close()

    def state_dict(self) -> dict[str, Any] | None:
        """State of the environment; None if it cannot be saved."""
        return saved_state(self._inner)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the environment continue from a saved state."""
        restore_state(self._inner, state)


class OnHost(Wrapper):
    """A tensor environment as a `VectorEnvironment`; nothing is copied."""

    def __init__(self, env: TensorEnvironment) -> None:
        super().__init__(env)
        self._env = env
        self.name = env.name
        self.observation_layout = layout_of(env)

    def reset(self, seed: int | None = None) -> Array:
        """Begin episodes everywhere."""
        observations: Array = self._env.reset(seed).numpy()
        return observations

    def step(self, actions: Mapping[str, Array]) -> Step:
        """Take one action everywhere."""
        step = self._env.step({name: torch.from_numpy(action) for name, action in actions.items()})
        final = step.final_observations
        return Step(
            step.observations.numpy(),
            step.rewards.numpy(),
            step.terminated.numpy(),
            step.truncated.numpy(),
            None,
            None if final is None else final.numpy(),
        )


class MaskedOnHost(OnHost):
    """A tensor environment with action masks as a `VectorEnvironment`."""

    _env: TensorEnvironment

    def action_masks(self) -> dict[str, Array]:
        """The masks as arrays."""
        assert isinstance(self._env, Masked)
        masks: Mapping[str, Tensor] = self._env.action_masks()
        return {name: mask.numpy() for name, mask in masks.items()}


def on_host(env: TensorEnvironment) -> VectorEnvironment:
    """Return an environment with tensors on the host as one with arrays."""
    return MaskedOnHost(env) if isinstance(env, Masked) else OnHost(env)


VELOCITIES = {
    "CartPole-v0": (1, 3),
    "CartPole-v1": (1, 3),
    "Acrobot-v1": (4, 5),
    "Pendulum-v1": (2,),
    "MountainCar-v0": (1,),
    "MountainCarContinuous-v0": (1,),
}
"""Indices of the velocities in an observation."""


def velocities(env_id: str) -> tuple[int, ...]:
    """Indices of the velocities in that task's observations; raise ValueError for an unknown task."""
    if env_id not in VELOCITIES:
        raise ValueError(f"mask_velocity supports {', '.join(VELOCITIES)}, got {env_id!r}")
    return VELOCITIES[env_id]


class HiddenVelocity(Wrapper):
    """An environment whose observations have zeros for the components `hidden`; their shape is unchanged."""

    def __init__(self, env: VectorEnvironment, hidden: tuple[int, ...]) -> None:
        super().__init__(env)
        self._env = env
        self._visible = np.ones(env.observation_shape, np.float32)
        self._visible[list(hidden)] = 0
        self.name = f"{env.name} without velocities"
        self.horizon = horizon_of(env)
        self.reward_threshold = reward_threshold_of(env)

    def reset(self, seed: int | None = None) -> Array:
        """Begin episodes everywhere."""
        observations: Array = self._env.reset(seed) * self._visible
        return observations

    def step(self, actions: Mapping[str, Array]) -> Step:
        """Take one action everywhere."""
        step = self._env.step(actions)
        final = step.final_observations
        return step._replace(
            observations=step.observations * self._visible, final_observations=None if final is None else final * self._visible
        )
