"""Saved states: checkpoints in files, the last finite weights in memory, and the global random generators.

A file holds only tensors and plain data, so `torch.load` reads it with `weights_only=True` and runs none of its code. It is replaced
atomically. Several ranks share one file, because separate files could be from different updates after a kill: rank 0 gathers the parts
that differ, for which all ranks stop once.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_telemetry.core.files import draft_of
from esper_telemetry.events import EpisodeEnd, Hooks, UpdateEnd
from esper_telemetry.ppo.gradient_ranks import Ranks

if TYPE_CHECKING:
    from esper_telemetry.ppo.trainer import PPO


class Stateful(Protocol):
    """An object with a state of tensors and plain data."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""


class Checkpointables:
    """Objects by name that are saved with a trainer without being part of it, such as a schedule; they may join after loading."""

    def __init__(self) -> None:
        self._members: dict[str, Stateful] = {}
        self._loaded: dict[str, Any] = {}

    def join(self, name: str, member: Stateful) -> Callable[[], None]:
        """Save and load `member` from now on; return a function that ends this. Further members with the same name are numbered."""
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        name = name if name not in self._members else next(other for other in numbered if other not in self._members)
        self._members[name] = member
        if name in self._loaded:
            member.load_state_dict(self._loaded[name])

        def leave() -> None:
            self._members.pop(name, None)

        return leave

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all members."""
        return {name: member.state_dict() for name, member in self._members.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Load the state of each member, now or when it joins; a member without a saved state is not changed."""
        self._loaded = dict(states)
        for name, member in self._members.items():
            if name in states:
                member.load_state_dict(states[name])


MAX_ROLLBACKS: Final = 3
"""Number of consecutive rollbacks that ends training."""


class Watchdog:
    """Checks the weights after every update, which synchronises, and restores the last finite ones.

    Attributes:
        rollbacks: number of restorations in the run.
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
        """Return the counts; the good weights are in the same checkpoint."""
        return {"rollbacks": self.rollbacks, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue the counts, and store the present weights as the good ones."""
        self.rollbacks, self._in_a_row = state.get("rollbacks", 0), state.get("in_a_row", 0)
        self.remember()

    def check(self) -> bool:
        """Return True if all weights are finite; otherwise restore the good ones and drop the optimizer's moments.

        Raises:
            FloatingPointError: for the third time in a row.
        """
        tensors = [tensor for tensor in self._modules.state_dict().values() if tensor.is_floating_point()]
        if torch.stack([tensor.isfinite().all() for tensor in tensors]).all():
            self._in_a_row = 0
            self.remember()
            return True
        self.rollbacks += 1
        self._in_a_row += 1
        if self._in_a_row >= MAX_ROLLBACKS:
            raise FloatingPointError(f"weights were not finite after {MAX_ROLLBACKS} updates in a row; rolled back each time")
        self._modules.load_state_dict(self._good)
        self._optimizer.state.clear()
        return False


def generator_states() -> dict[str, Any]:
    """Return the states of the global random generators, as tensors and plain data."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_generators(states: Mapping[str, Any]) -> None:
    """Set the global generators to saved states, except generators of devices that this machine lacks."""
    name, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)


FORMAT = 1
COUNTS = ("env_steps", "updates", "gradient_steps")
RECENT_EPISODES: Final = 100

PARTS_OF_RANKS: Final = ("normalizers", "generator", "collector", "generators", "checkpointables")
"""Parts of a checkpoint that differ between ranks."""

_logger = logging.getLogger("esper_telemetry")


class TrainingRun(Protocol):
    """A run that emits events and has checkpoints: a trainer, or a controller that does not learn."""

    hooks: Hooks
    checkpointables: Checkpointables
    ranks: Ranks
    env_steps: int
    updates: int

    def learn(self, total_steps: int) -> None:
        """Continue until that many environment steps are taken."""

    def stop(self) -> None:
        """Make `learn` return after the update in progress."""

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state: `made_of` holds the properties that must agree when it is loaded, `counts` its progress."""


class Checkpoints:
    """Writer of `latest.pt`, and of `best.pt` at the highest mean return over the last hundred episodes.

    Each rank has one: all save at the same updates, and rank 0 writes. Its episodes decide which checkpoint is the best.

    Args:
        trainer: saved at the ends of its updates, after all other hooks; a file that cannot be written costs one warning.
        directory: directory of the files.
        every: environment steps between two checkpoints.
    """

    def __init__(self, trainer: TrainingRun, directory: str | Path, *, every: int) -> None:
        self.latest, self.best = Path(directory) / "latest.pt", Path(directory) / "best.pt"
        self._trainer, self._every = trainer, every
        self._due, self._highest = trainer.env_steps + every, -math.inf
        self._returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._warned = False
        trainer.hooks.on(EpisodeEnd, lambda event: self._returns.extend(event.returns))
        trainer.hooks.on(UpdateEnd, self.save_when_due, last=True)
        trainer.checkpointables.join("checkpoints", self)

    def save(self) -> bool:
        """Write `latest.pt` now, and `best.pt` if the mean return is the highest so far; return False if the disk refuses them."""
        mean = statistics.fmean(self._returns) if len(self._returns) == RECENT_EPISODES else -math.inf
        best, self._highest = mean > self._highest, max(mean, self._highest)
        state = gathered(self._trainer)
        try:
            for path in (self.best, self.latest) if best else (self.latest,):
                if state is not None:
                    write(state, path)
        except OSError as error:
            if not self._warned:
                self._warned = True
                message = (
                    "esper-telemetry: cannot write a checkpoint to %s (%s): training continues; the last checkpoint is kept,"
                    " and the next one is tried when it is due"
                )
                _logger.warning(message, self.latest.parent, error.strerror)
            return False
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the highest mean return, and the returns for the next one."""
        return {"highest": self._highest, "returns": list(self._returns)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; the interval to the next checkpoint starts at the loaded one."""
        self._due, self._highest = self._trainer.env_steps + self._every, state["highest"]
        self._returns.clear()
        self._returns.extend(state["returns"])

    def save_when_due(self, event: UpdateEnd) -> None:
        """Write a checkpoint if enough steps have passed since the last one."""
        if event.env_step >= self._due:
            self._due = event.env_step + self._every
            self.save()


def state_of(trainer: PPO) -> dict[str, Any]:
    """Return the state from which training continues, including the environment's if it can be saved."""
    return {
        "format": FORMAT,
        "config": asdict(trainer.config),
        "made_of": made_of(trainer),
        "policy": trainer.policy.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "normalizers": trainer.normalizers.state_dict(),
        "counts": {name: getattr(trainer, name) for name in COUNTS},
        "generator": trainer.generator.get_state(),
        "collector": trainer.collector.state_dict(),
        "generators": generator_states(),
        "watchdog": None if trainer.watchdog is None else trainer.watchdog.state_dict(),
        "checkpointables": trainer.checkpointables.state_dict(),
    }


def save(trainer: TrainingRun, path: str | Path) -> Path:
    """Write a checkpoint atomically; every rank calls it, and rank 0 writes."""
    state = gathered(trainer)
    if state is not None:
        write(state, Path(path))
    return Path(path)


def gathered(trainer: TrainingRun) -> dict[str, Any] | None:
    """Return the state of a trainer with the parts of the other ranks; None on all ranks except rank 0."""
    state = trainer.state_dict()
    parts = trainer.ranks.gather({name: state[name] for name in PARTS_OF_RANKS if name in state} if trainer.ranks.rank else {})
    return {**state, "others": parts[1:]} if parts else None


def write(state: Mapping[str, Any], path: Path) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with draft_of(path) as draft, draft.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch raises its own error instead of the disk's
            raise error.__context__ from None
        raise


def read(path: str | Path) -> dict[str, Any]:
    """Return a checkpoint's content, on the CPU; raise ValueError if the file is not a checkpoint."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # unpickling an arbitrary file may raise anything
        reason = next(iter(str(error).splitlines()), type(error).__name__).partition(". ")[0]
        raise ValueError(f"{path} is not a checkpoint: {reason}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of format {FORMAT}")
    counts = state.get("counts")
    if not isinstance(counts, dict) or not all(isinstance(counts.get(name), int) for name in COUNTS[:2]):
        raise ValueError(f"{path} is not a complete checkpoint: it does not say after how many steps and updates it was saved")
    return state


def load(trainer: PPO, path: str | Path) -> None:
    """Make a trainer continue from a checkpoint.

    With the environment's state the run continues bit for bit; if that could not be saved, new episodes begin. The global random
    generators of Python, NumPy and torch are restored too, because an environment may use them.

    Raises:
        ValueError: the file does not fit; the message says which part differs.
    """
    try:
        state = own_state(trainer.ranks, made_of(trainer), path)
        check_shapes(trainer, state, path)
        trainer.policy.load_state_dict(state["policy"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.normalizers.load_state_dict(state["normalizers"])
        for name in COUNTS:
            setattr(trainer, name, state["counts"][name])
        trainer.generator.set_state(state["generator"])
        trainer.collector.load_state_dict(state["collector"])
        if trainer.watchdog is not None:
            trainer.watchdog.load_state_dict(state["watchdog"] or {})
        trainer.checkpointables.load_state_dict(state["checkpointables"])
        restore_generators(state["generators"])
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"{path} is not a complete checkpoint: {type(error).__name__}: {error}") from error


def own_state(ranks: Ranks, made_of: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Return this rank's part of a checkpoint; raise ValueError naming the first mismatch."""
    state = read(path)
    saved_ranks, present_ranks = 1 + len(state.get("others", ())), ranks.size
    if saved_ranks != present_ranks:
        saved = f"{path} was saved by {saved_ranks} {'rank' if saved_ranks == 1 else 'ranks'}"
        raise ValueError(f"{saved}, here {'is' if present_ranks == 1 else 'are'} {present_ranks}")
    for name, present in made_of.items():
        saved = state["made_of"].get(name)
        if present != saved:
            raise ValueError(f"{path} does not fit: its {name} is {saved}, here it is {present}")
    own = {**state, **state["others"][ranks.rank - 1]} if ranks.rank else state
    return {"checkpointables": own.get("companions"), **own}  # their name in files of releases up to 0.2


def check_shapes(trainer: PPO, state: Mapping[str, Any], path: str | Path) -> None:
    """Raise ValueError naming the first tensor of the trainer that the checkpoint does not fit."""
    for name, module in (("policy", trainer.policy), ("normalizers", trainer.normalizers)):
        shapes = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
        others = {key: tuple(tensor.shape) for key, tensor in state[name].items()}
        for key in sorted(shapes.keys() | others.keys()):
            if shapes.get(key) != others.get(key):
                difference = f"has {others.get(key, 'nothing')}, here it is {shapes.get(key, 'not there')}"
                raise ValueError(f"{path} does not fit: {name} {key} {difference}")


def made_of(trainer: PPO) -> dict[str, Any]:
    """Return the properties that a checkpoint must share to fit, as plain data."""
    env, heads = trainer.env, {name: trainer.policy.head(name) for name in trainer.env.action_specs}
    return {
        "env": env.name,
        "num_envs": env.num_envs,
        # the squash does not show in the shapes of weights
        "heads": {name: (head.kind if head.squash is None else f"{head.kind}, squashed", head.size) for name, head in heads.items()},
        "observation_shape": tuple(env.observation_shape),
    }
