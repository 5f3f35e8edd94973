"""How the task goes, as events: the return improves, stands still or falls. Information, no alarm.

Judged by the mean of ten updates against the ten before, never in the first tenth of a run, where returns are noise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from esper_telemetry.detectors.rule import number, percent

RETURN = "episode/return_mean"
SPAN = 10
"""Updates with episodes that are compared with as many before them."""

STARTED = 0.1
"""Share of a run after which its returns are judged."""

STARTED_UPDATES = 20
"""Updates after which they are, where nobody said how long the run is."""

STILL = 5
"""Spans in a row without progress that make a plateau."""

CHANGED = 0.1
"""Share of the range of returns so far that counts as a change."""

NOISE = 4.0
"""Standard errors of the difference that it must exceed besides."""

HUGE = 1e100
"""Returns beyond it are passed over: their squares are no numbers."""

Event = tuple[str, Mapping[str, Any]]


class TaskEvents:
    """Follows the return of one run."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=2 * SPAN)
        self._range: tuple[float, float] | None = None
        self._state = ""
        self._still = 0
        self._since = 0

    def step(self, values: Mapping[str, float], update: int, progress: float | None) -> tuple[Event, ...]:
        """Takes an update; tells what changed, if anything."""
        value = values.get(RETURN)
        if value is None or abs(value) > HUGE:
            return ()
        self._seen.append(value)
        low, high = self._range or (value, value)
        self._range = (min(low, value), max(high, value))
        self._since += 1
        started = update > STARTED_UPDATES if progress is None else progress >= STARTED
        if not started or len(self._seen) < 2 * SPAN or self._since < SPAN:
            return ()
        self._since = 0
        return self._judged(update)

    def _judged(self, update: int) -> tuple[Event, ...]:
        """Once per span: where the return goes."""
        seen = [*self._seen]
        before, now = seen[:SPAN], seen[SPAN:]
        old, new = _mean(before), _mean(now)
        error = ((_variance(before, old) + _variance(now, new)) / SPAN) ** 0.5
        low, high = self._range or (old, new)
        change = new - old
        clear = abs(change) > CHANGED * (high - low) and abs(change) > NOISE * error
        self._still = 0 if clear else self._still + 1
        state = ("improvement" if change > 0 else "degradation") if clear else "plateau" if self._still >= STILL else ""
        if not state or state == self._state:
            return ()
        self._state = state
        return ((f"task/{state}", self._told(state, old, new, update)),)

    def _told(self, state: str, old: float, new: float, update: int) -> dict[str, Any]:
        updates = self._still * SPAN if state == "plateau" else SPAN
        low, high = self._range or (old, new)
        place = (
            "" if high <= low else f", {percent((new - low) / (high - low))} of the way from its lowest to its highest"
        )
        words = {
            "improvement": f"the return rises: {number(new)} after {number(old)}",
            "degradation": f"the return falls: {number(new)} after {number(old)}",
            "plateau": f"the return has stood still at {number(new)} for about {updates} updates{place}",
        }
        return {"update": update, "return": new, "before": old, "updates": updates, "text": words[state]}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _variance(values: list[float], mean: float) -> float:
    return sum((value - mean) ** 2 for value in values) / len(values)
