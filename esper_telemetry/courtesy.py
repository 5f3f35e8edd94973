"""How the processes beside a trainer stay out of its way."""

from __future__ import annotations

import os
from contextlib import suppress


def step_back(niceness: int) -> None:
    """Gives this process and its children a lower priority, and leaves the first core to the trainer.

    Priority alone is not enough: who is woken through a pipe is put on the core of whoever wrote to it, and may take it from there for
    milliseconds. A process for batch work never does. All of a trainer's processes leave it the same core, wherever it runs when they
    start: it moves there by itself.
    """
    os.nice(niceness)
    if hasattr(os, "sched_setscheduler"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if hasattr(os, "sched_setaffinity"):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores - {min(cores)} or cores)
