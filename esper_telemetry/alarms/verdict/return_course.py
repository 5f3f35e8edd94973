"""The return of a run since its first episodes, for rules that depend on whether the run has learned."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from esper_telemetry.core.messages import number
from esper_telemetry.history.recent_return import RECENT_RETURN

MEAN, STD, COUNT = "episode/return_mean", "episode/return_std", "episode/count"
MIN_EPISODES = 20  # episodes in the mean of a level; fewer if updates have less than one
MIN_UPDATES = 3  # smallest number of updates with episodes in this mean
MAX_UPDATES = 20  # largest number of updates with episodes in this mean
CLEAR_ERRORS = 3.0  # standard errors by which two levels differ clearly
FALL_ERRORS = 4.0  # the same for a fall, which is tested in every update
CLEAR_SHARE = 0.02  # share of the first level by which they must also differ


@dataclass(slots=True)
class ReturnLevel:
    """Mean return of some updates with episodes; `parts` has the mean, the variance and the count of each."""

    parts: deque[tuple[float, float, float]] = field(default_factory=deque)

    @property
    def full(self) -> bool:
        """True if the level has enough episodes or updates."""
        few = sum(count for _, _, count in self.parts) < MIN_EPISODES or len(self.parts) < MIN_UPDATES
        return not few or len(self.parts) >= MAX_UPDATES

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
        mean, spread, count = values.get(MEAN), values.get(STD, 0.0), values.get(COUNT, 1.0)
        if mean is None or count <= 0 or not isfinite(mean * mean + spread * spread):
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
