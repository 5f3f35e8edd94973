"""What a sink is tried on: runs of their own, records of every kind, and sinks that are broken on purpose around yours."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from esper_telemetry.journal import Journal, encode_end, encode_record, encode_run
from esper_telemetry.record import (
    Alarm,
    AlarmEvent,
    AlarmLevel,
    Axes,
    Histogram,
    MetricInfo,
    Record,
    RunInfo,
    RunStatus,
)
from esper_telemetry.relay.audit import audit
from esper_telemetry.sinks.protocol import Sink

BATCH = 200


def run_in(directory: Path, **changes: Any) -> RunInfo:
    """A run that no other one is like."""
    described = {"policy/kl": MetricInfo("nats", "Is the policy moving?", level="minimal")}
    given = {"name": "conformance", "config": {"learning_rate": 3e-4, "sizes": [64, 64]}, "tags": ("kit",), **changes}
    return RunInfo(secrets.token_hex(6), run_dir=directory, started=time.time(), metrics=described, **given)


def record(update: int, *, keys: int = 3, values: dict[str, float] | None = None) -> Record:
    """A record with so many keys; every axis has another number."""
    numbers = {f"policy/key_{index}": update + index / 1000 for index in range(keys)} if values is None else values
    axes = Axes(update, update * 128, update * 16, 1.7e9 + update / 8)
    counts = Histogram((0.0, 0.5, 1.0), (float(update), 1.0))
    return Record(update, axes, numbers, {"adv/raw/hist": counts} if update % 10 == 1 else {})


def alarm(update: int, event: AlarmEvent) -> Alarm:
    """An alarm of the record of that update, with words that need quoting."""
    text = "the policy moved <b>too far</b>, “ünïcode” & 'quotes'"
    axes = record(update).axes
    return Alarm(
        update, axes, "policy/kl_spike", event, 0.9, AlarmLevel.CRITICAL, "policy/kl", since=1, incident=1, text=text
    )


def batches(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    """As the relay hands them over."""
    for start in range(0, len(records), BATCH):
        yield tuple(records[start : start + BATCH])


def journalled(run: RunInfo, records: Iterable[Record], *, status: RunStatus | None = RunStatus.FINISHED) -> Path:
    """Writes a journal that holds them into the run's directory, which it returns; without status the run has no end."""
    assert run.run_dir is not None
    journal = Journal.create(run.run_dir)
    journal.write(encode_run(run))
    for entry in records:
        journal.write(encode_record(entry))
    if status is not None:
        journal.write(encode_end(status, seq=10**6))
    journal.close()
    return run.run_dir


def delivered(sink: Sink, run: RunInfo, records: Sequence[Record], status: RunStatus = RunStatus.FINISHED) -> None:
    """Opens, writes and closes a sink as the relay does when all is well."""
    sink.open(run)
    for batch in batches(records):
        sink.write(batch)
    sink.close(status)


def expect_equal(run_dir: Path, sink: Sink) -> None:
    """Fails unless the backend holds what the journal holds; content with a sink that cannot say what it holds."""
    found = audit(run_dir, sink)
    if found is None:
        return
    lacks = (
        f"lacks {found.missing.total()} numbers of updates {found.lacking[:10]} ({dict(found.missing.most_common(3))})"
    )
    assert not found.missing, f"the backend {lacks}"
    assert not found.different, f"numbers differ from the journal's: {dict(found.different.most_common(3))}"
    assert not found.repeated, f"numbers stand there more than once: {dict(found.repeated.most_common(3))}"
    assert not found.unknown, f"the backend holds updates that were never sent: {found.unknown[:10]}"


class Around:
    """A sink around yours that fails as it is told, and else does what yours does.

    Args:
        inner: your sink.
        before: called with the name of the method and its argument before yours is.
    """

    def __init__(self, inner: Sink, before: Callable[[str, Any], None]) -> None:
        self.inner = inner
        self.in_process = True
        self.name = "around"
        self._before = before

    def open(self, run: RunInfo) -> None:
        """See `Sink`."""
        self._before("open", run)
        self.inner.open(run)

    def write(self, records: Sequence[Record]) -> None:
        """See `Sink`."""
        self._before("write", records)
        self.inner.write(records)

    def close(self, status: RunStatus) -> None:
        """See `Sink`."""
        self._before("close", status)
        self.inner.close(status)
