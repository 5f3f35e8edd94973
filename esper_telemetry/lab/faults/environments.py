"""The environments on which faults are tried: small, quick, and of different kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from esper_telemetry.ppo.config import preset
from esper_telemetry.ppo.environments.registry import make_env
from esper_telemetry.ppo.trainer import PPO


@dataclass(frozen=True, slots=True)
class Bed:
    """A task and a policy for it.

    Attributes:
        env: what `make_env` takes.
        policy: `mlp` or `lstm`.
        mask_velocity: whether velocities are hidden.
        settings: where they differ from the preset's.
        updates: updates of a full run, which schedules refer to.
    """

    env: str
    policy: str
    mask_velocity: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    updates: int = 150

    def trainer(self, seed: int, **changes: Any) -> PPO:
        """A trainer of that seed; `changes` of its settings win."""
        tuned = preset(self.env, self.policy, mask_velocity=self.mask_velocity)
        env = make_env(self.env, num_envs=tuned.num_envs, mask_velocity=self.mask_velocity)
        return PPO(env, tuned.config(**{**self.settings, "seed": seed, **changes}))


BEDS: Mapping[str, Bed] = {
    "cue-recall": Bed("cue-recall", "lstm"),
    "cartpole": Bed("CartPole-v1", "mlp"),
    "cartpole-lstm": Bed("CartPole-v1", "lstm", mask_velocity=True),
    "acrobot": Bed("Acrobot-v1", "mlp", settings={"activation": "relu"}),
    "pendulum": Bed("Pendulum-v1", "mlp", settings={"num_steps": 128, "num_epochs": 8, "normalize_rewards": False}),
}


def bed(name: str) -> Bed:
    """That bed, or the preset of any other environment; raises ValueError for one that cannot be made."""
    if name in BEDS:
        return BEDS[name]
    make_env(name, num_envs=1).close()
    return Bed(name, "mlp")
