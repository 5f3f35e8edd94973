"""A journal as a whole, for notebooks, views and tests."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from esper_telemetry.journal.file import JournalReader, journal_path
from esper_telemetry.journal.lines import JournalEvent, encode_axes, end_status, merge_head
from esper_telemetry.record import Alarm, AlarmEvent, Record, RunInfo, RunStatus

if TYPE_CHECKING:
    import pandas as pd

SHOWN_ALARMS: Final = 5
"""Types of alarm that a run shows of itself, the most frequent first."""


@dataclass(frozen=True, slots=True)
class Run:
    """Everything a journal holds.

    Attributes:
        info: its last `run` line, with all descriptions of keys.
        records: one per update, in order; were one there twice, the first counts, as in backends, which take nothing back.
        alarms: what went wrong: when it began, got worse and ended, in order.
        events: everything else that happened, descriptions of keys excepted.
        status: how the run ended; None if it goes on, or was killed together with everything around it.
        damaged: numbers of the lines, from 1, that were left out because they could not be understood.
    """

    info: RunInfo
    records: tuple[Record, ...]
    events: tuple[JournalEvent, ...] = ()
    status: RunStatus | None = None
    damaged: tuple[int, ...] = ()
    alarms: tuple[Alarm, ...] = ()

    @property
    def skipped(self) -> int:
        """Number of `damaged` lines."""
        return len(self.damaged)

    def __repr__(self) -> str:
        """A few lines, whatever it holds."""
        keys = len({key for record in self.records for key in record.values})
        lines = [f"Run {self.info.name!r} in {self.info.run_dir}", f"  status   {self.status or 'no end yet'}"]
        if self.records:
            first, last = self.records[0].axes, self.records[-1].axes
            reach = f": update {first.update} to {last.update}, env_step {first.env_step} to {last.env_step}"
        else:
            reach = ""
        lines.append(f"  records  {len(self.records)} of {keys} keys{reach}")
        raised = Counter(alarm.type for alarm in self.alarms if alarm.event is AlarmEvent.RAISE)
        named = ", ".join(f"{kind} ({count})" for kind, count in raised.most_common(SHOWN_ALARMS))
        more = f" and {len(raised) - SHOWN_ALARMS} types more" if len(raised) > SHOWN_ALARMS else ""
        lines.append(f"  alarms   {named or 'none'}{more}")
        if self.skipped:
            lines.append(f"  skipped  {self.skipped} lines that could not be understood")
        return "\n".join([*lines, "  .to_pandas() makes a table of the records"])

    def to_pandas(self) -> pd.DataFrame:
        """A frame indexed by update, with one column per axis and per key; NaN where a key is absent.

        Raises ImportError without pandas.
        """
        try:
            import pandas as pd
        except ImportError:
            raise ImportError("Run.to_pandas needs pandas: pip install pandas") from None
        index = pd.Index([record.axes.update for record in self.records], name="update")
        return pd.DataFrame([_row(record) for record in self.records], index=index)


def _row(record: Record) -> dict[str, Any]:
    """Axes come first, and win over a key that is spelled like one of them."""
    axes = encode_axes(record.axes)
    del axes["update"]
    return {**axes, **record.values, **axes}


def read_run(run_dir: str | os.PathLike[str]) -> Run:
    """Everything the journal in a run directory holds so far; a warning is logged where lines of it are damaged.

    Raises FileNotFoundError where there is no journal, ValueError where it does not say which run it is.
    """
    reader = JournalReader(journal_path(run_dir))
    entries, damaged = reader.read(), reader.damaged_lines()
    reader.close()
    info = merge_head(None, entries)
    if info is None:
        raise ValueError(f"{reader.path} has no line that describes the run")
    records: dict[int, Record] = {}
    for entry in entries:
        if isinstance(entry, Record):
            records.setdefault(entry.axes.update, entry)
    ordered = tuple(records[update] for update in sorted(records))
    events = tuple(entry for entry in entries if isinstance(entry, JournalEvent) and entry.type != "metrics")
    alarms = tuple(entry for entry in entries if isinstance(entry, Alarm))
    return Run(info, ordered, events, end_status(entries), damaged, alarms)
