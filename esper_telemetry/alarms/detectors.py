"""`Detectors`: records in, alarms out. Deterministic: the same records give the same alarms, live and from a journal.

Which values of a record belong into histories.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from esper_telemetry.alarms.alarm_state import (
    STORM,
    STORM_CALM,
    STORM_SPAN,
    AlarmState,
    News,
    Questions,
    Storm,
    TaskEvents,
    alarm_values,
)
from esper_telemetry.alarms.escalation import Escalation
from esper_telemetry.alarms.incidents import Incident, Incidents, order
from esper_telemetry.alarms.rule import Baselines, Rule, View
from esper_telemetry.alarms.rules import RULES
from esper_telemetry.alarms.rules.endings import failure_findings
from esper_telemetry.alarms.text import EXPLAIN, evidence_of, matcher, text_of
from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.core.record import CRITICAL_FROM, Alarm, AlarmEvent, AlarmLevel, Axes, Record


class Watches:
    """Which values of a record belong into histories; patterns are resolved once per set of keys."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        patterns = {pattern for rule in rules for pattern in rule.watches}
        self._plain = sorted(pattern for pattern in patterns if "*" not in pattern)
        self._matchers = [matcher(pattern) for pattern in sorted(patterns) if "*" in pattern]
        self._known: dict[str, bool] = {}

    def of(self, values: Mapping[str, float]) -> dict[str, float]:
        """Those that are watched."""
        found = {key: values[key] for key in self._plain if key in values}
        known = self._known
        for key in values:
            if key not in known:
                known[key] = any(match(key) for match in self._matchers)
            if known[key]:
                found[key] = values[key]
        return found


SILENCE = 3
"""Updates after an intervention in which only mistakes for certain are told: what was changed on purpose makes waves."""


ASKED = 20
"""Update in which it is told which questions cannot be answered."""


class Verdict(NamedTuple):
    """What one record says.

    Attributes:
        alarms: raised, worse or over in this update, causes before effects.
        remaining: updates at DEBUG left, this one included.
        values: of the record: `alarm/active`, the severity of every alarm that is on, 0 where it ends, and what is left of DEBUG.
        events: what else there is to tell, (type, data).
    """

    alarms: tuple[Alarm, ...]
    remaining: int
    values: dict[str, float]
    events: tuple[tuple[str, Mapping[str, Any]], ...]


class Detectors:
    """Judges one run by its records.

    Args:
        facts: of the run, as its journal holds them.
        thresholds: bounds of the rules, and which are off; those that the facts tell by default, and else the usual ones.
    """

    def __init__(self, facts: Mapping[str, Any] | None = None, thresholds: Thresholds | None = None) -> None:
        self.facts = dict(facts or {})
        self.thresholds = thresholds = thresholds or Thresholds.of(self.facts)
        self.rules = tuple(rule for rule in RULES if rule.type not in thresholds.off and rule.applies(self.facts))
        self._baselines = Baselines()
        self._view = View(self.facts, thresholds, self._baselines)
        self._memories: dict[str, dict[Any, Any]] = {rule.type: {} for rule in self.rules}
        self._standings = {rule.type: AlarmState(rule) for rule in self.rules}
        self._incidents = Incidents()
        self._escalation = Escalation({rule.type: rule.duration for rule in self.rules if rule.duration})
        self._tasks = TaskEvents()
        self._questions = Questions(self.rules, self.facts)
        self._watches = Watches(self.rules)
        self._storm = Storm(int(thresholds.storm))
        self._storm_in: Incident | None = None
        self._quiet = 0
        self._update = 0
        self._before: Record | None = None
        self._intervened = False
        self._families: set[str] = set()
        self._explained = False

    @property
    def gradients_alone(self) -> bool:
        """Whether the records so far have gradients, and no key that could explain them."""
        return "grad" in self._families and not self._explained

    def intervention(self) -> None:
        """Something was changed on purpose: for three updates only mistakes for certain are told, and histories begin anew."""
        self._intervened = True
        self._quiet = SILENCE

    def unanswered(self) -> dict[str, str]:
        """Questions that the records so far leave open, with what is missing."""
        return self._questions.open()

    def step(self, record: Record) -> Verdict:
        """Judges the next record."""
        self._update += 1
        ended = self._begin_anew() if self._intervened else []
        view = self._look(record)
        self._questions.see(view.values)
        news = [*ended, *self._ask(record)]
        self._after(record)
        alarms = self._tell(news, record)
        remaining = self._escalate(alarms)
        return Verdict(alarms, remaining, self._values(alarms, remaining), self._events(record))

    def failure(self, seq: int, axes: Axes, data: Mapping[str, Any]) -> Verdict:
        """Judges the exception that ended the run, by the data of its `failure` event.

        Its alarms are told in a storm too. They stand until a record follows, which a resumed run has.
        """
        record = Record(seq, self._before.axes if self._before else axes, {})
        self._update = max(self._update, 1)
        news = []
        for kind, finding in failure_findings(data, axes.update + 1).items():
            standing = self._standings.get(kind)
            change = standing.step([finding], self._update) if standing else None
            if standing is not None and change is not None:
                news.append((standing, change))
        incident = self._incidents.raised([standing.rule.type for standing, _ in news], self._update) if news else None
        for standing, _ in news:
            standing.incident = incident
        alarms = tuple(self._alarm(standing, change, record) for standing, change in news)
        return Verdict(alarms, 0, {}, ())

    def _look(self, record: Record) -> View:
        """The view of this record; what is not finite is passed over."""
        view = self._view
        values = record.values
        if not all(map(math.isfinite, values.values())):
            values = {key: value for key, value in values.items() if math.isfinite(value)}
        view.look(values)
        if not self._explained:
            self._families.update(key.partition("/")[0] for key in values)
            self._explained = not self._families.isdisjoint(EXPLAIN)
        view.update = self._update
        total = self.facts.get("total_steps")
        view.progress = min(1.0, record.axes.env_step / total) if isinstance(total, int | float) and total > 0 else None
        before = self._before
        passed = max(1, record.axes.update - before.axes.update) if before else 1  # records may be missing between
        view.steps = (record.axes.gradient_step - before.axes.gradient_step) // passed if before else None
        view.transitions = max(0, record.axes.env_step - before.axes.env_step) // passed if before else None
        self._baselines.look(self._watches.of(values))
        return view

    def _ask(self, record: Record) -> list[tuple[AlarmState, News]]:
        """All rules, as far as they may speak."""
        found = []
        view = self._view
        for rule in self.rules:
            if record.partial and not rule.partial:
                continue
            if self._quiet and not rule.certain:
                continue
            view.memory = self._memories[rule.type]
            standing = self._standings[rule.type]
            findings = [finding for finding in rule.judge(view) if not math.isnan(finding.severity)]
            news = standing.step(findings, self._update) if findings else None
            if news is not None:
                found.append((standing, news))
        return found

    def _after(self, record: Record) -> None:
        """What this update leaves behind."""
        self._quiet = max(0, self._quiet - 1)
        if not record.partial:
            self._baselines.learn()
        self._before = record

    def _begin_anew(self) -> list[tuple[AlarmState, News]]:
        """Forgets the histories, and ends the alarms that were raised by them."""
        self._intervened = False
        self._baselines.forget()
        ended = []
        for rule in self.rules:
            if rule.relative:
                self._memories[rule.type] = {}
                standing = self._standings[rule.type]
                last = standing.stop()
                if last is not None:
                    ended.append((standing, News(AlarmEvent.CLEAR, last._replace(severity=0.0), 1)))
        return ended

    def _tell(self, news: list[tuple[AlarmState, News]], record: Record) -> tuple[Alarm, ...]:
        """Alarms of this update, with their incident; in a storm one instead of all."""
        news.sort(key=lambda item: order(item[0].rule.type))
        raised = [standing for standing, found in news if found.event is AlarmEvent.RAISE]
        told, storm = self._storm.step([standing.rule.type for standing in raised], self._update)
        for standing in raised:
            standing.silent = standing.rule.type not in told
        claims = [standing.rule.type for standing, found in news if found.finding.claim and standing.rule.type in told]
        incident = self._incidents.raised(told, self._update, claims) if told else None
        for standing in raised:
            standing.incident = incident
        alarms = [self._alarm(standing, found, record) for standing, found in news if not standing.silent]
        if storm is not None:
            self._storm_in = incident if storm is AlarmEvent.RAISE else self._storm_in
            alarms.append(self._storm_alarm(storm, record, self._storm_in))
        return tuple(alarms)

    def _alarm(self, standing: AlarmState, news: News, record: Record) -> Alarm:
        event, finding, streak = news
        over = event is AlarmEvent.CLEAR
        incident = standing.incident
        alarm = Alarm(
            seq=record.seq,
            axes=record.axes,
            type=standing.rule.type,
            event=event,
            severity=finding.severity,
            level=AlarmLevel.of(standing.told if over else finding.severity),
            key=finding.key,
            value=finding.value,
            threshold=finding.threshold,
            adaptive=finding.adaptive,
            z=finding.z,
            since=standing.since or self._update,
            streak=streak,
            incident=incident.number if incident else 0,
            cause=incident.cause if incident else "",
            text=text_of(standing, finding, event, self._update, explained=self._explained),
            evidence={} if over else evidence_of(standing, finding, self._view),
        )
        if over:
            standing.since, standing.told = None, 0.0
        return alarm

    def _storm_alarm(self, event: AlarmEvent, record: Record, incident: Incident | None) -> Alarm:
        counts = dict(self._storm.counts().most_common(8))
        words = ", ".join(f"{kind} {count}x" for kind, count in counts.items())
        raised = event is AlarmEvent.RAISE
        what = f"more than {self._storm.limit} alarms in {STORM_SPAN} updates: {words}. Further ones are not told until it is over."
        return Alarm(
            seq=record.seq,
            axes=record.axes,
            type=STORM,
            event=event,
            severity=1.0 if raised else 0.0,
            level=AlarmLevel.CRITICAL,
            key="alarm/active",
            value=float(sum(counts.values())),
            threshold=float(self._storm.limit),
            since=self._storm.since,
            streak=1 if raised else STORM_CALM,
            incident=incident.number if incident else 0,
            cause=incident.cause if incident else "",
            text=f"Since update {self._storm.since}, {what}"
            if raised
            else f"Over since update {self._update}: alarms are told again.",
            evidence={"counts": counts} if raised else {},
        )

    def _escalate(self, alarms: Iterable[Alarm]) -> int:
        """Updates at DEBUG left, by the alarms that have become critical in this one."""
        raised = [
            alarm.type for alarm in alarms if alarm.event is not AlarmEvent.CLEAR and alarm.severity >= CRITICAL_FROM
        ]
        self._escalation, remaining = self._escalation.step(raised)
        return remaining

    def _values(self, alarms: Iterable[Alarm], remaining: int) -> dict[str, float]:
        active = {kind: standing for kind, standing in self._standings.items() if standing.instances}
        severities = {kind: standing.severity for kind, standing in active.items()}
        if self._storm.active:
            severities[STORM] = 1.0
        count = len(severities)
        over = {alarm.type: 0.0 for alarm in alarms if alarm.event is AlarmEvent.CLEAR}
        return {
            **alarm_values({**over, **severities}, count),
            "telemetry/escalation_remaining": float(remaining),
        }

    def _events(self, record: Record) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        events: list[tuple[str, Mapping[str, Any]]] = []
        if not record.partial:
            events += self._tasks.step(self._view.values, self._update, self._view.progress)
        if self._update == ASKED and (missing := self._questions.open(sampled=False)):
            events.append(("detectors/unanswered", {"questions": missing}))
        return tuple(events)
