"""How the processes beside a trainer stay out of its way.

How often this process is a fork of another: what a process holds is not to be written to by its forks as well.
"""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from typing import Final

OBJECTS: Final = 20_000
"""New objects after which garbage is looked for, instead of 700."""


def collect_rarely() -> None:
    """Looks for garbage less often: clients make dozens of objects for each number and let go of them at once.

    Measured for MLflow's SQLite store, in a process that does nothing else: 10 ms of processor time for a hundred numbers instead of 14.
    """
    gc.set_threshold(OBJECTS, *gc.get_threshold()[1:])


def step_back(niceness: int) -> None:
    """Gives this process and its children a lower priority, and leaves the first core to the trainer.

    Priority alone is not enough: who is woken through a pipe is put on the core of whoever wrote to it, and may take it from there for
    milliseconds. A process for batch work never does. All of a trainer's processes leave it the same core, wherever it runs when they
    start: it moves there by itself.
    """
    with suppress(OSError):
        os.nice(niceness)
    with suppress(OSError, AttributeError):  # names that Linux alone has
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with suppress(OSError, AttributeError):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores - {min(cores)} or cores)


_generation = 0


def generation() -> int:
    """Differs from what a process has seen in every fork of it; costs no call of the system."""
    return _generation


def _count() -> None:
    global _generation
    _generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count)
