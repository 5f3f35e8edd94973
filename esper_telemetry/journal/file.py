"""`journal.jsonl`, or `journal.jsonl.gz`, in a run directory: one writer that survives a full disk, any number of readers.

A compressed journal takes a fifth of the space, and every reader supports it.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final, Self

from esper_telemetry.core.files import open_regular
from esper_telemetry.core.record import Alarm, Record, RunInfo, RunStatus
from esper_telemetry.core.requirements import require_path
from esper_telemetry.journal.lines import (
    ALARM_HEAD,
    RECORD_AXES,
    RECORD_HEAD,
    Entry,
    JournalEvent,
    Line,
    LineEncoder,
    decode_line,
    encode_end,
    encode_event,
    end_status,
    merge_head,
    record_without_values,
    to_json,
)
from esper_telemetry.journal.packed import PACKED_SUFFIX, PackedFile, pack, unpack

JOURNAL_NAME: Final = "journal.jsonl"
HOLDS_RUN: Final = (
    "already holds a run: pass another run directory, or continue that run with Telemetry(resume=True) or `esper-telemetry train --resume`"
)
END_HEAD: Final = b'{"kind":"end"'
MAX_BACKLOG_BYTES: Final = 8 << 20
"""Maximum bytes that wait in memory while the disk is full before new lines are lost: about 1,500 records of 120 values."""
CHUNK_BYTES: Final = 1 << 20
LINE_BYTES: Final = 1 << 15
"""Bytes that are read for a single line at first."""
MAX_LINE_BYTES: Final = 16 << 20
"""Longest line that is read; decoded, it may take fifty times as much memory. Usual lines have up to 300 kB."""
MAX_TAIL_BYTES: Final = 4 << 20
"""Bytes at the end of a journal in which its last line is searched for."""
MAX_NAMED_LINES: Final = 10
EVENT_TYPE: Final = re.compile(rb'\{"kind": ?"event".*?"type": ?"([^"]+)"')
EVENT_HEAD_BYTES: Final = 400
"""Length within which a line of an event says its type."""

LOST: Final = "lost"
"""Type of the event that says how many lines are missing at its position, because the disk was full for too long."""
TORN: Final = b" #torn"
"""Marks a line that a killed writer left unfinished, so that it is not reported as damage."""

_logger = logging.getLogger("esper_telemetry")
_reported_damage: dict[Path, set[int]] = {}
"""Damaged lines that this process has warned of, by journal."""


class Journal:
    """The journal of a run, open for appending; made by `create` or `open`.

    After its creation, disk errors never raise: unwritten lines wait in memory, and are written first when there is space again.
    A call that an exception interrupts, as from a signal handler, leaves it consistent: the size of the file says what was written.

    Attributes:
        run_dir: directory of the run.
        path: path of the file.
        records: number of records that were given to `write` and not lost.
        lost: number of lines that are not in the journal, because both the disk and the backlog were full, or they are not valid JSON.
        lost_records: number of records among them.
    """

    def __init__(self, run_dir: Path, fd: int) -> None:
        self.run_dir = run_dir
        self.path = run_dir / JOURNAL_NAME
        self.records = 0
        self.lost = self.lost_records = 0
        self._fd = fd
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._size = os.fstat(fd).st_size
        self._backlog = b""
        self._is_writing = False
        self._encoder = LineEncoder()
        self._warned = self._stuck = False
        self._lost_here = 0

    @classmethod
    def create(cls, run_dir: str | os.PathLike[str]) -> Self:
        """Create the journal of a new run, and its directory.

        Raises FileExistsError if a journal exists already, and another OSError if nothing can be written.
        """
        path = Path(run_dir) / JOURNAL_NAME
        if path.exists() or path.with_name(path.name + PACKED_SUFFIX).exists():
            raise FileExistsError(f"{run_dir} {HOLDS_RUN}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            refused = type(error)(f"cannot write to run directory {run_dir}: {error.strerror}")
            refused.errno = error.errno
            raise refused from None
        return cls(path.parent.absolute(), fd)

    @classmethod
    def open(cls, run_dir: str | os.PathLike[str]) -> Self:
        """Open the journal of an existing run, decompressed, and end a torn line.

        Raises FileNotFoundError if it does not exist.
        """
        path = journal_path(run_dir)
        if path.suffix == PACKED_SUFFIX:
            packed, path = path, path.with_suffix("")
            unpack(packed, path)
        fd = open_regular(path, os.O_RDWR | os.O_APPEND)
        journal = cls(path.parent.absolute(), fd)
        journal.go_on()
        return journal

    @classmethod
    def begin_again(cls, run_dir: str | os.PathLike[str]) -> Self:
        """Open the journal of an abandoned run, and empty it; the caller has the run's lock.

        Raises FileExistsError if the journal has a run.
        """
        if not is_abandoned(run_dir):
            raise FileExistsError(f"{run_dir} {HOLDS_RUN}")
        path = Path(run_dir) / JOURNAL_NAME
        return cls(path.parent.absolute(), open_regular(path, os.O_RDWR | os.O_APPEND | os.O_TRUNC))

    @property
    def settled(self) -> bool:
        """True when all lines so far have reached the file."""
        return not self._backlog

    @property
    def is_deleted(self) -> bool:
        """True if the file was deleted; later lines are then lost when this process ends."""
        with suppress(OSError):
            return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0
        return False

    @property
    def missing_records(self) -> int:
        """Number of records that were given to `write` and are not in the file by now."""
        waiting = self._backlog.count(RECORD_HEAD)
        return self.lost_records + (self.records if self.is_deleted else waiting)

    def write(self, *lines: Line) -> bool:
        """Append lines in one system call; return whether they, and all before them, have reached the file.

        False means that they wait in memory for space on the disk, or are lost (`lost` counts them); one warning is logged. A line that is
        not strict JSON is left out, with a warning that names it. Nothing is written in a forked process or after `close`. Threads may
        share a journal.
        """
        if os.getpid() != self._pid:
            return False
        with self._lock:
            encoded, refused = self._encoder.encode(lines)
            self._lose(refused)
            return self._append(encoded) and not refused

    def go_on(self) -> None:
        """Append after another process has written: end a line that it left torn."""
        with self._lock:
            size = os.fstat(self._fd).st_size
            os.lseek(self._fd, max(0, size - 1), os.SEEK_SET)  # writes go to the end regardless
            is_torn = size > 0 and os.read(self._fd, 1) != b"\n"
            self._size, self._backlog = size, (TORN + b"\n" if is_torn else b"") + self._backlog

    def reader(self) -> JournalReader:
        """Return a reader from the first line on."""
        return JournalReader(self.path)

    def sync(self) -> None:
        """Make everything written survive a crash of the machine, if the disk allows."""
        with self._lock, suppress(OSError):
            os.fsync(self._fd)

    def close(self) -> None:
        """Write waiting lines, make the file durable and close it; harmless when repeated or in a forked process."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._fd < 0:
                return
            self._write_out()
            self.lost += self._backlog.count(b"\n")
            self.lost_records = self.missing_records
            self._backlog = b""
            with suppress(OSError):
                os.fsync(self._fd)
            with suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def _append(self, encoded: Sequence[tuple[Line, bytes]]) -> bool:
        written = self._fd >= 0 and self._write_out()
        size = sum(len(content) for _, content in encoded)
        if self._fd < 0 or (not written and len(self._backlog) + size > MAX_BACKLOG_BYTES):
            self._lose([line for line, _ in encoded])
            return False
        gap = b""
        if self._lost_here:
            gap = to_json(encode_event(JournalEvent(LOST, {"lines": self._lost_here})))
            self._lost_here = 0
        self.records += sum(line["kind"] == "record" for line, _ in encoded)
        self._backlog = b"".join([self._backlog, gap, *(content for _, content in encoded)])
        return self._write_out()

    def _lose(self, lines: Sequence[Line]) -> None:
        self.lost += len(lines)
        self._lost_here += len(lines)
        self.lost_records += sum(line["kind"] == "record" for line in lines)

    def _write_out(self) -> bool:
        """Continue exactly where the last write stopped: a line cut by a full disk is completed, not repeated."""
        try:
            if self._is_writing:  # an exception, as from a signal handler, came between a write and its result
                self._advance(os.fstat(self._fd).st_size - self._size)
            while self._backlog:
                self._is_writing = True
                self._advance(os.write(self._fd, self._backlog))
        except OSError as error:
            self._stuck = True
            if not self._warned:
                self._warned = True
                message = "esper-telemetry: cannot write to %s (%s); training continues and new lines wait in memory"
                _logger.warning(message, self.path, error.strerror)
            return False
        if self._stuck:
            self._stuck = False
            lost = f"{self.lost} lines were lost" if self.lost else "nothing was lost"
            _logger.info("esper-telemetry: can write to %s again; %s", self.path, lost)
        return True

    def _advance(self, count: int) -> None:
        """Note that this many bytes of the backlog are in the file."""
        self._size, self._backlog = self._size + count, self._backlog[count:]
        self._is_writing = False


class DamagedLine(int):
    """Number of a line that cannot be understood, counted from 1, with the reason."""

    reason: str

    def __new__(cls, number: int, reason: str = "") -> Self:
        """Return the number; `reason` says why the line is left out."""
        line = super().__new__(cls, number)
        line.reason = reason
        return line


class _PlainFile:
    """The bytes of a journal that is not packed."""

    fault = ""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_regular(path, os.O_RDONLY, follow_links=True), "rb", buffering=0)

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def read_at(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size)

    def close(self) -> None:
        self._file.close()


class JournalReader:
    """Follows a journal file from an offset.

    Attributes:
        path: path of the file.
        run_dir: directory of the run.
        offset: position in bytes after the last line that `read` returned; set it to continue from a saved position.
        damage: why `read` left out lines that could not be understood, by their positions in bytes.

    Raises OSError if the file cannot be opened, or is not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str], offset: int = 0) -> None:
        self.path = Path(path)
        self.run_dir = self.path.parent
        self.offset = offset
        self.damage: dict[int, str] = {}
        self._is_open = True
        self._file = PackedFile(self.path) if self.path.suffix == PACKED_SUFFIX else _PlainFile(self.path)

    @property
    def size(self) -> int:
        """Current size of the journal in bytes, decompressed."""
        return self._file.size

    def read(self, limit: int | None = None, *, values: bool = True) -> list[Entry]:
        """Return up to `limit` complete lines after `offset`, decoded; a torn last line is left until it is complete.

        Args:
            limit: None for all.
            values: False for records without values and histograms, which are not parsed then.
        """
        entries: list[Entry] = []
        while limit is None or len(entries) < limit:
            lines = self._lines(None if limit is None else limit - len(entries))
            if not lines:
                break
            entries.extend(self._decoded(lines, self.offset - sum(map(len, lines)) - len(lines), values=values))
        return entries

    def lines(self) -> list[tuple[int, bytes]]:
        """Return complete lines after `offset` that fit into a chunk, each with its position, and move past them; for `decode`."""
        lines = self._lines(None)
        position = self.offset - sum(map(len, lines)) - len(lines)
        return [*zip(accumulate((len(line) + 1 for line in lines), initial=position), lines, strict=False)]

    def decode(self, line: bytes, position: int) -> Entry | None:
        """Return the entry of the line at a position; None, and a place in `damage`, if it cannot be understood."""
        entry, fault = decode_line(line, self.run_dir)
        if fault and line and not line.endswith(TORN):
            self.damage.setdefault(position, fault)
        return entry

    def bytes_at(self, position: int, size: int) -> bytes:
        """Return bytes of the journal, decompressed; `offset` does not change."""
        return self._file.read_at(position, size)

    def skip_to_tail(self, size: int, samples: int) -> list[Record]:
        """Move to the beginning of a line in the last `size` bytes; return about `samples` records at even distances before it."""
        tail = max(0, self.size - size)
        entries: list[Entry] = []
        for position in range(0, tail, max(1, tail // samples)):
            self._move_to_line(position)
            begin = self.offset
            if begin < tail:
                entries += self._decoded(self._lines(1), begin)
        self._move_to_line(tail)
        return [entry for entry in entries if isinstance(entry, Record)]

    def _move_to_line(self, position: int) -> None:
        """Move to the first line that begins at a position or after it."""
        self.offset = max(0, position - 1)
        if position > 0:
            self._lines(1)

    def sample(self, records: int, *, is_rare: Callable[[str], bool], every_form: bool) -> tuple[list[tuple[int, bytes]], int, bool]:
        """Return the lines of a long journal that show a run at a glance, and move to its end.

        The lines are in order, each with its position; with them come the number of updates in the whole journal, and whether all records
        are among the lines.

        Args:
            records: number of records at even distances, and number of records at its end.
            is_rare: true for types of events of which only the last one is needed.
            every_form: whether the first record of each form is also among them, because few records may have the keys that are sampled.
        """
        spread: list[tuple[int, bytes]] = []
        forms: dict[tuple[int, int], tuple[int, bytes]] = {}
        latest: deque[tuple[int, bytes]] = deque(maxlen=records)
        events: dict[str, tuple[int, bytes]] = {}
        others: list[tuple[int, bytes]] = []
        count, every, updates, last = 0, 1, 0, b""
        while lines := self.lines():
            for item in lines:
                line = item[1]
                if line.startswith(RECORD_HEAD):
                    if count % every == 0:
                        spread.append(item)
                        if len(spread) > records:
                            del spread[1::2]
                            every *= 2
                    count += 1
                    latest.append(item)
                    if every_form:
                        forms.setdefault((line.count(b"/"), line.count(b"_")), item)
                    axes = RECORD_AXES.match(line)
                    number = axes[2] if axes else b""
                    if (len(number), number) > (len(last), last):  # whole numbers without leading zeros
                        updates, last = updates + 1, number
                elif (kind := _event_type(line)) and is_rare(kind):
                    events[kind] = item
                else:
                    others.append(item)
        chosen = {*spread, *forms.values(), *latest}
        return sorted([*chosen, *events.values(), *others]), updates, len(chosen) == count

    def damaged_lines(self) -> tuple[DamagedLine, ...]:
        """Return the numbers of the lines that `read` left out, with the reasons."""
        lines, number, position = [], 1, 0
        for offset, fault in sorted(self.damage.items()):
            while position < offset and (chunk := self._file.read_at(position, min(CHUNK_BYTES, offset - position))):
                number, position = number + chunk.count(b"\n"), position + len(chunk)
            lines.append(DamagedLine(number, fault))
        return tuple(lines)

    def head(self, before: int | None = None) -> RunInfo | None:
        """Return the run as described before a position, `offset` by default: its last `run` line and keys after it."""
        return merge_head(None, self._earlier(self.offset if before is None else before, _is_head))

    def head_of(self, lines: Iterable[tuple[int, bytes]]) -> RunInfo | None:
        """Return the run as some of the lines describe it, each with its position."""
        entries = (self.decode(line, position) for position, line in lines if _is_head(line))
        return merge_head(None, (entry for entry in entries if entry is not None))

    def alarms(self, before: int | None = None) -> tuple[Alarm, ...]:
        """Return the alarms before a position, in the whole file by default; `offset` does not change."""
        entries = self._earlier(before, lambda line: line.startswith(ALARM_HEAD))
        return tuple(entry for entry in entries if isinstance(entry, Alarm))

    def events_of(self, kinds: Collection[str]) -> list[JournalEvent]:
        """Return the events of these types in the whole file, without parsing records."""
        entries = self._earlier(None, lambda line: _event_type(line) in kinds)
        return [entry for entry in entries if isinstance(entry, JournalEvent)]

    def close(self) -> None:
        """Release the file, and warn of damaged lines that this process has not warned of; harmless when repeated."""
        if not self._is_open:
            return
        self._is_open = False
        reported = _reported_damage.setdefault(self.path.absolute(), set()) if self.damage else set()
        new = [line for line in self.damaged_lines() if line not in reported]
        reported.update(new)
        if new:
            _logger.warning("esper-telemetry: %s", damage_sentence(self.path, new))
        self._file.close()

    def _earlier(self, before: int | None, is_wanted: Callable[[bytes], bool]) -> list[Entry]:
        """Return the wanted entries before a position, in the whole file by default; damage is left to a reader of all lines."""
        entries: list[Entry] = []
        with closing(JournalReader(self.path)) as reader:
            while (before is None or reader.offset < before) and (lines := reader.lines()):
                earlier = ((at, line) for at, line in lines if before is None or at + len(line) < before)
                decoded = (reader.decode(line, at) for at, line in earlier if is_wanted(line))
                entries.extend(entry for entry in decoded if entry is not None)
            reader.damage.clear()
        return entries

    def _lines(self, limit: int | None) -> list[bytes]:
        """Return complete lines after the offset, about `CHUNK_BYTES` of them, and advance the offset."""
        size = CHUNK_BYTES if limit != 1 else LINE_BYTES
        while (cut := (chunk := self._file.read_at(self.offset, size)).rfind(b"\n")) < 0 or chunk.startswith(b"\n"):
            if chunk.startswith(b"\n"):  # empty lines are skipped: a compressed file may contain millions
                self.offset += len(chunk) - len(chunk.lstrip(b"\n"))
                continue
            if len(chunk) < size:
                if self._file.fault:
                    self.damage.setdefault(self.offset, self._file.fault)
                return []
            if size < MAX_LINE_BYTES:
                size *= 2
            elif self._skip_line(self.offset + size):
                size = CHUNK_BYTES
            else:
                return []
        lines = chunk.split(b"\n")
        lines.pop()  # incomplete
        if limit is not None and limit < len(lines):
            lines = lines[:limit]
            cut = sum(map(len, lines)) + len(lines) - 1
        self.offset += cut + 1
        return lines

    def _skip_line(self, position: int) -> bool:
        """Leave out a line that is too long, whose rest begins at a position; return False if its end has not been written yet."""
        while chunk := self._file.read_at(position, CHUNK_BYTES):
            end = chunk.find(b"\n")
            if end >= 0:
                self.damage.setdefault(self.offset, f"it is longer than {MAX_LINE_BYTES >> 20} MiB")
                self.offset = position + end + 1
                return True
            position += len(chunk)
        return False

    def _decoded(self, lines: Iterable[bytes], begin: int, *, values: bool = True) -> list[Entry]:
        """Decode lines, the first of which begins at that position."""
        entries: list[Entry] = []
        for line in lines:
            entry = (None if values else record_without_values(line)) or self.decode(line, begin)
            if entry is not None:
                entries.append(entry)
            begin += len(line) + 1
        return entries


def _event_type(line: bytes) -> str:
    """Return the type of an event's line; empty for other lines."""
    kind = EVENT_TYPE.match(line[:EVENT_HEAD_BYTES])
    return kind[1].decode(errors="replace") if kind else ""


def _is_head(line: bytes) -> bool:
    """Return False for a line that cannot describe the run or its keys."""
    return _event_type(line) in ("", "metrics") and not line.startswith(RECORD_HEAD)


def damage_sentence(path: Path, lines: Sequence[int]) -> str:
    """Return a sentence, without its full stop, on the damaged lines of a journal, with the reasons."""
    named = [f"{line:,}" + (f": {line.reason}" if isinstance(line, DamagedLine) else "") for line in lines]
    if len(lines) == 1:
        number, _, reason = named[0].partition(": ")
        return f"line {number} of {path} is damaged{f' ({reason})' if reason else ''}: it is left out"
    more = "; ..." if len(lines) > MAX_NAMED_LINES else ""
    return f"{len(lines):,} lines of {path} are damaged ({'; '.join(named[:MAX_NAMED_LINES])}{more}): they are left out"


def journal_path(run_dir: str | os.PathLike[str]) -> Path:
    """Return the path of the journal in a run directory; raises FileNotFoundError if it does not exist, ValueError for an invalid path."""
    directory = require_path("the run directory", run_dir)
    if not directory.is_dir():
        raise FileNotFoundError(f"there is no run directory {run_dir}")
    for path in (directory / JOURNAL_NAME, directory / f"{JOURNAL_NAME}{PACKED_SUFFIX}"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{run_dir} is not a run directory: it holds no {JOURNAL_NAME}")


def is_abandoned(run_dir: str | os.PathLike[str]) -> bool:
    """Return whether a journal has neither a run nor records, because its trainer was killed before its first line."""
    path = Path(run_dir) / JOURNAL_NAME
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            chunks = iter(partial(file.read, CHUNK_BYTES), b"")
            whole = next((chunk for chunk in chunks if b"\n" in chunk), b"").split(b"\n")[:-1]
    except OSError:
        return False
    return all(line.startswith(END_HEAD) for line in whole)


def holds_run(directory: Path) -> bool:
    """Return whether a directory holds a journal."""
    try:
        journal_path(directory)
    except OSError:
        return False
    return True


def end_if_open(run_dir: str | os.PathLike[str], status: RunStatus) -> bool:
    """Append an end line if the writer is gone, unless the last line is one; return whether it was appended."""
    entries = last_entries(run_dir)
    if end_status(entries) is not None or is_abandoned(run_dir):
        return False
    seq = max((entry.seq for entry in entries if not isinstance(entry, RunInfo)), default=0)
    journal = Journal.open(run_dir)
    written = journal.write(encode_end(status, seq=seq + 1))
    journal.close()
    return written


def compress(run_dir: str | os.PathLike[str]) -> tuple[int, int]:
    """Compress the journal of a finished run; return its size in bytes before and after, which are equal if it is compressed already.

    Raises FileNotFoundError without a journal, ValueError if the run is not over, OSError if the disk is full.
    """
    path = journal_path(run_dir)
    before = path.stat().st_size
    if path.suffix == PACKED_SUFFIX:
        return before, before
    if end_status(last_entries(run_dir)) is None:
        raise ValueError(f"the run in {run_dir} has not ended: its journal is still being written, or the run was killed")
    return before, pack(path).stat().st_size


def last_entries(run_dir: str | os.PathLike[str]) -> list[Entry]:
    """Return the entries in the last `MAX_TAIL_BYTES` of a journal; raises FileNotFoundError without a journal."""
    with closing(JournalReader(journal_path(run_dir))) as reader:
        reader.offset = max(0, reader.size - MAX_TAIL_BYTES)
        entries = reader.read()
        reader.damage.clear()  # reading began in the middle of a line
    return entries
