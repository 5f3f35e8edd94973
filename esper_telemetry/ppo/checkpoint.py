"""Checkpoints: everything that training goes on from, in one file that is there whole or not at all.

A file holds tensors and plain data only, so `torch.load` reads it with `weights_only=True` and runs no code of it.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from esper_telemetry.events import EpisodeEnd, UpdateEnd

if TYPE_CHECKING:
    from esper_telemetry.ppo.trainer import PPO

FORMAT = 1
RECENT = 100
FITTING = ("env", "num_envs", "heads", "observation_shape")
"""What of a trainer must be the same for a checkpoint to fit."""


class Checkpoints:
    """Keeps `latest.pt`, and `best.pt` of the highest mean return over the last hundred episodes.

    Args:
        trainer: whose checkpoints; they are written at the ends of its updates.
        directory: where.
        every: environment steps between two.
    """

    def __init__(self, trainer: PPO, directory: str | Path, *, every: int) -> None:
        self.latest, self.best = Path(directory) / "latest.pt", Path(directory) / "best.pt"
        self._trainer, self._every = trainer, every
        self._due, self._highest = trainer.env_steps + every, -math.inf
        self._returns: deque[float] = deque(maxlen=RECENT)
        trainer.hooks.on(EpisodeEnd, lambda event: self._returns.extend(event.returns))
        trainer.hooks.on(UpdateEnd, self._keep)

    def save(self) -> None:
        """Writes `latest.pt` now, and `best.pt` if no mean return was higher."""
        self._trainer.save(self.latest)
        mean = statistics.fmean(self._returns) if len(self._returns) == RECENT else -math.inf
        if mean > self._highest:
            self._highest = mean
            self._trainer.save(self.best)

    def _keep(self, event: UpdateEnd) -> None:
        if event.env_step >= self._due:
            self._due = event.env_step + self._every
            self.save()


def state_of(trainer: PPO) -> dict[str, Any]:
    """Weights, optimizer, normalisers, random generators, counts, open episodes and, where it can be saved, the environment."""
    return {
        "format": FORMAT,
        "config": asdict(trainer.config),
        "made_of": made_of(trainer),
        "policy": trainer.policy.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "normalizers": trainer.normalizers.state_dict(),
        "counts": {name: getattr(trainer, name) for name in ("env_steps", "updates", "gradient_steps")},
        "generator": trainer.generator.get_state(),
        "collector": trainer.collector.state_dict(),
    }


def save(trainer: PPO, path: str | Path) -> Path:
    """Writes a checkpoint; a reader finds the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            torch.save(state_of(trainer), file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read(path: str | Path) -> dict[str, Any]:
    """A checkpoint's content, on the CPU; raises ValueError where the file is none of ours."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of format {FORMAT}")
    return state


def load(trainer: PPO, path: str | Path) -> None:
    """Makes a trainer go on from a checkpoint.

    With the environment's state the run is the one that would have been without a break; where it could not be saved, and on all
    ranks but the first, new episodes begin.

    Raises:
        ValueError: the file does not fit; the sentence says which part differs.
    """
    state = read(path)
    check(trainer, state, path)
    trainer.policy.load_state_dict(state["policy"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.normalizers.load_state_dict(state["normalizers"])
    for name, count in state["counts"].items():
        setattr(trainer, name, count)
    trainer.generator.set_state(state["generator"])
    if trainer.ranks.rank == 0:  # it is rank 0's: with it the others would draw the same actions in the same episodes
        trainer.collector.load_state_dict(state["collector"])
    if trainer.watchdog is not None:
        trainer.watchdog.remember()


def check(trainer: PPO, state: Mapping[str, Any], path: str | Path) -> None:
    """Raises ValueError naming the first part of the trainer that the checkpoint does not fit."""
    present, saved = made_of(trainer), state["made_of"]
    for name in FITTING:
        if present[name] != saved[name]:
            raise ValueError(f"{path} does not fit: its {name} is {saved[name]}, here it is {present[name]}")
    for name, module in (("policy", trainer.policy), ("normalizers", trainer.normalizers)):
        shapes = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
        others = {key: tuple(tensor.shape) for key, tensor in state[name].items()}
        for key in sorted(shapes.keys() | others.keys()):
            if shapes.get(key) != others.get(key):
                found = f"has {others.get(key, 'nothing')}, here it is {shapes.get(key, 'not there')}"
                raise ValueError(f"{path} does not fit: {name} {key} {found}")


def made_of(trainer: PPO) -> dict[str, Any]:
    """What decides whether a checkpoint fits, as plain data."""
    env = trainer.env
    return {
        "env": env.name,
        "num_envs": env.num_envs,
        "heads": {name: (kind_of(trainer, name), spec.size) for name, spec in env.action_specs.items()},
        "observation_shape": tuple(env.observation_shape),
    }


def kind_of(trainer: PPO, part: str) -> str:
    """What the head for that part is; a squash has no weights that would tell."""
    head = trainer.policy.head(part)
    return head.kind if head.squash is None else f"{head.kind}, squashed"
