"""The journal of a run in its directory: one writer that nothing can stop, any number of readers.

A journal that is packed: `journal.jsonl.gz` in place of `journal.jsonl`, a fifth of its size, and read just as it is.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
import tempfile
import threading
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import IO, Final, Self

from esper_telemetry.core.record import Alarm, RunInfo, RunStatus
from esper_telemetry.journal.lines import (
    ALARM_HEAD,
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

PACKED_SUFFIX: Final = ".gz"
ARCHIVE_CHUNK_BYTES: Final = 1 << 20


def opened(path: Path) -> IO[bytes]:
    """A file to read at any position; a packed one is unpacked into a temporary file that has no name."""
    if path.suffix != PACKED_SUFFIX:
        return path.open("rb", buffering=0)
    plain = tempfile.TemporaryFile("w+b", buffering=0)  # noqa: SIM115  # the reader closes it
    with gzip.open(path, "rb") as packed:
        shutil.copyfileobj(packed, plain, ARCHIVE_CHUNK_BYTES)
    return plain


def pack(path: Path) -> Path:
    """Packs a journal that nobody writes any more, and removes it once what was packed is read back the same.

    Raises OSError where there is no space for both, and leaves the journal as it is then.
    """
    packed = path.with_name(path.name + PACKED_SUFFIX)
    draft = packed.with_name(f"{packed.name}.{os.getpid()}")
    try:
        with path.open("rb") as source, draft.open("wb") as target:
            with gzip.GzipFile("", "wb", fileobj=target, mtime=0) as zipped:
                shutil.copyfileobj(source, zipped, ARCHIVE_CHUNK_BYTES)
            target.flush()
            os.fsync(target.fileno())
        with path.open("rb") as source, gzip.open(draft, "rb") as zipped:
            if _checksum(source) != _checksum(zipped):
                raise OSError(f"{path} was changed while it was packed")
        draft.replace(packed)
    finally:
        with suppress(OSError):
            draft.unlink()
    path.unlink()
    return packed


def unpack(packed: Path) -> Path:
    """The journal as it was, in place of the packed one."""
    path = packed.with_suffix("")
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with gzip.open(packed, "rb") as source, draft.open("wb") as target:
            shutil.copyfileobj(source, target, ARCHIVE_CHUNK_BYTES)
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink()
    packed.unlink()
    return path


def _checksum(file: IO[bytes] | gzip.GzipFile) -> tuple[int, int]:
    size, checksum = 0, 0
    while chunk := file.read(ARCHIVE_CHUNK_BYTES):
        size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return size, checksum


JOURNAL_NAME: Final = "journal.jsonl"
MAX_BACKLOG_BYTES: Final = 8 << 20
"""How much may wait in memory while the disk is full before new lines are lost: some 1,500 records of 120 values."""
CHUNK_BYTES: Final = 1 << 20
LOST: Final = "lost"
"""Type of the event that says how many lines are missing at its place, because the disk was full for too long."""
MAX_TAIL_BYTES: Final = 4 << 20
"""How far from its end a journal is searched for its last line."""

TORN: Final = b" #torn"
"""Ends a line that a killed writer left unfinished, before the next writer goes on: that is no damage."""
MAX_NAMED_LINES: Final = 10

_logger = logging.getLogger("esper_telemetry")
_reported: dict[Path, set[int]] = {}
"""Damaged lines that this process has warned of, by journal."""


class Journal:
    """The journal of a run, open for appending; made by `create` or `open`.

    Attributes:
        run_dir: the directory of the run.
        path: the file.
        records: records that were given to `write` and not lost.
        lost: lines dropped because the disk was full and the backlog too.
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
        self._gap = 0

    @classmethod
    def create(cls, run_dir: str | os.PathLike[str]) -> Self:
        """Claims the directory for a new run, making it and its parents.

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
        """Appends to the journal of a run that exists, after closing a torn last line; one that is packed is unpacked.

        Raises FileNotFoundError where there is none.
        """
        path = journal_path(run_dir)
        path = unpack(path) if path.suffix == PACKED_SUFFIX else path
        fd = os.open(path, os.O_RDWR | os.O_APPEND)
        journal = cls(path.parent.absolute(), fd)
        journal.go_on()
        return journal

    @property
    def settled(self) -> bool:
        """Whether all lines so far have reached the file."""
        return not self._backlog

    def write(self, *lines: Line) -> bool:
        """Appends lines in one system call and says whether they, and all before them, have reached the file.

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
        """Append behind what another process wrote: a last line that it left torn is closed first."""
        with self._lock:
            size = os.fstat(self._fd).st_size
            if size > 0 and os.pread(self._fd, 1, size - 1) != b"\n":
                self._backlog = TORN + b"\n" + self._backlog

    def reader(self) -> JournalReader:
        """A reader from the first line on."""
        return JournalReader(self.path)

    def sync(self) -> None:
        """Makes what was written survive a crash of the machine too, where the disk allows."""
        with self._lock, suppress(OSError):
            os.fsync(self._fd)

    def close(self) -> None:
        """Writes what waited, makes the file durable and closes it; harmless when repeated or in a forked process."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._fd >= 0:
                self._finish()

    def _finish(self) -> None:
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
            self._gap += len(lines)
            return False
        if self._gap:
            self._backlog += to_json(encode_event(JournalEvent(LOST, {"lines": self._gap})))
            self._gap = 0
        self.records += sum(line["kind"] == "record" for line in lines)
        self._backlog += data
        return self._write_out()

    def _write_out(self) -> bool:
        """Goes on exactly where the last write stopped, so a line cut by a full disk is completed, not repeated."""
        try:
            while self._backlog:
                self._backlog = self._backlog[os.write(self._fd, self._backlog) :]
        except OSError as error:
            self._warn(error)
            return False
        if self._stuck:
            self._stuck = False
            lost = f"{self.lost} lines were lost" if self.lost else "nothing was lost"
            _logger.info("esper-telemetry: can write to %s again; %s", self.path, lost)
        return True

    def _warn(self, error: OSError) -> None:
        self._stuck = True
        if not self._warned:
            self._warned = True
            message = "esper-telemetry: cannot write to %s (%s); training goes on and new lines wait in memory"
            _logger.warning(message, self.path, error.strerror)


class JournalReader:
    """Follows a journal file from an offset.

    Attributes:
        path: the file.
        offset: the position after the last line that `read` gave, in bytes; set it to go on from a saved position.
        damage: where the lines begin that `read` left out because they could not be understood, in bytes.
    """

    def __init__(self, path: str | os.PathLike[str], offset: int = 0) -> None:
        self.path = Path(path)
        self.offset = offset
        self.damage: list[int] = []
        self._file = opened(self.path)

    @property
    def skipped(self) -> int:
        """Number of lines that `read` left out."""
        return len(self.damage)

    @property
    def size(self) -> int:
        """How many bytes the journal has by now, unpacked."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def run_dir(self) -> Path | None:
        """The directory of the run that is read."""
        return self.path.parent

    def read(self, limit: int | None = None) -> list[Entry]:
        """Up to `limit` complete lines after `offset`, decoded; a torn last line is left until it is complete."""
        entries: list[Entry] = []
        while limit is None or len(entries) < limit:
            lines = self._lines(None if limit is None else limit - len(entries))
            if not lines:
                break
            entries.extend(self._decoded(lines, self.offset - sum(map(len, lines)) - len(lines)))
        return entries

    def damaged_lines(self) -> tuple[int, ...]:
        """Numbers of the lines that `read` left out, from 1 for the first of the file."""
        numbers, number, position = [], 1, 0
        for offset in self.damage:
            while position < offset:
                self._file.seek(position)
                chunk = self._file.read(min(CHUNK_BYTES, offset - position))
                number, position = number + chunk.count(b"\n"), position + len(chunk)
            numbers.append(number)
        return tuple(numbers)

    def head(self) -> RunInfo | None:
        """What the lines before `offset` say about the run: its last `run` line and the descriptions of keys."""
        info: RunInfo | None = None
        before = JournalReader(self.path)
        while before.offset < self.offset and (lines := before._lines(None)):
            info = merge_head(info, before._decoded(line for line in lines if not line.startswith(RECORD_HEAD)))
        before.damage.clear()  # found by whoever reads these lines, not by who looks for some of them
        before.close()
        return info

    def alarms(self, before: int | None = None) -> tuple[Alarm, ...]:
        """The alarms in the lines before a position, in the whole file by default; `offset` stays where it is."""
        found: list[Alarm] = []
        reader = JournalReader(self.path)
        while (before is None or reader.offset < before) and (lines := reader._lines(None)):
            ends = accumulate(
                (len(line) + 1 for line in lines), initial=reader.offset - sum(map(len, lines)) - len(lines)
            )
            next(ends)
            kept = [line for line, end in zip(lines, ends, strict=True) if before is None or end <= before]
            alarms = reader._decoded(line for line in kept if line.startswith(ALARM_HEAD))
            found.extend(entry for entry in alarms if isinstance(entry, Alarm))
        reader.damage.clear()
        reader.close()
        return tuple(found)

    def close(self) -> None:
        """Releases the file, and warns of damaged lines that this process has not warned of; harmless when repeated."""
        if self._file.closed:
            return
        known = _reported.setdefault(self.path.absolute(), set()) if self.damage else set()
        new = [number for number in self.damaged_lines() if number not in known]
        known.update(new)
        if new:
            _logger.warning("esper-telemetry: %s", damage_sentence(self.path, new))
        self._file.close()

    def _lines(self, limit: int | None) -> list[bytes]:
        """Complete lines after the offset, at most about a megabyte of them; moves the offset behind them."""
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
        """The entries of lines, the first of which begins at that position."""
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


def damage_sentence(path: Path, numbers: Sequence[int]) -> str:
    """The journal and its damaged lines, in a sentence without its full stop."""
    named = ", ".join(f"{number:,}" for number in numbers[:MAX_NAMED_LINES])
    more = ", ..." if len(numbers) > MAX_NAMED_LINES else ""
    if len(numbers) == 1:
        return f"line {named} of {path} is damaged: it is left out"
    return f"{len(numbers):,} lines of {path} are damaged ({named}{more}): they are left out"


def journal_path(run_dir: str | os.PathLike[str]) -> Path:
    """The journal in a run directory; raises FileNotFoundError where there is none."""
    directory = Path(run_dir).expanduser()
    if not directory.is_dir():
        raise FileNotFoundError(f"there is no run directory {run_dir}")
    for path in (directory / JOURNAL_NAME, directory / f"{JOURNAL_NAME}{PACKED_SUFFIX}"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{run_dir} is not a run directory: it holds no {JOURNAL_NAME}")


def end_if_open(run_dir: str | os.PathLike[str], status: RunStatus) -> bool:
    """Appends an end line for a writer that is gone, unless the last line is one; says whether it did."""
    entries = _last_entries(run_dir)
    if end_status(entries) is not None:
        return False
    seq = max((entry.seq for entry in entries if not isinstance(entry, RunInfo)), default=0)
    journal = Journal.open(run_dir)
    written = journal.write(encode_end(status, seq=seq + 1))
    journal.close()
    return written


def compress(run_dir: str | os.PathLike[str]) -> tuple[int, int]:
    """Packs the journal of a run that is over; sizes in bytes before and after, the same where it is packed already.

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
    return before, pack(path).stat().st_size


def _last_entries(run_dir: str | os.PathLike[str]) -> list[Entry]:
    reader = JournalReader(journal_path(run_dir))
    reader.offset = max(0, reader.size - MAX_TAIL_BYTES)
    entries = reader.read()
    reader.damage.clear()  # it began in the middle of a line, and others read the whole file
    reader.close()
    return entries
