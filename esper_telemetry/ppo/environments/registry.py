"""Environments by name."""

from __future__ import annotations

from typing import Any

from esper_telemetry.lab.morphogenesis.environment import Morphogenesis
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.ppo.environments.gymnasium import make_vector
from esper_telemetry.ppo.environments.protocol import Environment
from esper_telemetry.ppo.environments.wrappers import HiddenVelocity, velocities


def make_env(
    env_id: str, *, num_envs: int = 8, seed: int | None = None, mask_velocity: bool = False, **kwargs: Any
) -> Environment:
    """`num_envs` copies of a task: a registered Gymnasium id, `cue-recall` or `morphogenesis`.

    Args:
        env_id: a registered id; `module:Id` imports the module that registers it first.
        num_envs: how many run side by side.
        seed: makes the episodes repeatable.
        mask_velocity: hides the velocities of a classic-control task, so that it needs memory.
        kwargs: handed to the environment's constructor.

    Raises:
        ValueError: unknown id, unsupported space, no environments, no velocities to hide, or a wrong argument.
        ImportError: gymnasium, or what a task's data come with, is missing.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}")
    hidden = velocities(env_id) if mask_velocity else ()
    if env_id == CueRecall.name:
        return CueRecall(num_envs, seed=seed, **kwargs)
    if env_id == Morphogenesis.name:
        return Morphogenesis(num_envs, seed=seed, **kwargs)
    env = make_vector(env_id, num_envs, seed, kwargs)
    return HiddenVelocity(env, hidden) if mask_velocity else env
