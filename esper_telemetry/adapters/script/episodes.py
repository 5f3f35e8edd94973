"""Episodes, counted at the environments themselves: scripts written for Gymnasium 0.29 see none under 1.x."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Ended(NamedTuple):
    """An episode that ended: its undiscounted return, its steps, and the step of the rollout."""

    returned: float
    length: int
    at: int


class Running:
    """Return and length of the episodes under way in one environment, or in several that step together."""

    def __init__(self, size: int) -> None:
        self.returns = np.zeros(size)
        self.lengths = np.zeros(size, dtype=int)
        self.over = np.zeros(size, dtype=bool)

    def step(self, rewards: Any, done: Any, *, next_step: bool) -> list[tuple[float, int]]:
        """Takes in a step; with `next_step` the one after an episode's end is the reset and no step of it. Returns those that ended."""
        counted = ~self.over if next_step else np.ones_like(self.over)
        self.returns += np.where(counted, rewards, 0.0)
        self.lengths += counted
        ended = np.asarray(done, dtype=bool) & counted
        found = [(float(self.returns[i]), int(self.lengths[i])) for i in np.flatnonzero(ended)]
        self.returns[ended], self.lengths[ended] = 0.0, 0
        self.over = ended
        return found

    def reset(self) -> None:
        """All begin anew."""
        self.returns[:], self.lengths[:], self.over[:] = 0.0, 0, False


class Environments:
    """Watches the environments that a script trains in: those that it has stepped before it takes its first optimizer step.

    Attributes:
        steps: environment steps so far.
        seconds: that were spent in them since they were last taken.
        hidden: whether the environments tell of episodes in a way that scripts for Gymnasium 0.29 do not read.
        next_step: whether the step after an episode's end is the reset.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.hidden = False
        self.next_step = False
        self.closed = False
        self._running: weakref.WeakKeyDictionary[Any, Running] = weakref.WeakKeyDictionary()
        self._ended: list[Ended] = []
        self._calls = 0
        self._depth = 0
        self._tells = False

    def enter(self) -> float:
        """A call into an environment begins; returns when."""
        self._depth += 1
        return time.perf_counter()

    def leave(self, began: float) -> bool:
        """It ends; returns whether it was the script's own call and not that of an environment around."""
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - began
        return self._depth == 0

    def knows(self, env: Any) -> bool:
        """Whether it is one that is trained in; makes it one as long as training has not begun."""
        if env not in self._running and not self.closed:
            self._running[env] = Running(getattr(env, "num_envs", 1))
        return env in self._running

    def stepped(self, env: Any, result: Any) -> None:
        """What a step returned: observations, rewards, terminations, truncations and infos."""
        _, rewards, terminated, truncated, infos = result
        running = self._running[env]
        mode = str(getattr(env, "metadata", {}).get("autoreset_mode", ""))
        self.next_step = "NEXT_STEP" in mode.upper() or "NEXTSTEP" in mode.upper()
        self.steps += len(running.returns)
        self._calls += 1
        done = np.logical_or(terminated, truncated)
        found = running.step(rewards, done, next_step=self.next_step)
        told = told_of(infos)
        self._tells = self._tells or told is not None
        self.hidden = self.hidden or (bool(found) and "final_info" not in infos)
        self._ended += [Ended(*episode, self._calls - 1) for episode in ((told or []) if self._tells else found)]

    def reset(self, env: Any) -> None:
        """All episodes of it begin anew."""
        running = self._running.get(env)
        if running is not None:
            running.reset()

    def take(self) -> tuple[list[Ended], float]:
        """Episodes that ended, and seconds that were spent, since the last call."""
        found, seconds = self._ended, self.seconds
        self._ended, self.seconds, self._calls = [], 0.0, 0
        return found, seconds


def told_of(infos: Any) -> list[tuple[float, int]] | None:
    """Episodes that `RecordEpisodeStatistics` tells of, which knows rewards as they were before other wrappers; None where it does not."""
    if not isinstance(infos, Mapping):
        return None
    if "episode" not in infos and isinstance(infos.get("final_info"), Mapping):
        infos = infos["final_info"]
    told = infos.get("episode")
    if not isinstance(told, Mapping) or "r" not in told or "l" not in told:
        return None
    returns, lengths = np.atleast_1d(told["r"]), np.atleast_1d(told["l"])
    which = np.atleast_1d(infos.get("_episode", np.ones(len(returns), dtype=bool)))
    return [(float(returns[i]), int(lengths[i])) for i in np.flatnonzero(which)]
