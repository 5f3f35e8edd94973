"""One call at a time, whatever thread or signal handler it comes from."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from esper_telemetry.core.containment import is_interrupt
from esper_telemetry.core.messages import error_line

Result = TypeVar("Result")

_logger = logging.getLogger("esper_telemetry")


class SerialCalls:
    """Serves one call at a time: a call from another thread waits for its turn.

    A call that interrupts another one on its own thread, from a signal handler or a finalizer, runs when that one is over, so that it finds
    no state half changed. A reentrant lock alone would let it in.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_busy = False
        self._deferred: deque[Callable[[], Any]] = deque()

    def run(self, call: Callable[[], Result], *, deferred: Result) -> Result:
        """Return the result of the call; `deferred` if it interrupts another one and runs later."""
        with self._lock:
            if self._is_busy:
                self._deferred.append(call)
                return deferred
            self._is_busy = True
            try:
                return call()
            finally:
                self._is_busy = False
                while self._deferred:
                    self.run(_logged(self._deferred.popleft()), deferred=None)

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Serve calls of the code inside, which the call under way has asked for."""
        self._is_busy = False
        try:
            yield
        finally:
            self._is_busy = True


def _logged(call: Callable[[], object]) -> Callable[[], None]:
    """Return the call so that what it raises is logged: the handler that made it has returned long ago."""

    def contained() -> None:
        try:
            call()
        except BaseException as error:
            if is_interrupt(error):
                raise
            _logger.warning("esper-telemetry: a call from a signal handler failed (%s)", error_line(error))

    return contained
