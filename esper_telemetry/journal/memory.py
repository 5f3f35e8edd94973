"""The journal of a run without a directory: lines wait for their readers and are gone."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from esper_telemetry.core.record import Alarm, RunInfo
from esper_telemetry.journal.lines import Entry, Line, decode

MAX_WAITING_RECORDS: Final = 10_000
"""How many records may wait for one reader before it loses new ones."""


class MemoryJournal:
    """Gives each reader the lines written since it was made, after those that are no records.

    Records that no reader waits for are gone.

    Attributes:
        run_dir: None.
        records: records that were given to `write`.
        lost: records that some reader lost because too many waited for it.
    """

    def __init__(self) -> None:
        self.run_dir: Path | None = None
        self.records = 0
        self.lost = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._head: list[Line] = []
        self._readers: list[MemoryReader] = []

    def write(self, *lines: Line) -> bool:
        """Hands lines to every reader; False in a forked process, or if a reader lost one."""
        if os.getpid() != self._pid:
            return False
        with self._lock:
            lost = sum(self._hand_out(line) for line in lines)
            self.lost += lost
            return lost == 0

    @property
    def settled(self) -> bool:
        """Whether everything is where it belongs: always."""
        return True

    def reader(self) -> MemoryReader:
        """A reader of the lines so far that are no records, and of all that follow."""
        with self._lock:
            self._readers = [reader for reader in self._readers if not reader.closed]
            reader = MemoryReader(self._head)
            self._readers.append(reader)
            return reader

    def sync(self) -> None:
        """Does nothing: there is no file."""

    def close(self) -> None:
        """Does nothing: what waits for a reader stays with it."""

    def _hand_out(self, line: Line) -> int:
        """Gives the line to every reader and says how many of them lost it."""
        is_record = line["kind"] == "record"
        self.records += is_record
        if not is_record:
            self._head.append(line)
        return sum(not reader.take(line, droppable=is_record) for reader in self._readers)


class MemoryReader:
    """Follows a `MemoryJournal`.

    Attributes:
        offset: lines given so far.
        closed: whether it wants no more lines.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.offset = 0
        self.closed = False
        self._waiting = deque(lines)

    @property
    def run_dir(self) -> Path | None:
        """None: there is none."""
        return None

    def take(self, line: Line, *, droppable: bool) -> bool:
        """Keeps a line until it is read; False if it is droppable and too many wait already."""
        if self.closed:
            return True
        if droppable and len(self._waiting) >= MAX_WAITING_RECORDS:
            return False
        self._waiting.append(line)
        return True

    def read(self, limit: int | None = None) -> list[Entry]:
        """Up to `limit` lines that were not read before."""
        count = len(self._waiting) if limit is None else min(limit, len(self._waiting))
        entries = [decode(self._waiting.popleft()) for _ in range(count)]
        self.offset += count
        return [entry for entry in entries if entry is not None]

    def head(self) -> RunInfo | None:
        """None: what was read is forgotten."""
        return None

    def alarms(self, before: int | None = None) -> tuple[Alarm, ...]:
        """None: what was read is forgotten."""
        return ()

    def close(self) -> None:
        """Wants no more lines; harmless when repeated."""
        self.closed = True
        self._waiting.clear()
