"""Locks in the run directory, one for the trainer and one for each helper process; the system releases them when the process ends.

POSIX has `flock`, whose locks helper processes inherit with the descriptor. On Windows portalocker locks, without helper processes.
"""

from __future__ import annotations

import errno
import os
import time
import weakref
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

from esper_telemetry.core.files import open_own, open_regular

POLL_SECONDS: Final = 0.05


class Role(StrEnum):
    """The work of a process for a run; the value is the name of its lock file."""

    TRAINER = "trainer.lock"
    WRITER = "writer.lock"
    SINKS = "sinks.lock"
    FILES = "files.lock"


HELPER_ROLES: Final = (Role.WRITER, Role.SINKS)
"""Helper processes outlive a killed trainer until all its records are delivered."""


class TrainerLock:
    """The lock of the process that trains a run, until `release` or its end.

    Raises BlockingIOError if another object holds it. Processes that are forked later do not hold it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._descriptor = -1
        while self._descriptor < 0:
            self._descriptor = open_own(run_dir / Role.TRAINER, os.O_RDWR)
            try:
                lock_file(self._descriptor, wait=False)
            except BlockingIOError:
                self.close()
                raise
            except OSError:
                break  # a file system without locks: other processes cannot see who trains
            if not os.fstat(self._descriptor).st_nlink:  # the holder of the lock has removed its file meanwhile
                self.close()
        reference = weakref.ref(self)

        def close_copy() -> None:
            if (lock := reference()) is not None:
                lock.close()

        if hasattr(os, "register_at_fork"):  # not on Windows, where processes do not fork
            os.register_at_fork(after_in_child=close_copy)

    def release(self) -> None:
        """Give the lock up; harmless when repeated."""
        if self._descriptor >= 0:
            remove_lock(self._run_dir, Role.TRAINER)
            self.close()

    def close(self) -> None:
        """Close this process's descriptor of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def lock_file(descriptor: int, *, wait: bool, shared: bool = False) -> None:
    """Lock an open file until it is closed everywhere.

    Raises BlockingIOError if another process holds the lock and `wait` is False, another OSError if locks are not supported.
    On Windows every lock is exclusive, and other descriptors cannot read the bytes of a locked file.
    """
    try:
        import fcntl
    except ImportError:
        _lock_on_windows(descriptor, wait=wait)
    else:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def _lock_on_windows(descriptor: int, *, wait: bool) -> None:
    import portalocker

    while True:
        try:
            portalocker.lock(descriptor, portalocker.LockFlags.EXCLUSIVE | portalocker.LockFlags.NON_BLOCKING)
        except portalocker.AlreadyLocked as error:
            if not wait:
                raise BlockingIOError(errno.EAGAIN, "another process holds the lock") from error
            time.sleep(POLL_SECONDS)
        except portalocker.LockException as error:
            raise OSError(errno.ENOLCK, str(error)) from error
        else:
            return


def lock_for(run_dir: Path, helper: Role) -> int:
    """Return a descriptor that holds a helper's lock: hand it to the helper and close it here."""
    descriptor = open_own(run_dir / helper, os.O_RDWR)
    with suppress(OSError):  # a file system without locks: other processes cannot wait for it either
        lock_file(descriptor, wait=False)
    return descriptor


def write_holder(descriptor: int, pid: int) -> None:
    """Write the ID of the process that holds a lock into its file."""
    with suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(pid).encode())


def holder_pid(run_dir: Path, role: Role) -> str:
    """Return the ID of the process that holds a lock; `?` if it is not known."""
    try:
        with os.fdopen(open_regular(run_dir / role, os.O_RDONLY), "rb") as file:
            pid = file.read(20).decode()
    except (OSError, ValueError):
        return "?"
    return pid if pid.isdecimal() else "?"


def remove_lock(run_dir: Path, role: Role) -> None:
    """Remove the lock file of a process that has ended."""
    with suppress(OSError):
        (run_dir / role).unlink(missing_ok=True)


def await_release(run_dir: Path, role: Role, seconds: float) -> bool:
    """Wait until no process holds the lock, for that time at most; return whether it is free."""
    deadline = time.monotonic() + seconds
    while is_held(run_dir, role):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def is_held(run_dir: Path, role: Role) -> bool:
    """Return whether a process holds the lock."""
    try:
        descriptor = open_regular(run_dir / role, os.O_RDWR)
    except OSError:
        return False
    try:
        lock_file(descriptor, wait=False, shared=True)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
