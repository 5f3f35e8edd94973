"""The trainer's side of the sink process: one child process for all sinks of a run that may not share the trainer's interpreter.

The protocol is JSON lines. The trainer sends the settings and the pickled sinks, later the status of the ended run (`end`), or that the
process continues alone (`leave`). The process sends the `SinkStatus` of each delivery when it has changed, or a sign of life.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from esper_telemetry.core.record import RunStatus
from esper_telemetry.core.redaction import known_secrets, redacted
from esper_telemetry.core.supervisor import ProcessSupervisor
from esper_telemetry.delivery.status import FRESH_PROCESS_STATES, SETTLED, SinkState, SinkStatus
from esper_telemetry.journal.file import JOURNAL_NAME
from esper_telemetry.journal.lock import Role, lock_for, remove_lock, write_holder
from esper_telemetry.sinks.sink_protocol import Sink

LOG_NAME: Final = "sinks.log"
ENTRY: Final = "from esper_telemetry.delivery.child import main; main()"
MAX_RESTARTS: Final = 3
"""Deaths in a row, without a record delivered in between, after which the process is not started again."""
MAX_CALL_SECONDS: Final = 120.0
"""Duration of one call of a sink after which the process ends, because a thread cannot be killed. MLflow waits 20 s for a locked database,
W&B a minute for a server."""
MAX_FRESH_PROCESSES: Final = 3
"""Fresh processes in a row that one sink may request, after a call that hangs or a dead client, before it is disabled."""
MAX_SILENT_SECONDS: Final = 120.0
"""Time without output after which the process is killed and started again, though it should write every five seconds."""

_logger = logging.getLogger("esper_telemetry")


class SinkProcess:
    """Starts the sink process, follows its reports, and restarts it.

    The output of backends goes to `sinks.log`. If the process dies, falls silent, or ends itself because a call hangs, it is started
    again, and its deliveries continue at their cursors. After `MAX_RESTARTS` further deaths without any delivery it is given up. A sink
    that hangs three times in a row is disabled, and the others continue.

    Args:
        run_dir: directory of the journal.
        sinks: sinks by name; each must be picklable.

    Attributes:
        statuses: last reported status of each delivery, by name.
        over: whether waiting is pointless: the process has finished and ended, or is given up.

    Raises:
        TypeError: a sink cannot be pickled; the message names it.
    """

    def __init__(self, run_dir: Path, sinks: Mapping[str, Sink]) -> None:
        self.run_dir = run_dir
        self.statuses = {name: SinkStatus(name) for name in sinks}
        self.over = False
        self._sinks: dict[str, str] = {}  # pickles as text, for the first line to the process
        for name, sink in sinks.items():
            try:
                self._sinks[name] = base64.b64encode(pickle.dumps(sink)).decode()
            except Exception as error:
                raise TypeError(f"sink {name} runs in another process and cannot be pickled: {error}") from error
        self._supervisor = ProcessSupervisor(ENTRY, run_dir / LOG_NAME, max_restarts=MAX_RESTARTS, max_silent_seconds=MAX_SILENT_SECONDS)
        self._received = b""
        self._end: RunStatus | None = None
        self._warned: set[str] = set()
        self._secrets: tuple[str, ...] = ()
        self._earlier_errors: dict[str, int] = {}
        self._fresh_processes = dict.fromkeys(sinks, 0)
        self._records = dict.fromkeys(sinks, 0)
        self._start()

    @property
    def pid(self) -> int | None:
        """ID of the running sink process; None if none runs."""
        self.poll()
        return self._supervisor.pid

    def poll(self, seconds: float = 0.0) -> None:
        """Receive reports of the process and react to them; wait at most `seconds` for an event."""
        if self.over:
            return
        if self._supervisor.pid is None:
            if self._supervisor.restart_due(seconds):
                self._start()
            return
        self.send_secrets()
        ended = self._supervisor.has_ended  # before the read, which then returns the end of its output
        data = self._supervisor.read(0.0 if ended else seconds)
        if data:
            *lines, self._received = (self._received + data).split(b"\n")
            for line in lines:
                self._take_report(line)
        elif ended:
            self._decide_restart(self._supervisor.reap())

    def finish(self, status: RunStatus) -> None:
        """Tell the process that the journal is complete; see `Delivery.finish`."""
        self._end = status
        self._send({"end": str(status)})

    def leave(self) -> None:
        """Let the process continue alone for `MAX_DETACHED_SECONDS`, as when its parent is killed."""
        self.over = True
        if self._supervisor.pid is None:
            remove_lock(self.run_dir, Role.SINKS)
        else:
            self._send({"leave": True})
            self._supervisor.detach()

    def _start(self) -> None:
        """Start the process with the sinks that are not disabled, unless nothing is left to do."""
        self.over = all(status.state in SETTLED for status in self.statuses.values())
        if self.over:
            return
        self._earlier_errors = {name: status.errors for name, status in self.statuses.items()}
        self._received = b""
        try:
            lock = lock_for(self.run_dir, Role.SINKS)  # the process holds it until it ends
            try:
                self._supervisor.start([lock])
                write_holder(lock, self._supervisor.pid or 0)
            finally:
                os.close(lock)
        except (OSError, MemoryError) as error:
            self._warn_of_refusal(error)
            self._decide_restart(-1)
            return
        disabled = {name for name, status in self.statuses.items() if status.state is SinkState.DISABLED}
        self._send(
            {
                "sinks": {name: text for name, text in self._sinks.items() if name not in disabled},
                "failures": self._fresh_processes,
                "call_seconds": MAX_CALL_SECONDS,
                "run_dir": str(self.run_dir),
                "parent": os.getpid(),
                "command": redacted(sys.argv),
            }
        )
        self._secrets = ()
        self.send_secrets()
        if self._end is not None:
            self._send({"end": str(self._end)})

    def send_secrets(self) -> None:
        """Send the secrets that this process has recognised so far: exceptions of clients may contain them."""
        if (secrets := known_secrets()) is not self._secrets:
            self._secrets = secrets
            self._send({"secrets": secrets})

    def _send(self, message: Mapping[str, object]) -> None:
        self._supervisor.send(json.dumps(message).encode() + b"\n")

    def _take_report(self, line: bytes) -> None:
        # A heartbeat comes without a status; a process may be killed in the middle of a line.
        with suppress(ValueError, TypeError, KeyError):
            message = json.loads(line)
            if "warning" in message:
                _logger.warning("esper-telemetry: %s", str(message["warning"]).removeprefix("esper-telemetry: "))
            errors = message["errors"] + self._earlier_errors[message["name"]]
            status = SinkStatus(**{**message, "state": SinkState(message["state"]), "errors": errors})
            self.statuses[status.name] = status
            self._warn_of_sink(status)

    def _decide_restart(self, code: int) -> None:
        """Count the death of the process; disable sinks that have asked for too many fresh processes in a row."""
        delivered = [name for name, status in self.statuses.items() if status.records > self._records[name]]
        for name in delivered:
            self._records[name] = self.statuses[name].records
            self._fresh_processes[name] = 0
        asking = [status for status in self.statuses.values() if status.state in FRESH_PROCESS_STATES]
        for status in asking:
            self._fresh_processes[status.name] += 1
        disabled = [status for status in asking if self._fresh_processes[status.name] >= MAX_FRESH_PROCESSES]
        for status in disabled:
            hung = f"it hung {MAX_FRESH_PROCESSES} times in a row for {MAX_CALL_SECONDS:g} s"
            failed = f"{status.last_error} ({MAX_FRESH_PROCESSES} processes in a row)"
            error = hung if status.state is SinkState.HUNG else failed
            self.statuses[status.name] = replace(status, state=SinkState.DISABLED, last_error=error)
            self._warn_of_sink(self.statuses[status.name])
        self._supervisor.schedule_restart(progressed=bool(delivered or disabled))
        if any(status.state not in SETTLED for status in self.statuses.values()):
            self._warn_of_death(code)
            self.over = self._supervisor.given_up
        else:
            self.over = True

    def _warn_of_sink(self, status: SinkStatus) -> None:
        """Log one warning per sink, and another if it is disabled."""
        if status.state is SinkState.DISABLED and f"{status.name} disabled" not in self._warned:
            self._warned |= {status.name, f"{status.name} disabled"}
            _logger.error("esper-telemetry: sink %s is DISABLED for this run: %s", status.name, status.last_error)
        elif status.errors and status.name not in self._warned:
            self._warned.add(status.name)
            has_journal = (self.run_dir / JOURNAL_NAME).exists()
            kept = "the journal keeps the records" if has_journal else "the run directory was deleted"
            message = "esper-telemetry: sink %s failed (%s); it is tried again, and %s (%s)"
            _logger.warning(message, status.name, status.last_error, kept, self._supervisor.log)
        elif status.last_error and not status.errors and f"{status.name} slow" not in self._warned:
            self._warned.add(f"{status.name} slow")
            message = "esper-telemetry: sink %s is slow (%s); training does not wait, and the journal keeps the records"
            _logger.warning(message, status.name, status.last_error)

    def _warn_of_refusal(self, error: OSError | MemoryError) -> None:
        """Log one warning, which also covers later deaths with the same cause."""
        if "refused" not in self._warned:
            self._warned |= {"refused", "died", "given up"}
            cause = error if isinstance(error, OSError) else "no memory"
            message = (
                "esper-telemetry: cannot start the process that feeds the sinks (%s): it is tried again %d times; the journal keeps"
                " the records, and replay sends them later"
            )
            _logger.warning(message, cause, MAX_RESTARTS)

    def _warn_of_death(self, code: int) -> None:
        if self._supervisor.given_up and "given up" not in self._warned:
            event, next_step = "died again", ": it is given up"
        elif "died" not in self._warned:
            event, next_step = "died", " and is started again"
        else:
            return
        self._warned.add("died")
        message = "esper-telemetry: the process that feeds the sinks %s (exit code %s)%s, see %s"
        _logger.warning(message, event, code, next_step, self._supervisor.log)
