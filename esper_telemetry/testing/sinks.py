"""Two sinks: one that remembers everything, one that fails on demand."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from esper_telemetry.record import Alarm, Record, RunInfo, RunStatus
from esper_telemetry.sinks.stored import Shown, Stored

METHODS = frozenset(["open", "write", "alarm", "close"])


@dataclass
class MemorySink:
    """Remembers what it was given: the runs it was opened for, the records, the alarms, the statuses it was closed with.

    A sink need not have `alarm`: it then gets records only.
    """

    runs: list[RunInfo] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    statuses: list[RunStatus] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    name: str = "memory"
    in_process: bool = True
    _by_run: dict[str, list[Record]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def open(self, run: RunInfo) -> None:
        """Remembers the run."""
        self.runs.append(run)

    def write(self, records: Sequence[Record]) -> None:
        """Remembers the records."""
        self.records.extend(records)
        self._by_run.setdefault(self.runs[-1].run_id, []).extend(records)

    def stored(self, run: RunInfo) -> Stored:
        """The records of that run."""
        stored = Stored(ended=bool(self.statuses))
        for record in self._by_run.get(run.run_id, ()):
            for key, value in record.values.items():
                stored.add(record.axes.update, key, value)
        return stored

    def shown(self, run: RunInfo) -> Shown:
        """All values of a record."""
        return lambda record: record.values

    def alarm(self, alarm: Alarm) -> None:
        """Remembers the alarm."""
        self.alarms.append(alarm)

    def close(self, status: RunStatus) -> None:
        """Remembers the status."""
        self.statuses.append(status)


@dataclass
class FailingSink(MemorySink):
    """Fails in the methods named, and is a `MemorySink` otherwise.

    Attributes:
        fail_in: any of `open`, `write`, `alarm` and `close`.
        error: what is raised there; None only hangs.
        times: how many calls fail before all is well; None never gets well.
        hang_seconds: how long such a call takes before it fails.
        calls: the methods called, in order, failing or not.
    """

    name: str = "failing"
    fail_in: Collection[str] = METHODS
    error: Exception | None = field(default_factory=lambda: RuntimeError("this sink fails on purpose"))
    times: int | None = None
    hang_seconds: float = 0.0
    calls: list[str] = field(default_factory=list)
    failures: int = 0

    def __post_init__(self) -> None:
        unknown = set(self.fail_in) - METHODS
        if unknown:
            raise ValueError(f"fail_in names methods of a sink, open, write, alarm or close; got {sorted(unknown)}")

    def open(self, run: RunInfo) -> None:
        """Fails, or remembers the run."""
        self._called("open")
        super().open(run)

    def write(self, records: Sequence[Record]) -> None:
        """Fails, or remembers the records."""
        self._called("write")
        super().write(records)

    def alarm(self, alarm: Alarm) -> None:
        """Fails, or remembers the alarm."""
        self._called("alarm")
        super().alarm(alarm)

    def close(self, status: RunStatus) -> None:
        """Fails, or remembers the status."""
        self._called("close")
        super().close(status)

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if method not in self.fail_in or (self.times is not None and self.failures >= self.times):
            return
        self.failures += 1
        time.sleep(self.hang_seconds)
        if self.error is not None:
            raise self.error
