"""How far one delivery has come, and when that is noted."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

from esper_telemetry.relay.cursors import Cursor, Cursors

SAVE_SECONDS: Final = 1.0


class Progress:
    """The cursor of a delivery, noted at most once a second.

    Args:
        name: of the sink.
        cursors: where to note it; None nowhere.
        cursor: where to begin; where it was noted last by default.
    """

    def __init__(self, name: str, cursors: Cursors | None, cursor: Cursor | None = None) -> None:
        self._name = name
        self._cursors = cursors
        saved = Cursor() if cursors is None else cursors.load(name)
        self.cursor = saved if cursor is None else cursor
        self._saved = saved
        self._saved_at = 0.0

    def move(self, **changes: Any) -> None:
        """Changes fields of the cursor."""
        self.cursor = replace(self.cursor, **changes)

    def save_when_due(self) -> None:
        """Notes it if the last note is a second old."""
        if self.cursor != self._saved and time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Notes it."""
        if self._cursors is not None and self.cursor != self._saved:
            self._cursors.save(self._name, self.cursor)
            self._saved, self._saved_at = self.cursor, time.monotonic()
