"""What each sink of a run has taken: `cursors.json` in the run directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from esper_telemetry.journal import JOURNAL_NAME
from esper_telemetry.record import RunStatus

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
    """

    offset: int = 0
    seq: int = 0
    records: int = 0
    end: RunStatus | None = None
    closed: bool = False


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
            offset = min(
                saved["offset"], self._journal.stat().st_size
            )  # a crash of the machine may have cost the last lines
            return Cursor(offset, saved["seq"], saved["records"], end and RunStatus(end), saved["closed"])
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return Cursor()

    def save(self, name: str, cursor: Cursor) -> None:
        """Replaces the cursor of a sink and leaves all others."""
        try:
            with self._locked():
                self._replace({**self._read(), name: asdict(cursor)})
        except OSError as error:
            self._warn(error)

    def _read(self) -> dict[str, Any]:
        try:
            cursors = json.loads(self.path.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return cursors if isinstance(cursors, dict) else {}

    def _replace(self, cursors: dict[str, Any]) -> None:
        draft = self.path.with_name(f"{CURSORS_NAME}.{os.getpid()}-{threading.get_ident()}")
        try:
            draft.write_text(json.dumps(cursors, indent=1) + "\n")
            draft.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._journal.open("r+b") as journal:
            with contextlib.suppress(OSError):
                fcntl.flock(journal, fcntl.LOCK_EX)
            yield

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            message = "esper-telemetry: cannot save %s (%s): after a restart some records would be sent twice"
            _logger.warning(message, self.path, error.strerror)
