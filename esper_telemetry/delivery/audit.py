"""What a backend holds of a run beside what the journal says that it should hold: every key of every update."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from esper_telemetry.core.record import Record
from esper_telemetry.journal.read import entries, run_info
from esper_telemetry.sinks.protocol import Shown, Sink, StoredMetrics


@dataclass(slots=True)
class Audit:
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


def audit(run_dir: str | os.PathLike[str], sink: Sink) -> Audit | None:
    """Reads the backend of a sink back and compares it; None where the sink cannot say what its backend holds.

    Raises what reading raises where a backend does not answer, FileNotFoundError where there is no journal.
    """
    stored_by: Callable[..., StoredMetrics | None] | None = getattr(sink, "stored", None)
    shown_by: Callable[..., Shown] | None = getattr(sink, "shown", None)
    if stored_by is None or shown_by is None:
        return None
    run = run_info(run_dir)
    stored = stored_by(run)
    return None if stored is None else compared(_records(run_dir), shown_by(run), stored)


def compared(updates: Mapping[int, list[Record]], shown: Shown, stored: StoredMetrics) -> Audit:
    """The comparison itself; where a journal holds an update twice, either record will do."""
    found = Audit(ended=stored.ended, untouched=not stored.rows, repeated=stored.repeated)
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


def ranges(updates: list[int]) -> Iterator[str]:
    """Sorted numbers as people write them: 1-3, 7."""
    for _, group in groupby(enumerate(updates), key=lambda pair: pair[1] - pair[0]):
        members = [update for _, update in group]
        yield str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"


def wanted_by(sink: Sink, found: Audit) -> Callable[[int], bool]:
    """Which updates make a backend whole; all from the first on where it draws nothing behind a later point."""
    lacking = frozenset(found.lacking)
    if getattr(sink, "only_forward", False) and lacking:
        first = min(lacking)
        return lambda update: update >= first
    return lambda update: update in lacking
