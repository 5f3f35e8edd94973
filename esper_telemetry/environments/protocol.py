"""What a trainer asks of a vector of environments, whatever library they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Bools: TypeAlias = npt.NDArray[np.bool_]
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """One part of an action, chosen by one head of the policy.

    Attributes:
        kind: `categorical` (one of `size` choices, numbered from 0) or `continuous` (`size` real numbers).
        size: number of choices or of dimensions.
    """

    kind: Literal["categorical", "continuous"]
    size: int


class Step(NamedTuple):
    """What one step of B environments gives back. Arrays belong to the environment and hold until its next step.

    Attributes:
        observations: [B, ...] what to act on next.
        rewards: [B].
        terminated: [B], bool: the episode ended in a terminal state.
        truncated: [B], bool: it ended at a limit, so its last state still has a value.
        valid: [B], bool; False where the step was no transition, because the environment ignored the action and began a
            new episode instead (Gymnasium's NEXT_STEP autoreset). Such rows must influence nothing. None where all are
            valid.
        final_observations: [B, ...], meaningful in the rows whose episode ended: the observation it ended with; None
            where no episode ended.
    """

    observations: Array
    rewards: Array
    terminated: Bools
    truncated: Bools
    valid: Bools | None = None
    final_observations: Array | None = None


class VectorEnvironment(Protocol):
    """B environments that step together and begin a new episode by themselves where one ended."""

    @property
    def name(self) -> str:
        """What people call the task."""

    @property
    def num_envs(self) -> int:
        """Number of environments, B."""

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one environment's observation."""

    @property
    def action_specs(self) -> Mapping[str, ActionSpec]:
        """The parts of an action by name: one head of the policy each."""

    def reset(self, seed: int | None = None) -> Array:
        """Begins episodes everywhere, returns the observations [B, ...]; a seed given at construction comes first."""

    def step(self, actions: Mapping[str, Array]) -> Step:
        """Takes one action everywhere: per part [B], int (categorical), or [B, size], float (continuous)."""

    def close(self) -> None:
        """Frees what the environments hold."""
