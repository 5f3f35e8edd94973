"""Alarms that come when the test says so, in whatever process they are raised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from esper_telemetry.alarms.registry import alarm_rules
from esper_telemetry.alarms.rule import AlarmRule
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Axes, Record


class Said(NamedTuple):
    """What the script says in one update."""

    type: str
    event: AlarmEvent = AlarmEvent.RAISE
    severity: float = 0.9
    key: str = "policy/kl"
    remaining: int = 0


class Spoken(NamedTuple):
    """A verdict."""

    alarms: tuple[Alarm, ...] = ()
    remaining: int = 0
    values: Mapping[str, float] = {}
    events: tuple[tuple[str, Mapping[str, Any]], ...] = ()


Script = Mapping[int, Said]


@dataclass
class Scripted:
    """Raises what the script says, keeps what it has seen, and counts down the updates at DEBUG."""

    facts: Mapping[str, Any]
    script: Script
    seen: list[Record] = field(default_factory=list)
    interventions: list[int] = field(default_factory=list)
    remaining: int = 0
    since: dict[str, int] = field(default_factory=dict)

    def step(self, record: Record) -> Spoken:
        self.seen.append(record)
        self.remaining = max(0, self.remaining - 1)
        said = self.script.get(record.axes.update)
        self.remaining = max(self.remaining, said.remaining if said else 0)
        count = {
            "alarm/seen": float(len(self.seen)),
            "alarm/interventions": float(len(self.interventions)),
            "telemetry/escalation_remaining": float(self.remaining),
        }
        if said is None:
            return Spoken((), self.remaining, count)
        since = self.since.setdefault(said.type, record.axes.update)
        values = {f"alarm/{said.type}": 0.0 if said.event is AlarmEvent.CLEAR else said.severity, **count}
        alarm = alarm_of(said, record, since)
        return Spoken((alarm,), self.remaining, values, (("task/plateau", {"updates": 7}),))

    def rule(self, kind: str) -> AlarmRule | None:
        return next((rule for rule in alarm_rules() if rule.type == kind), None)

    def intervention(self) -> None:
        self.interventions.append(len(self.seen))

    def failure(self, seq: int, axes: Axes, data: Mapping[str, Any]) -> Spoken:
        return Spoken()


def scripted(script: Script) -> Callable[[Mapping[str, Any]], Scripted]:
    """What `Telemetry(detect=...)` takes; other processes can load it."""
    return partial(Scripted, script=dict(script))


def alarm_of(said: Said, record: Record, since: int) -> Alarm:
    return Alarm(
        seq=record.seq,
        axes=record.axes,
        type=said.type,
        event=said.event,
        severity=said.severity,
        level=AlarmLevel.of(said.severity),
        key=said.key,
        value=record.values.get(said.key),
        threshold=0.095,
        since=since,
        streak=1,
        incident=1,
        cause=said.type,
        text=f"Since update {since} {said.key} has been too large. Try a lower learning rate.",
    )


def an_alarm(update: int, kind: str = "policy/kl_spike", **changes: Any) -> Alarm:
    """An alarm on its own, of an update of 1000 steps."""
    said = Said(kind, changes.pop("event", AlarmEvent.RAISE), changes.pop("severity", 0.9))
    axes = Axes(update, update * 1000, update * 16, 1_700_000_000.0 + update)
    record = Record(update, axes, {"policy/kl": 0.3})
    made = alarm_of(said, record, changes.pop("since", update))
    return Alarm(**{**{name: getattr(made, name) for name in Alarm.__slots__}, **changes})
