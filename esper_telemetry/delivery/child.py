"""The process that feeds the sinks, started by `SinkProcess` with the number of a pipe to report on.

From its parent it gets one line of settings on standard input, later perhaps one that says how the run ended, and one that
leaves it to itself, as the end of the input does when the parent is gone. To its parent it sends the status of each
delivery, as JSON lines. It outlives its parent: it writes the end line that a killed trainer could not, delivers what is
left for minutes at most, and exits.
"""

from __future__ import annotations

import base64
import faulthandler
import json
import logging
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from esper_telemetry.core.processes import collect_rarely, step_back
from esper_telemetry.core.record import Record, RunInfo, RunStatus
from esper_telemetry.core.redaction import masked
from esper_telemetry.delivery.cursors import Cursors, records_after
from esper_telemetry.delivery.delivery import Delivery
from esper_telemetry.delivery.sender import Pauses
from esper_telemetry.delivery.status import (
    SinkReport,
    SinkState,
    SinkStatus,
    note_reports,
    note_statuses,
    replay_command,
    sink_report,
)
from esper_telemetry.journal.file import JournalReader, end_if_open, journal_path
from esper_telemetry.journal.lock import Role, await_release
from esper_telemetry.sinks.protocol import Sink

TICK_SECONDS: Final = 0.2
ORPHAN_SECONDS: Final = 300.0
"""How long an orphan tries to deliver what is left before it leaves the rest to `replay`."""
WRITER_SECONDS: Final = 30.0
"""How long an orphan waits for a process that still appends to the journal."""
EXIT_SECONDS: Final = 5.0
NICENESS: Final = 19
"""The trainer goes first where cores are scarce: backends can catch up later."""
FRESH_PROCESS_EXIT: Final = 75
"""Exit code that asks the parent for a fresh process; EX_TEMPFAIL of sysexits.h."""
HEARTBEAT_SECONDS: Final = 5.0
STATUS_SECONDS: Final = 5.0
"""How often `status.json` is written at most."""


def main() -> None:
    """Delivers until every sink is closed or disabled."""
    _leave_signals_to_the_parent()
    step_back(NICENESS)
    collect_rarely()
    log = logging.StreamHandler()
    log.setFormatter(_WithoutSecrets("%(asctime)s %(message)s"))
    logging.basicConfig(handlers=[log])
    logging.getLogger("esper_telemetry").setLevel(logging.DEBUG)
    status_fd = int(sys.argv[1])
    parent = Parent(_private_stdin(), status_fd)
    settings = parent.settings()
    sys.argv = settings["command"]  # backends note which program made the run
    run_dir = Path(settings["run_dir"])
    failures = settings["failures"]
    deliveries = [_delivery(run_dir, name, text, failures[name]) for name, text in settings["sinks"].items()]
    sys.exit(serve(parent, deliveries, run_dir, settings["call_seconds"]))


class _WithoutSecrets(logging.Formatter):
    """What clients raise holds addresses, and these may hold passwords."""

    def format(self, record: logging.LogRecord) -> str:
        """The message and the traceback."""
        return masked(super().format(record))


def serve(parent: Parent, deliveries: Sequence[Delivery], run_dir: Path, call_seconds: float) -> int:
    """Runs deliveries to their end while listening to the parent; the exit code.

    A call that has not come back after `call_seconds` ends the process, so that the other sinks and a fresh client can go on.
    """
    threads = _started(parent, deliveries)
    orphaned_at: float | None = None
    ended: RunStatus | None = None
    status_file, pauses = _StatusFile(run_dir), Pauses()
    while not all(delivery.over for delivery in deliveries):
        status = parent.listen(TICK_SECONDS)
        if parent.gone and orphaned_at is None:
            orphaned_at, status = time.monotonic(), _end_run(run_dir, status or ended or RunStatus.KILLED)
            faulthandler.dump_traceback_later(
                ORPHAN_SECONDS + 2 * EXIT_SECONDS, exit=True
            )  # a client may stop all threads
        if status is not None:
            ended = status
            _finish(deliveries, ended)
        _find_hanging(deliveries, call_seconds, pauses.last())
        parent.report([delivery.status for delivery in deliveries])
        status_file.note(deliveries, orphaned=parent.gone)
        if _needs_fresh_process(deliveries) or (orphaned_at and time.monotonic() - orphaned_at > ORPHAN_SECONDS):
            break
    return _leave(parent, deliveries, threads, run_dir)


def _started(parent: Parent, deliveries: Sequence[Delivery]) -> list[threading.Thread]:
    """A thread for each delivery, once all clients are imported, one after the other; none where a fresh process must try again."""
    for delivery in deliveries:
        parent.report([each.status for each in deliveries])
        delivery.import_client()
    if _needs_fresh_process(deliveries):
        return []
    threads = [threading.Thread(target=delivery.run, name=delivery.name, daemon=True) for delivery in deliveries]
    for thread in threads:
        thread.start()
    return threads


def _find_hanging(deliveries: Sequence[Delivery], call_seconds: float, paused: float) -> None:
    for delivery in deliveries:
        delivery.paused(paused)
        if delivery.call_seconds > call_seconds:
            delivery.hung()


class _StatusFile:
    """Notes how deliveries stand when they fail or recover, and for an orphan how far they are."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._noted: object = None
        self._noted_at = 0.0
        self._orphaned = False

    def note(self, deliveries: Sequence[Delivery], *, orphaned: bool) -> None:
        """Writes what has changed, at most every few seconds."""
        statuses = [delivery.status for delivery in deliveries]
        taken = sum(status.records for status in statuses) if orphaned else None
        news = (taken, [(status.state, status.errors, status.quarantined) for status in statuses])
        now = time.monotonic()
        due = now - self._noted_at >= STATUS_SECONDS or (orphaned and not self._orphaned)
        if news != self._noted and due:
            self._noted, self._noted_at, self._orphaned = news, now, orphaned
            if orphaned:
                note_reports(self._run_dir, _reports(deliveries, self._run_dir), under_way=True)
            else:
                note_statuses(self._run_dir, statuses)


def _reports(deliveries: Sequence[Delivery], run_dir: Path) -> list[SinkReport]:
    return [
        sink_report(
            delivery.status,
            pending=records_after(run_dir, delivery.cursor),
            command=replay_command(run_dir, delivery.sink),
        )
        for delivery in deliveries
    ]


def _finish(deliveries: Sequence[Delivery], status: RunStatus) -> None:
    for delivery in deliveries:
        delivery.finish(status)


def _leave(parent: Parent, deliveries: Sequence[Delivery], threads: Sequence[threading.Thread], run_dir: Path) -> int:
    """Ends what is under way, so that the cursors are saved, and reports for the last time; the exit code."""
    for delivery in deliveries:
        delivery.stop()
    for thread in threads:
        thread.join(EXIT_SECONDS / len(threads))
    parent.report([delivery.status for delivery in deliveries])
    code = FRESH_PROCESS_EXIT if _needs_fresh_process(deliveries) else 0
    if not code or parent.gone:  # else the next process goes on
        note_reports(run_dir, _reports(deliveries, run_dir), under_way=False)
    _exit_within(EXIT_SECONDS, code)
    return code


def _exit_within(seconds: float, code: int) -> None:
    """Clients clean up when the interpreter exits; one that hangs there is cut off."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def _needs_fresh_process(deliveries: Sequence[Delivery]) -> bool:
    return any(delivery.status.state in (SinkState.DEAD_CLIENT, SinkState.HUNG) for delivery in deliveries)


def _end_run(run_dir: Path, status: RunStatus) -> RunStatus:
    """Ends the run of a trainer that is gone, after the last record that is still being written for it; the status."""
    await_release(run_dir, Role.WRITER, WRITER_SECONDS)
    with suppress(OSError):  # a full disk: the sinks are closed without the line
        end_if_open(run_dir, status)
    return status


def _leave_signals_to_the_parent() -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole job; the parent decides when the run ends.

    SIGTERM gets a function, not SIG_IGN, which clients started from here would inherit.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)


def _private_stdin() -> int:
    """Standard input under another number: a client that prompts must read nothing."""
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return lifeline


def _delivery(run_dir: Path, name: str, pickled: str, failures: int) -> Delivery:
    reader, cursors = JournalReader(journal_path(run_dir)), Cursors(run_dir)
    return Delivery(_loaded(pickled), reader, name=name, cursors=cursors, in_child=True, failures=failures)


def _loaded(pickled: str) -> Sink:
    try:
        sink: Sink = pickle.loads(base64.b64decode(pickled))
    except (Exception, SystemExit) as error:  # whatever importing the sink's module raises: the other sinks go on
        return UnloadableSink(error)
    return sink


def dumped(sink: Sink) -> str:
    """A sink as text that this process can load."""
    return base64.b64encode(pickle.dumps(sink)).decode()


class UnloadableSink:
    """Stands for a sink whose module cannot be imported here."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def import_client(self) -> None:
        """Raises what importing the module raised."""
        raise self.error

    def open(self, run: RunInfo) -> None:
        """Is not reached."""

    def write(self, records: Sequence[Record]) -> None:
        """Is not reached."""

    def close(self, status: RunStatus) -> None:
        """Is not reached."""


class Parent:
    """The parent process as seen from here.

    Attributes:
        gone: whether it has died, or leaves this process to itself.
    """

    def __init__(self, lifeline: int, status_fd: int) -> None:
        self.gone = False
        self._parent_pid = os.getppid()
        self._lifeline = lifeline
        self._received = b""
        self._status_fd = status_fd
        self._told: dict[str, SinkStatus] = {}
        self._told_at = time.monotonic()
        os.set_inheritable(status_fd, False)
        os.set_blocking(status_fd, False)

    def settings(self) -> Mapping[str, Any]:
        """Waits for the first line; exits where the parent is gone before it came."""
        while (line := self._line()) is None:
            self._receive(TICK_SECONDS)
            if self.gone:
                sys.exit(0)
        settings: Mapping[str, Any] = json.loads(line)
        self._parent_pid = settings["parent"]
        return settings

    def listen(self, seconds: float) -> RunStatus | None:
        """How the run ended, if the parent says so within that time."""
        if self.gone:
            time.sleep(seconds)
            return None
        self._receive(seconds)
        line = self._line()
        if line is None:
            return None
        message = json.loads(line)
        self.gone = self.gone or "leave" in message
        return RunStatus(message["end"]) if "end" in message else None

    def report(self, statuses: Sequence[SinkStatus]) -> None:
        """Sends what has changed, or that all is well; drops it where the parent does not read, as the next report repeats it."""
        for status in statuses:
            if self._told.get(status.name) != status and self._tell(asdict(status)):
                self._told[status.name] = status
        if time.monotonic() - self._told_at >= HEARTBEAT_SECONDS:
            self._tell({"alive": True})

    def _tell(self, message: Mapping[str, Any]) -> bool:
        with suppress(OSError):
            os.write(self._status_fd, json.dumps(message).encode() + b"\n")
            self._told_at = time.monotonic()
            return True
        return False

    def _receive(self, seconds: float) -> None:
        """An orphan may wait in vain for the end of its input, as forked workers hold it open too."""
        poll = select.poll()
        poll.register(self._lifeline, select.POLLIN)
        if poll.poll(seconds * 1000):
            data = os.read(self._lifeline, 1 << 16)
            self._received += data
            self.gone = not data
        self.gone = self.gone or os.getppid() != self._parent_pid

    def _line(self) -> bytes | None:
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        return line
