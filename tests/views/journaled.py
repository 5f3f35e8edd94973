"""Journals of made-up runs, with the alarms and outcomes that such a run writes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from healthy_run import FACTS, Values, multiplied, run

from esper_telemetry.alarms import Detectors
from esper_telemetry.alarms.metric_entries import metric_entries
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Axes, Record, RunInfo, RunStatus
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.lines import JournalEvent, encode_alarm, encode_end, encode_event, encode_record, encode_run

UPDATE_SECONDS = 10.0
SPIKE_TEXT = "Since update 4, the policy has moved 0.4 nats. Try: Lower the learning rate."
SPOILED = multiplied({"loss/value": 1e4, "grad/global/norm_preclip_max": 1e3})


def lines_of(
    records: Sequence[Record], status: RunStatus | None = RunStatus.FINISHED, facts: Mapping[str, Any] = FACTS, **info: Any
) -> list[dict[str, Any]]:
    metrics = {entry.metric.key: entry.info() for entry in metric_entries()}
    head = RunInfo("r1", info.pop("name", "run"), None, 1e9, facts=facts, metrics=metrics, **info)
    lines, detectors = [encode_run(head)], Detectors(facts)
    for record in records:
        verdict = detectors.step(record)
        lines.append(encode_record(replace(record, values={**record.values, **verdict.values})))
        lines += [encode_alarm(alarm) for alarm in verdict.alarms]
        lines += [encode_event(JournalEvent(kind, data, record.seq, record.axes)) for kind, data in verdict.events]
    if status is not None:
        seq = len(records)
        lines += [encode_event(JournalEvent(kind, data, seq)) for kind, data in detectors.end(status)]
        lines.append(encode_end(status, seq=seq))
    return lines


def write(path: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    journal = Journal.create(path)
    journal.write(*lines)
    journal.close()
    return path


def learning(updates: int, change: Any = None) -> list[Record]:
    """Return the records of a healthy run whose return rises; `change` breaks them as in `healthy_run.run`."""

    def rise(metrics: Values, ago: int) -> None:
        metrics["episode/return_mean"] += 0.5 * ago
        metrics["episode/return_mean_100"] += 0.5 * ago

    return run(updates, change or rise, since=1 if change is None else updates // 2)


def axes(update: int) -> Axes:
    return Axes(update, 1000 * update, 16 * update, UPDATE_SECONDS * update)


class WrittenRun:
    """A run directory that a test writes line by line."""

    def __init__(self, run_dir: Path, **facts: Any) -> None:
        self.run_dir, self.updates = run_dir, 0
        self._journal = Journal.create(run_dir)
        metrics = {entry.metric.key: entry.info() for entry in metric_entries()}
        info = {"env": "Walker", "total_steps": 20_000, **facts}
        self._journal.write(encode_run(RunInfo("id", run_dir.name, run_dir, 1.0, facts=info, metrics=metrics)))

    def record(self, **values: float) -> None:
        """Append a record; `__` in a keyword means `/`."""
        self.updates += 1
        self._journal.write(
            encode_record(Record(self.updates, axes(self.updates), {key.replace("__", "/"): x for key, x in values.items()}))
        )

    def alarm(self, kind: str, severity: float = 0.9, event: AlarmEvent = AlarmEvent.RAISE, **rest: Any) -> None:
        level, place = AlarmLevel.of(severity), axes(self.updates)
        details = {"since": self.updates, "incident": 1, "cause": kind, "text": SPIKE_TEXT, **rest}
        self._journal.write(encode_alarm(Alarm(self.updates, place, kind, event, severity, level, "policy/kl", 0.4, **details)))

    def event(self, kind: str, **data: Any) -> None:
        self._journal.write(encode_event(JournalEvent(kind, data, self.updates, axes(self.updates))))

    def end(self, status: RunStatus) -> None:
        self._journal.write(encode_end(status, seq=self.updates))
