"""SwanLab as a sink of esper_telemetry: a row per record, and alarms as texts.

What a plugin needs: a class with `open`, `write` and `close`, and an entry point in the group `esper_telemetry.sinks` (`pyproject.toml`).
With `in_process = False` it runs in the process that feeds all backends. `OSError` tries again, `PermanentSinkError` gives up, and after
`ValueError` delivery searches for the refused record. Its test is `esper_telemetry.testing.check_sink(SwanLabSink)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from esper_telemetry import Alarm, PermanentSinkError, Record, RunInfo, RunStatus


@dataclass
class SwanLabSink:
    """Logs the run to a SwanLab project, over environment steps.

    Attributes:
        project: the project's name.
        mode: online, local, or offline for a folder in the run directory that `swanlab sync` uploads.
    """

    project: str = "esper_telemetry"
    mode: str = "offline"
    _run: Any = field(default=None, init=False, repr=False, compare=False)

    in_process: ClassVar[bool] = False

    @classmethod
    def from_uri(cls, rest: str, options: Mapping[str, str]) -> SwanLabSink:
        """Return the sink of `swanlab[:PROJECT][?mode=online|local|offline]`."""
        unknown = options.keys() - {"mode"}
        if unknown or options.get("mode", cls.mode) not in ("online", "local", "offline"):
            raise ValueError(f"sink swanlab takes mode=online, local or offline, got {dict(options)}")
        return cls(rest or cls.project, options.get("mode", cls.mode))

    @property
    def name(self) -> str:
        """`swanlab:` and the project."""
        return f"swanlab:{self.project}"

    def import_client(self) -> None:
        """Import SwanLab before any thread starts."""
        import swanlab  # noqa: F401 - for its effect

    def open(self, run: RunInfo) -> None:
        """Start the run, or continue the run with this id."""
        import swanlab

        folder = None if run.run_dir is None else str(run.run_dir / "swanlab")
        names = {"project": self.project, "name": run.name, "id": run.run_id, "config": dict(run.config)}
        try:
            self._run = swanlab.init(**names, mode=self.mode, log_dir=folder, resume="allow", reinit=True)
        except (ValueError, RuntimeError) as error:
            raise PermanentSinkError(f"SwanLab refuses the run: {error}") from error

    def write(self, records: Sequence[Record]) -> None:
        """Add a row per record, at its environment step."""
        for record in records:
            row = {**record.values, "axis/update": float(record.axes.update)}
            self._run.log(row, step=record.axes.env_step)

    def alarm(self, alarm: Alarm) -> None:
        """Add the alarm as a text."""
        import swanlab

        self._run.log({f"alarms/{alarm.type}": swanlab.Text(alarm.text)}, step=alarm.axes.env_step)

    def close(self, status: RunStatus) -> None:
        """Deliver the waiting rows; harmless when repeated."""
        if self._run is not None:
            self._run.finish()
            self._run = None
