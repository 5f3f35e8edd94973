"""What a backend holds of a run beside what the journal says that it should hold: every key of every update.

A journal sent into a backend after the fact, or alongside.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Final

from esper_telemetry.core.record import Record, RunStatus
from esper_telemetry.delivery.cursors import Cursors, count_records_after
from esper_telemetry.delivery.delivery import Delivery
from esper_telemetry.delivery.status import CloseReport, deliveries_under_way, replay_command, sink_report
from esper_telemetry.journal.file import JournalReader, journal_path
from esper_telemetry.journal.lock import Role, is_held
from esper_telemetry.journal.read import entries, run_info
from esper_telemetry.sinks.protocol import Shown, Sink, StoredMetrics, sink_name


@dataclass(slots=True)
class BackendAudit:
    """One backend compared with the journal.

    Attributes:
        updates: that the journal holds.
        numbers: that the backend should hold.
        absent: updates of which the backend holds nothing.
        incomplete: updates of which it holds some numbers and lacks others.
        missing: by key, how many numbers the backend lacks, those of absent updates too.
        different: by key, how many numbers are not the journal's.
        repeated: by key, how many numbers stand there more than once.
        unknown: updates that the backend holds and the journal does not.
        ended: whether the backend takes the run for ended; None where it does not say.
        untouched: whether the backend holds nothing of the run at all.
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
        """Whether the backend holds exactly what the journal holds."""
        return not (self.missing or self.different or self.repeated or self.unknown)

    @property
    def lacking(self) -> list[int]:
        """Updates of which the backend lacks something."""
        return sorted([*self.absent, *self.incomplete])


def audit(run_dir: str | os.PathLike[str], sink: Sink) -> BackendAudit | None:
    """Reads the backend of a sink back and compares it; None where the sink cannot say what its backend holds.

    Raises what reading raises where a backend does not answer, FileNotFoundError where there is no journal.
    """
    stored_by: Callable[..., StoredMetrics | None] | None = getattr(sink, "stored", None)
    shown_by: Callable[..., Shown] | None = getattr(sink, "shown", None)
    if stored_by is None or shown_by is None:
        return None
    run = run_info(run_dir)
    stored = stored_by(run)
    return None if stored is None else compare_records(_records(run_dir), shown_by(run), stored)


def compare_records(updates: Mapping[int, list[Record]], shown: Shown, stored: StoredMetrics) -> BackendAudit:
    """The comparison itself; where a journal holds an update twice, either record will do."""
    found = BackendAudit(ended=stored.ended, untouched=not stored.rows, repeated=stored.repeated)
    for update, records in updates.items():
        versions = [shown(record) for record in records]
        expected = versions[0]
        found.updates += 1
        found.numbers += len(expected)
        row = stored.rows.get(update)
        if row is None:
            found.absent.append(update)
            found.missing.update(expected.keys())
            continue
        missing = expected.keys() - row.keys()
        if missing:
            found.incomplete.append(update)
            found.missing.update(missing)
        for key in expected.keys() & row.keys():
            if all(version.get(key) != row[key] for version in versions):
                found.different[key] += 1
    found.unknown.extend(sorted(stored.rows.keys() - updates.keys()))
    return found


def _records(run_dir: str | os.PathLike[str]) -> dict[int, list[Record]]:
    updates: dict[int, list[Record]] = {}
    for entry in entries(run_dir):
        if isinstance(entry, Record):
            updates.setdefault(entry.axes.update, []).append(entry)
    return updates


def format_ranges(updates: list[int]) -> Iterator[str]:
    """Sorted numbers as people write them: 1-3, 7."""
    for _, group in groupby(enumerate(updates), key=lambda pair: pair[1] - pair[0]):
        members = [update for _, update in group]
        yield str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"


def repair_filter(sink: Sink, found: BackendAudit) -> Callable[[int], bool]:
    """Which updates make a backend whole; all from the first on where it draws nothing behind a later point."""
    lacking = frozenset(found.lacking)
    if getattr(sink, "only_forward", False) and lacking:
        first = min(lacking)
        return lambda update: update >= first
    return lambda update: update in lacking


CATCH_UP_POLL_SECONDS: Final = 0.2
MAX_REPLAY_FAILURES: Final = 8
"""Failures in a row that end a replay: some fifteen seconds."""

_logger = logging.getLogger("esper_telemetry")


def replay(run_dir: str | os.PathLike[str], sink: Sink, *, follow: bool = False, missing: bool = False) -> CloseReport:
    """Sends a journal into a sink: what is missing if the sink has taken some of it before, else all.

    What a sink has taken is kept under its name in `cursors.json`. With `follow` it waits for lines that are still to
    come, until the end line, however often the sink fails; otherwise it stops at the last line, or after 8 failures in
    a row. A run without an end line is then closed as killed; replayed again when it has one, it gets the rest and its
    true end. `sent` counts what this call has sent.

    With `missing` the backend is read first, and gets what it lacks, whatever it has taken: someone has deleted it, a
    disk was full, a record was refused. A backend that draws nothing behind a later point gets everything from the first
    gap on, and takes what it had from there as void. Sinks without `stored` get everything again.

    A process that goes on delivering to this sink after the end of the run is waited for.

    Raises FileNotFoundError where there is no journal, BlockingIOError where the trainer delivers to this sink itself, without `follow`
    ValueError where the journal does not say which run it is; with `missing`, what reading the backend raises.
    """
    path = journal_path(run_dir)
    if not follow:
        run_info(run_dir)
    _await_others(path.parent.absolute(), sink_name(sink))
    cursors = Cursors(path.parent.absolute())
    reader, patience = JournalReader(path.absolute()), None if follow else MAX_REPLAY_FAILURES
    wanted = _lacking(path.parent, sink) if missing else None
    delivery = Delivery(sink, reader, cursors=cursors, patience=patience, wanted=wanted)
    before = delivery.cursor.quarantined
    if not follow:
        delivery.finish(RunStatus.KILLED)
    delivery.run()
    refused = delivery.cursor.quarantined - before
    status = replace(delivery.status, records=delivery.sent, quarantined=refused)
    pending = count_records_after(path.parent, delivery.cursor)
    return CloseReport((sink_report(status, pending=pending, command=replay_command(path.parent, sink)),))


def _await_others(run_dir: Path, name: str) -> None:
    """Waits for a process that goes on after the end of the run: two writers on one cursor would send records twice.

    Raises BlockingIOError where the trainer itself has not ended: that may take for ever, and may be this process.
    """
    told = False
    while name in deliveries_under_way(run_dir):
        if is_held(run_dir, Role.TRAINER):
            raise BlockingIOError(f"{run_dir} is still being trained, and delivers to {name} itself: wait for its end")
        if not told:
            _logger.warning("esper-telemetry: waiting for the background process that delivers %s to %s", run_dir, name)
            told = True
        time.sleep(CATCH_UP_POLL_SECONDS)


def _lacking(run_dir: Path, sink: Sink) -> Callable[[int], bool]:
    found = audit(run_dir, sink)
    return repair_filter(sink, found) if found is not None else lambda update: True
