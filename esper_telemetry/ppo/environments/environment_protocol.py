"""Protocols of vector environments, and the layout of their observations.

A rollout keeps every observation as one array, so that only the encoder and the normaliser need to know its parts. A vector or a single
image is its own array. If there are several parts with an image among them, they are packed into a row: first the numbers (vectors, then
one-hot choices), then float images, then uint8 images. With a uint8 image the row consists of bytes, so that the image takes a quarter
of the space of floats. The front of the row is read as floats without a copy.

Masks and relevance that depend on an earlier choice are declared (`ActionSpec.given`, `relevant_for`) instead of queried step by
step: masks for all choices stay on the device, and training sees them resolved, one row per transition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Bools: TypeAlias = npt.NDArray[np.bool_]
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """One part of an action, chosen by one head of the policy.

    Attributes:
        kind: `categorical` (one of `size` choices, numbered from 0) or `continuous` (`size` real numbers).
        size: number of choices or of dimensions.
        given: an earlier, categorical part whose choice this part depends on; None if it is independent.
        relevant_for: choices of `given` for which this part matters; None if it matters for all. For other choices it is
            forced to choice 0, or zeros, and does not count in probability, entropy and gradient.
        low, high: bounds of each dimension of a continuous part, infinite if it is unbounded; None if nothing is known of
            bounds. The environment clips actions to them, while the unclipped actions are stored and learned from.
    """

    kind: Literal["categorical", "continuous"]
    size: int
    given: str | None = None
    relevant_for: tuple[int, ...] | None = None
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None


class Step(NamedTuple):
    """Outcome of one step of B environments. The arrays belong to the environment and are valid until its next step.

    Attributes:
        observations: [B, ...] observations to act on next.
        rewards: [B].
        terminated: [B], bool: the episode ended in a terminal state.
        truncated: [B], bool: it ended at a limit, so its last state still has a value.
        valid: [B], bool; False if the step was not a transition, because the environment ignored the action and began a
            new episode instead (Gymnasium's NEXT_STEP autoreset). Such rows must be ignored. None if all are
            valid.
        final_observations: [B, ...], the last observation of each episode that ended; other rows are meaningless. None
            if no episode ended.
    """

    observations: Array
    rewards: Array
    terminated: Bools
    truncated: Bools
    valid: Bools | None = None
    final_observations: Array | None = None


class TensorStep(NamedTuple):
    """Outcome of one step of B tensor environments: `Step` in tensors on one device, in which every row is a transition.

    Attributes:
        observations: [B, ...] observations to act on next.
        rewards: [B], float32.
        terminated, truncated: [B], bool.
        final_observations: [B, ...]; None if no limit cut an episode.
    """

    observations: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_observations: Tensor | None = None


class Task(Protocol):
    """Properties of a vector of environments that a trainer reads before the first step."""

    @property
    def name(self) -> str:
        """Name of the task."""

    @property
    def num_envs(self) -> int:
        """Number of environments, B."""

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one environment's observation."""

    @property
    def action_specs(self) -> Mapping[str, ActionSpec]:
        """The parts of an action by name: one head of the policy each."""

    def close(self) -> None:
        """Release the resources of the environments."""


class VectorEnvironment(Task, Protocol):
    """B environments that step together and begin a new episode when one has ended.

    An environment that forbids some choices also has `action_masks`, see `Masked`.
    """

    def reset(self, seed: int | None = None) -> Array:
        """Begin episodes everywhere, return the observations [B, ...]; a seed given at construction comes first."""

    def step(self, actions: Mapping[str, Array]) -> Step:
        """Take one action everywhere: per part [B], int (categorical), or [B, size], float (continuous)."""


@runtime_checkable
class TensorEnvironment(Task, Protocol):
    """B environments with tensor inputs and outputs on one device, which must not synchronise."""

    @property
    def device(self) -> torch.device:
        """Device of its tensors."""

    def reset(self, seed: int | None = None) -> Tensor:
        """Begin episodes everywhere, return the observations [B, ...]; a seed given at construction comes first."""

    def step(self, actions: Mapping[str, Tensor]) -> TensorStep:
        """Take one action everywhere: per part [B], int64 (categorical), or [B, size], float32 (continuous)."""


@runtime_checkable
class Masked(Protocol):
    """An environment, of either kind, that forbids some choices at some times."""

    def action_masks(self) -> Mapping[str, Any]:
        """Return the allowed choices of the next action: per part bool [B, size], or [B, size of `given`, size] if it depends on one.

        A vector environment returns arrays, a tensor environment tensors; they are valid until its next step. Parts
        without restrictions are left out. Every row in which the part is relevant must allow at least one choice.
        """


@runtime_checkable
class Saveable(Protocol):
    """An environment, of either kind, whose state can be saved and restored."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return tensors and plain data; None if this environment cannot be saved."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the environment continue from a saved state."""


@runtime_checkable
class TimeLimited(Protocol):
    """An environment, of either kind, whose episodes have a limit."""

    @property
    def horizon(self) -> int | None:
        """Largest number of steps of an episode; None without a limit."""


Environment: TypeAlias = VectorEnvironment | TensorEnvironment


def saved_state(env: Task) -> dict[str, Any] | None:
    """Return the state of an environment; None if it cannot be saved."""
    return env.state_dict() if isinstance(env, Saveable) else None


def restore_state(env: Task, state: Mapping[str, Any]) -> None:
    """Make an environment continue from a state that `saved_state` returned."""
    assert isinstance(env, Saveable)
    env.load_state_dict(state)


def horizon_of(task: Task) -> int | None:
    """Return the largest number of steps of an episode; None if the task does not say."""
    return task.horizon if isinstance(task, TimeLimited) else None


@runtime_checkable
class SupportsRewardThreshold(Protocol):
    """An environment whose task defines the mean return at which it is solved."""

    @property
    def reward_threshold(self) -> float | None:
        """The threshold, or None."""


def reward_threshold_of(task: Task) -> float | None:
    """Return the mean return at which a task is solved; None if the task does not say."""
    return task.reward_threshold if isinstance(task, SupportsRewardThreshold) else None


Rows = TypeVar("Rows", Array, "Tensor")

FLOAT_BYTES = 4
"""Bytes of a float32; rows of bytes are padded to a multiple of it, so that their front can be read as floats."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image among the observations.

    Attributes:
        shape: (C, H, W), or (H, W, C) if `channels_last`.
        channels_last: whether the channels are the last axis.
        dtype: `uint8` or `float32`, as it is stored.
        low, high: the range that is mapped to 0 to 1 on the device; an image without bounds is not scaled.
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
        """Shape as (C, H, W)."""
        return (self.shape[2], *self.shape[:2]) if self.channels_last else self.shape


@dataclass(frozen=True, slots=True)
class ObservationLayout:
    """Positions of the parts of an observation.

    Attributes:
        vectors: how many numbers at the front are measurements, which normalisers may scale.
        choices: how many numbers after them are one-hot choices.
        images: the images after the numbers.
    """

    vectors: int
    choices: int = 0
    images: tuple[Image, ...] = ()

    @property
    def numbers(self) -> int:
        """Count of the numbers at the front, before the images."""
        return self.vectors + self.choices

    @property
    def alone(self) -> bool:
        """True if the observation is a single image, which is stored in its own shape."""
        return self.numbers == 0 and len(self.images) == 1

    @property
    def dtype(self) -> str:
        """Type of a row: `uint8` if it contains a uint8 image, else `float32`."""
        return "uint8" if any(image.dtype == "uint8" for image in self.images) else "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one observation as it is stored."""
        if self.alone:
            return self.images[0].shape
        floats = self.numbers + sum(image.size for image in self.images if image.dtype == "float32")
        if self.dtype == "float32":
            return (floats,)
        size = floats * FLOAT_BYTES + sum(image.size for image in self.images if image.dtype == "uint8")
        return (-(-size // FLOAT_BYTES) * FLOAT_BYTES,)

    def numbers_of(self, rows: Rows) -> Rows:
        """A view of the numbers [..., numbers] of stored observations [..., *shape], float32."""
        numbers: Rows = floats_of(rows)[..., : self.numbers]
        return numbers

    def images_of(self, rows: Rows) -> list[Rows]:
        """Views of the images, [..., *its shape] each."""
        if self.alone:
            return [rows]
        floats, at = floats_of(rows), {"float32": self.numbers, "uint8": 0}
        at["uint8"] = FLOAT_BYTES * (self.numbers + sum(image.size for image in self.images if image.dtype == "float32"))
        views = []
        for image in self.images:
            source = rows if image.dtype == "uint8" else floats
            part = source[..., at[image.dtype] : at[image.dtype] + image.size]
            views.append(part.reshape(*part.shape[:-1], *image.shape))
            at[image.dtype] += image.size
        return views

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


Layout = ObservationLayout
"""The name in the first release, which remains valid."""


def floats_of(rows: Any) -> Any:
    """Rows, arrays or tensors, read as float32; bytes are not copied."""
    if isinstance(rows, np.ndarray):
        return rows.view(np.float32) if rows.dtype == np.uint8 else rows
    import torch

    return rows.view(torch.float32) if rows.dtype == torch.uint8 else rows


@runtime_checkable
class Structured(Protocol):
    """An environment, of either kind, whose observations are more than a vector.

    Its `observation_shape` and its arrays or tensors follow the layout.
    """

    @property
    def observation_layout(self) -> ObservationLayout:
        """Layout of its observations."""


def layout_of(task: Task) -> ObservationLayout:
    """Return the layout of a task's observations; a task without one observes a vector."""
    if isinstance(task, Structured):
        return task.observation_layout
    return ObservationLayout(math.prod(task.observation_shape))
