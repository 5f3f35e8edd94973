"""The return of a run: the mean over its last hundred episodes, used by every view and verdict."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

RECENT_EPISODES: Final = 100
"""Maximum number of episodes that the return averages."""
MIN_BEST_EPISODES: Final = 20
"""Minimum number of episodes for a best return, because the mean of a few lucky episodes is meaningless."""

MAX_RETURN: Final = 1e100
"""Larger returns are left out, because sums over episodes would overflow."""

RECENT_RETURN, UPDATE_RETURN, COUNT = "episode/return_mean_100", "episode/return_mean", "episode/count"


@dataclass(slots=True)
class RecentMean:
    """Mean over the last `RECENT_EPISODES` episodes of a series of updates, from each update's mean and number of episodes.

    The oldest update counts with as many episodes as are needed.

    Attributes:
        mean: over the last episodes; NaN before the first.
        episodes: number of episodes that have ended so far.
        highest, lowest: extremes of the mean after `MIN_BEST_EPISODES`; NaN before.
    """

    mean: float = math.nan
    episodes: float = 0.0
    highest: float = math.nan
    lowest: float = math.nan
    _parts: deque[tuple[float, float]] = field(default_factory=deque)  # mean and number of the episodes of an update
    _held: float = 0.0

    def add(self, mean: float, episodes: float, *, recent: float | None = None) -> None:
        """Add an update.

        Args:
            mean, episodes: mean and number of its episodes.
            recent: the mean over the last hundred episodes, if the trainer reports it.
        """
        self.episodes += episodes
        counted = min(episodes, float(RECENT_EPISODES))
        self._parts.append((mean, counted))
        self._held += counted
        while len(self._parts) > 1 and self._held - self._parts[0][1] >= RECENT_EPISODES:
            self._held -= self._parts.popleft()[1]
        self.mean = self._mean() if recent is None else recent
        if self.episodes >= MIN_BEST_EPISODES:
            self.highest = max(self.mean, self.highest)  # this order replaces NaN
            self.lowest = min(self.mean, self.lowest)

    def _mean(self) -> float:
        oldest, _ = self._parts[0]
        surplus = max(0.0, self._held - RECENT_EPISODES)
        total = math.fsum(mean * episodes for mean, episodes in self._parts) - oldest * surplus
        return total / (self._held - surplus)


def recent_return(values: Mapping[str, float], average: RecentMean) -> dict[str, float]:
    """Return the mean return of the last hundred episodes, if a record has only the mean over its own episodes.

    Args:
        values: values of a record.
        average: average of the run, to which this record is added.
    """
    mean, episodes = values.get(UPDATE_RETURN, math.inf), values.get(COUNT, math.nan)
    if abs(mean) <= MAX_RETURN and 0 < episodes < math.inf:
        average.add(mean, episodes, recent=values.get(RECENT_RETURN))  # also when a resumed run reads its journal
    is_new = RECENT_RETURN not in values and episodes >= 0 and average.episodes > 0
    return {RECENT_RETURN: average.mean} if is_new else {}
