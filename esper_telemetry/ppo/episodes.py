"""Returns and lengths of episodes, counted once per rollout instead of at every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


class EpisodeCounter:
    """Sums rewards per episode over rollouts.

    Attributes:
        returns, lengths: of the episodes that finished in the last rollout, in the order in which they finished.
        times: the step of the rollout with which each of them finished.
    """

    def __init__(self, num_envs: int) -> None:
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.times: list[int] = []
        self._open_return = np.zeros(num_envs)
        self._open_length = np.zeros(num_envs, np.int64)

    def state_dict(self) -> dict[str, Tensor]:
        """Sums of the open episodes."""
        return {"returns": torch.from_numpy(self._open_return), "lengths": torch.from_numpy(self._open_length)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on with the open episodes of a saved state."""
        self._open_return[:], self._open_length[:] = state["returns"].numpy(), state["lengths"].numpy()

    def count(self, rewards: Array, ended: Array, valid: Array | None) -> None:
        """Adds a rollout: rewards, ended and valid are [T, B]; invalid rows count for nothing."""
        steps = np.ones(rewards.shape, np.int64) if valid is None else valid.astype(np.int64)
        times, envs = np.nonzero(ended)
        self.times = times.tolist()
        self.returns = self._close(self._open_return, rewards * steps, times, envs).tolist()
        self.lengths = self._close(self._open_length, steps, times, envs).tolist()

    @staticmethod
    def _close(open_sums: Array, amounts: Array, times: Array, envs: Array) -> Array:
        """Sums [E] of `amounts` [T, B] over the episodes that end at (times, envs); `open_sums` [B] is carried."""
        running = open_sums + np.cumsum(amounts, 0, dtype=open_sums.dtype)
        ends = running[times, envs]
        order = np.lexsort((times, envs))
        totals: Array = np.empty_like(ends)
        previous = np.where(envs[order][1:] == envs[order][:-1], ends[order][:-1], 0)
        totals[order] = ends[order] - np.concatenate([np.zeros(min(1, len(ends)), ends.dtype), previous])
        open_sums[:] = running[-1]
        np.subtract.at(open_sums, envs, totals)
        return totals
