"""Course of the task as events: the return improves, stands still or falls. Information, no alarm."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from esper_telemetry.alarms.rule import number, percent

RETURN: Final = "episode/return_mean"
SPAN_UPDATES: Final = 10
"""Updates with episodes that are compared with as many before them."""

STARTED_SHARE: Final = 0.1
"""Share of a run after which its returns are judged."""

STARTED_UPDATES: Final = 20
"""Updates after which they are, where the length of the run is not known."""

PLATEAU_SPANS: Final = 5
"""Spans in a row without progress that make a plateau."""

CHANGED_SHARE: Final = 0.1
"""Share of the range of returns so far that counts as a change."""

NOISE_ERRORS: Final = 4.0
"""Standard errors of the difference that it must exceed besides."""

MAX_RETURN: Final = 1e100
"""Returns beyond it are passed over: their squares are no numbers."""

Event = tuple[str, Mapping[str, Any]]


class TaskEvents:
    """Course of the return of one run."""

    def __init__(self) -> None:
        self._returns: deque[float] = deque(maxlen=2 * SPAN_UPDATES)
        self._range: tuple[float, float] | None = None
        self._state = ""
        self._still = 0
        self._since = 0

    def step(self, values: Mapping[str, float], update: int, progress: float | None) -> tuple[Event, ...]:
        """Add an update; returns the event, if anything changed."""
        value = values.get(RETURN)
        if value is None or abs(value) > MAX_RETURN:
            return ()
        self._returns.append(value)
        low, high = self._range or (value, value)
        self._range = (min(low, value), max(high, value))
        self._since += 1
        started = update > STARTED_UPDATES if progress is None else progress >= STARTED_SHARE
        if not started or len(self._returns) < 2 * SPAN_UPDATES or self._since < SPAN_UPDATES:
            return ()
        self._since = 0
        return self._event(update)

    def _event(self, update: int) -> tuple[Event, ...]:
        """Compare the last two spans."""
        returns = [*self._returns]
        before, now = returns[:SPAN_UPDATES], returns[SPAN_UPDATES:]
        old, new = _mean(before), _mean(now)
        error = ((_variance(before, old) + _variance(now, new)) / SPAN_UPDATES) ** 0.5
        low, high = self._range or (old, new)
        change = new - old
        clear = abs(change) > CHANGED_SHARE * (high - low) and abs(change) > NOISE_ERRORS * error
        self._still = 0 if clear else self._still + 1
        state = (
            ("improvement" if change > 0 else "degradation")
            if clear
            else "plateau"
            if self._still >= PLATEAU_SPANS
            else ""
        )
        if not state or state == self._state:
            return ()
        self._state = state
        return ((f"task/{state}", self._data(state, old, new, update)),)

    def _data(self, state: str, old: float, new: float, update: int) -> dict[str, Any]:
        updates = self._still * SPAN_UPDATES if state == "plateau" else SPAN_UPDATES
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
