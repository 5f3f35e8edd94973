"""What went wrong in a run, as pages, rows and plain values that backends can show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from esper_telemetry.core.record import RUN_FAILED, Alarm, AlarmEvent
from esper_telemetry.sinks.readme import safe

MOST_ALARMS: Final = 1000
"""Alarms that are remembered, the latest; a storm counts as one, so a run seldom has more."""

COLUMNS: Final = (
    "update",
    "env_step",
    "event",
    "type",
    "level",
    "severity",
    "key",
    "value",
    "threshold",
    "incident",
    "text",
)


@dataclass(slots=True)
class IncidentCards:
    """The alarms of a run so far."""

    alarms: list[Alarm] = field(default_factory=list)

    def add(self, *alarms: Alarm) -> None:
        """Takes more of them, in the order of the journal."""
        self.alarms.extend(alarms)
        del self.alarms[:-MOST_ALARMS]

    @property
    def raised(self) -> list[Alarm]:
        """Those that began something."""
        return [alarm for alarm in self.alarms if alarm.event is AlarmEvent.RAISE]

    @property
    def active(self) -> dict[str, Alarm]:
        """By type, the latest word on what is not over."""
        latest = {alarm.type: alarm for alarm in self.alarms}
        return {kind: alarm for kind, alarm in latest.items() if alarm.event is not AlarmEvent.CLEAR}

    @property
    def failure(self) -> str:
        """The sentence of the exception that ended the run; empty where none has, or where the run goes on after it."""
        failed = self.active.get(RUN_FAILED)
        return "" if failed is None else alarm_text(failed)

    def of(self, number: int) -> list[Alarm]:
        """Those of one incident."""
        return [alarm for alarm in self.alarms if alarm.incident == number]

    def rows(self) -> list[list[Any]]:
        """One per alarm, its `COLUMNS`."""
        return [[_column(alarm, name) for name in COLUMNS] for alarm in self.alarms]

    def page(self) -> str:
        """All incidents, for people, after the exception that ended the run; Markdown."""
        numbers = sorted({alarm.incident for alarm in self.alarms})
        return "\n\n".join(["# What went wrong", *self.headline(), *map(self.incident, numbers)]) + "\n"

    def headline(self) -> list[str]:
        """The sentence of `failure`, if there is one; Markdown."""
        return [f"**{safe(self.failure)}**"] if self.failure else []

    def incident(self, number: int) -> str:
        """One incident, for people: its cause, and what was said of each of its alarms; Markdown."""
        return "\n".join(_incident_lines(number, self.of(number)))

    def to_json(self) -> str:
        """All incidents with their evidence, the first alarm of each first."""
        numbers = sorted({alarm.incident for alarm in self.alarms})
        return json.dumps([_plain_incident(self.of(number)) for number in numbers], indent=1, ensure_ascii=False) + "\n"


def cause_of(alarms: Iterable[Alarm]) -> Alarm | None:
    """The alarm to which an incident is put down, by what was said of it last; None where none was raised."""
    known = list(alarms)
    raised = [alarm for alarm in known if alarm.event is AlarmEvent.RAISE]
    named = known[-1].cause if known else ""
    return next((alarm for alarm in raised if alarm.type == named), raised[0] if raised else None)


def alarm_text(alarm: Alarm) -> str:
    """What has become of an alarm, in a sentence."""
    if alarm.event is AlarmEvent.CLEAR:
        return f"over at update {alarm.axes.update:,}, after {alarm.axes.update - alarm.since:,} updates"
    return " ".join(alarm.text.split()) or f"{alarm.key} = {_number(alarm.value)}"


def _incident_lines(number: int, alarms: list[Alarm]) -> Iterator[str]:
    cause = cause_of(alarms)
    since = min(alarm.since for alarm in alarms)
    yield f"## Incident {number}, since update {since:,}: {safe(cause.type if cause else alarms[0].type)}"
    yield ""
    for alarm in alarms:
        state = str(alarm.event) if alarm.event is AlarmEvent.CLEAR else f"{alarm.event}, {alarm.level}"
        place = f"update {alarm.axes.update:,}, step {alarm.axes.env_step:,}"
        yield f"- **{safe(alarm.type)}** ({state}; {place}; {_reading(alarm)}): {safe(alarm_text(alarm))}"


def _reading(alarm: Alarm) -> str:
    """The number that decided, and its bound where it has one."""
    bound = "" if alarm.threshold is None else f", threshold {_number(alarm.threshold)}"
    return f"{safe(alarm.key)} {_number(alarm.value)}".strip() + bound


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _column(alarm: Alarm, name: str) -> Any:
    value = getattr(alarm.axes if name in ("update", "env_step") else alarm, name)
    return str(value) if name in ("event", "level") else value


def _plain_incident(alarms: list[Alarm]) -> dict[str, Any]:
    cause = cause_of(alarms)
    lines = [
        {**dict(zip(COLUMNS, row, strict=True)), "since": alarm.since, "evidence": dict(alarm.evidence)}
        for alarm, row in zip(alarms, IncidentCards(alarms).rows(), strict=True)
    ]
    return {
        "incident": alarms[0].incident,
        "since": min(alarm.since for alarm in alarms),
        "cause": cause.type if cause else alarms[0].cause,
        "text": alarm_text(cause) if cause else "",
        "alarms": lines,
    }
