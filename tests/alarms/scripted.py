"""Alarms chosen by a test, raised in any process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from esper_telemetry.alarms.detectors import Verdict
from esper_telemetry.alarms.rule import AlarmRule
from esper_telemetry.alarms.thresholds import alarm_rules
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Axes, Record


class ScriptedAlarm(NamedTuple):
    """An alarm that the script raises in one update."""

    type: str
    event: AlarmEvent = AlarmEvent.RAISE
    severity: float = 0.9
    key: str = "policy/kl"
    remaining: int = 0


Script = Mapping[int, ScriptedAlarm]


@dataclass
class ScriptedDetectors:
    """Raises the script's alarms, stores its records, and counts down the updates at DEBUG."""

    facts: Mapping[str, Any]
    script: Script
    records: list[Record] = field(default_factory=list)
    interventions: list[int] = field(default_factory=list)
    remaining: int = 0
    since: dict[str, int] = field(default_factory=dict)

    def step(self, record: Record) -> Verdict:
        self.records.append(record)
        self.remaining = max(0, self.remaining - 1)
        line = self.script.get(record.axes.update)
        self.remaining = max(self.remaining, line.remaining if line else 0)
        count = {
            "alarm/seen": float(len(self.records)),
            "alarm/interventions": float(len(self.interventions)),
            "telemetry/escalation_remaining": float(self.remaining),
        }
        if line is None:
            return Verdict((), self.remaining, count, ())
        since = self.since.setdefault(line.type, record.axes.update)
        values = {f"alarm/{line.type}": 0.0 if line.event is AlarmEvent.CLEAR else line.severity, **count}
        alarm = alarm_of(line, record, since)
        return Verdict((alarm,), self.remaining, values, (("task/plateau", {"update": 7, "text": "no better"}),))

    def rule(self, kind: str) -> AlarmRule | None:
        return next((rule for rule in alarm_rules() if rule.type == kind), None)

    def intervention(self) -> None:
        self.interventions.append(len(self.records))

    def failure(self, seq: int, axes: Axes, data: Mapping[str, Any]) -> Verdict:
        return Verdict((), 0, {}, ())


def scripted(script: Script) -> Callable[[Mapping[str, Any]], ScriptedDetectors]:
    """A factory for `Telemetry(detect=...)`, which other processes can load."""
    return partial(ScriptedDetectors, script=dict(script))


def alarm_of(line: ScriptedAlarm, record: Record, since: int) -> Alarm:
    return Alarm(
        seq=record.seq,
        axes=record.axes,
        type=line.type,
        event=line.event,
        severity=line.severity,
        level=AlarmLevel.of(line.severity),
        key=line.key,
        value=record.values.get(line.key),
        threshold=0.095,
        since=since,
        streak=1,
        incident=1,
        cause=line.type,
        text=f"Since update {since} {line.key} has been too large. Try a lower learning rate.",
    )


def an_alarm(update: int, kind: str = "policy/kl_spike", **changes: Any) -> Alarm:
    """One alarm of an update of 1000 steps."""
    line = ScriptedAlarm(kind, changes.pop("event", AlarmEvent.RAISE), changes.pop("severity", 0.9))
    axes = Axes(update, update * 1000, update * 16, 1_700_000_000.0 + update)
    record = Record(update, axes, {"policy/kl": 0.3})
    made = alarm_of(line, record, changes.pop("since", update))
    return Alarm(**{**{name: getattr(made, name) for name in Alarm.__slots__}, **changes})
