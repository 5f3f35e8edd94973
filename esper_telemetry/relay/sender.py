"""One sink is given what was read, piece by piece, and a record that it refuses is put aside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from esper_telemetry.record import Alarm, Record
from esper_telemetry.relay.batch import Batch
from esper_telemetry.relay.breaker import Breaker
from esper_telemetry.relay.calls import Calls
from esper_telemetry.relay.quarantine import quarantine
from esper_telemetry.relay.refusal import OF_THE_WORLD, may_be_the_records
from esper_telemetry.sinks.protocol import PermanentSinkError, PoisonRecordError, Sink

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
        self.batch = Batch()
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
