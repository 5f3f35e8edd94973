"""An open run in MLflow: found or created, written in batches, with its files, ended with a status.

Everything goes through `MlflowClient`, so MLflow's global state does not change. One `log_batch` of up to a thousand metrics is twenty
times as fast as `log_metric`.
"""

from __future__ import annotations

import getpass
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from posixpath import normpath
from typing import Any, Final

from esper_telemetry.core.backends import SQLITE
from esper_telemetry.core.record import Alarm, AlarmEvent, Record, RunInfo, RunStatus
from esper_telemetry.core.redaction import masked
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.journal.read import last_outcome
from esper_telemetry.sinks.layout import UPDATE, KeyBudget, by_tag, flattened, overview_names
from esper_telemetry.sinks.mlflow.database import ensure_database, metric_table, split_latest
from esper_telemetry.sinks.pages import REPORT_NAME, IncidentCards, glossary, run_note, run_readme
from esper_telemetry.sinks.sink_protocol import PermanentSinkError, PoisonRecordError, logger

MAX_METRICS: Final = 1000
MAX_PARAMS: Final = 100
MAX_PARAM_LENGTH: Final = 6000
MAX_TAG_LENGTH: Final = 8000
MAX_VERDICT_LENGTH: Final = 500
MAX_NAME_LENGTH: Final = 250
FORBIDDEN_IN_NAME: Final = re.compile(r"[^\w\-. :/]")
QUANTILES: Final = {"p05": 0.05, "p50": 0.5, "p95": 0.95}

RUN_TAG: Final = "esper.run_id"
KEYMAP_TAG: Final = "esper.keymap"
CHANGED_TAG: Final = "esper.changed."
"""Prefix of the tag for a setting that changed when a run was resumed: MLflow parameters cannot change."""
VERDICT_TAG: Final = "esper.verdict"
"""Tag with the outcome and the first cause, in one line; a column of MLflow's list of runs."""
NOTE_TAG: Final = "mlflow.note.content"
"""Tag of the description at the top of a run's page."""
NOTE_SECONDS: Final = 30.0
"""Minimum time between two updates of the description if only values change."""
PARENT_TAG: Final = "mlflow.parentRunId"
"""MLflow's pages show a run below the run with this id."""
EXPERIMENT_TAGS: Final = {"mlflow.experimentKind": "custom_model_development"}
"""Without this tag, some MLflow pages treat a training run as an evaluation of a language model; on others the address decides."""

PERMANENT_STATUSES: Final = {401, 403, 404}
"""HTTP statuses that a repeated request would get again."""
BAD_REQUEST: Final = 400
"""HTTP status of a batch with a number that MLflow does not accept."""
FINAL_STATUSES: Final = {RunStatus.FINISHED: "FINISHED", RunStatus.FAILED: "FAILED"}
"""Other statuses are KILLED in MLflow."""

CONFIG: Final = "config.json"
CHECKPOINTS: Final = "checkpoints"
"""Name of this folder in the run directory and among the artifacts."""
README: Final = "run.md"
METRICS_PAGE: Final = "metrics.md"
INCIDENTS: Final = "incidents"
"""Name, without its extension, of the artifacts about incidents."""


class MlflowRun:
    """The open run. `is_own` says whether to end it, and `checkpoints` whether to store its checkpoints then."""

    def __init__(self, client: Any, run_id: str, budget: KeyBudget, *, is_own: bool, checkpoints: bool = False) -> None:
        self.run_id = run_id
        self.incidents = IncidentCards()
        self.client = client
        self._budget = budget
        self._is_own = is_own
        self._checkpoints = checkpoints
        self._names = LegalNames()
        self._overview = overview_names(budget.run)
        self._keymap: dict[str, str] = {}
        self._artifacts = Artifacts(client, run_id)
        self._last: Record | None = None
        self._noted_at = time.monotonic()
        self.table = metric_table(client)

    def write(self, records: Sequence[Record]) -> None:
        """Send all records in as few requests as MLflow's limit allows; if possible, history goes straight into the table.

        Metrics are sorted by key, like MLflow's table on the disk, so that a request writes a few pages instead of one for each key.
        """
        from mlflow.entities import Metric

        metrics = [
            Metric(self._names[name], value, round(record.axes.wall_time * 1000), record.axes.env_step)
            for record in records
            for key, value in numbers_of(self._budget.select(record)).items()
            for name in (key, self._overview.get(key))
            if name is not None
        ]
        metrics.sort(key=attrgetter("key"))
        with _classified():
            if self.table is not None:
                history, metrics = split_latest(metrics)
                self.table.add(self.run_id, history)
            for batch in _batches(metrics, MAX_METRICS):
                self.client.log_batch(self.run_id, metrics=batch, synchronous=True)
            self._write_keymap()
        self._last = records[-1] if records else self._last
        # Repeating `write` stores nothing twice, so the description may fail after the numbers.
        if self._is_own and time.monotonic() - self._noted_at >= NOTE_SECONDS:
            self._write_verdict(self.incidents)

    def show(self, event: Alarm | JournalEvent, cards: IncidentCards) -> None:
        """Update the verdict and the description; store the incidents when an alarm is raised."""
        self._write_verdict(cards)
        if isinstance(event, Alarm) and event.event is AlarmEvent.RAISE:
            self._artifacts.store_incidents(cards)

    def _write_verdict(self, cards: IncidentCards) -> None:
        """Set the tag of the verdict and, in an own run, the description at the top of its page, in one request."""
        from mlflow.entities import RunTag

        tags = [RunTag(VERDICT_TAG, cards.verdict()[:MAX_VERDICT_LENGTH])]
        if self._is_own:
            tags.append(RunTag(NOTE_TAG, run_note(cards, self._last, self._budget.run)))
        with _classified():
            self.client.log_batch(self.run_id, tags=tags, synchronous=True)
        self._noted_at = time.monotonic()

    def close(self, status: RunStatus) -> None:
        """Store the files of the run, and set the status of an own run."""
        run = self._budget.run
        if self._is_own:
            self._write_verdict(self.incidents)
        if self.incidents.alarms:
            self._artifacts.store_incidents(self.incidents)
        self._artifacts.store_file(run, REPORT_NAME)
        if self._is_own:
            self._artifacts.store_description(run)
        if self._checkpoints:
            self._artifacts.store_checkpoints(run)
        if self._is_own:
            with _classified():
                self.client.set_terminated(self.run_id, FINAL_STATUSES.get(status, "KILLED"))

    def describe(self, run: RunInfo, known: Mapping[str, str]) -> None:
        """Log the settings that MLflow does not have yet. MLflow parameters cannot change, so changes of a resumed run are tags."""
        from mlflow.entities import Param, RunTag

        settings = {self._names[name]: str(value)[:MAX_PARAM_LENGTH] for name, value in flattened(run.config).items()}
        params = [Param(name, value) for name, value in settings.items() if name not in known]
        for batch in _batches(params, MAX_PARAMS):
            self.client.log_batch(self.run_id, params=batch, synchronous=True)
        changed = {name: value for name, value in settings.items() if known.get(name, value) != value}
        tags = [RunTag(f"{CHANGED_TAG}{name}", value[:MAX_TAG_LENGTH]) for name, value in changed.items()]
        for batch in _batches(tags, MAX_PARAMS):
            self.client.log_batch(self.run_id, tags=batch, synchronous=True)
        self._write_keymap()

    def _write_keymap(self) -> None:
        """Set the tag that maps changed names to the original ones."""
        changed = self._names.changed
        if changed != self._keymap:
            self.client.set_tag(self.run_id, KEYMAP_TAG, json.dumps(changed)[:MAX_TAG_LENGTH])
            self._keymap = changed


def joined_run(store: str | None, run_id: str, budget: KeyBudget, *, checkpoints: bool) -> MlflowRun:
    """Return a run that the user has open."""
    client = client_of(store)
    with _classified():
        client.get_run(run_id)
    return MlflowRun(client, run_id, budget, is_own=False, checkpoints=checkpoints)


def own_run(
    store: str | None, budget: KeyBudget, *, experiment: str, artifacts: Path | None, parent: str | None, checkpoints: bool
) -> MlflowRun:
    """Return the MLflow run of the budget's run, marked as running again, or a new one; below its parent, if it has one."""
    run = budget.run
    with _without_migration_lines(), _classified():
        client = client_of(store)
        known = client.get_experiment_by_name(experiment)
        if known is not None:
            experiment_id = str(known.experiment_id)
        else:
            location = artifacts.as_uri() if artifacts else None
            experiment_id = str(client.create_experiment(experiment, artifact_location=location, tags=EXPERIMENT_TAGS))
        parent_tags = {}
        if parent is not None:  # the id of an MLflow run, or of a run of this package
            above = find_run(client, experiment_id, parent) or client.get_run(parent)
            parent_tags[PARENT_TAG] = str(above.info.run_id)
        entity, outcome = find_run(client, experiment_id, run.run_id), None
        if entity is not None:
            if run.run_dir is not None:
                with suppress(OSError, ValueError):  # the description shows it until a new one comes
                    outcome = last_outcome(run.run_dir)
            client.update_run(entity.info.run_id, status="RUNNING")
            for tag, value in parent_tags.items():
                client.set_tag(entity.info.run_id, tag, value)
        else:
            entity = _create_run(client, experiment_id, run, parent_tags)
        opened = MlflowRun(client, entity.info.run_id, budget, is_own=True, checkpoints=checkpoints)
        opened.incidents.outcome = outcome
        opened.describe(run, entity.data.params)
    return opened


def client_of(store: str | None) -> Any:
    """Return a client for the store; create a missing SQLite database."""
    from mlflow.tracking import MlflowClient

    if store is not None and store.startswith(SQLITE):
        ensure_database(Path(store.removeprefix(SQLITE)))
    client = MlflowClient(store)
    inner = getattr(client, "_tracking_client", None)
    if inner is not None:
        inner._log_url = lambda run_id: None  # it prints the address of an ended run, including its password
    return client


def find_run(client: Any, experiment_id: str, run_id: str) -> Any | None:
    """Return the MLflow run of this package's run with that id, or None."""
    runs = client.search_runs([experiment_id], run_filter(run_id), max_results=1)
    return runs[0] if runs else None


def run_filter(run_id: str) -> str:
    """Return MLflow's filter for this package's run with that id."""
    quoted = run_id.replace("\\", "\\\\").replace("'", "\\'")
    return f"tags.`{RUN_TAG}` = '{quoted}'"


def _create_run(client: Any, experiment_id: str, run: RunInfo, parent_tags: Mapping[str, str]) -> Any:
    """Create a run with the tags that MLflow's fluent functions would set."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"  # a container's user without an entry in the password file
    tags = {
        **parent_tags,
        RUN_TAG: run.run_id,
        "mlflow.user": user,
        "mlflow.source.name": masked(sys.argv[0]) or "python",
        "mlflow.source.type": "LOCAL",
        "mlflow.runName": run.name,
        **{f"esper.tag.{tag}": "true" for tag in run.tags},
        NOTE_TAG: run_note(IncidentCards(), None, run),
    }
    return client.create_run(experiment_id, start_time=round(run.started * 1000), tags=tags, run_name=run.name)


def numbers_of(record: Record) -> dict[str, float]:
    """Return the stored numbers of a record: values, axes without a field in MLflow, three quantiles of each histogram."""
    numbers = {**record.values, UPDATE: record.axes.update, "axis/gradient_step": record.axes.gradient_step}
    for tag, histogram in by_tag(record).items():
        quantiles = {f"{tag}_{name}": histogram.quantile(share) for name, share in QUANTILES.items()}
        numbers |= {name: value for name, value in quantiles.items() if value is not None}
    return numbers


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


@contextmanager
def _classified() -> Iterator[None]:
    """Turn MLflow's refusals into the errors of a sink, with passwords masked."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.get_http_status_code() in PERMANENT_STATUSES:
            raise PermanentSinkError(f"MLflow refuses: {masked(str(error))}") from error
        if error.get_http_status_code() == BAD_REQUEST:
            raise PoisonRecordError(f"MLflow refuses a batch: {masked(str(error))}") from error
        raise


@contextmanager
def _without_migration_lines() -> Iterator[None]:
    """Silence the dozens of lines about the tables of a new database."""
    loggers = [logging.getLogger(name) for name in ("alembic", "mlflow.store.db.utils")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)


class Artifacts:
    """Stores the files of a run. Many stores refuse files; this costs one warning and does not delay any number."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._accepted = True

    def store_incidents(self, incidents: IncidentCards) -> None:
        """Store the incidents, as a page and as JSON."""
        self._try(INCIDENTS, lambda: self._client.log_text(self._run_id, incidents.page(), f"{INCIDENTS}.md"))
        self._try(INCIDENTS, lambda: self._client.log_text(self._run_id, incidents.to_json(), f"{INCIDENTS}.json"))

    def store_description(self, run: RunInfo) -> None:
        """Store the pages about the run and its metrics, and its settings from the run directory, which have secrets masked."""
        self._try(METRICS_PAGE, lambda: self._client.log_text(self._run_id, glossary(run), METRICS_PAGE))
        self._try(README, lambda: self._client.log_text(self._run_id, run_readme(run) + "\n", README))
        self.store_file(run, CONFIG)

    def store_file(self, run: RunInfo, name: str) -> None:
        """Store a file of the run directory, if it exists."""
        if run.run_dir is not None and (path := Path(run.run_dir) / name).is_file():
            self._try(name, lambda: self._client.log_artifact(self._run_id, str(path)))

    def store_checkpoints(self, run: RunInfo) -> None:
        """Store the files in the run directory's folder of checkpoints; warn if none exist."""
        folder = None if run.run_dir is None else Path(run.run_dir) / CHECKPOINTS
        files = [] if folder is None else sorted(path for path in folder.glob("*") if path.is_file())
        if not files:
            logger.warning("MLflow gets no checkpoints of run %s: there are none in %s", run.name, folder)
        for path in files:
            self._try(path.name, partial(self._client.log_artifact, self._run_id, str(path), CHECKPOINTS))

    def _try(self, name: str, store: Callable[[], object]) -> None:
        if not self._accepted:
            return
        try:
            store()
        except Exception as error:  # depends on the store of artifacts: boto3, requests, OSError
            self._accepted = False
            logger.warning("MLflow does not store %s (%s); the run directory has it", name, masked(str(error)))


class LegalNames:
    """Maps each name to a distinct name that MLflow accepts, because a single bad name would have a whole batch refused."""

    def __init__(self) -> None:
        self._legal: dict[str, str] = {}
        self._used: set[str] = set()

    def __getitem__(self, name: str) -> str:
        """Return the legal name."""
        if name not in self._legal:
            candidate = unused = legal(name)
            number = 1
            while unused in self._used:
                number += 1
                suffix = f"_{number}"
                unused = candidate[: MAX_NAME_LENGTH - len(suffix)] + suffix
            self._legal[name] = unused
            self._used.add(unused)
        return self._legal[name]

    @property
    def changed(self) -> dict[str, str]:
        """The original of every legal name that differs from it."""
        return {legal_name: name for name, legal_name in self._legal.items() if legal_name != name}


def legal(name: str) -> str:
    """Return the name if MLflow accepts it, else the nearest name that it accepts."""
    allowed = FORBIDDEN_IN_NAME.sub("_", name)[:MAX_NAME_LENGTH]
    # MLflow treats names as paths: no empty segments, no `.` or `..`, nothing before the first `/`.
    if allowed and normpath(allowed) == allowed and allowed[0] not in "/.":
        return allowed
    return "_".join(part for part in re.split(r"[/.]+", allowed) if part) or "_"
