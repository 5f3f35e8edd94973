"""Response to alarms on the training thread: call the user's callbacks, and measure the next updates at DEBUG.

If a worker makes the records, alarms arrive some updates after their record, because training does not wait for them. The updates that
are measured at DEBUG may therefore differ between two runs with one seed; the weights do not.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from esper_telemetry.core.clock import Clock
from esper_telemetry.core.interrupts import is_interrupt
from esper_telemetry.core.record import Alarm, AlarmLevel, Level
from esper_telemetry.core.redaction import error_line
from esper_telemetry.pipeline.in_process import AlarmReport

AlarmCallback = Callable[[Alarm], object]

_logger = logging.getLogger("esper_telemetry")


class AlarmResponse:
    """Keeps alarms until the training thread calls, and decides on the level of each update.

    Args:
        level: the level without escalation; alarms do not raise MINIMAL.
        clock: telemetry's clock, which excludes the time of callbacks.
        together: whether other ranks must raise the level together with this one; `agree` then sets it.

    Attributes:
        level: level of the update under way.
        requested: number of updates at DEBUG that the last record has asked for.
        is_critical: whether an alarm of the run has been critical.
        remaining: number of updates at DEBUG that are still to come, including the one under way.
    """

    def __init__(self, level: Level, clock: Clock, *, together: bool = False) -> None:
        self.level = level
        self.requested = self.remaining = 0
        self._configured = level
        self.is_critical = False
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
        """Call back with every alarm from now on; returns a function that stops this. Raises TypeError if `callback` is not callable."""
        if not callable(callback):
            raise TypeError(f"on_alarm takes a function of one alarm, got {callback!r}")
        self._callbacks.append(callback)

        def remove() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return remove

    def receive(self, reports: Iterable[AlarmReport]) -> None:
        """Receive the reports of records, the latest last.

        A report may be late, so its updates are counted from now. A larger number than before opens a window, and a smaller one means that
        the window passes. A sudden end means that a detector has forgotten its alarms.
        """
        for report in reports:
            self._alarms.extend(report.alarms)
            self.is_critical |= any(alarm.level is AlarmLevel.CRITICAL for alarm in report.alarms)
            if not self._together:
                if report.remaining > self.requested:
                    self.remaining = max(self.remaining, report.remaining)
                elif report.remaining == 0 and self.requested > 1:
                    self.remaining = 0
            self.requested = report.remaining

    def agree(self, remaining: int) -> None:
        """Set the number that rank 0 has asked for, once all ranks know it."""
        self.remaining = remaining

    def begin_update(self, *, late: bool = False) -> Level:
        """Return the level of the update that begins now; further calls before `end_update` return the same.

        Args:
            late: whether the worker is behind, which limits the level to NORMAL.
        """
        if not self._begun:
            self._begun = True
            raised = self.remaining > 0 and self._configured >= Level.NORMAL
            self.level = Level.DEBUG if raised else self._configured
            self.level = min(self.level, Level.NORMAL) if late else self.level
        return self.level

    def end_update(self) -> None:
        """End the update, which is one of the requested updates."""
        self._begun = False
        self.remaining = max(0, self.remaining - 1)

    def call(self) -> None:
        """Call back with the alarms so far, in order.

        An exception of a callback is logged once and caught, like a sink's errors, because callbacks often run for the first time when
        training is in trouble. Only KeyboardInterrupt and SystemExit end training, as they do anywhere else.
        """
        while (alarm := self._next_alarm()) is not None:
            with self._clock.paused():
                for callback in tuple(self._callbacks):
                    try:
                        callback(alarm)
                    except BaseException as error:  # a callback may raise anything
                        if isinstance(error, KeyboardInterrupt | SystemExit) or is_interrupt(error):
                            raise
                        self._warn(callback, error)

    def _next_alarm(self) -> Alarm | None:
        """Return the next alarm to report; several threads may call this at once."""
        with suppress(IndexError):
            return self._alarms.popleft()
        return None

    def _warn(self, callback: AlarmCallback, error: BaseException) -> None:
        if id(callback) in self._failed:
            return
        self._failed.add(id(callback))
        frame = traceback.extract_tb(error.__traceback__)[-1]
        _logger.warning(
            "esper-telemetry: on_alarm callback %s raised %s (%s:%s); training continues",
            *(getattr(callback, "__qualname__", type(callback).__name__), error_line(error), frame.filename, frame.lineno),
            exc_info=error if _logger.isEnabledFor(logging.DEBUG) else None,
        )
