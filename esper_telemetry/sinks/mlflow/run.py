"""A run in MLflow that is open: found or made, written in batches, ended with a status."""

from __future__ import annotations

import getpass
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

from esper_telemetry.core.record import Alarm, AlarmEvent, Record, RunInfo, RunStatus
from esper_telemetry.core.redaction import masked
from esper_telemetry.sinks.budget import KeyBudget
from esper_telemetry.sinks.histogram import by_tag
from esper_telemetry.sinks.incidents import IncidentCards, alarm_text
from esper_telemetry.sinks.mlflow.artifacts import Artifacts, LegalNames
from esper_telemetry.sinks.mlflow.database import SQLITE, ensure_database, metric_rows, split
from esper_telemetry.sinks.protocol import PermanentSinkError, PoisonRecordError
from esper_telemetry.sinks.readme import glossary
from esper_telemetry.sinks.text import flattened

MAX_METRICS = 1000
MAX_PARAMS = 100
MAX_PARAM_LENGTH = 6000
MAX_TAG_LENGTH = 8000
QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}
RUN_TAG = "esper.run_id"
KEYMAP_TAG = "esper.keymap"
CHANGED_TAG = "esper.changed."
ALARM_TAG = "esper.alarm."
"""Before the type of an alarm: what became of it."""
MAX_ALARM_LENGTH = 500
PARENT_TAG = "mlflow.parentRunId"
"""Under which run MLflow's pages show a run."""
METRICS_TAG = "esper.metrics"
"""Before the name of a family: what its metrics mean."""
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Without it MLflow's pages take a training run for an evaluation of a language model."""

HOPELESS = {401, 403, 404}
"""HTTP statuses that stay what they are however often one asks."""
REFUSED = 400
"""One number that MLflow does not like has a whole batch refused."""

STATUSES = {RunStatus.FINISHED: "FINISHED", RunStatus.FAILED: "FAILED"}
"""The others are KILLED."""


class MlflowRun:
    """The open run; `ours` says whether to end it, `checkpoints` whether to store them then."""

    def __init__(self, client: Any, run_id: str, budget: KeyBudget, *, ours: bool, checkpoints: bool = False) -> None:
        self.client = client
        self.run_id = run_id
        self.budget = budget
        self.ours = ours
        self.names = LegalNames()
        self.mapped: dict[str, str] = {}
        self.incidents = IncidentCards()
        self.artifacts = Artifacts(client, run_id)
        self.rows = metric_rows(client)
        self.checkpoints = checkpoints

    def write(self, records: Sequence[Record]) -> None:
        """Sends all records in as few requests as MLflow's limit allows; what is history by then goes into its table at once, if it can.

        Key by key, because so does MLflow's table lie on the disk: a request then writes a few pages instead of one for each key.
        """
        metrics = [metric for record in records for metric in self._metrics(self.budget.select(record))]
        metrics.sort(key=attrgetter("key"))
        with _classified():
            if self.rows is not None:
                history, metrics = split(metrics)
                self.rows.add(self.run_id, history)
            for batch in _batches(metrics, MAX_METRICS):
                self.client.log_batch(self.run_id, metrics=batch, synchronous=True)
            self._tell_names()

    def alarm(self, alarm: Alarm) -> None:
        """Says in a tag what became of the alarm; stores the incidents where it is raised."""
        with _classified():
            text = f"{alarm.level} since update {alarm.since}: {alarm_text(alarm)}"
            text = text if alarm.event is not AlarmEvent.CLEAR else alarm_text(alarm)
            self.client.set_tag(self.run_id, f"{ALARM_TAG}{alarm.type}", text[:MAX_ALARM_LENGTH])
        self.incidents.add(alarm)
        if alarm.event is AlarmEvent.RAISE:
            self.artifacts.incidents(self.incidents)

    def close(self, status: RunStatus) -> None:
        """Stores the files of the run, as it is known by then, and sets the status of a run of ours."""
        run = self.budget.run
        if self.incidents.alarms:
            self.artifacts.incidents(self.incidents)
        if self.ours:
            self.artifacts.description(run)
        if self.checkpoints:
            self.artifacts.checkpoints(run)
        if self.ours:
            with _classified():
                self.client.set_terminated(self.run_id, STATUSES.get(status, "KILLED"))

    def describe(self, run: RunInfo, known: Mapping[str, str]) -> None:
        """Logs the settings that are not there yet; MLflow refuses to change a parameter, so what a resumed run changes is a tag."""
        from mlflow.entities import Param, RunTag

        settings = {self.names[name]: str(value)[:MAX_PARAM_LENGTH] for name, value in flattened(run.config).items()}
        params = [Param(name, value) for name, value in settings.items() if name not in known]
        for batch in _batches(params, MAX_PARAMS):
            self.client.log_batch(self.run_id, params=batch, synchronous=True)
        changed = {name: value for name, value in settings.items() if known.get(name, value) != value}
        tags = [RunTag(f"{CHANGED_TAG}{name}", value[:MAX_TAG_LENGTH]) for name, value in changed.items()]
        for batch in _batches(tags, MAX_PARAMS):
            self.client.log_batch(self.run_id, tags=batch, synchronous=True)
        self._tell_names()

    def _metrics(self, record: Record) -> Iterator[Any]:
        from mlflow.entities import Metric

        milliseconds = round(record.axes.wall_time * 1000)
        for key, value in numbers_of(record).items():
            yield Metric(self.names[key], value, milliseconds, record.axes.env_step)

    def _tell_names(self) -> None:
        """Keeps the way back from names that had to be changed in a tag."""
        changed = self.names.changed
        if changed != self.mapped:
            self.client.set_tag(self.run_id, KEYMAP_TAG, json.dumps(changed)[:MAX_TAG_LENGTH])
            self.mapped = changed


def joined_run(store: str | None, run_id: str, budget: KeyBudget, *, checkpoints: bool) -> MlflowRun:
    """A run that somebody else has open."""
    client = client_of(store)
    with _classified():
        client.get_run(run_id)
    return MlflowRun(client, run_id, budget, ours=False, checkpoints=checkpoints)


def own_run(
    store: str | None,
    budget: KeyBudget,
    *,
    experiment: str,
    artifacts: Path | None,
    parent: str | None,
    checkpoints: bool,
) -> MlflowRun:
    """Our run of that id, running again, or a new one; beneath its parent, where it has one."""
    run = budget.run
    with _quiet(), _classified():
        client = client_of(store)
        experiment_id = _experiment_id(client, experiment, artifacts)
        above = {} if parent is None else {PARENT_TAG: _run_of(client, experiment_id, parent)}
        found = _of_ours(client, experiment_id, run.run_id)
        if found:
            client.update_run(found[0].info.run_id, status="RUNNING")
            for tag, value in above.items():
                client.set_tag(found[0].info.run_id, tag, value)
        entity = found[0] if found else _created(client, experiment_id, run, above)
        opened = MlflowRun(client, entity.info.run_id, budget, ours=True, checkpoints=checkpoints)
        opened.describe(run, entity.data.params)
    return opened


def client_of(store: str | None) -> Any:
    """A client for the store; one in SQLite is made where there is none."""
    from mlflow.tracking import MlflowClient

    if store is not None and store.startswith(SQLITE):
        ensure_database(Path(store.removeprefix(SQLITE)))
    client = MlflowClient(store)
    inner = getattr(client, "_tracking_client", None)
    if inner is not None:
        inner._log_url = lambda run_id: None  # prints where a run is when it ends, with the password of the address
    return client


def _of_ours(client: Any, experiment_id: str, run_id: str) -> list[Any]:
    """The MLflow run of a run of ours, if there is one."""
    found = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{quoted(run_id)}'", max_results=1)
    return list(found)


def _run_of(client: Any, experiment_id: str, run_id: str) -> str:
    """The id of an MLflow run that is given by it, or by the id of a run of ours."""
    found = _of_ours(client, experiment_id, run_id)
    return str((found[0] if found else client.get_run(run_id)).info.run_id)


def _experiment_id(client: Any, name: str, artifacts: Path | None) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    location = artifacts.as_uri() if artifacts else None
    return str(client.create_experiment(name, artifact_location=location, tags=EXPERIMENT_TAGS))


def _created(client: Any, experiment_id: str, run: RunInfo, above: Mapping[str, str]) -> Any:
    """A new run with the tags that MLflow's own functions would set."""
    tags = {
        **above,
        RUN_TAG: run.run_id,
        "mlflow.user": _user(),
        "mlflow.source.name": sys.argv[0] or "python",
        "mlflow.source.type": "LOCAL",
        "mlflow.runName": run.name,
        **{f"esper.tag.{tag}": "true" for tag in run.tags},
        **{f"{METRICS_TAG}.{family}": _cut(text) for family, text in glossary(run).items()},
    }
    if run.notes:
        tags["mlflow.note.content"] = run.notes[:MAX_TAG_LENGTH]
    return client.create_run(experiment_id, start_time=round(run.started * 1000), tags=tags, run_name=run.name)


def numbers_of(record: Record) -> dict[str, float]:
    """What is stored of a record: the values, the axes that are not MLflow's own, and three quantiles for each histogram."""
    numbers = {**record.values}
    numbers["axis/update"] = record.axes.update
    numbers["axis/gradient_step"] = record.axes.gradient_step
    for tag, histogram in by_tag(record).items():
        quantiles = {f"{tag}_{name}": histogram.quantile(share) for name, share in QUANTILES.items()}
        numbers |= {name: value for name, value in quantiles.items() if value is not None}
    return numbers


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _cut(text: str) -> str:
    """As many whole lines as a tag holds."""
    if len(text) <= MAX_TAG_LENGTH:
        return text
    return text[:MAX_TAG_LENGTH].rpartition("\n")[0]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"  # a container's user without an entry in the password file


def quoted(text: str) -> str:
    """The text within quotation marks of a search."""
    return text.replace("\\", "\\\\").replace("'", "\\'")


@contextmanager
def _classified() -> Iterator[None]:
    """Turns refusals that stay refusals into permanent errors, with addresses masked."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.get_http_status_code() in HOPELESS:
            raise PermanentSinkError(f"MLflow refuses: {masked(str(error))}") from error
        if error.get_http_status_code() == REFUSED:
            raise PoisonRecordError(f"MLflow refuses a batch: {masked(str(error))}") from error
        raise


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps quiet about the tables that a new database gets: dozens of lines about nothing."""
    loggers = [logging.getLogger(name) for name in ("alembic", "mlflow.store.db.utils")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
