"""Records of a journal as columns, and their cache in `columns/` in the run directory, because parsing 100,000 records takes ten seconds.

A segment holds the numbers of up to `SEGMENT_RECORDS` consecutive records, and the positions of all lines. It is a NumPy file, which is
written under another name and then renamed, so that a killed process leaves only complete segments. The journal is the source of truth: a
segment is used only while its part of the journal is unchanged, and the other lines are parsed. The directory may be deleted at any time.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from esper_telemetry.core.files import draft_of, read_file
from esper_telemetry.core.messages import printable
from esper_telemetry.core.record import Alarm, Axes, Record, RunInfo, RunStatus
from esper_telemetry.journal.file import JournalReader, journal_path
from esper_telemetry.journal.lines import RECORD_HEAD, End, Entry, JournalEvent, decode_line

T = TypeVar("T", Record, JournalEvent)
Array = npt.NDArray[np.float64]

COLUMNS_NAME: Final = "columns"
VERSION: Final = 1
SEGMENT_RECORDS: Final = 2000
POSITION: Final = 4
"""Column of `counts` with the position of a record's line."""
HISTOGRAMS: Final = b',"histograms":{'
NUMBER_BYTES: Final = b"0123456789.+-eE"
FORM: Final = re.compile(rb',"histograms":\{("[^"\\]*":\{"dgs":\[,*\],"counts":\[,*\]\},?)+\}\}')
"""Histograms at the end of a record, without `NUMBER_BYTES`."""
MAX_FORMS: Final = 16
"""Forms of histograms that are remembered; a run has one or two."""
BLOCK_RECORDS: Final = 100
"""Records whose numbers are converted at once."""
MAX_CELLS: Final = 1 << 21
"""Numbers of a segment, after which it ends: 16 MB."""
MAX_SEGMENT_BYTES: Final = 256 << 20
CHECKED_BYTES: Final = 4096
"""Bytes at either end of a segment's part of the journal that must be unchanged."""
KINDS: Final[Mapping[type, str]] = {RunInfo: "kind run", Alarm: "kind alarm", End: "kind end"}
"""Names of lines that are not events, which are not names of types of events."""
METRICS: Final = "metrics"
UNREADABLE: Final = (OSError, RecursionError, ValueError, TypeError, KeyError, IndexError, EOFError, MemoryError, zipfile.BadZipFile)


class OtherLine(NamedTuple):
    """A line that is not a record.

    Attributes:
        before: number of records before it in its segment.
        position, length: in the journal, in bytes.
        kind: type of an event; for other lines their kind.
    """

    before: int
    position: int
    length: int
    kind: str


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive lines of a journal.

    Attributes:
        begin, end: positions of the lines in the journal, in bytes.
        counts: [records, 5], the number of each record's line, its update, environment steps, gradient steps, and position.
        times: [records], when each was made.
        partial: [records], true for unfinished updates.
        keys: columns of `values`, in the order in which they appeared.
        values: [records, keys], NaN if a key is absent.
        others: all other lines.
        damage: positions of damaged lines, with the reasons.
    """

    begin: int
    end: int
    counts: npt.NDArray[np.int64]
    times: Array
    partial: npt.NDArray[np.bool_]
    keys: tuple[str, ...]
    values: Array
    others: Sequence[OtherLine] = ()
    damage: Sequence[tuple[int, str]] = ()

    def other_entries(self, reader: JournalReader, wanted: Callable[[str], bool]) -> list[tuple[OtherLine, Entry]]:
        """Return the other lines with their entries, whose kind is wanted, from a reader of the journal."""
        chosen = [line for line in self.others if wanted(line.kind)]
        decoded = ((line, reader.decode(reader.bytes_at(line.position, line.length), line.position)) for line in chosen)
        return [(line, entry) for line, entry in decoded if entry is not None]

    @property
    def last_line(self) -> OtherLine | None:
        """The last line, unless it is a record."""
        return self.others[-1] if self.others and self.others[-1].before == len(self.counts) else None

    def records(self, rows: Iterable[int]) -> Iterator[Record]:
        """Yield records without their histograms."""
        names: dict[bytes, list[str]] = {}  # few, which halves the time
        every_row = np.fromiter(rows, np.int64)
        for begin in range(0, len(every_row), BLOCK_RECORDS):
            block = every_row[begin : begin + BLOCK_RECORDS]
            present = ~np.isnan(self.values[block])
            columns = (self.values, self.counts, self.times, self.partial)
            for layout, numbers, counts, time, partial in zip(
                map(np.ndarray.tobytes, present), *(column[block].tolist() for column in columns), strict=True
            ):
                keys = names.get(layout)
                if keys is None:
                    keys = names[layout] = [*compress(self.keys, layout)]
                seq, update, env_step, gradient_step, _ = counts
                values = dict(zip(keys, compress(numbers, layout), strict=True))
                yield Record(seq, Axes(update, env_step, gradient_step, time), values, partial=partial)


class SegmentBuilder:
    """Collects the lines of a segment that begins at a position of the journal."""

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self._counts, self._times, self._numbers = array("q"), array("d"), array("d")
        self._partial: list[bool] = []
        # for each sequence of keys its columns, and its rows
        self._layouts: dict[tuple[str, ...], tuple[list[int], list[int]]] = {}
        self._starts: list[int] = []
        self._keys: dict[str, int] = {}
        self._others: list[OtherLine] = []

    @property
    def is_full(self) -> bool:
        """True if no more lines should be added."""
        return len(self._starts) >= SEGMENT_RECORDS or len(self._starts) * len(self._keys) >= MAX_CELLS

    def add(self, position: int, line: bytes, entry: Entry) -> None:
        """Add the line at a position and its entry."""
        if not isinstance(entry, Record):
            kind = entry.type if isinstance(entry, JournalEvent) else KINDS[type(entry)]
            self._others.append(OtherLine(len(self._starts), position, len(line), kind))
            return
        axes, layout = entry.axes, tuple(entry.values)
        if layout not in self._layouts:
            self._layouts[layout] = [self._keys.setdefault(key, len(self._keys)) for key in layout], []
        self._layouts[layout][1].append(len(self._starts))
        self._starts.append(len(self._numbers))
        self._numbers.extend(entry.values.values())
        self._counts.extend((entry.seq, axes.update, axes.env_step, axes.gradient_step, position))
        self._times.append(axes.wall_time)
        self._partial.append(entry.partial)

    def segment(self, end: int, damage: Sequence[tuple[int, str]] = ()) -> Segment:
        """Return the segment up to a position."""
        values = np.full((len(self._starts), len(self._keys)), np.nan)
        numbers, starts = np.frombuffer(self._numbers), np.array(self._starts, np.int64)
        for columns, rows in self._layouts.values():
            values[np.ix_(rows, columns)] = numbers[starts[rows][:, None] + np.arange(len(columns))]
        counts = np.array(self._counts, np.int64).reshape(-1, 5)
        partial = np.array(self._partial, np.bool_)
        keys = tuple(self._keys)
        return Segment(self._begin, end, counts, np.array(self._times), partial, keys, values, self._others, damage)


def segments(reader: JournalReader) -> Iterator[Segment]:
    """Yield the lines after a reader's offset as segments, and move the reader to its end; the last segments may be short.

    Full segments from the beginning of the journal on come from the cache, or are put there, if the directory permits it.
    """
    directory = reader.path.parent / COLUMNS_NAME
    is_cached = reader.offset == 0
    while True:
        segment = _stored(directory, reader) if is_cached else None
        if segment is None:
            segment, is_full = _built(reader)
            if segment.end == segment.begin:
                return
            is_cached = is_cached and is_full
            if is_cached:
                _store(directory, segment, reader)
        else:
            reader.offset = segment.end
            reader.damage.update(segment.damage)
        yield segment


def _built(reader: JournalReader) -> tuple[Segment, bool]:
    """Return the next segment, parsed from the journal, and whether it is full."""
    begin, known = reader.offset, len(reader.damage)
    builder, valid_forms = SegmentBuilder(begin), set[bytes]()
    while not builder.is_full and (lines := reader.lines()):
        for position, line in lines:
            if builder.is_full:
                reader.offset = position
                break
            if (entry := _decode_numbers(reader, line, position, valid_forms)) is not None:
                builder.add(position, line, entry)
    return builder.segment(reader.offset, [*reader.damage.items()][known:]), builder.is_full


def _decode_numbers(reader: JournalReader, line: bytes, position: int, valid_forms: set[bytes]) -> Entry | None:
    """Return the entry of the line at a position, without the histograms of a record, which have most of its numbers.

    Histograms are skipped if their text without digits, their form, is one of `valid_forms`, the forms of records that have been parsed.
    None, as `JournalReader`, for a damaged line.
    """
    begin = line.find(HISTOGRAMS) if line.startswith(RECORD_HEAD) else -1
    form = line[begin:].translate(None, NUMBER_BYTES) if begin > 0 else b""
    if form in valid_forms:
        record, _ = decode_line(line[:begin] + b"}")
        if record is not None:
            return record
    entry = reader.decode(line, position)
    if isinstance(entry, Record) and len(valid_forms) < MAX_FORMS and FORM.fullmatch(form):
        valid_forms.add(form)
    return entry


def _store(directory: Path, segment: Segment, reader: JournalReader) -> None:
    """Write a segment; if the disk refuses it, only time is lost."""
    head = {
        "version": VERSION,
        "end": segment.end,
        "checksum": _checksum(reader, segment.begin, segment.end),
        "keys": segment.keys,
        "others": segment.others,
        "damage": segment.damage,
    }
    with suppress(OSError):
        directory.mkdir(exist_ok=True)
        with draft_of(directory / f"{segment.begin}.npz") as draft, draft.open("wb") as file:
            np.savez(
                file,
                head=np.frombuffer(json.dumps(head).encode(), np.uint8),
                counts=segment.counts,
                times=segment.times,
                partial=segment.partial,
                values=segment.values,
            )


def _stored(directory: Path, reader: JournalReader) -> Segment | None:
    """Return the segment of the cache at a reader's offset; None without one that fits the journal."""
    begin = reader.offset
    try:
        content = read_file(directory / f"{begin}.npz", MAX_SEGMENT_BYTES)
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            if sum(item.file_size for item in packed.infolist()) > len(content):
                return None  # compressed by someone else: it may be larger than the memory
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            head = json.loads(arrays["head"].tobytes())
            end, keys = head["end"], tuple(printable(str(key)) for key in head["keys"])
            if head["version"] != VERSION or head["checksum"] != _checksum(reader, begin, end):
                return None
            others = [
                OtherLine(int(before), int(position), int(length), printable(str(kind)))
                for before, position, length, kind in head["others"]
            ]
            damage = [(int(position), printable(str(fault))) for position, fault in head["damage"]]
            counts, times = np.asarray(arrays["counts"], np.int64), np.asarray(arrays["times"], np.float64)
            partial, values = np.asarray(arrays["partial"], np.bool_), np.asarray(arrays["values"], np.float64)
    except UNREADABLE:  # the file may be damaged, or someone else's
        return None
    shapes = (counts.shape, times.shape, partial.shape, values.shape)
    rows = len(counts)
    fits = shapes == ((rows, 5), (rows,), (rows,), (rows, len(keys))) and begin < end
    if not fits or counts.min(initial=0) < 0 or not ((begin <= counts[:, POSITION]) & (counts[:, POSITION] < end)).all():
        return None
    values[np.isinf(values)] = np.nan  # in a journal all values are finite
    return Segment(begin, end, counts, times, partial, keys, values, others, damage)


def _checksum(reader: JournalReader, begin: int, end: int) -> int:
    """Return the checksum of the first and the last bytes of a part of the journal."""
    first = reader.bytes_at(begin, min(CHECKED_BYTES, end - begin))
    return zlib.crc32(reader.bytes_at(max(begin, end - CHECKED_BYTES), min(CHECKED_BYTES, end - begin)), zlib.crc32(first))


def is_event(kind: str) -> bool:
    """Return True for the kind of a line that is an event, other than descriptions of keys."""
    return kind not in (*KINDS.values(), METRICS)


class StoredEntries(Sequence[T]):
    """Entries of a journal that are parsed each time they are asked for.

    Args:
        path: path of the journal.
        positions: of their lines, in bytes.
    """

    def __init__(self, path: Path, positions: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self.path = path
        self._positions = np.asarray(positions, np.int64)

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[T]:
        return self._parsed(self._positions)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...

    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        """Return an entry, or a tuple of entries."""
        if isinstance(index, slice):
            return tuple(self._parsed(self._positions[index]))
        return next(self._parsed(self._positions[[index]]))

    def _parsed(self, positions: npt.NDArray[np.int64]) -> Iterator[T]:
        with closing(JournalReader(journal_path(self.path.parent))) as reader:
            lines: dict[int, bytes] = {}
            for position in positions.tolist():
                if position not in lines:
                    reader.offset = position
                    lines = dict(reader.lines())
                entry = reader.decode(lines[position], position)
                if not isinstance(entry, Record | JournalEvent):
                    raise ValueError(f"{self.path.parent / COLUMNS_NAME} does not fit the journal: delete this directory")
                yield cast(T, entry)


class RecordTable(StoredEntries[Record]):
    """The records of a journal so far, in the order of updates, without further records of an update.

    Attributes:
        counts: [records, 5], as in a segment.
        times: [records].
        keys: keys of the journal's records, in the order in which they appeared.
        head: lines that describe the run and its keys.
        alarms: all alarms.
        events: all other events.
        status: how the run ended; None if its last line is not its end.
        damaged: numbers of damaged lines.
    """

    def __init__(self, path: Path) -> None:
        keys: dict[str, None] = {}
        self.head: list[Entry] = []
        self.alarms: list[Alarm] = []
        self.status: RunStatus | None = None
        events: list[int] = []
        counts, times = [np.empty((0, 5), np.int64)], [np.empty(0)]
        with closing(JournalReader(path)) as reader:
            for segment in segments(reader):
                keys |= dict.fromkeys(segment.keys)
                counts.append(segment.counts)
                times.append(segment.times)
                self.status = None
                events += [line.position for line in segment.others if is_event(line.kind)]
                for line, entry in segment.other_entries(reader, lambda kind: not is_event(kind)):
                    match entry:
                        case Alarm():
                            self.alarms.append(entry)
                        case RunInfo() | JournalEvent():
                            self.head.append(entry)
                        case End() if line is segment.last_line:
                            self.status = entry.status
            self.damaged = reader.damaged_lines()
        every_count = np.concatenate(counts)
        _, self._rows = np.unique(every_count[:, 1], return_index=True)
        self.keys, self.counts, self.times = tuple(keys), every_count[self._rows], np.concatenate(times)[self._rows]
        self.events: StoredEntries[JournalEvent] = StoredEntries(path, events)
        super().__init__(path, self.counts[:, POSITION])

    def without_histograms(self) -> Iterator[Record]:
        """Yield the records without their histograms, which takes a tenth of the time."""
        if np.any(np.diff(self._rows) < 0):  # not in the order of the journal
            yield from self
            return
        begin, end = 0, len(self._rows)
        with closing(JournalReader(journal_path(self.path.parent))) as reader:
            for segment in segments(reader):
                first, last = np.searchsorted(self._rows, [begin, begin + len(segment.counts)])
                yield from segment.records((self._rows[first:last] - begin).tolist())
                begin += len(segment.counts)
                if last == end:
                    return

    def values(self, keys: Sequence[str]) -> Array:
        """Return the values of some keys, [records, keys], NaN if a key is absent."""
        columns = {key: column for column, key in enumerate(keys)}
        places = np.full(self._rows.max(initial=-1) + 1, -1)
        places[self._rows] = np.arange(len(self._rows))
        table, begin = np.full((len(self._rows), len(keys)), np.nan, order="F"), 0
        with closing(JournalReader(journal_path(self.path.parent))) as reader:
            for segment in segments(reader) if len(places) else ():
                rows = places[begin : begin + len(segment.counts)]
                own = np.flatnonzero(rows >= 0)
                for source, key in enumerate(segment.keys):
                    if key in columns:
                        table[rows[own], columns[key]] = segment.values[own, source]
                begin += len(segment.counts)
                if begin >= len(places):  # what was appended since is left out
                    break
        return table
