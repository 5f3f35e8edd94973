"""Weights & Biases: one row per record, the axes among its values; offline without a key.

Alarms are alerts, lines in the run's summary and a table at its end. None of them is a row, so the step does not move. Rows never pass
`step=`, because W&B drops rows whose step is before its counter.

Stored numbers are read from the files of an offline run, or from a server. A client that is killed loses up to a second of rows that it
has accepted, so a resumed run reads the last update from disk.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from esper_telemetry.core.backends import wandb_records
from esper_telemetry.core.files import parse_json, read_file
from esper_telemetry.core.messages import did_you_mean
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Record, RunInfo, RunStatus
from esper_telemetry.core.redaction import error_line
from esper_telemetry.journal.lines import JournalEvent, encode_axes, plain
from esper_telemetry.sinks.layout import TASK_AXIS, UPDATE, KeyBudget, by_tag, counts_by_tag, family_of, overview_names, with_at_most
from esper_telemetry.sinks.pages import ALARM_COLUMNS, REPORT_NAME, IncidentCards, alarm_text, cause_of, run_note
from esper_telemetry.sinks.sink_protocol import (
    OVERVIEW_FAMILY,
    DeadClientError,
    OpenedSink,
    PermanentSinkError,
    Place,
    Shown,
    StoredMetrics,
    check_options,
    logger,
    require_package,
    require_run_dir,
)
from esper_telemetry.sinks.wandb.wandb_run import MODES, DiskWatch, JoinedRun, OwnRun, start, why_offline

ALERT_INTERVAL: Final = timedelta(minutes=5)
"""W&B sends one alert per title, which is the alarm's type, within this time."""
ALERT_LEVELS: Final = {AlarmLevel.CRITICAL: "ERROR", AlarmLevel.WARN: "WARN", AlarmLevel.INFO: "INFO"}

MAX_BINS: Final = 512
MAX_PROJECT_LENGTH: Final = 128
FORBIDDEN_IN_PROJECT: Final = r"/\#?%:"
NAME_OPTIONS: Final = ("entity", "group", "job_type")


@dataclass
class WandbSink(OpenedSink):
    """Logs the run to Weights & Biases; without an API key the run is kept offline, and no prompt asks for a key.

    `WandbSink(run=wandb.run)` writes into a run that is already open in this process: the sink never ends it, and never displaces
    rows that its owner logs with `step=`.

    Attributes:
        project: the project's name.
        mode: `online`, `offline`, or `auto`, which is online if a key is found.
        entity: user or team; the account's default if not given.
        group, job_type: name of the experiment that the run is part of, and its task there, such as `train` or `rank3`. Ranks that
            report as one are one run and need neither.
        directory: parent of the folder `wandb`; the run's directory by default.
        run: an open run to join.
        max_keys: maximum number of keys.
        details: also show the numbers of single layers and the histories of other keys.
    """

    project: str = "esper_telemetry"
    mode: str = "auto"
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    directory: str | Path | None = None
    run: Any = None
    max_keys: int = 300
    details: bool = False
    _open: _OpenRun | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_package("wandb", "WandbSink")
        if not 0 < len(self.project) <= MAX_PROJECT_LENGTH or set(self.project) & set(FORBIDDEN_IN_PROJECT):
            rule = f"1 to {MAX_PROJECT_LENGTH} characters, none of {' '.join(FORBIDDEN_IN_PROJECT)}"
            raise ValueError(f"a W&B project must have {rule}, got {self.project!r}")
        if self.mode not in MODES:
            near = did_you_mean(self.mode, MODES)
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}{near}")
        for name, value in self._names().items():
            if value is not None and not value.strip():
                raise ValueError(f"{name} of a W&B run must not be empty, got {value!r}")

    @classmethod
    def from_uri(cls, rest: str, options: Mapping[str, str]) -> WandbSink:
        """Return the sink of `wandb[:PROJECT][?mode=offline|online&entity=NAME&group=NAME&job_type=NAME]`."""
        check_options("wandb", options, ["mode", *NAME_OPTIONS])
        return cls(
            project=rest or cls.project,
            mode=options.get("mode", cls.mode),
            entity=options.get("entity"),
            group=options.get("group"),
            job_type=options.get("job_type"),
        )

    @property
    def in_process(self) -> bool:
        """True for a joined run, which only this process can write to."""
        return self.run is not None

    @property
    def name(self) -> str:
        """`wandb:` and the project, or the joined run's id."""
        return f"wandb:run/{self.run.id}" if self.run is not None else f"wandb:{self.project}"

    @property
    def uri(self) -> str:
        """The address for `replay --to`; empty for a joined run."""
        if self.run is not None:
            return ""
        settings = {"mode": None if self.mode == "auto" else self.mode, **self._names()}
        options = {name: value for name, value in settings.items() if value is not None}
        return f"wandb:{self.project}" + (f"?{urlencode(options)}" if options else "")

    def place(self, run: RunInfo) -> Place:
        """Return the folder of an offline run, why it is offline and how to upload it, or the id of a run on a server."""
        if self.run is not None:
            return Place("the W&B run that was open", "")
        folder = self._parent(run) / "wandb"
        if any(folder.glob(f"run-*-{run.run_id}")) and not any(folder.glob(f"offline-run-*-{run.run_id}")):
            return Place(f"run {run.run_id} of project {self.project} on the W&B server", "")
        command = f"wandb sync {shlex.quote(str(folder))}/offline-run-*-{run.run_id}"
        return Place(str(folder), command, note=why_offline(self.mode))

    def prepare_child(self) -> None:
        """Use a separate W&B client process, and silence the login.

        A run that the user opened leaves the address of its client process in the environment; a shared client process would
        end with the training process. With a key, the login would ask the server for the account's name only to print it.
        """
        os.environ.pop("WANDB_SERVICE", None)
        os.environ.setdefault("WANDB_SILENT", "true")

    def import_client(self) -> None:
        """Import W&B's client and the messages that it stores."""
        import wandb.errors
        import wandb.proto.wandb_internal_pb2  # noqa: F401 - for its effect

    def open(self, run: RunInfo) -> None:
        """Start the run, or resume the run with that id; offline after a minute without a server."""
        target: OwnRun | JoinedRun
        if self.run is not None:
            self.run.config.update({"esper_telemetry": {"run_id": run.run_id, "config": plain(run.config)}})
            target = JoinedRun(self.run)
        else:
            settings = {"project": self.project, **self._names()}
            target = OwnRun(start(run, self._parent(run), mode=self.mode, settings=settings))
        self._open = _OpenRun(target, self._budget(run))

    def held(self, run: RunInfo) -> int | None:
        """Return the last update of earlier parts of an offline run on disk, because a killed client has lost its last rows."""
        if self._open is None or self.run is not None or not self._open.target.run.offline:
            return None
        folder = self._parent(run) / "wandb"
        this = Path(self._open.target.run.settings.sync_dir)
        return last_update(folder, self._open.target.run.id, self.project, besides=this)

    def stored(self, run: RunInfo) -> StoredMetrics | None:
        """Return the numbers of an offline run on disk, or of an online one on the server; None for a joined run."""
        if self.run is not None:
            return None
        folder = self._parent(run) / "wandb"
        if any(folder.glob(f"offline-run-*-{run.run_id}")):
            return stored_in(folder, run.run_id, self.project)
        if any(folder.glob(f"run-*-{run.run_id}")):
            return stored_on_server(run.run_id, self.project, self.entity)
        return StoredMetrics()

    def shown(self, run: RunInfo) -> Shown:
        """Return a function that maps a record to the numbers that W&B should hold."""
        budget = self._budget(run, quiet=True)

        def numbers(record: Record) -> dict[str, float]:
            selected = budget.select(record)
            return {**selected.values, **axes_of(record), **counts_by_tag(selected)}

        return numbers

    def close(self, status: RunStatus) -> None:
        """Add the table of alarms and end the run with the exit code of its status; a joined run stays open."""
        if self._open is not None:
            opened, self._open = self._open, None
            with self._classified():
                opened.close(status)

    @contextmanager
    def _classified(self) -> Iterator[None]:
        """Turn W&B's exceptions for a dead client process, or a run that has ended, into the errors of a sink."""
        from wandb.errors import UsageError

        try:
            yield
        except (ConnectionResetError, BrokenPipeError) as error:
            raise DeadClientError(f"the W&B client process is gone: {error}") from error
        except UsageError as error:
            raise PermanentSinkError(f"the W&B run accepts no more rows: {error}") from error

    def _names(self) -> dict[str, str | None]:
        return {"entity": self.entity, "group": self.group, "job_type": self.job_type}

    def _parent(self, run: RunInfo) -> Path:
        if self.directory is not None:
            return Path(self.directory).absolute()
        return require_run_dir(run, "WandbSink", "directory=")

    def _budget(self, run: RunInfo, *, quiet: bool = False) -> KeyBudget:
        return KeyBudget(run, "W&B", max_keys=self.max_keys, details=self.details, quiet=quiet)


class _OpenRun:
    def __init__(self, target: OwnRun | JoinedRun, budget: KeyBudget) -> None:
        self.target = target
        self.incidents = IncidentCards()
        self._budget = budget
        self._last: Record | None = None
        self._overview = overview_names(budget.run)
        self._defined: set[str] = set()
        self._disk = DiskWatch(Path(target.run.settings.sync_dir)) if isinstance(target, OwnRun) else None

    def write(self, records: Sequence[Record]) -> None:
        if self._disk is not None:
            self._disk.check()
        self._last = records[-1] if records else self._last
        for record in records:
            row = row_of(self._budget.select(record))
            row |= {name: row[key] for key, name in self._overview.items() if key in row}
            names = {self.target.chart_name(key): key for key in row if not key.startswith("axis/")}
            for name in names.keys() - self._defined:  # draw each name over the axis of its family
                is_overview = name.startswith(f"{OVERVIEW_FAMILY}/")
                self.target.run.define_metric(name, step_metric=TASK_AXIS if is_overview else family_of(names[name]).axis)
                self._defined.add(name)
            self.target.log(row)

    def show(self, event: Alarm | JournalEvent, cards: IncidentCards) -> None:
        """Update summary and notes."""
        if isinstance(event, Alarm):
            self._show_alarm(event, cards)
        else:
            outcome = {"outcome": event.data.get("outcome", ""), "outcome/text": event.data.get("text", "")}
            self.target.run.summary.update(outcome)
        self._write_verdict(cards)

    def _show_alarm(self, alarm: Alarm, cards: IncidentCards) -> None:
        """Alert if the alarm is raised or becomes critical; update active alarms, the first cause, and the failure in the summary."""
        run = self.target.run
        is_critical_now = alarm.event is AlarmEvent.UPDATE and alarm.level is AlarmLevel.CRITICAL
        if alarm.event is AlarmEvent.RAISE or is_critical_now:
            text = f"{alarm_text(alarm)}\n{alarm.key} at update {alarm.axes.update}, step {alarm.axes.env_step}"
            run.alert(title=alarm.type, text=text, level=ALERT_LEVELS[alarm.level], wait_duration=ALERT_INTERVAL)
        first = cause_of(cards.of(cards.alarms[0].incident))
        run.summary.update(
            {
                "alarms/raised": len(cards.raised),
                "alarms/active": ", ".join(sorted(cards.active)),
                "alarms/first": "" if first is None else f"{first.type}: {alarm_text(first)}",
                **({"alarms/failure": cards.failure} if cards.failure or self.incidents.failure else {}),
            }
        )

    def _write_verdict(self, cards: IncidentCards) -> None:
        """Set the verdict in the summary and, in an own run, in the notes at the top of its page."""
        self.target.run.summary.update({"verdict": cards.verdict()})
        if isinstance(self.target, OwnRun):
            self.target.run.notes = run_note(cards, self._last, self._budget.run)

    def close(self, status: RunStatus) -> None:
        """Add the table of alarms and the page of the run, if any, and end the run; what cannot be stored costs a warning."""
        run, run_dir = self.target.run, self._budget.run.run_dir
        if self.incidents.alarms:
            import wandb

            table = wandb.Table(columns=list(ALARM_COLUMNS), data=self.incidents.rows())
            _try("the table of alarms", lambda: run.summary.update({"alarms/table": table}))
        page = Path(run_dir or "") / REPORT_NAME
        if run_dir is not None and page.is_file():
            _try(REPORT_NAME, lambda: run.log_artifact(str(page), name=f"report-{run.id}", type="report"))
        self.target.close(status)


def _try(what: str, store: Callable[[], object]) -> None:
    """Store an artifact; log a warning if it cannot be stored."""
    try:
        store()
    except (ConnectionResetError, BrokenPipeError):
        raise
    except Exception as error:  # storing an artifact raises errors of pydantic, requests and W&B
        logger.warning("W&B does not store %s (%s); the run directory has it", what, error_line(error))


def row_of(record: Record) -> dict[str, Any]:
    """Return one row: all axes, all values, histograms in at most as many bins as W&B takes."""
    import wandb

    row: dict[str, Any] = {**record.values, **axes_of(record)}
    for tag, histogram in by_tag(record).items():
        fitting = with_at_most(MAX_BINS, histogram)
        row[tag] = wandb.Histogram(np_histogram=(list(fitting.counts), list(fitting.edges)))
    return row


def axes_of(record: Record) -> dict[str, float]:
    """Return the axes as values of a row."""
    return {f"axis/{name}": value for name, value in encode_axes(record.axes).items()}


RUNNING: Final = "running"
SERVER_TIMEOUT_SECONDS: Final = 30
SETTLE_SECONDS: Final = 2.0
"""Time for which a file without an end must not grow, because a client that was asked to finish may still write."""


class FileSummary(NamedTuple):
    """The contents of one `.wandb` file: its project, its last update (0 for none), and whether the run was ended."""

    project: str
    update: int
    ended: bool


def last_update(folder: Path, run_id: str, project: str, *, besides: Path) -> int | None:
    """Return the last update in any part of the run, 0 for none; None if no part exists outside the folder `besides`."""
    files = [file for file in folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb") if file.parent.name != besides.name]
    summaries = [summary for summary in map(_settled_summary, files) if summary.project == project]
    return max((summary.update for summary in summaries), default=None)


def stored_in(folder: Path, run_id: str, project: str) -> StoredMetrics:
    """Return the numbers in all parts of an offline run."""
    stored = StoredMetrics()
    for file in sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")):
        if _settled_summary(file).project != project:
            continue
        stored.ended = False
        for kind, record in _records(file):
            if kind == "history":
                update = _update(record.history)
                for key, value in _history_numbers(record.history):
                    stored.add(update, key, value)
            elif kind == "exit":
                stored.ended = True
    return stored


def stored_on_server(run_id: str, project: str, entity: str | None) -> StoredMetrics:
    """Return all rows of the run's history on the server; raises the client's exceptions if it does not answer or lacks the run."""
    import wandb

    path = "/".join(part for part in (entity, project, run_id) if part)
    run = wandb.Api(timeout=SERVER_TIMEOUT_SECONDS).run(path)
    stored = StoredMetrics(ended=run.state != RUNNING)
    for row in run.scan_history():
        if row.get(UPDATE) is None:
            continue
        for key, value in row.items():
            if key.startswith("_") or value is None:  # W&B's own columns
                continue
            if isinstance(value, Mapping):  # a histogram, as the sum of its counts
                stored.add(int(row[UPDATE]), key, float(sum(value.get("values", ()))))
            elif isinstance(value, int | float):
                stored.add(int(row[UPDATE]), key, float(value))
    return stored


def _settled_summary(file: Path) -> FileSummary:
    """Return the summary of a file once it has an end or stops growing."""
    size = -1
    while not (summary := summary_of(file)).ended and size != (size := file.stat().st_size):
        time.sleep(SETTLE_SECONDS)
    return summary


def summary_of(file: Path) -> FileSummary:
    """Return the summary of a `.wandb` file as it is now."""
    summary = FileSummary("", 0, False)
    for kind, record in _records(file):
        if kind == "run":
            summary = summary._replace(project=record.run.project)
        elif kind == "history":
            summary = summary._replace(update=max(summary.update, _update(record.history)))
        elif kind == "exit":
            summary = summary._replace(ended=True)
    return summary


def _records(file: Path) -> Iterator[tuple[str | None, Any]]:
    """Yield the kind and the message of each record."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in wandb_records(read_file(file)):
        record = Record.FromString(data)
        yield record.WhichOneof("record_type"), record


def _update(history: Any) -> int:
    keys = (("/".join(item.nested_key) or item.key, item.value_json) for item in history.item)
    return int(next((parse_json(value) for key, value in keys if key == UPDATE), 0))


def _history_numbers(history: Any) -> Iterator[tuple[str, float]]:
    """Yield the row's numbers, without W&B's own; a histogram as the sum of its counts."""
    for item in history.item:
        key, *part = item.nested_key or [item.key]
        if key.startswith("_") or (part and part != ["values"]):
            continue
        value = parse_json(item.value_json)
        yield key, float(sum(value) if part else value)
