"""What each sink of a run has taken: `cursors.json` in the run directory.

Small files that several processes of a run change: one at a time, and never seen half-written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from esper_telemetry.core.record import Record, RunStatus
from esper_telemetry.journal.file import JOURNAL_NAME, JournalReader, journal_path
from esper_telemetry.journal.lock import lock_file

LOCKED: Final = ("journal.jsonl", "journal.jsonl.gz")
"""The file whose lock is taken: it is there as long as the run is."""


@contextlib.contextmanager
def run_dir_lock(run_dir: Path) -> Iterator[None]:
    """One process and thread at a time, as far as the file system knows locks; raises OSError where there is no journal."""
    path = next((run_dir / name for name in LOCKED if (run_dir / name).exists()), run_dir / LOCKED[0])
    with path.open("rb") as journal:
        with contextlib.suppress(OSError):
            lock_file(journal.fileno(), wait=True)
        yield


def replace_file(path: Path, content: str) -> None:
    """Gives a file a new content, as a whole or not at all; raises OSError where that cannot be written."""
    draft = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        draft.write_text(content, encoding="utf-8")
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


CURSORS_NAME: Final = "cursors.json"
_logger = logging.getLogger("esper_telemetry")


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a sink has come.

    Attributes:
        offset: position in the journal, in bytes, behind the last line that it took.
        seq: of the last record that it took.
        records: records that it took since the run began.
        end: how the run ended, once its end line was read.
        closed: whether the sink was closed with that.
        quarantined: records that it refused, which stand in `dead_letter.jsonl`.
    """

    offset: int = 0
    seq: int = 0
    records: int = 0
    end: RunStatus | None = None
    closed: bool = False
    quarantined: int = 0


def count_records_after(run_dir: Path, cursor: Cursor) -> int:
    """Records of the journal that the cursor has not passed."""
    reader = JournalReader(journal_path(run_dir), cursor.offset)
    count = 0
    while entries := reader.read(1000):
        count += sum(isinstance(entry, Record) for entry in entries)
    reader.close()
    return count


class Cursors:
    """The cursors of a run, shared by threads and processes: each changes its own entry under a lock on the journal.

    Where locks or writing are refused, as on some network file systems, delivery goes on and only a restart notices: it
    sends some records again.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CURSORS_NAME
        self._journal = run_dir / JOURNAL_NAME
        self._warned = False

    def load(self, name: str) -> Cursor:
        """The cursor of a sink; one at the beginning for a sink that has none."""
        try:
            saved = self._read()[name]
            end = saved.get("end")
            offset = min(saved["offset"], self._written())  # a crash of the machine may have cost the last lines
            refused = saved.get("quarantined", 0)
            return Cursor(int(offset), saved["seq"], saved["records"], end and RunStatus(end), saved["closed"], refused)
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return Cursor()

    def names(self) -> list[str]:
        """The sinks that have one."""
        with contextlib.suppress(OSError):
            return list(self._read())
        return []

    def save(self, name: str, cursor: Cursor) -> None:
        """Replaces the cursor of a sink and leaves all others."""
        try:
            with run_dir_lock(self.path.parent):
                replace_file(self.path, json.dumps({**self._read(), name: asdict(cursor)}, indent=1) + "\n")
        except OSError as error:
            self._warn(error)

    def _written(self) -> float:
        """How many bytes the journal has; of a packed one, which is whole, no matter how many."""
        try:
            return self._journal.stat().st_size
        except FileNotFoundError:
            return math.inf

    def _read(self) -> dict[str, Any]:
        try:
            cursors = json.loads(self.path.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return cursors if isinstance(cursors, dict) else {}

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            message = "esper-telemetry: cannot save %s (%s): after a restart some records would be sent twice"
            _logger.warning(message, self.path, error.strerror)
