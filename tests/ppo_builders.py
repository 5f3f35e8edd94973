"""Small trainers and rollouts for tests of the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.rollout import Rollout

SMALL = {"num_steps": 32, "hidden_sizes": (16, 16), "num_epochs": 2}


def cartpole(seed: int = 0, **settings: Any) -> PPO:
    return PPO(make_env("CartPole-v1", num_envs=4, seed=seed), PPOConfig(**{**SMALL, "seed": seed, **settings}))


def pendulum(seed: int = 0, **settings: Any) -> PPO:
    return PPO(make_env("Pendulum-v1", num_envs=2, seed=seed), PPOConfig(**{**SMALL, "seed": seed, **settings}))


def weights(trainer: PPO) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.policy.parameters()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    """Return True if the tensors agree bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@dataclass
class EventLog:
    """Events of some types that trainers emitted, in order."""

    events: list[Any] = field(default_factory=list)

    def listen(self, trainer: PPO, *types: type) -> EventLog:
        """Record these events of the trainer; return the log."""
        for event_type in types:
            trainer.hooks.on(event_type, self.events.append)
        return self

    def of(self, event_type: type) -> list[Any]:
        return [event for event in self.events if type(event) is event_type]


def random_rollout(steps: int = 37, envs: int = 5, *, seed: int = 0, invalid: bool = False) -> Rollout:
    """Return a rollout whose episodes end in both ways, also at its edges."""
    generator = torch.Generator().manual_seed(seed)
    normal = [torch.randn(steps, envs, generator=generator) for _ in range(4)]
    terminated = torch.rand(steps, envs, generator=generator) < 0.1
    truncated = torch.rand(steps, envs, generator=generator) < 0.1
    ended = terminated | truncated
    ended[-1, 0] = terminated[-1, 0] = ended[-1, 1] = True
    valid = torch.ones_like(ended)
    valid[1:] = ~ended[:-1] if invalid else True
    return Rollout(
        observations=normal[3].unsqueeze(-1),
        actions={"action": torch.zeros(steps, envs, dtype=torch.int64)},
        log_probs=normal[3],
        rewards=normal[0],
        values=normal[1],
        next_values=normal[2].masked_fill(terminated, 0.0),
        ended=ended & valid,
        terminated=terminated & valid,
        valid=valid if invalid else None,
        transitions=int(valid.sum()),
    )
