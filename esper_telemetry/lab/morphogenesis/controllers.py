"""Controllers that learn nothing: at random, by rules of thumb, and by knowing what pays. They act through the same step as PPO.

Runs of a policy that does not learn: rollouts and updates as in training, without minibatches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.events import EpisodeEnd, RunStart, UpdateEnd
from esper_telemetry.lab.morphogenesis.environment import Morphogenesis
from esper_telemetry.lab.morphogenesis.network import BLUEPRINTS
from esper_telemetry.lab.morphogenesis.slots import ADVANCES, ALPHA_TARGETS, LEARNING, TEMPO_EPOCHS, Op, Stage, among
from esper_telemetry.ppo import checkpoint
from esper_telemetry.ppo.checkpointables import Checkpointables
from esper_telemetry.ppo.collectors.base import EpisodeCounter
from esper_telemetry.ppo.config import PPOConfig, require
from esper_telemetry.ppo.environments.protocol import TensorStep
from esper_telemetry.ppo.ranks import Ranks

BLUEPRINT_NAMES = [kind.name for kind in BLUEPRINTS]


class ScriptedController(Protocol):
    """Chooses actions by looking at the environment itself."""

    def __call__(self, env: Morphogenesis) -> dict[str, Tensor]:
        """One choice [B] per head for the next step."""

    def state_dict(self) -> dict[str, Tensor]:
        """What it remembers."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on with what was remembered."""


class RandomController:
    """Every possible choice of every head is equally likely."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, env: Morphogenesis) -> dict[str, Tensor]:
        """An operation, then what goes with it."""
        masks, taken = env.action_masks(), dict[str, Tensor]()
        for name, spec in env.action_specs.items():
            mask = masks.get(name, torch.ones(env.num_envs, spec.size, dtype=torch.bool, device=env.device))
            if mask.dim() == 3:
                mask = mask[torch.arange(env.num_envs, device=env.device), taken["op"]]
            noise = torch.rand(mask.shape, generator=self._generator).to(env.device)
            taken[name] = noise.masked_fill(~mask, -1.0).argmax(1)
        return taken

    def state_dict(self) -> dict[str, Tensor]:
        """Of the random generator."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on drawing."""
        self._generator.set_state(state["generator"])


class OracleController:
    """Grows the largest fitting seed as early as it can, in every slot, and keeps what helps."""

    def __call__(self, env: Morphogenesis) -> dict[str, Tensor]:
        """Whatever brings a seed on: fossilise, advance, germinate; a seed that does harm goes."""
        slots = env.slots
        harmful = (slots.stage == Stage.HOLDING) & (slots.contribution < 0)
        wants = {
            Op.PRUNE: harmful,
            Op.FOSSILIZE: (slots.stage == Stage.HOLDING) & ~harmful,
            Op.ADVANCE: _ready(env),
            Op.GERMINATE: slots.stage == Stage.DORMANT,
        }
        kind = "attention" if env.colony.task.tokens > 1 else "mlp"
        return _carry_out(env, wants, torch.full_like(env.host.op, BLUEPRINT_NAMES.index(kind)))

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Has nothing to go on with."""


class HeuristicController:
    """Rules of thumb: a seed when a host that has settled stops improving, out when it does harm, for good when it helps.

    Blueprints take turns; one that was pruned is avoided for a while.
    """

    earliest, plateau, calm, settled = 5, 3, (-0.05, 0.03), 3
    """Epochs before the first seed; without a better accuracy; relative improvements of the loss that are calm, so often in a row."""
    patience, harm, worth = 5, 0.02, 0.005
    """Epochs in a stage before accuracy that was lost counts, how much of it, and what a seed must add to be kept."""
    penalty, forgiving, avoided = 2.0, 0.5, 3.0
    first = "bottleneck"
    """Added to a blueprint with every prune, kept of it per epoch, from where on it is not used; and whose turn comes first."""

    def __init__(self) -> None:
        self._loss = self._calm = self._penalty = self._next = torch.empty(0)

    def __call__(self, env: Morphogenesis) -> dict[str, Tensor]:
        """One operation per environment; the most pressing one first."""
        slots, host = env.slots, env.host
        self._remember(env)
        lost = slots.anchor - host.val_accuracy.unsqueeze(1)
        holding = slots.stage == Stage.HOLDING
        worthy = slots.contribution > self.worth
        failing = among(slots.stage, LEARNING) & (slots.age >= self.patience) & (lost > self.harm)
        ready = (self._calm >= self.settled) & (host.stale >= self.plateau)
        if host.epoch * env.horizon < self.earliest:
            ready = torch.zeros_like(ready)
        wants = {
            Op.PRUNE: (failing & (slots.stage != Stage.FOSSILIZED)) | (holding & ~worthy),
            Op.FOSSILIZE: holding & worthy,
            Op.ADVANCE: _ready(env),
            Op.GERMINATE: (slots.stage == Stage.DORMANT) & ready.unsqueeze(1),
        }
        actions = _carry_out(env, wants, self._blueprint(env))
        self._learn(env, actions)
        return actions

    def state_dict(self) -> dict[str, Tensor]:
        """The last loss, how calm it was, the penalties of blueprints, and whose turn it is."""
        return {"loss": self._loss, "calm": self._calm, "penalty": self._penalty, "next": self._next}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on with them."""
        self._loss, self._calm, self._penalty, self._next = (
            state[name] for name in ("loss", "calm", "penalty", "next")
        )

    def _remember(self, env: Morphogenesis) -> None:
        loss = env.host.val_loss
        if env.host.epoch == 0 or len(self._loss) != env.num_envs:
            self._calm = torch.zeros_like(loss)
            self._penalty = torch.zeros(env.num_envs, len(BLUEPRINTS), device=env.device)
            self._next = torch.full_like(env.host.op, BLUEPRINT_NAMES.index(self.first))
        else:
            gain = (self._loss - loss) / self._loss.abs().clamp(min=1e-8)
            low, high = self.calm
            quiet = (gain > low) & (gain < high)
            latched = self._calm >= self.settled
            self._calm = torch.where(latched, self._calm, torch.where(quiet, self._calm + 1, 0.0))
            self._penalty = self._penalty * self.forgiving
        self._loss = loss

    def _blueprint(self, env: Morphogenesis) -> Tensor:
        """The next in turn that fits and is not avoided; else the next that fits."""
        fits = env.action_masks()["blueprint"]
        distance = (torch.arange(len(BLUEPRINTS), device=env.device) - self._next.unsqueeze(1)) % len(BLUEPRINTS)
        cost = distance + len(BLUEPRINTS) * (self._penalty >= self.avoided) + 100 * ~fits
        return cost.argmin(1)

    def _learn(self, env: Morphogenesis, actions: Mapping[str, Tensor]) -> None:
        rows = torch.arange(env.num_envs, device=env.device)
        pruned = env.slots.blueprint[rows, actions["slot"]]
        hit = torch.nn.functional.one_hot(pruned, len(BLUEPRINTS)) * (actions["op"] == Op.PRUNE).unsqueeze(1)
        self._penalty = self._penalty + self.penalty * hit
        turn = (actions["blueprint"] + 1) % len(BLUEPRINTS)
        self._next = torch.where(actions["op"] == Op.GERMINATE, turn, self._next)


def _ready(env: Morphogenesis) -> Tensor:
    """Seeds [B, S] that would pass the gate before them."""
    return among(env.slots.stage, tuple(ADVANCES)) & ~env.slots.moving & env.would_advance()


def _carry_out(env: Morphogenesis, wants: Mapping[Op, Tensor], blueprint: Tensor) -> dict[str, Tensor]:
    """The first operation that is wanted [B, S] and possible, on the first slot; else WAIT."""
    possible = env.action_masks()["slot"]
    op, slot = torch.zeros_like(env.host.op), torch.zeros_like(env.host.op)
    for wanted, where in reversed(list(wants.items())):
        here = where & possible[:, wanted]
        op = torch.where(here.any(1), int(wanted), op)
        slot = torch.where(here.any(1), here.int().argmax(1), slot)
    rest = {name: torch.zeros_like(op) for name in env.action_specs}
    full, quick = torch.full_like(op, ALPHA_TARGETS.index(1.0)), torch.full_like(op, TEMPO_EPOCHS.index(3))
    return {**rest, "op": op, "slot": slot, "blueprint": blueprint, "alpha_target": full, "tempo": quick}


SCRIPTS: Mapping[str, Callable[[int], ScriptedController]] = {
    "heuristic": lambda _: HeuristicController(),
    "oracle": lambda _: OracleController(),
    "random": RandomController,
}
"""By name, from a seed."""


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
