"""The end line of a run whose trainer was killed, written by a process that outlives it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from esper_telemetry.journal.file import end_if_open
from esper_telemetry.record import RunStatus

GONE_SECONDS: Final = 1.0
"""A process that ends closes its pipes a moment before it is gone."""


def end_after(parent: int, run_dir: Path) -> bool:
    """Ends the run as killed if the trainer with that number is gone, whose child this process is; says whether it did.

    A trainer that closes the pipe and lives has taken the run over.
    """
    deadline = time.monotonic() + GONE_SECONDS
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.01)
    if os.getppid() == parent:
        return False
    with suppress(
        OSError, ValueError
    ):  # a full disk, or a run line that never came: the journal stays without the line
        return end_if_open(run_dir, RunStatus.KILLED)
    return False
