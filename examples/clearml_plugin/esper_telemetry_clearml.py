"""ClearML as a sink of esper_telemetry: a scalar per key, alarms as console texts. `examples/swanlab_plugin` says what a plugin needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from esper_telemetry import Alarm, Record, RunInfo, RunStatus


@dataclass
class ClearMLSink:
    """Reports the run to a task of a ClearML project, over environment steps.

    Attributes:
        project: the project's name.
        offline: keep the task in a local session, which `clearml.Task.import_offline_session` uploads.
    """

    project: str = "esper_telemetry"
    offline: bool = False
    _task: Any = field(default=None, init=False, repr=False, compare=False)

    in_process: ClassVar[bool] = False

    @classmethod
    def from_uri(cls, rest: str, options: Mapping[str, str]) -> ClearMLSink:
        """Return the sink of `clearml[:PROJECT][?offline=true]`."""
        if options.keys() - {"offline"} or options.get("offline", "true") not in ("true", "false"):
            raise ValueError(f"sink clearml takes offline=true or false, got {dict(options)}")
        return cls(rest or cls.project, options.get("offline") == "true")

    @property
    def name(self) -> str:
        """`clearml:` and the project."""
        return f"clearml:{self.project}"

    def import_client(self) -> None:
        """Import ClearML before any thread starts."""
        import clearml  # noqa: F401 - for its effect

    def open(self, run: RunInfo) -> None:
        """Start a task; nothing of the process is captured."""
        from clearml import Task
        from clearml.config import config

        # Its reporter is a fork, and a fork of a process with threads may hang.
        config.get("development")["report_use_subprocess"] = False
        Task.set_offline(self.offline)
        self._task = Task.init(
            project_name=self.project,
            task_name=run.name or run.run_id,
            reuse_last_task_id=False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
            auto_resource_monitoring=False,
            auto_connect_streams=False,
        )
        self._task.connect({key: str(value) for key, value in run.config.items()})

    def write(self, records: Sequence[Record]) -> None:
        """Report a scalar per key, at the record's environment step; the family is the chart, as in other backends."""
        logger = self._task.get_logger()
        for record in records:
            for key, value in record.values.items():
                logger.report_scalar(key.partition("/")[0], key, value, iteration=record.axes.env_step)

    def alarm(self, alarm: Alarm) -> None:
        """Report the alarm as a text."""
        self._task.get_logger().report_text(f"{alarm.type}: {alarm.text}")

    def close(self, status: RunStatus) -> None:
        """Deliver the waiting values; harmless when repeated."""
        if self._task is not None:
            self._task.flush(wait_for_uploads=True)
            self._task.close()
            self._task = None
