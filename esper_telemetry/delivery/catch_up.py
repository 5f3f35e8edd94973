"""Bring a backend up to date with the journal: compare the two, and send what is missing, after the run or during it.

`doctor` compares every backend of a run with its journal, and closes a run that its trainer left open.
"""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from esper_telemetry.core.backends import client_error
from esper_telemetry.core.record import Record, RunStatus
from esper_telemetry.core.redaction import HIDDEN
from esper_telemetry.delivery.delivery import Delivery
from esper_telemetry.delivery.status import (
    CloseReport,
    Cursors,
    clear_under_way,
    count_records_after,
    deliveries_under_way,
    hung_process,
    read_status,
    replay_command,
    sink_report,
)
from esper_telemetry.journal.file import JournalReader, end_if_open, journal_path
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.journal.lock import HELPER_ROLES, Role, holder_pid, is_held
from esper_telemetry.journal.read import entries, read_contents, run_info
from esper_telemetry.sinks.sink_protocol import Shown, Sink, StoredMetrics, SupportsAudit, SupportsForwardOnly, sink_name
from esper_telemetry.sinks.sink_registry import as_sink, leads_outside

WAIT_POLL_SECONDS: Final = 0.2
MAX_REPLAY_FAILURES: Final = 8
"""Failures in a row that end a replay, after about fifteen seconds."""

_logger = logging.getLogger("esper_telemetry")


@dataclass(slots=True)
class BackendAudit:
    """One backend compared with the journal: every key of every update.

    Attributes:
        updates: number of updates in the journal.
        numbers: how many numbers the backend should hold.
        absent: updates that are missing from the backend entirely.
        incomplete: updates of which some numbers are missing.
        missing: how many numbers the backend lacks, by key, absent updates included.
        different: how many numbers differ from the journal's, by key.
        repeated: how many numbers the backend has more than once, by key.
        unknown: updates that the backend holds and the journal does not.
        ended: whether the backend shows the run as ended; None if it does not say.
        untouched: whether the backend is empty.
    """

    updates: int = 0
    numbers: int = 0
    absent: list[int] = field(default_factory=list)
    incomplete: list[int] = field(default_factory=list)
    missing: Counter[str] = field(default_factory=Counter)
    different: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)
    unknown: list[int] = field(default_factory=list)
    ended: bool | None = None
    untouched: bool = False

    @property
    def equal(self) -> bool:
        """True if the backend holds exactly what the journal holds."""
        return not (self.missing or self.different or self.repeated or self.unknown)

    @property
    def lacking(self) -> list[int]:
        """Updates that are absent or incomplete in the backend."""
        return sorted([*self.absent, *self.incomplete])


def audit(run_dir: str | os.PathLike[str], sink: Sink) -> BackendAudit | None:
    """Read the backend of a sink back and compare it; None if the sink cannot read its backend.

    The comparison uses the backend's own data, as its viewers read them, and not the client's reports.

    Raises:
        FileNotFoundError: the journal is missing.
        Exception: reading the backend failed.
    """
    if not isinstance(sink, SupportsAudit):
        return None
    run = run_info(run_dir)
    stored = sink.stored(run)
    if stored is None:
        return None
    return compare_records(_records_by_update(run_dir), sink.shown(run), stored)


def _records_by_update(run_dir: str | os.PathLike[str]) -> Iterator[tuple[int, list[Record]]]:
    """Yield each update with its records, without holding those of other updates: 100,000 records take 6 GB."""
    with closing(JournalReader(journal_path(run_dir))) as reader:
        counts = Counter(entry.axes.update for entry in reader.read(values=False) if isinstance(entry, Record))
    waiting: dict[int, list[Record]] = {}
    for entry in entries(run_dir):
        if isinstance(entry, Record):
            update = entry.axes.update
            waiting.setdefault(update, []).append(entry)
            if len(waiting[update]) == counts[update]:
                yield update, waiting.pop(update)
    yield from waiting.items()  # of a journal that has grown


def compare_records(records: Iterable[tuple[int, list[Record]]], numbers_of: Shown, stored: StoredMetrics) -> BackendAudit:
    """Compare the records of each update with the stored numbers; if a journal holds an update twice, either record may match."""
    result = BackendAudit(ended=stored.ended, untouched=not stored.rows, repeated=stored.repeated)
    unknown = set(stored.rows)
    for update, versions in records:
        unknown.discard(update)
        expected_versions = [numbers_of(record) for record in versions]
        expected = expected_versions[0]
        result.updates += 1
        result.numbers += len(expected)
        row = stored.rows.get(update)
        if row is None:
            result.absent.append(update)
            result.missing.update(expected.keys())
            continue
        if row == expected:
            continue
        missing = expected.keys() - row.keys()
        if missing:
            result.incomplete.append(update)
            result.missing.update(missing)
        for key in expected.keys() & row.keys():
            if all(version.get(key) != row[key] for version in expected_versions):
                result.different[key] += 1
    result.unknown.extend(sorted(unknown))
    return result


def format_ranges(updates: list[int]) -> Iterator[str]:
    """Yield the ranges of sorted numbers: 1-3, 7."""
    for _, group in groupby(enumerate(updates), key=lambda pair: pair[1] - pair[0]):
        members = [update for _, update in group]
        yield str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"


def repair_filter(sink: Sink, result: BackendAudit) -> Callable[[int], bool]:
    """Return which updates complete a backend; all from the first missing one if it draws no points before a later point."""
    lacking = frozenset(result.lacking)
    if isinstance(sink, SupportsForwardOnly) and sink.only_forward and lacking:
        first = min(lacking)
        return lambda update: update >= first
    return lambda update: update in lacking


def replay(
    run_dir: str | os.PathLike[str],
    sink: Sink,
    *,
    follow: bool = False,
    missing: bool = False,
    progress: Callable[[int], object] | None = None,
) -> CloseReport:
    """Send a journal to a sink: the remaining records if the sink has taken some of them before, else all.

    `cursors.json` records what a sink has taken, under its name. With `follow` the call waits for further lines until the end line,
    however often the sink fails; otherwise it stops at the last line, or after 8 failures in a row. A run without an end line is then
    closed as killed. If it is replayed again after its end, the sink gets the rest and the true end. `sent` counts the records of this
    call.

    With `missing` the backend is read first, and receives what it lacks, even if it has taken it before: it may have been deleted, a disk
    may have been full, or a record refused. A backend that draws no points before a later point receives everything from the first
    missing update on, and discards what it had from there. Sinks without `stored` receive everything again.

    The call waits for a background process that still delivers to this sink after the end of the run. `progress` is called with the
    number of records sent so far, after every batch.

    Raises:
        FileNotFoundError: the journal is missing.
        BlockingIOError: the trainer delivers to this sink itself, or the background process hangs.
        ValueError: without `follow`, the journal does not say which run it is.
        Exception: with `missing`, reading the backend failed.
    """
    path = journal_path(run_dir)
    directory = path.parent.absolute()
    if not follow:
        run_info(run_dir)
    _await_other_delivery(directory, sink_name(sink))
    needs_update = None
    if missing:
        result = audit(directory, sink)
        needs_update = (lambda update: True) if result is None else repair_filter(sink, result)
    patience = None if follow else MAX_REPLAY_FAILURES
    delivery = Delivery(sink, JournalReader(path.absolute()), cursors=Cursors(directory), patience=patience, needs_update=needs_update)
    before = delivery.cursor.quarantined
    if not follow:
        delivery.finish(RunStatus.KILLED)
    delivery.run(progress)
    refused = delivery.cursor.quarantined - before
    status = replace(delivery.status, records=delivery.sender.sent, quarantined=refused)
    pending = count_records_after(directory, delivery.cursor)
    return CloseReport((sink_report(status, pending=pending, command=replay_command(path.parent, sink)),))


def _await_other_delivery(run_dir: Path, name: str) -> None:
    """Wait for a process that continues after the end of the run: two writers on one cursor would send records twice.

    Raises BlockingIOError if the trainer has not ended or the process hangs: this may take forever, and it may be this process.
    """
    warned = False
    while name in deliveries_under_way(run_dir):
        if is_held(run_dir, Role.TRAINER):
            raise BlockingIOError(f"{run_dir} is still being trained, and delivers to {name} itself: wait for its end")
        if sentence := hung_process(run_dir):
            raise BlockingIOError(sentence)
        if not warned:
            message = "esper-telemetry: waiting for the background process that delivers %s to %s (PID %s)"
            _logger.warning(message, run_dir, name, holder_pid(run_dir, Role.SINKS))
            warned = True
        time.sleep(WAIT_POLL_SECONDS)


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
            check = replace(check, under_way=True, note=hung_process(directory) or "still being delivered", command="")
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
        return SinkCheck(name, result, note="it was left open, and has been closed now" if closed else "it is still open")
    return SinkCheck(name, result)
