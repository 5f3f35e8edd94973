"""`Detectors` turns records into alarms; the same records give the same alarms, live and from a journal.

Judges read only values that are in the journal. So `diagnose` repeats the live verdict, and a resumed run rebuilds its histories from the
journal. The baselines of alarms exclude outliers, so they differ from the averages in records.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from esper_telemetry.alarms.alarm_state import (
    LIMIT_CALM_UPDATES,
    LIMIT_WINDOW_UPDATES,
    AlarmChange,
    AlarmRateLimit,
    AlarmState,
    Escalation,
    EscalationRemaining,
    RuleCoverage,
    alarm_values,
)
from esper_telemetry.alarms.baselines import Baselines, matcher
from esper_telemetry.alarms.incidents import CausalOrder, Incident, Incidents
from esper_telemetry.alarms.rule import CAUSE_LAST_RANK, LARGE_STEP_UPDATES, AlarmRule, Finding, Judge, View, checked
from esper_telemetry.alarms.rules.equation_alarms import EQUATION, EquationJudge, sensible_advice
from esper_telemetry.alarms.rules.task_alarms import FIRST_ALARM, Event, TaskEvents, bad_ending, failure_findings, failure_sentence
from esper_telemetry.alarms.rules.telemetry_alarms import ALARM_LIMIT, TOO_MANY
from esper_telemetry.alarms.rules.trust_region_alarms import KL_SUDDEN, action_dimensions
from esper_telemetry.alarms.thresholds import Thresholds, alarm_rules, is_foreign, with_alarms
from esper_telemetry.alarms.verdict.published_settings import in_trainers_names, outside_sentences
from esper_telemetry.alarms.verdict.remarks import Remarks
from esper_telemetry.alarms.verdict.run_outcome import OUTCOME, Outcome, OutcomeJudge, OutcomeKind
from esper_telemetry.core.containment import Containment, call_note
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.messages import capitalized, number
from esper_telemetry.core.record import CRITICAL_FROM, RUN_FAILED, Alarm, AlarmEvent, AlarmLevel, Axes, Record, RunStatus, judgeable

QUIET_UPDATES: Final = 3
"""Updates after an intervention in which only `certain` alarms are raised: the change itself makes numbers jump."""
COVERAGE_UPDATE: Final = 20  # update with the event that lists the alarms that cannot be raised
MAX_EVIDENCE_VALUES: Final = 24  # values of a record that are attached to an alarm
MAX_TEXT_CHARACTERS: Final = 4000  # largest length of an alarm's text
MAX_EVIDENCE_INSTANCES: Final = 8  # heads, groups or layers that are named

EXPLAINING_FAMILIES: Final = ("policy", "value", "loss", "adv", "ret", "integrity")
"""Families of keys that can explain unusual gradients or optimizer steps."""

STEP_KEYS: Final = ("policy/kl", "policy/ratio/", "policy/clip_frac", "policy/ess_frac", "opt/update_to_weight", "grad/")
"""Keys of rules that themselves judge the size of steps, beginnings included."""
SYMPTOMS: Final = ("grad/", "opt/")
GRADIENTS_ALONE: Final = (
    "Only gradients were recorded, so the cause is unknown. To find it, also record ratios, losses, values and advantages, with the "
    "adapter of your trainer or as in docs/own_loop.md"
)

_logger = logging.getLogger("esper_telemetry")


OF_THE_RUN: Final = ("facts", "thresholds", "rules", "_containment", "_declared", "_order", "_user_types", "_findings")
"""Attributes of a detector that do not depend on the records."""

DECLARATIONS: Final = Containment()
"""Warnings about rules whose `applies` raises; a run creates several detectors, and a process warns once."""


class Verdict(NamedTuple):
    """The judgement of one record.

    Attributes:
        alarms: alarms that were raised, got worse or ended in this update, causes before effects.
        remaining: remaining updates at DEBUG, including this one.
        values: values to add to the record: the number of alarms, the severity of each, and the remaining updates at DEBUG.
        events: other events, as (type, data).
    """

    alarms: tuple[Alarm, ...]
    remaining: int
    values: dict[str, float]
    events: tuple[Event, ...]


LastingFinding = tuple[int, float, Finding]
"""The first and the last update in which a finding holds, and the finding."""


class Detectors:
    """Judges one run by its records.

    Args:
        facts: facts of the run, as in its journal.
        thresholds: bounds of the rules, and alarms that are off; by default as in the facts.
        alarms: rules in addition to the installed ones.
        findings: findings on the whole run by type, in addition to those of the alarm's judge.

    Attributes:
        rules: rules that apply to the run.
        coverage: the inputs that these rules need, and which of them the records so far have had.

    Raises ValueError if an added rule has the type of another one.
    """

    def __init__(
        self,
        facts: Mapping[str, Any] | None = None,
        thresholds: Thresholds | None = None,
        *,
        alarms: Iterable[AlarmRule] = (),
        findings: Mapping[str, Sequence[LastingFinding]] = MappingProxyType({}),
    ) -> None:
        self.facts, self._findings = Facts.of(facts), findings
        added = tuple(alarms)
        self.thresholds = thresholds = thresholds or Thresholds.of(self.facts, added)
        declared = with_alarms(alarm_rules(), added)
        self._containment = Containment()
        self._declared = {rule.type: rule for rule in declared}
        self._judges: dict[str, Judge] = {}
        self.rules = tuple(rule for rule in declared if rule.type not in thresholds.off and self._applies(rule))
        self._baselines = Baselines(history for rule in self.rules for history in rule.histories)
        self._view = View(self.facts, thresholds, self._baselines)
        self._states = {rule.type: AlarmState(rule, patience=self._view.patience) for rule in self.rules}
        self._order = CausalOrder(declared)
        self._incidents = Incidents(self._order)
        self._escalation = Escalation.of(self.rules, self.facts.escalation)
        self._task = TaskEvents()
        self._remarks = Remarks()
        self._outcome = OutcomeJudge(self.facts)
        self.coverage = RuleCoverage(self.rules, self.facts)
        self._limit = AlarmRateLimit(int(thresholds[ALARM_LIMIT]))
        self._limit_incident: Incident | None = None
        self._user_types = {rule.type for rule in self.rules if is_foreign(rule)}
        self._recorded: dict[str, Incident | None] = {}
        self._quiet = 0
        self._update = 0
        self._before: Record | None = None
        self._intervened = False
        self._families: set[str] = set()
        self._explained = False

    def _applies(self, rule: AlarmRule) -> bool:
        """Return whether a rule applies to this run; if so, copy its judge."""
        if rule.judge is None:
            return False
        try:
            if not rule.applies(self.facts):
                return False
            self._judges[rule.type] = copy.deepcopy(rule.judge)
        except BaseException as error:  # from a user's rule
            DECLARATIONS.note(rule, error, name=f"alarm {rule.type}")
            return False
        return True

    @property
    def gradients_alone(self) -> bool:
        """True if the records so far have gradients but no key that could explain them."""
        return "grad" in self._families and not self._explained

    def rule(self, kind: str) -> AlarmRule | None:
        """Return the declaration of a type of alarm."""
        return self._declared.get(kind)

    def intervention(self) -> None:
        """Announce an intentional change: histories restart, and for three updates only `certain` alarms are raised."""
        self._intervened = True
        self._quiet = QUIET_UPDATES

    def ban(self, name: str) -> None:
        """Switch off the alarm of that name, which has ended a process, and all other alarms of users and plugins."""
        gone = {*self._user_types, name.removeprefix("alarm ")}
        self.rules = tuple(rule for rule in self.rules if rule.type not in gone)
        if self._user_types:
            types = ", ".join(sorted(self._user_types))
            _logger.warning("esper-telemetry: custom alarms are off for the rest of this run: %s", types)

    @property
    def references(self) -> Mapping[str, Any]:
        """Objects that `state` refers to and that a new detector of the run has too, by name."""
        return {"facts": self.facts, "thresholds": self.thresholds}

    def state(self) -> Mapping[str, Any]:
        """Return everything that depends on the records so far, for `restore`; the next record changes the values in place."""
        return {name: value for name, value in vars(self).items() if name not in OF_THE_RUN}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; banned alarms end."""
        vars(self).update(state)
        for kind in self._states.keys() - {rule.type for rule in self.rules}:
            self._states[kind].stop()

    def step(self, record: Record, recorded: Sequence[Alarm] = ()) -> Verdict:
        """Judge the next record.

        Args:
            record: the next record.
            recorded: alarms of this update in the journal whose rules are not installed here; they join its incidents.
        """
        self._update += 1
        changes = self._begin_anew() if self._intervened else []
        self._look(record)
        self.coverage.add(self._view.values)
        changes += self._judge(record)
        self._quiet = max(0, self._quiet - 1)
        if not record.partial:
            self._baselines.learn()
        self._before = record
        alarms = self._report(changes, record, recorded)
        critical = [a.type for a in alarms if a.event is not AlarmEvent.CLEAR and a.severity >= CRITICAL_FROM]
        remaining = self._escalation.step(critical)
        return Verdict(alarms, remaining, self._values(alarms, remaining), self._events(record))

    def note(self, record: Record, *, for_outcome: bool = True) -> None:
        """Add a record that was judged when it was written; only the coverage of rules and, if wanted, the outcome use it."""
        self._update += 1
        self._note_families(record.values)
        self.coverage.add(record.values)
        if for_outcome:
            self._outcome.add(record)
        self._before = record

    def failure(self, seq: int, axes: Axes, data: Mapping[str, Any]) -> Verdict:
        """Judge the exception that ended the run, by the data of its `failure` event.

        Its alarms are reported even beyond the limit on alarms. They last until the next record, which a resumed run has.
        """
        record = Record(seq, self._before.axes if self._before else axes, {})
        self._update = max(self._update, 1)
        findings = failure_findings(data, axes.update + 1)
        steps = ((state, state.step([findings[kind]], self._update)) for kind in findings if (state := self._states.get(kind)))
        changes = [(state, change) for state, change in steps if change is not None]
        incident = self._incidents.raised([state.rule.type for state, _ in changes], self._update) if changes else None
        for state, _ in changes:
            state.incident = incident
        outcome = self._outcome.failure(failure_sentence(data, axes.update + 1))
        alarms = tuple(self._alarm(state, change, record) for state, change in changes)
        return Verdict(alarms, 0, {}, () if outcome is None else ((OUTCOME, outcome.data()),))

    def end(self, status: RunStatus) -> tuple[Event, ...]:
        """Return the outcome of a run with this final status as an event; empty if it has always been too short to tell."""
        outcome = self.outcome(status)
        too_short = outcome.kind is OutcomeKind.TOO_SHORT and not self._outcome.has_changed
        return () if too_short else ((OUTCOME, outcome.data()),)

    def outcome(self, status: RunStatus | None) -> Outcome:
        """Return the outcome of a run with this status; None if it is still running."""
        return self._outcome.end(status, bad_ending(status, self._before.axes.update if self._before else 0, ()))

    def _look(self, record: Record) -> None:
        """Move the view to this record, with its `judgeable` values."""
        view, before = self._view, self._before
        values = judgeable(record.values)
        view.look(values)
        self._note_families(values)
        view.update = self._update
        view.env_step = record.axes.env_step
        total = self.facts.total_steps
        view.progress = min(1.0, record.axes.env_step / total) if total is not None and total > 0 else None
        passed = max(1, record.axes.update - before.axes.update) if before else 1  # records between them may be missing
        view.steps = (record.axes.gradient_step - before.axes.gradient_step) // passed if before else None
        view.transitions = max(0, record.axes.env_step - before.axes.env_step) // passed if before else None
        kl = values.get("policy/kl", 0.0)
        if kl > self.thresholds.low(KL_SUDDEN) * action_dimensions(view):
            view.large_step = (self._update, kl)
        self._baselines.look(values)

    def _note_families(self, values: Mapping[str, float]) -> None:
        if not self._explained:
            self._families.update(key.partition("/")[0] for key in values)
            self._explained = not self._families.isdisjoint(EXPLAINING_FAMILIES)

    def _judge(self, record: Record) -> list[tuple[AlarmState, AlarmChange]]:
        """Return the changes of all alarms in this update."""
        changes = []
        for rule in self.rules:
            if (record.partial and not rule.partial) or (self._quiet and not rule.certain):
                continue
            state = self._states[rule.type]
            try:
                is_users = rule.type in self._user_types
                findings = self._users_findings(rule) if is_users else list(self._judges[rule.type](self._view))
                for first, last, finding in self._findings.get(rule.type, ()):
                    holds = first <= self._update <= last
                    findings.append(finding if holds else finding._replace(severity=0.0))
                if state.is_calm(findings):
                    continue
                findings = [finding for finding in map(checked, findings) if not math.isnan(finding.severity)]
            except BaseException as error:  # from a user's judge
                self._containment.note(rule, error, name=f"alarm {rule.type}")
                continue
            change = state.step(findings, self._update) if findings else None
            if change is not None:
                changes.append((state, change))
        return changes

    def _users_findings(self, rule: AlarmRule) -> list[Finding]:
        """Return the findings of a user's judge. It gets a protected view, and its name is noted in case it ends the process."""
        with call_note.of(f"alarm {rule.type}"):
            return list(self._judges[rule.type](self._view.protected()))

    def _begin_anew(self) -> list[tuple[AlarmState, AlarmChange]]:
        """Clear the histories, and end the alarms that depend on them."""
        self._intervened = False
        self._baselines.forget()
        ended = []
        for rule in self.rules:
            if rule.relative:
                self._judges[rule.type] = copy.deepcopy(self._declared[rule.type].judge)  # type: ignore[assignment]  # not None
                state = self._states[rule.type]
                last = state.stop()
                if last is not None:
                    ended.append((state, AlarmChange(AlarmEvent.CLEAR, last._replace(severity=0.0), 1)))
        return ended

    def _report(self, changes: list[tuple[AlarmState, AlarmChange]], record: Record, recorded: Sequence[Alarm]) -> tuple[Alarm, ...]:
        """Return the alarms of this update with their incident; beyond the limit, a single alarm about the limit."""
        changes.sort(key=lambda item: self._order.place(item[0].rule.type))
        raised = [state for state, change in changes if change.event is AlarmEvent.RAISE]
        kinds = [state.rule.type for state in raised] + [a.type for a in recorded if a.event is AlarmEvent.RAISE]
        reported, limited = self._limit.step(kinds, self._update)
        claims = [state.rule.type for state, change in changes if change.finding.claim and state.rule.type in reported]
        began = min((state.since or self._update for state in raised if state.rule.type in reported), default=self._update)
        earlier = [state for state in self._states.values() if state.instances and state not in raised]
        lasting = {state.rule.type for state in earlier if state.incident is self._incidents.open}
        incident = self._incidents.raised(reported, self._update, claims, began=began, lasting=lasting) if reported else None
        for state in raised:
            state.incident, state.muted = incident, state.rule.type not in reported
        alarms = [self._alarm(state, change, record) for state, change in changes if not state.muted]
        for alarm in recorded:  # a recorded alarm stays in the incident in which it was raised
            if alarm.event is AlarmEvent.RAISE:
                self._recorded[alarm.type] = incident
            joined = self._recorded.get(alarm.type)
            alarms.append(replace(alarm, incident=joined.number, cause=joined.cause) if joined else alarm)
        if limited is not None:
            self._limit_incident = incident if limited is AlarmEvent.RAISE else self._limit_incident
            alarms.append(self._limit_alarm(limited, record, self._limit_incident))
        return tuple(alarms)

    def _alarm(self, state: AlarmState, change: AlarmChange, record: Record) -> Alarm:
        event, finding, streak = change
        over = event is AlarmEvent.CLEAR
        incident = state.incident
        level = AlarmLevel.of(state.reported_severity if over else finding.severity)
        alarm = Alarm(
            *(record.seq, record.axes, state.rule.type, event, finding.severity, level),
            *(finding.key, finding.value, finding.threshold, finding.adaptive, finding.z),
            since=state.since or self._update,
            streak=streak,
            incident=incident.number if incident else 0,
            cause=incident.cause if incident else "",
            text=self._text(state, finding, event),
            evidence={} if over else record_evidence(state, finding, self._view),
        )
        if over:
            state.since, state.reported_severity = None, 0.0
        return alarm

    def _text(self, state: AlarmState, finding: Finding, event: AlarmEvent) -> str:
        """Return the text of an alarm; the rule's sentences if the finding's own text raises an exception."""
        sentences: list[str] = []
        judge = self._judges.get(EQUATION)
        holding = judge.holding if isinstance(judge, EquationJudge) else frozenset[str]()
        incident = state.incident
        alone = incident is not None and incident.number == 1 and incident.raised.keys() <= {state.rule.type}
        worded = partial(alarm_text, state, event=event, view=self._view, explained=self._explained, holding=holding, alone=alone)
        self._containment.attempt(partial(worded, finding), sentences.append, name=f"the text of alarm {state.rule.type}")
        text = sentences[0] if sentences else worded(finding._replace(text=None, advice=None))
        return text[:MAX_TEXT_CHARACTERS]

    def _limit_alarm(self, event: AlarmEvent, record: Record, incident: Incident | None) -> Alarm:
        """Return the alarm that replaces alarms beyond the limit."""
        counts, limit, since = dict(self._limit.counts().most_common(8)), self._limit.limit, self._limit.since
        words = ", ".join(f"{kind} {count}x" for kind, count in counts.items())
        over = Alarm(
            *(record.seq, record.axes, TOO_MANY, event, 0.0, AlarmLevel.CRITICAL, "alarm/active"),
            *(float(sum(counts.values())), float(limit)),
            since=since,
            streak=LIMIT_CALM_UPDATES,
            incident=incident.number if incident else 0,
            cause=incident.cause if incident else "",
            text=f"Ended at update {self._update}: alarms are reported again.",
        )
        if event is not AlarmEvent.RAISE:
            return over
        text = f"Since update {since}, more than {limit} alarms have been raised in {LIMIT_WINDOW_UPDATES} updates: {words}. "
        text += f"Further alarms are not reported until there are fewer. Try: {self._declared[TOO_MANY].action}"
        return replace(over, severity=1.0, streak=1, text=text, evidence={"counts": counts})

    def _values(self, alarms: Iterable[Alarm], remaining: int) -> dict[str, float]:
        severities = {kind: state.severity for kind, state in self._states.items() if state.instances}
        if self._limit.active:
            severities[TOO_MANY] = 1.0
        over = {alarm.type: 0.0 for alarm in alarms if alarm.event is AlarmEvent.CLEAR}
        values = alarm_values({**over, **severities}, len(severities))
        return values | EscalationRemaining(float(remaining)).values()

    def _events(self, record: Record) -> tuple[Event, ...]:
        events: list[Event] = []
        outcome = self._outcome.step(record)
        if outcome is not None:
            events.append((OUTCOME, outcome.data()))
        if not record.partial:
            events += self._remarks.step(self._view)
            events += self._task.step(self._view.values, self._update, self._view.progress)
        if self._update == COVERAGE_UPDATE and (missing := self.coverage.unanswered(sampled=False)):
            events.append(("detectors/unanswered", {"questions": missing}))
        return tuple(events)


def alarm_text(
    state: AlarmState,
    finding: Finding,
    event: AlarmEvent,
    view: View,
    *,
    explained: bool = True,
    holding: Set[str] = frozenset(),
    alone: bool = False,
) -> str:
    """Return the text of an alarm: a large step before it, what happened, since when, the course of the return, and what to try.

    Without advice if `explained` is False and the alarm is only a symptom, and without advice that the equations `holding` refute, or that
    is about an earlier alarm if this one is `alone`.
    """
    rule, update = state.rule, max(view.update, 1)
    clause = finding.text() if finding.text else rule.meaning.rstrip(".")
    since = state.since or update
    if event is AlarmEvent.CLEAR:
        return f"Ended at update {update}, after {update - since} update{'s'[: update - since != 1]}: {rule.meaning}"
    advice = sensible_advice(finding.advice() if finding.advice else rule.action, holding)
    advice = capitalized(advice.removeprefix(FIRST_ALARM)) if alone else advice
    advice = in_trainers_names(advice, view.facts)
    if rule.type == RUN_FAILED:  # its sentence already names the update
        return f"{clause}. Try: {advice}"
    more = len(state.instances) - 1
    others = f" (and {more} more finding{'s'[: more > 1]})" if more > 0 else ""
    worse = "Worse: since" if event is AlarmEvent.UPDATE else "Since"
    known = explained or not rule.type.startswith(SYMPTOMS)
    course = view.course.sentence(update) if rule.rank < CAUSE_LAST_RANK and not rule.hard else ""
    sentences = [
        large_step_before(rule, view, since),
        f"{worse} update {since}, {clause}{others}.",
        course,
        *outside_sentences(rule.settings, view.facts, view.get("opt/lr")),
    ]
    sentences.append(f"Try: {advice}" if known else f"{GRADIENTS_ALONE}.")
    return " ".join(filter(None, sentences))


def large_step_before(rule: AlarmRule, view: View, since: int) -> str:
    """Return a sentence about a large step of the policy shortly before an alarm that may follow from it."""
    judges_steps = any(key.startswith(STEP_KEYS) for key in rule.inputs)
    if view.large_step is None or judges_steps or "learning_rate" not in rule.settings:
        return ""
    update, kl = view.large_step
    if not 0 <= since - update <= LARGE_STEP_UPDATES:
        return ""
    return (
        f"In update {update} the policy moved by a KL divergence of {number(kl)} nats (usually 0.002 to 0.02), which may be the cause: "
        "lower the learning rate first."
    )


def record_evidence(state: AlarmState, finding: Finding, view: View) -> dict[str, Any]:
    """Return the values of the record that show an alarm, their usual ranges, and the worst heads, groups or layers; limited in size."""
    keys: dict[str, None] = {}
    rate = ("opt/lr",) if "learning_rate" in state.rule.settings else ()  # first, so that a limit of size leaves it
    for pattern in (finding.key, *rate, *state.rule.evidence):
        if pattern in view.values:
            keys[pattern] = None
        elif "*" in pattern:
            keys.update(dict.fromkeys(filter(matcher(pattern), view.values)))
    values = {key: view.values[key] for key in [*keys][:MAX_EVIDENCE_VALUES]}
    evidence: dict[str, Any] = {"values": values}
    usual = {key: [*ends] for key in values if (ends := view.baselines.usual(key))}
    if usual:
        evidence["usual"] = usual
    named = {name: finding.severity for name, finding in state.instances.items() if name}
    if named:
        worst = sorted(named, key=lambda name: -named[name])[:MAX_EVIDENCE_INSTANCES]
        evidence["where"] = {name: named[name] for name in worst}
    return evidence
