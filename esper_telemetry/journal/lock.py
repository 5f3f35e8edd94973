"""Who appends to a journal besides the trainer: a lock that lives as long as that process, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

LOCK_NAME: Final = "writer.lock"
POLL_SECONDS: Final = 0.05


def lock_for_writer(run_dir: Path) -> int:
    """A descriptor that holds the lock: hand it to the process that will write, and close it here."""
    descriptor = os.open(run_dir / LOCK_NAME, os.O_CREAT | os.O_RDWR, 0o644)
    with suppress(OSError):  # a file system without locks: then nobody can wait either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def remove_lock(run_dir: Path) -> None:
    """Forgets the lock of a process that has ended."""
    (run_dir / LOCK_NAME).unlink(missing_ok=True)


def await_writer(run_dir: Path, seconds: float) -> None:
    """Returns when no process holds the lock any more, or after that time."""
    deadline = time.monotonic() + seconds
    while _is_held(run_dir) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _is_held(run_dir: Path) -> bool:
    try:
        descriptor = os.open(run_dir / LOCK_NAME, os.O_RDWR)
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
