"""Processor time of a rollout: how much the environments take of it, and how much choosing actions does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

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
