"""Journals of made-up runs, with the alarms and outcomes that the run itself would have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from healthy_run import FACTS, Values, multiplied, run

from esper_telemetry.alarms import Detectors
from esper_telemetry.alarms.metric_entries import metric_entries
from esper_telemetry.core.record import Record, RunInfo, RunStatus
from esper_telemetry.journal import (
    Journal,
    JournalEvent,
    encode_alarm,
    encode_end,
    encode_event,
    encode_record,
    encode_run,
)

SPOILED = multiplied({"loss/value": 1e4, "grad/global/norm_preclip_max": 1e3})


def lines_of(
    records: Sequence[Record],
    status: RunStatus | None = RunStatus.FINISHED,
    facts: Mapping[str, Any] = FACTS,
    **info: Any,
) -> list[dict[str, Any]]:
    """Lines of a journal."""
    metrics = {entry.metric.key: entry.info() for entry in metric_entries()}
    head = RunInfo("r1", info.pop("name", "run"), None, 1e9, facts=facts, metrics=metrics, **info)
    lines, detectors = [encode_run(head)], Detectors(facts)
    for record in records:
        verdict = detectors.step(record)
        lines.append(encode_record(record))
        lines += [encode_alarm(alarm) for alarm in verdict.alarms]
        lines += [encode_event(JournalEvent(kind, data, record.seq, record.axes)) for kind, data in verdict.events]
    if status is not None:
        seq = len(records)
        lines += [encode_event(JournalEvent(kind, data, seq)) for kind, data in detectors.end(status)]
        lines.append(encode_end(status, seq=seq))
    return lines


def write(path: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    """A run directory with these lines."""
    journal = Journal.create(path)
    journal.write(*lines)
    journal.close()
    return path


def learning(updates: int, change: Any = None) -> list[Record]:
    """Records of a healthy run whose return rises; `change` spoils them as in `healthy_run.run`."""

    def rise(metrics: Values, ago: int) -> None:
        metrics["episode/return_mean"] += 0.5 * ago
        metrics["episode/return_mean_100"] += 0.5 * ago

    return run(updates, change or rise, since=1 if change is None else updates // 2)
