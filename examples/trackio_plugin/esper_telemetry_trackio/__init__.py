"""Trackio as a sink of esper_telemetry: a row per record, in a local database that `trackio show` draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from esper_telemetry import PermanentSinkError, Record, RunInfo, RunStatus
from esper_telemetry.sinks.protocol import Shown, StoredMetrics

UPDATE = "axis/update"


@dataclass(frozen=True)
class TrackioSink:
    """Logs the run to a Trackio project, over environment steps.

    Attributes:
        project: the project's name.
    """

    project: str = "esper_telemetry"
    _open: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    in_process: ClassVar[bool] = False

    @classmethod
    def from_uri(cls, rest: str, options: Mapping[str, str]) -> TrackioSink:
        """`trackio[:PROJECT]`."""
        if options:
            raise ValueError(f"sink trackio has no option {next(iter(options))!r}: it has none")
        return cls(rest or cls.project)

    @property
    def name(self) -> str:
        """`trackio:` and the project."""
        return f"trackio:{self.project}"

    def open(self, run: RunInfo) -> None:
        """Starts the run, or goes on with the one of that id."""
        import trackio

        settings = {"esper_run_id": run.run_id, **{key: str(value) for key, value in run.config.items()}}
        try:
            opened = trackio.init(self.project, name=run.run_id, config=settings, resume="allow", embed=False)
        except ValueError as error:
            raise PermanentSinkError(f"Trackio does not take the run: {error}") from error
        self._open["run"] = opened

    def write(self, records: Sequence[Record]) -> None:
        """A row per record, at its environment step."""
        for record in records:
            self._open["run"].log(_row(record), step=record.axes.env_step)

    def close(self, status: RunStatus) -> None:
        """Delivers what waits; harmless when repeated."""
        if "run" in self._open:
            self._open.pop("run").finish()

    def stored(self, run: RunInfo) -> StoredMetrics:
        """What the local database holds of the run."""
        from trackio.sqlite_storage import SQLiteStorage

        found = StoredMetrics()
        for row in SQLiteStorage.get_logs(self.project, run.run_id):
            for key, value in row.items():
                if UPDATE in row and isinstance(value, int | float) and key not in ("step", "timestamp"):
                    found.add(int(row[UPDATE]), key, float(value))
        return found

    def shown(self, run: RunInfo) -> Shown:
        """What it should hold of a record."""
        return _row


def _row(record: Record) -> dict[str, float]:
    return {**record.values, UPDATE: float(record.axes.update)}
