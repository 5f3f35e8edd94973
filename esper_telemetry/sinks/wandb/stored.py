"""Read what W&B holds of a run: in the files of an offline run, or on a server.

A client that is killed loses rows that it has accepted, up to a second of them, so a resumed run reads the last update from disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from esper_telemetry.core.backends import wandb_records
from esper_telemetry.sinks.protocol import StoredMetrics

UPDATE: Final = "axis/update"
RUNNING: Final = "running"
SERVER_TIMEOUT_SECONDS: Final = 30
SETTLE_SECONDS: Final = 2.0
"""Time for which a file without an end must not grow: a client that was asked to finish may still write."""


class FileSummary(NamedTuple):
    """The contents of one `.wandb` file: its project, its last update (0 for none), and whether the run was ended."""

    project: str
    update: int
    ended: bool


def last_update(folder: Path, run_id: str, project: str, *, besides: Path) -> int | None:
    """Return the last update in any part of the run, 0 for none; None if there is no part `besides` that folder."""
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
    """Return all rows of the run's history on the server; raises the client's exceptions if it does not answer or has no such run."""
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

    for data in wandb_records(file.read_bytes()):
        record = Record.FromString(data)
        yield record.WhichOneof("record_type"), record


def _update(history: Any) -> int:
    keys = (("/".join(item.nested_key) or item.key, item.value_json) for item in history.item)
    return int(next((json.loads(value) for key, value in keys if key == UPDATE), 0))


def _history_numbers(history: Any) -> Iterator[tuple[str, float]]:
    """Yield the row's numbers, without W&B's own; a histogram as the sum of its counts."""
    for item in history.item:
        key, *part = item.nested_key or [item.key]
        if key.startswith("_") or (part and part != ["values"]):
            continue
        value = json.loads(item.value_json)
        yield key, float(sum(value) if part else value)
