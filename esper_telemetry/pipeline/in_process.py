"""From one flushed update to the journal: measure, derive, detect, append.

`InProcessPipeline` does this in the calling process. `WorkerPipeline` (`worker.py`) hands the same calls to an `InProcessPipeline` in
another process, and takes them back if that process dies.

Detectors run where the record is made and see exactly what the journal holds, so that reading a journal raises the same alarms again. A
resumed run, or a training process that replaces its worker, feeds the journal to the detectors first. A record, its alarms and its events
are one append, so that readers never see a record without its alarms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from esper_telemetry.alarms.detectors import Detectors, Verdict
from esper_telemetry.core.containment import Containment
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.group import NO_VALUES, Values
from esper_telemetry.core.process_memory import MemorySampler
from esper_telemetry.core.record import Alarm, AlarmEvent, Axes, Level, MetricInfo, Record, RunInfo, RunStatus, check_key
from esper_telemetry.core.redaction import remember
from esper_telemetry.history.derive import RunHistory
from esper_telemetry.journal.file import Journal, JournalReader, journal_path
from esper_telemetry.journal.lines import (
    JournalEvent,
    Line,
    decode,
    encode_alarm,
    encode_end,
    encode_event,
    encode_metrics,
    encode_record,
    encode_run,
    plain,
)
from esper_telemetry.journal.memory_journal import MemoryJournal
from esper_telemetry.journal.read import JournalContents, entries, read_contents
from esper_telemetry.pipeline.snapshot import SNAPSHOT_RECORDS, RunState, SnapshotFile
from esper_telemetry.pipeline.window import FlushedUpdate, Window
from esper_telemetry.updates.evidence import (
    AlarmedUpdate,
    EvidenceChoice,
    captures,
    evidence_of,
    first_nonfinite,
    update_events,
    weak_pairs,
)
from esper_telemetry.updates.extensions import Capture
from esper_telemetry.updates.groups import measure, without_many_layers
from esper_telemetry.updates.joining import ENVIRONMENTS, EnvironmentTable
from esper_telemetry.updates.target_equations import Held

MAX_READ_BACK_BYTES: Final = 1 << 20
"""End of the journal that a resumed run without a snapshot evaluates again: about 200 records, which take a second."""
EARLIER_SAMPLES: Final = 200
"""Records before that, spread over the whole run, which show the course of its return."""
DETECTOR_PREFIXES = ("alarm/", "telemetry/escalation_remaining")
"""Prefixes of the keys that the detector adds to a record."""
DETECTOR = "detector"
"""Name of the detector in warnings."""
FAILURE = "failure"
"""The type of the event with the exception that ended the run."""
INTERVENTION = "intervention"
"""The type of the event for a deliberate change of the run."""


class Detector(Protocol):
    """Judges the records of a run in order; `Detectors` can also continue from a snapshot, and judge a whole run at its end."""

    def step(self, record: Record) -> Verdict:
        """Judge the next record."""

    def intervention(self) -> None:
        """Note that the run was changed on purpose."""

    def failure(self, seq: int, axes: Axes, data: Mapping[str, Any]) -> Verdict:
        """Judge the exception that ended the run, from the data of its `failure` event; records follow if the run is resumed."""

    def rule(self, kind: str) -> EvidenceChoice | None:
        """Return the declaration of a type of alarm, which chooses its evidence."""


DetectorFactory = Callable[[Facts], Detector]
"""Makes the detector of a run from its facts. It must be picklable, because the process that writes the journal calls it."""


def made_detector(factory: DetectorFactory, facts: Facts) -> Detector:
    """Return the detector of a run; raise TypeError if the factory makes something else."""
    detector = factory(facts)
    missing = [name for name in ("step", "intervention", "failure", "rule") if not callable(getattr(detector, name, None))]
    if missing:
        raise TypeError(f"detect={factory!r} must return a detector, got {detector!r}, which lacks {missing[0]}")
    return detector


def judgement(detector: Detector, record: Record) -> Verdict:
    """Return the detector's verdict on a record, which it cannot change."""
    return detector.step(replace(record, values=MappingProxyType(record.values)))


class AlarmReport(NamedTuple):
    """News of one record for the training thread: its alarms, and the number of updates that should be measured at DEBUG."""

    alarms: tuple[Alarm, ...]
    remaining: int


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """Arguments of a pipeline, which can be pickled.

    Attributes:
        level: the level without escalation.
        detector_factory: makes the detector that judges the records; None if no alarms are raised.
        health: telemetry's numbers about itself, as `metrics.performance.telemetry_health`.
    """

    level: Level
    detector_factory: DetectorFactory | None
    health: Callable[..., Mapping[str, float]]


class InProcessPipeline:
    """Measures, derives, detects and appends in the calling process.

    Args:
        journal: journal to append to.
        settings: as for `WorkerPipeline`.
        trainer: process ID of the trainer, whose memory is sampled; this process by default.
        banned: names of contained functions that are not called, because they may have ended another process. If there are any, user alarms
            are off.
    """

    def __init__(
        self, journal: Journal | MemoryJournal, settings: PipelineSettings, trainer: int | None = None, *, banned: Collection[str] = ()
    ) -> None:
        self._journal = journal
        self._settings = settings
        self._memory = MemorySampler(trainer)
        self._environments = EnvironmentTable()
        self._reports: list[AlarmReport] = []
        self._remaining = 0
        self._axes: Axes | None = None  # of the last record; None for earlier parts of the run
        self._causes: dict[str, str] = {}
        self._snapshots: SnapshotFile | None = None
        self._contents: JournalContents | None = None
        self._unsaved_records = 0
        self._containment = Containment(banned)
        self._banned: Collection[str] = ()
        self._begin({})
        self._banned = banned  # set now, because it says which alarms are off

    def start(self, info: RunInfo) -> None:
        """Append the head of the journal: the run, followed by the meaning of its keys.

        If a run is killed at its start, readers then find a line of a few hundred bytes instead of a torn line of 200 kB.
        """
        self._begin(info.facts, info.run_dir)
        self._journal.write(encode_run(replace(info, metrics={})))
        self._journal.write(encode_metrics(info.metrics))

    def resume(self, info: RunInfo, earlier: JournalContents | None = None, *, until: Axes | None = None) -> None:
        """Continue a run whose journal holds this head and earlier records; history and detector read them.

        Args:
            earlier: what the caller knows of the journal's first lines: reading 100,000 of them takes seconds.
            until: the last position that is read; by default the journal's end.
        """
        self._begin(info.facts, info.run_dir)
        self._environments = EnvironmentTable(resumed=True)
        if info.run_dir:
            with suppress(OSError):  # if the journal cannot be read, only the history is lost
                self._read_back(info.run_dir, earlier, until)

    def learn(self, secrets: Sequence[str]) -> None:
        """Mask these secrets from now on, as the training process does."""
        remember(secrets)

    def describe(self, metrics: Mapping[str, MetricInfo], seq: int) -> None:
        """Append descriptions of keys that the head did not have."""
        self._journal.write(encode_metrics(metrics, seq=seq))

    def record(self, update: FlushedUpdate) -> None:
        """Append the record of an update, with its alarms, events and evidence."""
        measured = self._measure(update).united(update.measured)
        values = {**measured.values, **update.logged}
        derive = partial(self._series.derive, measured.unreported | values, update.level)
        self._containment.attempt(derive, values.update)
        if update.level < Level.DEBUG:
            values = without_many_layers(values)
        cost = update.cost
        values.update(
            self._settings.health(
                seconds=cost.seconds,
                elapsed=cost.elapsed,
                undefined=measured.undefined,
                copies=measured.copies + update.copies,
                level=update.level,
                stats=update.backlog,
                metric_errors=cost.metric_errors + self._containment.take(),
                unmeasured=update.unmeasured or any(one.is_counted for one in update.updates),
                minibatch_stride=update.minibatch_stride,
                cpu_seconds=cost.cpu_seconds,
                memory=self._memory.sample(update.devices),
            )
        )
        record = Record(update.seq, update.axes, values, measured.histograms, update.partial)
        self._axes = update.axes
        self._journal.write(*self._judged(record, update))
        groups = self._series.gradients.rebaselined
        if groups:  # values that were out of range have become normal: the thresholds of gradients restart
            self._append_event("rebaseline", {"keys": [f"grad/{group}/norm_preclip" for group in groups]}, update)
        self._capture(update)
        self._unsaved_records += 1
        if self._unsaved_records >= SNAPSHOT_RECORDS:
            self._save_snapshot()

    def event(self, event: JournalEvent) -> None:
        """Append an event other than a record, and the alarms that it raises."""
        lines: list[Line] = [encode_event(event)]
        verdict = self._heed(event)
        if verdict is not None:
            judged = partial(self._verdict_lines, verdict, verdict.alarms, self._remaining, event.seq, event.axes)
            self._containment.attempt(judged, lines.extend, name=DETECTOR)
        self._journal.write(*lines)

    @property
    def is_late(self) -> bool:
        """False, because the training thread waits for its records."""
        return False

    @property
    def missing_records(self) -> int:
        """Records that were made and are not in the journal by now."""
        return self._journal.missing_records

    def take_reports(self) -> Sequence[AlarmReport]:
        """Return the detector's reports since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def sync(self, timeout: float) -> None:
        """Make all lines so far durable."""
        self._journal.sync()

    def end(self, status: RunStatus, seq: int, timeout: float) -> None:
        """Append the outcome of the run and the last line."""
        self._save_snapshot()  # before the end changes the state, because a resumed run has not ended
        lines: list[Line] = []
        if isinstance(self._detector, Detectors) and self._axes is not None:
            add = partial(_add_events, lines, seq=seq, axes=self._axes)
            self._containment.attempt(partial(self._detector.end, status), add, name=DETECTOR)
        self._journal.write(*lines, encode_end(status, seq=seq))

    def _begin(self, facts: Mapping[str, Any], run_dir: Path | None = None) -> None:
        self._facts = facts = Facts.of(facts)
        self._held: Held = {True: set(), False: set()}
        self._series = RunHistory(facts)
        self._detector: Detector | None = None
        if self._settings.detector_factory is not None:
            self._detector = self._containment.attempt(partial(made_detector, self._settings.detector_factory, facts), name=DETECTOR)
        if isinstance(self._detector, Detectors):
            for name in self._banned:
                self._detector.ban(name)
            if run_dir is not None:
                self._snapshots = SnapshotFile(run_dir, self._new_state)

    def _new_state(self) -> RunState:
        factory = self._settings.detector_factory
        detector = None if factory is None else factory(self._facts)
        assert isinstance(detector, Detectors)
        return RunState({"series": RunHistory(self._facts), **detector.state()}, detector.references)

    def _save_snapshot(self) -> None:
        """Save histories and alarms for the next part of the run, once the journal has all records that they depend on."""
        detector = self._detector
        if self._snapshots is None or self._journal.run_dir is None or not isinstance(detector, Detectors):
            return
        self._unsaved_records = 0
        if self._journal.settled:
            with suppress(OSError, ValueError):  # a journal that cannot be read
                self._contents = read_contents(self._journal.run_dir, known=self._contents, values=False)
                state = {"series": self._series, "remaining": self._remaining, **detector.state()}
                self._snapshots.write(self._contents, RunState(state, detector.references))

    def _read_back(self, run_dir: Path, earlier: JournalContents | None, until: Axes | None) -> None:
        """Continue from the snapshot and the records after it; without one, from the last records."""
        saved, detector, self._contents = None, self._detector, earlier
        if self._snapshots is not None and isinstance(detector, Detectors) and until is None:
            saved = self._snapshots.read(detector.references)
        if saved is not None and isinstance(detector, Detectors):
            self._contents, state = saved
            self._series, self._remaining = state["series"], state["remaining"]
            detector.restore(state)
            offset = self._contents.offset
        else:
            reader = JournalReader(journal_path(run_dir))
            for record in reader.skip_to_tail(MAX_READ_BACK_BYTES, EARLIER_SAMPLES):
                if isinstance(detector, Detectors):
                    self._containment.attempt(partial(detector.note, record), name=DETECTOR)
            offset = reader.offset
            reader.close()
        for entry in entries(run_dir, offset):
            if isinstance(entry, Record):
                if until is not None and not entry.axes.within(until):
                    break
                self._containment.attempt(partial(self._series.derive, entry.values, self._settings.level))
                own = {key: value for key, value in entry.values.items() if not key.startswith(DETECTOR_PREFIXES)}
                if detector is not None:
                    judge = partial(judgement, detector, replace(entry, values=own))  # as the detector saw it when it was new
                    verdict = self._containment.attempt(judge, name=DETECTOR)
                    self._remaining = self._remaining if verdict is None else verdict.remaining
            elif isinstance(entry, JournalEvent):
                self._heed(entry)
        self._reports = [AlarmReport((), self._remaining)]

    def _measure(self, update: FlushedUpdate) -> Values:
        """Return the values of the updates that are still to be measured; a measurement that raises is left out."""
        window = Window()
        for snapshot in update.updates:
            for measurements, epochs in self._containment.steps(measure(snapshot, self._facts, update.level, self._held)):
                self._containment.measure(measurements, partial(window.add, epoch=epochs, step=None))
        return (self._containment.attempt(lambda: window.send().finish(update.level)) if window else None) or NO_VALUES

    def _judged(self, record: Record, update: FlushedUpdate) -> Sequence[Line]:
        """Return the line of the record, with the detector's values, followed by the lines of its alarms and events."""
        lines = None
        if self._detector is not None:
            lines = self._containment.attempt(partial(self._judged_lines, self._detector, record, update), name=DETECTOR)
        return lines or [encode_record(record)]

    def _judged_lines(self, detector: Detector, record: Record, update: FlushedUpdate) -> Sequence[Line]:
        verdict = judgement(detector, record)
        alarms = verdict.alarms
        if alarms:
            sources = update.updates + update.evidence_updates
            alarmed = AlarmedUpdate(record, sources, self._facts, self._pairs(), self._series.gradients.condition.cause)
            alarms = tuple(self._with_evidence(alarm, alarmed) for alarm in alarms)
        values = {check_key(key): float(value) for key, value in verdict.values.items() if math.isfinite(value)}
        whole = Record(record.seq, record.axes, {**record.values, **values}, record.histograms, record.partial)
        lines = self._verdict_lines(verdict, alarms, int(verdict.remaining), record.seq, record.axes)
        return [encode_record(whole), *lines]

    def _verdict_lines(self, verdict: Verdict, alarms: Iterable[Alarm], remaining: int, seq: int, axes: Axes | None) -> list[Line]:
        """Return the lines of a verdict's alarms and events, and keep the alarms in the journal for the training thread."""
        lines: list[Line] = [encode_alarm(alarm) for alarm in alarms]
        self._report(tuple(alarm for line in lines if isinstance(alarm := decode(line), Alarm)), remaining)
        _add_events(lines, verdict.events, seq, axes)
        return lines

    def _with_evidence(self, alarm: Alarm, alarmed: AlarmedUpdate) -> Alarm:
        """Return an alarm with the evidence of the update that raised it; without evidence if that fails, or the alarm is not new."""
        if alarm.event is not AlarmEvent.RAISE:
            return alarm
        choice = self._detector.rule(alarm.type) if self._detector else None
        evidence = self._containment.attempt(
            lambda: plain({**alarm.evidence, **evidence_of(alarm, alarmed, choice)}), name=f"the evidence of {alarm.type}"
        )
        evidence = alarm.evidence if evidence is None else evidence
        return replace(alarm, evidence=evidence, text=alarm.text + first_nonfinite(evidence))

    def _report(self, alarms: tuple[Alarm, ...], remaining: int) -> None:
        """Keep news for the training thread, which need not hear about records that change nothing."""
        if alarms or remaining != self._remaining:
            self._reports.append(AlarmReport(alarms, remaining))
            self._remaining = remaining

    def _heed(self, event: JournalEvent) -> Verdict | None:
        """Pass an event to the detector; return its judgement of a failure."""
        if self._detector is not None and event.type == INTERVENTION:
            self._containment.attempt(self._detector.intervention, name=DETECTOR)
        elif self._detector is not None and event.type == FAILURE and event.axes is not None:
            return self._containment.attempt(partial(self._detector.failure, event.seq, event.axes, event.data), name=DETECTOR)
        return None

    def _capture(self, update: FlushedUpdate) -> None:
        """Append the events of plugins, and the evidence of an update at DEBUG; at NORMAL only why modules learn badly, when that changes.

        Without a run directory they would not have a reader.
        """
        if self._journal.run_dir is None:
            return
        pairs = self._pairs()
        causes = {name: why["cause"] for name, why in weak_pairs(pairs).items()}
        if update.level is Level.NORMAL and causes and causes != self._causes:
            self._append_evidence(Capture("pairs", weak_pairs(pairs)), update)
        self._causes = causes
        snapshots = update.updates + update.evidence_updates
        for snapshot in snapshots if update.level >= Level.NORMAL else ():
            for event in self._containment.steps(update_events(snapshot, self._facts)):
                self._containment.attempt(partial(self._append_capture, event, update))
            self._containment.attempt(
                partial(self._environments.add, snapshot), lambda table: self._append_event(ENVIRONMENTS, table, update) if table else None
            )
        if update.level >= Level.DEBUG:
            for snapshot in snapshots:
                for capture in self._containment.steps(captures(snapshot, self._facts, pairs)):
                    self._containment.attempt(partial(self._append_evidence, capture, update))

    def _append_evidence(self, capture: Capture, update: FlushedUpdate) -> None:
        """Append evidence; it shows rank 0's rows if there are several ranks."""
        rank = {"rank": 0} if self._facts.ranks > 1 else {}
        self._append_event(f"evidence/{capture.type}", {**capture.data, **rank}, update)

    def _append_capture(self, capture: Capture, update: FlushedUpdate) -> None:
        self._append_event(capture.type, capture.data, update)

    def _append_event(self, kind: str, data: Mapping[str, Any], update: FlushedUpdate) -> None:
        self._journal.write(encode_event(JournalEvent(kind, data, seq=update.seq, axes=update.axes)))

    def _pairs(self) -> dict[str, dict[str, Any]]:
        """Return why modules learn as they do next to their hosts, by name."""
        return {name: asdict(diagnosis) for name, diagnosis in self._series.pairs.diagnoses.items()}


def _add_events(lines: list[Line], events: Iterable[tuple[str, Mapping[str, Any]]], seq: int, axes: Axes | None) -> None:
    lines += [encode_event(JournalEvent(kind, data, seq, axes)) for kind, data in events]
