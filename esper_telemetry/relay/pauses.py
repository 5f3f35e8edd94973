"""Times in which a process was stopped, so that nothing it waited for could have come."""

from __future__ import annotations

import time
from typing import Final

PAUSE_SECONDS: Final = 5.0
"""More than that between two looks of a loop that looks several times a second is a pause."""


class Pauses:
    """Notices that the process was stopped: by Ctrl-Z, by a scheduler that suspends jobs, in a container that is frozen.

    A client that was stopped with everything else does not hang.
    """

    def __init__(self) -> None:
        self._looked = time.monotonic()

    def last(self) -> float:
        """Seconds of the pause since the last look; 0 where there was none."""
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        return since if since > PAUSE_SECONDS else 0.0
