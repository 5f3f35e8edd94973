"""Gymnasium's spaces as parts that heads choose and layouts that policies read, and the conversions between them."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from esper_telemetry.ppo.environments.protocol import ActionSpec, Array, Image, ObservationLayout

if TYPE_CHECKING:
    import gymnasium

ACTION_SPACES = "Discrete, MultiDiscrete, MultiBinary, a Box of floats, or a Dict or Tuple of these"

LARGEST = float(np.finfo(np.float32).max)

PartActions = Mapping[str, Array]


class ActionParts(NamedTuple):
    """An action space as the trainer sees it.

    Attributes:
        specs: the parts of an action by name.
        join: from the choices of B environments by part, [B] or [B, size], to what Gymnasium takes.
    """

    specs: dict[str, ActionSpec]
    join: Callable[[PartActions], Any]


def action_parts(space: gymnasium.Space[Any], name: str) -> ActionParts:
    """The parts of a space; raises ValueError, naming the part that is none of the supported ones.

    A space without parts has one head, `action`; several choices in one space are numbered: `action_0`, `action_1`. The
    parts of a Dict bear its keys, those of a Tuple their numbers.
    """
    found = describe(space, name, "action")
    if not found.specs or any(spec.size == 0 for spec in found.specs.values()):
        raise ValueError(f"the action space of {name} holds a part with nothing to choose, got {space}")
    return found


def describe(space: gymnasium.Space[Any], name: str, part: str) -> ActionParts:
    """Return the parts of a space under the name `part`."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return in_dict(space, name, part)
    if isinstance(space, spaces.Tuple):
        return in_tuple(space, name, part)
    if isinstance(space, spaces.Discrete):
        return ActionParts({part: ActionSpec("categorical", int(space.n))}, discrete_joiner(part, int(space.start)))
    if isinstance(space, spaces.MultiDiscrete):
        return factored(part, space.nvec, space.start)
    if isinstance(space, spaces.MultiBinary):
        return factored(part, np.full(space.shape, 2), np.zeros(space.shape, np.int8))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = bounds(space.low), bounds(space.high)
        return ActionParts({part: ActionSpec("continuous", len(low), low=low, high=high)}, box_joiner(part, space))
    raise ValueError(f"the action space of {name} must be {ACTION_SPACES}, got {space}")


def bounds(values: Array) -> tuple[float, ...]:
    """Bounds of the dimensions one after the other; what float32 can hardly hold stands for no bound."""
    return tuple(float(value) if abs(value) < LARGEST else math.copysign(math.inf, value) for value in values.ravel())


def in_dict(space: gymnasium.spaces.Dict, name: str, part: str) -> ActionParts:
    """The parts of a Dict."""
    found = {key: describe(inner, f"{name}, part {key!r},", below(part, key)) for key, inner in space.spaces.items()}
    return ActionParts(
        merged_specs(found.values(), name), lambda actions: {key: one.join(actions) for key, one in found.items()}
    )


def in_tuple(space: gymnasium.spaces.Tuple[Any], name: str, part: str) -> ActionParts:
    """The parts of a Tuple."""
    found = [describe(inner, f"{name}, part {index},", f"{part}_{index}") for index, inner in enumerate(space.spaces)]
    return ActionParts(merged_specs(found, name), lambda actions: tuple(one.join(actions) for one in found))


def below(part: str, key: Any) -> str:
    """A name for the part under `key`: the key itself, behind those it stands in, in letters that every backend takes."""
    name = re.sub(r"[^a-z0-9_]+", "_", str(key).lower()) or "_"
    if part != "action":
        return f"{part}_{name}"
    return f"action_{name}" if reserved(name) else name


def reserved(name: str) -> bool:
    """Return True where a module of torch cannot have a part of that name."""
    from torch import nn

    return name[0].isdigit() or keyword.iskeyword(name) or hasattr(nn.ModuleDict, name) or name == "training"


def merged_specs(found: Any, name: str) -> dict[str, ActionSpec]:
    """The parts of several spaces; raises ValueError where two have one name."""
    specs: dict[str, ActionSpec] = {}
    for one in found:
        for part, spec in one.specs.items():
            if part in specs:
                raise ValueError(f"two parts of the action space of {name} would both be named {part!r}")
            specs[part] = spec
    return specs


def discrete_joiner(part: str, start: int) -> Callable[[PartActions], Array]:
    """Return `join` for a Discrete space whose first action is number `start`."""
    if start == 0:
        return lambda actions: actions[part]
    return lambda actions: actions[part] + start


def factored(part: str, sizes: Array, start: Array) -> ActionParts:
    """A choice for each entry of an array of sizes."""
    names = [f"{part}_{index}" for index in range(sizes.size)]
    specs = {name: ActionSpec("categorical", int(size)) for name, size in zip(names, sizes.ravel(), strict=True)}

    def join(actions: PartActions) -> Array:
        columns = np.stack([actions[name] for name in names], -1).reshape(-1, *sizes.shape)
        return (columns + start).astype(start.dtype, copy=False)

    return ActionParts(specs, join)


def box_joiner(part: str, space: gymnasium.spaces.Box) -> Callable[[PartActions], Array]:
    """Return `join` for a Box: actions are clipped to its bounds here, so that the trainer learns from what was chosen."""
    low, high, shape = space.low, space.high, (-1, *space.shape)
    return lambda actions: np.clip(actions[part].reshape(shape), low, high).astype(space.dtype, copy=False)


OBSERVATION_SPACES = "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these"
SMALLEST_SIDE = 8
"""A Box is an image if its height and width have at least this many entries; a smaller one is flattened."""


class ObservationForm(NamedTuple):
    """An observation space as the trainer sees it.

    Attributes:
        shape: of one observation as it is stored.
        layout: what stands where in it.
        pack: B observations as Gymnasium gives them to rows [B, *shape]; None where they are rows already.
    """

    shape: tuple[int, ...]
    layout: ObservationLayout
    pack: ObservationPacker | None


@dataclass(frozen=True, slots=True)
class SpaceLeaf:
    """One part of an observation.

    Attributes:
        find: from B observations to this part's.
        kind: `vector`, `choices` or `image`.
        size: numbers that it takes in a row.
        convert: what Gymnasium gives, [B, ...], to the numbers [B, size] or the image [B, ...].
        image: of an image.
    """

    find: Callable[[Any], Any]
    kind: str
    size: int
    convert: Callable[[Array], Array]
    image: Image | None = None


def observation_form(space: gymnasium.Space[Any], name: str) -> ObservationForm:
    """Return an observation space as the trainer sees it; raise ValueError naming a part that is not supported."""
    leaves = list(parts(space, name, lambda observations: observations))
    images = tuple(leaf.image for leaf in leaves if leaf.image is not None)
    vectors, choices = (sum(leaf.size for leaf in leaves if leaf.kind == kind) for kind in ("vector", "choices"))
    layout = ObservationLayout(vectors, choices, images)
    if not (layout.numbers or images):
        raise ValueError(f"the observation space of {name} holds nothing to observe, got {space}")
    shape = box_shape(space)
    if shape and (not images or len(shape) == len(images[0].shape)):
        return ObservationForm(shape, layout, None)
    return ObservationForm(layout.shape, layout, ObservationPacker(layout, leaves))


class ObservationPacker:
    """Packer of the parts of B observations into rows."""

    def __init__(self, layout: ObservationLayout, leaves: Sequence[SpaceLeaf]) -> None:
        self._layout = layout
        self._numbers = [leaf for kind in ("vector", "choices") for leaf in leaves if leaf.kind == kind]
        self._images = [leaf for leaf in leaves if leaf.kind == "image"]

    def __call__(self, observations: Any) -> Array:
        """Rows [B, *shape] of B observations as Gymnasium gives them."""
        return self._pack(lambda leaf: np.asarray(leaf.find(observations)))

    def one(self, observation: Any) -> Array:
        """The row [*shape] of one environment's observation."""
        row: Array = self._pack(lambda leaf: np.asarray(leaf.find(observation))[None])[0]
        return row

    def _pack(self, values: Callable[[SpaceLeaf], Array]) -> Array:
        numbers, images = ([leaf.convert(values(leaf)) for leaf in kind] for kind in (self._numbers, self._images))
        return self._layout.pack(numbers, images)


def parts(space: gymnasium.Space[Any], name: str, find: Callable[[Any], Any]) -> Iterator[SpaceLeaf]:
    """The parts of a space, those of its parts included."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from parts(part, f"{name}, part {key!r},", chained(find, key))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from parts(part, f"{name}, part {index},", chained(find, index))
    else:
        yield leaf(space, name, find)


def chained(find: Callable[[Any], Any], key: Any) -> Callable[[Any], Any]:
    """Return a function that takes the part `key` of what `find` returns."""
    return lambda observations: find(observations)[key]


def leaf(space: gymnasium.Space[Any], name: str, find: Callable[[Any], Any]) -> SpaceLeaf:
    """A part that has no parts."""
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        image = as_image(space)
        size = int(np.prod(space.shape))
        return (
            SpaceLeaf(find, "vector", size, flat)
            if image is None
            else SpaceLeaf(find, "image", 0, shaped(image), image)
        )
    if isinstance(space, spaces.MultiBinary):
        return SpaceLeaf(find, "choices", int(np.prod(space.shape)), flat)
    if isinstance(space, spaces.Discrete):
        return SpaceLeaf(find, "choices", int(space.n), one_hot(np.array([space.n]), np.array([space.start])))
    if isinstance(space, spaces.MultiDiscrete):
        return SpaceLeaf(find, "choices", int(space.nvec.sum()), one_hot(space.nvec.ravel(), space.start.ravel()))
    raise ValueError(f"the observation space of {name} must be {OBSERVATION_SPACES}, got {space}")


def box_shape(space: gymnasium.Space[Any]) -> tuple[int, ...] | None:
    """Shape of a Box; None of every other space."""
    from gymnasium import spaces

    return tuple(map(int, space.shape)) if isinstance(space, spaces.Box) else None


def as_image(space: gymnasium.spaces.Box) -> Image | None:
    """The image that a Box holds; None for one that is a vector.

    As in Stable-Baselines3 the channels are the shortest axis, and come first where two are equally short. A Box of bytes
    with two long axes is an image of one channel.
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


def shaped(image: Image) -> Callable[[Array], Array]:
    """Return a function that adds the axis of channels that an image may lack."""
    return lambda values: values.reshape(len(values), *image.shape)


def one_hot(sizes: Array, starts: Array) -> Callable[[Array], Array]:
    """Choices [B, K] or [B], numbered from `starts` [K], to ones among zeros [B, Σ sizes]."""
    offsets = np.cumsum(sizes) - sizes - starts
    width = int(sizes.sum())

    def convert(values: Array) -> Array:
        rows = np.zeros((len(values), width), np.float32)
        np.put_along_axis(rows, values.reshape(len(values), -1).astype(np.int64) + offsets, 1.0, axis=1)
        return rows

    return convert
