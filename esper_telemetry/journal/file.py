"""`journal.jsonl`, or `journal.jsonl.gz`, in a run directory: one writer that a full disk does not stop, any number of readers.

A compressed journal takes a fifth of the space, and every reader takes it as it is.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import IO, Final, Self

from esper_telemetry.core.record import Alarm, Record, RunInfo, RunStatus
from esper_telemetry.core.requirements import require_path
from esper_telemetry.journal.lines import (
    ALARM_HEAD,
    EVENT_HEAD,
    RECORD_HEAD,
    Entry,
    JournalEvent,
    Line,
    decode,
    encode_end,
    encode_event,
    end_status,
    merge_head,
    to_json,
)

JOURNAL_NAME: Final = "journal.jsonl"
PACKED_SUFFIX: Final = ".gz"
MAX_BACKLOG_BYTES: Final = 8 << 20
"""What may wait in memory while the disk is full before new lines are lost: some 1,500 records of 120 values."""
CHUNK_BYTES: Final = 1 << 20
MAX_TAIL_BYTES: Final = 4 << 20
"""Distance from its end up to which a journal is searched for its last line."""
MAX_NAMED_LINES: Final = 10
EVENT_TYPE: Final = re.compile(rb'\{"kind": ?"event".*?"type": ?"([^"]+)"')
EVENT_HEAD_BYTES: Final = 400
"""Length within which a line of an event says its type."""

LOST: Final = "lost"
"""Type of the event that says how many lines are missing at its position, because the disk was full for too long."""
TORN: Final = b" #torn"
"""Ends a line that a killed writer left unfinished, before the next writer goes on: that is no damage."""

_logger = logging.getLogger("esper_telemetry")
_reported_damage: dict[Path, set[int]] = {}
"""Damaged lines that this process has warned of, by journal."""


class Journal:
    """The journal of a run, open for appending; made by `create` or `open`.

    Once it exists, no error of the disk raises: what cannot be written waits in memory, and goes out first when there is space again.

    Attributes:
        run_dir: directory of the run.
        path: of the file.
        records: number of records that were given to `write` and not lost.
        lost: number of lines dropped because the disk was full and the backlog too.
    """

    def __init__(self, run_dir: Path, fd: int) -> None:
        self.run_dir = run_dir
        self.path = run_dir / JOURNAL_NAME
        self.records = 0
        self.lost = 0
        self._fd = fd
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._backlog = b""
        self._warned = self._stuck = False
        self._lost_here = 0

    @classmethod
    def create(cls, run_dir: str | os.PathLike[str]) -> Self:
        """Create the journal of a new run, and its directory.

        Raises FileExistsError where a journal stands already, another OSError where nothing can be written.
        """
        path = Path(run_dir) / JOURNAL_NAME
        if path.exists() or path.with_name(path.name + PACKED_SUFFIX).exists():
            raise FileExistsError(f"{run_dir} already holds a run: pass another run directory")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            refused = type(error)(f"cannot write to run directory {run_dir}: {error.strerror}")
            refused.errno = error.errno
            raise refused from None
        return cls(path.parent.absolute(), fd)

    @classmethod
    def open(cls, run_dir: str | os.PathLike[str]) -> Self:
        """Open the journal of a run that exists, decompressed, and end a line that is torn.

        Raises FileNotFoundError where there is none.
        """
        path = journal_path(run_dir)
        if path.suffix == PACKED_SUFFIX:
            packed, path = path, path.with_suffix("")
            with _draft_of(path) as draft, gzip.open(packed, "rb") as source, draft.open("wb") as target:
                shutil.copyfileobj(source, target, CHUNK_BYTES)
            packed.unlink()
        fd = os.open(path, os.O_RDWR | os.O_APPEND)
        journal = cls(path.parent.absolute(), fd)
        journal.go_on()
        return journal

    @property
    def settled(self) -> bool:
        """True when all lines so far have reached the file."""
        return not self._backlog

    def write(self, *lines: Line) -> bool:
        """Append lines in one system call; return whether they, and all before them, have reached the file.

        False means that they wait in memory for space on the disk, or are lost (`lost` counts): one warning is logged.
        In a forked process, and after `close`, nothing is written. Threads may share a journal.

        Raises ValueError for a line that is not strict JSON, and writes nothing of the call then.
        """
        data = b"".join(map(to_json, lines))
        if os.getpid() != self._pid:
            return False
        with self._lock:
            return self._append(data, lines)

    def go_on(self) -> None:
        """Append behind what another process wrote: end a line that it left torn."""
        with self._lock:
            size = os.fstat(self._fd).st_size
            if size > 0 and os.pread(self._fd, 1, size - 1) != b"\n":
                self._backlog = TORN + b"\n" + self._backlog

    def reader(self) -> JournalReader:
        """Return a reader from the first line on."""
        return JournalReader(self.path)

    def sync(self) -> None:
        """Make what was written survive a crash of the machine, where the disk allows."""
        with self._lock, suppress(OSError):
            os.fsync(self._fd)

    def close(self) -> None:
        """Write what waits, make the file durable and close it; harmless when repeated or in a forked process."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._fd < 0:
                return
            self._write_out()
            self.lost += self._backlog.count(b"\n")
            self._backlog = b""
            with suppress(OSError):
                os.fsync(self._fd)
            with suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def _append(self, data: bytes, lines: tuple[Line, ...]) -> bool:
        if self._fd < 0 or (not self._write_out() and len(self._backlog) + len(data) > MAX_BACKLOG_BYTES):
            self.lost += len(lines)
            self._lost_here += len(lines)
            return False
        if self._lost_here:
            self._backlog += to_json(encode_event(JournalEvent(LOST, {"lines": self._lost_here})))
            self._lost_here = 0
        self.records += sum(line["kind"] == "record" for line in lines)
        self._backlog += data
        return self._write_out()

    def _write_out(self) -> bool:
        """Go on exactly where the last write stopped: a line cut by a full disk is completed, not repeated."""
        try:
            while self._backlog:
                self._backlog = self._backlog[os.write(self._fd, self._backlog) :]
        except OSError as error:
            self._stuck = True
            if not self._warned:
                self._warned = True
                message = "esper-telemetry: cannot write to %s (%s); training goes on and new lines wait in memory"
                _logger.warning(message, self.path, error.strerror)
            return False
        if self._stuck:
            self._stuck = False
            lost = f"{self.lost} lines were lost" if self.lost else "nothing was lost"
            _logger.info("esper-telemetry: can write to %s again; %s", self.path, lost)
        return True


class JournalReader:
    """Follows a journal file from an offset.

    Attributes:
        path: of the file.
        offset: position after the last line that `read` gave, in bytes; set it to go on from a saved position.
        damage: positions of the lines that `read` left out because they could not be understood, in bytes.
    """

    def __init__(self, path: str | os.PathLike[str], offset: int = 0) -> None:
        self.path = Path(path)
        self.offset = offset
        self.damage: list[int] = []
        self._file = _open_for_reading(self.path)

    @property
    def skipped(self) -> int:
        """Number of lines that `read` left out."""
        return len(self.damage)

    @property
    def size(self) -> int:
        """Current size of the journal in bytes, decompressed."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def run_dir(self) -> Path | None:
        """Directory of the run."""
        return self.path.parent

    def read(self, limit: int | None = None) -> list[Entry]:
        """Return up to `limit` complete lines after `offset`, decoded; a torn last line is left until it is complete."""
        entries: list[Entry] = []
        while limit is None or len(entries) < limit:
            lines = self._lines(None if limit is None else limit - len(entries))
            if not lines:
                break
            entries.extend(self._decoded(lines, self.offset - sum(map(len, lines)) - len(lines)))
        return entries

    def read_sample(self, records: int, *, is_rare: Callable[[str], bool]) -> tuple[list[Entry], bool]:
        """Return what is needed of a long journal to show a run at once, in order; and whether all its records are among it.

        Args:
            records: of the records so many at even distances in the file, and as many at its end.
            is_rare: true for types of events of which the last one of each is enough.
        """
        step = due = 0
        sample: dict[int, bytes] = {}
        latest: deque[tuple[int, bytes]] = deque(maxlen=records)
        events: dict[str, tuple[int, bytes]] = {}
        count = 0
        while lines := self._lines(None):
            begin = self.offset - sum(map(len, lines)) - len(lines)
            for line in lines:
                if line.startswith(RECORD_HEAD):
                    count += 1
                    latest.append((begin, line))
                    step = step or max(1, (self.size - begin) // records)
                    if begin >= due:
                        sample[begin], due = line, begin + step
                elif (kind := EVENT_TYPE.match(line[:EVENT_HEAD_BYTES])) and is_rare(kind[1].decode()):
                    events[kind[1].decode()] = (begin, line)
                else:
                    sample[begin] = line
                begin += len(line) + 1
        sample.update([*latest, *events.values()])
        entries = [entry for begin in sorted(sample) for entry in self._decoded([sample[begin]], begin)]
        return entries, sum(isinstance(entry, Record) for entry in entries) == count

    def damaged_lines(self) -> tuple[int, ...]:
        """Return the numbers of the lines that `read` left out, from 1 for the first of the file."""
        numbers, number, position = [], 1, 0
        for offset in self.damage:
            while position < offset:
                self._file.seek(position)
                chunk = self._file.read(min(CHUNK_BYTES, offset - position))
                number, position = number + chunk.count(b"\n"), position + len(chunk)
            numbers.append(number)
        return tuple(numbers)

    def head(self) -> RunInfo | None:
        """Return the run as the lines before `offset` describe it: its last `run` line and the descriptions of keys."""
        info: RunInfo | None = None
        before = JournalReader(self.path)
        while before.offset < self.offset and (lines := before._lines(None)):
            info = merge_head(info, before._decoded(line for line in lines if _is_head(line)))
        before.damage.clear()  # a reader of all lines reports it
        before.close()
        return info

    def alarms(self, before: int | None = None) -> tuple[Alarm, ...]:
        """Return the alarms in the lines before a position, in the whole file by default; `offset` stays where it is."""
        alarms: list[Alarm] = []
        reader = JournalReader(self.path)
        while (before is None or reader.offset < before) and (lines := reader._lines(None)):
            ends = accumulate(
                (len(line) + 1 for line in lines), initial=reader.offset - sum(map(len, lines)) - len(lines)
            )
            next(ends)
            earlier = [line for line, end in zip(lines, ends, strict=True) if before is None or end <= before]
            entries = reader._decoded(line for line in earlier if line.startswith(ALARM_HEAD))
            alarms.extend(entry for entry in entries if isinstance(entry, Alarm))
        reader.damage.clear()
        reader.close()
        return tuple(alarms)

    def last_event(self, kind: str) -> JournalEvent | None:
        """Return the last event of a type in the whole file, without parsing records; None without one."""
        mark, last = f'"type":"{kind}"'.encode(), b""
        reader = JournalReader(self.path)
        while lines := reader._lines(None):
            last = next((line for line in reversed(lines) if line.startswith(EVENT_HEAD) and mark in line), last)
        events = [entry for entry in reader._decoded([last] if last else []) if isinstance(entry, JournalEvent)]
        reader.damage.clear()
        reader.close()
        return events[-1] if events and events[-1].type == kind else None

    def close(self) -> None:
        """Release the file, and warn of damaged lines that this process has not warned of; harmless when repeated."""
        if self._file.closed:
            return
        reported = _reported_damage.setdefault(self.path.absolute(), set()) if self.damage else set()
        new = [number for number in self.damaged_lines() if number not in reported]
        reported.update(new)
        if new:
            _logger.warning("esper-telemetry: %s", damage_sentence(self.path, new))
        self._file.close()

    def _lines(self, limit: int | None) -> list[bytes]:
        """Return complete lines after the offset, about `CHUNK_BYTES` of them, and move the offset behind them."""
        chunk, size = b"", CHUNK_BYTES
        while (cut := chunk.rfind(b"\n")) < 0:
            self._file.seek(self.offset)
            chunk = self._file.read(size)
            if len(chunk) < size and b"\n" not in chunk:
                return []
            size *= 2
        lines = chunk[:cut].split(b"\n")[:limit]
        self.offset += sum(map(len, lines)) + len(lines)
        return lines

    def _decoded(self, lines: Iterable[bytes], begin: int = 0) -> list[Entry]:
        """Decode lines, the first of which begins at that position."""
        entries = []
        for line in lines:
            try:
                entry = decode(json.loads(line), self.run_dir)
            except ValueError:
                if line and not line.endswith(TORN):
                    self.damage.append(begin)
            else:
                if entry is not None:
                    entries.append(entry)
            begin += len(line) + 1
        return entries


def _is_head(line: bytes) -> bool:
    """Return False for a line that cannot describe the run or its keys."""
    kind = EVENT_TYPE.match(line[:EVENT_HEAD_BYTES])
    return kind[1] == b"metrics" if kind else not line.startswith(RECORD_HEAD)


def damage_sentence(path: Path, numbers: Sequence[int]) -> str:
    """Return a sentence, without its full stop, on the damaged lines of a journal."""
    named = ", ".join(f"{number:,}" for number in numbers[:MAX_NAMED_LINES])
    more = ", ..." if len(numbers) > MAX_NAMED_LINES else ""
    if len(numbers) == 1:
        return f"line {named} of {path} is damaged: it is left out"
    return f"{len(numbers):,} lines of {path} are damaged ({named}{more}): they are left out"


def journal_path(run_dir: str | os.PathLike[str]) -> Path:
    """Return the path of the journal in a run directory; raises FileNotFoundError if there is none, ValueError for what is no path."""
    directory = require_path("the run directory", run_dir)
    if not directory.is_dir():
        raise FileNotFoundError(f"there is no run directory {run_dir}")
    for path in (directory / JOURNAL_NAME, directory / f"{JOURNAL_NAME}{PACKED_SUFFIX}"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{run_dir} is not a run directory: it holds no {JOURNAL_NAME}")


def end_if_open(run_dir: str | os.PathLike[str], status: RunStatus) -> bool:
    """Append an end line for a writer that is gone, unless the last line is one; return whether it did."""
    entries = _last_entries(run_dir)
    if end_status(entries) is not None:
        return False
    seq = max((entry.seq for entry in entries if not isinstance(entry, RunInfo)), default=0)
    journal = Journal.open(run_dir)
    written = journal.write(encode_end(status, seq=seq + 1))
    journal.close()
    return written


def compress(run_dir: str | os.PathLike[str]) -> tuple[int, int]:
    """Compress the journal of a run that is over; return its size in bytes before and after, the same where it is compressed already.

    Raises FileNotFoundError where there is none, ValueError where the run is not over, OSError where there is no space.
    """
    path = journal_path(run_dir)
    before = path.stat().st_size
    if path.suffix == PACKED_SUFFIX:
        return before, before
    if end_status(_last_entries(run_dir)) is None:
        raise ValueError(
            f"the run in {run_dir} has not ended: its journal is still being written, or the run was killed"
        )
    return before, _pack(path).stat().st_size


def _last_entries(run_dir: str | os.PathLike[str]) -> list[Entry]:
    reader = JournalReader(journal_path(run_dir))
    reader.offset = max(0, reader.size - MAX_TAIL_BYTES)
    entries = reader.read()
    reader.damage.clear()  # reading began in the middle of a line
    reader.close()
    return entries


def _open_for_reading(path: Path) -> IO[bytes]:
    """Open a file to read at any position: a compressed one decompressed, in a temporary file without a name."""
    if path.suffix != PACKED_SUFFIX:
        return path.open("rb", buffering=0)
    plain = tempfile.TemporaryFile("w+b", buffering=0)  # noqa: SIM115  # the reader closes it
    with gzip.open(path, "rb") as packed:
        shutil.copyfileobj(packed, plain, CHUNK_BYTES)
    return plain


def _pack(path: Path) -> Path:
    """Compress a journal that has no writer, and remove it once the result is read back the same.

    Raises OSError where there is no space for both, and leaves the journal as it is then.
    """
    packed = path.with_name(path.name + PACKED_SUFFIX)
    with _draft_of(packed) as draft:
        with path.open("rb") as source, draft.open("wb") as target:
            with gzip.GzipFile("", "wb", fileobj=target, mtime=0) as zipped:
                shutil.copyfileobj(source, zipped, CHUNK_BYTES)
            target.flush()
            os.fsync(target.fileno())
        with path.open("rb") as source, gzip.open(draft, "rb") as zipped:
            if _checksum(source) != _checksum(zipped):
                raise OSError(f"{path} was changed while it was packed")
    path.unlink()
    return packed


@contextmanager
def _draft_of(path: Path) -> Iterator[Path]:
    """Give the name of a file that becomes `path` as a whole, or is removed where something raises."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink()


def _checksum(file: IO[bytes] | gzip.GzipFile) -> tuple[int, int]:
    size, checksum = 0, 0
    while chunk := file.read(CHUNK_BYTES):
        size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return size, checksum
