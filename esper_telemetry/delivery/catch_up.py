"""Bring a backend up to date with the journal: compare the two, and send what is missing, after the run or during it."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Final

from esper_telemetry.core.record import Record, RunStatus
from esper_telemetry.delivery.delivery import Delivery
from esper_telemetry.delivery.status import (
    CloseReport,
    Cursors,
    count_records_after,
    deliveries_under_way,
    replay_command,
    sink_report,
)
from esper_telemetry.journal.file import JournalReader, journal_path
from esper_telemetry.journal.lock import Role, is_held
from esper_telemetry.journal.read import entries, run_info
from esper_telemetry.sinks.sink_protocol import (
    Shown,
    Sink,
    StoredMetrics,
    SupportsAudit,
    SupportsForwardOnly,
    sink_name,
)

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


def compare_records(
    records: Iterable[tuple[int, list[Record]]], numbers_of: Shown, stored: StoredMetrics
) -> BackendAudit:
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
        BlockingIOError: the trainer delivers to this sink itself.
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
    delivery = Delivery(
        sink, JournalReader(path.absolute()), cursors=Cursors(directory), patience=patience, needs_update=needs_update
    )
    before = delivery.cursor.quarantined
    if not follow:
        delivery.finish(RunStatus.KILLED)
    delivery.run(progress)
    refused = delivery.cursor.quarantined - before
    status = replace(delivery.status, records=delivery.sent, quarantined=refused)
    pending = count_records_after(directory, delivery.cursor)
    return CloseReport((sink_report(status, pending=pending, command=replay_command(path.parent, sink)),))


def _await_other_delivery(run_dir: Path, name: str) -> None:
    """Wait for a process that continues after the end of the run: two writers on one cursor would send records twice.

    Raises BlockingIOError if the trainer has not ended: this may take forever, and it may be this process.
    """
    warned = False
    while name in deliveries_under_way(run_dir):
        if is_held(run_dir, Role.TRAINER):
            raise BlockingIOError(f"{run_dir} is still being trained, and delivers to {name} itself: wait for its end")
        if not warned:
            _logger.warning("esper-telemetry: waiting for the background process that delivers %s to %s", run_dir, name)
            warned = True
        time.sleep(WAIT_POLL_SECONDS)
