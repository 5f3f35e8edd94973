"""The wait for deliveries at the end of a run: how long it goes on, and the line that says for what."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from esper_telemetry.relay.status import FINAL, SinkState, SinkStatus

CLOSE_SECONDS: Final = 60.0
"""How long the end of a run waits at most."""
STALLED_SECONDS: Final = 15.0
"""How long it waits for deliveries that make no progress."""
QUIET_SECONDS: Final = 4.0
"""A wait that takes no longer says nothing."""
ERASE_LINE: Final = "\r\x1b[2K"


class Wait:
    """One wait, which goes on while deliveries make progress: a sink takes records, or opens and has not failed yet.

    A terminal shows what is waited for and for how long, in a line that goes away; a log gets one line.
    """

    def __init__(self, seconds: float) -> None:
        self._begun = self._moved = time.monotonic()
        self._until = self._begun + seconds
        self._seen: object = None
        self._shown = -1

    def goes_on(self, statuses: Iterable[SinkStatus]) -> bool:
        """Notes how deliveries stand, and says whether to wait on."""
        now = time.monotonic()
        waited_for = [status for status in statuses if status.state not in FINAL]
        seen = [(status.name, status.state, status.records, status.quarantined) for status in waited_for]
        if seen != self._seen or any(_opens(status) for status in waited_for):
            self._seen, self._moved = seen, now
        self._show([status.name for status in waited_for], int(now - self._begun))
        return now < min(self._until, self._moved + STALLED_SECONDS)

    def end(self) -> None:
        """Clears the line."""
        if self._shown >= 0 and _on_terminal():
            _write(ERASE_LINE)

    def _show(self, names: list[str], seconds: int) -> None:
        if not names or seconds < QUIET_SECONDS or seconds == self._shown:
            return
        line = f"delivering to {', '.join(names)} ({seconds} s)... Ctrl-C leaves it to a background process"
        if _on_terminal():
            _write(ERASE_LINE + line)
        elif self._shown < 0:
            _write(f"esper-telemetry: {line}\n")
        self._shown = seconds


def _opens(status: SinkStatus) -> bool:
    return status.state is SinkState.OPENING and not status.errors


def _on_terminal() -> bool:
    with suppress(AttributeError, ValueError):  # a process without stderr, or one that has closed it
        return sys.stderr.isatty()
    return False


def _write(text: str) -> None:
    with suppress(AttributeError, ValueError, OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
