"""State of alarms (raised, worse, ended), the limit on alarms, rules without inputs, and updates at DEBUG that alarms request."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, Literal, NamedTuple

import numpy as np

from esper_telemetry.alarms.incidents import Incident
from esper_telemetry.alarms.rule import CAUSE_LAST_RANK, AlarmRule, Finding
from esper_telemetry.alarms.verdict.unusual import PART_FAMILIES, fact_remedy, key_remedy
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.metric import Array, Derived, Metric, MetricFamily, label, reports
from esper_telemetry.core.record import AlarmEvent, Level

Change = Literal["RAISE", "CLEAR"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Evidence needed to raise and to end an alarm.

    Attributes:
        on: severity at or above which an update is evidence for the alarm.
        off: severity below which an update is evidence for its end.
        n_on, n_off: number of such updates in a row; updates without a severity are skipped.
        warmup: updates at the start in which the alarm is not raised.

    Raises ValueError for bounds in the wrong order or counts below 1.
    """

    on: float = 0.5
    off: float = 0.25
    n_on: int = 1
    n_off: int = 3
    warmup: int = 0

    def __post_init__(self) -> None:
        if not self.off <= self.on:
            raise ValueError(f"off must not exceed on, got off {self.off} and on {self.on}")
        if min(self.n_on, self.n_off) < 1:
            raise ValueError(f"n_on and n_off must be at least 1, got {self.n_on} and {self.n_off}")


ALARMS_FAMILY = MetricFamily(
    "alarm",
    "Alarms",
    "Verdicts of the detectors: one number per type of alarm while it is raised. The alarm itself describes what happened, "
    "since when, and what to try.",
    place=10,
    question="Is anything wrong?",
    first=("alarm/active",),
)


@dataclass(slots=True)
class Hysteresis:
    """State of one alarm with hysteresis, which missing data do not change.

    Attributes:
        patience: evidence needed for a change.
        updates: updates so far, including updates without a severity.
        streak: updates in a row that are evidence for a change.
        active: True while the alarm is on.
        lasting: updates in a row that are evidence for the alarm, including the warm-up.
    """

    patience: Patience = Patience()  # frozen
    updates: int = 0
    streak: int = 0
    active: bool = False
    lasting: int = 0

    def step(self, severity: float | None) -> Change | None:
        """Judge one update by its severity, 0 to 1; None and NaN change only the count of updates. Returns the change, if any."""
        self.updates, patience = self.updates + 1, self.patience
        if severity is None or math.isnan(severity):
            return None
        self.lasting = self.lasting + 1 if severity >= patience.on else 0
        if self.active:
            speaks, needed = severity < patience.off, patience.n_off
        else:
            speaks, needed = severity >= patience.on and self.updates > patience.warmup, patience.n_on
        self.streak = self.streak + 1 if speaks else 0
        if self.streak < needed:
            return None
        self.streak, self.active = 0, not self.active
        return "RAISE" if self.active else "CLEAR"


WORSE_SEVERITY: Final = 0.25  # increase of severity after which an alarm is reported again
SEVERITY: Final = itemgetter(0)  # severity of a finding, three times as fast as an expression


class AlarmChange(NamedTuple):
    """The change of an alarm in one update.

    Attributes:
        event: raised, worse or ended.
        finding: the worst finding of the alarm, or the last one if it ended.
        streak: updates in a row that were evidence for the change.
    """

    event: AlarmEvent
    finding: Finding
    streak: int


class AlarmState:
    """State of one type of alarm, with one `Hysteresis` per head, group or layer; the alarm is on while any of them is.

    Args:
        patience: factor by which it waits longer than declared; see `rule.patience_factor`.

    Attributes:
        rule: declaration of the alarm.
        since: first of the updates that were evidence for the alarm, including the warm-up; None while it is off.
        severity: largest latest severity of the active instances.
        reported_severity: last reported severity.
        muted: whether it was raised beyond the limit on alarms and is not reported.
        incident: incident of the alarm.
        instances: latest findings of the active instances.
    """

    def __init__(self, rule: AlarmRule, *, patience: int = 1) -> None:
        self.rule = rule
        self.since: int | None = None
        self.severity = self.reported_severity = 0.0
        self.muted = False
        self.incident: Incident | None = None
        self.instances: dict[str, Finding] = {}
        exact = rule.hard or rule.certain or rule.rank >= CAUSE_LAST_RANK
        n_on = rule.n_on if exact else rule.n_on * patience
        self._patience = Patience(n_on=n_on, n_off=rule.n_off, warmup=rule.warmup)
        self._states: dict[str, Hysteresis] = {}

    def is_calm(self, findings: Iterable[Finding]) -> bool:
        """Return True if the alarm is off and no finding is evidence for it, the usual case, in which `step` can be skipped."""
        return not self._states and max(map(SEVERITY, findings), default=0.0) < self._patience.on

    def step(self, findings: Sequence[Finding], update: int) -> AlarmChange | None:
        """Judge the findings of an update; several findings are one event, with the worst of them."""
        was = bool(self.instances)
        longest = lasting = 0
        for finding in findings:
            streak = self._judge(finding, update)
            if finding.instance in self.instances:
                longest = max(longest, streak)
                lasting = max(lasting, streak and self._states[finding.instance].lasting)
        worst = self._worst()
        self.severity = worst.severity if worst else 0.0
        if worst is not None and not was:
            self.since = max(1, update - max(longest, lasting) + 2 - max(worst.held, 1))
            self.reported_severity = self.severity
            return AlarmChange(AlarmEvent.RAISE, worst, longest)
        if worst is not None and self.severity >= self.reported_severity + WORSE_SEVERITY:
            self.reported_severity = self.severity
            return AlarmChange(AlarmEvent.UPDATE, worst, longest)
        if was and worst is None:
            return AlarmChange(AlarmEvent.CLEAR, findings[-1], self.rule.n_off)
        return None

    def stop(self) -> Finding | None:
        """End the alarm unconditionally and reset its streaks; returns its worst finding, if it was on."""
        worst = self._worst()
        self.instances.clear()
        self._states.clear()
        self.severity = 0.0
        return worst

    def _worst(self) -> Finding | None:
        return max(self.instances.values(), key=lambda finding: finding.severity, default=None)

    def _judge(self, finding: Finding, update: int) -> int:
        """Step the state of one instance; returns the number of updates that were evidence for a change, 0 without a change."""
        name, severity = finding.instance, finding.severity
        if name not in self._states and severity < self._patience.on:
            return 0
        state = self._states.setdefault(name, Hysteresis(self._patience))
        before, state.updates = state.streak, update - 1
        change = state.step(severity)
        if state.active:
            self.instances[name] = finding
        else:
            self.instances.pop(name, None)
        if not (state.active or state.streak or state.lasting):  # equal to a new state: most instances are, and need not be stored
            del self._states[name]
        return before + 1 if change else 0


LIMIT_WINDOW_UPDATES: Final = 100  # updates whose alarms count towards the limit
LIMIT_CALM_UPDATES: Final = 20  # updates below the limit after which alarms are reported again


class AlarmRateLimit:
    """Counts alarms; alarms beyond the limit are not reported."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active = False
        self.since = 0
        self._raised: deque[tuple[int, str]] = deque()
        self._calm = 0

    def step(self, kinds: list[str], update: int) -> tuple[list[str], AlarmEvent | None]:
        """Return the raised types to report in this update, and the event if the limit begins or ends to suppress alarms."""
        while self._raised and update - self._raised[0][0] >= LIMIT_WINDOW_UPDATES:
            self._raised.popleft()
        self._raised.extend((update, kind) for kind in kinds)
        many = len(self._raised) > self.limit
        if not self.active:
            room = max(0, self.limit - (len(self._raised) - len(kinds)))
            self.active, self.since, self._calm = many, update, 0
            return kinds[:room], AlarmEvent.RAISE if many else None
        self._calm = 0 if many or kinds else self._calm + 1
        if self._calm < LIMIT_CALM_UPDATES:
            return [], None
        self.active = False
        return kinds, AlarmEvent.CLEAR

    def counts(self) -> Counter[str]:
        """Return the number of recently raised alarms by type, including unreported ones."""
        return Counter(kind for _, kind in self._raised)


LACKS_FACTS: Final = "the facts of the run lack"


class RuleCoverage:
    """The inputs that the rules of a run need, and which of them the run has had."""

    def __init__(self, rules: Iterable[AlarmRule], facts: Facts) -> None:
        self._rules = tuple(rules)
        self._lacking = {
            rule.type: [name for name in rule.facts if facts.get(name) is None or getattr(facts, name, 0) is None] for rule in self._rules
        }
        self._part_families = PART_FAMILIES - ({"lstm"} if facts.policy is not None else set())
        self._facts = facts
        self._seen: set[str] = set()

    def add(self, values: Mapping[str, float]) -> None:
        """Add the keys of a record."""
        if values.keys() <= self._seen:
            return
        self._seen |= values.keys()
        if self._part_families:
            self._part_families = self._part_families - {key.partition("/")[0] for key in values}

    def unanswered(self, *, sampled: bool = True) -> dict[str, str]:
        """Return the reason why an alarm cannot be raised, by type; `sampled` includes inputs that a later sampled update may have."""
        reasons = {}
        for rule, facts, keys in self._gaps(sampled=sampled):
            if facts:
                reasons[rule.type] = f"{LACKS_FACTS} {', '.join(facts)}"
            else:
                reasons[rule.type] = f"no record has {', '.join(' or '.join(names) for names in keys)}"
        return reasons

    def remedies(self) -> dict[str, str]:
        """Return the call, fact or option that supplies the missing inputs, by type of alarm."""
        return {
            rule.type: fact_remedy(tuple(facts))
            if facts
            else " and ".join(dict.fromkeys(key_remedy(names[0], self._facts) for names in keys))
            for rule, facts, keys in self._gaps(sampled=True)
        }

    def judged(self) -> int:
        """Return the number of rules whose inputs the run has had."""
        asked = [rule for rule in self._rules if rule.type.partition("/")[0] not in self._part_families]
        return len({rule.type for rule in asked if not self._lacks_inputs(rule)} - self.unanswered().keys())

    def _lacks_inputs(self, rule: AlarmRule) -> bool:
        """Return whether no record has had the required keys of a rule, or any of its inputs if it declares none.

        Keys of alarms are always available.
        """
        if rule.required_keys:
            return not all(any(map(self._has, names)) for names in rule.required_keys)
        return not any(key.startswith("alarm/") or self._has(key) for key in rule.inputs)

    def _has(self, key: str) -> bool:
        """Return whether a record has had that key, or a key of that template."""
        start, mark, rest = key.partition("{")
        if not mark:
            return key in self._seen
        end = rest.rpartition("}")[2]
        return any(seen.startswith(start) and seen.endswith(end) for seen in self._seen)

    def _gaps(self, *, sampled: bool) -> Iterator[tuple[AlarmRule, list[str], list[tuple[str, ...]]]]:
        """Yield the rules that cannot be judged, with the facts and the keys that they lack."""
        for rule in self._rules:
            if rule.type.partition("/")[0] in self._part_families:  # the network does not have this part
                continue
            facts = self._lacking[rule.type]
            passed = rule.optional or (rule.sampled and not sampled)
            keys = [] if passed else [names for names in rule.required_keys if not any(map(self._has, names))]
            if facts or keys:
                yield rule, facts, keys


@dataclass(frozen=True, slots=True)
class AlarmCount(Derived):
    """Number of active alarms."""

    active: float | None = reports(
        Metric.count("alarm/active", 990, "alarms raised", level=Level.MINIMAL)
        .asks("How many types of alarm are active?")
        .bounds(healthy="0", warn="> 0", source="the rules in esper_telemetry.alarms")
        .absent("alarms are switched off")
    )


@dataclass(frozen=True, slots=True)
class AlarmSeverity(Derived):
    """Severity of each active alarm."""

    key: tuple[str, ...] = label()
    severity: Array | None = reports(
        Metric.severity("alarm/{key}", 991, "severity of an alarm", level=Level.MINIMAL)
        .asks("How severe is this alarm? 0 in the update in which it ends.")
        .bounds(warn=">= 0.25", critical=">= 0.75", source="severity of its rule")
        .absent("the alarm is not active")
    )


def alarm_values(severities: Mapping[str, float], active: int) -> dict[str, float]:
    """Return the values of a record by key: the severity of each alarm, 0 if it has just ended, and the number of active alarms."""
    values = AlarmCount(float(active)).values()
    if severities:
        values.update(AlarmSeverity(tuple(severities), np.array([*severities.values()])).values())
    return values


CAP: Final = 20  # largest number of updates at DEBUG in a row; the next one is NORMAL
COOLDOWN_FACTOR: Final = 2  # after a window, its type cannot open another one for this multiple of its duration


@dataclass(frozen=True, slots=True)
class EscalationRemaining(Derived):
    """Updates for which the level stays raised."""

    remaining: float | None = reports(
        Metric.magnitude("telemetry/escalation_remaining", 979, "escalation remaining", unit="updates", level=Level.MINIMAL)
        .asks("For how many more updates, including this one, do alarms keep the level at DEBUG?")
        .absent("alarms are switched off")
    )


@dataclass(slots=True)
class Escalation:
    """State of the raised level.

    Attributes:
        durations: updates at DEBUG that each type of alarm requests.
        cap: limit, see the constant.
        updates: updates so far.
        remaining: remaining updates at DEBUG.
        streak: updates at DEBUG in a row so far.
        ends: last update of each type's latest window.
    """

    durations: Mapping[str, int]
    cap: int = CAP
    updates: int = 0
    remaining: int = 0
    streak: int = 0
    ends: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, rules: Iterable[AlarmRule], updates: int | None = None) -> Escalation:
        """Return the initial state; `updates`, if given and not negative, replaces the rules' own numbers of updates."""
        durations = {rule.type: rule.debug_updates for rule in rules if rule.debug_updates}
        if updates is not None and updates >= 0:
            return cls(dict.fromkeys(durations, updates), cap=max(CAP, updates))
        return cls(durations)

    def step(self, raised: Collection[str]) -> int:
        """Add one update with the types of alarm raised in it; a type without a duration does not raise the level.

        Returns the remaining updates at DEBUG, including this one; 0 means NORMAL.
        """
        now = self.updates = self.updates + 1
        if self.streak >= self.cap:
            self.ends = {kind: min(end, now - 1) for kind, end in self.ends.items()}
            self.remaining = self.streak = 0
            return 0
        cooled = {kind: end + COOLDOWN_FACTOR * self.durations[kind] for kind, end in self.ends.items()}
        opened = [kind for kind in raised if self.durations.get(kind, 0) > 0 and now > cooled.get(kind, 0)]
        self.ends |= {kind: now + self.durations[kind] - 1 for kind in opened}
        remaining = max([self.remaining, *(self.durations[kind] for kind in opened)])
        self.remaining, self.streak = max(0, remaining - 1), self.streak + 1 if remaining else 0
        return remaining
