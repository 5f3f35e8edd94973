"""Read the numbers of one run from an MLflow store.

An SQLite file is read with one query and without MLflow: importing MLflow takes three seconds of processor time, and its client reads one
metric per call. The query returns what the client would: active runs, and metrics that MLflow lists for the run. A file with other
tables, and every other store, is read through the client.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from esper_telemetry.core.backends import SQLITE
from esper_telemetry.core.record import RunInfo
from esper_telemetry.sinks.mlflow.run import RUN_TAG, client_of, find_run
from esper_telemetry.sinks.protocol import StoredMetrics

UPDATE: Final = "axis/update"
RUNNING: Final = "RUNNING"
LOCK_SECONDS: Final = 10.0

FIND_RUN: Final = """
SELECT runs.run_uuid, runs.status FROM runs
JOIN experiments ON experiments.experiment_id = runs.experiment_id AND experiments.name = ?
JOIN tags ON tags.run_uuid = runs.run_uuid AND tags.key = ? AND tags.value = ?
WHERE runs.lifecycle_stage = 'active' ORDER BY runs.start_time DESC, runs.run_uuid LIMIT 1
"""
READ_METRICS: Final = """
SELECT key, step, timestamp, value, is_nan FROM metrics
WHERE run_uuid = ?1 AND key IN (SELECT key FROM latest_metrics WHERE run_uuid = ?1)
"""


class MetricPoint(NamedTuple):
    """One number of a metric's history."""

    key: str
    step: int
    timestamp: int
    value: float


def stored_run(store: str | None, run: RunInfo, experiment: str) -> StoredMetrics:
    """Return the whole history of every metric of the run; empty if the store has no such run. No store is created."""
    if store is not None and store.startswith(SQLITE):
        path = Path(store.removeprefix(SQLITE))
        if not path.exists():
            return StoredMetrics()
        with suppress(sqlite3.Error):  # other tables: the client knows how to read them
            return _in_database(path, run, experiment)
    return _through_client(client_of(store), run, experiment)


def _in_database(path: Path, run: RunInfo, experiment: str) -> StoredMetrics:
    """Raise sqlite3.Error where the file does not have MLflow's tables, or is locked for too long."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=LOCK_SECONDS)) as database:
        row = database.execute(FIND_RUN, (experiment, RUN_TAG, run.run_id)).fetchone()
        if row is None:
            return StoredMetrics()
        run_uuid, status = row
        rows = database.execute(READ_METRICS, (run_uuid,)).fetchall()
    points = [MetricPoint(key, step, time, math.nan if is_nan else value) for key, step, time, value, is_nan in rows]
    return _by_update(points, ended=status != RUNNING)


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
