"""What a journal holds already when its run goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from esper_telemetry.journal.file import LOST, JournalReader, journal_path
from esper_telemetry.journal.lines import Entry, JournalEvent, end_status, merge_head
from esper_telemetry.record import Alarm, Axes, Record, RunInfo, RunStatus

CHUNK_LINES = 1000


@dataclass(frozen=True, slots=True)
class Held:
    """The state of a journal.

    Attributes:
        info: the run, as its last `run` line and the descriptions of keys say.
        axes: of the last record; None before the first.
        records: how many there are.
        seq: the last number of a line.
        status: how the run ended; None where nothing says so.
        lost: lines that could not be written, as the disk was full for too long.
        failure: the event of the last exception that ended a part of the run; None without one.
        damaged: numbers of the lines that could not be understood.
    """

    info: RunInfo
    axes: Axes | None
    records: int
    seq: int
    status: RunStatus | None
    lost: int = 0
    failure: JournalEvent | None = None
    damaged: tuple[int, ...] = ()

    @property
    def recorded(self) -> int:
        """The last update that is recorded; 0 before the first."""
        return self.axes.update if self.axes else 0

    def covers(self, axes: Axes) -> bool:
        """Whether an update of these axes was recorded before the run went on: what is recorded stands."""
        return self.axes is not None and axes.within(self.axes)


def run_info(run_dir: str | os.PathLike[str]) -> RunInfo:
    """The run in a directory, without reading its records; raises as `held`."""
    path = journal_path(run_dir)
    reader = JournalReader(path)
    reader.offset = reader.size
    info = reader.head()
    reader.close()
    return _required(info, path)


def held(run_dir: str | os.PathLike[str]) -> Held:
    """What the journal in a run directory holds.

    Raises FileNotFoundError where there is none, ValueError where it does not say which run it is.
    """
    info, axes, records, seq, status, lost, failure = None, None, 0, 0, None, 0, None
    reader = JournalReader(journal_path(run_dir))
    while chunk := reader.read(CHUNK_LINES):
        info, status = merge_head(info, chunk), end_status(chunk)
        seq = max([seq, *(entry.seq for entry in chunk if not isinstance(entry, RunInfo))])
        found = [entry.axes for entry in chunk if isinstance(entry, Record)]
        records += len(found)
        lost += sum(
            entry.data.get("lines", 0) for entry in chunk if isinstance(entry, JournalEvent) and entry.type == LOST
        )
        failures = [entry for entry in chunk if isinstance(entry, JournalEvent) and entry.type == "failure"]
        failure = failures[-1] if failures else failure
        axes = max([*found, *([axes] if axes else [])], key=lambda known: known.update, default=None)
    damaged = reader.damaged_lines()
    reader.close()
    return Held(_required(info, journal_path(run_dir)), axes, records, seq, status, lost, failure, damaged)


def entries(run_dir: str | os.PathLike[str]) -> Iterator[Entry]:
    """Everything in a journal, line by line."""
    reader = JournalReader(journal_path(run_dir))
    try:
        while chunk := reader.read(CHUNK_LINES):
            yield from chunk
    finally:
        reader.close()


def damaged_lines(run_dir: str | os.PathLike[str]) -> tuple[int, ...]:
    """Numbers of the lines of a journal that cannot be understood, from 1; raises FileNotFoundError where there is no journal."""
    reader = JournalReader(journal_path(run_dir))
    while reader.read(CHUNK_LINES):
        pass
    damaged = reader.damaged_lines()
    reader.close()
    return damaged


class Following:
    """Everything in a journal that grows, each line once, however often it is asked for.

    Args:
        run_dir: where the journal is.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._run_dir = run_dir
        self._offset = 0

    def __iter__(self) -> Iterator[Entry]:
        reader = JournalReader(journal_path(self._run_dir), self._offset)
        try:
            while chunk := reader.read(CHUNK_LINES):
                self._offset = reader.offset
                yield from chunk
        finally:
            reader.close()


def alarms(run_dir: str | os.PathLike[str]) -> tuple[Alarm, ...]:
    """The alarms of a journal in the order of its lines; records are passed over unread."""
    reader = JournalReader(journal_path(run_dir))
    try:
        return reader.alarms()
    finally:
        reader.close()


def _required(info: RunInfo | None, path: Path) -> RunInfo:
    if info is None:
        raise ValueError(f"{path} has no line that describes the run")
    return info
