"""Helper processes of a trainer: the sink process, and the worker that computes records.

The trainer's side is `ProcessSupervisor`: it starts one helper, listens to it, kills it if it falls silent, decides when to
start it again, and reaps it. It uses no thread: the trainer drives it between two updates, because in a process with a second
thread the locks of the C library take an atomic instruction each, in every tensor operation. Calls never wait longer than their
argument says.

The helper's side is `become_helper_process`. A helper is not a child of `multiprocessing`, which would run a script
without a main guard again. It leads its own session, so that the processes it starts can be killed with it.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from esper_telemetry.core.files import open_own
from esper_telemetry.core.redaction import MaskedStream

HAS_HELPERS: Final = hasattr(os, "fork")
"""Whether helpers can run here. On Windows they cannot inherit descriptors, so that sinks run in threads of the trainer."""
MIN_PAUSE_SECONDS: Final = 5.0
"""Time between two iterations of a frequent loop above which the process must have been stopped."""
RESTART_STEP_SECONDS: Final = 0.5
MAX_RESTART_SECONDS: Final = 30.0
"""After n deaths in a row, a helper is restarted after n times the first, but at most after the second."""
READ_BYTES: Final = 1 << 16
MAX_REAP_SECONDS: Final = 5.0
"""Time that a killed helper may take to end; a helper that waits for a disk may not end."""
GARBAGE_THRESHOLD_OBJECTS: Final = 20_000
"""New objects after which a helper collects garbage, instead of 700: clients make dozens of objects for each number and release
them at once. For MLflow's SQLite store this takes 10 ms of processor time for a hundred numbers instead of 14."""


class ProcessSupervisor:
    """One helper process: started, listened to, restarted, killed and reaped.

    The owner calls `start`, then `read` repeatedly. Once it `has_ended` and `read` returns nothing more, it calls `reap` and
    `schedule_restart`, and `start` again once that is `restart_due`. Only the owner interprets the bytes.

    Args:
        entry: Python code that its interpreter runs with the import path of this process; `sys.argv[1]` is the descriptor for its
            replies.
        log: file that its output is appended to.
        arguments: further elements of its `sys.argv`.
        environment: variables that are added to this process's own.
        max_restarts: deaths in a row, without progress in between, after which it is given up.
        max_silent_seconds: time without output after which a helper is killed; None if it need not write.

    Attributes:
        log: as given.
        given_up: whether it died too often.
    """

    def __init__(
        self,
        entry: str,
        log: Path,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        max_restarts: int = 0,
        max_silent_seconds: float | None = None,
    ) -> None:
        self.log = log
        self.given_up = False
        self._arguments, self._environment = arguments, environment or {}
        self._max_restarts = max_restarts
        self._max_silent_seconds = max_silent_seconds
        # in its code, because an environment variable would reach the processes that the helper starts
        paths = [str(Path(path).absolute()) for path in sys.path if isinstance(path, str)]
        self._code = f"import sys; sys.path[:] = {paths!a}\n{entry}"
        self._process: subprocess.Popen[bytes] | None = None
        self._replies = -1
        self._closed = False
        self._heard_at = 0.0
        self._pauses = PauseDetector()
        self._deaths = 0
        self._restart_at = 0.0

    @property
    def pid(self) -> int | None:
        """Process ID of the helper; None if none runs."""
        return None if self._process is None else self._process.pid

    @property
    def input(self) -> int:
        """Descriptor of the helper's standard input, for an owner that writes without waiting."""
        assert self._process is not None and self._process.stdin is not None
        return self._process.stdin.fileno()

    @property
    def replies(self) -> int:
        """Descriptor of the helper's replies, for an owner that polls several."""
        return self._replies

    def start(self, descriptors: Sequence[int] = ()) -> None:
        """Start the helper, which inherits these descriptors.

        Raises OSError or MemoryError if the system lacks resources for it; everything is then closed.
        """
        replies, reply_end = os.pipe()
        try:
            with os.fdopen(open_own(self.log, os.O_WRONLY | os.O_APPEND), "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", self._code, str(reply_end), *self._arguments],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=[reply_end, *descriptors],
                    env={**os.environ, **self._environment},
                    bufsize=0,
                    start_new_session=True,
                )
        except BaseException:
            os.close(replies)
            raise
        finally:
            os.close(reply_end)
        self._replies, self._closed, self._heard_at = replies, False, time.monotonic()

    def send(self, data: bytes) -> None:
        """Write all of `data` to the helper's input; `read` notices a dead helper."""
        with suppress(OSError):
            while data and self._process is not None and self._process.stdin is not None:
                data = data[self._process.stdin.write(data) :]

    def read(self, seconds: float = 0.0) -> bytes:
        """Return the helper's output within that time; empty if it wrote nothing, or has ended.

        A helper that is silent for too long is killed here. Only a little of the time between two calls counts as silence: the trainer
        may be in a long update, or both processes may have been stopped.
        """
        if self._process is None:
            return b""
        if self._closed:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            return b""
        self._heard_at += max(0.0, self._pauses.seconds() - MIN_PAUSE_SECONDS)
        poll = select.poll()  # select cannot use descriptors above 1023
        poll.register(self._replies, select.POLLIN)
        if poll.poll(seconds * 1000):
            data, self._heard_at = os.read(self._replies, READ_BYTES), time.monotonic()
            self._closed = not data
            return data
        silent = time.monotonic() - self._heard_at
        if self._max_silent_seconds is not None and silent > self._max_silent_seconds:
            self.kill()
            self._heard_at = time.monotonic()
        return b""

    @property
    def has_ended(self) -> bool:
        """True once the helper has exited; its last output may still be unread."""
        return self._process is not None and self._process.poll() is not None

    def await_end(self) -> bool:
        """Wait for the end of a killed helper; False if it does not end, for example while a network file system does not answer."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(MAX_REAP_SECONDS)
        return self.has_ended

    def reap(self) -> int:
        """Return the exit code of a helper that has ended or is about to, and release its resources; one that does not end is detached.

        This does not wait for the end of its replies, because a forked process may hold a dead helper's pipe open.
        """
        assert self._process is not None
        if not self.await_end():
            self.detach()
            return -signal.SIGKILL
        code = self._process.wait()
        if code:  # processes that it started may outlive a helper that did not end normally
            _kill_session(self._process.pid)
        self._release()
        return code

    def schedule_restart(self, *, progressed: bool) -> None:
        """Count a death, or a start that the system refused, and set when the next start is due.

        Args:
            progressed: whether the helper made progress since its last start, or the cause of its death is gone; this resets the count.
        """
        self._deaths = 1 if progressed else self._deaths + 1
        self.given_up = self._deaths > self._max_restarts
        self._restart_at = time.monotonic() + min(MAX_RESTART_SECONDS, RESTART_STEP_SECONDS * self._deaths)

    def restart_due(self, seconds: float) -> bool:
        """Wait at most that long for the next start to be due; return whether it is."""
        time.sleep(max(0.0, min(seconds, self._restart_at - time.monotonic())))
        return time.monotonic() >= self._restart_at

    def kill(self) -> None:
        """Kill the helper and the processes that it started; `reap` releases it."""
        if self._process is not None and not self.has_ended:
            _kill_session(self._process.pid)

    def stop(self, seconds: float = 0.0) -> int:
        """Close the helper's input, give it that long to end, then kill it; reap it and return its exit code."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.kill()
        return self.reap()

    def detach(self) -> None:
        """Let the helper continue alone; it sees the end of its input."""
        if self._process is not None:
            detached = (*_detached, self._process)
            self._release()
            _detached[:] = [process for process in detached if process.poll() is None]

    def _release(self) -> None:
        assert self._process is not None
        os.close(self._replies)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None


_detached: list[subprocess.Popen[bytes]] = []
"""Detached helpers, kept because `Popen` warns about helpers that are forgotten."""


def _kill_session(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


class PauseDetector:
    """Notices that the process was stopped: by Ctrl-Z, by a scheduler that suspends jobs, or in a frozen container.

    A process that was stopped together with everything else does not hang.
    """

    def __init__(self) -> None:
        self._looked_at = time.monotonic()

    def seconds(self) -> float:
        """Length of the pause since the last call, or 0."""
        now = time.monotonic()
        since, self._looked_at = now - self._looked_at, now
        return since if since > MIN_PAUSE_SECONDS else 0.0


REPORTED: Final = {"reported": True}
"""`extra=` of a warning that the trainer logs itself, from the state of a helper."""


class WarningCollector(logging.Handler):
    """Keeps the warnings of a helper process, for the trainer to log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one warning."""
        if not getattr(record, "reported", False):
            self._warnings.append(" ".join(record.getMessage().split()))

    def take(self) -> Sequence[str]:
        """Return the warnings since the last call, a line each."""
        warnings, self._warnings = self._warnings, []
        return warnings


def become_helper_process(niceness: int) -> None:
    """Leave signals, the first core and most processor time to the trainer; collect garbage rarely.

    Ctrl-C and a scheduler's SIGTERM reach the whole job, and the trainer decides when the run ends. SIGTERM gets a function, not SIG_IGN,
    which processes started from here would inherit.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    lower_process_priority(niceness)
    gc.set_threshold(GARBAGE_THRESHOLD_OBJECTS, *gc.get_threshold()[1:])
    sys.stdout, sys.stderr = MaskedStream(sys.stdout), MaskedStream(sys.stderr)  # they end in a file


def lower_process_priority(niceness: int) -> None:
    """Lower the priority of this process and its children, and leave the first core to the trainer.

    Priority alone is not enough. The system wakes a reader on the core of the process that wrote to its pipe, and lets it take that core
    for milliseconds, except a process for batch work. All helpers leave the trainer the same core, and the scheduler moves it there.
    """
    with suppress(OSError):
        os.nice(niceness)
    with suppress(OSError, AttributeError):  # functions that only Linux has
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with suppress(OSError, AttributeError):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores - {min(cores)} or cores)
