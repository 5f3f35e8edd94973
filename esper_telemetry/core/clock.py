"""Time spent in telemetry on the training thread."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Clock:
    """Accumulator of the wall and processor time spent inside `with clock:`; nested blocks count once."""

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
        """Context whose time does not count, even inside a running block."""
        if self._depth:
            self._add()
        try:
            yield
        finally:
            if self._depth:
                self._since, self._busy_since = time.perf_counter(), time.thread_time()

    @contextmanager
    def weighing(self, times: int) -> Iterator[None]:
        """Context whose time counts `times` times, to represent that many calls, each too short to be timed.

        Only processor time is added for the other calls, because another program that interrupts this call does not interrupt all of them.
        """
        cpu_seconds = self.cpu_seconds
        with self:
            yield
        others = (times - 1) * (self.cpu_seconds - cpu_seconds)
        self.seconds += others
        self.cpu_seconds += others

    def take(self) -> tuple[float, float]:
        """Return wall and processor seconds since the last call, the running block included."""
        if self._depth:
            self._add()
        elapsed = self.seconds, self.cpu_seconds
        self.seconds = self.cpu_seconds = 0.0
        return elapsed

    def _add(self) -> None:
        now, busy = time.perf_counter(), time.thread_time()
        self.seconds += now - self._since
        self.cpu_seconds += busy - self._busy_since
        self._since, self._busy_since = now, busy


class PhaseTimes:
    """Wall and processor seconds of an update by phase, as in `UpdateEnd`; each phase begins at the end of the previous one."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._cpu_seconds: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a phase; time since the last one ended is left out."""
        self._since, self._busy_since = time.perf_counter(), time.process_time()

    def end(self, phase: str, *, environment: float | None = None) -> None:
        """Add the time since the last phase ended.

        Args:
            phase: `rollout` or `update`.
            environment: seconds of a rollout in the environment, the rest is `inference`; None if all of them are in the environment.
        """
        since, busy_since = self._since, self._busy_since
        self.begin()
        seconds = self._since - since
        parts = {phase: seconds}
        if phase == "rollout":
            stepped = seconds if environment is None else environment
            parts = {"environment": stepped, "inference": max(0.0, seconds - stepped)}
        for name, part in parts.items():
            if part or name == phase:
                self._seconds[name] = self._seconds.get(name, 0.0) + part
        self._cpu_seconds[phase] = self._cpu_seconds.get(phase, 0.0) + self._busy_since - busy_since

    def replace(self, seconds: Mapping[str, float]) -> None:
        """Use wall seconds by phase that the trainer has measured itself."""
        self._seconds, self._cpu_seconds = dict(seconds), {}

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return wall and processor seconds of the phases since the last call."""
        taken = self._seconds, self._cpu_seconds
        self._seconds, self._cpu_seconds = {}, {}
        return taken
