"""Runs of a policy that does not learn: rollouts and updates as in training, without minibatches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from esper_telemetry.events import EpisodeEnd, RunStart, UpdateEnd
from esper_telemetry.lab.morphogenesis.controllers import SCRIPTS, ScriptedController
from esper_telemetry.lab.morphogenesis.environment import Morphogenesis
from esper_telemetry.ppo import checkpoint
from esper_telemetry.ppo.checkpoint import Checkpointables
from esper_telemetry.ppo.collectors.base import EpisodeCounter
from esper_telemetry.ppo.config import PPOConfig, require
from esper_telemetry.ppo.environments.protocol import TensorStep
from esper_telemetry.ppo.ranks import Ranks


class ScriptedRun:
    """Lets a scripted policy act in an environment, through the same steps that PPO takes.

    It tells of episodes and updates and of what the environment tells by itself.

    Args:
        env: where.
        config: of PPO; its `policy` names the script, and `num_steps` and `seed` count.

    Attributes:
        hooks: who is told of what happens.
        checkpointables: what is saved with it.
        env_steps, updates: what has been done so far.
    """

    gradient_steps = 0

    def __init__(self, env: Morphogenesis, config: PPOConfig) -> None:
        require(config.policy in SCRIPTS, f"policy must be one of {', '.join(SCRIPTS)}", config.policy)
        self.env, self.config = env, config
        self.hooks, self.checkpointables, self.ranks = env.hooks, Checkpointables(), Ranks.current()
        self.env_steps = self.updates = 0
        seed = self.ranks.seed(config.seed)
        self._choose: ScriptedController = SCRIPTS[config.policy](seed)
        self._episodes = EpisodeCounter(env.num_envs)
        self._stopping = False
        env.reset(seed)

    def learn(self, total_steps: int) -> None:
        """Acts until that many environment steps are taken; raises ValueError where they are taken already."""
        if total_steps <= self.env_steps:
            raise ValueError(f"total_steps must exceed the {self.env_steps} steps already taken, got {total_steps}")
        if self.hooks.wants(RunStart):
            facts = self._facts(total_steps)
            self.hooks.emit(RunStart(asdict(self.config), facts, self.updates, self.env_steps, 0))
        while self.env_steps < total_steps and not self._stopping:
            self._roll_out()
        self._stopping = False

    def state_dict(self) -> dict[str, Any]:
        """All that it goes on from."""
        collector = {"environment": self.env.state_dict(), "episodes": self._episodes.state_dict()}
        return {
            "format": checkpoint.FORMAT,
            "config": asdict(self.config),
            "made_of": self._made_of(),
            "counts": {"env_steps": self.env_steps, "updates": self.updates},
            "collector": {**collector, "script": self._choose.state_dict()},
            "companions": self.checkpointables.state_dict(),
        }

    def save(self, path: str | Path) -> Path:
        """Writes a checkpoint, whole or not at all."""
        return checkpoint.save(self, path)

    def load(self, path: str | Path) -> None:
        """Goes on from a checkpoint, bit for bit; raises ValueError, with what differs, where it does not fit."""
        state = checkpoint.own_state(self.ranks, self._made_of(), path)
        self.env_steps, self.updates = state["counts"]["env_steps"], state["counts"]["updates"]
        self.env.load_state_dict(state["collector"]["environment"])
        self._episodes.load_state_dict(state["collector"]["episodes"])
        self._choose.load_state_dict(state["collector"]["script"])
        self.checkpointables.load_state_dict(state["companions"])

    def _made_of(self) -> dict[str, Any]:
        """What decides whether a checkpoint fits."""
        env = self.env
        return {
            "env": env.name,
            "num_envs": env.num_envs,
            "policy": self.config.policy,
            "features": env.observation_shape,
        }

    def stop(self) -> None:
        """Makes `learn` return after the rollout it is in."""
        self._stopping = True

    def _roll_out(self) -> None:
        start = time.perf_counter()
        steps = [self.env.step(self._choose(self.env)) for _ in range(self.config.num_steps)]
        self.updates += 1
        (transitions,) = self.ranks.totals(self.config.num_steps * self.env.num_envs)
        self.env_steps += transitions
        self._count(steps)
        seconds = {"environment": time.perf_counter() - start, "inference": 0.0, "update": 0.0}
        self.hooks.emit(UpdateEnd(self.updates, self.env_steps, 0, 0.0, seconds))

    def _count(self, steps: list[TensorStep]) -> None:
        rewards = np.stack([step.rewards.cpu().numpy() for step in steps])
        ended = np.stack([(step.terminated | step.truncated).cpu().numpy() for step in steps])
        episodes = self._episodes
        episodes.count(rewards, ended, None)
        if episodes.returns:
            self.hooks.emit(EpisodeEnd(self.env_steps, episodes.returns, episodes.lengths, episodes.times))

    def _facts(self, total_steps: int) -> Mapping[str, Any]:
        return {
            "env": self.env.name,
            "total_steps": total_steps,
            "num_envs": self.env.num_envs * self.ranks.size,
            "ranks": self.ranks.size,
            "horizon": self.env.horizon,
            "num_steps": self.config.num_steps,
            "gamma": self.config.gamma,
            "policy": self.config.policy,
        }
