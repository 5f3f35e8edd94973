"""Is anything missing? Every backend of a run compared with its journal, and what is left open by a trainer that is gone, ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from esper_telemetry.core.record import RunStatus
from esper_telemetry.core.redaction import MASKED
from esper_telemetry.delivery.catch_up import BackendAudit, audit, format_ranges, replay
from esper_telemetry.delivery.cursors import Cursors
from esper_telemetry.delivery.status import deliveries_under_way, one_line, read_status, replay_command
from esper_telemetry.journal.file import end_if_open, journal_path
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.journal.lock import HELPER_ROLES, Role, is_held
from esper_telemetry.journal.read import read_contents
from esper_telemetry.sinks.protocol import Sink
from esper_telemetry.sinks.registry import as_sink

STALE_SECONDS: Final = 30.0
"""How long a journal without an end must have been left alone before it is ended: not every file system has locks."""
MOST_KEYS: Final = 5


@dataclass(frozen=True, slots=True)
class SinkCheck:
    """One backend of a run.

    Attributes:
        name: of the sink.
        audit: what was found; None where nothing could be compared.
        reason: why not.
        command: what repairs it; empty where nothing is to be done, or can be.
        note: what was done, or what else is to be known.
        under_way: whether a process of the run still delivers what is missing.
    """

    name: str
    audit: BackendAudit | None = None
    reason: str = ""
    command: str = ""
    note: str = ""
    under_way: bool = False

    @property
    def equal(self) -> bool | None:
        """Whether the backend holds exactly what the journal holds; None where that is not known."""
        return None if self.audit is None else self.audit.equal

    def __str__(self) -> str:
        said = [self._finding(), self.note, f"repair it with: {self.command}" if self.command else ""]
        return f"{self.name}: {'; '.join(part for part in said if part)}"

    def _finding(self) -> str:
        if self.audit is None:
            return self.reason
        return (
            "; ".join(_findings(self.audit)) or f"all {self.audit.numbers:,} numbers of {self.audit.updates:,} updates"
        )

    def as_dict(self) -> dict[str, Any]:
        """The same for programs."""
        found = self.audit
        numbers = (
            {}
            if found is None
            else {
                "updates": found.updates,
                "numbers": found.numbers,
                "missing_updates": list(format_ranges(sorted(found.absent))),
                "incomplete_updates": list(format_ranges(sorted(found.incomplete))),
                "missing": dict(found.missing),
                "different": dict(found.different),
                "repeated": dict(found.repeated),
                "unknown_updates": list(format_ranges(found.unknown)),
                "ended": found.ended,
            }
        )
        known = {
            "name": self.name,
            "equal": self.equal,
            "reason": self.reason,
            "command": self.command,
            "note": self.note,
            "under_way": self.under_way,
        }
        return {**known, **numbers}


@dataclass(frozen=True, slots=True)
class RunHealth:
    """A run and its backends.

    Attributes:
        records: in the journal.
        status: how the run ended; None where it goes on.
        under_way: whether a process still trains or delivers it.
        closed_stale: whether it was left open by a trainer that is gone, and ended now.
        lost: lines that the journal could not take, as the disk was full for too long.
        sinks: its backends.
        last_update: of its records.
        failure: the event of the exception that ended it; None without one.
        damaged: numbers of the lines of the journal that are left out everywhere.
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

    @property
    def well(self) -> bool:
        """Whether no backend is known to lack anything."""
        return not self.lost and all(sink.equal is not False for sink in self.sinks)


def doctor(run_dir: str | os.PathLike[str], *, progress: Callable[[str], object] = lambda name: None) -> RunHealth:
    """Compares every backend of a run with its journal; a run whose trainer is gone is ended as killed, in the backends too.

    `progress` is called with the name of each backend before it is read, and how many there are.

    Raises FileNotFoundError where there is no journal, ValueError where it does not say which run it is.
    """
    directory = journal_path(run_dir).parent.absolute()
    read_contents(directory)
    under_way = any(is_held(directory, role) for role in (Role.TRAINER, *HELPER_ROLES))
    closed = not under_way and _abandoned(directory) and end_if_open(directory, RunStatus.KILLED)
    known = read_contents(directory)
    ended = known.status is not None and not under_way
    delivered = deliveries_under_way(directory)
    uris = sorted(_uris(directory).items())
    sinks = []
    for place, (name, uri) in enumerate(uris, 1):
        progress(f"{name} ({place} of {len(uris)})")
        sinks.append(_marked(_examined(directory, name, uri, ended=ended), name in delivered))
    return RunHealth(
        *(known.records, known.status, under_way, closed, known.lost, tuple(sinks)),
        *(known.recorded, known.failure, known.damaged),
    )


def _marked(sink: SinkCheck, under_way: bool) -> SinkCheck:
    """Of a delivery that is under way, what is missing needs no repair yet."""
    if not under_way or sink.equal:
        return sink
    return replace(sink, under_way=True, note="still being delivered", command="")


def _abandoned(directory: Path) -> bool:
    return time.time() - journal_path(directory).stat().st_mtime >= STALE_SECONDS


def _uris(directory: Path) -> Mapping[str, str]:
    """How each sink that the run has, or was replayed into, is spelled; what lives in a program only has no spelling."""
    noted = {name: str(entry.get("uri", name)) for name, entry in read_status(directory).items()}
    known = {name: name for name in Cursors(directory).names()} | noted
    return {name: uri for name, uri in known.items() if uri}


def _examined(directory: Path, name: str, uri: str, *, ended: bool) -> SinkCheck:
    if MASKED in uri:
        return SinkCheck(name, reason="its address holds a password that is not kept: name it with --sink")
    try:
        sink = as_sink(uri)
    except (ValueError, TypeError, ImportError) as error:
        return SinkCheck(name, reason=f"cannot be made from its name here ({one_line(error)})")
    return check_backend(directory, sink, name=name, ended=ended)


def check_backend(directory: Path, sink: Sink, *, name: str, ended: bool) -> SinkCheck:
    """One backend compared with the journal; a run that is over is ended there too, where nothing else is wrong."""
    try:
        found = audit(directory, sink)
    except Exception as error:  # whatever a client raises whose server does not answer
        return SinkCheck(name, reason=f"cannot be read: {one_line(error)}")
    if found is None:
        return SinkCheck(name, reason="cannot say what it holds")
    if found.missing:
        return SinkCheck(name, found, command=f"{replay_command(directory, sink)} --missing")
    if ended and found.ended is False:
        closed = replay(directory, sink, missing=True).complete
        return SinkCheck(name, found, note="it was left open, and is ended now" if closed else "it is still open")
    return SinkCheck(name, found)


def _findings(found: BackendAudit) -> Iterator[str]:
    if found.missing:
        updates = ", ".join(format_ranges(found.lacking))
        yield f"{found.missing.total():,} of {found.numbers:,} numbers are missing, in updates {updates}"
    for what, counted in (("differ", found.different), ("stand there more than once", found.repeated)):
        if counted:
            keys = ", ".join(key for key, _ in counted.most_common(MOST_KEYS))
            yield f"{counted.total():,} numbers {what}, of {keys}{' and others' if len(counted) > MOST_KEYS else ''}"
    if found.unknown:
        yield f"updates {', '.join(format_ranges(found.unknown))} are not in the journal"
