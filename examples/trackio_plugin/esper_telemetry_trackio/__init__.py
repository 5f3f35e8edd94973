"""Trackio as a sink of esper_telemetry: a row per record, in a local database that `trackio show` draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from esper_telemetry import PermanentSinkError, Record, RunInfo, RunStatus
from esper_telemetry.sinks.sink_protocol import Shown, StoredMetrics

UPDATE = "axis/update"


@dataclass
class TrackioSink:
    """Logs the run to a Trackio project, over environment steps.

    Attributes:
        project: the project's name.
    """

    project: str = "esper_telemetry"
    _run: Any = field(default=None, init=False, repr=False, compare=False)

    in_process: ClassVar[bool] = False

    @classmethod
    def from_uri(cls, rest: str, options: Mapping[str, str]) -> TrackioSink:
        """Return the sink of `trackio[:PROJECT]`."""
        if options:
            raise ValueError(f"sink trackio has no option {next(iter(options))!r}: it takes none")
        return cls(rest or cls.project)

    @property
    def name(self) -> str:
        """`trackio:` and the project."""
        return f"trackio:{self.project}"

    def open(self, run: RunInfo) -> None:
        """Start the run, or resume the run with this id."""
        import trackio

        settings = {"esper_run_id": run.run_id, **{key: str(value) for key, value in run.config.items()}}
        try:
            self._run = trackio.init(self.project, name=run.run_id, config=settings, resume="allow", embed=False)
        except ValueError as error:
            raise PermanentSinkError(f"Trackio rejected the run: {error}") from error

    def write(self, records: Sequence[Record]) -> None:
        """Add a row per record, at the record's environment step."""
        for record in records:
            self._run.log(_row(record), step=record.axes.env_step)

    def close(self, status: RunStatus) -> None:
        """Deliver the waiting rows; harmless when repeated."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def stored(self, run: RunInfo) -> StoredMetrics:
        """Return the numbers of the run in the local database."""
        from trackio.sqlite_storage import SQLiteStorage

        stored = StoredMetrics()
        for row in SQLiteStorage.get_logs(self.project, run.run_id):
            for key, value in row.items():
                if UPDATE in row and isinstance(value, int | float) and key not in ("step", "timestamp"):
                    stored.add(int(row[UPDATE]), key, float(value))
        return stored

    def shown(self, run: RunInfo) -> Shown:
        """Return a function that returns the numbers Trackio should have for a record."""
        return _row


def _row(record: Record) -> dict[str, float]:
    return {**record.values, UPDATE: float(record.axes.update)}
