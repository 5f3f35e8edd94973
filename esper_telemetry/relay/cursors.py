"""What each sink of a run has taken: `cursors.json` in the run directory."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from esper_telemetry.journal import JOURNAL_NAME, JournalReader, journal_path
from esper_telemetry.record import Record, RunStatus
from esper_telemetry.relay.files import locked, replaced

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


def records_after(run_dir: Path, cursor: Cursor) -> int:
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
            with locked(self.path.parent):
                replaced(self.path, json.dumps({**self._read(), name: asdict(cursor)}, indent=1) + "\n")
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
