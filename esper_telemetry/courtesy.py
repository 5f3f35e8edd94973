"""How the processes beside a trainer stay out of its way."""

from __future__ import annotations

import os


def step_back(niceness: int) -> None:
    """Gives this process and its children a lower priority, and leaves the first core to the trainer.

    Priority alone is not enough: who is woken through a pipe is put on the core of whoever wrote to it.
    """
    os.nice(niceness)
    if hasattr(os, "sched_setaffinity"):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores - {min(cores)} or cores)
