"""Calls from signal handlers wait for the call that they interrupt, and exceptions of signal handlers are never contained."""

from __future__ import annotations

import logging
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

Result = TypeVar("Result")

_logger = logging.getLogger("esper_telemetry")


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception is a Ctrl-C or comes from a signal handler, so that it must end the program.

    `sys.exit` in a handler of SIGTERM qualifies, `sys.exit` in a user's alarm does not. A `KeyboardInterrupt` qualifies in the main thread,
    unless the process ignores Ctrl-C as a worker does.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    handlers = {_code_of(handler) for number in signal.valid_signals() if callable(handler := signal.getsignal(number))}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a function, a method, a partial or a callable object; None if it is not written in Python."""
    handler = getattr(handler, "func", handler)
    code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


class SerialCalls:
    """Serves one call at a time: a call from another thread waits for its turn.

    A call that interrupts another one on its own thread, from a signal handler or a finalizer, runs after that one, so that it does not
    find half-changed state. A reentrant lock alone would let it in.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_busy = False
        self._deferred: deque[Callable[[], Any]] = deque()

    def run(self, call: Callable[[], Result], *, deferred: Result, is_question: bool = False) -> Result:
        """Return the result of the call, or `deferred` if it interrupts another one; it then runs later, unless `is_question`."""
        with self._lock:
            if self._is_busy:
                if not is_question:
                    self._deferred.append(call)
                return deferred
            self._is_busy = True
            try:
                self._run_deferred()
                return call()
            finally:
                try:
                    self._run_deferred()
                finally:
                    self._is_busy = False

    def _run_deferred(self) -> None:
        """Run the waiting calls, but not calls that arrive meanwhile: signals may be faster than calls, and training waits."""
        for _ in range(len(self._deferred)):
            _run_logged(self._deferred.popleft())

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Serve calls of the code inside, which the call under way has asked for."""
        self._is_busy = False
        try:
            yield
        finally:
            self._is_busy = True


def _run_logged(call: Callable[[], object]) -> None:
    """Run a call and log its exception, because the handler that made the call has returned long ago."""
    try:
        call()
    except BaseException as error:
        if is_interrupt(error):
            raise
        from esper_telemetry.core.redaction import error_line  # imported here, because that module imports this one

        _logger.warning("esper-telemetry: a call from a signal handler failed (%s)", error_line(error))
