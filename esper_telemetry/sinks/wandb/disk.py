"""What W&B does not say: that the disk is full, and that rows which it has accepted were not stored."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Final

LEAST_BYTES: Final = 1 << 20
"""What must be free before W&B is given a row: more than it keeps in memory before it writes."""
LOOK_SECONDS: Final = 30.0
LOG: Final = Path("logs", "debug-internal.log")
SIGNS: Final = (b"no space left", b"disk quota exceeded", b"file too large")


class Disk:
    """The disk under a run that W&B keeps; ask it before every write.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = 0
        self._looked_at = time.monotonic()
        self._told = False

    def check(self) -> None:
        """Raises OSError where there is no room, and once where W&B has lost rows for want of it."""
        if self._free() < LEAST_BYTES:
            raise OSError(errno.ENOSPC, "the disk is full: W&B would lose rows and not say so", str(self._folder))
        if not self._told and time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = time.monotonic()
            if self._lost():
                self._told = True
                raise OSError(errno.ENOSPC, "W&B could not store some rows: esper-telemetry doctor finds them")

    def _free(self) -> int:
        try:
            found = os.statvfs(self._folder)
        except OSError:
            return LEAST_BYTES
        return found.f_bavail * found.f_frsize

    def _lost(self) -> bool:
        """Whether the client's own log, as far as it is new, says that it could not write."""
        try:
            with (self._folder / LOG).open("rb") as log:
                log.seek(self._read)
                said = log.read()
        except OSError:
            return False
        self._read += len(said)
        return any(sign in said.lower() for sign in SIGNS)
