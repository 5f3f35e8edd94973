"""MLflow: records as merged batches of metrics, and the numbers of a run read back from the store."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sqlite3
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlencode, urlsplit
from urllib.request import Request, urlopen

from esper_telemetry.core.backends import SQLITE, check_tracking_uri, limit_mlflow_requests
from esper_telemetry.core.record import RunInfo
from esper_telemetry.core.redaction import masked
from esper_telemetry.sinks.layout import UPDATE, KeyBudget
from esper_telemetry.sinks.mlflow.mlflow_run import (
    RUN_TAG,
    LegalNames,
    MlflowRun,
    client_of,
    find_run,
    joined_run,
    numbers_of,
    own_run,
    run_filter,
)
from esper_telemetry.sinks.sink_protocol import (
    OpenedSink,
    PermanentSinkError,
    Place,
    Shown,
    StoredMetrics,
    check_options,
    require_package,
    require_run_dir,
)

RUNNING: Final = "RUNNING"
MAX_LOCK_SECONDS: Final = 10.0

DEFAULT_ADDRESS: Final = "http://localhost:5000"
TRAINING_PAGES: Final = "workflowType=machine_learning"
"""Part of an address that makes MLflow 3 show its pages for model training instead of the pages for language models."""

PLACE_TIMEOUT_SECONDS: Final = 2.0
FIND_RUN: Final = """
SELECT runs.run_uuid, runs.status, runs.experiment_id FROM runs
JOIN experiments ON experiments.experiment_id = runs.experiment_id AND experiments.name = ?
JOIN tags ON tags.run_uuid = runs.run_uuid AND tags.key = ? AND tags.value = ?
WHERE runs.lifecycle_stage = 'active' ORDER BY runs.start_time DESC, runs.run_uuid LIMIT 1
"""
READ_METRICS: Final = """
SELECT key, step, timestamp, value, is_nan FROM metrics
WHERE run_uuid = ?1 AND key IN (SELECT key FROM latest_metrics WHERE run_uuid = ?1)
"""

STORE_MODULES: Final = (
    "mlflow.store.tracking.rest_store",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.tracking.sqlalchemy_workspace_store",
    "alembic.command",
    "sqlalchemy.dialects.sqlite",
)
BOOLEANS: Final = {"true": True, "false": False}


@dataclass
class MLflowSink(OpenedSink):
    """Logs the run to MLflow; steps are environment steps.

    `MLflowSink(run_id=...)` writes into a run that is already open in this process, and leaves it open.

    A server with passwords takes them from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or from the URI,
    `https://user:password@host`, which is shown with the password masked.

    Attributes:
        tracking_uri: server or store; `sqlite:///RUN_DIR/mlflow.db` by default.
        experiment: the experiment's name; created if it is missing.
        run_id: an open run to join.
        parent: the run below which MLflow's pages show this one, such as the run of its first checkpoint: the id
            of an MLflow run, or of a run of this package in the same experiment.
        checkpoints: store the run directory's checkpoints as artifacts when the run ends.
        max_keys: maximum number of keys.
        details: also show the numbers of single layers and the histories of other keys.
    """

    tracking_uri: str | None = None
    experiment: str = "esper_telemetry"
    run_id: str | None = None
    parent: str | None = None
    checkpoints: bool = False
    max_keys: int = 300
    details: bool = False
    _open: MlflowRun | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_package("mlflow", "MLflowSink")
        if self.tracking_uri is not None:
            check_tracking_uri(self.tracking_uri)
        if not self.experiment.strip():
            raise ValueError(f"experiment must have a name, got {self.experiment!r}")
        if self.parent is not None and (self.run_id is not None or not self.parent.strip()):
            raise ValueError(f"parent must be the id of a run and cannot be combined with run_id, got {self.parent!r}")

    @classmethod
    def from_uri(cls, rest: str, options: Mapping[str, str]) -> MLflowSink:
        """Return the sink of `mlflow[:TRACKING_URI][?experiment=NAME&parent=RUN&checkpoints=true]`."""
        check_options("mlflow", options, ["experiment", "parent", "checkpoints"])
        checkpoints = options.get("checkpoints", "false")
        if checkpoints not in BOOLEANS:
            raise ValueError(f"option checkpoints of sink mlflow must be true or false, got {checkpoints!r}")
        return cls(
            rest or None,
            experiment=options.get("experiment", cls.experiment),
            parent=options.get("parent"),
            checkpoints=BOOLEANS[checkpoints],
        )

    @property
    def in_process(self) -> bool:
        """True for a joined run, whose MLflow settings belong to this process."""
        return self.run_id is not None

    @property
    def name(self) -> str:
        """`mlflow:` and the given tracking URI, if any, or the joined run's id."""
        if self.run_id is not None:
            return f"mlflow:run/{self.run_id}"
        return f"mlflow:{masked(self.tracking_uri)}" if self.tracking_uri else "mlflow"

    @property
    def uri(self) -> str:
        """The address for `replay --to`; empty for a joined run."""
        if self.run_id is not None:
            return ""
        default = type(self)
        options = {} if self.experiment == default.experiment else {"experiment": self.experiment}
        options |= {} if self.parent is None else {"parent": self.parent}
        options |= {"checkpoints": "true"} if self.checkpoints else {}
        return self.name + (f"?{urlencode(options)}" if options else "")

    def place(self, run: RunInfo) -> Place:
        """Return the store, the command that shows it, and the addresses of the run's pages or of the experiments."""
        uri = self._store(run) or "the process's own tracking URI"
        if "://" not in uri:
            return Place(uri, "")
        if uri.startswith("http"):
            server = re.sub("//[^/]*@", "//", masked(uri)).rstrip("/")  # a browser asks for the password
            return Place(masked(uri), "", _pages(server, _run_on_server(uri, run, self.experiment)))
        row = _run_in_database(Path(uri.removeprefix(SQLITE)), run, self.experiment) if uri.startswith(SQLITE) else None
        command = f"mlflow ui --backend-store-uri {shlex.quote(masked(uri))}"
        return Place(masked(uri), command, _pages(DEFAULT_ADDRESS, row))

    def prepare_child(self) -> None:
        """Let requests fail early instead of retrying for minutes. This affects the whole process, so it must not be the user's."""
        limit_mlflow_requests()

    def import_client(self) -> None:
        """Import MLflow's client, and the modules that its stores would import at the first request."""
        import mlflow.tracking  # noqa: F401 - for its effect

        for module in STORE_MODULES:
            with suppress(ModuleNotFoundError):  # other versions have other modules, and mlflow-skinny lacks a database
                import_module(module)

    def open(self, run: RunInfo) -> None:
        """Find the run by its id, or create it, and mark it as running."""
        budget = KeyBudget(run, "MLflow", max_keys=self.max_keys, details=self.details)
        store = self._store(run)
        if self.run_id is not None:
            self._open = joined_run(store, self.run_id, budget, checkpoints=self.checkpoints)
        else:
            # Artifacts are stored next to the default store; a server has its own place for them.
            beside = self.tracking_uri is None and run.run_dir is not None
            self._open = own_run(
                store,
                budget,
                experiment=self.experiment,
                artifacts=Path(run.run_dir).absolute() / "mlflow-artifacts" if beside and run.run_dir else None,
                parent=self.parent,
                checkpoints=self.checkpoints,
            )

    def stored(self, run: RunInfo) -> StoredMetrics | None:
        """Return the numbers of the run in the store; None for a joined run."""
        if self.run_id is not None:
            return None
        return stored_run(self._store(run), run, self.experiment)

    def shown(self, run: RunInfo) -> Shown:
        """Return a function that maps a record to the numbers that MLflow should hold."""
        budget = KeyBudget(run, "MLflow", max_keys=self.max_keys, details=self.details, quiet=True)
        names = LegalNames()
        return lambda record: {names[key]: value for key, value in numbers_of(budget.select(record)).items()}

    def _store(self, run: RunInfo) -> str | None:
        """Return the tracking URI; None for the process's own."""
        if self.tracking_uri is not None or self.run_id is not None:
            return self.tracking_uri
        if run.run_dir is None and "MLFLOW_TRACKING_URI" in os.environ:
            return os.environ["MLFLOW_TRACKING_URI"]
        database = require_run_dir(run, "MLflowSink", "tracking_uri=") / "mlflow.db"
        if database.is_symlink():
            raise PermanentSinkError(f"{database} is a symbolic link, which is not followed: name the database itself")
        return f"{SQLITE}{database}"


class StoredRun(NamedTuple):
    """A run of this package in MLflow's database."""

    run_uuid: str
    status: str
    experiment_id: int


class MetricPoint(NamedTuple):
    """One number of a metric's history."""

    key: str
    step: int
    timestamp: int
    value: float


def stored_run(store: str | None, run: RunInfo, experiment: str) -> StoredMetrics:
    """Return the whole history of every metric of the run; empty if the store does not have it. No store is created."""
    if store is not None and store.startswith(SQLITE):
        path = Path(store.removeprefix(SQLITE))
        if not path.exists():
            return StoredMetrics()
        # This query avoids MLflow's import, which takes three seconds of processor time, and its client, which reads one metric a call. It
        # returns what the client would: active runs, and metrics that MLflow lists for the run.
        with suppress(sqlite3.Error):  # other tables: the client knows how to read them
            return _in_database(path, run, experiment)
    return _through_client(client_of(store), run, experiment)


def _pages(server: str, row: StoredRun | None) -> tuple[tuple[str, str], ...]:
    """Return the addresses of the run's pages, or of the experiments if the run was not found."""
    page = f"/{row.experiment_id}/runs/{row.run_uuid}" if row else ""
    paths = {"run": page, "charts": f"{page}/model-metrics"} if row else {"experiments": page}
    return tuple((name, f"{server}/#/experiments{path}?{TRAINING_PAGES}") for name, path in paths.items())


def _run_on_server(uri: str, run: RunInfo, experiment: str) -> StoredRun | None:
    """Return the run as stored on a server; None if it is missing, or the server does not answer at once.

    Two requests of its own, because MLflow's import takes three seconds of processor time.
    """
    address, environment = urlsplit(uri), os.environ.get
    user = address.username or environment("MLFLOW_TRACKING_USERNAME")
    password = address.password or environment("MLFLOW_TRACKING_PASSWORD", "")
    token = environment("MLFLOW_TRACKING_TOKEN")
    basic = b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode() if user else ""
    authorization = {"Authorization": f"Basic {basic}" if basic else f"Bearer {token}"} if basic or token else {}
    start = f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path.rstrip('/')}/api/2.0/mlflow"

    def answer(path: str, body: Mapping[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json", **authorization}
        request = Request(f"{start}/{path}", None if body is None else json.dumps(body).encode(), headers)
        with urlopen(request, timeout=PLACE_TIMEOUT_SECONDS) as response:
            return json.load(response)

    try:
        name = urlencode({"experiment_name": experiment})
        number = answer(f"experiments/get-by-name?{name}")["experiment"]["experiment_id"]
        found = {"experiment_ids": [number], "filter": run_filter(run.run_id), "max_results": 1}
        info = answer("runs/search", found)["runs"][0]["info"]
        return StoredRun(str(info["run_id"]), str(info["status"]), int(number))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _run_in_database(path: Path, run: RunInfo, experiment: str) -> StoredRun | None:
    """Return the run as stored in the database; None if it is missing, or the database cannot be read at once."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as database:
            row = database.execute(FIND_RUN, (experiment, RUN_TAG, run.run_id)).fetchone()
    except sqlite3.Error:
        return None
    return None if row is None else StoredRun(*row)


def _in_database(path: Path, run: RunInfo, experiment: str) -> StoredMetrics:
    """Return the metrics of the run; raises sqlite3.Error if the file lacks MLflow's tables, or is locked for too long."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=MAX_LOCK_SECONDS)) as database:
        row = database.execute(FIND_RUN, (experiment, RUN_TAG, run.run_id)).fetchone()
        if row is None:
            return StoredMetrics()
        stored = StoredRun(*row)
        rows = database.execute(READ_METRICS, (stored.run_uuid,)).fetchall()
    points = [MetricPoint(key, step, time, math.nan if is_nan else value) for key, step, time, value, is_nan in rows]
    return _by_update(points, ended=stored.status != RUNNING)


def _through_client(client: Any, run: RunInfo, experiment: str) -> StoredMetrics:
    entity = client.get_experiment_by_name(experiment)
    mlflow_run = None if entity is None else find_run(client, entity.experiment_id, run.run_id)
    if mlflow_run is None:
        return StoredMetrics()
    points = [
        MetricPoint(metric.key, metric.step, metric.timestamp, metric.value)
        for key in mlflow_run.data.metrics
        for metric in client.get_metric_history(mlflow_run.info.run_id, key)
    ]
    return _by_update(points, ended=mlflow_run.info.status != RUNNING)


def _by_update(points: Sequence[MetricPoint], *, ended: bool) -> StoredMetrics:
    """Return the points as rows: a number belongs to the update whose `axis/update` has the same step and time."""
    stored = StoredMetrics(ended=ended)
    updates = {(point.step, point.timestamp): int(point.value) for point in points if point.key == UPDATE}
    for point in points:
        update = updates.get((point.step, point.timestamp))
        if update is not None:
            stored.add(update, point.key, point.value)
    return stored
