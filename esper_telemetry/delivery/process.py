"""The parent's side of the process that feeds the sinks: it is started, listened to, restarted and left alone from here."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from esper_telemetry.core.record import RunStatus
from esper_telemetry.core.redaction import redacted
from esper_telemetry.delivery.child import dumped
from esper_telemetry.delivery.sender import PAUSE_SECONDS, Pauses
from esper_telemetry.delivery.status import SETTLED, SinkState, SinkStatus
from esper_telemetry.journal.lock import Role, lock_for, remove_lock
from esper_telemetry.sinks.protocol import Sink

LOG_NAME: Final = "relay.log"
ENTRY: Final = "from esper_telemetry.delivery.child import main; main()"
RESTARTS: Final = 3
"""Deaths in a row, without a record delivered in between, after which the process is not started again."""
CALL_SECONDS: Final = 120.0
"""How long one call of a sink may take: MLflow waits 20 s for a locked database, W&B a minute for a server."""
FRESH_STARTS: Final = 3
"""Fresh processes in a row that one sink may ask for, by a call that hangs or a client that is dead, before it is given up."""
SILENT_SECONDS: Final = 120.0
"""A process that says nothing for so long, though it should every five seconds, is killed and started again."""
LONGEST_PAUSE_SECONDS: Final = 30.0
_logger = logging.getLogger("esper_telemetry")


@dataclass(slots=True)
class Child:
    """The process, where it is heard, and what was.

    Attributes:
        process: as it was started.
        listening: what it says comes out here.
        heard_at: when it said something last, by the monotonic clock.
        received: a line that is not complete.
        closed: whether it says nothing any more.
    """

    process: subprocess.Popen[bytes]
    listening: int
    heard_at: float
    received: bytes = b""
    closed: bool = False


_left_alone: list[subprocess.Popen[bytes]] = []
"""Children that go on by themselves: `Popen` complains of one that is forgotten."""


class SinkProcess:
    """One child process for all sinks of a run that may not share the trainer's interpreter.

    It is no child of `multiprocessing`, which would run a script without a main guard again; it gets the sinks pickled,
    and the parent's import path. What backends print goes to `relay.log`. A child that dies, falls silent, or gives up
    on a call that hangs is started again, and goes on where its cursors stand: until it has died three times more
    without delivering anything. A sink that hangs three times in a row is given up, and the others go on.

    The training thread sees to all this between two updates, without waiting. A thread of its own would cost more than it does: in a
    process that has a second thread every lock of the C library takes an atomic instruction, in every tensor operation
    (`docs/architecture.md`).

    Args:
        run_dir: where the journal is.
        sinks: by name; each must be picklable. Raises TypeError naming one that is not.
    """

    def __init__(self, run_dir: Path, sinks: Mapping[str, Sink]) -> None:
        self.run_dir = run_dir
        self.statuses = {name: SinkStatus(name) for name in sinks}
        self._sinks = {name: _pickled(name, sink) for name, sink in sinks.items()}
        self._import_path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        self._child: Child | None = None
        self._end: RunStatus | None = None
        self._over = False
        self._deaths = 0
        self._due = 0.0
        self._pauses = Pauses()
        self._shown: set[str] = set()
        self._earlier_errors: dict[str, int] = {}
        self._fresh_starts = dict.fromkeys(sinks, 0)
        self._records = dict.fromkeys(sinks, 0)
        self._begin()

    @property
    def pid(self) -> int | None:
        """Of the child that runs now."""
        self._step(0.0)
        return None if self._child is None else self._child.process.pid

    def attend(self) -> None:
        """Hears the child, and does what is due; never waits."""
        self._step(0.0)

    def finish(self, status: RunStatus) -> None:
        """Tells the child that no more lines will come; see `Delivery.finish`."""
        self._end = status
        self._send_end()

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for: the child has done its work and ended, or is given up."""
        return self._over

    def wait(self, seconds: float) -> None:
        """Waits that long at most for something to happen, and does what is due."""
        self._step(seconds)

    def leave(self) -> None:
        """Lets the child go on by itself, as when its parent is killed: for `ORPHAN_SECONDS` at most."""
        self._over = True
        if self._child is None:
            remove_lock(self.run_dir, Role.RELAY)
            return
        child, self._child = self._child, None
        _send(child.process, {"leave": True})
        os.close(child.listening)
        if child.process.stdin is not None:
            child.process.stdin.close()
        _left_alone[:] = [process for process in (*_left_alone, child.process) if process.poll() is None]

    def _step(self, seconds: float) -> None:
        """One thing that is due, for which it waits that long at most."""
        if self._over:
            return
        if self._child is None:
            time.sleep(max(0.0, min(seconds, self._due - time.monotonic())))
            if time.monotonic() >= self._due:
                self._begin()
        elif not self._lives(self._child, seconds):
            self._bury(self._child)

    def _begin(self) -> None:
        """Starts the child, unless nothing is left for it to do."""
        self._over = self._settled()
        if self._over:
            return
        self._earlier_errors = {name: status.errors for name, status in self.statuses.items()}
        try:
            self._child = self._started()
        except (OSError, MemoryError) as error:
            self._warn_of_refusal(error)
            self._judge(-1)
            return
        _send(
            self._child.process,
            {**self._settings(), "run_dir": str(self.run_dir), "parent": os.getpid(), "command": redacted(sys.argv)},
        )
        self._send_end()

    def _started(self) -> Child:
        """A new child; what it took is given back where the system refuses the rest."""
        listening, telling = os.pipe()
        try:
            return Child(self._spawned(telling), listening, time.monotonic())
        except BaseException:
            os.close(listening)
            raise
        finally:
            os.close(telling)

    def _judge(self, code: int) -> None:
        """What becomes of a child that has ended."""
        self._deaths = 1 if self._got_on() else self._deaths + 1
        self._judge_fresh_starts()
        self._due = time.monotonic() + min(LONGEST_PAUSE_SECONDS, 0.5 * self._deaths)
        if not self._settled() and not self._over:
            self._warn_of_death(code, last=self._deaths > RESTARTS)
        self._over |= self._deaths > RESTARTS or self._settled()

    def _got_on(self) -> bool:
        """Whether some sink has taken records since the last time; what was wrong with it before is forgotten."""
        got_on = [name for name, status in self.statuses.items() if status.records > self._records[name]]
        for name in got_on:
            self._records[name] = self.statuses[name].records
            self._fresh_starts[name] = 0
        return bool(got_on)

    def _judge_fresh_starts(self) -> None:
        """Counts how often each sink has asked for a fresh process, and gives up one for which that does not help."""
        for name, status in self.statuses.items():
            if status.state in (SinkState.HUNG, SinkState.DEAD_CLIENT):
                self._fresh_starts[name] += 1
                if self._fresh_starts[name] >= FRESH_STARTS:
                    self._give_up(status)

    def _give_up(self, status: SinkStatus) -> None:
        hung = f"it hung {FRESH_STARTS} times in a row for {CALL_SECONDS:g} s"
        error = hung if status.state is SinkState.HUNG else f"{status.last_error} ({FRESH_STARTS} processes in a row)"
        self.statuses[status.name] = replace(status, state=SinkState.DISABLED, last_error=error)
        self._deaths = 0  # the process may live without it
        self._show(self.statuses[status.name])

    def _settings(self) -> Mapping[str, object]:
        """The sinks that are not given up, and how often each of them has asked for a fresh process."""
        given_up = {name for name, status in self.statuses.items() if status.state is SinkState.DISABLED}
        sinks = {name: text for name, text in self._sinks.items() if name not in given_up}
        return {"sinks": sinks, "failures": self._fresh_starts, "call_seconds": CALL_SECONDS}

    def _spawned(self, telling: int) -> subprocess.Popen[bytes]:
        """The child, which holds the relay's lock as long as it lives."""
        lock = lock_for(self.run_dir, Role.RELAY)
        try:
            with (self.run_dir / LOG_NAME).open("ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-P", "-c", ENTRY, str(telling)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=[telling, lock],
                    env={**os.environ, "PYTHONPATH": self._import_path},
                    bufsize=0,
                    start_new_session=True,
                )
        finally:
            os.close(lock)

    def _lives(self, child: Child, seconds: float) -> bool:
        """Hears what the child says, for that long at most; whether it still runs.

        A forked process may hold open what a dead child spoke through. Of the time between two looks little counts as silence: it may be
        a long update, or one in which this process was stopped, and the child with it.
        """
        if child.closed:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(seconds)
            return child.process.poll() is None
        child.heard_at += max(0.0, self._pauses.last() - PAUSE_SECONDS)
        poll = select.poll()
        poll.register(child.listening, select.POLLIN)
        if poll.poll(seconds * 1000):
            self._hear(child)
        elif child.process.poll() is not None:
            return False
        elif time.monotonic() - child.heard_at > SILENT_SECONDS:
            self._kill()
            child.heard_at = time.monotonic()
        return True

    def _hear(self, child: Child) -> None:
        data, child.heard_at = os.read(child.listening, 1 << 16), time.monotonic()
        *lines, child.received = (child.received + data).split(b"\n")
        for line in lines:
            self._take(line)
        child.closed = not data

    def _take(self, line: bytes) -> None:
        with suppress(ValueError, TypeError, KeyError):  # a line that the child was killed in the middle of
            message = json.loads(line)
            errors = message["errors"] + self._earlier_errors[message["name"]]
            status = SinkStatus(**{**message, "state": SinkState(message["state"]), "errors": errors})
            self.statuses[status.name] = status
            self._show(status)

    def _show(self, status: SinkStatus) -> None:
        """One warning per sink, and one more if it is disabled."""
        if status.state is SinkState.DISABLED and f"{status.name} disabled" not in self._shown:
            self._shown |= {status.name, f"{status.name} disabled"}
            _logger.error("esper-telemetry: sink %s is DISABLED for this run: %s", status.name, status.last_error)
        elif status.errors and status.name not in self._shown:
            self._shown.add(status.name)
            message = "esper-telemetry: sink %s failed (%s); it is tried again, and the journal keeps everything (%s)"
            _logger.warning(message, status.name, status.last_error, self.run_dir / LOG_NAME)

    def _warn_of_refusal(self, error: OSError | MemoryError) -> None:
        """One warning, which stands for the deaths that follow from it too."""
        if "refused" not in self._shown:
            self._shown |= {"refused", "process", "given up"}
            cause = error if isinstance(error, OSError) else "no memory"
            message = (
                "esper-telemetry: cannot start the process that feeds the sinks (%s): it is tried again %d times; the journal keeps"
                " everything, and replay sends it later"
            )
            _logger.warning(message, cause, RESTARTS)

    def _warn_of_death(self, code: int, *, last: bool) -> None:
        if last and "given up" not in self._shown:
            message = (
                "esper-telemetry: the process that feeds the sinks died again (exit code %s): it is given up, see %s"
            )
        elif "process" not in self._shown:
            message = (
                "esper-telemetry: the process that feeds the sinks died (exit code %s) and is started again, see %s"
            )
        else:
            return
        self._shown.add("process")
        _logger.warning(message, code, self.run_dir / LOG_NAME)

    def _settled(self) -> bool:
        return all(status.state in SETTLED for status in self.statuses.values())

    def _bury(self, child: Child) -> None:
        code = child.process.wait()
        if code:  # clients of a process that did not end of itself would outlive it
            _kill_session(child.process.pid)
        os.close(child.listening)
        if child.process.stdin is not None:
            child.process.stdin.close()
        self._child = None
        self._judge(code)

    def _send_end(self) -> None:
        if self._child is not None and self._end is not None:
            _send(self._child.process, {"end": str(self._end)})

    def _kill(self) -> None:
        """The child leads a session of its own, so the clients it started die with it."""
        if self._child is not None and self._child.process.poll() is None:
            _kill_session(self._child.process.pid)


def _kill_session(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _send(process: subprocess.Popen[bytes], message: Mapping[str, object]) -> None:
    data = json.dumps(message).encode() + b"\n"
    with suppress(OSError):  # a child that is dead already is noticed where it is listened to
        while data and process.stdin is not None:
            data = data[process.stdin.write(data) :]


def _pickled(name: str, sink: Sink) -> str:
    try:
        return dumped(sink)
    except Exception as error:
        raise TypeError(f"sink {name} runs in another process and cannot be pickled: {error}") from error
