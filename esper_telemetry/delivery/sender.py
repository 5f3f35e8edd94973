"""One sink is given what was read, piece by piece, and a record that it refuses is put aside.

What one delivery has read and its sink has still to take.

The calls of one sink: how long the one under way has lasted, and what they have raised.

Whether a sink is called: it is while it works, not for a while after it failed, and then with one record to see.

Records that a backend refuses for good: `dead_letter.jsonl` in the run directory, so that one of them does not hold up the rest.

What a sink's exception says: that the backend cannot be reached, or that it does not want this record.

Times in which a process was stopped, so that nothing it waited for could have come.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final

from esper_telemetry.core.record import Alarm, Record
from esper_telemetry.delivery.status import one_line
from esper_telemetry.journal.lines import encode_record, to_json
from esper_telemetry.sinks.protocol import PermanentSinkError, PoisonRecordError, Sink


class RecordBatch:
    """Records and alarms in the order of the journal, and how many records go at once: fewer after a refusal, to find what is refused.

    Attributes:
        taken: records that left it since `clear_taken`.
    """

    def __init__(self) -> None:
        self.taken: list[Record] = []
        self._entries: list[Record | Alarm] = []
        self._most: int | None = None

    def __bool__(self) -> bool:
        return bool(self._entries)

    def append(self, entry: Record | Alarm) -> None:
        """Adds what was read."""
        self._entries.append(entry)

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()
        self.taken.clear()
        self._most = None

    def clear_taken(self) -> None:
        """Forgets what has left; called when all of it is noted."""
        self.taken.clear()
        self._most = None

    def alarm(self) -> Alarm | None:
        """The alarm that is next, if one is."""
        first = self._entries[0]
        return first if isinstance(first, Alarm) else None

    def records(self, most: int | None = None) -> Sequence[Record]:
        """The records that go next: up to the next alarm, and at most so many."""
        limit = min(self._most or len(self._entries), most or len(self._entries))
        ready: list[Record] = []
        for entry in self._entries[:limit]:
            if isinstance(entry, Alarm):
                break
            ready.append(entry)
        return tuple(ready)

    def after(self, record: Record, most: int) -> Sequence[Record]:
        """The first so many records behind that one, as far as they are here."""
        later = (entry for entry in self._entries if isinstance(entry, Record) and entry.seq > record.seq)
        return tuple(islice(later, most))

    def halve(self, size: int) -> None:
        """Lets at most half of that many records go at once."""
        self._most = max(1, size // 2)

    def drop_alarm(self) -> None:
        """The next alarm was delivered."""
        del self._entries[0]

    def take(self, records: Sequence[Record]) -> None:
        """These records were delivered."""
        self.remove(records)
        self.taken.extend(records)

    def remove(self, records: Sequence[Record]) -> None:
        """These records leave, delivered or not."""
        gone = {record.seq for record in records}
        self._entries = [entry for entry in self._entries if isinstance(entry, Alarm) or entry.seq not in gone]


class Calls:
    """Watches the calls of one sink.

    Attributes:
        errors: exceptions so far.
        last_error: the latest of them in one line.
    """

    def __init__(self, name: str) -> None:
        self.errors = 0
        self.last_error = ""
        self._name = name
        self._begun: tuple[float, float] | None = None
        self._paused = 0.0

    @property
    def seconds(self) -> float:
        """For how long the call that is under way has lasted, without pauses; 0 where none is. From any thread."""
        if (found := self._begun) is None:
            return 0.0
        begun, paused = found
        return max(0.0, time.monotonic() - begun - (self._paused - paused))

    def paused(self, seconds: float) -> None:
        """The whole process was stopped for so long: no call could come back."""
        self._paused += seconds

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around a call."""
        self._begun = (time.monotonic(), self._paused)
        try:
            yield
        finally:
            self._begun = None

    def failed(self, error: BaseException) -> None:
        """Notes an error, and shows the first one."""
        self.note(error)
        if self.errors == 1:
            message = "esper-telemetry: sink %s failed (%s); it is tried again, and the journal keeps everything"
            _logger.warning(message, self._name, self.last_error)

    def note(self, error: BaseException) -> None:
        """Notes an error that somebody else shows."""
        self.errors += 1
        self.last_error = one_line(error)
        _logger.debug("sink %s raised", self._name, exc_info=error)


FIRST_RETRY_SECONDS: Final = 0.5
LONGEST_RETRY_SECONDS: Final = 60.0
LONGEST_RETRY_AT_END_SECONDS: Final = 2.0
"""Between attempts once no more lines come: somebody waits for the end."""
JITTER: Final = 0.25
"""Share by which a pause is shortened at random: a hundred runs whose server comes back must not all call at once."""


class Breaker:
    """The circuit breaker of one sink: closed while it works, open after a failure, half-open for one attempt after a pause.

    Args:
        failures: in a row, so far; the first pause follows from it.
        draw: gives a random number in [0, 1).
    """

    def __init__(self, failures: int = 0, *, draw: Callable[[], float] = random.random) -> None:
        self.failures = failures
        self._draw = draw
        self._until = time.monotonic() + self._delay(LONGEST_RETRY_SECONDS) if failures else 0.0

    @property
    def half_open(self) -> bool:
        """Whether the next call is a trial: as little as possible goes with it."""
        return self.failures > 0

    def pause(self) -> float:
        """Seconds until the next attempt; 0 or less where it may be made now."""
        return self._until - time.monotonic() if self.failures else 0.0

    def worked(self) -> None:
        """Closes: the sink took what it was given."""
        self.failures = 0

    def failed(self, *, at_end: bool = False) -> None:
        """Opens: for 0.5 s after the first failure, then for twice as long, up to a minute; `at_end` up to two seconds."""
        self.failures += 1
        longest = LONGEST_RETRY_AT_END_SECONDS if at_end else LONGEST_RETRY_SECONDS
        self._until = time.monotonic() + self._delay(longest)

    def hurry(self) -> None:
        """Makes the next attempt possible at once."""
        self._until = 0.0

    def _delay(self, longest: float) -> float:
        delay = min(longest, FIRST_RETRY_SECONDS * 2.0 ** min(self.failures - 1, 10))
        return delay * (1.0 - JITTER * self._draw())


DEAD_LETTER_NAME: Final = "dead_letter.jsonl"


def quarantine(run_dir: Path | None, sink: str, record: Record, error: str) -> None:
    """Notes the record, the sink that refuses it and what it says; a full disk costs the note, the journal has the record."""
    if run_dir is None:
        return
    line = {"kind": "dead_letter", "sink": sink, "time": time.time(), "error": error, "record": encode_record(record)}
    with suppress(OSError), (run_dir / DEAD_LETTER_NAME).open("ab", buffering=0) as file:
        file.write(to_json(line))
        os.fsync(file.fileno())


SUSPICIOUS_AFTER = 4
"""Failures in a row of one record after which an exception that says nothing may be the record's fault."""

OF_THE_WORLD = (OSError, MemoryError, EOFError, SystemExit)
"""Network, disk, memory, a client that gives up; time-outs and refused connections are OSError: none is a record's fault."""
OF_THE_DATA = (PoisonRecordError, ValueError, TypeError, ArithmeticError, LookupError)


def may_be_the_records(error: BaseException, failures: int) -> bool:
    """Whether one of the records may be what the sink cannot take, after so many failures in a row before."""
    if isinstance(error, OF_THE_WORLD):
        return False
    return isinstance(error, OF_THE_DATA) or failures >= SUSPICIOUS_AFTER


OTHERS: Final = 8
"""How many of the next records are tried before a refusal is taken for the sink's."""

_logger = logging.getLogger("esper_telemetry")


class Sender:
    """Gives a sink the next records, or the next alarm; one record where the sink has failed before.

    A batch that is refused is halved until the record is alone that the sink does not take while it takes the next one.

    Args:
        sink: what is called.
        name: what it is called by.
        run_dir: where records that are refused are noted.
        breaker: says whether the sink has failed before; it is closed when the sink takes something.
        calls: watches the calls.

    Attributes:
        batch: what is still to be given.
        wall_time: when the last record that the sink took was made; None before the first.
        sent: records that the sink took.
        refused: records that were put aside.
    """

    def __init__(self, sink: Sink, name: str, run_dir: Path | None, breaker: Breaker, calls: Calls) -> None:
        self.batch = RecordBatch()
        self.wall_time: float | None = None
        self.sent = self.refused = 0
        self.alarm: Callable[[Alarm], object] | None = getattr(sink, "alarm", None)
        self._sink, self._name, self._run_dir = sink, name, run_dir
        self._breaker, self._calls = breaker, calls

    def send(self, *, at_end: bool, any_before: bool) -> None:
        """One call of the sink; raises what it raises unless that is a record's fault.

        Args:
            at_end: whether no more lines come.
            any_before: whether the sink has taken a record before this batch.
        """
        alarm = self.batch.alarm()
        if alarm is not None:
            self._tell(alarm)
            return
        records = self.batch.records(1 if self._breaker.half_open else None)
        try:
            self._write(records)
        except PermanentSinkError:
            raise
        except Exception as error:
            if not may_be_the_records(error, self._breaker.failures):
                raise
            self._refuse(records, error, lonely=at_end and (any_before or bool(self.batch.taken)))
        else:
            self._breaker.worked()

    def _tell(self, alarm: Alarm) -> None:
        if self.alarm is not None:
            with self._calls.one():
                self.alarm(alarm)
        self.batch.drop_alarm()

    def _write(self, records: Sequence[Record]) -> None:
        with self._calls.one():
            self._sink.write(records)
        self.batch.take(records)
        self.sent += len(records)
        self.wall_time = records[-1].axes.wall_time

    def _refuse(self, records: Sequence[Record], error: Exception, *, lonely: bool) -> None:
        """Looks for the record that the sink does not want; raises the error where that is not known yet."""
        named = error.index if isinstance(error, PoisonRecordError) else None
        if named is not None and 0 <= named < len(records):
            self._put_aside(records[named], error)
        elif len(records) > 1:
            self._calls.failed(error)
            self.batch.halve(len(records))
        elif self._takes_others(records[0], error, lonely=lonely):
            self._put_aside(records[0], error)
        else:
            raise error

    def _takes_others(self, record: Record, error: Exception, *, lonely: bool) -> bool:
        """Whether the sink takes one of the next records, some of which may be refused too; raises the error where it takes none.

        The last records of a run (`lonely`) are judged by whether the sink took any before.
        """
        following = self.batch.after(record, OTHERS)
        for other in following:
            try:
                self._write((other,))
            except Exception as another:
                if isinstance(another, OF_THE_WORLD):
                    raise
            else:
                return True
        if len(following) == OTHERS:
            raise error
        return lonely

    def _put_aside(self, record: Record, error: Exception) -> None:
        self._calls.failed(error)
        quarantine(self._run_dir, self._name, record, self._calls.last_error)
        self.batch.remove((record,))
        self.refused += 1
        if self.refused == 1:
            message = "esper-telemetry: sink %s refuses record %d (%s): it is left out, see dead_letter.jsonl"
            _logger.warning(message, self._name, record.seq, self._calls.last_error)


PAUSE_SECONDS: Final = 5.0
"""More than that between two looks of a loop that looks several times a second is a pause."""


class Pauses:
    """Notices that the process was stopped: by Ctrl-Z, by a scheduler that suspends jobs, in a container that is frozen.

    A client that was stopped with everything else does not hang.
    """

    def __init__(self) -> None:
        self._looked = time.monotonic()

    def last(self) -> float:
        """Seconds of the pause since the last look; 0 where there was none."""
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        return since if since > PAUSE_SECONDS else 0.0
