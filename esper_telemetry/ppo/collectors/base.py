"""Returns and lengths of episodes, counted once per rollout instead of at every step.

Processor time of a rollout: how much the environments take of it, and how much choosing actions does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.ppo.environments.protocol import Array


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

    def forget(self) -> None:
        """Drops the open episodes: they will not go on."""
        self._open_return.fill(0.0)
        self._open_length.fill(0)

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


EVERY, FIRST = 16, 5
"""Steps from one that is timed to the next, and the first one: reading this clock takes microseconds, and a step not many more."""

Actions = TypeVar("Actions")
Outcome = TypeVar("Outcome")


class ProcessorClock:
    """Times one rollout from its making on; the environments' share is that of the steps that it takes, scaled up."""

    def __init__(self) -> None:
        self._start = time.process_time()
        self._taken = 0.0
        self._steps = 0

    def step(self, step: Callable[[Actions], Outcome], actions: Actions) -> Outcome:
        """Takes a step of the environments and times it."""
        start = time.process_time()
        outcome = step(actions)
        self._taken += time.process_time() - start
        self._steps += 1
        return outcome

    def seconds(self, steps: int) -> dict[str, float]:
        """Of a rollout of so many steps, now that it is over: `rollout`, and where any step was timed its two parts."""
        rollout = time.process_time() - self._start
        if not self._steps:
            return {"rollout": rollout}
        environment = min(self._taken * steps / self._steps, rollout)
        return {"rollout": rollout, "environment": environment, "inference": rollout - environment}
