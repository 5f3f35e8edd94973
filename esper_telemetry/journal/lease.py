"""A run directory that is ours: claimed for a new run, or taken over from a run that has stopped."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.lock import HAS_LOCKS, HELPER_ROLES, TrainerLock, await_release
from esper_telemetry.journal.memory import MemoryJournal
from esper_telemetry.journal.read import JournalContents, read_contents, run_info

if not HAS_LOCKS:
    raise ImportError(
        "esper_telemetry.Telemetry does not run on this system, which has no file locks (Python's module fcntl): use Linux or macOS,"
        " or WSL 2 on Windows. Metric functions, the trainer and commands that read a run work here."
    )

MAX_HELPER_SECONDS: Final = 60.0
"""How long the helpers of a killed trainer may take to deliver what it left, before who resumes the run gives up."""

MISTAKES: Final = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ})
"""Errors that say that a path can be no run directory, on any disk; others come and go with the machine."""

_logger = logging.getLogger("esper_telemetry")


@dataclass(slots=True)
class RunLease:
    """The right to write a run's journal.

    Attributes:
        journal: to append to.
        earlier: contents of the journal before this process; None for a new run.
    """

    journal: Journal | MemoryJournal
    earlier: JournalContents | None = None
    _lock: TrainerLock | None = None

    @property
    def run_dir(self) -> Path | None:
        """Where the journal is."""
        return self.journal.run_dir

    def release(self) -> None:
        """Closes the journal and lets others resume the run; harmless when repeated."""
        self.journal.close()
        if self._lock is not None:
            self._lock.release()


def lease_new_run(run_dir: str | Path | Literal["auto"] | None, name: str | None) -> RunLease:
    """A run directory for a new run; a default one gets a number where the second is taken.

    Where nothing can be written, a warning says so and the run has no journal.

    Raises FileExistsError where it holds a journal already, another OSError where the path can be no directory.
    """
    if run_dir is None:
        return RunLease(MemoryJournal())
    try:
        journal = _new_journal(name) if run_dir == "auto" else Journal.create(_directory(run_dir))
    except OSError as error:
        if isinstance(error, FileExistsError | NotADirectoryError) or error.errno in MISTAKES:
            raise
        message = (
            "esper-telemetry: %s: training goes on without journal, and sinks that need a run directory get nothing;"
            " pass a run directory that can be written"
        )
        _logger.warning(message, error)
        return RunLease(MemoryJournal())
    return RunLease(journal, None, _locked(journal.run_dir, str(run_dir)))


def lease_existing_run(run_dir: str | Path) -> RunLease:
    """A run directory whose run goes on; helpers of a killed trainer are waited for.

    Raises:
        FileNotFoundError: it holds no journal.
        ValueError: the journal does not say which run it is.
        BlockingIOError: the run is still being trained, or delivered.
    """
    run_dir = _directory(run_dir)
    run_info(run_dir)
    directory = run_dir.absolute()
    lock = _locked(directory, str(run_dir))
    try:
        for helper in HELPER_ROLES:
            if not await_release(directory, helper, MAX_HELPER_SECONDS):
                raise BlockingIOError(
                    f"a process of {run_dir} still delivers what was measured before the run stopped: try again later"
                )
        found = read_contents(run_dir)
        journal = Journal.open(run_dir)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    journal.records = found.records
    return RunLease(journal, found, lock)


def _directory(run_dir: str | Path) -> Path:
    """The path that is meant, `~` expanded.

    Raises:
        TypeError, ValueError: it is none.
        NotADirectoryError: a file is there.
    """
    if not isinstance(run_dir, str | os.PathLike):
        raise TypeError(f"run_dir must be a path, 'auto' or None, got {run_dir!r}")
    if not os.fspath(run_dir).strip():
        raise ValueError(f"run_dir must name a directory, got {run_dir!r}: pass 'auto' for a new one, None for none")
    path = Path(run_dir).expanduser()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"run_dir {str(run_dir)!r} is a file: pass the path of a directory")
    return path


def _locked(directory: Path, shown: str) -> TrainerLock | None:
    """The lock of the run; None, and a warning, where the system refuses it. Raises BlockingIOError where another process has it."""
    try:
        return TrainerLock(directory)
    except BlockingIOError:
        raise BlockingIOError(f"{shown} is still being trained: a run goes on in one process at a time") from None
    except OSError as error:
        message = (
            "esper-telemetry: cannot lock run directory %s (%s): training goes on; let no other process resume this run"
        )
        _logger.warning(message, directory, error.strerror)
        return None


def _new_journal(name: str | None) -> Journal:
    stem = f"{name or Path(sys.argv[0]).stem or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        with suppress(FileExistsError):
            return Journal.create(Path("runs") / f"{stem}{suffix}")
    raise FileExistsError(f"a hundred runs named runs/{stem} have begun in this second: pass a run directory")
