"""Weights & Biases: one row per record, the axes among its values, offline where there is no key.

Alarms in a W&B run: alerts for people, a table and a few lines in the summary; none of it is a row, so no step moves.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Record, RunInfo, RunStatus
from esper_telemetry.core.redaction import masked
from esper_telemetry.core.suggestion import did_you_mean
from esper_telemetry.sinks.budget import KeyBudget
from esper_telemetry.sinks.histogram import by_tag, with_at_most
from esper_telemetry.sinks.incidents import COLUMNS, IncidentCards, alarm_text, cause_of
from esper_telemetry.sinks.layout import family_of
from esper_telemetry.sinks.protocol import (
    DeadClientError,
    PermanentSinkError,
    Place,
    Shown,
    StoredMetrics,
    check_options,
    logger,
    require_package,
    require_run_dir,
)
from esper_telemetry.sinks.text import plain
from esper_telemetry.sinks.wandb.disk import Disk
from esper_telemetry.sinks.wandb.run import MODES, JoinedRun, OwnRun, last_update, start, stored_in
from esper_telemetry.sinks.wandb.server import stored_on_server

WAIT: Final = timedelta(minutes=5)
"""W&B sends no second alert of one title, which is the alarm's type, within this time."""

LEVELS: Final = {AlarmLevel.CRITICAL: "ERROR", AlarmLevel.WARN: "WARN", AlarmLevel.INFO: "INFO"}


class WandbAlarms:
    """What is said of alarms in a run that is open."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.incidents = IncidentCards()

    def tell(self, alarm: Alarm) -> None:
        """Alerts where it is raised or has become critical; the summary names what is wrong now, what was first, and why a run failed."""
        known = IncidentCards([*self.incidents.alarms, alarm])
        critical = alarm.event is AlarmEvent.UPDATE and alarm.level is AlarmLevel.CRITICAL
        if alarm.event is AlarmEvent.RAISE or critical:
            text = f"{alarm_text(alarm)}\n{alarm.key} at update {alarm.axes.update}, step {alarm.axes.env_step}"
            self.run.alert(title=alarm.type, text=text, level=LEVELS[alarm.level], wait_duration=WAIT)
        first = cause_of(known.of(known.alarms[0].incident))
        self.run.summary.update(
            {
                "alarms/raised": len(known.raised),
                "alarms/active": ", ".join(sorted(known.active)),
                "alarms/first": "" if first is None else f"{first.type}: {alarm_text(first)}",
                **({"alarms/failure": known.failure} if known.failure or self.incidents.failure else {}),
            }
        )
        self.incidents.add(alarm)

    def close(self) -> None:
        """Adds the table of all alarms to the summary, if there were any; where no table can be stored, the run ends all the same."""
        if not self.incidents.alarms:
            return
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=self.incidents.rows())
        try:
            self.run.summary.update({"alarms/table": table})
        except (ConnectionResetError, BrokenPipeError):
            raise
        except (
            Exception
        ) as error:  # what storing an artifact raises depends on the server: pydantic, requests, W&B's own
            logger.warning("W&B does not store the table of alarms (%s); the journal has them", one_line_of(error))


def one_line_of(error: Exception) -> str:
    """The first line of an error, with passwords masked."""
    return masked(f"{type(error).__name__}: {error}".splitlines()[0])


MAX_BINS = 512
MAX_PROJECT_LENGTH = 128
NAMES = ("entity", "group", "job_type")
NOT_IN_PROJECTS = r"/\#?%:"
"""W&B refuses a project that has one of these in its name."""


@dataclass(frozen=True)
class WandbSink:
    """Logs the run to Weights & Biases; without an API key it is kept offline, and nothing ever asks for one.

    `WandbSink(run=wandb.run)` writes into a run that is open in this process instead: it is never ended, and rows
    that its owner logs with `step=` are never pushed aside.

    Attributes:
        project: the project's name.
        mode: `online`, `offline`, or `auto`: online where a key is found.
        entity: user or team; the account's default when not given.
        group, job_type: what ties runs of one experiment together, and what each does in it, such as `train` or `rank3`. Ranks that
            report as one are one run and need neither.
        directory: the folder in which a folder `wandb` is made; the run's directory when not given.
        run: an open run to join.
        max_keys: how many keys at most.
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
    _open: _Rows | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_package("wandb", "WandbSink")
        if not 0 < len(self.project) <= MAX_PROJECT_LENGTH or set(self.project) & set(NOT_IN_PROJECTS):
            rule = f"1 to {MAX_PROJECT_LENGTH} characters, none of {' '.join(NOT_IN_PROJECTS)}"
            raise ValueError(f"a W&B project must have {rule}, got {self.project!r}")
        if self.mode not in MODES:
            near = did_you_mean(self.mode, MODES)
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}{near}")
        for name in NAMES:
            if getattr(self, name) is not None and not getattr(self, name).strip():
                raise ValueError(f"{name} of a W&B run must not be empty, got {getattr(self, name)!r}")

    @classmethod
    def from_uri(cls, rest: str, options: Mapping[str, str]) -> WandbSink:
        """`wandb[:PROJECT][?mode=offline|online&entity=NAME&group=NAME&job_type=NAME]`."""
        check_options("wandb", options, ["mode", *NAMES])
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
        """What `replay --to` takes; nothing for a joined run."""
        if self.run is not None:
            return ""
        given = {"mode": None if self.mode == "auto" else self.mode, **self._names()}
        options = {name: value for name, value in given.items() if value is not None}
        return f"wandb:{self.project}" + (f"?{urlencode(options)}" if options else "")

    def place(self, run: RunInfo) -> Place:
        """The folder of an offline run, and the command that uploads it; of one that is on a server, which one it is there."""
        if self.run is not None:
            return Place("the W&B run that was open", "")
        folder = self._parent(run) / "wandb"
        if any(folder.glob(f"run-*-{run.run_id}")) and not any(folder.glob(f"offline-run-*-{run.run_id}")):
            return Place(f"run {run.run_id} of project {self.project} on the W&B server", "")
        return Place(str(folder), f"wandb sync {shlex.quote(str(folder))}/offline-run-*-{run.run_id}")

    def prepare_child(self) -> None:
        """Takes a W&B client process of our own, and silences the login.

        A run that the user opened leaves the address of its client process in the environment; one shared with it would
        die with the training process. With a key, the login asks the server for the account's name, only to print it.
        """
        os.environ.pop("WANDB_SERVICE", None)
        os.environ.setdefault("WANDB_SILENT", "true")

    def import_client(self) -> None:
        """Imports W&B's client and the messages that it stores."""
        import wandb.errors
        import wandb.proto.wandb_internal_pb2  # noqa: F401 - for its effect

    def open(self, run: RunInfo) -> None:
        """Starts the run, or goes on with the one of that id; without a server it is offline after a minute."""
        object.__setattr__(self, "_open", _Rows(self._target(run), run, self._budget(run)))

    def held(self, run: RunInfo) -> int | None:
        """What earlier parts of an offline run hold on disk: a client that was killed has lost its last rows."""
        if self._open is None or self.run is not None or not self._open.target.run.offline:
            return None
        folder = self._parent(run) / "wandb"
        this = Path(self._open.target.run.settings.sync_dir)
        return last_update(folder, self._open.target.run.id, self.project, besides=this)

    def stored(self, run: RunInfo) -> StoredMetrics | None:
        """What an offline run holds on disk, or an online one on the server; None for a joined run."""
        if self.run is not None:
            return None
        folder = self._parent(run) / "wandb"
        if any(folder.glob(f"offline-run-*-{run.run_id}")):
            return stored_in(folder, run.run_id, self.project)
        if any(folder.glob(f"run-*-{run.run_id}")):
            return stored_on_server(run.run_id, self.project, self.entity)
        return StoredMetrics()

    def shown(self, run: RunInfo) -> Shown:
        """What they should hold of a record."""
        budget = self._budget(run, quiet=True)

        def numbers(record: Record) -> dict[str, float]:
            selected = budget.select(record)
            counts = {tag: sum(histogram.counts) for tag, histogram in by_tag(selected).items()}
            return {**selected.values, **axes_of(record), **counts}

        return numbers

    def write(self, records: Sequence[Record]) -> None:
        """Hands one row per record to the client, which stores it within a second."""
        if self._open is None:
            raise ValueError("WandbSink.write needs open first")
        with _classified():
            self._open.write(records)

    def alarm(self, alarm: Alarm) -> None:
        """Alerts, at most once in five minutes for each type, and notes in the run's summary what went wrong."""
        if self._open is not None:
            with _classified():
                self._open.alarms.tell(alarm)

    def recall(self, alarms: Sequence[Alarm]) -> None:
        """Knows the alarms of earlier parts of the run, for its table."""
        if self._open is not None:
            self._open.alarms.incidents.add(*alarms)

    def close(self, status: RunStatus) -> None:
        """Adds the table of alarms and ends the run with an exit code that says how; leaves a joined run open."""
        if self._open is not None:
            opened = self._open
            object.__setattr__(self, "_open", None)
            with _classified():
                opened.alarms.close()
                opened.target.close(status)

    def _target(self, run: RunInfo) -> OwnRun | JoinedRun:
        if self.run is not None:
            self.run.config.update({"esper_telemetry": {"run_id": run.run_id, "config": plain(run.config)}})
            return JoinedRun(self.run)
        settings = {"project": self.project, **self._names()}
        return OwnRun(start(run, self._parent(run), mode=self.mode, settings=settings))

    def _names(self) -> dict[str, str | None]:
        return {name: getattr(self, name) for name in NAMES}

    def _parent(self, run: RunInfo) -> Path:
        if self.directory is not None:
            return Path(self.directory).absolute()
        return require_run_dir(run, "WandbSink", "directory=")

    def _budget(self, run: RunInfo, *, quiet: bool = False) -> KeyBudget:
        return KeyBudget(run, "W&B", max_keys=self.max_keys, details=self.details, quiet=quiet)


@contextmanager
def _classified() -> Iterator[None]:
    """Turns what W&B raises when its process is dead, or its run ended, into errors that say so."""
    from wandb.errors import UsageError

    try:
        yield
    except (ConnectionResetError, BrokenPipeError) as error:
        raise DeadClientError(f"the W&B client process is gone: {error}") from error
    except UsageError as error:
        raise PermanentSinkError(f"the W&B run takes no more rows: {error}") from error


class _Rows:
    """The rows of a run that is open."""

    def __init__(self, target: OwnRun | JoinedRun, run: RunInfo, budget: KeyBudget) -> None:
        self.target = target
        self.budget = budget
        self.defined: set[str] = set()
        self.alarms = WandbAlarms(target.run)
        self.disk = Disk(Path(target.run.settings.sync_dir)) if isinstance(target, OwnRun) else None

    def write(self, records: Sequence[Record]) -> None:
        if self.disk is not None:
            self.disk.check()
        for record in records:
            row = row_of(self.budget.select(record))
            self._define(row)
            self.target.log(row)

    def _define(self, row: Mapping[str, object]) -> None:
        """Tells W&B, once per name, over which axis to draw it."""
        names = {self.target.chart_name(key): key for key in row if not key.startswith("axis/")}
        for name in names.keys() - self.defined:
            self.target.define(name, step_metric=family_of(names[name]).axis)
            self.defined.add(name)


def row_of(record: Record) -> dict[str, Any]:
    """One row: all axes, all values, histograms in at most as many bins as W&B takes."""
    import wandb

    row: dict[str, Any] = {**record.values, **axes_of(record)}
    for tag, histogram in by_tag(record).items():
        fitting = with_at_most(MAX_BINS, histogram)
        row[tag] = wandb.Histogram(np_histogram=(list(fitting.counts), list(fitting.edges)))
    return row


def axes_of(record: Record) -> dict[str, float]:
    """The axes among the values of a row."""
    axes = record.axes
    return {
        "axis/update": axes.update,
        "axis/env_step": axes.env_step,
        "axis/gradient_step": axes.gradient_step,
        "axis/wall_time": axes.wall_time,
    }
