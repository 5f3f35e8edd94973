"""The return of a run: the mean over its last hundred episodes, used by every view and verdict, and its course since the first episodes,
for rules that depend on whether the run has learned.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from esper_telemetry.core.messages import number

RECENT_EPISODES: Final = 100
"""Maximum number of episodes that the return averages."""
MIN_BEST_EPISODES: Final = 20
"""Minimum number of episodes for a best return, because the mean of a few lucky episodes is meaningless."""

MAX_RETURN: Final = 1e100
"""Larger returns are left out, because sums over episodes would overflow."""

RECENT_RETURN, UPDATE_RETURN, COUNT = "episode/return_mean_100", "episode/return_mean", "episode/count"
RETURN_STD: Final = "episode/return_std"


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


MIN_LEVEL_EPISODES: Final = 20  # episodes in the mean of a level; fewer if updates have less than one
MIN_LEVEL_UPDATES: Final = 3  # smallest number of updates with episodes in this mean
MAX_LEVEL_UPDATES: Final = 20  # largest number of updates with episodes in this mean
CLEAR_ERRORS: Final = 3.0  # standard errors by which two levels differ clearly
FALL_ERRORS: Final = 4.0  # the same for a fall, which is tested in every update
CLEAR_SHARE: Final = 0.02  # share of the first level by which they must also differ


@dataclass(slots=True)
class ReturnLevel:
    """Mean return of some updates with episodes; `parts` has the mean, the variance and the count of each."""

    parts: deque[tuple[float, float, float]] = field(default_factory=deque)

    @property
    def full(self) -> bool:
        """True if the level has enough episodes or updates."""
        few = sum(count for _, _, count in self.parts) < MIN_LEVEL_EPISODES or len(self.parts) < MIN_LEVEL_UPDATES
        return not few or len(self.parts) >= MAX_LEVEL_UPDATES

    def moments(self) -> tuple[float, float]:
        """Return the mean of the episodes, and the square of its standard error."""
        total = sum(count for _, _, count in self.parts)
        mean = sum(mean * count for mean, _, count in self.parts) / total
        within = sum(variance * count for _, variance, count in self.parts)
        between = sum((part - mean) ** 2 * count for part, _, count in self.parts)
        return mean, (within + between) / total / total


@dataclass(slots=True)
class ReturnCourse:
    """Level of the return in the first episodes and in the latest ones.

    Attributes:
        first, latest: both levels.
        recent: mean over the last hundred episodes, if records have it.
    """

    first: ReturnLevel = field(default_factory=ReturnLevel)
    latest: ReturnLevel = field(default_factory=ReturnLevel)
    recent: float | None = None
    _risen: bool | None = None
    """Cached value of `risen`."""

    def add(self, values: Mapping[str, float]) -> None:
        """Add the episodes of an update."""
        mean, spread, count = values.get(UPDATE_RETURN), values.get(RETURN_STD, 0.0), values.get(COUNT, 1.0)
        if mean is None or count <= 0 or not math.isfinite(mean * mean + spread * spread):
            return
        self._risen, self.recent = None, values.get(RECENT_RETURN)
        part = (mean, spread * spread, count)
        if not self.first.full:
            self.first.parts.append(part)
            return
        self.latest.parts.append(part)
        while len(self.latest.parts) > 1:
            rest = ReturnLevel(deque(list(self.latest.parts)[1:]))
            if not rest.full:
                break
            self.latest = rest

    @property
    def risen(self) -> bool | None:
        """True if the latest returns are clearly above the first ones; None without enough of both."""
        if self._risen is None and self.latest.full:
            (before, error), (now, error_now) = self.first.moments(), self.latest.moments()
            self._risen = bool(now - before > max(CLEAR_ERRORS * (error + error_now) ** 0.5, CLEAR_SHARE * abs(before)))
        return self._risen

    @property
    def rises(self) -> bool:
        """Whether the latest returns are above the first ones: clearly, or so far, where there are not enough of both."""
        if self.risen is None and self.latest.parts:
            (before, error), (now, error_now) = self.first.moments(), self.latest.moments()
            return bool(now - before > FALL_ERRORS * (error + error_now) ** 0.5)
        return bool(self.risen)

    def fallen_from(self, before: tuple[float, float]) -> bool:
        """Return whether the latest returns are clearly below an earlier level, given by its `moments`."""
        if not self.latest.full:
            return False
        (level, error), (now, error_now) = before, self.latest.moments()
        return bool(level - now > max(FALL_ERRORS * (error + error_now) ** 0.5, CLEAR_SHARE * abs(level)))

    def sentence(self, update: int) -> str:
        """Return the course up to this update, `By update 7 the return has risen to 41.3.`; empty before there are enough episodes.

        The outcome and the console have the same number. The outcome also has the level of the first rollouts, which averages more episodes
        of a longer run, so it is not repeated here.
        """
        if self.risen is None:
            return ""
        latest, first = self.latest.moments()[0], self.first.moments()[0]
        now = number(latest if self.recent is None else self.recent)
        not_risen = f"not {'clearly ' * (latest > first)}risen: it is {now}"
        return f"By update {update} the return has {f'risen to {now}' if self.risen else not_risen}."
