"""Rows of MLflow's table of metrics, many in one statement.

MLflow's store makes an object of every number, checks it, and looks whether it is the latest of its key: 140 µs a number, of which the
database takes 5. A run of 40 updates a second kept one core busy with that. Of what is sent at once, only the latest number of each key
needs it; those before are history, which is this table alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

COLUMNS: Final = {"key", "value", "timestamp", "step", "is_nan", "run_uuid"}
"""Of the table, as they are known here."""

MOST_ROWS: Final = 5000
"""Of one transaction, while which nobody else writes into the database."""


class MetricRows:
    """Writes history into the SQLite database of a client's store, in the session that the store itself uses.

    Args:
        store: MLflow's `SqlAlchemyStore`.
    """

    def __init__(self, store: Any) -> None:
        from mlflow.store.tracking.dbmodels.models import SqlMetric
        from sqlalchemy import insert

        self._store = store
        self._statement = insert(SqlMetric).prefix_with("OR IGNORE")

    def add(self, run_id: str, metrics: Sequence[Any]) -> None:
        """Stores MLflow's `Metric`s; what is there already is left as it is.

        Raises MlflowException where the store's own functions would.
        """
        for start in range(0, len(metrics), MOST_ROWS):
            rows = [self._row(run_id, metric) for metric in metrics[start : start + MOST_ROWS]]
            with self._store.ManagedSessionMaker(read_only=False) as session:
                session.connection().execute(self._statement, rows)

    def _row(self, run_id: str, metric: Any) -> dict[str, Any]:
        is_nan, value = self._store.sanitize_metric_value(float(metric.value))
        return {
            "key": metric.key,
            "value": value,
            "timestamp": metric.timestamp,
            "step": metric.step,
            "is_nan": is_nan,
            "run_uuid": run_id,
        }


def metric_rows(client: Any) -> MetricRows | None:
    """The rows of a client's store; None where that is a server, another database, or an MLflow with another table."""
    store = getattr(getattr(client, "_tracking_client", None), "store", None)
    if getattr(store, "db_type", None) != "sqlite" or not hasattr(store, "ManagedSessionMaker"):
        return None
    from mlflow.store.tracking.dbmodels.models import SqlMetric

    return MetricRows(store) if {column.name for column in SqlMetric.__table__.columns} == COLUMNS else None


def split(metrics: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """History, and the latest of each key: by step, then by time, as MLflow has it.

    Once each: of a number that is there already MLflow does not see that it is the latest.
    """
    latest: dict[str, Any] = {}
    for metric in metrics:
        known = latest.get(metric.key)
        if known is None or _moment(metric) >= _moment(known):
            latest[metric.key] = metric
    history = [metric for metric in metrics if not _same(metric, latest[metric.key])]
    return history, list(latest.values())


def _moment(metric: Any) -> tuple[int, int]:
    return metric.step, metric.timestamp


def _same(one: Any, other: Any) -> bool:
    return one is other or (_moment(one) == _moment(other) and one.value == other.value)
