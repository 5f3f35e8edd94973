"""Verdict on a whole run: outcome, incidents, course of the task, and alarms that could not be checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from esper_telemetry.alarms.detectors import Detectors, LastingFinding
from esper_telemetry.alarms.rules.integrity_alarms import NONFINITE_KEY
from esper_telemetry.alarms.rules.task_alarms import Failure
from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.alarms.verdict.bounds import LATEST_RECORDS, Tone, critical_values, tone_of
from esper_telemetry.alarms.verdict.remarks import REMARK
from esper_telemetry.alarms.verdict.run_outcome import GOOD, OUTCOME, OUTCOME_UPDATES, Outcome, OutcomeKind
from esper_telemetry.alarms.verdict.unusual import RunValues, Unusual, keys_without_bounds, notable
from esper_telemetry.core.metric import catalogue
from esper_telemetry.core.record import RUN_FAILED, Alarm, AlarmEvent, AlarmLevel, MetricInfo, Record, RunStatus

ACTIVE: Final = "alarm/active"  # key in every record that was judged when it was written
NOT_EXPLAINING: Final = ("telemetry/", "task/")  # alarms that do not explain an outcome


@dataclass(slots=True)
class IncidentReport:
    """One incident of a finished or running run.

    Attributes:
        number: number of the incident, from 1.
        cause: type of the alarm that explains it.
        alarms: alarms of the incident, in order.
    """

    number: int
    cause: str = ""
    alarms: list[Alarm] = field(default_factory=list)

    @property
    def main(self) -> Alarm:
        """The alarm of the cause when it was raised; another alarm if the journal has lost that line."""
        raised = [alarm for alarm in self.alarms if alarm.event is AlarmEvent.RAISE] or self.alarms
        return next((alarm for alarm in raised if alarm.type == self.cause), raised[0])

    @property
    def since(self) -> int:
        """Update in which the cause began."""
        return self.main.since

    @staticmethod
    def add(reports: dict[int, IncidentReport], alarm: Alarm) -> None:
        """Add an alarm to the report of its incident, by number."""
        report = reports.setdefault(alarm.incident, IncidentReport(alarm.incident))
        report.alarms.append(alarm)
        report.cause = alarm.cause or report.cause or alarm.type

    def ends(self) -> dict[str, int | None]:
        """Return the raised types with the update in which each ended; None for active ones."""
        ends: dict[str, int | None] = {}
        for alarm in self.alarms:
            ends[alarm.type] = alarm.axes.update if alarm.event is AlarmEvent.CLEAR else None
        return ends


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Verdict on a run.

    Attributes:
        updates: number of judged records.
        incidents: incidents in order.
        events: course of the task, as (type, data).
        unanswered: reason why an alarm cannot be raised, by type.
        remarks: unusual properties that need not be wrong; remarks without `quiet` are also among the events.
        gradients_alone: records have only gradients and optimizer steps, so causes are unknown.
        outcome: outcome of the run.
        checks: number of alarms that could be raised.
        remedies: the call, fact or option that supplies the missing inputs of an unanswered alarm, by type.
        effects: types of alarm that show how a run goes wrong but not why.
        certain: types of alarm that always show a mistake, and not a consequence of another one.
        unusual: most unusual values, worst first, if the run failed, is flat or declines, and no alarm that lasted to the end explains it.
        killed: whether the process of the run was killed.
        critical: values beyond the critical bounds of their metrics over the latest records, by key.
    """

    updates: int
    incidents: tuple[IncidentReport, ...]
    events: tuple[tuple[str, Mapping[str, Any]], ...]
    unanswered: Mapping[str, str]
    gradients_alone: bool = False
    remarks: tuple[Mapping[str, Any], ...] = ()
    outcome: Outcome = field(default_factory=Outcome)
    checks: int = 0
    remedies: Mapping[str, str] = field(default_factory=dict)
    effects: frozenset[str] = frozenset()
    certain: frozenset[str] = frozenset()
    unusual: tuple[Unusual, ...] = ()
    killed: bool = False
    critical: Mapping[str, float] = field(default_factory=dict)

    @property
    def tone(self) -> Tone:
        """State of the run in one word."""
        latest = {alarm.type: alarm for incident in self.incidents for alarm in incident.alarms}
        lasting = [alarm.level for alarm in latest.values() if alarm.event is not AlarmEvent.CLEAR]
        return tone_of(self.outcome.kind, lasting, self.critical)

    @property
    def unexplained(self) -> bool:
        """True if the run failed, is flat or declines and no alarm explains it; False if it was killed."""
        return self.outcome.needs_explanation and not self.killed and not self.explaining

    @property
    def shows_remarks(self) -> bool:
        """True if views should show all remarks: in a bad run that no lasting alarm explains, or that a remark explains certainly."""
        is_bad = self.updates > 0 and self.outcome.needs_explanation and not self.killed
        ends = {kind: end for incident in self.incidents for kind, end in incident.ends().items()}
        has_lasting_explanation = any(ends[kind] is None for kind in self.explaining)
        return is_bad and (not has_lasting_explanation or any(data.get("certain") for data in self.remarks))

    @property
    def shown_remarks(self) -> list[Mapping[str, Any]]:
        """The remarks in the order in which they may explain the outcome."""
        return sorted(self.remarks, key=lambda data: (not data.get("certain"), bool(data.get("unlikely"))))

    @property
    def explaining(self) -> set[str]:
        """The raised types of alarm that may explain the outcome; a warning is about a state that may be harmless."""
        alarms = (alarm for incident in self.incidents for alarm in incident.alarms)
        kinds = {alarm.type for alarm in alarms if alarm.level is AlarmLevel.CRITICAL}
        return {kind for kind in kinds if not kind.startswith(NOT_EXPLAINING) and kind not in self.effects}

    @property
    def summary(self) -> str:
        """Sentence with the outcome, the latest fall of the return if any, and the number of checks."""
        text = self.outcome.text
        kind, data = self.events[-1] if self.events else ("", {})
        if self.outcome.kind in GOOD and kind == "task/degradation":
            text += f", although at update {data['update']} {data['text']}"
        raised = {alarm.type for incident in self.incidents for alarm in incident.alarms} - {RUN_FAILED}
        passed = max(0, self.checks - len(raised))
        parts = [f"{passed} check{'' if passed == 1 else 's'} passed" if self.checks else ""]
        parts += [f"{len(raised)} raised an alarm" if raised else ""]
        parts += [f"{len(self.unanswered)} could not be made" if self.unanswered else ""]
        return "; ".join(filter(None, (text, ", ".join(filter(None, parts))))) + "."


def diagnose(
    facts: Mapping[str, Any],
    records: Iterable[Record],
    *,
    thresholds: Thresholds | None = None,
    interventions: Iterable[int] = (),
    failures: Iterable[Failure] = (),
    alarms: Iterable[Alarm] = (),
    status: RunStatus | None = None,
) -> Diagnosis:
    """Judge all records of a run, in the same way as during training.

    Args:
        facts: facts of the run.
        records: records in order.
        thresholds: bounds; by default the run's.
        interventions: `seq` of the records after which something was changed intentionally.
        failures: exceptions that ended the run; a resumed run may have several.
        alarms: alarms of the run's journal; alarms whose rules are not installed here are added unchanged.
        status: how the run ended; None if it is still running.
    """
    judge = RunJudge(facts, thresholds)
    judge.expect(alarms)
    changes, exceptions = sorted(interventions), sorted(failures, key=lambda failure: failure.seq)
    for record in records:
        while exceptions and exceptions[0].seq < record.seq:
            judge.failure(exceptions.pop(0))
        while changes and changes[0] < record.seq:
            judge.intervention()
            changes.pop(0)
        judge.record(record)
    for failure in exceptions:
        judge.failure(failure)
    return judge.diagnosis(status)


class RunJudge:
    """Judges a run entry by entry, in the order of its journal; `diagnosis` returns the verdict so far.

    Args:
        facts: facts of the run.
        thresholds: bounds; by default the run's.
        findings: findings on the whole run, by type of alarm.
        as_recorded: use the journal's alarms and events if its records were judged when they were written; judging them again gives the
            same result but takes 2 ms per record.

    Attributes:
        is_outcome_recorded: whether the events also include the final outcome, so that the records need not be judged for it.
    """

    def __init__(
        self,
        facts: Mapping[str, Any],
        thresholds: Thresholds | None = None,
        *,
        findings: Mapping[str, Sequence[LastingFinding]] = MappingProxyType({}),
        as_recorded: bool = False,
    ) -> None:
        self._as_recorded = as_recorded
        self._detectors = Detectors(facts, thresholds, findings=findings)
        self._recorded: deque[Alarm] = deque()
        self._incidents: dict[int, IncidentReport] = {}
        self._events: list[tuple[str, Mapping[str, Any]]] = []
        self._remarks: list[Mapping[str, Any]] = []
        self._outcome: Outcome | None = None
        self.is_outcome_recorded = False
        self._updates, self._values = 0, RunValues()
        self._latest: deque[Mapping[str, float]] = deque(maxlen=LATEST_RECORDS)

    def expect(self, alarms: Iterable[Alarm]) -> None:
        """Add alarms of the journal; alarms whose rules are not installed here join the verdict on their record unchanged."""
        self._recorded.extend(alarm for alarm in alarms if self._is_taken(alarm))

    def _is_taken(self, alarm: Alarm) -> bool:
        return self._as_recorded or self._detectors.rule(alarm.type) is None

    def event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Add an event of the journal."""
        if self._as_recorded:
            self._add_event(kind, data)

    def intervention(self) -> None:
        """Announce an intentional change after the last record."""
        self._detectors.intervention()

    def failure(self, failure: Failure) -> None:
        """Judge an exception that ended the run after the last record."""
        alarms = self._detectors.failure(*failure).alarms
        self._add(() if self._as_recorded else alarms)

    def record(self, record: Record) -> None:
        """Judge the next record."""
        self._updates += 1
        self._values.add(record)
        self._latest.append(record.values)
        if self._as_recorded and self._updates == 1 and ACTIVE not in record.values:
            self._as_recorded = False
            self._recorded = deque(filter(self._is_taken, self._recorded))
        if self._as_recorded:
            self._detectors.note(record, for_outcome=not self.is_outcome_recorded)
            return
        own = []
        while self._recorded and self._recorded[0].seq <= record.seq:
            own.append(self._recorded.popleft())
        verdict = self._detectors.step(record, own)
        for event in verdict.events:
            self._add_event(*event)
        self._add(verdict.alarms)

    def _add_event(self, kind: str, data: Mapping[str, Any]) -> None:
        if kind == REMARK:
            self._remarks.append(data)
        if kind == OUTCOME:
            with suppress(ValueError):  # a kind of a later version
                self._outcome = Outcome.of(data)
        if is_course(kind, data):
            self._events.append((kind, data))

    def _add(self, alarms: Iterable[Alarm]) -> None:
        for alarm in alarms:
            IncidentReport.add(self._incidents, alarm)

    def has_recorded(self, updates: int) -> bool:
        """Return whether the journal of a run of so many updates holds the verdict, so that a sample of its records is enough."""
        return self._as_recorded and self._outcome is not None and self._outcome.updates > updates - OUTCOME_UPDATES

    def diagnosis(self, status: RunStatus | None = None, updates: int | None = None) -> Diagnosis:
        """Return the verdict on a run with this status; None if it is still running.

        If the records are a sample, `updates` is the number of updates of the run, and the outcome is the journal's.
        """
        detectors = self._detectors
        outcome, recorded = detectors.outcome(status), self._outcome
        if recorded is not None and self._as_recorded and (self.is_outcome_recorded or updates is not None):
            failed = outcome.kind is OutcomeKind.FAILED
            outcome = replace(recorded, kind=outcome.kind, text=outcome.text) if failed else recorded
        if self._as_recorded:
            self._add(self._recorded)
            self._recorded.clear()
        aside = keys_without_bounds(detectors.facts, self._latest)
        diagnosis = Diagnosis(
            self._updates if updates is None else updates,
            tuple(self._incidents.values()),
            tuple(self._events),
            detectors.coverage.unanswered(),
            self._updates > 0 and detectors.gradients_alone,
            outcome=outcome,
            checks=detectors.coverage.judged(),
            remedies=detectors.coverage.remedies(),
            remarks=tuple(self._remarks),
            effects=frozenset(rule.type for rule in detectors.rules if rule.effect),
            certain=frozenset(rule.type for rule in detectors.rules if rule.claim or rule.hard) - {NONFINITE_KEY},
            killed=status is RunStatus.KILLED,
            critical=notable(critical_values(self._latest, described_keys(), aside), detectors.facts, outcome.kind),
        )
        unusual = self._values.unusual(detectors.facts, aside=aside) if diagnosis.shows_remarks else ()
        return replace(diagnosis, unusual=unusual)


@lru_cache(maxsize=1)
def described_keys() -> Mapping[str, MetricInfo]:
    """Return the descriptions of all declared metrics by key or template."""
    return {metric.key: metric.info() for metric in catalogue()}


def is_course(kind: str, data: Mapping[str, Any]) -> bool:
    """Return whether an event is part of the course of the task, or a remark that is always shown."""
    return kind.startswith("task/") or (kind == REMARK and not data.get("quiet"))
