"""`doctor`: compare every backend of a run with its journal, and close a run that its trainer left open."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from esper_telemetry.core.backends import client_error
from esper_telemetry.core.record import RunStatus
from esper_telemetry.core.redaction import HIDDEN
from esper_telemetry.delivery.catch_up import BackendAudit, audit, format_ranges, replay
from esper_telemetry.delivery.status import Cursors, clear_under_way, deliveries_under_way, read_status, replay_command
from esper_telemetry.journal.file import end_if_open, journal_path
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.journal.lock import HELPER_ROLES, Role, is_held
from esper_telemetry.journal.read import read_contents, run_info
from esper_telemetry.sinks.sink_protocol import Sink
from esper_telemetry.sinks.sink_registry import as_sink, leads_outside

MIN_IDLE_SECONDS: Final = 30.0
"""Time since the last write after which a journal without an end is closed: not every file system has locks."""
MAX_NAMED_KEYS: Final = 5


@dataclass(frozen=True, slots=True)
class SinkCheck:
    """One backend of a run.

    Attributes:
        name: name of the sink.
        audit: the comparison; None if it was not possible.
        reason: why the comparison was not possible.
        unreadable: whether the backend did not answer, or its contents could not be understood.
        command: command that repairs the backend; empty if no repair is needed or possible.
        note: what `doctor` did, or further remarks.
        under_way: whether a process of the run still delivers the missing records.
    """

    name: str
    audit: BackendAudit | None = None
    reason: str = ""
    unreadable: bool = False
    command: str = ""
    note: str = ""
    under_way: bool = False

    @property
    def equal(self) -> bool | None:
        """True if the backend holds exactly what the journal holds; None if that is not known."""
        return None if self.audit is None else self.audit.equal

    @property
    def healthy(self) -> bool:
        """True unless the backend could not be read or is known to differ from the journal."""
        return not self.unreadable and self.equal is not False

    def __str__(self) -> str:
        finding = self.reason
        if self.audit is not None:
            whole = f"all {self.audit.numbers:,} numbers of {self.audit.updates:,} updates"
            finding = "; ".join(_findings(self.audit)) or whole
        parts = [finding, self.note, f"repair it with: {self.command}" if self.command else ""]
        return f"{self.name}: {'; '.join(part for part in parts if part)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the check as plain values, for programs."""
        check = {
            "name": self.name,
            "equal": self.equal,
            "reason": self.reason,
            "command": self.command,
            "note": self.note,
            "under_way": self.under_way,
        }
        if self.audit is None:
            return check
        return check | {
            "updates": self.audit.updates,
            "numbers": self.audit.numbers,
            "missing_updates": list(format_ranges(sorted(self.audit.absent))),
            "incomplete_updates": list(format_ranges(sorted(self.audit.incomplete))),
            "missing": dict(self.audit.missing),
            "different": dict(self.audit.different),
            "repeated": dict(self.audit.repeated),
            "unknown_updates": list(format_ranges(self.audit.unknown)),
            "ended": self.audit.ended,
        }


def _findings(audit: BackendAudit) -> Iterator[str]:
    if audit.missing:
        updates = ", ".join(format_ranges(audit.lacking))
        yield f"{audit.missing.total():,} of {audit.numbers:,} numbers are missing, in updates {updates}"
    for what, counted in (("differ", audit.different), ("are stored more than once", audit.repeated)):
        if counted:
            keys = ", ".join(key for key, _ in counted.most_common(MAX_NAMED_KEYS))
            yield f"{counted.total():,} numbers {what}, of {keys}{' and others' if len(counted) > MAX_NAMED_KEYS else ''}"
    if audit.unknown:
        yield f"updates {', '.join(format_ranges(audit.unknown))} are not in the journal"


@dataclass(frozen=True, slots=True)
class RunHealth:
    """A run and its backends.

    Attributes:
        records: number of records in the journal.
        status: how the run ended; None if it has not ended.
        under_way: whether a process still trains or delivers it.
        closed_stale: whether `doctor` has closed the run because its trainer had ended without closing it.
        lost: number of lines that the journal could not store because the disk was full for too long.
        sinks: its backends.
        last_update: number of its last update.
        failure: the event of the exception that ended it; None without one.
        damaged: numbers of the damaged journal lines, which all readers leave out.
    """

    records: int
    status: RunStatus | None
    under_way: bool
    closed_stale: bool
    lost: int
    sinks: tuple[SinkCheck, ...]
    last_update: int = 0
    failure: JournalEvent | None = None
    damaged: tuple[int, ...] = ()


def sink_uris(run_dir: Path) -> dict[str, str]:
    """Return the address of each backend that files in a run directory name, by the sink's name."""
    uris = {name: name for name in Cursors(run_dir).names()}
    uris |= {name: str(entry.get("uri", name)) for name, entry in read_status(run_dir).items()}
    return {name: uri for name, uri in uris.items() if uri}  # a sink that only a program defines has no address


def doctor(
    run_dir: str | os.PathLike[str],
    *,
    agreed: Collection[str] = (),
    without: Collection[str] = (),
    progress: Callable[[str], object] = lambda name: None,
) -> RunHealth:
    """Compare every backend of a run with its journal. If its trainer is gone, end the run as killed, also in the backends.

    Args:
        run_dir: directory of the run.
        agreed: sink URIs outside the run directory that may be read. Others are skipped, because a client would send its token to a
            server that someone else may have chosen.
        without: names of sinks that the caller compares.
        progress: called with the name of each backend before it is read, and the number of backends.

    Raises:
        FileNotFoundError: the journal is missing.
        ValueError: the journal does not say which run it is.
    """
    directory = journal_path(run_dir).parent.absolute()
    run_info(directory)
    under_way = any(is_held(directory, role) for role in (Role.TRAINER, *HELPER_ROLES))
    idle = time.time() - journal_path(directory).stat().st_mtime >= MIN_IDLE_SECONDS
    closed = not under_way and idle and end_if_open(directory, RunStatus.KILLED)
    if not under_way and idle:
        clear_under_way(directory)
    contents = read_contents(directory)
    ended = contents.status is not None and not under_way
    delivering = deliveries_under_way(directory)
    uris = {name: uri for name, uri in sink_uris(directory).items() if name not in without}
    sinks = []
    for number, (name, uri) in enumerate(sorted(uris.items()), 1):
        progress(f"{name} ({number} of {len(uris)})")
        if leads_outside(uri, directory) and uri not in agreed:
            reason = f"not read, because files in the run directory name its address: allow it with --sink {shlex.quote(uri)}"
            sinks.append(SinkCheck(name, reason=reason, unreadable=True))
            continue
        check = _check_uri(directory, name, uri, ended=ended)
        if name in delivering and not check.equal:  # missing records may still arrive
            check = replace(check, under_way=True, note="still being delivered", command="")
        sinks.append(check)
    return RunHealth(
        *(contents.records, contents.status, under_way, closed, contents.lost, tuple(sinks)),
        *(contents.recorded, contents.failure, contents.damaged),
    )


def _check_uri(directory: Path, name: str, uri: str, *, ended: bool) -> SinkCheck:
    if HIDDEN in uri:
        return SinkCheck(name, reason="its address holds a secret that is not stored: name it with --sink")
    try:
        sink = as_sink(uri)
    except (ValueError, TypeError, ImportError) as error:
        return SinkCheck(name, reason=f"cannot be opened by its name here ({client_error(error)})")
    return check_backend(directory, sink, name=name, ended=ended)


def check_backend(directory: Path, sink: Sink, *, name: str, ended: bool) -> SinkCheck:
    """Compare one backend with the journal. If the run is over and nothing else is wrong, end it in the backend too."""
    try:
        result = audit(directory, sink)
    except Exception as error:  # a client whose server does not answer may raise anything
        return SinkCheck(name, reason=f"cannot be read: {client_error(error)}", unreadable=True)
    if result is None:
        return SinkCheck(name, reason="cannot be read back")
    if result.missing:
        return SinkCheck(name, result, command=f"{replay_command(directory, sink)} --missing")
    if ended and result.ended is False:
        closed = replay(directory, sink, missing=True).complete
        return SinkCheck(
            name, result, note="it was left open, and has been closed now" if closed else "it is still open"
        )
    return SinkCheck(name, result)
