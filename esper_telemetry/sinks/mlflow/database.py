"""MLflow's SQLite database, which is there as a whole or not at all.

MLflow makes some forty tables, step by step, when it first opens a database. A process that is killed meanwhile, or a second one that
begins at the same time, leaves a file that no MLflow opens any more ("table already exists"). So the tables are made in a draft, which
gets its name last, by one process at a time.

Rows of MLflow's table of metrics, many in one statement.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from esper_telemetry.journal.lock import lock_file

SQLITE: Final = "sqlite:///"
BROKEN_SUFFIX: Final = ".broken"
LOCK: Final = "lock"


def ensure_database(path: Path) -> None:
    """Makes the database, its folder too, unless it is there; one without runs that was never finished is set aside.

    Raises OSError where nothing can be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and _holds_something(path):
        return
    with _draft_folder(path) as folder:
        if not path.exists() or not _holds_something(path):
            _finish(path, folder / f"{secrets.token_hex(4)}.db")  # MLflow remembers, by name, which ones have tables


def _finish(path: Path, draft: Path) -> None:
    _make_tables(draft)
    if path.exists() and not _holds_something(path) and _schema(path) != _schema(draft):
        path.replace(path.with_name(path.name + BROKEN_SUFFIX))
    with suppress(FileExistsError):  # an empty one is fine, and so is one that somebody else has made meanwhile
        _name(draft, path)


def _holds_something(path: Path) -> bool:
    """Whether it holds runs, or experiments besides the one that MLflow makes; also of what cannot be read, which is not ours to judge."""
    tables = _tables(path)
    if tables is None:
        return True
    known = {"runs", "experiments"} & tables
    return any(_count(path, table) > (table == "experiments") for table in known)


def _tables(path: Path) -> set[str] | None:
    """Names of the tables; None where they cannot be read."""
    try:
        with closing(_connection(path)) as database:
            return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error:
        return None


def _schema(path: Path) -> tuple[set[str] | None, list[str]]:
    """Names of the tables, and how far MLflow has come with them."""
    try:
        with closing(_connection(path)) as database:
            return _tables(path), [version for (version,) in database.execute("SELECT * FROM alembic_version")]
    except sqlite3.Error:
        return _tables(path), []


def _count(path: Path, table: str) -> int:
    try:
        with closing(_connection(path)) as database:
            return int(database.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])
    except sqlite3.Error:
        return 1


def _connection(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=10.0)


def _make_tables(draft: Path) -> None:
    from mlflow.tracking import MlflowClient

    MlflowClient(f"{SQLITE}{draft}").search_experiments(max_results=1)


@contextmanager
def _draft_folder(path: Path) -> Iterator[Path]:
    """A folder beside the database that one process has at a time, as far as the file system knows locks."""
    folder = path.with_name(f".{path.name}.draft")
    lock = _locked(folder)
    try:
        yield folder
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _locked(folder: Path) -> int:
    """The lock of a folder that is there: who had it before has removed the folder, lock and all, and others may have made a new one."""
    while True:
        folder.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # the folder was removed meanwhile
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
            with suppress(OSError):  # a file system without locks
                lock_file(lock, wait=True)
            if _is_open(lock, folder / LOCK):
                return lock
            os.close(lock)


def _is_open(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _name(draft: Path, path: Path) -> None:
    """Gives the file its name, without taking it from another. Raises FileExistsError where there is one."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if not path.exists():
            draft.replace(path)


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
