"""The delivery of one sink, in one code path: live, catching up or replaying. Only this module catches exceptions of a sink."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from esper_telemetry.core.backends import client_error
from esper_telemetry.core.interrupts import is_interrupt
from esper_telemetry.core.record import Alarm, Axes, Record, RunInfo, RunStatus
from esper_telemetry.core.supervisor import REPORTED
from esper_telemetry.delivery.sender import CircuitBreaker, Sender, SinkCalls
from esper_telemetry.delivery.status import FINAL, Cursor, Cursors, SinkState, SinkStatus
from esper_telemetry.journal.file import JournalReader
from esper_telemetry.journal.lines import End, Entry, JournalEvent
from esper_telemetry.journal.memory_journal import MemoryReader
from esper_telemetry.sinks.sink_protocol import (
    DeadClientError,
    PermanentSinkError,
    Sink,
    SupportsAlarms,
    SupportsChildPreparation,
    SupportsClientImport,
    SupportsHeldUpdate,
    SupportsOutcome,
    SupportsRecall,
    sink_name,
)

MAX_BATCH_LINES: Final = 200
MAX_SAVE_DELAY_SECONDS: Final = 1.0
"""Maximum age of a saved cursor; a killed process sends this much again."""
POLL_SECONDS: Final = 0.1
REST_SECONDS: Final = 1.0
"""Pause between two batches in the sink process if the sink keeps up: ten single records cost a backend more than one batch of ten."""

_logger = logging.getLogger("esper_telemetry")


class Delivery:
    """Feeds one sink from one reader: `run` does so in its own thread, `step` in the caller's.

    A sink that raises is called again after a pause (`CircuitBreaker`). A record that it refuses is set aside (`Sender`).
    `PermanentSinkError` ends the delivery. The first error is logged.

    Args:
        sink: the sink to feed.
        reader: source of the lines; it belongs to the delivery.
        name: name of the sink in messages and `cursors.json`; its own name by default.
        cursors: the starting point, and storage of progress; None begins at the reader's position.
        batch: maximum number of lines to read at a time.
        patience: failures in a row that end the delivery; None for any number.
        in_child: whether this is the sink process, which the sink may prepare; the delivery rests between batches there.
        failures: failures in a row so far, if another process has tried before.
        needs_update: returns whether to send an update, if a backend lacks some; None to follow the cursor.
        until_finish: close the sink at an end line only after `finish`. The journal of a resumed run has an older end line, and later
            lines may not be written yet.
    """

    def __init__(
        self,
        sink: Sink,
        reader: JournalReader | MemoryReader,
        *,
        name: str | None = None,
        cursors: Cursors | None = None,
        batch: int = MAX_BATCH_LINES,
        patience: int | None = None,
        in_child: bool = False,
        failures: int = 0,
        needs_update: Callable[[int], bool] | None = None,
        until_finish: bool = False,
    ) -> None:
        self.sink = sink
        self.name = name or sink_name(sink)
        self.breaker = CircuitBreaker(failures)
        self._reader = reader
        self._cursors = cursors
        self._batch_lines = batch
        self._patience = patience
        self._must_prepare = self._in_child = in_child
        self._needs_update = needs_update
        self._caught_up = False
        self._state = SinkState.OPENING
        self.calls = SinkCalls(self.name)
        self._wake = threading.Event()
        self._stopped = False
        self._fallback_end: RunStatus | None = None
        self._until_finish = until_finish
        self._info: RunInfo | None = None
        self._opened = False
        self._held_update = 0
        self.sender = Sender(sink, self.name, reader.run_dir, self.breaker, self.calls)
        self._saved = Cursor() if cursors is None else cursors.load(self.name)
        self._saved_at = 0.0
        self.cursor = self._saved if needs_update is None else Cursor()
        if self.cursor.offset:
            self._reader.offset = self.cursor.offset
            self._info = self._reader.head()

    @property
    def status(self) -> SinkStatus:
        """The state of the delivery at this moment; callable from any thread."""
        cursor = self.cursor
        return SinkStatus(
            *(self.name, self._state, cursor.records, cursor.seq, self.calls.errors),
            last_error=self.calls.slowness or self.calls.last_error,
            quarantined=cursor.quarantined,
            wall_time=self.sender.wall_time,
        )

    @property
    def over(self) -> bool:
        """True when the delivery has ended."""
        return self._stopped or self._state in FINAL

    def import_client(self) -> None:
        """Let the sink import its client, in the calling thread. Call it before `run`, for one delivery after the other."""
        if not isinstance(self.sink, SupportsClientImport):
            return
        try:
            self.sink.import_client()
        except BaseException as error:  # from a package's modules
            if is_interrupt(error):
                raise
            self._disable(self._import_error(error))

    def run(self, progress: Callable[[int], object] | None = None) -> None:
        """Deliver until the end of the journal was delivered, the sink is disabled, or `stop` is called.

        `progress` is called after every attempt, with the number of records that this delivery has sent.
        """
        try:
            while not self.over:
                moved = self.step()
                if progress is not None:
                    progress(self.sender.sent)
                # Rest if more lines will come and all existing ones were delivered.
                rests = self._in_child and self._caught_up and self._fallback_end is None
                if not moved or rests:
                    self._wake.wait(REST_SECONDS if rests else max(POLL_SECONDS, self.breaker.pause()))
                    self._wake.clear()
        finally:
            self.release()

    def release(self) -> None:
        """Save the cursor and close the reader."""
        self._save()
        self._reader.close()

    def finish(self, status: RunStatus) -> None:
        """Announce that the journal is complete. Without an end line, the sink is closed with `status`. Callable from any thread."""
        self._fallback_end = status
        self.breaker.retry_now()
        self._wake.set()

    def stop(self) -> None:
        """End the delivery after the sink's call under way; callable from any thread."""
        self._stopped = True
        self._wake.set()

    def give_up_call(self) -> None:
        """Report that the call under way hangs; the process must then end."""
        self.calls.record_error(TimeoutError(f"a call has not returned for {self.calls.seconds:.0f} s"))
        self._state = SinkState.HUNG

    def step(self) -> bool:
        """Make one attempt and return whether to continue at once. Exceptions of the sink are caught here."""
        if self.breaker.pause() > 0:
            return False
        try:
            moved = self._advance()
        except PermanentSinkError as error:
            self._disable(error)
        except BaseException as error:  # a backend that calls sys.exit would end its thread without a message
            if is_interrupt(error):
                raise
            if isinstance(error, ImportError) and not self._opened:  # a sink without `import_client`
                self._disable(self._import_error(error))
            else:
                self.calls.record_failure(error)
                self.breaker.record_failure(at_end=self._fallback_end is not None)
                self._state = SinkState.RETRYING
                if self.breaker.failures == self._patience:
                    self.stop()
        else:
            if time.monotonic() - self._saved_at >= MAX_SAVE_DELAY_SECONDS:
                self._save()
            return moved
        return False

    def _advance(self) -> bool:
        self._caught_up = False
        moved = bool(self.sender.batch) or self._read()
        info, may_open = self._info, not self._opened and not self.cursor.closed
        # the descriptions of keys after a new run line were read, or will not come
        if info is not None and may_open and (info.metrics or self.sender.batch or self.cursor.end is not None):
            self._open(info)
        if self.sender.batch:
            self._write()
        elif not moved and self.cursor.end is not None and not (self._until_finish and self._fallback_end is None):
            self._close(self.cursor.end)
        return moved

    def _read(self) -> bool:
        """Read the next lines into the batch; at the end of a complete journal, set the end of the run."""
        entries = self._reader.read(self._batch_lines)
        self._caught_up = 0 < len(entries) < self._batch_lines
        for entry in entries:
            self._add(entry)
        if not self.sender.batch:
            self._move(offset=self._reader.offset)
        if not entries and self.cursor.end is None and self._fallback_end is not None:
            self._move(end=self._fallback_end)
        return bool(entries)

    def _add(self, entry: Entry) -> None:
        match entry:
            case RunInfo() if self._info is not None and self._opened:
                # The sink keeps the `RunInfo` it was opened with, so the descriptions of a resumed run are added to it.
                self._info.metrics.update(entry.metrics)
                self._move(end=None, closed=False)
            case RunInfo():
                entry.metrics.update({**(self._info.metrics if self._info else {}), **entry.metrics})
                self._info = entry
                self._move(end=None, closed=False)
            case Record() if self._is_held(entry.axes.update):
                self._move(end=None, closed=False, seq=entry.seq, records=self.cursor.records + 1)
            case Record():
                self.sender.batch.append(entry)
                self._move(end=None, closed=False)
            case Alarm() if isinstance(self.sink, SupportsAlarms) and not self._is_held(entry.axes.update):
                self.sender.batch.append(entry)
            case JournalEvent(type="outcome", axes=Axes(update=update)) if not self._is_held(update):
                if isinstance(self.sink, SupportsOutcome):
                    self.sender.batch.append(entry)
            case JournalEvent(type="metrics") if self._info is not None:
                self._info.metrics.update(entry.data)
            case End():
                self._move(end=entry.status)

    def _is_held(self, update: int) -> bool:
        """Return whether the backend has the update already."""
        return update <= self._held_update or (self._needs_update is not None and not self._needs_update(update))

    def _open(self, info: RunInfo) -> None:
        with self.calls.timed():
            if self._must_prepare and isinstance(self.sink, SupportsChildPreparation):
                self.sink.prepare_child()
            self._must_prepare = False
            self.sink.open(info)
            if self._in_child:
                gc.freeze()  # the backends' modules stay loaded: scanning them repeatedly took a third of MLflow's time
            self._opened = True
            if self._needs_update is None and isinstance(self.sink, SupportsHeldUpdate):
                held_update = self.sink.held(info)
                if held_update is not None:  # read the journal again and skip these updates
                    self._held_update = held_update
                    self.sender.batch.clear()
                    self._reader.offset = 0
                    self._move(offset=0, seq=0, records=0, end=None)
            self._recall()
        self._record_success()

    def _recall(self) -> None:
        """Repeat the alarms that the sink received before it was opened this time."""
        if not isinstance(self.sink, SupportsRecall):
            return
        from_start = self._held_update or self._needs_update is not None
        alarms = self._reader.alarms(None if from_start else self.cursor.offset)
        earlier = [alarm for alarm in alarms if not from_start or self._is_held(alarm.axes.update)]
        if earlier:
            self.sink.recall(earlier)

    def _write(self) -> None:
        """Deliver everything that was read; records that the sink has taken are not sent again after a later failure."""
        sender, refused = self.sender, self.sender.refused
        try:
            while sender.batch:
                sender.send(at_end=self._fallback_end is not None, any_before=self.cursor.records > 0)
        finally:
            self._move(quarantined=self.cursor.quarantined + sender.refused - refused)
        if sender.taken:
            self._move(seq=sender.taken[-1].seq, records=self.cursor.records + len(sender.taken))
        sender.clear_taken()
        self._move(offset=self._reader.offset)
        self._record_success()

    def _close(self, status: RunStatus) -> None:
        if self._opened:
            with self.calls.timed():
                self.sink.close(status)
        self._move(closed=True)
        self.breaker.record_success()
        self._state = SinkState.CLOSED

    def _record_success(self) -> None:
        self.breaker.record_success()
        self._state = SinkState.DELIVERING

    def _import_error(self, error: BaseException) -> PermanentSinkError:
        """Return the error that disables the sink. In the sink process, a fresh process may succeed in importing the client."""
        if isinstance(error, ModuleNotFoundError):
            return PermanentSinkError(f"it needs a module that is not installed: {error}")
        _logger.debug("sink %s cannot import its client", self.name, exc_info=error)
        kind = DeadClientError if self._in_child else PermanentSinkError
        return kind(f"its client cannot be imported: {client_error(error)}")

    def _disable(self, error: PermanentSinkError) -> None:
        self.calls.record_error(error)
        self._state = SinkState.DEAD_CLIENT if isinstance(error, DeadClientError) else SinkState.DISABLED
        if self._state is SinkState.DISABLED or not self._in_child:
            message = "esper-telemetry: sink %s is DISABLED for this run: %s"
            _logger.error(message, self.name, self.calls.last_error, extra=REPORTED)

    def _move(self, **changes: Any) -> None:
        self.cursor = replace(self.cursor, **changes)

    def _save(self) -> None:
        if self._cursors is not None and self.cursor != self._saved:
            self._cursors.save(self.name, self.cursor)
            self._saved, self._saved_at = self.cursor, time.monotonic()
