"""What a W&B server holds of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from esper_telemetry.sinks.protocol import StoredMetrics

UPDATE: Final = "axis/update"
RUNNING: Final = "running"


def stored_on_server(run_id: str, project: str, entity: str | None) -> StoredMetrics:
    """All rows of the run's history; raises what the client raises where the server does not answer, or knows no such run."""
    import wandb

    path = "/".join(part for part in (entity, project, run_id) if part)
    run = wandb.Api(timeout=30).run(path)
    stored = StoredMetrics(ended=run.state != RUNNING)
    for row in run.scan_history():
        if row.get(UPDATE) is not None:
            for key, value in _numbers(row):
                stored.add(int(row[UPDATE]), key, value)
    return stored


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a row, without those that W&B adds; a histogram as the sum of its counts."""
    for key, value in row.items():
        if key.startswith("_") or value is None:
            continue
        if isinstance(value, Mapping):
            yield key, float(sum(value.get("values", ())))
        elif isinstance(value, int | float):
            yield key, float(value)
