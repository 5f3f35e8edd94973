"""The sink process: one thread per delivery, and the main thread, which listens to the trainer.

`SinkProcess` starts it. It outlives its trainer: it writes the end line if the trainer was killed, delivers for up to
`MAX_DETACHED_SECONDS`, and exits. It does the same after a normal end, so a normal end is as safe as a killed trainer.
"""

from __future__ import annotations

import base64
import faulthandler
import json
import logging
import os
import pickle
import select
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from esper_telemetry.core.record import Record, RunInfo, RunStatus
from esper_telemetry.core.redaction import remember
from esper_telemetry.core.supervisor import READ_BYTES, PauseDetector, WarningCollector, become_helper_process
from esper_telemetry.delivery.delivery import Delivery
from esper_telemetry.delivery.status import (
    FRESH_PROCESS_STATES,
    Cursors,
    SinkReport,
    SinkStatus,
    count_records_after,
    replay_command,
    sink_report,
    write_reports,
    write_statuses,
)
from esper_telemetry.journal.file import JournalReader, end_if_open, journal_path
from esper_telemetry.journal.lock import Role, await_release
from esper_telemetry.sinks.sink_protocol import Sink

TICK_SECONDS: Final = 0.2
MAX_DETACHED_SECONDS: Final = 300.0
"""How long a process without a trainer delivers before it leaves the rest to `replay`."""
MAX_WRITER_SECONDS: Final = 30.0
"""How long it waits for the worker of a killed trainer, which may still append to the journal."""
MAX_EXIT_SECONDS: Final = 5.0
NICENESS: Final = 19
"""Gives the trainer priority if cores are scarce: backends can catch up later."""
FRESH_PROCESS_EXIT_CODE: Final = 75
"""Asks the trainer for a fresh process; EX_TEMPFAIL in sysexits.h."""
HEARTBEAT_SECONDS: Final = 5.0
MAX_WARNING_CHARACTERS: Final = 1000
SECRETS_HEAD: Final = b'{"secrets":'
"""Start of a line from the trainer that is read before its turn: an exception of a sink may contain these secrets at any time."""
STATUS_FILE_SECONDS: Final = 5.0
"""Minimum time between two writes of `status.json`."""


def main() -> None:
    """Deliver until every sink is closed or disabled."""
    become_helper_process(NICENESS)
    logging.basicConfig(format="%(asctime)s %(message)s")
    logger, warnings = logging.getLogger("esper_telemetry"), WarningCollector()
    logger.setLevel(logging.DEBUG)
    logger.addHandler(warnings)
    messages = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a client that prompts gets an empty input
    os.close(nothing)
    trainer = TrainerLink(messages, int(sys.argv[1]), warnings)
    settings = trainer.settings()
    sys.argv = settings["command"]  # backends record the program that made the run
    run_dir = Path(settings["run_dir"])
    deliveries = [
        Delivery(
            _unpickle_sink(text),
            JournalReader(journal_path(run_dir)),
            name=name,
            cursors=Cursors(run_dir),
            in_child=True,
            failures=settings["failures"][name],
            until_finish=True,
        )
        for name, text in settings["sinks"].items()
    ]
    sys.exit(serve(trainer, deliveries, run_dir, settings["call_seconds"]))


def serve(trainer: TrainerLink, deliveries: Sequence[Delivery], run_dir: Path, call_seconds: float) -> int:
    """Run deliveries to their end while listening to the trainer; return the exit code.

    A call that has not returned after `call_seconds` ends the process, because a thread cannot be killed. The other sinks save their
    cursors and continue with a fresh client in a fresh process.
    """
    threads = _start_threads(trainer, deliveries)
    detached_at: float | None = None
    end: RunStatus | None = None
    status_file, pauses = _StatusFile(run_dir), PauseDetector()
    while not all(delivery.over for delivery in deliveries):
        status = trainer.listen(TICK_SECONDS)
        if trainer.gone and detached_at is None:
            detached_at, status = time.monotonic(), status or end or RunStatus.KILLED
            await_release(run_dir, Role.WRITER, MAX_WRITER_SECONDS)  # the trainer's worker may still write a record
            with suppress(OSError):  # with a full disk, the sinks are closed without the line
                end_if_open(run_dir, status)
            # A client that holds the interpreter lock stops all threads, including this one.
            faulthandler.dump_traceback_later(MAX_DETACHED_SECONDS + 2 * MAX_EXIT_SECONDS, exit=True)
        if status is not None:
            end = status
            for delivery in deliveries:
                delivery.finish(status)
        pause = pauses.seconds()
        for delivery in deliveries:
            delivery.calls.exclude_pause(pause)
            if delivery.calls.seconds > call_seconds:
                delivery.give_up_call()
        trainer.report([delivery.status for delivery in deliveries])
        status_file.update(deliveries, detached=trainer.gone)
        if _needs_fresh_process(deliveries) or (detached_at and time.monotonic() - detached_at > MAX_DETACHED_SECONDS):
            break
    return _end(trainer, deliveries, threads, run_dir)


def _start_threads(trainer: TrainerLink, deliveries: Sequence[Delivery]) -> list[threading.Thread]:
    """Import all clients, one after the other, then start a thread per delivery; start none if a fresh process must try again.

    Concurrent imports have left NumPy and MLflow half initialised, which also breaks every later attempt in that process.
    """
    for delivery in deliveries:
        trainer.report([each.status for each in deliveries])
        delivery.import_client()
    if _needs_fresh_process(deliveries):
        return []
    trainer.receive(0.0)  # the secrets that the trainer has sent so far
    threads = [threading.Thread(target=delivery.run, name=delivery.name, daemon=True) for delivery in deliveries]
    for thread in threads:
        thread.start()
    return threads


def _end(trainer: TrainerLink, deliveries: Sequence[Delivery], threads: Sequence[threading.Thread], run_dir: Path) -> int:
    """Stop the deliveries, which saves their cursors, and report a last time; return the exit code."""
    for delivery in deliveries:
        delivery.stop()
    for thread in threads:
        thread.join(MAX_EXIT_SECONDS / len(threads))
    trainer.report([delivery.status for delivery in deliveries])
    code = FRESH_PROCESS_EXIT_CODE if _needs_fresh_process(deliveries) else 0
    if not code or trainer.gone:  # else the next process continues
        write_reports(run_dir, _reports(deliveries, run_dir), under_way=False)
    timer = threading.Timer(MAX_EXIT_SECONDS, os._exit, [code])  # a client may hang while the interpreter exits
    timer.daemon = True
    timer.start()
    return code


def _needs_fresh_process(deliveries: Sequence[Delivery]) -> bool:
    return any(delivery.status.state in FRESH_PROCESS_STATES for delivery in deliveries)


def _reports(deliveries: Sequence[Delivery], run_dir: Path) -> list[SinkReport]:
    return [
        sink_report(delivery.status, pending=count_records_after(run_dir, delivery.cursor), command=replay_command(run_dir, delivery.sink))
        for delivery in deliveries
    ]


class _StatusFile:
    """Writes `status.json` when a delivery fails or recovers, and, without a trainer, also when it makes progress."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._written: object = None
        self._written_at = 0.0
        self._detached = False

    def update(self, deliveries: Sequence[Delivery], *, detached: bool) -> None:
        """Write the changes, at most every `STATUS_FILE_SECONDS`."""
        statuses = [delivery.status for delivery in deliveries]
        records = sum(status.records for status in statuses) if detached else None
        content = (records, [(status.state, status.errors, status.quarantined) for status in statuses])
        now = time.monotonic()
        due = now - self._written_at >= STATUS_FILE_SECONDS or (detached and not self._detached)
        if content != self._written and due:
            self._written, self._written_at, self._detached = content, now, detached
            if detached:
                write_reports(self._run_dir, _reports(deliveries, self._run_dir), under_way=True)
            else:
                write_statuses(self._run_dir, statuses)


class TrainerLink:
    """The connection to the trainer: JSON lines in both directions.

    Args:
        messages: descriptor to read the trainer's lines from.
        reports: descriptor to write reports to.
        warnings: messages for the trainer to log.

    Attributes:
        gone: whether the trainer has died or left this process to continue alone.
    """

    def __init__(self, messages: int, reports: int, warnings: WarningCollector) -> None:
        self.gone = False
        self._warnings = warnings
        self._parent_pid = os.getppid()
        self._messages = messages
        self._received = b""
        self._reports = reports
        self._reported: dict[str, SinkStatus] = {}
        self._reported_at = time.monotonic()
        os.set_inheritable(reports, False)
        os.set_blocking(reports, False)

    def settings(self) -> Mapping[str, Any]:
        """Wait for the first line; exit if the trainer is gone before it arrives."""
        while (line := self._next_line()) is None:
            self.receive(TICK_SECONDS)
            if self.gone:
                sys.exit(0)
        settings: Mapping[str, Any] = json.loads(line)
        self._parent_pid = settings["parent"]
        return settings

    def listen(self, seconds: float) -> RunStatus | None:
        """Return how the run ended, if the trainer sends that within the time."""
        if self.gone and b"\n" not in self._received:
            time.sleep(seconds)
            return None
        if not self.gone:
            self.receive(seconds)
        line = self._next_line()
        if line is None:
            return None
        message = json.loads(line)
        self.gone = self.gone or "leave" in message
        return RunStatus(message["end"]) if "end" in message else None

    def report(self, statuses: Sequence[SinkStatus]) -> None:
        """Send what has changed, or a sign of life. If the trainer does not read, drop the report: the next one repeats it."""
        for status in statuses:
            if self._reported.get(status.name) != status and self._send(asdict(status)):
                self._reported[status.name] = status
        for warning in self._warnings.take():
            self._send({"warning": warning[:MAX_WARNING_CHARACTERS]})
        if time.monotonic() - self._reported_at >= HEARTBEAT_SECONDS:
            self._send({"alive": True})

    def _send(self, message: Mapping[str, Any]) -> bool:
        with suppress(OSError):
            os.write(self._reports, json.dumps(message).encode() + b"\n")
            self._reported_at = time.monotonic()
            return True
        return False

    def receive(self, seconds: float) -> None:
        """Read incoming data for that time, remember secrets in it, and find out whether the trainer is gone.

        The input may never end, because forked processes also hold it open. So check also whether this process has another parent.
        """
        poll = select.poll()
        poll.register(self._messages, select.POLLIN)
        if poll.poll(seconds * 1000):
            data = os.read(self._messages, READ_BYTES)
            *lines, rest = (self._received + data).split(b"\n")
            for line in lines:
                if line.startswith(SECRETS_HEAD):
                    remember(json.loads(line)["secrets"])
            self._received = b"\n".join([*(line for line in lines if not line.startswith(SECRETS_HEAD)), rest])
            self.gone = not data
        self.gone = self.gone or os.getppid() != self._parent_pid

    def _next_line(self) -> bytes | None:
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        return line


def _unpickle_sink(text: str) -> Sink:
    try:
        sink: Sink = pickle.loads(base64.b64decode(text))
    except (Exception, SystemExit) as error:  # importing the sink's module failed: the other sinks continue
        return UnloadableSink(error)
    return sink


class UnloadableSink:
    """Replaces a sink whose module cannot be imported here. `import_client` raises the error, so the sink is never opened."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def import_client(self) -> None:
        """Raise the error of the import."""
        raise self.error

    def open(self, run: RunInfo) -> None:
        """Do nothing: never called."""

    def write(self, records: Sequence[Record]) -> None:
        """Do nothing: never called."""

    def close(self, status: RunStatus) -> None:
        """Do nothing: never called."""
