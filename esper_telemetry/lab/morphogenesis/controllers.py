"""Controllers that do not learn (random, heuristic, oracle), and their runs, with the rollouts and updates of PPO but no minibatches."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.events import EpisodeEnd, RunStart, UpdateEnd
from esper_telemetry.lab.morphogenesis.environment import Morphogenesis
from esper_telemetry.lab.morphogenesis.kinds import BLUEPRINTS, Op, Stage
from esper_telemetry.lab.morphogenesis.slots import ADVANCES, ALPHA_TARGETS, LEARNING, TEMPO_EPOCHS, among
from esper_telemetry.ppo import checkpoint
from esper_telemetry.ppo.checkpoint import Checkpointables
from esper_telemetry.ppo.collectors.base import EpisodeTotals
from esper_telemetry.ppo.config import PPOConfig, require
from esper_telemetry.ppo.gradient_ranks import Ranks

BLUEPRINT_NAMES = [kind.name for kind in BLUEPRINTS]


class ScriptedController(ABC):
    """Chooses actions from the state of the environment; by default without a state of its own."""

    @abstractmethod
    def __call__(self, env: Morphogenesis) -> dict[str, Tensor]:
        """Return one choice [B] per head for the next step."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return its state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 - there may be nothing to restore
        """Restore a state."""


class RandomController(ScriptedController):
    """Chooses uniformly among the possible choices of every head."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, env: Morphogenesis) -> dict[str, Tensor]:
        """Return an operation, and choices of the other heads that it allows."""
        masks, actions = env.action_masks(), dict[str, Tensor]()
        for name, spec in env.action_specs.items():
            mask = masks.get(name, torch.ones(env.num_envs, spec.size, dtype=torch.bool, device=env.device))
            if mask.dim() == 3:
                mask = mask[torch.arange(env.num_envs, device=env.device), actions["op"]]
            noise = torch.rand(mask.shape, generator=self._generator).to(env.device)
            actions[name] = noise.masked_fill(~mask, -1.0).argmax(1)
        return actions

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the random generator."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the random generator."""
        self._generator.set_state(state["generator"])


class OracleController(ScriptedController):
    """Germinates the largest suitable seed in every slot as early as possible, and prunes harmful seeds."""

    def __call__(self, env: Morphogenesis) -> dict[str, Tensor]:
        """Return an operation that prunes a harmful seed, or advances one towards fossilisation."""
        slots = env.slots
        harmful = (slots.stage == Stage.HOLDING) & (slots.contribution < 0)
        wants = {
            Op.PRUNE: harmful,
            Op.FOSSILIZE: (slots.stage == Stage.HOLDING) & ~harmful,
            Op.ADVANCE: _ready(env),
            Op.GERMINATE: slots.stage == Stage.DORMANT,
        }
        kind = "attention" if env.colony.task.tokens > 1 else "mlp"
        return _choose(env, wants, torch.full_like(env.host.op, BLUEPRINT_NAMES.index(kind)))


class HeuristicController(ScriptedController):
    """Germinates when the host has stabilised and stops improving, prunes harmful seeds, and fossilises helpful ones.

    Blueprints rotate; a blueprint whose seed was pruned is avoided for some epochs.
    """

    FIRST_SEED_EPOCH = 5
    PLATEAU_EPOCHS = 3
    """Epochs without a better accuracy."""
    STABLE_LOSS_GAIN, STABLE_EPOCHS = (-0.05, 0.03), 3
    """Range of relative loss improvements that is considered stable, and the number of such epochs in a row."""
    MIN_FAILING_AGE, MAX_LOST_ACCURACY = 5, 0.02
    """Epochs in a stage after which a loss of accuracy counts, and the loss at which a seed is pruned."""
    MIN_CONTRIBUTION = 0.005
    """Accuracy that a seed must add to be fossilised."""
    PRUNE_PENALTY, PENALTY_DECAY, MAX_PENALTY = 2.0, 0.5, 3.0
    """Penalty of a blueprint per prune, its decay per epoch, and the penalty at which it is avoided."""
    FIRST_BLUEPRINT = "bottleneck"

    def __init__(self) -> None:
        self._loss = self._stable_epochs = self._penalty = self._next = torch.empty(0)

    def __call__(self, env: Morphogenesis) -> dict[str, Tensor]:
        """Return one operation per environment, in the order prune, fossilise, advance, germinate."""
        slots, host = env.slots, env.host
        self._update_history(env)
        lost = slots.anchor - host.val_accuracy.unsqueeze(1)
        holding = slots.stage == Stage.HOLDING
        useful = slots.contribution > self.MIN_CONTRIBUTION
        failing = among(slots.stage, LEARNING) & (slots.age >= self.MIN_FAILING_AGE) & (lost > self.MAX_LOST_ACCURACY)
        ready = (self._stable_epochs >= self.STABLE_EPOCHS) & (host.stale >= self.PLATEAU_EPOCHS)
        ready &= (host.epoch * env.horizon).round() >= self.FIRST_SEED_EPOCH
        wants = {
            Op.PRUNE: (failing & (slots.stage != Stage.FOSSILIZED)) | (holding & ~useful),
            Op.FOSSILIZE: holding & useful,
            Op.ADVANCE: _ready(env),
            Op.GERMINATE: (slots.stage == Stage.DORMANT) & ready.unsqueeze(1),
        }
        # the next blueprint in turn that fits and is not avoided; else the next that fits
        fits = env.action_masks()["blueprint"]
        distance = (torch.arange(len(BLUEPRINTS), device=env.device) - self._next.unsqueeze(1)) % len(BLUEPRINTS)
        cost = distance + len(BLUEPRINTS) * (self._penalty >= self.MAX_PENALTY) + 100 * ~fits
        actions = _choose(env, wants, cost.argmin(1))
        self._update_penalties(env, actions)
        return actions

    def state_dict(self) -> dict[str, Tensor]:
        """Return the last loss, the stable epochs, and the penalties and the turn of the blueprints."""
        return {"loss": self._loss, "calm": self._stable_epochs, "penalty": self._penalty, "next": self._next}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state."""
        self._loss, self._stable_epochs, self._penalty, self._next = (state[name] for name in ("loss", "calm", "penalty", "next"))

    def _update_history(self, env: Morphogenesis) -> None:
        loss = env.host.val_loss
        new, first = env.host.epoch == 0, BLUEPRINT_NAMES.index(self.FIRST_BLUEPRINT)
        if len(self._loss) != env.num_envs:
            self._loss, self._stable_epochs = loss, torch.zeros_like(loss)
            self._penalty = torch.zeros(env.num_envs, len(BLUEPRINTS), device=env.device)
            self._next = torch.full_like(env.host.op, first)
        gain = (self._loss - loss) / self._loss.abs().clamp(min=1e-8)
        low, high = self.STABLE_LOSS_GAIN
        stable = (gain > low) & (gain < high)
        latched = self._stable_epochs >= self.STABLE_EPOCHS
        count = torch.where(stable, self._stable_epochs + 1, 0.0)
        self._stable_epochs = torch.where(latched, self._stable_epochs, count).masked_fill(new, 0.0)
        self._penalty = (self._penalty * self.PENALTY_DECAY).masked_fill(new.unsqueeze(1), 0.0)
        self._next = self._next.masked_fill(new, first)
        self._loss = loss

    def _update_penalties(self, env: Morphogenesis, actions: Mapping[str, Tensor]) -> None:
        rows = torch.arange(env.num_envs, device=env.device)
        pruned = env.slots.blueprint[rows, actions["slot"]]
        hit = torch.nn.functional.one_hot(pruned, len(BLUEPRINTS)) * (actions["op"] == Op.PRUNE).unsqueeze(1)
        self._penalty = self._penalty + self.PRUNE_PENALTY * hit
        turn = (actions["blueprint"] + 1) % len(BLUEPRINTS)
        self._next = torch.where(actions["op"] == Op.GERMINATE, turn, self._next)


def _ready(env: Morphogenesis) -> Tensor:
    """Return the seeds [B, S] that would pass their next gate."""
    return among(env.slots.stage, tuple(ADVANCES)) & ~env.slots.moving & env.would_advance()


def _choose(env: Morphogenesis, wants: Mapping[Op, Tensor], blueprint: Tensor) -> dict[str, Tensor]:
    """Return the first operation that is wanted [B, S] and possible, on the first such slot; else WAIT."""
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
"""Controllers by name, from a seed."""


class ScriptedRun:
    """A run of a controller that does not learn; it emits the events of episodes and updates, as PPO does.

    Args:
        env: the environment.
        config: settings of PPO, of which it uses `policy` (the name of the controller), `num_steps`, `seed` and `gamma`.

    Attributes:
        hooks: hooks of the environment.
        checkpointables: objects that are saved with it.
        env_steps, updates: progress so far.
    """

    gradient_steps = 0

    def __init__(self, env: Morphogenesis, config: PPOConfig) -> None:
        require(config.policy in SCRIPTS, f"policy must be one of {', '.join(SCRIPTS)}", config.policy)
        self.env, self.config = env, config
        self.hooks, self.checkpointables, self.ranks = env.hooks, Checkpointables(), Ranks.current()
        self.env_steps = self.updates = 0
        seed = self.ranks.seed(config.seed)
        self._choose: ScriptedController = SCRIPTS[config.policy](seed)
        self._episodes = EpisodeTotals(env.num_envs)
        self._stopping = False
        env.reset(seed)

    def learn(self, total_steps: int) -> None:
        """Act until that many environment steps are done; raise ValueError if they are done already."""
        if total_steps <= self.env_steps:
            raise ValueError(f"total_steps must exceed the {self.env_steps} steps already taken, got {total_steps}")
        if self.hooks.wants(RunStart):
            facts = {
                "env": self.env.name,
                "total_steps": total_steps,
                "num_envs": self.env.num_envs * self.ranks.size,
                "ranks": self.ranks.size,
                "horizon": self.env.horizon,
                "num_steps": self.config.num_steps,
                "gamma": self.config.gamma,
                "policy": self.config.policy,
            }
            self.hooks.emit(RunStart(asdict(self.config), facts, self.updates, self.env_steps, 0))
        while self.env_steps < total_steps and not self._stopping:
            self._roll_out()
        self._stopping = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a checkpoint."""
        collector = {"environment": self.env.state_dict(), "episodes": self._episodes.state_dict()}
        return {
            "format": checkpoint.FORMAT,
            "config": asdict(self.config),
            "made_of": self._made_of(),
            "counts": {"env_steps": self.env_steps, "updates": self.updates},
            "collector": {**collector, "script": self._choose.state_dict()},
            "checkpointables": self.checkpointables.state_dict(),
        }

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint atomically."""
        return checkpoint.save(self, path)

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint, bit-identically; raise ValueError with the difference if it does not fit."""
        state = checkpoint.own_state(self.ranks, self._made_of(), path)
        self.env_steps, self.updates = state["counts"]["env_steps"], state["counts"]["updates"]
        self.env.load_state_dict(state["collector"]["environment"])
        self._episodes.load_state_dict(state["collector"]["episodes"])
        self._choose.load_state_dict(state["collector"]["script"])
        self.checkpointables.load_state_dict(state["checkpointables"])

    def _made_of(self) -> dict[str, Any]:
        """Return the facts that a checkpoint must share."""
        env = self.env
        return {"env": env.name, "num_envs": env.num_envs, "policy": self.config.policy, "features": env.observation_shape}

    def stop(self) -> None:
        """Make `learn` return after the current rollout."""
        self._stopping = True

    def _roll_out(self) -> None:
        start = time.perf_counter()
        steps = [self.env.step(self._choose(self.env)) for _ in range(self.config.num_steps)]
        self.updates += 1
        (transitions,) = self.ranks.totals(self.config.num_steps * self.env.num_envs)
        self.env_steps += transitions
        rewards = np.stack([step.rewards.cpu().numpy() for step in steps])
        ended = np.stack([(step.terminated | step.truncated).cpu().numpy() for step in steps])
        episodes = self._episodes
        episodes.count(rewards, ended, None)
        if episodes.returns:
            self.hooks.emit(EpisodeEnd(self.env_steps, episodes.returns, episodes.lengths, episodes.times))
        seconds = {"environment": time.perf_counter() - start, "inference": 0.0, "update": 0.0}
        self.hooks.emit(UpdateEnd(self.updates, self.env_steps, 0, 0.0, seconds))
