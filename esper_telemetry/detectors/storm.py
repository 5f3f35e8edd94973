"""Too many alarms to read: one that says so, instead of the rest."""

from __future__ import annotations

from collections import Counter, deque

from esper_telemetry.record import AlarmEvent

STORM = "telemetry/storm"
STORM_SPAN = 100
STORM_CALM = 20
"""Updates that count, and updates without too many alarms after which a storm is over."""


class Storm:
    """Counts alarms, and says when there are too many to tell."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active = False
        self.since = 0
        self._raised: deque[tuple[int, str]] = deque()
        self._calm = 0

    def step(self, kinds: list[str], update: int) -> tuple[list[str], AlarmEvent | None]:
        """Types that are told of those raised in this update, and whether a storm begins or ends with it."""
        while self._raised and update - self._raised[0][0] >= STORM_SPAN:
            self._raised.popleft()
        self._raised.extend((update, kind) for kind in kinds)
        many = len(self._raised) > self.limit
        if not self.active:
            room = max(0, self.limit - (len(self._raised) - len(kinds)))
            self.active, self.since, self._calm = many, update, 0
            return kinds[:room], AlarmEvent.RAISE if many else None
        self._calm = 0 if many or kinds else self._calm + 1
        if self._calm < STORM_CALM:
            return [], None
        self.active = False
        return kinds, AlarmEvent.CLEAR

    def counts(self) -> Counter[str]:
        """Alarms raised lately by type, those that were not told included."""
        return Counter(kind for _, kind in self._raised)
