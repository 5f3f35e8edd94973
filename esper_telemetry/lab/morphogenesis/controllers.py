"""Controllers that learn nothing: at random, by rules of thumb, and by knowing what pays. They act through the same step as PPO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from esper_telemetry.lab.morphogenesis.environment import Morphogenesis
from esper_telemetry.lab.morphogenesis.lifecycle import ADVANCES, LEARNING, TARGETS, TEMPOS, Op, Stage, among
from esper_telemetry.lab.morphogenesis.network import BLUEPRINTS

NAMES = [kind.name for kind in BLUEPRINTS]


class ScriptedController(Protocol):
    """Chooses actions by looking at the environment itself."""

    def __call__(self, env: Morphogenesis) -> dict[str, Tensor]:
        """One choice [B] per head for the next step."""

    def state_dict(self) -> dict[str, Tensor]:
        """What it remembers."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on with what was remembered."""


class Random:
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


class Oracle:
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
        return _carry_out(env, wants, torch.full_like(env.host.op, NAMES.index(kind)))

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Has nothing to go on with."""


class Heuristic:
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
            self._next = torch.full_like(env.host.op, NAMES.index(self.first))
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
    full, quick = torch.full_like(op, TARGETS.index(1.0)), torch.full_like(op, TEMPOS.index(3))
    return {**rest, "op": op, "slot": slot, "blueprint": blueprint, "alpha_target": full, "tempo": quick}


SCRIPTS: Mapping[str, Callable[[int], ScriptedController]] = {
    "heuristic": lambda _: Heuristic(),
    "oracle": lambda _: Oracle(),
    "random": Random,
}
"""By name, from a seed."""
