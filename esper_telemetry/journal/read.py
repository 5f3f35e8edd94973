"""Reading a journal as a whole: `read_run` for notebooks and views, `read_contents` for a summary, or entries one by one.

`end_after_parent` writes the end line of a run whose trainer was killed, from a process that outlives it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from esper_telemetry.core.record import Alarm, AlarmEvent, Axes, Record, RunInfo, RunStatus
from esper_telemetry.journal.file import LOST, DamagedLine, JournalReader, damage_sentence, end_if_open, journal_path
from esper_telemetry.journal.lines import Entry, JournalEvent, end_status, merge_head

if TYPE_CHECKING:
    import pandas as pd


CHUNK_LINES: Final = 1000
MAX_PARSED_NUMBERS: Final = 1 << 18
"""Numbers of a run up to which its records are kept in memory: 2,000 records of 120 keys."""
MAX_EXIT_SECONDS: Final = 1.0
"""A process that ends closes its pipes a moment before it is gone."""


@dataclass(frozen=True, slots=True)
class JournalContents:
    """Summary of a journal.

    Attributes:
        info: the last `run` line, with the descriptions of keys after it.
        axes: axes of the last record; None before the first.
        records: number of records.
        seq: number of the last line.
        status: how the run ended; None without an end line.
        lost: number of lines that could not be written because the disk was full for too long.
        failure: the event of the last exception that ended a part of the run; None without one.
        damaged: numbers of the lines that could not be understood.
        offset: position in the journal, in bytes, after the last line.
    """

    info: RunInfo
    axes: Axes | None
    records: int
    seq: int
    status: RunStatus | None
    lost: int = 0
    failure: JournalEvent | None = None
    damaged: tuple[DamagedLine, ...] = ()
    offset: int = 0

    @property
    def recorded(self) -> int:
        """Last update with a record; 0 before the first."""
        return self.axes.update if self.axes else 0


def run_info(run_dir: str | os.PathLike[str]) -> RunInfo:
    """Return the run in a directory, without reading its records; raises as `read_contents`."""
    path = journal_path(run_dir)
    with closing(JournalReader(path)) as reader:
        return _required(reader.head(before=sys.maxsize), path)


def read_contents(run_dir: str | os.PathLike[str], *, known: JournalContents | None = None, values: bool = True) -> JournalContents:
    """Return the summary of the journal in a run directory.

    Args:
        run_dir: directory of the run.
        known: summary of the first lines, after which reading begins.
        values: False to skip the values of records, which takes a fiftieth of the time.

    Raises:
        FileNotFoundError: the directory or the journal does not exist.
        ValueError: the journal does not say which run it is.
    """
    path = journal_path(run_dir)
    info, axes, records, seq, status, lost, failure, _, offset = (
        (None, None, 0, 0, None, 0, None, (), 0) if known is None else [getattr(known, field.name) for field in fields(known)]
    )
    reader = JournalReader(path, offset)
    for chunk in _summarized(reader) if values and offset == 0 else iter(partial(reader.read, CHUNK_LINES, values=values), []):
        info, status = merge_head(info, chunk), end_status(chunk)
        seq = max([seq, *(entry.seq for entry in chunk if not isinstance(entry, RunInfo))])
        record_axes = [entry.axes for entry in chunk if isinstance(entry, Record)]
        records += len(record_axes)
        lost += sum(entry.data.get("lines", 0) for entry in chunk if isinstance(entry, JournalEvent) and entry.type == LOST)
        failures = [entry for entry in chunk if isinstance(entry, JournalEvent) and entry.type == "failure"]
        failure = failures[-1] if failures else failure
        axes = max([*record_axes, *([axes] if axes else [])], key=lambda each: each.update, default=None)
    damaged, offset = reader.damaged_lines(), reader.offset
    reader.close()
    return JournalContents(_required(info, path), axes, records, seq, status, lost, failure, damaged, offset)


def _summarized(reader: JournalReader) -> Iterator[list[Entry]]:
    """Yield what a summary needs of the lines after a reader's offset, from their columns."""
    from esper_telemetry.journal.record_columns import is_event, segments

    for segment in segments(reader):
        last = segment.last_line
        wanted = {LOST, "failure", last.kind if last else LOST}
        others = segment.other_entries(reader, lambda kind, wanted=wanted: kind in wanted or not is_event(kind))  # type: ignore[misc]
        records = zip(segment.counts.tolist(), segment.times.tolist(), strict=True)
        yield [
            *(entry for line, entry in others if line is not last),
            *(Record(seq, Axes(update, step, gradient_step, time), {}) for (seq, update, step, gradient_step, _), time in records),
            *(entry for line, entry in others if line is last),
        ]


def entries(run_dir: str | os.PathLike[str], offset: int = 0) -> Iterator[Entry]:
    """Yield the entries of a journal, line by line, from a position at the beginning of a line."""
    with closing(JournalReader(journal_path(run_dir), offset)) as reader:
        while chunk := reader.read(CHUNK_LINES):
            yield from chunk


def damaged_lines(run_dir: str | os.PathLike[str]) -> tuple[DamagedLine, ...]:
    """Return the numbers of damaged lines of a journal, from 1; raises FileNotFoundError without a journal."""
    with closing(JournalReader(journal_path(run_dir))) as reader:
        while reader.read(CHUNK_LINES):
            pass
        return reader.damaged_lines()


def alarms(run_dir: str | os.PathLike[str]) -> tuple[Alarm, ...]:
    """Return the alarms of a journal in the order of its lines, without parsing its records."""
    with closing(JournalReader(journal_path(run_dir))) as reader:
        return reader.alarms()


def events_of(run_dir: str | os.PathLike[str], *kinds: str) -> list[JournalEvent]:
    """Return the events of these types in the order of a journal's lines, without parsing its records."""
    with closing(JournalReader(journal_path(run_dir))) as reader:
        return reader.events_of(kinds)


def last_outcome(run_dir: str | os.PathLike[str]) -> JournalEvent | None:
    """Return the last outcome in a journal, without parsing its records, or None."""
    return next(reversed(events_of(run_dir, "outcome")), None)


def _required(info: RunInfo | None, path: Path) -> RunInfo:
    if info is None:
        damaged = damaged_lines(path.parent)
        because = f": {damage_sentence(path, damaged)}" if damaged else ""
        raise ValueError(f"{path} has no line that describes the run{because}")
    return info


MAX_SHOWN_ALARMS: Final = 5
"""Types of alarm in the `repr` of a run, most frequent first."""


@dataclass(frozen=True, slots=True)
class Run:
    """The content of a journal. Records and events of a long run are parsed each time they are asked for: 100,000 records take 6 GB.

    Attributes:
        info: the last `run` line, with all descriptions of keys.
        records: one per update, in order; if an update has two, the first counts, as in backends, which cannot retract it.
        alarms: beginning, worsening and end of each, in order.
        events: all other events, without descriptions of keys.
        status: how the run ended; None if it continues, or was killed together with its helper processes.
        damaged: numbers of the lines, from 1, that were left out because they could not be understood.
    """

    info: RunInfo
    records: Sequence[Record]
    events: Sequence[JournalEvent] = ()
    status: RunStatus | None = None
    damaged: tuple[DamagedLine, ...] = ()
    alarms: tuple[Alarm, ...] = ()

    @property
    def skipped(self) -> int:
        """Number of `damaged` lines."""
        return len(self.damaged)

    def __repr__(self) -> str:
        """Return a few lines, even for a long run."""
        from esper_telemetry.journal.record_columns import RecordTable

        records = self.records
        keys = records.keys if isinstance(records, RecordTable) else {key for each in records for key in each.values}
        lines = [f"Run {self.info.name!r} in {self.info.run_dir}", f"  status   {self.status or 'no end yet'}"]
        if self.records:
            first, last = self.records[0].axes, self.records[-1].axes
            reach = f": update {first.update} to {last.update}, env_step {first.env_step} to {last.env_step}"
        else:
            reach = ""
        lines.append(f"  records  {len(self.records)} of {len(keys)} keys{reach}")
        raised = Counter(alarm.type for alarm in self.alarms if alarm.event is AlarmEvent.RAISE)
        named = ", ".join(f"{kind} ({count})" for kind, count in raised.most_common(MAX_SHOWN_ALARMS))
        more = f" and {len(raised) - MAX_SHOWN_ALARMS} types more" if len(raised) > MAX_SHOWN_ALARMS else ""
        lines.append(f"  alarms   {named or 'none'}{more}")
        if self.skipped:
            lines.append(f"  skipped  {self.skipped} lines that could not be understood")
        return "\n".join([*lines, "  .to_pandas() makes a table of the records"])

    def to_pandas(self) -> pd.DataFrame:
        """Return a frame indexed by update, with one column per axis and per key; NaN if a key is absent.

        Raises ImportError without pandas.
        """
        try:
            import pandas as pd
        except ImportError:
            raise ImportError("Run.to_pandas needs pandas: pip install pandas") from None
        from esper_telemetry.journal.record_columns import RecordTable, SegmentBuilder

        records = self.records
        if isinstance(records, RecordTable):
            counts, times, keys, values = records.counts, records.times, records.keys, records.values(records.keys)
        else:
            builder = SegmentBuilder(0)
            for record in records:
                builder.add(0, b"", record)
            segment = builder.segment(0)
            counts, times, keys, values = segment.counts, segment.times, segment.keys, segment.values
        # The numbers exist only once: rows of 100,000 updates took 7 GB.
        frame = pd.DataFrame(values, index=pd.Index(counts[:, 1], name="update"), columns=[*keys], copy=False)
        axes = {"env_step": counts[:, 2], "gradient_step": counts[:, 3], "wall_time": times}
        for place, (name, column) in enumerate(axes.items()):
            if name in frame:  # a key with the same name
                del frame[name]
            frame.insert(place, name, column)
        return frame


def read_run(run_dir: str | os.PathLike[str]) -> Run:
    """Read the journal in a run directory so far; log a warning if lines of it are damaged.

    Raises:
        FileNotFoundError: the journal does not exist.
        ValueError: the journal does not say which run it is.
    """
    from esper_telemetry.journal.record_columns import RecordTable

    table = RecordTable(path := journal_path(run_dir))
    info = _required(merge_head(None, table.head), path)
    is_long = len(table) * len(table.keys) > MAX_PARSED_NUMBERS
    records, events = (table, table.events) if is_long else (tuple(table), tuple(table.events))
    return Run(info, records, events, table.status, table.damaged, tuple(table.alarms))


def end_after_parent(parent: int, run_dir: Path) -> bool:
    """End the run as killed if the trainer with that process ID, the parent of this process, is gone; return whether it did.

    A trainer that closes the pipe and continues makes the records itself from then on.
    """
    deadline = time.monotonic() + MAX_EXIT_SECONDS
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.01)
    if os.getppid() == parent:
        return False
    with suppress(OSError, ValueError):  # a full disk, or no run line yet: the end line is not written
        return end_if_open(run_dir, RunStatus.KILLED)
    return False
