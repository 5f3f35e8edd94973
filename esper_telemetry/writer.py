"""From measurements to journal lines: the last step before anything leaves, in this process or in one beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from esper_telemetry.evidence import Captures
from esper_telemetry.journal import (
    Journal,
    JournalEvent,
    MemoryJournal,
    encode_end,
    encode_event,
    encode_metrics,
    encode_record,
    encode_run,
    records,
)
from esper_telemetry.layout import Values
from esper_telemetry.metrics.performance import telemetry_health
from esper_telemetry.record import Axes, Level, MetricInfo, Record, RunInfo, RunStatus
from esper_telemetry.series.derive import Series
from esper_telemetry.summary import Containment, Snapshot, summarize, without_many_layers
from esper_telemetry.window import Window


class Delivery(NamedTuple):
    """How far the sinks are behind, and how often they have failed."""

    queue_depth: int
    errors: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What one flush hands over.

    Attributes:
        seq, axes, partial: of the record.
        measured: values that are finished already.
        snapshots: what is still to be summarised.
        seconds: time that telemetry took on the training thread since the last record.
        elapsed: time since the last record.
        delivery: where the sinks stand.
        metric_errors: metric functions that raised where `measured` comes from.
        cpu_seconds: processor time that telemetry took on the training thread since the last record.
        witnesses: updates that are summarised already, and are kept for evidence: of several ranks the first one's.
    """

    seq: int
    axes: Axes
    partial: bool
    measured: Values
    snapshots: tuple[Snapshot, ...]
    seconds: float
    elapsed: float
    delivery: Delivery
    metric_errors: int = 0
    cpu_seconds: float | None = None
    witnesses: tuple[Snapshot, ...] = ()


class Writer(Protocol):
    """Takes what belongs into the journal, in order."""

    def run(self, info: RunInfo) -> None:
        """The head of the journal."""

    def go_on(self, info: RunInfo) -> None:
        """Instead of `run`, where the journal holds this head and the records of earlier parts of the run."""

    def describe(self, metrics: Mapping[str, MetricInfo], seq: int) -> None:
        """Descriptions of keys that the head did not have."""

    def record(self, measured: Measured) -> None:
        """One record."""

    def event(self, event: JournalEvent) -> None:
        """Something that happened besides records."""

    def sync(self, timeout: float) -> None:
        """All lines so far are in the journal, and on the disk, when it returns, if the timeout allows."""

    def end(self, status: RunStatus, seq: int, timeout: float) -> None:
        """The last line; all lines are in the journal when it returns, if the timeout allows."""


class JournalWriter:
    """Summarises, derives and appends, here and now.

    Args:
        journal: where to.
        level: at which the run is measured.
    """

    def __init__(self, journal: Journal | MemoryJournal, level: Level) -> None:
        self._journal = journal
        self._level = level
        self._facts: Mapping[str, Any] = {}
        self._series = Series(self._facts)
        self._captures = Captures(level)
        self._containment = Containment()

    def run(self, info: RunInfo) -> None:
        """See `Writer`."""
        self._facts = info.facts
        self._series = Series(self._facts)
        self._journal.write(encode_run(info))

    def go_on(self, info: RunInfo) -> None:
        """See `Writer`; the journal yields the history of the derived values again."""
        self._facts = info.facts
        self._series = Series(self._facts)
        for record in records(info.run_dir) if info.run_dir else ():
            self._containment.attempt(partial(self._series.derive, record.values, self._level), dict)

    def describe(self, metrics: Mapping[str, MetricInfo], seq: int) -> None:
        """See `Writer`."""
        self._journal.write(encode_metrics(metrics, seq=seq))

    def record(self, measured: Measured) -> None:
        """See `Writer`."""
        found = self._summarized(measured.snapshots).united(measured.measured)
        values = dict(found.values)
        self._containment.attempt(partial(self._series.derive, found.unreported | values, self._level), values.update)
        if self._level < Level.DEBUG:
            values = without_many_layers(values)
        values.update(
            telemetry_health(
                seconds=measured.seconds,
                elapsed=measured.elapsed,
                undefined=found.undefined,
                level=self._level,
                stats=measured.delivery,
                metric_errors=measured.metric_errors + self._containment.take(),
                cpu_seconds=measured.cpu_seconds,
            )
        )
        self._journal.write(
            encode_record(Record(measured.seq, measured.axes, values, found.histograms, measured.partial))
        )
        self._tell_baselines(measured)
        self._capture(measured, values)

    def _summarized(self, snapshots: Iterable[Snapshot]) -> Values:
        window = Window()
        for snapshot in snapshots:
            for measurements, epochs in self._containment.steps(summarize(snapshot, self._facts, self._level)):
                self._containment.measure(measurements, partial(window.add, epoch=epochs, step=None))
        return window.send().finish(self._level)

    def _tell_baselines(self, measured: Measured) -> None:
        """Says where the thresholds of gradients start anew: what was out of range has become the rule."""
        groups = self._series.gradients.rebaselined
        if groups:
            data = {"keys": [f"grad/{group}/norm_preclip" for group in groups]}
            self._journal.write(encode_event(JournalEvent("rebaseline", data, seq=measured.seq, axes=measured.axes)))

    def _capture(self, measured: Measured, values: Mapping[str, float]) -> None:
        """Appends the evidence that the record calls for, of several ranks what the first one saw; only a journal can keep it."""
        if self._journal.run_dir is None:
            return
        whose = {"rank": 0} if self._facts.get("ranks", 1) > 1 else {}
        for snapshot in measured.snapshots + measured.witnesses:
            pairs = {name: asdict(diagnosis) for name, diagnosis in self._series.pairs.diagnoses.items()}
            for capture in self._containment.steps(self._captures.of(snapshot, values, self._facts, pairs)):
                data = {**capture.data, **whose}
                event = JournalEvent(f"evidence/{capture.type}", data, seq=measured.seq, axes=measured.axes)
                self._journal.write(encode_event(event))

    def event(self, event: JournalEvent) -> None:
        """See `Writer`."""
        self._journal.write(encode_event(event))

    def sync(self, timeout: float) -> None:
        """See `Writer`."""
        self._journal.sync()

    def end(self, status: RunStatus, seq: int, timeout: float) -> None:
        """See `Writer`."""
        self._journal.write(encode_end(status, seq=seq))
