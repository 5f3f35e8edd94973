"""One sink, one reader, one cursor."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Protocol

from esper_telemetry.journal import End, Entry, JournalEvent
from esper_telemetry.record import Alarm, Record, RunInfo, RunStatus
from esper_telemetry.relay.cursors import Cursor, Cursors
from esper_telemetry.relay.status import FINAL, SinkState, SinkStatus, sink_name
from esper_telemetry.sinks.protocol import DeadClientError, PermanentSinkError, Sink

BATCH_RECORDS: Final = 200
POLL_SECONDS: Final = 0.1
REST_SECONDS: Final = 1.0
"""Between two batches in the relay's own process, where the sink keeps up: ten records one by one cost a backend more than ten at once."""
SAVE_SECONDS: Final = 1.0
FIRST_RETRY_SECONDS: Final = 0.5
LONGEST_RETRY_SECONDS: Final = 60.0
LONGEST_RETRY_AT_END_SECONDS: Final = 2.0
"""Between attempts once no more lines come: somebody waits for the end."""

_logger = logging.getLogger("esper_telemetry")


class Reader(Protocol):
    """A side of a journal that gives its lines in order."""

    offset: int

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

    A sink that raises is called again with the same records, or the same alarm, after 0.5 s, then after twice as long, up to a minute;
    `PermanentSinkError` ends the delivery. The first error is logged.

    Args:
        sink: where the records go.
        reader: where they come from; it is the delivery's own.
        name: what the sink is called; its own name by default.
        cursors: where to go on from, and to note progress at most once a second; None begins at the reader's position.
        batch: at most so many records at a time.
        patience: how many failures in a row end the delivery; None for any number.
        in_child: whether the process is the relay's own, which the sink may prepare; it rests between batches.
    """

    def __init__(
        self,
        sink: Sink,
        reader: Reader,
        *,
        name: str | None = None,
        cursors: Cursors | None = None,
        batch: int = BATCH_RECORDS,
        patience: int | None = None,
        in_child: bool = False,
    ) -> None:
        self.sink = sink
        self.name = name or sink_name(sink)
        self._reader = reader
        self._cursors = cursors
        self._batch_size = batch
        self._patience = patience
        self._must_prepare = self._paced = in_child
        self._caught_up = False
        self._state = SinkState.OPENING
        self._errors = 0
        self._last_error = ""
        self._failures = 0
        self._failed_at = 0.0
        self._wake = threading.Event()
        self._stopped = False
        self._fallback: RunStatus | None = None
        self._info: RunInfo | None = None
        self._opened = False
        self._held = 0
        self._batch: list[Record | Alarm] = []
        self._taken: list[Record] = []
        self._alarm: Callable[[Alarm], object] | None = getattr(sink, "alarm", None)
        self._resume(Cursor() if cursors is None else cursors.load(self.name))

    @property
    def status(self) -> SinkStatus:
        """How it goes, at this moment; from any thread."""
        return SinkStatus(
            self.name, self._state, self._cursor.records, self._cursor.seq, self._errors, self._last_error
        )

    @property
    def cursor(self) -> Cursor:
        """What the sink has taken."""
        return self._cursor

    @property
    def over(self) -> bool:
        """Whether nothing more will be delivered."""
        return self._stopped or self._state in FINAL

    def run(self) -> None:
        """Delivers until the journal's end was delivered, the sink is disabled, or `stop` is called."""
        try:
            while not self.over:
                if not self.step() or self._may_rest:
                    self._wake.wait(REST_SECONDS if self._may_rest else max(POLL_SECONDS, self._pause()))
                    self._wake.clear()
        finally:
            self._save()
            self._reader.close()

    @property
    def _may_rest(self) -> bool:
        """Whether more lines will come, and these were all that there are."""
        return self._paced and self._caught_up and self._fallback is None

    def finish(self, status: RunStatus) -> None:
        """Says, from any thread, that no more lines will come; `status` ends the sink where the journal has no end."""
        self._fallback = status
        self._failed_at = 0.0
        self._wake.set()

    def stop(self) -> None:
        """Makes the delivery end after the call of the sink that is under way; from any thread."""
        self._stopped = True
        self._wake.set()

    def step(self) -> bool:
        """Makes one attempt and says whether to go on at once. Whatever the sink raises ends here."""
        if self._pause() > 0:
            return False
        try:
            moved = self._advance()
        except PermanentSinkError as error:
            self._disable(error)
        except (Exception, SystemExit) as error:  # a backend that calls sys.exit would end its thread in silence
            self._retry_later(error)
        else:
            self._save_when_due()
            return moved
        return False

    def _advance(self) -> bool:
        self._caught_up = False
        moved = bool(self._batch) or self._read()
        if self._info is not None and not self._opened and not self._cursor.closed:
            self._open(self._info)
        if self._batch:
            self._write()
        elif not moved and self._cursor.end is not None:
            self._close(self._cursor.end)
        return moved

    def _read(self) -> bool:
        """Takes in the next lines; at the end of a journal that goes no further, its end."""
        entries = self._reader.read(self._batch_size)
        self._caught_up = 0 < len(entries) < self._batch_size
        for entry in entries:
            self._take_in(entry)
        if not self._batch:
            self._move(offset=self._reader.offset)
        if not entries and self._cursor.end is None and self._fallback is not None:
            self._move(end=self._fallback)
        return bool(entries)

    def _take_in(self, entry: Entry) -> None:
        match entry:
            case RunInfo():
                self._describe(entry)
                self._move(end=None, closed=False)
            case Record() if entry.axes.update <= self._held:
                self._move(end=None, closed=False, seq=entry.seq, records=self._cursor.records + 1)
            case Record():
                self._batch.append(entry)
                self._move(end=None, closed=False)
            case Alarm() if self._alarm is not None and entry.axes.update > self._held:
                self._batch.append(entry)
            case JournalEvent(type="metrics") if self._info is not None:
                self._info.metrics.update(entry.data)
            case End():
                self._move(end=entry.status)

    def _describe(self, info: RunInfo) -> None:
        """The sink keeps the `RunInfo` it was opened with, so a resumed run adds its descriptions to that."""
        if self._info is None or not self._opened:
            earlier, self._info = self._info, info
            info.metrics.update({**(earlier.metrics if earlier else {}), **info.metrics})
        else:
            self._info.metrics.update(info.metrics)

    def _open(self, info: RunInfo) -> None:
        prepare = getattr(self.sink, "prepare_child", None)
        if self._must_prepare and prepare is not None:
            prepare()
        self._must_prepare = False
        self.sink.open(info)
        if self._paced:
            gc.freeze()  # the backends' modules stay: to go through them again and again took a third of MLflow's time
        self._opened = True
        held = getattr(self.sink, "held", None)
        self._reconcile(None if held is None else held(info))
        self._recall()
        self._worked()

    def _reconcile(self, held: int | None) -> None:
        """Goes through the journal again where the sink knows what its backend holds, and passes over that."""
        if held is not None:
            self._held = held
            self._batch.clear()
            self._reader.offset = 0
            self._move(offset=0, seq=0, records=0, end=None)

    def _recall(self) -> None:
        """Tells the sink of the alarms that it was sent before it was opened this time."""
        recall = getattr(self.sink, "recall", None)
        if recall is None:
            return
        before = None if self._held else self._cursor.offset
        known = [alarm for alarm in self._reader.alarms(before) if not self._held or alarm.axes.update <= self._held]
        if known:
            recall(known)

    def _write(self) -> None:
        """Delivers all that was read; what the sink has taken of it is not sent again when something later fails."""
        while self._batch:
            self._write_next()
        if self._taken:
            self._move(seq=self._taken[-1].seq, records=self._cursor.records + len(self._taken))
            self._taken.clear()
        self._move(offset=self._reader.offset)
        self._worked()

    def _write_next(self) -> None:
        """The records up to the next alarm, or that alarm."""
        first = self._batch[0]
        if isinstance(first, Alarm):
            if self._alarm is not None:
                self._alarm(first)
            del self._batch[0]
            return
        ready: list[Record] = []
        for entry in self._batch:
            if isinstance(entry, Alarm):
                break
            ready.append(entry)
        self.sink.write(tuple(ready))
        del self._batch[: len(ready)]
        self._taken.extend(ready)

    def _close(self, status: RunStatus) -> None:
        if self._opened:
            self.sink.close(status)
        self._move(closed=True)
        self._failures = 0
        self._state = SinkState.CLOSED

    def _worked(self) -> None:
        self._failures = 0
        self._state = SinkState.DELIVERING

    def _retry_later(self, error: BaseException) -> None:
        self._note(error)
        if self._errors == 1:
            message = "esper-telemetry: sink %s failed (%s); it is tried again, and the journal keeps everything"
            _logger.warning(message, self.name, self._last_error)
        self._failures += 1
        self._failed_at = time.monotonic()
        self._state = SinkState.RETRYING
        if self._failures == self._patience:
            self.stop()

    def _pause(self) -> float:
        """Seconds until the next attempt."""
        if not self._failures:
            return 0.0
        longest = LONGEST_RETRY_SECONDS if self._fallback is None else LONGEST_RETRY_AT_END_SECONDS
        delay = min(longest, FIRST_RETRY_SECONDS * 2.0 ** min(self._failures - 1, 10))
        return self._failed_at + delay - time.monotonic()

    def _disable(self, error: PermanentSinkError) -> None:
        self._note(error)
        _logger.error("esper-telemetry: sink %s is DISABLED for this run: %s", self.name, self._last_error)
        self._state = SinkState.DEAD_CLIENT if isinstance(error, DeadClientError) else SinkState.DISABLED

    def _note(self, error: BaseException) -> None:
        self._errors += 1
        self._last_error = one_line(error)
        _logger.debug("sink %s raised", self.name, exc_info=error)

    def _resume(self, cursor: Cursor) -> None:
        self._cursor = self._saved = cursor
        self._saved_at = 0.0
        if cursor.offset:
            self._reader.offset = cursor.offset
            self._info = self._reader.head()

    def _move(self, **changes: Any) -> None:
        self._cursor = replace(self._cursor, **changes)

    def _save_when_due(self) -> None:
        if self._cursor != self._saved and time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self._save()

    def _save(self) -> None:
        if self._cursors is not None and self._cursor != self._saved:
            self._cursors.save(self.name, self._cursor)
            self._saved, self._saved_at = self._cursor, time.monotonic()


def one_line(error: BaseException) -> str:
    """An exception as one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
