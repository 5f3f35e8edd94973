"""How the processes beside a trainer stay out of its way."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

PROCESSOR: Final = 36
"""Of the fields of `/proc/PID/stat` that follow the name: the core on which the process runs."""


def step_back(niceness: int) -> None:
    """Gives this process and its children a lower priority, and leaves the core on which the parent runs to it.

    Priority alone is not enough: who is woken through a pipe is put on the core of whoever wrote to it, and may take it from there for
    milliseconds. A process for batch work never does.
    """
    os.nice(niceness)
    if hasattr(os, "sched_setscheduler"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if hasattr(os, "sched_setaffinity"):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores - {_core_of(os.getppid(), min(cores))} or cores)


def _core_of(process: int, otherwise: int) -> int:
    """The core on which a process runs."""
    with suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[PROCESSOR])
    return otherwise
