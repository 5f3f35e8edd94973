"""Gymnasium's observation spaces as layouts, and their observations as rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from esper_telemetry.ppo.environments.observations import Image, ObservationLayout
from esper_telemetry.ppo.environments.protocol import Array

if TYPE_CHECKING:
    import gymnasium

SUPPORTED = "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these"
SMALLEST_SIDE = 8
"""A Box is an image if its height and width have at least this many entries; a smaller one is flattened."""


class Observed(NamedTuple):
    """How a space is observed.

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


def observed(space: gymnasium.Space[Any], name: str) -> Observed:
    """How a space is observed; raises ValueError, naming the part that is none of the supported ones."""
    leaves = list(parts(space, name, lambda observations: observations))
    images = tuple(leaf.image for leaf in leaves if leaf.image is not None)
    vectors, choices = (sum(leaf.size for leaf in leaves if leaf.kind == kind) for kind in ("vector", "choices"))
    layout = ObservationLayout(vectors, choices, images)
    if not (layout.numbers or images):
        raise ValueError(f"the observation space of {name} holds nothing to observe, got {space}")
    shape = box_shape(space)
    if shape and (not images or len(shape) == len(images[0].shape)):
        return Observed(shape, layout, None)
    return Observed(layout.shape, layout, ObservationPacker(layout, leaves))


class ObservationPacker:
    """Lays the parts of B observations out in rows."""

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
    """Finds what stands under `key` of what `find` finds."""
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
    raise ValueError(f"the observation space of {name} must be {SUPPORTED}, got {space}")


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
    """Gives an image the axis of channels that it may lack."""
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
