"""Gymnasium's action spaces as parts that heads choose, and what the heads chose as Gymnasium takes it."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from esper_telemetry.ppo.environments.protocol import ActionSpec, Array

if TYPE_CHECKING:
    import gymnasium

SUPPORTED = "Discrete, MultiDiscrete, MultiBinary, a Box of floats, or a Dict or Tuple of these"

LARGEST = float(np.finfo(np.float32).max)

Chosen = Mapping[str, Array]


class Described(NamedTuple):
    """An action space as the trainer sees it.

    Attributes:
        specs: the parts of an action by name.
        join: from the choices of B environments by part, [B] or [B, size], to what Gymnasium takes.
    """

    specs: dict[str, ActionSpec]
    join: Callable[[Chosen], Any]


def described(space: gymnasium.Space[Any], name: str) -> Described:
    """The parts of a space; raises ValueError, naming the part that is none of the supported ones.

    A space without parts has one head, `action`; several choices in one space are numbered: `action_0`, `action_1`. The
    parts of a Dict bear its keys, those of a Tuple their numbers.
    """
    found = describe(space, name, "action")
    if not found.specs or any(spec.size == 0 for spec in found.specs.values()):
        raise ValueError(f"the action space of {name} holds a part with nothing to choose, got {space}")
    return found


def describe(space: gymnasium.Space[Any], name: str, part: str) -> Described:
    """The same for a space under the name `part`."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return in_dict(space, name, part)
    if isinstance(space, spaces.Tuple):
        return in_tuple(space, name, part)
    if isinstance(space, spaces.Discrete):
        return Described({part: ActionSpec("categorical", int(space.n))}, discrete_joiner(part, int(space.start)))
    if isinstance(space, spaces.MultiDiscrete):
        return factored(part, space.nvec, space.start)
    if isinstance(space, spaces.MultiBinary):
        return factored(part, np.full(space.shape, 2), np.zeros(space.shape, np.int8))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = bounds(space.low), bounds(space.high)
        return Described({part: ActionSpec("continuous", len(low), low=low, high=high)}, box_joiner(part, space))
    raise ValueError(f"the action space of {name} must be {SUPPORTED}, got {space}")


def bounds(values: Array) -> tuple[float, ...]:
    """Bounds of the dimensions one after the other; what float32 can hardly hold stands for no bound."""
    return tuple(float(value) if abs(value) < LARGEST else math.copysign(math.inf, value) for value in values.ravel())


def in_dict(space: gymnasium.spaces.Dict, name: str, part: str) -> Described:
    """The parts of a Dict."""
    found = {key: describe(inner, f"{name}, part {key!r},", below(part, key)) for key, inner in space.spaces.items()}
    return Described(
        united(found.values(), name), lambda actions: {key: one.join(actions) for key, one in found.items()}
    )


def in_tuple(space: gymnasium.spaces.Tuple[Any], name: str, part: str) -> Described:
    """The parts of a Tuple."""
    found = [describe(inner, f"{name}, part {index},", f"{part}_{index}") for index, inner in enumerate(space.spaces)]
    return Described(united(found, name), lambda actions: tuple(one.join(actions) for one in found))


def below(part: str, key: Any) -> str:
    """A name for the part under `key`: the key itself, behind those it stands in, in letters that every backend takes."""
    name = re.sub(r"[^a-z0-9_]+", "_", str(key).lower()) or "_"
    if part != "action":
        return f"{part}_{name}"
    return f"action_{name}" if reserved(name) else name


def reserved(name: str) -> bool:
    """Whether a module of torch cannot have a part of that name."""
    from torch import nn

    return name[0].isdigit() or keyword.iskeyword(name) or hasattr(nn.ModuleDict, name) or name == "training"


def united(found: Any, name: str) -> dict[str, ActionSpec]:
    """The parts of several spaces; raises ValueError where two have one name."""
    specs: dict[str, ActionSpec] = {}
    for one in found:
        for part, spec in one.specs.items():
            if part in specs:
                raise ValueError(f"two parts of the action space of {name} would both be named {part!r}")
            specs[part] = spec
    return specs


def discrete_joiner(part: str, start: int) -> Callable[[Chosen], Array]:
    """Joins for a Discrete space whose first action is number `start`."""
    if start == 0:
        return lambda actions: actions[part]
    return lambda actions: actions[part] + start


def factored(part: str, sizes: Array, start: Array) -> Described:
    """A choice for each entry of an array of sizes."""
    names = [f"{part}_{index}" for index in range(sizes.size)]
    specs = {name: ActionSpec("categorical", int(size)) for name, size in zip(names, sizes.ravel(), strict=True)}

    def join(actions: Chosen) -> Array:
        chosen = np.stack([actions[name] for name in names], -1).reshape(-1, *sizes.shape)
        return (chosen + start).astype(start.dtype, copy=False)

    return Described(specs, join)


def box_joiner(part: str, space: gymnasium.spaces.Box) -> Callable[[Chosen], Array]:
    """Joins for a Box: actions are clipped to its bounds, so that what is learned from is what was chosen."""
    low, high, shape = space.low, space.high, (-1, *space.shape)
    return lambda actions: np.clip(actions[part].reshape(shape), low, high).astype(space.dtype, copy=False)
