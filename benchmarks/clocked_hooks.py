"""Hooks that time what is done for them."""

from __future__ import annotations

import statistics
import time

from esper_telemetry.events import BackwardEnd, Hooks, MinibatchEnd, TrunkBackward

PER_MINIBATCH = (TrunkBackward, BackwardEnd, MinibatchEnd)
"""Events of every minibatch."""


class ClockedHooks(Hooks):
    """Times each event from the question whether anybody wants it until all have heard it: what it costs to build and to hear.

    By the clock of this thread, whose own time is taken off. What a trainer keeps of every minibatch for an event that comes when the
    update is over is not seen (`ppo/tape.py`); nor are colder caches.
    """

    def __init__(self) -> None:
        super().__init__()
        self._since: dict[type, float] = {}
        self._seconds: dict[type, float] = {}
        self._reading = statistics.median(_reading() for _ in range(1000))

    def wants(self, event_type: type) -> bool:
        """See `Hooks`; starts the clock."""
        wanted = super().wants(event_type)
        if wanted:
            self._since[event_type] = time.thread_time()
        return wanted

    def emit(self, event: object) -> None:
        """See `Hooks`; stops the clock."""
        kind = type(event)
        start = self._since.pop(kind, None)
        start = time.thread_time() if start is None else start
        super().emit(event)
        self._seconds[kind] = self._seconds.get(kind, 0.0) + time.thread_time() - start - self._reading

    def seconds(self) -> tuple[float, float]:
        """Of the events of minibatches, and of all others."""
        often = sum(seconds for kind, seconds in self._seconds.items() if kind in PER_MINIBATCH)
        return often, sum(self._seconds.values()) - often

    def forget(self) -> None:
        """Starts anew."""
        self._seconds.clear()


def _reading() -> float:
    """What reading the clock takes."""
    start = time.thread_time()
    return time.thread_time() - start
