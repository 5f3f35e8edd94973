"""Where each alarm stands: from the findings of its rule to raised, worse and over.

Too many alarms to read: one that says so, instead of the rest.

Which questions a run's records cannot answer, and what they lack.

How the task goes, as events: the return improves, stands still or falls. Information, no alarm.

Alarms as numbers, so that a dashboard can draw them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from esper_telemetry.alarms.hysteresis import Hysteresis, Patience
from esper_telemetry.alarms.incidents import Incident
from esper_telemetry.alarms.rule import Finding, Rule, number, percent
from esper_telemetry.core.derived import Array, Derived
from esper_telemetry.core.metric import Metric, MetricFamily, label, reports
from esper_telemetry.core.record import AlarmEvent, Level

WORSE = 0.25
"""Severity that an alarm has to gain before it is told again."""


ALARMS_FAMILY = MetricFamily(
    "alarm",
    "Alarms",
    "Verdicts of the detectors: one number per kind of alarm while it is raised. The alarm itself says in words what "
    "happened, since when, and what to try.",
    place=10,
    question="Is anything wrong?",
    first=("alarm/active",),
)


class News(NamedTuple):
    """What has become of an alarm in one update."""

    event: AlarmEvent
    finding: Finding
    streak: int


class AlarmState:
    """One type of alarm: a state machine per head, group or layer that its rule judges; the alarm is on while any of them is.

    Attributes:
        rule: what it is about.
        since: update in which the updates began that spoke for it; None while it is off.
        severity: the latest of those that are on, at their worst.
        told: severity that was last told.
        silent: whether it was raised in a storm, so that nobody was told.
        incident: that it belongs to.
        instances: those that are on, with their latest findings.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.since: int | None = None
        self.severity = self.told = 0.0
        self.silent = False
        self.incident: Incident | None = None
        self.instances: dict[str, Finding] = {}
        self._patience = Patience(n_on=rule.n_on, n_off=rule.n_off, warmup=rule.warmup)
        self._states: dict[str, Hysteresis] = {}

    def step(self, findings: Sequence[Finding], update: int) -> News | None:
        """Takes the findings of an update; several of one type are one event, with the worst of them."""
        if not self._states and max(finding.severity for finding in findings) < self._patience.on:
            return None  # nothing is on, and nothing speaks for a change: the usual case
        was = bool(self.instances)
        spoke = 0
        last = None
        for finding in findings:
            streak = self._judge(finding, update)
            if finding.instance in self.instances:
                spoke = max(spoke, streak)
            last = finding
        worst = max(self.instances.values(), key=lambda finding: finding.severity, default=None)
        self.severity = worst.severity if worst else 0.0
        if worst is not None and not was:
            self.since = update - spoke + 1
            self.told = self.severity
            return News(AlarmEvent.RAISE, worst, spoke)
        if worst is not None and self.severity >= self.told + WORSE:
            self.told = self.severity
            return News(AlarmEvent.UPDATE, worst, spoke)
        if was and worst is None and last is not None:
            return News(AlarmEvent.CLEAR, last, self.rule.n_off)
        return None

    def stop(self) -> Finding | None:
        """Ends the alarm, whatever the values say, and forgets its streaks; its last finding, if it was on."""
        worst = max(self.instances.values(), key=lambda finding: finding.severity, default=None)
        self.instances.clear()
        self._states.clear()
        self.severity = 0.0
        return worst

    def _judge(self, finding: Finding, update: int) -> int:
        """Steps the state machine of one instance; returns for how many updates it has spoken for the change."""
        name, severity = finding.instance, finding.severity
        state = self._states.get(name)
        if state is None:
            if severity < self._patience.on:
                return 0
            state = Hysteresis(self._patience)
        before = state.streak
        state, change = replace(state, updates=update - 1).step(severity)
        if state.active:
            self.instances[name] = finding
        else:
            self.instances.pop(name, None)
        if state.active or state.streak:
            self._states[name] = state
        else:  # as good as new: most instances are, and cost nothing
            self._states.pop(name, None)
        return before + 1 if change else 0


STORM = "telemetry/storm"
STORM_SPAN = 100
STORM_CALM = 20
"""Updates that count, and updates without too many alarms after which a storm is over."""


class Storm:
    """Counts alarms, and says when there are too many to tell."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active = False
        self.since = 0
        self._raised: deque[tuple[int, str]] = deque()
        self._calm = 0

    def step(self, kinds: list[str], update: int) -> tuple[list[str], AlarmEvent | None]:
        """Types that are told of those raised in this update, and whether a storm begins or ends with it."""
        while self._raised and update - self._raised[0][0] >= STORM_SPAN:
            self._raised.popleft()
        self._raised.extend((update, kind) for kind in kinds)
        many = len(self._raised) > self.limit
        if not self.active:
            room = max(0, self.limit - (len(self._raised) - len(kinds)))
            self.active, self.since, self._calm = many, update, 0
            return kinds[:room], AlarmEvent.RAISE if many else None
        self._calm = 0 if many or kinds else self._calm + 1
        if self._calm < STORM_CALM:
            return [], None
        self.active = False
        return kinds, AlarmEvent.CLEAR

    def counts(self) -> Counter[str]:
        """Alarms raised lately by type, those that were not told included."""
        return Counter(kind for _, kind in self._raised)


class Questions:
    """Notes which inputs of the rules a run has had.

    Args:
        rules: those that apply to it.
        facts: of the run.
    """

    def __init__(self, rules: Iterable[Rule], facts: Mapping[str, Any]) -> None:
        self._rules = tuple(rules)
        self._lacking = {rule.type: [name for name in rule.facts if facts.get(name) is None] for rule in self._rules}
        self._unseen = {key for rule in self._rules if not rule.optional for key in rule.inputs}

    def see(self, values: Mapping[str, float]) -> None:
        """Takes in the keys of a record."""
        if self._unseen:
            self._unseen -= values.keys()

    def open(self, *, sampled: bool = True) -> dict[str, str]:
        """By type of alarm, why it cannot be told.

        Args:
            sampled: also of values that are measured in some updates only, and may still come.
        """
        found = {}
        for rule in self._rules:
            facts = self._lacking[rule.type]
            keys = (
                [] if rule.optional or (rule.sampled and not sampled) else [k for k in rule.inputs if k in self._unseen]
            )
            if facts:
                found[rule.type] = f"the run does not say its {', '.join(facts)}"
            elif keys:
                found[rule.type] = f"no record has {', '.join(keys)}"
        return found


RETURN = "episode/return_mean"
SPAN = 10
"""Updates with episodes that are compared with as many before them."""

STARTED = 0.1
"""Share of a run after which its returns are judged."""

STARTED_UPDATES = 20
"""Updates after which they are, where nobody said how long the run is."""

STILL = 5
"""Spans in a row without progress that make a plateau."""

CHANGED = 0.1
"""Share of the range of returns so far that counts as a change."""

NOISE = 4.0
"""Standard errors of the difference that it must exceed besides."""

HUGE = 1e100
"""Returns beyond it are passed over: their squares are no numbers."""

Event = tuple[str, Mapping[str, Any]]


class TaskEvents:
    """Follows the return of one run."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=2 * SPAN)
        self._range: tuple[float, float] | None = None
        self._state = ""
        self._still = 0
        self._since = 0

    def step(self, values: Mapping[str, float], update: int, progress: float | None) -> tuple[Event, ...]:
        """Takes an update; tells what changed, if anything."""
        value = values.get(RETURN)
        if value is None or abs(value) > HUGE:
            return ()
        self._seen.append(value)
        low, high = self._range or (value, value)
        self._range = (min(low, value), max(high, value))
        self._since += 1
        started = update > STARTED_UPDATES if progress is None else progress >= STARTED
        if not started or len(self._seen) < 2 * SPAN or self._since < SPAN:
            return ()
        self._since = 0
        return self._judged(update)

    def _judged(self, update: int) -> tuple[Event, ...]:
        """Once per span: where the return goes."""
        seen = [*self._seen]
        before, now = seen[:SPAN], seen[SPAN:]
        old, new = _mean(before), _mean(now)
        error = ((_variance(before, old) + _variance(now, new)) / SPAN) ** 0.5
        low, high = self._range or (old, new)
        change = new - old
        clear = abs(change) > CHANGED * (high - low) and abs(change) > NOISE * error
        self._still = 0 if clear else self._still + 1
        state = ("improvement" if change > 0 else "degradation") if clear else "plateau" if self._still >= STILL else ""
        if not state or state == self._state:
            return ()
        self._state = state
        return ((f"task/{state}", self._told(state, old, new, update)),)

    def _told(self, state: str, old: float, new: float, update: int) -> dict[str, Any]:
        updates = self._still * SPAN if state == "plateau" else SPAN
        low, high = self._range or (old, new)
        place = (
            "" if high <= low else f", {percent((new - low) / (high - low))} of the way from its lowest to its highest"
        )
        words = {
            "improvement": f"the return rises: {number(new)} after {number(old)}",
            "degradation": f"the return falls: {number(new)} after {number(old)}",
            "plateau": f"the return has stood still at {number(new)} for about {updates} updates{place}",
        }
        return {"update": update, "return": new, "before": old, "updates": updates, "text": words[state]}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _variance(values: list[float], mean: float) -> float:
    return sum((value - mean) ** 2 for value in values) / len(values)


@dataclass(frozen=True, slots=True)
class AlarmCount(Derived):
    """How many alarms are on."""

    active: float | None = reports(
        Metric.count("alarm/active", 990, "alarms raised", level=Level.MINIMAL)
        .asks("How many kinds of alarm are raised at the moment?")
        .bounds(healthy="0", warn="> 0", source="the rules in esper_telemetry.alarms")
        .absent("nobody raises alarms")
    )


@dataclass(frozen=True, slots=True)
class AlarmSeverity(Derived):
    """How serious each of them is."""

    key: tuple[str, ...] = label()
    severity: Array | None = reports(
        Metric.severity("alarm/{key}", 991, "severity of an alarm", level=Level.MINIMAL)
        .asks("How serious is this alarm while it is raised? 0 where it ends.")
        .bounds(warn=">= 0.25", critical=">= 0.75", source="severity of its rule")
        .absent("it is not raised")
    )


def alarm_values(severities: Mapping[str, float], active: int) -> dict[str, float]:
    """Values of a record by key.

    Args:
        severities: of the alarms that are raised, and 0 of those that have just ended, by type.
        active: kinds of alarm that are raised.
    """
    values = AlarmCount(float(active)).values()
    if severities:
        values.update(AlarmSeverity(tuple(severities), np.array([*severities.values()])).values())
    return values
