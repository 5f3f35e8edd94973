"""Trackio: a row per record, and an alert per alarm, in a local database that `trackio show` draws."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from esper_telemetry.core.messages import capitalized
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Record, RunInfo, RunStatus
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.sinks.layout import UPDATE, KeyBudget, overview_names
from esper_telemetry.sinks.sink_protocol import PermanentSinkError, Place, Shown, StoredMetrics, check_options, require_package

LEVELS: Final = {AlarmLevel.INFO: "INFO", AlarmLevel.WARN: "WARN", AlarmLevel.CRITICAL: "ERROR"}
UNUSUAL: Final = re.compile(r"[^A-Za-z0-9_.-]+")
MAX_NAME_CHARACTERS: Final = 100
ID_CHARACTERS: Final = 6
"""Beginning of the run's id in its name, because Trackio identifies runs by their names."""


@dataclass
class TrackioSink:
    """Logs the run to a Trackio project, over environment steps.

    Attributes:
        project: name of the project.
        max_keys: maximum number of keys.
        details: also show the numbers of single layers and the histories of other keys.
    """

    project: str = "esper_telemetry"
    max_keys: int = 300
    details: bool = False
    _run: Any = field(default=None, init=False, repr=False, compare=False)
    _selection: KeyBudget | None = field(default=None, init=False, repr=False, compare=False)
    _overview: Mapping[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _outcome: str = field(default="", init=False, repr=False, compare=False)

    in_process: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_package("trackio", "TrackioSink")

    @classmethod
    def from_uri(cls, rest: str, options: Mapping[str, str]) -> TrackioSink:
        """Return the sink of `trackio[:PROJECT]`."""
        check_options("trackio", options)
        return cls(rest or cls.project)

    @property
    def name(self) -> str:
        """`trackio:` and the project."""
        return f"trackio:{self.project}"

    def place(self, run: RunInfo) -> Place:
        """Return the project and the run, and the command that shows them."""
        return Place(f"project {self.project}, run {_name(run)}", f"trackio show --project {self.project}")

    def import_client(self) -> None:
        """Import Trackio."""
        import trackio  # noqa: F401 - for its effect

    def open(self, run: RunInfo) -> None:
        """Start the run, or resume the run with this id; raises PermanentSinkError if Trackio refuses it."""
        import trackio

        settings = {"esper_run_id": run.run_id, **{key: str(value) for key, value in run.config.items()}}
        options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        try:
            with redirect_stdout(io.StringIO()):
                self._run = trackio.init(self.project, name=_name(run), config=settings, resume="allow", **options)
        except ValueError as error:
            raise PermanentSinkError(f"Trackio refuses the run: {error}") from error
        self._selection, self._overview = self._budget(run), overview_names(run)

    def write(self, records: Sequence[Record]) -> None:
        """Add a row per record, at the record's environment step."""
        if self._selection is None:
            raise ValueError("TrackioSink.write needs open first")
        for record in records:
            row = _row(self._selection.select(record))
            overview = {name: row[key] for key, name in self._overview.items() if key in row}
            self._run.log({**row, **overview}, step=record.axes.env_step)

    def alarm(self, alarm: Alarm) -> None:
        """Add an alert when an alarm is raised, gets worse or ends."""
        level = "INFO" if alarm.event is AlarmEvent.CLEAR else LEVELS[alarm.level]
        self._alert(alarm.type, alarm.text, level, alarm.axes.env_step)

    def outcome(self, event: JournalEvent) -> None:
        """Keep the outcome for the alert at the end."""
        self._outcome = str(event.data.get("text", ""))

    def close(self, status: RunStatus) -> None:
        """Add the outcome as an alert, and deliver the waiting rows; harmless when repeated."""
        if self._run is None:
            return
        if self._outcome:
            self._alert("outcome", f"{capitalized(self._outcome)}.", "INFO", None)
        from trackio.context_vars import current_run

        with redirect_stdout(io.StringIO()):
            self._run.finish()
        if current_run.get() is self._run:
            current_run.set(None)  # Trackio finishes it again when the process exits, and prints that
        self._run = None

    def _alert(self, title: str, text: str, level: str, step: int | None) -> None:
        from trackio import AlertLevel

        with redirect_stdout(io.StringIO()):  # the console sink prints alarms
            self._run.alert(title, text, level=AlertLevel[level], step=step)

    def stored(self, run: RunInfo) -> StoredMetrics:
        """Return the numbers of the run in the local database."""
        from trackio.sqlite_storage import SQLiteStorage

        stored = StoredMetrics()
        for row in SQLiteStorage.get_logs(self.project, _name(run)):
            for key, value in row.items():
                if UPDATE in row and isinstance(value, int | float) and key not in ("step", "timestamp"):
                    stored.add(int(row[UPDATE]), key, float(value))
        return stored

    def shown(self, run: RunInfo) -> Shown:
        """Return a function that maps a record to the numbers that Trackio should have, without the overview, which repeats them."""
        budget = self._budget(run, quiet=True)
        return lambda record: _row(budget.select(record))

    def _budget(self, run: RunInfo, *, quiet: bool = False) -> KeyBudget:
        return KeyBudget(run, "Trackio", max_keys=self.max_keys, details=self.details, quiet=quiet)


def _name(run: RunInfo) -> str:
    name = UNUSUAL.sub("-", run.name)[:MAX_NAME_CHARACTERS]
    return f"{name}-{run.run_id[:ID_CHARACTERS]}"


def _row(record: Record) -> dict[str, float]:
    return {**record.values, UPDATE: float(record.axes.update)}
