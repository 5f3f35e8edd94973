"""Time that telemetry itself takes on the training thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Accumulates the time spent inside `with clock:`; nested blocks count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._since = 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._since = time.perf_counter()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it the time is somebody else's, also where a block is running."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._depth:
                self.seconds -= time.perf_counter() - start

    def take(self) -> float:
        """Seconds since the last call, the running block included."""
        now = time.perf_counter()
        running = now - self._since if self._depth else 0.0
        taken, self.seconds = self.seconds + running, 0.0
        self._since = now
        return taken
