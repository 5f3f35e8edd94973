"""Saved states: checkpoints in files, the last finite weights in memory, and the global random generators.

A file holds tensors and plain data only, so `torch.load` reads it with `weights_only=True` and runs no code of it. It replaces its
predecessor whole or not at all. Several ranks have one file: the first rank gathers what differs between them, for which all ranks stop
once. Files side by side could stem from different updates after a kill.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import random
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_telemetry.events import EpisodeEnd, Hooks, UpdateEnd
from esper_telemetry.ppo.checkpointables import Checkpointables
from esper_telemetry.ppo.ranks import Ranks

if TYPE_CHECKING:
    from esper_telemetry.ppo.trainer import PPO

PATIENCE = 3
"""Rollbacks in a row after which training gives up."""


class Watchdog:
    """Check of the weights after every update, which waits for the device; the last good ones return where some are not finite.

    Attributes:
        rollbacks: how often the weights were put back, over the run.
    """

    def __init__(self, modules: nn.Module, optimizer: Optimizer) -> None:
        self.rollbacks = 0
        self._modules, self._optimizer = modules, optimizer
        self._in_a_row = 0
        self._good: dict[str, Tensor] = {}
        self.remember()

    def remember(self) -> None:
        """Store the present weights and statistics as the good ones."""
        self._good = {name: tensor.clone() for name, tensor in self._modules.state_dict().items()}

    def state_dict(self) -> dict[str, int]:
        """Return the counts; the good weights are those of the same checkpoint."""
        return {"rollbacks": self.rollbacks, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting, and store the present weights as the good ones."""
        self.rollbacks, self._in_a_row = state.get("rollbacks", 0), state.get("in_a_row", 0)
        self.remember()

    def look(self) -> bool:
        """Return True where all weights are finite; otherwise restore the good ones and drop the optimizer's moments.

        Raises:
            FloatingPointError: for the third time in a row.
        """
        if self._finite():
            self._in_a_row = 0
            self.remember()
            return True
        self.rollbacks += 1
        self._in_a_row += 1
        if self._in_a_row >= PATIENCE:
            raise FloatingPointError(
                f"weights were not finite after {PATIENCE} updates in a row; rolled back each time"
            )
        self._modules.load_state_dict(self._good)
        self._optimizer.state.clear()
        return False

    def _finite(self) -> bool:
        tensors = [tensor for tensor in self._modules.state_dict().values() if tensor.is_floating_point()]
        return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())


def generator_states() -> dict[str, Any]:
    """The states of all of them, as tensors and plain data."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_generators(states: Mapping[str, Any]) -> None:
    """Set the global generators to saved states; those of devices that this machine lacks are left out."""
    name, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)


FORMAT = 1
RECENT = 100

OWN = ("normalizers", "generator", "collector", "generators", "companions")
"""Parts of a checkpoint that differ between ranks."""

_logger = logging.getLogger("esper_telemetry")


class TrainingRun(Protocol):
    """A run that emits events and has checkpoints: a trainer, or a controller that learns nothing."""

    hooks: Hooks
    checkpointables: Checkpointables
    ranks: Ranks
    env_steps: int
    updates: int

    def learn(self, total_steps: int) -> None:
        """Go on until that many environment steps are taken."""

    def stop(self) -> None:
        """Make `learn` return after the update in progress."""

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """All that it goes on from; `made_of` says what must be the same for it to fit, `counts` how far it has come."""


class Checkpoints:
    """Writer of `latest.pt`, and of `best.pt` at the highest mean return over the last hundred episodes.

    Where several ranks train, each keeps its own: all save at the same updates, and the first writes. Its episodes say which is the best.

    Args:
        trainer: whose checkpoints; they are written at the ends of its updates, after everybody else was told of them. One that cannot be
            written costs a warning, once.
        directory: where.
        every: environment steps between two.
    """

    def __init__(self, trainer: TrainingRun, directory: str | Path, *, every: int) -> None:
        self.latest, self.best = Path(directory) / "latest.pt", Path(directory) / "best.pt"
        self._trainer, self._every = trainer, every
        self._due, self._highest = trainer.env_steps + every, -math.inf
        self._returns: deque[float] = deque(maxlen=RECENT)
        self._warned = False
        trainer.hooks.on(EpisodeEnd, lambda event: self._returns.extend(event.returns))
        trainer.hooks.on(UpdateEnd, self._keep, last=True)
        trainer.checkpointables.join("checkpoints", self)

    def save(self) -> bool:
        """Write `latest.pt` now, and `best.pt` if no mean return was higher; return False where the disk does not take them."""
        mean = statistics.fmean(self._returns) if len(self._returns) == RECENT else -math.inf
        best, self._highest = mean > self._highest, max(mean, self._highest)
        state = gathered(self._trainer)
        try:
            for path in (self.best, self.latest) if best else (self.latest,):
                if state is not None:
                    write(state, path)
        except OSError as error:
            self._warn(error)
            return False
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the highest mean return, and the returns of the next one."""
        return {"highest": self._highest, "returns": list(self._returns)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; the next checkpoint comes as many steps after the one that was loaded."""
        self._due, self._highest = self._trainer.env_steps + self._every, state["highest"]
        self._returns.clear()
        self._returns.extend(state["returns"])

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            message = (
                "esper-telemetry: cannot write a checkpoint to %s (%s): training goes on; the last one that was written stays,"
                " and the next is tried when it is due"
            )
            _logger.warning(message, self.latest.parent, error.strerror)

    def _keep(self, event: UpdateEnd) -> None:
        if event.env_step >= self._due:
            self._due = event.env_step + self._every
            self.save()


def state_of(trainer: PPO) -> dict[str, Any]:
    """All that training goes on from.

    Weights, optimizer, normalisers, random generators, counts, open episodes, checkpointables and, where it can be saved, the environment.
    """
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
        "generators": generator_states(),
        "watchdog": None if trainer.watchdog is None else trainer.watchdog.state_dict(),
        "companions": trainer.checkpointables.state_dict(),
    }


def save(trainer: TrainingRun, path: str | Path) -> Path:
    """Write a checkpoint; a reader finds the old file or the new one, never a part.

    Every rank calls it, and the first one writes.
    """
    state = gathered(trainer)
    if state is not None:
        write(state, Path(path))
    return Path(path)


def gathered(trainer: TrainingRun) -> dict[str, Any] | None:
    """The state of a trainer with what the other ranks have for themselves; None on all ranks but the first."""
    state = trainer.state_dict()
    found = trainer.ranks.gather({name: state[name] for name in OWN if name in state} if trainer.ranks.rank else {})
    return {**state, "others": found[1:]} if found else None


def write(state: Mapping[str, Any], path: Path) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch raises its own error over that of the disk
            raise error.__context__ from None
        raise
    finally:
        partial.unlink(missing_ok=True)


def read(path: str | Path) -> dict[str, Any]:
    """A checkpoint's content, on the CPU; raises ValueError where the file is none of ours."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is not a checkpoint: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of format {FORMAT}")
    return state


def load(trainer: PPO, path: str | Path) -> None:
    """Make a trainer go on from a checkpoint.

    With the environment's state the run is the one that would have been without a break, bit for bit; where it could not be saved, new
    episodes begin. The global generators of Python, NumPy and torch go on too, as an environment may draw from them.

    Raises:
        ValueError: the file does not fit; the sentence says which part differs.
    """
    state = own_state(trainer.ranks, made_of(trainer), path)
    check_shapes(trainer, state, path)
    trainer.policy.load_state_dict(state["policy"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.normalizers.load_state_dict(state["normalizers"])
    for name, count in state["counts"].items():
        setattr(trainer, name, count)
    trainer.generator.set_state(state["generator"])
    trainer.collector.load_state_dict(state["collector"])
    if trainer.watchdog is not None:
        trainer.watchdog.load_state_dict(state["watchdog"] or {})
    trainer.checkpointables.load_state_dict(state["companions"])
    restore_generators(state["generators"])


def own_state(ranks: Ranks, made_of: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Return this rank's part of a checkpoint; raise ValueError naming the first thing in which it does not fit."""
    state = read(path)
    saved_by, here = 1 + len(state.get("others", ())), ranks.size
    if saved_by != here:
        found = f"{path} was saved by {saved_by} {'rank' if saved_by == 1 else 'ranks'}"
        raise ValueError(f"{found}, here {'is' if here == 1 else 'are'} {here}")
    for name, present in made_of.items():
        saved = state["made_of"].get(name)
        if present != saved:
            raise ValueError(f"{path} does not fit: its {name} is {saved}, here it is {present}")
    return {**state, **state["others"][ranks.rank - 1]} if ranks.rank else state


def check_shapes(trainer: PPO, state: Mapping[str, Any], path: str | Path) -> None:
    """Raise ValueError naming the first tensor of the trainer that the checkpoint does not fit."""
    for name, module in (("policy", trainer.policy), ("normalizers", trainer.normalizers)):
        shapes = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
        others = {key: tuple(tensor.shape) for key, tensor in state[name].items()}
        for key in sorted(shapes.keys() | others.keys()):
            if shapes.get(key) != others.get(key):
                found = f"has {others.get(key, 'nothing')}, here it is {shapes.get(key, 'not there')}"
                raise ValueError(f"{path} does not fit: {name} {key} {found}")


def made_of(trainer: PPO) -> dict[str, Any]:
    """Return the properties that a checkpoint must share to fit, as plain data."""
    env = trainer.env
    return {
        "env": env.name,
        "num_envs": env.num_envs,
        "heads": {name: (kind_of(trainer, name), spec.size) for name, spec in env.action_specs.items()},
        "observation_shape": tuple(env.observation_shape),
    }


def kind_of(trainer: PPO, part: str) -> str:
    """Kind of the head for that part; a squash has no weights by which `check_shapes` could tell it."""
    head = trainer.policy.head(part)
    return head.kind if head.squash is None else f"{head.kind}, squashed"
