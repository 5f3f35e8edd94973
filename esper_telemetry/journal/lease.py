"""The lease of a run directory: for a new run, or for one that goes on."""

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
"""How long a resumed run waits for the helpers of a killed trainer, which deliver what it left."""

INVALID_PATH_ERRORS: Final = frozenset(
    {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EILSEQ}
)
"""Error numbers for a path that can be no run directory, on any disk; others come and go with the machine."""

_logger = logging.getLogger("esper_telemetry")


@dataclass(slots=True)
class RunLease:
    """The right to write a run's journal.

    Attributes:
        journal: of the run, open for appending.
        earlier: contents of the journal before this process; None for a new run.
    """

    journal: Journal | MemoryJournal
    earlier: JournalContents | None = None
    _lock: TrainerLock | None = None

    @property
    def run_dir(self) -> Path | None:
        """Directory of the run; None for a run without."""
        return self.journal.run_dir

    def release(self) -> None:
        """Close the journal and let others resume the run; harmless when repeated."""
        self.journal.close()
        if self._lock is not None:
            self._lock.release()


def lease_new_run(run_dir: str | Path | Literal["auto"] | None, name: str | None) -> RunLease:
    """Create a run directory; "auto" makes one below `runs`, named after the run and the time.

    Where nothing can be written, a warning says so and the run has no journal.

    Raises FileExistsError where the directory holds a journal already, another OSError where the path can be no directory.
    """
    if run_dir is None:
        return RunLease(MemoryJournal())
    try:
        journal = _new_journal(name) if run_dir == "auto" else Journal.create(_directory(run_dir))
    except OSError as error:
        if isinstance(error, FileExistsError | NotADirectoryError) or error.errno in INVALID_PATH_ERRORS:
            raise
        message = (
            "esper-telemetry: %s: training goes on without journal, and sinks that need a run directory get nothing;"
            " pass a run directory that can be written"
        )
        _logger.warning(message, error)
        return RunLease(MemoryJournal())
    return RunLease(journal, None, _locked(journal.run_dir, str(run_dir)))


def lease_existing_run(run_dir: str | Path) -> RunLease:
    """Take a run directory whose run goes on, after the helpers of a killed trainer have ended.

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
        contents = read_contents(run_dir)
        journal = Journal.open(run_dir)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    journal.records = contents.records
    return RunLease(journal, contents, lock)


def _directory(run_dir: str | Path) -> Path:
    """Return the path, `~` expanded; raises TypeError or ValueError for what is none, NotADirectoryError for a file."""
    if not isinstance(run_dir, str | os.PathLike):
        raise TypeError(f"run_dir must be a path, 'auto' or None, got {run_dir!r}")
    if not os.fspath(run_dir).strip():
        raise ValueError(f"run_dir must name a directory, got {run_dir!r}: pass 'auto' for a new one, None for none")
    path = Path(run_dir).expanduser()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"run_dir {str(run_dir)!r} is a file: pass the path of a directory")
    return path


def _locked(directory: Path, name: str) -> TrainerLock | None:
    """Return the lock of the run; None, and a warning, where the system refuses it. Raises BlockingIOError where another process has it."""
    try:
        return TrainerLock(directory)
    except BlockingIOError:
        raise BlockingIOError(f"{name} is still being trained: a run goes on in one process at a time") from None
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
