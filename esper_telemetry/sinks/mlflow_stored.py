"""What an MLflow store holds of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from esper_telemetry.record import RunInfo
from esper_telemetry.sinks.mlflow_database import SQLITE
from esper_telemetry.sinks.mlflow_run import RUN_TAG, client_of, quoted
from esper_telemetry.sinks.stored import Stored

UPDATE: Final = "axis/update"
RUNNING: Final = "RUNNING"


def stored_run(store: str | None, run: RunInfo, experiment: str) -> Stored:
    """The whole history of every metric of the run; nothing where the store has no such run, and no store is made.

    MLflow keeps no rows: numbers belong to one update where step and time are those of its `axis/update`.
    """
    if store is not None and store.startswith(SQLITE) and not Path(store.removeprefix(SQLITE)).exists():
        return Stored()
    client = client_of(store)
    found = _found(client, run, experiment)
    if found is None:
        return Stored()
    stored = Stored(ended=found.info.status != RUNNING)
    histories = {key: client.get_metric_history(found.info.run_id, key) for key in found.data.metrics}
    updates = {(point.step, point.timestamp): int(point.value) for point in histories.get(UPDATE, ())}
    for key, history in histories.items():
        for point in history:
            if (point.step, point.timestamp) in updates:
                stored.add(updates[point.step, point.timestamp], key, point.value)
    return stored


def _found(client: Any, run: RunInfo, experiment: str) -> Any:
    known = client.get_experiment_by_name(experiment)
    if known is None:
        return None
    runs = client.search_runs([known.experiment_id], f"tags.`{RUN_TAG}` = '{quoted(run.run_id)}'", max_results=1)
    return runs[0] if runs else None
