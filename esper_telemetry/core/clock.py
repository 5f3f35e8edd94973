"""Time that telemetry itself takes on the training thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Accumulates the time spent inside `with clock:`, on the wall and of the processor; nested blocks count once."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self._depth = 0
        self._since = self._busy_since = 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._since, self._busy_since = time.perf_counter(), time.thread_time()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._add()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it the time is somebody else's, also where a block is running."""
        if self._depth:
            self._add()
        try:
            yield
        finally:
            if self._depth:
                self._since, self._busy_since = time.perf_counter(), time.thread_time()

    @contextmanager
    def weighing(self, times: int) -> Iterator[None]:
        """Counts the time within it that many times: for one call of so many, where timing all would cost more than they do."""
        seconds, cpu_seconds = self.seconds, self.cpu_seconds
        with self:
            yield
        self.seconds += (times - 1) * (self.seconds - seconds)
        self.cpu_seconds += (times - 1) * (self.cpu_seconds - cpu_seconds)

    def take(self) -> tuple[float, float]:
        """Seconds since the last call, of the wall and of the processor, the running block included."""
        if self._depth:
            self._add()
        taken = self.seconds, self.cpu_seconds
        self.seconds = self.cpu_seconds = 0.0
        return taken

    def _add(self) -> None:
        """Adds the running block so far."""
        now, busy = time.perf_counter(), time.thread_time()
        self.seconds += now - self._since
        self.cpu_seconds += busy - self._busy_since
        self._since, self._busy_since = now, busy
