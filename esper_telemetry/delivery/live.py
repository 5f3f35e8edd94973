"""The deliveries of a live run.

The wait for deliveries at the end of a run: how long it goes on, and the line that says for what.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Final

from esper_telemetry.core.record import RunStatus, SinkLag
from esper_telemetry.delivery.cursors import Cursors
from esper_telemetry.delivery.delivery import Delivery, SinkReader
from esper_telemetry.delivery.process import SinkProcess
from esper_telemetry.delivery.status import (
    FINAL,
    SETTLED,
    CloseReport,
    RelayStats,
    SinkReport,
    SinkState,
    SinkStatus,
    by_name,
    note_reports,
    note_uris,
    one_line,
    replay_command,
    sink_report,
    sink_uri,
)
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.memory import MemoryJournal
from esper_telemetry.sinks.protocol import FunctionSink, Sink

CLOSE_SECONDS: Final = 60.0
"""How long the end of a run waits at most."""
STALLED_SECONDS: Final = 15.0
"""How long it waits for deliveries that make no progress."""
QUIET_SECONDS: Final = 4.0
"""A wait that takes no longer says nothing."""
ERASE_LINE: Final = "\r\x1b[2K"


class Wait:
    """One wait, which goes on while deliveries make progress: a sink takes records, or opens and has not failed yet.

    A terminal shows what is waited for and for how long, in a line that goes away; a log gets one line.
    """

    def __init__(self, seconds: float) -> None:
        self._begun = self._moved = time.monotonic()
        self._until = self._begun + seconds
        self._seen: object = None
        self._shown = -1

    def goes_on(self, statuses: Iterable[SinkStatus]) -> bool:
        """Notes how deliveries stand, and says whether to wait on."""
        now = time.monotonic()
        waited_for = [status for status in statuses if status.state not in FINAL]
        seen = [(status.name, status.state, status.records, status.quarantined) for status in waited_for]
        if seen != self._seen or any(_opens(status) for status in waited_for):
            self._seen, self._moved = seen, now
        self._show([status.name for status in waited_for], int(now - self._begun))
        return now < min(self._until, self._moved + STALLED_SECONDS)

    def end(self) -> None:
        """Clears the line."""
        if self._shown >= 0 and _on_terminal():
            _write(ERASE_LINE)

    def _show(self, names: list[str], seconds: int) -> None:
        if not names or seconds < QUIET_SECONDS or seconds == self._shown:
            return
        line = f"delivering to {', '.join(names)} ({seconds} s)... Ctrl-C leaves it to a background process"
        if _on_terminal():
            _write(ERASE_LINE + line)
        elif self._shown < 0:
            _write(f"esper-telemetry: {line}\n")
        self._shown = seconds


def _opens(status: SinkStatus) -> bool:
    return status.state is SinkState.OPENING and not status.errors


def _on_terminal() -> bool:
    with suppress(AttributeError, ValueError):  # a process without stderr, or one that has closed it
        return sys.stderr.isatty()
    return False


def _write(text: str) -> None:
    with suppress(AttributeError, ValueError, OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


LOCAL_BATCH_RECORDS: Final = 50
"""Records that a thread of the training process reads at once: it holds the interpreter lock while it parses them."""

LOOK_SECONDS: Final = 0.1
"""How often the training thread looks at its deliveries."""

_logger = logging.getLogger("esper_telemetry")


class Relay:
    """Feeds sinks from a journal while it is written, without a call from whoever writes it.

    A sink with `in_process = False` runs in the child process, unless there is no run directory, or its class stands in
    the script itself, which the child cannot import; every other sink runs in a daemon thread. Start it before or after
    the journal's first line. In a forked process it does nothing.

    Args:
        journal: what is delivered.
        sinks: where to.
    """

    def __init__(self, journal: Journal | MemoryJournal, sinks: Iterable[Sink]) -> None:
        self._pid = os.getpid()
        self._journal = journal
        self._sinks = by_name(list(sinks))
        self._report: CloseReport | None = None
        self._begun = time.time()
        self._stats: RelayStats | None = None
        self._look_at = 0.0
        remote = {name: sink for name, sink in self._sinks.items() if self._goes_to_child(sink)}
        self._remote = frozenset(remote)
        self._process = _started(journal, remote)
        if journal.run_dir is not None and self._sinks:
            note_uris(journal.run_dir, {name: sink_uri(sink) for name, sink in self._sinks.items()})
        self._deliveries: list[Delivery] = []
        self._threads: list[threading.Thread] = []
        self._refused: dict[str, SinkStatus] = {}
        prepared = [pair for name in self._sinks if name not in remote if (pair := self._prepared(name))]
        for delivery, _ in prepared:  # one after the other, before any thread starts
            delivery.import_client()
        for delivery, reader in prepared:
            self._start(delivery, reader)

    @property
    def child_pid(self) -> int | None:
        """The process that feeds the sinks, if one runs."""
        return None if self._process is None else self._process.pid

    def stats(self) -> RelayStats:
        """How all deliveries are going, and sees to the child process; looks anew every `LOOK_SECONDS`, and never waits."""
        now = time.monotonic()
        if self._stats is None or now >= self._look_at:
            self._stats, self._look_at = self._looked(), now + LOOK_SECONDS
        return self._stats

    def _looked(self) -> RelayStats:
        for process in self._processes():
            process.attend()
        statuses = self._statuses()
        working = [status for status in statuses.values() if status.state not in FINAL]
        depth = max((status.lag(self._journal.records) for status in working), default=0)
        errors = sum(status.errors for status in statuses.values())
        return RelayStats(max(0, depth), errors, statuses, self._lags(statuses.values()))

    def _lags(self, statuses: Iterable[SinkStatus]) -> tuple[SinkLag, ...]:
        """Those of functions are left out: they are many people's callbacks, and nobody's backend."""
        records, now = self._journal.records, time.time()
        backends = [status for status in statuses if not isinstance(self._sinks[status.name], FunctionSink)]
        return tuple(status.as_lag(records, now=now, begun=self._begun) for status in backends)

    def close(self, seconds: float = CLOSE_SECONDS, *, status: RunStatus = RunStatus.KILLED) -> CloseReport:
        """Waits until every sink took everything and is closed, and reports what is left.

        The wait goes on while deliveries make progress, for `seconds` at most. Then the child process goes on by itself for some minutes,
        as it does when its parent is killed; threads are left behind. KeyboardInterrupt ends the wait in the same way, and is raised.

        Write the journal's end line first: the sinks are closed with its status. `status` stands in where there is none, because the disk
        is full. Repeated, it returns the same report at once.
        """
        if os.getpid() != self._pid:
            return CloseReport()
        if self._report is None:
            try:
                self._finish(status, Wait(seconds))
            finally:
                self._report = self._left()
        return self._report

    def _finish(self, status: RunStatus, wait: Wait) -> None:
        for delivery in self._deliveries:
            delivery.finish(status)
        for process in self._processes():
            process.finish(status)
        try:
            while self._works() and wait.goes_on(self._statuses().values()):
                self._await_something()
        finally:
            wait.end()

    def _works(self) -> bool:
        threads = any(thread.is_alive() for thread in self._threads)
        return threads or not all(process.over for process in self._processes())

    def _await_something(self) -> None:
        for process in self._processes():
            if not process.over:
                process.wait(LOOK_SECONDS)
                return
        next(thread for thread in self._threads if thread.is_alive()).join(LOOK_SECONDS)

    def _left(self) -> CloseReport:
        """Ends this process's part in the deliveries; the report."""
        for delivery in self._deliveries:
            delivery.stop()
        report = CloseReport(tuple(self._reported()))
        if self._journal.run_dir is not None:  # of the others the child notes itself what becomes of them
            note_reports(self._journal.run_dir, (sink for sink in report.sinks if not sink.goes_on), under_way=False)
        for process in self._processes():
            process.leave()
        return report

    def _reported(self) -> Iterable[SinkReport]:
        statuses, alive = self._statuses(), self.child_pid is not None
        for name, status in statuses.items():
            pending = status.lag(self._journal.records)
            goes_on = alive and name in self._remote and status.state not in SETTLED
            command = replay_command(self._journal.run_dir, self._sinks[name])
            yield sink_report(status, pending=pending, command=command, goes_on=goes_on)

    def _statuses(self) -> Mapping[str, SinkStatus]:
        remote = {} if self._process is None else self._process.statuses
        local = self._refused | {delivery.name: delivery.status for delivery in self._deliveries}
        return {name: local.get(name) or remote[name] for name in self._sinks}

    def _processes(self) -> Sequence[SinkProcess]:
        return [] if self._process is None else [self._process]

    def _goes_to_child(self, sink: Sink) -> bool:
        importable = type(sink).__module__ != "__main__"
        return self._journal.run_dir is not None and importable and not getattr(sink, "in_process", True)

    def _prepared(self, name: str) -> tuple[Delivery, SinkReader] | None:
        """The delivery to a sink of this process and its reader; None, and a warning, where the system refuses what they need."""
        try:
            with ExitStack() as taken:
                reader = taken.enter_context(closing(self._journal.reader()))
                delivery = self._delivery(name, reader)
                taken.pop_all()
        except (OSError, MemoryError) as error:
            self._refuse(name, error)
            return None
        return delivery, reader

    def _start(self, delivery: Delivery, reader: SinkReader) -> None:
        """Starts the delivery in a thread; a warning where the system refuses one."""
        try:
            thread = _thread(delivery)
        except (MemoryError, RuntimeError) as error:
            reader.close()
            self._refuse(delivery.name, error)
            return
        self._deliveries.append(delivery)
        self._threads.append(thread)

    def _refuse(self, name: str, error: BaseException) -> None:
        cause = one_line(error)
        self._refused[name] = SinkStatus(name, SinkState.DISABLED, last_error=cause)
        kept = "" if self._journal.run_dir is None else "; the journal keeps everything, and replay sends it later"
        _logger.warning("esper-telemetry: sink %s cannot start (%s): it gets nothing in this run%s", name, cause, kept)

    def _delivery(self, name: str, reader: SinkReader) -> Delivery:
        run_dir = self._journal.run_dir
        cursors = None if run_dir is None else Cursors(run_dir)
        return Delivery(self._sinks[name], reader, name=name, cursors=cursors, batch=LOCAL_BATCH_RECORDS)


def _started(journal: Journal | MemoryJournal, sinks: Mapping[str, Sink]) -> SinkProcess | None:
    return SinkProcess(journal.run_dir, sinks) if sinks and journal.run_dir is not None else None


def _thread(delivery: Delivery) -> threading.Thread:
    thread = threading.Thread(target=delivery.run, name=f"esper-{delivery.name}", daemon=True)
    thread.start()
    return thread
