"""One sink, one reader, one cursor.

How far one delivery has come, and when that is noted.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from esper_telemetry.core.record import Alarm, Record, RunInfo, RunStatus
from esper_telemetry.delivery.cursors import Cursor, Cursors
from esper_telemetry.delivery.sender import Breaker, Calls, Sender
from esper_telemetry.delivery.status import FINAL, SinkState, SinkStatus, one_line, sink_name
from esper_telemetry.journal.lines import End, Entry, JournalEvent
from esper_telemetry.sinks.protocol import DeadClientError, PermanentSinkError, Sink

SAVE_SECONDS: Final = 1.0


class DeliveryProgress:
    """The cursor of a delivery, noted at most once a second.

    Args:
        name: of the sink.
        cursors: where to note it; None nowhere.
        cursor: where to begin; where it was noted last by default.
    """

    def __init__(self, name: str, cursors: Cursors | None, cursor: Cursor | None = None) -> None:
        self._name = name
        self._cursors = cursors
        saved = Cursor() if cursors is None else cursors.load(name)
        self.cursor = saved if cursor is None else cursor
        self._saved = saved
        self._saved_at = 0.0

    def move(self, **changes: Any) -> None:
        """Changes fields of the cursor."""
        self.cursor = replace(self.cursor, **changes)

    def save_when_due(self) -> None:
        """Notes it if the last note is a second old."""
        if self.cursor != self._saved and time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Notes it."""
        if self._cursors is not None and self.cursor != self._saved:
            self._cursors.save(self._name, self.cursor)
            self._saved, self._saved_at = self.cursor, time.monotonic()


BATCH_RECORDS: Final = 200
POLL_SECONDS: Final = 0.1
REST_SECONDS: Final = 1.0
"""Between two batches in the relay's own process, where the sink keeps up: ten records one by one cost a backend more than ten at once."""

_logger = logging.getLogger("esper_telemetry")


class SinkReader(Protocol):
    """A side of a journal that gives its lines in order."""

    offset: int

    @property
    def run_dir(self) -> Path | None:
        """The directory of the run; None for one without."""

    def read(self, limit: int | None = None) -> list[Entry]:
        """The next lines, at most `limit`."""

    def head(self) -> RunInfo | None:
        """What lines before the offset say about the run."""

    def alarms(self, before: int | None = None) -> tuple[Alarm, ...]:
        """The alarms in the lines before an offset, in all lines by default."""

    def close(self) -> None:
        """Reads no more."""


class Delivery:
    """Feeds one sink from one reader, by `run` in a thread of its own.

    A sink that raises is called again, first with one record, after 0.5 s, then after twice as long, up to a minute
    (`Breaker`). A batch that is refused is halved until the record is alone that the sink does not take while it takes
    the next one: that record is quarantined and the rest goes on. `PermanentSinkError` ends the delivery. The first
    error is logged.

    Args:
        sink: where the records go.
        reader: where they come from; it is the delivery's own.
        name: what the sink is called; its own name by default.
        cursors: where to go on from, and to note progress at most once a second; None begins at the reader's position.
        batch: at most so many records at a time.
        patience: how many failures in a row end the delivery; None for any number.
        in_child: whether the process is the relay's own, which the sink may prepare; it rests between batches.
        failures: in a row so far, where another process has tried before.
        wanted: which updates to send, of all; what a backend misses. None for what the cursor says.
    """

    def __init__(
        self,
        sink: Sink,
        reader: SinkReader,
        *,
        name: str | None = None,
        cursors: Cursors | None = None,
        batch: int = BATCH_RECORDS,
        patience: int | None = None,
        in_child: bool = False,
        failures: int = 0,
        wanted: Callable[[int], bool] | None = None,
    ) -> None:
        self.sink = sink
        self.name = name or sink_name(sink)
        self.breaker = Breaker(failures)
        self._reader = reader
        self._batch_size = batch
        self._patience = patience
        self._must_prepare = self._paced = in_child
        self._wanted = wanted
        self._caught_up = False
        self._state = SinkState.OPENING
        self._calls = Calls(self.name)
        self._wake = threading.Event()
        self._stopped = False
        self._fallback: RunStatus | None = None
        self._info: RunInfo | None = None
        self._opened = False
        self._held = 0
        self._sender = Sender(sink, self.name, reader.run_dir, self.breaker, self._calls)
        self._progress = DeliveryProgress(self.name, cursors, None if wanted is None else Cursor())
        if self.cursor.offset:
            self._reader.offset = self.cursor.offset
            self._info = self._reader.head()

    @property
    def status(self) -> SinkStatus:
        """How it goes, at this moment; from any thread."""
        cursor = self.cursor
        return SinkStatus(
            *(self.name, self._state, cursor.records, cursor.seq, self._calls.errors, self._calls.last_error),
            quarantined=cursor.quarantined,
            wall_time=self._sender.wall_time,
        )

    @property
    def cursor(self) -> Cursor:
        """What the sink has taken."""
        return self._progress.cursor

    @property
    def sent(self) -> int:
        """How many records this delivery has sent; what others have sent before is not among them."""
        return self._sender.sent

    @property
    def over(self) -> bool:
        """Whether nothing more will be delivered."""
        return self._stopped or self._state in FINAL

    @property
    def call_seconds(self) -> float:
        """For how long the call of the sink that is under way has lasted; 0 where none is."""
        return self._calls.seconds

    def import_client(self) -> None:
        """Lets the sink import its client, in the calling thread.

        Call it before `run`, for one delivery after the other: imports side by side have left NumPy and MLflow half initialised, and every
        further attempt in that process failed too.
        """
        import_client = getattr(self.sink, "import_client", None)
        if import_client is None:
            return
        try:
            import_client()
        except (Exception, SystemExit) as error:  # whatever the modules of a package raise
            self._disable(self._unimportable(error))

    def run(self) -> None:
        """Delivers until the journal's end was delivered, the sink is disabled, or `stop` is called."""
        try:
            while not self.over:
                if not self.step() or self._may_rest:
                    self._wake.wait(REST_SECONDS if self._may_rest else max(POLL_SECONDS, self.breaker.pause()))
                    self._wake.clear()
        finally:
            self._progress.save()
            self._reader.close()

    @property
    def _may_rest(self) -> bool:
        """Whether more lines will come, and these were all that there are."""
        return self._paced and self._caught_up and self._fallback is None

    def finish(self, status: RunStatus) -> None:
        """Says, from any thread, that no more lines will come; `status` ends the sink where the journal has no end."""
        self._fallback = status
        self.breaker.hurry()
        self._wake.set()

    def stop(self) -> None:
        """Makes the delivery end after the call of the sink that is under way; from any thread."""
        self._stopped = True
        self._wake.set()

    def paused(self, seconds: float) -> None:
        """Says that the process was stopped for so long: the call under way is not to blame."""
        self._calls.paused(seconds)

    def hung(self) -> None:
        """Says that the call under way is given up; its process ends."""
        self._calls.note(TimeoutError(f"a call has not come back for {self.call_seconds:.0f} s"))
        self._state = SinkState.HUNG

    def step(self) -> bool:
        """Makes one attempt and says whether to go on at once. Whatever the sink raises ends here."""
        if self.breaker.pause() > 0:
            return False
        try:
            moved = self._advance()
        except PermanentSinkError as error:
            self._disable(error)
        except (Exception, SystemExit) as error:  # a backend that calls sys.exit would end its thread in silence
            if isinstance(error, ImportError) and not self._opened:  # a sink without `import_client`
                self._disable(self._unimportable(error))
            else:
                self._retry_later(error)
        else:
            self._progress.save_when_due()
            return moved
        return False

    def _advance(self) -> bool:
        self._caught_up = False
        moved = bool(self._sender.batch) or self._read()
        if self._info is not None and not self._opened and not self.cursor.closed:
            self._open(self._info)
        if self._sender.batch:
            self._write()
        elif not moved and self.cursor.end is not None:
            self._close(self.cursor.end)
        return moved

    def _read(self) -> bool:
        """Takes in the next lines; at the end of a journal that goes no further, its end."""
        entries = self._reader.read(self._batch_size)
        self._caught_up = 0 < len(entries) < self._batch_size
        for entry in entries:
            self._take_in(entry)
        if not self._sender.batch:
            self._move(offset=self._reader.offset)
        if not entries and self.cursor.end is None and self._fallback is not None:
            self._move(end=self._fallback)
        return bool(entries)

    def _take_in(self, entry: Entry) -> None:
        match entry:
            case RunInfo():
                self._describe(entry)
                self._move(end=None, closed=False)
            case Record() if self._is_held(entry.axes.update):
                self._move(end=None, closed=False, seq=entry.seq, records=self.cursor.records + 1)
            case Record():
                self._sender.batch.append(entry)
                self._move(end=None, closed=False)
            case Alarm() if self._sender.alarm is not None and not self._is_held(entry.axes.update):
                self._sender.batch.append(entry)
            case JournalEvent(type="metrics") if self._info is not None:
                self._info.metrics.update(entry.data)
            case End():
                self._move(end=entry.status)

    def _is_held(self, update: int) -> bool:
        """Whether the backend has the update already."""
        return update <= self._held or (self._wanted is not None and not self._wanted(update))

    def _describe(self, info: RunInfo) -> None:
        """The sink keeps the `RunInfo` it was opened with, so a resumed run adds its descriptions to that."""
        if self._info is None or not self._opened:
            earlier, self._info = self._info, info
            info.metrics.update({**(earlier.metrics if earlier else {}), **info.metrics})
        else:
            self._info.metrics.update(info.metrics)

    def _open(self, info: RunInfo) -> None:
        with self._calls.one():
            prepare = getattr(self.sink, "prepare_child", None)
            if self._must_prepare and prepare is not None:
                prepare()
            self._must_prepare = False
            self.sink.open(info)
            if self._paced:
                gc.freeze()  # the backends' modules stay: to go through them again and again took a third of MLflow's time
            self._opened = True
            held = getattr(self.sink, "held", None)
            self._reconcile(None if held is None or self._wanted is not None else held(info))
            self._recall()
        self._worked()

    def _reconcile(self, held: int | None) -> None:
        """Goes through the journal again where the sink knows what its backend holds, and passes over that."""
        if held is not None:
            self._held = held
            self._sender.batch.clear()
            self._reader.offset = 0
            self._move(offset=0, seq=0, records=0, end=None)

    def _recall(self) -> None:
        """Tells the sink of the alarms that it was sent before it was opened this time."""
        recall = getattr(self.sink, "recall", None)
        if recall is None:
            return
        whole = self._held or self._wanted is not None
        before = None if whole else self.cursor.offset
        known = [alarm for alarm in self._reader.alarms(before) if not whole or self._is_held(alarm.axes.update)]
        if known:
            recall(known)

    def _write(self) -> None:
        """Delivers all that was read; what the sink has taken of it is not sent again when something later fails."""
        batch, refused = self._sender.batch, self._sender.refused
        try:
            while batch:
                self._sender.send(at_end=self._fallback is not None, any_before=self.cursor.records > 0)
        finally:
            self._move(quarantined=self.cursor.quarantined + self._sender.refused - refused)
        if batch.taken:
            self._move(seq=batch.taken[-1].seq, records=self.cursor.records + len(batch.taken))
        batch.clear_taken()
        self._move(offset=self._reader.offset)
        self._worked()

    def _close(self, status: RunStatus) -> None:
        if self._opened:
            with self._calls.one():
                self.sink.close(status)
        self._move(closed=True)
        self.breaker.worked()
        self._state = SinkState.CLOSED

    def _worked(self) -> None:
        self.breaker.worked()
        self._state = SinkState.DELIVERING

    def _retry_later(self, error: BaseException) -> None:
        self._calls.failed(error)
        self.breaker.failed(at_end=self._fallback is not None)
        self._state = SinkState.RETRYING
        if self.breaker.failures == self._patience:
            self.stop()

    def _unimportable(self, error: BaseException) -> PermanentSinkError:
        """A package that is not installed stays so; what a broken import leaves behind is gone in a fresh process."""
        if isinstance(error, ModuleNotFoundError):
            return PermanentSinkError(f"it needs a module that is not installed: {error}")
        _logger.debug("sink %s cannot import its client", self.name, exc_info=error)
        kind = DeadClientError if self._paced else PermanentSinkError
        return kind(f"its client cannot be imported: {one_line(error)}")

    def _disable(self, error: PermanentSinkError) -> None:
        self._calls.note(error)
        self._state = SinkState.DEAD_CLIENT if isinstance(error, DeadClientError) else SinkState.DISABLED
        if self._state is SinkState.DISABLED or not self._paced:
            _logger.error("esper-telemetry: sink %s is DISABLED for this run: %s", self.name, self._calls.last_error)

    def _move(self, **changes: Any) -> None:
        self._progress.move(**changes)
