"""The parent's side of the process that feeds the sinks: it is started, listened to, restarted and ended from here."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from esper_telemetry.journal import Role, lock_for, remove_lock
from esper_telemetry.record import RunStatus
from esper_telemetry.redaction import redacted
from esper_telemetry.relay.child import dumped
from esper_telemetry.relay.status import SinkState, SinkStatus
from esper_telemetry.sinks.protocol import Sink

LOG_NAME: Final = "relay.log"
ENTRY: Final = "from esper_telemetry.relay.child import main; main()"
RESTARTS: Final = 3
"""Deaths in a row, without a record delivered in between, after which the process is not started again."""
CALL_SECONDS: Final = 120.0
"""How long one call of a sink may take: MLflow waits 20 s for a locked database, W&B a minute for a server."""
HANGS: Final = 3
"""Calls in a row, of one sink, that may hang so long before it is given up."""
SILENT_SECONDS: Final = 120.0
"""A process that says nothing for so long, though it should every five seconds, is killed and started again."""
LISTEN_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 30.0
_SETTLED = frozenset({SinkState.CLOSED, SinkState.DISABLED})
_logger = logging.getLogger("esper_telemetry")


class SinkProcess:
    """One child process for all sinks of a run that may not share the trainer's interpreter.

    It is no child of `multiprocessing`, which would run a script without a main guard again; it gets the sinks pickled,
    and the parent's import path. What backends print goes to `relay.log`. A child that dies, falls silent, or gives up
    on a call that hangs is started again, and goes on where its cursors stand: until it has died three times more
    without delivering anything. A sink that hangs three times in a row is given up, and the others go on. One thread
    does all this, asleep while nothing happens.

    Args:
        run_dir: where the journal is.
        sinks: by name; each must be picklable. Raises TypeError naming one that is not.
    """

    def __init__(self, run_dir: Path, sinks: Mapping[str, Sink]) -> None:
        self.run_dir = run_dir
        self.statuses = {name: SinkStatus(name) for name in sinks}
        self._sinks = {name: _pickled(name, sink) for name, sink in sinks.items()}
        self._import_path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: RunStatus | None = None
        self._killed = threading.Event()
        self._shown: set[str] = set()
        self._earlier_errors: dict[str, int] = {}
        self._hangs = dict.fromkeys(sinks, 0)
        self._records = dict.fromkeys(sinks, 0)
        self._thread = threading.Thread(target=self._supervise, name="esper-relay", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the child that runs now."""
        with self._lock:
            return None if self._process is None else self._process.pid

    def finish(self, status: RunStatus) -> None:
        """Tells the child that no more lines will come; see `Delivery.finish`."""
        with self._lock:
            self._end = status
            self._send_end()

    def join(self, seconds: float) -> None:
        """Waits for the child to have done its work, and at the end of the time kills it and whatever it started."""
        self._thread.join(seconds)
        self._killed.set()
        with self._lock:
            self._kill()
        self._thread.join(1.0)
        remove_lock(self.run_dir, Role.RELAY)

    def _supervise(self) -> None:
        deaths = 0
        while deaths <= RESTARTS:
            self._killed.wait(min(LONGEST_PAUSE_SECONDS, 0.5 * deaths))
            if self._killed.is_set() or self._settled():
                break
            code = self._run_once()
            deaths = 1 if self._got_on() else deaths + 1
            self._judge_hanging()
            if not self._settled() and not self._killed.is_set():
                self._warn_of_death(code, last=deaths > RESTARTS)

    def _got_on(self) -> bool:
        """Whether some sink has taken records since the last time; its hangs are forgotten."""
        got_on = [name for name, status in self.statuses.items() if status.records > self._records[name]]
        for name in got_on:
            self._records[name] = self.statuses[name].records
            self._hangs[name] = 0
        return bool(got_on)

    def _judge_hanging(self) -> None:
        """Counts calls that hung, and gives up a sink that does nothing else."""
        for name, status in self.statuses.items():
            if status.state is SinkState.HUNG:
                self._hangs[name] += 1
                if self._hangs[name] >= HANGS:
                    error = f"it hung {HANGS} times in a row for {CALL_SECONDS:g} s"
                    self.statuses[name] = replace(status, state=SinkState.DISABLED, last_error=error)
                    self._show(self.statuses[name])

    def _run_once(self) -> int:
        self._earlier_errors = {name: status.errors for name, status in self.statuses.items()}
        listening, telling = os.pipe()
        try:
            process = self._start(telling)
        except OSError as error:
            _logger.warning("esper-telemetry: cannot start the process that feeds the sinks: %s", error)
            os.close(listening)
            return -1
        finally:
            os.close(telling)
        self._listen(listening, process)
        os.close(listening)
        return self._reap(process)

    def _start(self, telling: int) -> subprocess.Popen[bytes]:
        process = self._spawned(telling)
        _send(
            process,
            {**self._settings(), "run_dir": str(self.run_dir), "parent": os.getpid(), "command": redacted(sys.argv)},
        )
        with self._lock:
            self._process = process
            if self._killed.is_set():
                self._kill()
            self._send_end()
        return process

    def _settings(self) -> Mapping[str, object]:
        """The sinks that are not given up, and how often each of them has hung."""
        given_up = {name for name, status in self.statuses.items() if status.state is SinkState.DISABLED}
        sinks = {name: text for name, text in self._sinks.items() if name not in given_up}
        return {"sinks": sinks, "failures": self._hangs, "call_seconds": CALL_SECONDS}

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

    def _listen(self, fd: int, process: subprocess.Popen[bytes]) -> None:
        """Until the child closes its end, or is dead while a forked process holds that open, or falls silent."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        received, heard_at = b"", time.monotonic()
        while True:
            if poll.poll(LISTEN_SECONDS * 1000):
                data, heard_at = os.read(fd, 1 << 16), time.monotonic()
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    self._take(line)
                if not data:
                    return
            elif process.poll() is not None:
                return
            elif time.monotonic() - heard_at > SILENT_SECONDS:
                with self._lock:
                    self._kill()
                heard_at = time.monotonic()

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

    def _warn_of_death(self, code: int, *, last: bool) -> None:
        if last:
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
        return all(status.state in _SETTLED for status in self.statuses.values())

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        code = process.wait()
        if code:  # clients of a process that did not end of itself would outlive it
            _kill_session(process.pid)
        with self._lock:
            self._process = None
            if process.stdin is not None:
                process.stdin.close()
        return code

    def _send_end(self) -> None:
        if self._process is not None and self._end is not None:
            _send(self._process, {"end": str(self._end)})

    def _kill(self) -> None:
        """The child leads a session of its own, so the clients it started die with it."""
        if self._process is not None and self._process.poll() is None:
            _kill_session(self._process.pid)


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
