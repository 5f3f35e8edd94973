"""Hooks that measure telemetry's time on the training thread."""

from __future__ import annotations

import statistics
import time

from esper_telemetry.events import BackwardEnd, Hooks, MinibatchEnd, TrunkBackward

PER_MINIBATCH = (TrunkBackward, BackwardEnd, MinibatchEnd)
"""Events of every minibatch."""


class ClockedHooks(Hooks):
    """Measure each event from `wants` to the return of `emit`: the time to build it and to call its listeners.

    The clock counts the processor time of this thread, minus the time of reading the clock. It misses the columns of minibatches that a
    trainer keeps for an event at the end of the update, and the effect of colder caches.
    """

    def __init__(self) -> None:
        super().__init__()
        self._since: dict[type, float] = {}
        self._seconds: dict[type, float] = {}
        self._reading = statistics.median(_reading() for _ in range(1000))

    def wants(self, event_type: type) -> bool:
        """See `Hooks`; start the clock."""
        wanted = super().wants(event_type)
        if wanted:
            self._since[event_type] = time.thread_time()
        return wanted

    def emit(self, event: object) -> None:
        """See `Hooks`; stop the clock."""
        kind = type(event)
        start = self._since.pop(kind, None)
        start = time.thread_time() if start is None else start
        super().emit(event)
        self._seconds[kind] = self._seconds.get(kind, 0.0) + time.thread_time() - start - self._reading

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of minibatch events, and of all other events."""
        often = sum(seconds for kind, seconds in self._seconds.items() if kind in PER_MINIBATCH)
        return often, sum(self._seconds.values()) - often

    def forget(self) -> None:
        """Clear the times."""
        self._seconds.clear()


def _reading() -> float:
    """Return the seconds that reading the clock takes."""
    start = time.thread_time()
    return time.thread_time() - start
