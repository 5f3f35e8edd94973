"""The deliveries of a live run, and the wait for them at its end.

Sinks with `in_process = False` share one sink process. User callables and other sinks have a thread each, so that a slow one does not
delay the rest. Sinks whose calls return at once (`inline`, the console) run without a thread: the training thread calls them between
two updates.

`close` waits while deliveries make progress, up to a cap, because in a container all processes end with the main process. Then the sink
process continues alone.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Final

from esper_telemetry.core.backends import client_error
from esper_telemetry.core.record import RunStatus
from esper_telemetry.core.supervisor import HAS_HELPERS
from esper_telemetry.delivery.child import MAX_DETACHED_SECONDS
from esper_telemetry.delivery.delivery import Delivery
from esper_telemetry.delivery.process import SinkProcess
from esper_telemetry.delivery.status import (
    FINAL,
    SETTLED,
    CloseReport,
    Cursors,
    DeliveryStats,
    SinkReport,
    SinkState,
    SinkStatus,
    replay_command,
    sink_report,
    sinks_by_name,
    write_reports,
    write_uris,
)
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.memory_journal import MemoryJournal
from esper_telemetry.sinks.sink_protocol import FunctionSink, Sink, SupportsInline, runs_in_process, sink_uri

MAX_CLOSE_SECONDS: Final = 60.0
"""How long the end of a run waits at most."""
MAX_STALL_SECONDS: Final = 15.0
"""How long it waits at most while deliveries are stalled."""
SILENT_WAIT_SECONDS: Final = 4.0
"""A shorter wait prints nothing."""
ERASE_LINE: Final = "\r\x1b[2K"
LOCAL_BATCH_LINES: Final = 50
"""Maximum lines that a delivery in the training process reads at once, because it holds the interpreter lock while it parses them."""
MAX_INLINE_SECONDS: Final = 0.01
"""Time after which the training thread leaves further batches of inline sinks to its next call."""
POLL_SECONDS: Final = 0.1
"""Minimum time between two checks of the deliveries by the training thread."""

GOING_ON: Final = (
    "esper-telemetry: not everything is delivered yet: %s. A background process continues for at most %.0f minutes. Run "
    "`esper-telemetry doctor %s` to see whether it is done, and how to send the rest if the machine or container stops before."
)

_logger = logging.getLogger("esper_telemetry")


class DeliveryWait:
    """One wait, which continues while deliveries make progress: a sink takes records, or opens and has not failed yet.

    A terminal shows the sinks and the elapsed time in a temporary line; a log gets one line.
    """

    def __init__(self, seconds: float) -> None:
        self._begun_at = self._progress_at = time.monotonic()
        self._deadline = self._begun_at + seconds
        self._progress: object = None
        self._shown_seconds = -1

    def goes_on(self, statuses: Iterable[SinkStatus]) -> bool:
        """Compare deliveries with the last call, and return whether to continue waiting."""
        now = time.monotonic()
        active = [status for status in statuses if status.state not in FINAL]
        progress = [(status.name, status.state, status.records, status.quarantined) for status in active]
        opening = any(status.state is SinkState.OPENING and not status.errors for status in active)
        if progress != self._progress or opening:
            self._progress, self._progress_at = progress, now
        self._show([status.name for status in active], int(now - self._begun_at))
        return now < min(self._deadline, self._progress_at + MAX_STALL_SECONDS)

    def end(self) -> None:
        """Clear the line."""
        if self._shown_seconds >= 0 and _on_terminal():
            _write(ERASE_LINE)

    def _show(self, names: list[str], seconds: int) -> None:
        if not names or seconds < SILENT_WAIT_SECONDS or seconds == self._shown_seconds:
            return
        line = f"delivering to {', '.join(names)} ({seconds} s)... Ctrl-C leaves it to a background process"
        if _on_terminal():
            _write(ERASE_LINE + line)
        elif self._shown_seconds < 0:
            _write(f"esper-telemetry: {line}\n")
        self._shown_seconds = seconds


def _on_terminal() -> bool:
    with suppress(AttributeError, ValueError):  # stderr is missing or closed
        return sys.stderr.isatty()
    return False


def _write(text: str) -> None:
    with suppress(AttributeError, ValueError, OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


class Deliveries:
    """Feeds sinks from a journal while it is written.

    The training thread calls `stats` and `poll` between two updates. A sink of the sink process gets a thread in this process instead on
    Windows, if the run has no directory, or if that process cannot import its class because the script itself defines it. Start it before
    or after the journal's first line. It does nothing in a forked process.

    Args:
        journal: source of the lines.
        sinks: the sinks to feed.
    """

    def __init__(self, journal: Journal | MemoryJournal, sinks: Iterable[Sink]) -> None:
        self._pid = os.getpid()
        self._journal = journal
        self._sinks = sinks_by_name(list(sinks))
        self._report: CloseReport | None = None
        self._begun = time.time()
        self._stats: DeliveryStats | None = None
        self._poll_at = self._feed_at = 0.0
        self._process: SinkProcess | None = None
        self._local: list[Delivery] = []
        self._inline: list[Delivery] = []
        self._threads: list[threading.Thread] = []
        self._refused: dict[str, SinkStatus] = {}
        run_dir = journal.run_dir
        # The sink process reads the journal's file, and cannot import a class that the script defines.
        candidates = self._sinks if HAS_HELPERS and run_dir is not None else {}
        remote = {name: sink for name, sink in candidates.items() if not runs_in_process(sink) and type(sink).__module__ != "__main__"}
        self._remote = frozenset(remote)
        if remote and run_dir is not None:
            self._process = SinkProcess(run_dir, remote)
        if run_dir is not None and self._sinks:
            write_uris(run_dir, {name: sink_uri(sink) for name, sink in self._sinks.items()})
        prepared = [delivery for name in self._sinks if name not in remote if (delivery := self._prepare(name)) is not None]
        for delivery in prepared:  # one after the other, before any thread starts
            delivery.import_client()
        for delivery in prepared:
            if isinstance(delivery.sink, SupportsInline) and delivery.sink.inline:
                self._inline.append(delivery)
                self._local.append(delivery)
            else:
                self._start_thread(delivery)

    @property
    def child_pid(self) -> int | None:
        """Process ID of the sink process; None if none runs."""
        return None if self._process is None else self._process.pid

    def send_secrets(self) -> None:
        """Send the secrets that this process has recognised so far to the sink process; `stats` does so too."""
        if self._process is not None:
            self._process.send_secrets()

    def poll(self) -> None:
        """Feed inline sinks, at most every `POLL_SECONDS`, without waiting; `stats` does so too."""
        now = time.monotonic()
        if now >= self._feed_at:
            self._feed_at = now + POLL_SECONDS
            self._feed_inline()

    def stats(self) -> DeliveryStats:
        """State of all deliveries. Follows the sink process and feeds inline sinks, at most every `POLL_SECONDS`, without waiting."""
        now = time.monotonic()
        if now >= self._poll_at:
            self._poll_at, self._stats = now + POLL_SECONDS, None
            if self._process is not None:
                self._process.poll()
            self._feed_inline()
        if self._stats is None:
            statuses = self._statuses()
            active = [status for status in statuses.values() if status.state not in FINAL]
            depth = max((status.lag(self._journal.records) for status in active), default=0)
            errors = sum(status.errors for status in statuses.values())
            # Functions are left out: they are callbacks of the user, not backends.
            backends = [status for name, status in statuses.items() if not isinstance(self._sinks[name], FunctionSink)]
            records, time_now = self._journal.records, time.time()
            lags = tuple(status.as_lag(records, now=time_now, begun=self._begun) for status in backends)
            self._stats = DeliveryStats(max(0, depth), errors, statuses, lags)
        return self._stats

    def _feed_inline(self) -> None:
        if self._report is not None or os.getpid() != self._pid:
            return
        begun_at = time.monotonic()
        for delivery in self._inline:
            while not delivery.over and delivery.step() and time.monotonic() - begun_at < MAX_INLINE_SECONDS:
                pass

    def close(self, seconds: float = MAX_CLOSE_SECONDS, *, status: RunStatus = RunStatus.KILLED) -> CloseReport:
        """Wait until every sink has taken everything and is closed, and report what is left.

        The wait lasts while deliveries make progress, for at most `seconds`. Then the sink process continues alone for some minutes, as it
        does when its trainer is killed; threads are left running. KeyboardInterrupt ends the wait in the same way, and is raised.

        Write the journal's end line first: the sinks are closed with its status. If the line is missing because the disk is full, they are
        closed with `status`. Further calls return the same report at once.
        """
        if os.getpid() != self._pid:
            return CloseReport()
        if self._report is None:
            try:
                self._finish(status, DeliveryWait(seconds))
            finally:
                self._report = self._leave()
        return self._report

    def _finish(self, status: RunStatus, wait: DeliveryWait) -> None:
        for delivery in self._local:
            delivery.finish(status)
        if self._process is not None:
            self._process.finish(status)
        try:
            while self._is_busy() and wait.goes_on(self._statuses().values()):
                self._await_progress()
        finally:
            wait.end()

    def _is_busy(self) -> bool:
        inline = any(not delivery.over for delivery in self._inline)
        threads = any(thread.is_alive() for thread in self._threads)
        return inline or threads or (self._process is not None and not self._process.over)

    def _await_progress(self) -> None:
        """Feed inline sinks; if they are idle, wait for one of the others."""
        moved = [delivery.step() for delivery in self._inline if not delivery.over]
        if any(moved):
            return
        if self._process is not None and not self._process.over:
            self._process.poll(POLL_SECONDS)
        elif (thread := next((thread for thread in self._threads if thread.is_alive()), None)) is not None:
            thread.join(POLL_SECONDS)
        elif any(not delivery.over for delivery in self._inline):
            time.sleep(POLL_SECONDS)

    def _leave(self) -> CloseReport:
        """End this process's part in the deliveries; return the report."""
        for delivery in self._local:
            delivery.stop()
        for delivery in self._inline:
            delivery.release()
        report = CloseReport(tuple(self._reports()))
        if self._journal.run_dir is not None:  # the sink process itself reports on deliveries that continue
            write_reports(self._journal.run_dir, (sink for sink in report.sinks if not sink.goes_on), under_way=False)
        if self._process is not None:
            self._process.leave()
        self._stats = None
        return report

    def _reports(self) -> Iterable[SinkReport]:
        statuses, alive = self._statuses(), self.child_pid is not None
        for name, status in statuses.items():
            pending = status.lag(self._journal.records)
            goes_on = alive and name in self._remote and status.state not in SETTLED
            command = replay_command(self._journal.run_dir, self._sinks[name]) if self._journal.records else ""
            yield sink_report(status, pending=pending, command=command, goes_on=goes_on)

    def _statuses(self) -> Mapping[str, SinkStatus]:
        remote = {} if self._process is None else self._process.statuses
        local = self._refused | {delivery.name: delivery.status for delivery in self._local}
        return {name: local.get(name) or remote[name] for name in self._sinks}

    def _prepare(self, name: str) -> Delivery | None:
        """Return the delivery to a sink of this process; None, with a warning, if the system lacks resources for it."""
        run_dir = self._journal.run_dir
        try:
            with ExitStack() as opened:
                reader = opened.enter_context(closing(self._journal.reader()))
                cursors = None if run_dir is None else Cursors(run_dir)
                delivery = Delivery(self._sinks[name], reader, name=name, cursors=cursors, batch=LOCAL_BATCH_LINES, until_finish=True)
                opened.pop_all()
        except (OSError, MemoryError) as error:
            self._refuse(name, error)
            return None
        return delivery

    def _start_thread(self, delivery: Delivery) -> None:
        """Start the delivery in a thread; log a warning if the system refuses one."""
        thread = threading.Thread(target=delivery.run, name=f"esper-{delivery.name}", daemon=True)
        try:
            thread.start()
        except (MemoryError, RuntimeError) as error:
            delivery.release()
            self._refuse(delivery.name, error)
            return
        self._local.append(delivery)
        self._threads.append(thread)

    def _refuse(self, name: str, error: BaseException) -> None:
        cause = client_error(error)
        self._refused[name] = SinkStatus(name, SinkState.DISABLED, last_error=cause)
        remedy = "" if self._journal.run_dir is None else "; the journal keeps the records, and replay sends them later"
        _logger.warning("esper-telemetry: sink %s cannot start (%s): it gets nothing in this run%s", name, cause, remedy)


def log_undelivered(report: CloseReport, run_dir: Path | None) -> None:
    """Log one line for each sink that needs help, and one for all sinks that a background process feeds."""
    unfinished = [sink for sink in report.sinks if sink.goes_on]
    for sink in report.sinks:
        if sink not in unfinished and (sink.state is not SinkState.CLOSED or sink.pending):
            _logger.warning("esper-telemetry: %s", sink)
    if unfinished:
        names = []
        for sink in unfinished:
            details = "; ".join(filter(None, (f"{sink.pending:,} records" if sink.pending else "", sink.last_error)))
            names.append(f"{sink.name} ({details})" if details else sink.name)
        _logger.warning(GOING_ON, ", ".join(names), MAX_DETACHED_SECONDS / 60, run_dir)
