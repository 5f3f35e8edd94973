"""The cursor of each sink in `cursors.json`, and the lock on files of a run directory that several processes change."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from esper_telemetry.core.files import open_own, open_regular, read_json, replace_file
from esper_telemetry.core.record import Record, RunStatus
from esper_telemetry.core.supervisor import HAS_HELPERS
from esper_telemetry.journal.file import JOURNAL_NAME, JournalReader, journal_path
from esper_telemetry.journal.lock import Role, lock_file
from esper_telemetry.journal.schema import COUNT, FLAG, check

CURSORS_NAME: Final = "cursors.json"
COUNT_LINES: Final = 1000
"""Lines that are read at once to count records."""
CURSOR: Final = {**dict.fromkeys(("offset", "seq", "records", "quarantined"), COUNT), "closed": FLAG}

_logger = logging.getLogger("esper_telemetry")


@contextlib.contextmanager
def run_dir_lock(run_dir: Path) -> Iterator[None]:
    """Admit one process and thread at a time, if the file system has locks; raises OSError without a journal."""
    journal = open_regular(journal_path(run_dir), os.O_RDONLY, follow_links=True)  # it exists as long as the run does
    locked = journal if HAS_HELPERS else open_own(run_dir / Role.FILES, os.O_RDWR)  # others read the journal
    try:
        with contextlib.suppress(OSError):
            lock_file(locked, wait=True)
        yield
    finally:
        for descriptor in {journal, locked}:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Progress of a sink; the names of the fields are the names in `cursors.json`.

    Attributes:
        offset: position in the journal, in bytes, after the last line that the sink took.
        seq: number of the last record that it took.
        records: number of records that it took since the run began.
        end: how the run ended, once the end line was read.
        closed: whether the sink was closed with that status.
        quarantined: number of records that it refused, which `dead_letter.jsonl` holds.
    """

    offset: int = 0
    seq: int = 0
    records: int = 0
    end: RunStatus | None = None
    closed: bool = False
    quarantined: int = 0


def count_records_after(run_dir: Path, cursor: Cursor) -> int:
    """Return how many records of the journal the cursor has not passed."""
    reader = JournalReader(journal_path(run_dir), cursor.offset)
    count = 0
    while entries := reader.read(COUNT_LINES):
        count += sum(isinstance(entry, Record) for entry in entries)
    reader.close()
    return count


class Cursors:
    """The cursors of a run. Threads and processes share them: each changes its own entry under a lock on the journal.

    If a network file system refuses locks or writing, delivery continues, and some records are sent again after a restart.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CURSORS_NAME
        self._journal = run_dir / JOURNAL_NAME
        self._warned = False

    def load(self, name: str) -> Cursor:
        """Return the cursor of a sink; a new sink gets one at the beginning."""
        try:
            saved = self._read()[name]
            end = saved.get("end")
            try:  # if the machine crashed, the last lines may be lost
                size: float = self._journal.stat().st_size
            except FileNotFoundError:  # a compressed journal is complete
                size = math.inf
            check(saved, CURSOR, "a cursor", required=("offset", "seq", "records", "closed"))
            offset = min(saved["offset"], size)
            refused = saved.get("quarantined", 0)
            return Cursor(int(offset), saved["seq"], saved["records"], end and RunStatus(end), saved["closed"], refused)
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return Cursor()

    def names(self) -> list[str]:
        """Return the names of the sinks that have a cursor."""
        with contextlib.suppress(OSError):
            return list(self._read())
        return []

    def save(self, name: str, cursor: Cursor) -> None:
        """Replace the cursor of a sink and leave all others unchanged."""
        try:
            with run_dir_lock(self.path.parent):
                replace_file(self.path, json.dumps({**self._read(), name: asdict(cursor)}, indent=1) + "\n")
        except OSError as error:
            if not self._warned:
                self._warned = True
                message = "esper-telemetry: cannot save %s (%s): after a restart some records would be sent twice"
                _logger.warning(message, self.path, error.strerror)

    def _read(self) -> dict[str, Any]:
        try:
            cursors = read_json(self.path)
        except (FileNotFoundError, ValueError):
            return {}
        return cursors if isinstance(cursors, dict) else {}
