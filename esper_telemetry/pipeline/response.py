"""What a run does about alarms on the training thread: it calls whoever asked, and looks at the next updates in detail."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

from esper_telemetry.core.clock import Clock
from esper_telemetry.core.record import Alarm, Level
from esper_telemetry.pipeline.watch import Found

AlarmCallback = Callable[[Alarm], object]

_logger = logging.getLogger("esper_telemetry")


class Response:
    """Keeps what was found until the training thread comes by.

    Args:
        level: at which the run is measured while nothing is wrong; alarms raise no level that is MINIMAL.
        clock: which the time of callbacks does not count on.
        together: whether other ranks must raise the level with this one, which `agree` says.

    Attributes:
        level: of the update under way.
        escalated: whether alarms have raised it.
        asked: updates at DEBUG that the last record has asked for.
        remaining: updates at DEBUG that are still to come, the one under way included.
    """

    def __init__(self, level: Level, clock: Clock, *, together: bool = False) -> None:
        self.level = level
        self.asked = self.remaining = 0
        self._configured = level
        self._together = together
        self._clock = clock
        self._begun = False
        self._waiting: deque[Alarm] = deque()
        self._callbacks: list[AlarmCallback] = []
        self._failed: set[int] = set()

    @property
    def escalated(self) -> bool:
        """Whether the update under way is looked at in more detail than the run."""
        return self.level > self._configured

    def on_alarm(self, callback: AlarmCallback) -> Callable[[], None]:
        """Calls back with every alarm from now on; returns the function that ends this. Raises TypeError for what cannot be called."""
        if not callable(callback):
            raise TypeError(f"on_alarm takes a function of one alarm, got {callback!r}")
        self._callbacks.append(callback)

        def remove() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return remove

    def hear(self, found: Iterable[Found]) -> None:
        """Takes in what was found, the latest last; a window of DEBUG that some updates have passed since is no shorter for that."""
        for one in found:
            self._waiting.extend(one.alarms)
            if not self._together:
                self._reckon(one.remaining)
            self.asked = one.remaining

    def _reckon(self, asked: int) -> None:
        """More than before opens a window, less is that window going by, and a sudden end is one by force."""
        if asked > self.asked:
            self.remaining = max(self.remaining, asked)
        elif asked == 0 and self.asked > 1:
            self.remaining = 0

    def agree(self, remaining: int) -> None:
        """What the first of several ranks has asked for, now that all of them know."""
        self.remaining = remaining

    def begin(self) -> Level:
        """The level of the update that begins now; asked again before `end`, the same."""
        if not self._begun:
            self._begun = True
            raised = self.remaining > 0 and self._configured >= Level.NORMAL
            self.level = Level.DEBUG if raised else self._configured
        return self.level

    def end(self, *, recorded: bool = True) -> None:
        """The update is over; one that is recorded is one of those that were asked for."""
        self._begun = False
        if recorded:
            self.remaining = max(0, self.remaining - 1)

    def call(self) -> None:
        """Calls back with what waits, in order; what a callback raises is logged once and goes no further."""
        while self._waiting:
            alarm = self._waiting.popleft()
            with self._clock.paused():
                for callback in tuple(self._callbacks):
                    self._call(callback, alarm)

    def _call(self, callback: AlarmCallback, alarm: Alarm) -> None:
        try:
            callback(alarm)
        except Exception as error:  # a KeyboardInterrupt or SystemExit ends training, as it does anywhere else
            if id(callback) not in self._failed:
                self._failed.add(id(callback))
                name = getattr(callback, "__qualname__", type(callback).__name__)
                _logger.warning(
                    "esper-telemetry: on_alarm callback %s raised %s: %s; training goes on",
                    *(name, type(error).__name__, error),
                    exc_info=error,
                )
