"""The calls of one sink: how long the one under way has lasted, and what they have raised."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from esper_telemetry.relay.status import one_line

_logger = logging.getLogger("esper_telemetry")


class Calls:
    """Watches the calls of one sink.

    Attributes:
        errors: exceptions so far.
        last_error: the latest of them in one line.
    """

    def __init__(self, name: str) -> None:
        self.errors = 0
        self.last_error = ""
        self._name = name
        self._begun: tuple[float, float] | None = None
        self._paused = 0.0

    @property
    def seconds(self) -> float:
        """For how long the call that is under way has lasted, without pauses; 0 where none is. From any thread."""
        if (found := self._begun) is None:
            return 0.0
        begun, paused = found
        return max(0.0, time.monotonic() - begun - (self._paused - paused))

    def paused(self, seconds: float) -> None:
        """The whole process was stopped for so long: no call could come back."""
        self._paused += seconds

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around a call."""
        self._begun = (time.monotonic(), self._paused)
        try:
            yield
        finally:
            self._begun = None

    def failed(self, error: BaseException) -> None:
        """Notes an error, and shows the first one."""
        self.note(error)
        if self.errors == 1:
            message = "esper-telemetry: sink %s failed (%s); it is tried again, and the journal keeps everything"
            _logger.warning(message, self._name, self.last_error)

    def note(self, error: BaseException) -> None:
        """Notes an error that somebody else shows."""
        self.errors += 1
        self.last_error = one_line(error)
        _logger.debug("sink %s raised", self._name, exc_info=error)
