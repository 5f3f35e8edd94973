"""Who works on a run: a lock each for the trainer and its helpers, which lives as long as the process, however that ends."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

POLL_SECONDS: Final = 0.05


class Role(StrEnum):
    """What a process does for a run; the value names its lock in the run directory."""

    TRAINER = "trainer.lock"
    WRITER = "writer.lock"
    RELAY = "relay.lock"


HELPERS: Final = (Role.WRITER, Role.RELAY)
"""They outlive a trainer that is killed, until everything it measured is delivered."""


class TrainerLock:
    """Says that this process trains a run, until it is released or the process ends.

    Raises BlockingIOError where another object holds it. Processes that are forked later do not.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._descriptor = _opened(run_dir, Role.TRAINER)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise
        except OSError:
            pass  # a file system without locks: then nobody can tell
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _closed_in_fork(reference()))

    def release(self) -> None:
        """Gives the lock up; harmless when repeated."""
        if self._descriptor >= 0:
            remove_lock(self._run_dir, Role.TRAINER)
            self.close()

    def close(self) -> None:
        """Closes this process's hold on the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def lock_for(run_dir: Path, helper: Role) -> int:
    """A descriptor that holds a helper's lock: hand it to the process and close it here."""
    descriptor = _opened(run_dir, helper)
    with suppress(OSError):  # a file system without locks: then nobody can wait either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def remove_lock(run_dir: Path, role: Role) -> None:
    """Forgets the lock of a process that has ended."""
    with suppress(OSError):
        (run_dir / role).unlink(missing_ok=True)


def await_release(run_dir: Path, role: Role, seconds: float) -> bool:
    """Returns when no process holds the lock any more, or after that time; says whether it is free."""
    deadline = time.monotonic() + seconds
    while held := is_held(run_dir, role):
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    return not held


def is_held(run_dir: Path, role: Role) -> bool:
    """Whether a process holds the lock."""
    try:
        descriptor = os.open(run_dir / role, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _opened(run_dir: Path, role: Role) -> int:
    return os.open(run_dir / role, os.O_CREAT | os.O_RDWR, 0o644)


def _closed_in_fork(lock: TrainerLock | None) -> None:
    if lock is not None:
        lock.close()
