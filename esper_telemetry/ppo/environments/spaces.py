"""Gymnasium's spaces as parts for heads and layouts for policies, and the conversions between them."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, Array, Image, ObservationLayout

if TYPE_CHECKING:
    import gymnasium

ACTION_SPACES = "Discrete, MultiDiscrete, MultiBinary, a Box of floats, or a Dict or Tuple of these"

LARGEST = float(np.finfo(np.float32).max)

PartActions = Mapping[str, Array]


class ActionParts(NamedTuple):
    """An action space as the trainer sees it.

    Attributes:
        specs: the parts of an action by name.
        join: converts the choices of B environments by part, [B] or [B, size], to Gymnasium's actions.
    """

    specs: dict[str, ActionSpec]
    join: Callable[[PartActions], Any]


def action_parts(space: gymnasium.Space[Any], name: str) -> ActionParts:
    """Return the parts of a space; raise ValueError, naming the part, for an unsupported one.

    A space without parts has one head, `action`; several choices in one space are numbered: `action_0`, `action_1`. The
    parts of a Dict are named by its keys, the parts of a Tuple by their numbers.
    """
    parts = describe(space, name, "action")
    if not parts.specs or any(spec.size == 0 for spec in parts.specs.values()):
        raise ValueError(f"the action space of {name} holds a part with nothing to choose, got {space}")
    return parts


def describe(space: gymnasium.Space[Any], name: str, part: str) -> ActionParts:
    """Return the parts of a space under the name `part`."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        by_key = {key: describe(inner, f"{name}, part {key!r},", below(part, key)) for key, inner in space.spaces.items()}
        return ActionParts(merged_specs(by_key.values(), name), lambda actions: {key: one.join(actions) for key, one in by_key.items()})
    if isinstance(space, spaces.Tuple):
        inner_parts = [describe(inner, f"{name}, part {index},", f"{part}_{index}") for index, inner in enumerate(space.spaces)]
        return ActionParts(merged_specs(inner_parts, name), lambda actions: tuple(one.join(actions) for one in inner_parts))
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        spec = ActionSpec("categorical", int(space.n))
        return ActionParts({part: spec}, lambda actions: actions[part] + start if start else actions[part])
    if isinstance(space, spaces.MultiDiscrete):
        return factored(part, space.nvec, space.start)
    if isinstance(space, spaces.MultiBinary):
        return factored(part, np.full(space.shape, 2), np.zeros(space.shape, np.int8))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        spec = ActionSpec("continuous", int(np.prod(space.shape)), low=bounds(space.low), high=bounds(space.high))
        low, high, shape, dtype = space.low, space.high, (-1, *space.shape), space.dtype
        # clipped here and not in the trainer, which learns from the unclipped actions
        return ActionParts({part: spec}, lambda actions: np.clip(actions[part].reshape(shape), low, high).astype(dtype, copy=False))
    raise ValueError(f"the action space of {name} must be {ACTION_SPACES}, got {space}")


def bounds(values: Array) -> tuple[float, ...]:
    """Return the bounds of the dimensions one after the other; values near the limits of float32 are treated as unbounded."""
    return tuple(float(value) if abs(value) < LARGEST else math.copysign(math.inf, value) for value in values.ravel())


def below(part: str, key: Any) -> str:
    """Return a name for the part under `key`: the keys from the outside in, in letters that every backend accepts."""
    from torch import nn

    name = re.sub(r"[^a-z0-9_]+", "_", str(key).lower()) or "_"
    if part != "action":
        return f"{part}_{name}"
    # the heads are in a ModuleDict, which refuses the names of its own attributes
    reserved = name[0].isdigit() or keyword.iskeyword(name) or hasattr(nn.ModuleDict, name) or name == "training"
    return f"action_{name}" if reserved else name


def merged_specs(parts: Any, name: str) -> dict[str, ActionSpec]:
    """Return the parts of several spaces; raise ValueError if two have the same name."""
    specs: dict[str, ActionSpec] = {}
    for one in parts:
        for part, spec in one.specs.items():
            if part in specs:
                raise ValueError(f"two parts of the action space of {name} would both be named {part!r}")
            specs[part] = spec
    return specs


def factored(part: str, sizes: Array, start: Array) -> ActionParts:
    """A choice for each entry of an array of sizes."""
    names = [f"{part}_{index}" for index in range(sizes.size)]
    specs = {name: ActionSpec("categorical", int(size)) for name, size in zip(names, sizes.ravel(), strict=True)}

    def join(actions: PartActions) -> Array:
        columns = np.stack([actions[name] for name in names], -1).reshape(-1, *sizes.shape)
        return (columns + start).astype(start.dtype, copy=False)

    return ActionParts(specs, join)


OBSERVATION_SPACES = "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these"
SMALLEST_SIDE = 8
"""A Box is an image if its height and width have at least this many entries; a smaller one is flattened."""


class ObservationForm(NamedTuple):
    """An observation space as the trainer sees it.

    Attributes:
        shape: shape of one observation as it is stored.
        layout: positions of its parts.
        pack: converts B observations from Gymnasium to rows [B, *shape]; None if they are rows already.
    """

    shape: tuple[int, ...]
    layout: ObservationLayout
    pack: ObservationPacker | None


@dataclass(frozen=True, slots=True)
class SpaceLeaf:
    """One part of an observation.

    Attributes:
        path: keys of the part, from the outside in.
        kind: `vector`, `choices` or `image`.
        size: number of entries in a row.
        convert: converts Gymnasium's values, [B, ...], to the numbers [B, size] or the image [B, ...].
        image: description of an image.
    """

    path: tuple[Any, ...]
    kind: str
    size: int
    convert: Callable[[Array], Array]
    image: Image | None = None


def observation_form(space: gymnasium.Space[Any], name: str) -> ObservationForm:
    """Return an observation space as the trainer sees it; raise ValueError naming a part that is not supported."""
    from gymnasium import spaces

    leaves = list(parts(space, name))
    images = tuple(leaf.image for leaf in leaves if leaf.image is not None)
    vectors, choices = (sum(leaf.size for leaf in leaves if leaf.kind == kind) for kind in ("vector", "choices"))
    layout = ObservationLayout(vectors, choices, images)
    if not (layout.numbers or images):
        raise ValueError(f"the observation space of {name} is empty, got {space}")
    shape = tuple(map(int, space.shape)) if isinstance(space, spaces.Box) else None
    if shape and (not images or len(shape) == len(images[0].shape)):
        return ObservationForm(shape, layout, None)
    return ObservationForm(layout.shape, layout, ObservationPacker(layout, leaves))


class ObservationPacker:
    """Packs the parts of B observations into rows."""

    def __init__(self, layout: ObservationLayout, leaves: Sequence[SpaceLeaf]) -> None:
        self._layout = layout
        self._numbers = [leaf for kind in ("vector", "choices") for leaf in leaves if leaf.kind == kind]
        self._images = [leaf for leaf in leaves if leaf.kind == "image"]

    def __call__(self, observations: Any) -> Array:
        """Return rows [B, *shape] of B observations from Gymnasium."""
        return self._pack(lambda leaf: np.asarray(reduce(getitem, leaf.path, observations)))

    def one(self, observation: Any) -> Array:
        """The row [*shape] of one environment's observation."""
        row: Array = self._pack(lambda leaf: np.asarray(reduce(getitem, leaf.path, observation))[None])[0]
        return row

    def _pack(self, values: Callable[[SpaceLeaf], Array]) -> Array:
        numbers, images = ([leaf.convert(values(leaf)) for leaf in kind] for kind in (self._numbers, self._images))
        return self._layout.pack(numbers, images)


def parts(space: gymnasium.Space[Any], name: str, path: tuple[Any, ...] = ()) -> Iterator[SpaceLeaf]:
    """Yield the parts of a space, including nested ones."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Dict | spaces.Tuple):
        yield leaf(space, name, path)
        return
    inner: Iterable[tuple[Any, Any]] = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    for key, part in inner:
        yield from parts(part, f"{name}, part {key!r},", (*path, key))


def leaf(space: gymnasium.Space[Any], name: str, path: tuple[Any, ...]) -> SpaceLeaf:
    """Return a part that is not nested."""
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        image = as_image(space)
        size = int(np.prod(space.shape))
        if image is None:
            return SpaceLeaf(path, "vector", size, flat)
        shape = image.shape  # with the axis of channels, which the space may lack
        return SpaceLeaf(path, "image", 0, lambda values: values.reshape(len(values), *shape), image)
    if isinstance(space, spaces.MultiBinary):
        return SpaceLeaf(path, "choices", int(np.prod(space.shape)), flat)
    if isinstance(space, spaces.Discrete):
        return SpaceLeaf(path, "choices", int(space.n), one_hot(np.array([space.n]), np.array([space.start])))
    if isinstance(space, spaces.MultiDiscrete):
        return SpaceLeaf(path, "choices", int(space.nvec.sum()), one_hot(space.nvec.ravel(), space.start.ravel()))
    raise ValueError(f"the observation space of {name} must be {OBSERVATION_SPACES}, got {space}")


def as_image(space: gymnasium.spaces.Box) -> Image | None:
    """Return the image that a Box holds; None if it is a vector.

    As in Stable-Baselines3 the channels are the shortest axis, or the first of two equally short axes. A Box of bytes
    with two long axes is an image with one channel.
    """
    shape = tuple(map(int, space.shape))
    if len(shape) == 2 and space.dtype == np.uint8:
        shape = (1, *shape)
    if len(shape) != 3:
        return None
    dtype = "uint8" if space.dtype == np.uint8 else "float32"
    image = Image(shape, shape[0] != min(shape), dtype, float(np.min(space.low)), float(np.max(space.high)))
    return image if min(image.channels_first[1:]) >= SMALLEST_SIDE else None


def flat(values: Array) -> Array:
    """One row of numbers per environment."""
    return values.reshape(len(values), -1)


def one_hot(sizes: Array, starts: Array) -> Callable[[Array], Array]:
    """Choices [B, K] or [B], numbered from `starts` [K], to ones among zeros [B, Σ sizes]."""
    offsets = np.cumsum(sizes) - sizes - starts
    width = int(sizes.sum())

    def convert(values: Array) -> Array:
        rows = np.zeros((len(values), width), np.float32)
        np.put_along_axis(rows, values.reshape(len(values), -1).astype(np.int64) + offsets, 1.0, axis=1)
        return rows

    return convert
