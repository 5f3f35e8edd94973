"""From measurements to journal lines: the last step before anything leaves, in this process or in one beside it.

What one update has gathered so far, and what becomes of it when it is flushed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from esper_telemetry.core.packing import NO_VALUES, Values
from esper_telemetry.core.record import Alarm, AlarmEvent, Axes, Level, MetricInfo, Record, RunInfo, RunStatus, SinkLag
from esper_telemetry.history.derive import Series
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.lines import (
    Entry,
    JournalEvent,
    Line,
    encode_alarm,
    encode_end,
    encode_event,
    encode_metrics,
    encode_record,
    encode_run,
    plain,
)
from esper_telemetry.journal.memory import MemoryJournal
from esper_telemetry.journal.read import JournalFollower
from esper_telemetry.metrics.performance import telemetry_health
from esper_telemetry.pipeline.watch import Detector, Found, Judgement, Watches
from esper_telemetry.pipeline.window import NO_NUMBERS, Logged, Numbers, Transfer, Window
from esper_telemetry.updates.containment import Containment
from esper_telemetry.updates.data import Snapshot, copied
from esper_telemetry.updates.evidence import Capture, Scene, captures, evidence_of, weak
from esper_telemetry.updates.groups import summarize, without_many_layers

ALARM_VALUES, ESCALATION = "alarm/", "telemetry/escalation_remaining"
"""How the keys begin that the watch adds to a record."""
FAILURE = "failure"
"""The type of the event that names the exception which ended the run."""
INTERVENTION = "intervention"
"""The type of the event that says that someone has changed the run on purpose."""


class JournalOutput(NamedTuple):
    """How far the sinks are behind, and how often they have failed: all together, and each."""

    queue_depth: int
    errors: int
    sinks: tuple[SinkLag, ...] = ()


class Measured(NamedTuple):
    """What one flush hands over.

    Attributes:
        seq, axes, partial: of the record.
        level: at which this update is measured.
        measured: values that are finished already.
        snapshots: what is still to be summarised.
        seconds: time that telemetry took on the training thread since the last record.
        elapsed: time since the last record.
        delivery: where the sinks stand.
        metric_errors: metric functions that raised where `measured` comes from.
        cpu_seconds: processor time that telemetry took on the training thread since the last record.
        witnesses: updates that are summarised already, and are kept for evidence: of several ranks the first one's.
        numbers: what was logged; it stands where it shares a key.
    """

    seq: int
    axes: Axes
    partial: bool
    level: Level
    measured: Values
    snapshots: tuple[Snapshot, ...]
    seconds: float
    elapsed: float
    delivery: JournalOutput
    metric_errors: int = 0
    cpu_seconds: float | None = None
    witnesses: tuple[Snapshot, ...] = ()
    numbers: Numbers = NO_NUMBERS

    @property
    def plain(self) -> bool:
        """Whether logged numbers are all there is."""
        return self.measured is NO_VALUES and not (self.partial or self.snapshots or self.witnesses)

    @property
    def seen(self) -> tuple[Snapshot, ...]:
        """What evidence is taken from."""
        return self.snapshots + self.witnesses


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

    def found(self) -> Sequence[Found]:
        """What the watch has found since the last call, as far as is known here by now; never waits."""

    def sync(self, timeout: float) -> None:
        """All lines so far are in the journal, and on the disk, when it returns, if the timeout allows."""

    def end(self, status: RunStatus, seq: int, timeout: float) -> None:
        """The last line; all lines are in the journal when it returns, if the timeout allows."""


class JournalWriter:
    """Summarises, derives and appends, here and now.

    Args:
        journal: where to.
        level: at which the run is measured while nothing is wrong.
        watches: makes what looks at the records for alarms; None where nobody does.
    """

    def __init__(self, journal: Journal | MemoryJournal, level: Level, watches: Watches | None = None) -> None:
        self._journal = journal
        self._level = level
        self._watches = watches
        self._found: list[Found] = []
        self._remaining = 0
        self._causes: dict[str, str] = {}
        self._containment = Containment()
        self._earlier: Iterable[Entry] = ()
        self._know({})

    def run(self, info: RunInfo) -> None:
        """See `Writer`."""
        self._know(info.facts)
        self._journal.write(encode_run(info))

    def go_on(self, info: RunInfo) -> None:
        """See `Writer`; from the journal derived values and the watch learn again what they knew."""
        self._know(info.facts)
        self._earlier = JournalFollower(info.run_dir) if info.run_dir else ()
        self.catch_up()

    def catch_up(self) -> None:
        """Learns from what was written into the journal since `go_on`, by somebody else; nothing where it cannot be read."""
        with suppress(OSError):
            self._learn()

    def _learn(self) -> None:
        for entry in self._earlier:
            if isinstance(entry, Record):
                self._containment.attempt(partial(self._series.derive, entry.values, self._level), dict)
                for verdict in self._verdict(_unjudged(entry)):
                    self._remaining = verdict.remaining
                    self._found = [Found((), verdict.remaining)]
            elif isinstance(entry, JournalEvent):
                self._heed(entry)

    def describe(self, metrics: Mapping[str, MetricInfo], seq: int) -> None:
        """See `Writer`."""
        self._journal.write(encode_metrics(metrics, seq=seq))

    def record(self, measured: Measured) -> None:
        """See `Writer`."""
        found = self._summarized(measured.snapshots, measured.level).united(measured.measured)
        values = found.values | measured.numbers.by_key()
        self._containment.attempt(
            partial(self._series.derive, found.unreported | values, measured.level), values.update
        )
        if measured.level < Level.DEBUG:
            values = without_many_layers(values)
        values.update(
            telemetry_health(
                seconds=measured.seconds,
                elapsed=measured.elapsed,
                undefined=found.undefined,
                copies=found.copies,
                level=measured.level,
                stats=measured.delivery,
                metric_errors=measured.metric_errors + self._containment.take(),
                cpu_seconds=measured.cpu_seconds,
            )
        )
        record = Record(measured.seq, measured.axes, values, found.histograms, measured.partial)
        self._journal.write(*self._judged(record, measured))
        self._tell_baselines(measured)
        self._capture(measured)

    def _judged(self, record: Record, measured: Measured) -> Iterator[Line]:
        """The record with what the watch makes of it, and behind it, in the same piece, its alarms and events."""
        verdict = next(iter(self._verdict(record)), None)
        if verdict is None:
            yield encode_record(record)
            return
        scene = Scene(record, measured.seen, self._facts, self._pairs(), self._series.gradients.condition.cause)
        alarms = tuple(self._proven(alarm, scene) for alarm in verdict.alarms)
        self._find(alarms, verdict.remaining)
        yield encode_record(replace(record, values={**record.values, **verdict.values}))
        yield from map(encode_alarm, alarms)
        for kind, data in verdict.events:
            yield encode_event(JournalEvent(kind, data, seq=record.seq, axes=record.axes))

    def _find(self, alarms: tuple[Alarm, ...], remaining: int) -> None:
        """Keeps what is new to the trainer: of a record in which all is as it was it need not hear."""
        if alarms or remaining != self._remaining:
            self._found.append(Found(alarms, remaining))
            self._remaining = remaining

    def _verdict(self, record: Record) -> Sequence[Judgement]:
        """What the watch says of a record; nothing where there is none, or where it fails."""
        said: list[Judgement] = []
        if self._watch is not None:
            self._containment.attempt(partial(self._watch.step, record), said.append)
        return said

    def _proven(self, alarm: Alarm, scene: Scene) -> Alarm:
        """The alarm with its evidence; without it where there is a mistake in that."""
        proven: list[Alarm] = []
        self._containment.attempt(partial(_proven, alarm, scene), proven.append)
        return proven[0] if proven else alarm

    def _summarized(self, snapshots: Iterable[Snapshot], level: Level) -> Values:
        window = Window()
        for snapshot in snapshots:
            for measurements, epochs in self._containment.steps(summarize(snapshot, self._facts, level)):
                self._containment.measure(measurements, partial(window.add, epoch=epochs, step=None))
        finished: list[Values] = []
        self._containment.attempt(partial(_finished, window, level), finished.append)
        return finished[0] if finished else NO_VALUES

    def _tell_baselines(self, measured: Measured) -> None:
        """Says where the thresholds of gradients start anew: what was out of range has become the rule."""
        groups = self._series.gradients.rebaselined
        if groups:
            data = {"keys": [f"grad/{group}/norm_preclip" for group in groups]}
            self._journal.write(encode_event(JournalEvent("rebaseline", data, seq=measured.seq, axes=measured.axes)))

    def _capture(self, measured: Measured) -> None:
        """Appends what an update at DEBUG leaves behind; at NORMAL only why modules learn badly, when that changes.

        Without a journal to keep it there is no reader for it. Of several ranks it is what the first one saw.
        """
        if self._journal.run_dir is None:
            return
        pairs = self._pairs()
        causes = {name: why["cause"] for name, why in weak(pairs).items()}
        if measured.level is Level.NORMAL and causes and causes != self._causes:
            self._show(Capture("pairs", weak(pairs)), measured)
        self._causes = causes
        if measured.level >= Level.DEBUG:
            for snapshot in measured.seen:
                for capture in self._containment.steps(captures(snapshot, self._facts, pairs)):
                    self._show(capture, measured)

    def _show(self, capture: Capture, measured: Measured) -> None:
        data = {**capture.data, **self._whose()}
        event = JournalEvent(f"evidence/{capture.type}", data, seq=measured.seq, axes=measured.axes)
        self._journal.write(encode_event(event))

    def _whose(self) -> dict[str, int]:
        """Which rank's rows evidence shows, where there are several."""
        return {"rank": 0} if self._facts.get("ranks", 1) > 1 else {}

    def _pairs(self) -> dict[str, dict[str, Any]]:
        """Why modules learn as they do next to their hosts, by name."""
        return {name: asdict(diagnosis) for name, diagnosis in self._series.pairs.diagnoses.items()}

    def _know(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts
        self._series = Series(facts)
        self._watch: Detector | None = None if self._watches is None else self._watches(facts)

    def _heed(self, event: JournalEvent) -> tuple[Alarm, ...]:
        """Tells the watch of an event; the alarms that a failure raises."""
        verdicts: list[Judgement] = []
        if self._watch is not None and event.type == INTERVENTION:
            self._watch.intervention()
        elif self._watch is not None and event.type == FAILURE and event.axes is not None:
            failure = partial(self._watch.failure, event.seq, event.axes, event.data)
            self._containment.attempt(failure, verdicts.append)
        return tuple(alarm for verdict in verdicts for alarm in verdict.alarms)

    def event(self, event: JournalEvent) -> None:
        """See `Writer`."""
        alarms = self._heed(event)
        self._find(alarms, self._remaining)
        self._journal.write(encode_event(event), *map(encode_alarm, alarms))

    def found(self) -> Sequence[Found]:
        """See `Writer`."""
        found, self._found = self._found, []
        return found

    def sync(self, timeout: float) -> None:
        """See `Writer`."""
        self._journal.sync()

    def end(self, status: RunStatus, seq: int, timeout: float) -> None:
        """See `Writer`."""
        self._journal.write(encode_end(status, seq=seq))


def _finished(window: Window, level: Level) -> Values:
    """The values of all rows of a window."""
    return window.send().finish(level)


def _unjudged(record: Record) -> Record:
    """A record as the watch has seen it when it was new: without what it said itself."""
    own = (ALARM_VALUES, ESCALATION)
    return replace(record, values={key: value for key, value in record.values.items() if not key.startswith(own)})


def _proven(alarm: Alarm, scene: Scene) -> Alarm:
    """An alarm that is raised, with the evidence of the update that raised it."""
    if alarm.event is not AlarmEvent.RAISE:
        return alarm
    return replace(alarm, evidence=plain({**alarm.evidence, **evidence_of(alarm, scene)}))


class Flush(NamedTuple):
    """A record whose numbers may still be on their way from the device; `witnesses` are kept for evidence alone."""

    axes: Axes
    level: Level
    transfer: Transfer
    numbers: Numbers
    snapshots: tuple[Snapshot, ...]
    witnesses: tuple[Snapshot, ...]
    partial: bool

    def lasting(self) -> Flush:
        """The same with copies of what the trainer may write to when it goes on."""
        return self._replace(snapshots=copied(self.snapshots), witnesses=copied(self.witnesses))


class OpenUpdate:
    """The update under way.

    Attributes:
        window: groups that were observed.
        logged: plain numbers.
        snapshots: whole updates of a trainer, still to be summarised.
        witnesses: those that are summarised already.
    """

    def __init__(self) -> None:
        self.window = Window()
        self.logged = Logged()
        self.snapshots: list[Snapshot] = []
        self.witnesses: list[Snapshot] = []

    def __bool__(self) -> bool:
        return bool(self.window or self.logged or any(self.snapshots))

    @property
    def travels(self) -> bool:
        """Whether there are only numbers that were logged, and what is still to be summarised, if anything."""
        return not (self.witnesses or self.window)

    @property
    def gradient_steps(self) -> int:
        """Optimizer steps that it has seen."""
        return self.window.gradient_steps + sum(snapshot.gradient_steps for snapshot in self.snapshots)

    def send(self, axes: Axes, level: Level, *, partial: bool) -> Flush:
        """Starts the copy of its numbers to the host; the next update begins with nothing."""
        numbers, snapshots = self.take()
        witnesses = tuple(self.witnesses)
        self.witnesses.clear()
        return Flush(axes, level, self.window.send(), numbers, snapshots, witnesses, partial)

    def take(self) -> tuple[Numbers, tuple[Snapshot, ...]]:
        """What `travels`; the next update begins without it."""
        numbers, snapshots = self.logged.take(), tuple(self.snapshots)
        self.snapshots.clear()
        return numbers, snapshots
