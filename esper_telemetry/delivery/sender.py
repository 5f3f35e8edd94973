"""Calls of one sink: the next records, the pause after a failure, and the record that it refuses.

A sink that raises is called again after a pause (`CircuitBreaker`), first with one record. If a record may have caused the exception,
the batch is halved until one record is left. If the sink refuses this record and takes a later one, the record goes to
`dead_letter.jsonl`, and delivery continues. An undelivered alarm holds up the records after it, because in a sink order is more
important than speed.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final

from esper_telemetry.core.backends import client_error
from esper_telemetry.core.files import open_own
from esper_telemetry.core.record import Alarm, Record
from esper_telemetry.core.supervisor import REPORTED
from esper_telemetry.journal.lines import JournalEvent, encode_record, to_json
from esper_telemetry.sinks.sink_protocol import PermanentSinkError, PoisonRecordError, Sink, SupportsAlarms, SupportsOutcome

FIRST_RETRY_SECONDS: Final = 0.5
MAX_RETRY_SECONDS: Final = 60.0
MAX_RETRY_SECONDS_AT_END: Final = 2.0
"""Maximum pause between attempts once the journal is complete, because `close` waits for the end."""
RETRY_JITTER: Final = 0.25
"""Fraction by which a pause is shortened at random, so that a hundred runs do not call a recovered server at once."""

SLOW_CALL_SECONDS: Final = 10
"""Duration of a sink's call after which its delivery is reported as slow."""
MAX_TRIAL_RECORDS: Final = 8
"""How many of the next records are tried before a refusal is considered the sink's own fault."""
MIN_SUSPECT_FAILURES: Final = 4
"""Failures in a row with one record after which an unspecific exception may be the record's fault."""
INFRASTRUCTURE_ERRORS: Final = (OSError, MemoryError, EOFError, SystemExit)
"""Network, disk, memory, a client that gives up; time-outs and refused connections are OSError. A record never causes these."""
DATA_ERRORS: Final = (PoisonRecordError, ValueError, TypeError, ArithmeticError, LookupError)

DEAD_LETTER_NAME: Final = "dead_letter.jsonl"

_logger = logging.getLogger("esper_telemetry")


class SinkCalls:
    """The calls of one sink: duration of the call under way, and the errors.

    Attributes:
        errors: exceptions so far.
        last_error: the latest exception in one line.
    """

    def __init__(self, name: str) -> None:
        self.errors = 0
        self.last_error = ""
        self._name = name
        self._call: tuple[float, float] | None = None  # when it began, and the pauses until then
        self._pause_seconds = 0.0

    @property
    def seconds(self) -> float:
        """Duration of the call under way, without pauses of the process, or 0. Callable from any thread."""
        if (call := self._call) is None:
            return 0.0
        begun_at, pause_seconds = call
        return max(0.0, time.monotonic() - begun_at - (self._pause_seconds - pause_seconds))

    @property
    def slowness(self) -> str:
        """Duration of the call under way in words, once it is long; the text changes each time the duration has doubled."""
        seconds = self.seconds
        if seconds < SLOW_CALL_SECONDS:
            return ""
        return f"no answer for more than {SLOW_CALL_SECONDS << int(math.log2(seconds / SLOW_CALL_SECONDS))} s"

    def exclude_pause(self, seconds: float) -> None:
        """Exclude a time in which the whole process was stopped, so that no call could return."""
        self._pause_seconds += seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the call inside."""
        self._call = (time.monotonic(), self._pause_seconds)
        try:
            yield
        finally:
            self._call = None

    def record_failure(self, error: BaseException) -> None:
        """Count an error, and log a warning for the first one."""
        self.record_error(error)
        if self.errors == 1:
            message = "esper-telemetry: sink %s failed (%s); it is tried again, and the journal keeps the records"
            _logger.warning(message, self._name, self.last_error, extra=REPORTED)

    def record_error(self, error: BaseException) -> None:
        """Count an error that the caller reports."""
        self.errors += 1
        self.last_error = client_error(error)
        _logger.debug("sink %s raised", self._name, exc_info=error)


class CircuitBreaker:
    """The circuit breaker of one sink: closed while it works, open after a failure, half-open for one attempt after a pause.

    Args:
        failures: failures in a row so far; they determine the first pause.

    Attributes:
        failures: failures in a row; if there are any, the next call is a trial, which should carry as little as possible.
    """

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self._open_until = time.monotonic() + self._delay(MAX_RETRY_SECONDS) if failures else 0.0

    def pause(self) -> float:
        """Return the seconds until the next attempt; 0 or less if it may be made now."""
        return self._open_until - time.monotonic() if self.failures else 0.0

    def record_success(self) -> None:
        """Close the breaker."""
        self.failures = 0

    def record_failure(self, *, at_end: bool = False) -> None:
        """Open: for 0.5 s after the first failure, then twice as long each time, up to a minute, or two seconds if `at_end`."""
        self.failures += 1
        self._open_until = time.monotonic() + self._delay(MAX_RETRY_SECONDS_AT_END if at_end else MAX_RETRY_SECONDS)

    def retry_now(self) -> None:
        """Allow the next attempt at once."""
        self._open_until = 0.0

    def _delay(self, longest: float) -> float:
        delay = min(longest, FIRST_RETRY_SECONDS * 2.0 ** min(self.failures - 1, 10))
        return delay * (1.0 - RETRY_JITTER * random.random())


class Sender:
    """Sends the next records, or the next alarm or outcome, to a sink.

    Args:
        sink: the sink.
        name: name in messages and dead letters.
        run_dir: directory for dead letters; None drops them.
        breaker: knows whether the sink has failed before, and is closed when the sink takes something.
        calls: times the calls.

    Attributes:
        batch: records, alarms and outcomes that wait for the sink, in the order of the journal.
        taken: records that the sink took since `clear_taken`.
        wall_time: when the last record that the sink took was made; None before the first.
        sent: number of records that the sink took.
        refused: number of records that went to `dead_letter.jsonl`.
    """

    def __init__(self, sink: Sink, name: str, run_dir: Path | None, breaker: CircuitBreaker, calls: SinkCalls) -> None:
        self.batch: list[Record | Alarm | JournalEvent] = []
        self.taken: list[Record] = []
        self.wall_time: float | None = None
        self.sent = self.refused = 0
        self._max_records: int | None = None
        self._sink, self._name, self._run_dir = sink, name, run_dir
        self._breaker, self._calls = breaker, calls

    def clear_taken(self) -> None:
        """Forget the records that the sink took, once the cursor is past them; full batches are allowed again."""
        self.taken.clear()
        self._max_records = None

    def send(self, *, at_end: bool, any_before: bool) -> None:
        """Make one call of the sink; raises its exception unless a record caused it.

        Args:
            at_end: whether the journal is complete.
            any_before: whether the sink has taken a record before this batch.
        """
        first = self.batch[0]
        if not isinstance(first, Record):
            with self._calls.timed():
                if isinstance(first, Alarm) and isinstance(self._sink, SupportsAlarms):
                    self._sink.alarm(first)
                elif isinstance(first, JournalEvent) and isinstance(self._sink, SupportsOutcome):
                    self._sink.outcome(first)
            del self.batch[0]
            return
        limit = 1 if self._breaker.failures else self._max_records
        ready: list[Record] = []
        for entry in self.batch[:limit]:
            if not isinstance(entry, Record):
                break
            ready.append(entry)
        records = tuple(ready)
        try:
            self._write(records)
        except PermanentSinkError:
            raise
        except Exception as error:
            is_suspect = isinstance(error, DATA_ERRORS) or self._breaker.failures >= MIN_SUSPECT_FAILURES
            if isinstance(error, INFRASTRUCTURE_ERRORS) or not is_suspect:  # the sink has not refused a record
                raise
            self._isolate(records, error, no_later_records=at_end and (any_before or bool(self.taken)))
        else:
            self._breaker.record_success()

    def _write(self, records: Sequence[Record]) -> None:
        with self._calls.timed():
            self._sink.write(records)
        self._remove(records)
        self.taken.extend(records)
        self.sent += len(records)
        self.wall_time = records[-1].axes.wall_time

    def _remove(self, records: Sequence[Record]) -> None:
        """Remove records from the batch, whether the sink took them or not."""
        seqs = {record.seq for record in records}
        self.batch = [entry for entry in self.batch if not isinstance(entry, Record) or entry.seq not in seqs]

    def _isolate(self, records: Sequence[Record], error: Exception, *, no_later_records: bool) -> None:
        """Find the record that the sink refuses and set it aside; raises the error if that record is not known yet."""
        index = error.index if isinstance(error, PoisonRecordError) else None
        if index is not None and 0 <= index < len(records):
            self._set_aside(records[index], error)
        elif len(records) > 1:
            self._calls.record_failure(error)
            self._max_records = len(records) // 2
        elif self._takes_later_record(records[0], error, no_later_records=no_later_records):
            self._set_aside(records[0], error)
        else:
            raise error

    def _takes_later_record(self, record: Record, error: Exception, *, no_later_records: bool) -> bool:
        """Return whether the sink takes one of the next records; raises the error if it refuses all of `MAX_TRIAL_RECORDS`.

        For the last records of a run (`no_later_records`), return whether the sink took any record before.
        """
        later = (entry for entry in self.batch if isinstance(entry, Record) and entry.seq > record.seq)
        following = tuple(islice(later, MAX_TRIAL_RECORDS))
        for other in following:
            try:
                self._write((other,))
            except Exception as another:
                if isinstance(another, INFRASTRUCTURE_ERRORS):
                    raise
            else:
                return True
        if len(following) == MAX_TRIAL_RECORDS:
            raise error
        return no_later_records

    def _set_aside(self, record: Record, error: Exception) -> None:
        """Append a record to `dead_letter.jsonl`. If the disk is full, the line is lost, but the journal has the record."""
        self._calls.record_failure(error)
        cause = self._calls.last_error
        if self._run_dir is not None:
            line = {"kind": "dead_letter", "sink": self._name, "time": time.time(), "error": cause, "record": encode_record(record)}
            with suppress(OSError):
                letters = open_own(self._run_dir / DEAD_LETTER_NAME, os.O_WRONLY | os.O_APPEND)
                try:
                    os.write(letters, to_json(line))
                    os.fsync(letters)
                finally:
                    os.close(letters)
        self._remove((record,))
        self.refused += 1
        if self.refused == 1:
            message = "esper-telemetry: sink %s refuses record %d (%s): it is left out, see dead_letter.jsonl"
            _logger.warning(message, self._name, record.seq, cause)
