"""Response to alarms on the training thread: call the user's callbacks, and measure the next updates at DEBUG.

Alarms come back some updates after their record, where a worker makes it: nobody waits for them. Which updates are measured at DEBUG
may therefore differ between two runs of one seed; weights do not.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from esper_telemetry.core.clock import Clock
from esper_telemetry.core.interrupts import is_interrupt
from esper_telemetry.core.record import Alarm, Level
from esper_telemetry.core.redaction import error_line
from esper_telemetry.pipeline.record import AlarmReport

AlarmCallback = Callable[[Alarm], object]

_logger = logging.getLogger("esper_telemetry")


class AlarmResponse:
    """Keeps alarms until the training thread comes by, and decides on the level of each update.

    Args:
        level: at which the run is measured while nothing is wrong; alarms raise no level that is MINIMAL.
        clock: which the time of callbacks does not count on.
        together: whether other ranks must raise the level with this one, which `agree` says.

    Attributes:
        level: of the update under way.
        requested: updates at DEBUG that the last record has asked for.
        remaining: updates at DEBUG that are still to come, the one under way included.
    """

    def __init__(self, level: Level, clock: Clock, *, together: bool = False) -> None:
        self.level = level
        self.requested = self.remaining = 0
        self._configured = level
        self._together = together
        self._clock = clock
        self._begun = False
        self._alarms: deque[Alarm] = deque()
        self._callbacks: list[AlarmCallback] = []
        self._failed: set[int] = set()

    @property
    def escalated(self) -> bool:
        """True while the update under way is measured in more detail than the run."""
        return self.level > self._configured

    def on_alarm(self, callback: AlarmCallback) -> Callable[[], None]:
        """Call back with every alarm from now on; returns the function that ends this. Raises TypeError for what cannot be called."""
        if not callable(callback):
            raise TypeError(f"on_alarm takes a function of one alarm, got {callback!r}")
        self._callbacks.append(callback)

        def remove() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return remove

    def receive(self, reports: Iterable[AlarmReport]) -> None:
        """Take in the reports of records, the latest last.

        A report may come late, so it counts from here on: more updates than before open a window, fewer are that window going by, and a
        sudden end is a detector's that forgot its alarms.
        """
        for report in reports:
            self._alarms.extend(report.alarms)
            if not self._together:
                if report.remaining > self.requested:
                    self.remaining = max(self.remaining, report.remaining)
                elif report.remaining == 0 and self.requested > 1:
                    self.remaining = 0
            self.requested = report.remaining

    def agree(self, remaining: int) -> None:
        """Set what rank 0 has asked for, now that all ranks know."""
        self.remaining = remaining

    def begin_update(self, *, late: bool = False) -> Level:
        """Return the level of the update that begins now; asked again before `end_update`, the same.

        Args:
            late: whether the worker is behind, so that it gets NORMAL at most.
        """
        if not self._begun:
            self._begun = True
            raised = self.remaining > 0 and self._configured >= Level.NORMAL
            self.level = Level.DEBUG if raised else self._configured
            self.level = min(self.level, Level.NORMAL) if late else self.level
        return self.level

    def end_update(self, *, recorded: bool = True) -> None:
        """End the update; one that is recorded is one of those that were asked for."""
        self._begun = False
        if recorded:
            self.remaining = max(0, self.remaining - 1)

    def call(self) -> None:
        """Call back with the alarms so far, in order.

        What a callback raises is logged once and goes no further, like a sink's errors: people first run a callback when training is
        in trouble. KeyboardInterrupt and SystemExit end training, as they do anywhere else.
        """
        while (alarm := self._next_alarm()) is not None:
            with self._clock.paused():
                for callback in tuple(self._callbacks):
                    try:
                        callback(alarm)
                    except Exception as error:  # whatever a callback raises
                        if is_interrupt(error):
                            raise
                        self._warn(callback, error)

    def _next_alarm(self) -> Alarm | None:
        """Return the next alarm to report; threads may call this side by side."""
        with suppress(IndexError):
            return self._alarms.popleft()
        return None

    def _warn(self, callback: AlarmCallback, error: Exception) -> None:
        if id(callback) in self._failed:
            return
        self._failed.add(id(callback))
        frame = traceback.extract_tb(error.__traceback__)[-1]
        _logger.warning(
            "esper-telemetry: on_alarm callback %s raised %s (%s:%s); training continues",
            *(
                getattr(callback, "__qualname__", type(callback).__name__),
                error_line(error),
                frame.filename,
                frame.lineno,
            ),
            exc_info=error if _logger.isEnabledFor(logging.DEBUG) else None,
        )
