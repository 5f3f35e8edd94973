"""The journal of a run without a directory: lines wait in memory for their readers, and are discarded once they are read.

They wait as JSON, as in a file, so a sink that changes its records does not affect other sinks.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from esper_telemetry.core.record import Alarm, RunInfo
from esper_telemetry.journal.lines import Entry, Line, LineEncoder, decode

MAX_WAITING_RECORDS: Final = 10_000
"""Records that may wait for one reader; further records are lost to it."""


class MemoryJournal:
    """Gives each reader the lines written since the reader was made, after all earlier lines other than records.

    Attributes:
        run_dir: None.
        is_deleted: False, since it is not a file.
        settled: True, because lines never wait for a disk.
        records: number of records that were given to `write`.
        lost: number of records that a reader lost because too many waited for it.
        missing_records: 0: no disk can refuse a record.
    """

    def __init__(self) -> None:
        self.run_dir: Path | None = None
        self.is_deleted, self.settled = False, True
        self.records = self.lost = self.missing_records = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._encoder = LineEncoder()
        self._head: list[bytes] = []
        self._readers: list[MemoryReader] = []

    def write(self, *lines: Line) -> bool:
        """Give lines to every reader; return False in a forked process, or if a reader lost one.

        A line that is not strict JSON is left out, with a warning that names it.
        """
        if os.getpid() != self._pid:
            return False
        with self._lock:
            encoded, refused = self._encoder.encode(lines)
            lost = len(refused)
            for line, content in encoded:
                is_record = line["kind"] == "record"
                self.records += is_record
                if not is_record:
                    self._head.append(content)
                lost += sum(not reader.take(content, droppable=is_record) for reader in self._readers)
            self.lost += lost
        return lost == 0

    def reader(self) -> MemoryReader:
        """Return a reader of the lines so far except records, and of all later lines."""
        with self._lock:
            self._readers = [reader for reader in self._readers if not reader.closed]
            reader = MemoryReader(self._head)
            self._readers.append(reader)
            return reader

    def sync(self) -> None:
        """Do nothing, because the journal is not a file."""

    def close(self) -> None:
        """Do nothing: a reader keeps its waiting lines."""


class MemoryReader:
    """Follows a `MemoryJournal`.

    Attributes:
        offset: number of lines that were read.
        closed: whether the reader was closed.
        run_dir: None, because the run is without a directory.
    """

    def __init__(self, lines: Iterable[bytes] = ()) -> None:
        self.offset = 0
        self.closed = False
        self.run_dir: Path | None = None
        self._waiting = deque(lines)

    def take(self, line: bytes, *, droppable: bool) -> bool:
        """Store a line until it is read; return False if it is droppable and too many wait already."""
        if self.closed:
            return True
        if droppable and len(self._waiting) >= MAX_WAITING_RECORDS:
            return False
        self._waiting.append(line)
        return True

    def read(self, limit: int | None = None) -> list[Entry]:
        """Return up to `limit` lines that were not read before, decoded."""
        count = len(self._waiting) if limit is None else min(limit, len(self._waiting))
        entries: list[Entry] = []
        for _ in range(count):
            with suppress(ValueError):  # a journal in a file would have refused the line
                if (entry := decode(json.loads(self._waiting.popleft()))) is not None:
                    entries.append(entry)
        self.offset += count
        return entries

    def head(self) -> RunInfo | None:
        """Return None: lines that were read are gone."""
        return None

    def alarms(self, before: int | None = None) -> tuple[Alarm, ...]:
        """Return nothing: lines that were read are gone."""
        return ()

    def close(self) -> None:
        """Stop accepting lines; harmless when repeated."""
        self.closed = True
        self._waiting.clear()
