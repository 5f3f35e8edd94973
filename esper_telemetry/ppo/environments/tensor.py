"""Tensor environments on the host, stepped as arrays that share their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from esper_telemetry.ppo.environments.observations import layout_of
from esper_telemetry.ppo.environments.protocol import (
    Array,
    Masked,
    Saveable,
    Step,
    TensorEnvironment,
    VectorEnvironment,
)


class OnHost:
    """A tensor environment as a `VectorEnvironment`; nothing is copied."""

    def __init__(self, env: TensorEnvironment) -> None:
        self._env = env
        self.name, self.num_envs = env.name, env.num_envs
        self.observation_shape, self.action_specs = env.observation_shape, env.action_specs
        self.observation_layout = layout_of(env)

    def reset(self, seed: int | None = None) -> Array:
        """Begins episodes everywhere."""
        observations: Array = self._env.reset(seed).numpy()
        return observations

    def step(self, actions: Mapping[str, Array]) -> Step:
        """Takes one action everywhere."""
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

    def close(self) -> None:
        """Closes the environments."""
        self._env.close()

    def state_dict(self) -> dict[str, Any] | None:
        """State of the environment; None where it cannot be saved."""
        return self._env.state_dict() if isinstance(self._env, Saveable) else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the environment go on from a saved state."""
        assert isinstance(self._env, Saveable)
        self._env.load_state_dict(state)


class MaskedOnHost(OnHost):
    """The same for an environment with action masks."""

    _env: TensorEnvironment

    def action_masks(self) -> dict[str, Array]:
        """The masks as arrays."""
        assert isinstance(self._env, Masked)
        masks: Mapping[str, Tensor] = self._env.action_masks()
        return {name: mask.numpy() for name, mask in masks.items()}


def on_host(env: TensorEnvironment) -> VectorEnvironment:
    """The environment, whose tensors are on the host, as one of arrays."""
    return MaskedOnHost(env) if isinstance(env, Masked) else OnHost(env)
