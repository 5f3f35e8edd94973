"""What the numbers of an observation are: vectors, one-hot choices, images; and how several parts share one row.

A rollout keeps every observation as one array, whatever it is made of, so that collecting, shuffling and cutting it into
sequences need not know of parts. A vector or a single image is its own array. Several parts with an image among them stand
in a row one after the other: first the numbers (vectors, then one-hot choices), then float images, then uint8 images. With
a uint8 image the row is made of bytes, so that an image takes a quarter of the room that it would as floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from esper_telemetry.ppo.environments.protocol import Array, Task

if TYPE_CHECKING:
    from torch import Tensor

Rows = TypeVar("Rows", Array, "Tensor")

FLOAT = 4
"""Bytes of a float32; rows of bytes are padded to a multiple of it, so that their front can be read as floats."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image among the observations.

    Attributes:
        shape: (C, H, W), or (H, W, C) where `channels_last`.
        channels_last: how it is stored.
        dtype: `uint8` or `float32`, as it is stored.
        low, high: the range that becomes 0 to 1 on the device; an image without bounds stays as it is.
    """

    shape: tuple[int, int, int]
    channels_last: bool = False
    dtype: str = "uint8"
    low: float = 0.0
    high: float = 255.0

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def channels_first(self) -> tuple[int, int, int]:
        """Its shape as (C, H, W)."""
        return (self.shape[2], *self.shape[:2]) if self.channels_last else self.shape


@dataclass(frozen=True, slots=True)
class ObservationLayout:
    """What stands where in an observation.

    Attributes:
        vectors: how many numbers at the front are measurements, which normalisers may scale.
        choices: how many after them are one-hot choices.
        images: what follows.
    """

    vectors: int
    choices: int = 0
    images: tuple[Image, ...] = ()

    @property
    def numbers(self) -> int:
        """How many numbers stand at the front, before the images."""
        return self.vectors + self.choices

    @property
    def alone(self) -> bool:
        """Whether the observation is a single image, which is stored in its own shape."""
        return self.numbers == 0 and len(self.images) == 1

    @property
    def dtype(self) -> str:
        """Of a row: `uint8` where an image is, else `float32`."""
        return "uint8" if any(image.dtype == "uint8" for image in self.images) else "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one observation as it is stored."""
        if self.alone:
            return self.images[0].shape
        floats = self.numbers + sum(image.size for image in self.images if image.dtype == "float32")
        if self.dtype == "float32":
            return (floats,)
        size = floats * FLOAT + sum(image.size for image in self.images if image.dtype == "uint8")
        return (-(-size // FLOAT) * FLOAT,)

    def numbers_of(self, rows: Rows) -> Rows:
        """A view of the numbers [..., numbers] of stored observations [..., *shape], float32."""
        numbers: Rows = floats_of(rows)[..., : self.numbers]
        return numbers

    def images_of(self, rows: Rows) -> list[Rows]:
        """Views of the images, [..., *its shape] each."""
        if self.alone:
            return [rows]
        floats, at = floats_of(rows), {"float32": self.numbers, "uint8": 0}
        at["uint8"] = FLOAT * (self.numbers + sum(image.size for image in self.images if image.dtype == "float32"))
        found = []
        for image in self.images:
            source = rows if image.dtype == "uint8" else floats
            part = source[..., at[image.dtype] : at[image.dtype] + image.size]
            found.append(part.reshape(*part.shape[:-1], *image.shape))
            at[image.dtype] += image.size
        return found

    def pack(self, numbers: Sequence[Array], images: Sequence[Array]) -> Array:
        """Rows [B, *shape] from parts [B, size] of the numbers, in order, and the images [B, ...], in order."""
        rows = np.zeros((len([*numbers, *images][0]), *self.shape), self.dtype)
        floats, at = self.numbers_of(rows), 0
        for part in numbers:
            floats[:, at : at + part.shape[1]] = part
            at += part.shape[1]
        for view, image in zip(self.images_of(rows), images, strict=True):
            view[...] = image
        return rows


def floats_of(rows: Any) -> Any:
    """Rows, arrays or tensors, read as float32; bytes are not copied."""
    if isinstance(rows, np.ndarray):
        return rows.view(np.float32) if rows.dtype == np.uint8 else rows
    import torch

    return rows.view(torch.float32) if rows.dtype == torch.uint8 else rows


@runtime_checkable
class Structured(Protocol):
    """An environment, of either kind, whose observations are more than a vector.

    Its `observation_shape` and its arrays or tensors are those of the layout.
    """

    @property
    def observation_layout(self) -> ObservationLayout:
        """What stands where in its observations."""


def layout_of(task: Task) -> ObservationLayout:
    """What a task says of its observations; one that says nothing observes a vector."""
    return (
        task.observation_layout
        if isinstance(task, Structured)
        else ObservationLayout(math.prod(task.observation_shape))
    )
