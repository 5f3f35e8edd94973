"""Pages of text about a run, in Markdown: what it is, what its metrics mean, and the incidents that its alarms report."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from esper_telemetry.core.catalogue import families, family_name
from esper_telemetry.core.record import RUN_FAILED, Alarm, AlarmEvent, MetricInfo, RunInfo, template_of
from esper_telemetry.sinks.values import flattened

REPORT_NAME: Final = "report.html"
"""The run as a page, in the run directory of a run that writes one."""

MAX_ALARMS: Final = 1000
"""Latest alarms that are kept; a run seldom has more, as the detectors limit how often they raise one."""

ALARM_COLUMNS: Final = (
    *("update", "env_step", "event", "type", "level", "severity", "key", "value", "threshold", "incident", "text"),
)


def run_readme(run: RunInfo) -> str:
    """Return the page that describes a run to a person who opens its dashboard."""
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
    facts = [f"- run id: {safe(run.run_id)}", f"- started: {started}"]
    if run.tags:
        facts.append(f"- tags: {safe(', '.join(run.tags))}")
    if run.run_dir is not None:
        facts.append(f"- directory: `{run.run_dir}`; `journal.jsonl` in it holds every number of the run")
    facts.append("- x-axis: environment steps; `axis/update` and `axis/gradient_step` say where each lies")
    declared = {family_name(key) for key in run.metrics}
    questions = {name: family.question for name, family in families().items() if name in declared}
    parts = [f"# {safe(run.name)}", "\n".join(facts), safe(run.notes)]
    parts += [_table("Settings", flattened(run.config)), _table("Facts", flattened(run.facts))]
    parts += [_table("Versions", run.versions), _table("What the charts answer", questions)]
    return "\n\n".join(part for part in parts if part)


def _table(title: str, rows: Mapping[str, object]) -> str:
    if not rows:
        return ""
    lines = [f"| {safe(name)} | {safe(str(value))} |" for name, value in rows.items()]
    return "\n".join([f"## {title}", "", "| name | value |", "|---|---|", *lines])


def safe(text: str) -> str:
    """Return the text on one line, escaped so that it cannot break out of a Markdown table or become HTML."""
    escaped = re.sub(r"([\\`*_|\[\]])", r"\\\1", " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def metric_description(info: MetricInfo) -> str:
    """Return the tooltip of a metric: its name, question, unit, bounds, and what to try when they are left."""
    levels = {"Healthy": info.healthy, "Warning": info.warn, "Critical": info.critical}
    bounds = "; ".join(f"{name}: {safe(text)}" for name, text in levels.items() if text)
    parts = (
        f"**{safe(info.name[:1].upper() + info.name[1:])}.**" if info.name else "",
        safe(info.question),
        f"Unit: {safe(info.unit)}." if info.unit else "",
        f"{bounds}." if bounds else "",
        f"Not healthy? {safe(info.action)}" if info.action and bounds else "",
        safe(info.id),
    )
    return " ".join(part for part in parts if part)


def guide(keys: Iterable[str], run: RunInfo) -> str:
    """Return a table of what these metrics answer, what is healthy and what to try otherwise; empty without any."""
    infos = {template_of(key, run.metrics): run.describe(key) for key in keys}
    rows = [
        f"| **{safe(info.name or key)}** `{key}` | {safe(info.question)} | {safe(info.healthy)} "
        f"| {safe(info.action if info.healthy else '')} |"
        for key, info in infos.items()
        if info is not None
    ]
    return "\n".join(["| metric | what it answers | healthy | if not |", "|---|---|---|---|", *rows]) if rows else ""


def glossary(run: RunInfo) -> dict[str, str]:
    """Return, by family, a line of plain text for every declared metric: its question and what is healthy."""
    families: dict[str, list[str]] = {}
    for key, info in run.metrics.items():
        healthy = f" Healthy: {info.healthy}." if info.healthy else ""
        line = f"{key} [{info.unit}]: {info.question}{healthy}"
        families.setdefault(re.sub(r"\W", "", family_name(key)), []).append(" ".join(line.split()))
    return {name: "\n".join(lines) for name, lines in families.items()}


@dataclass(slots=True)
class IncidentCards:
    """The alarms of a run so far, and the incidents they make up."""

    alarms: list[Alarm] = field(default_factory=list)

    def add(self, *alarms: Alarm) -> None:
        """Add alarms in the order of the journal."""
        self.alarms.extend(alarms)
        del self.alarms[:-MAX_ALARMS]

    @property
    def raised(self) -> list[Alarm]:
        """The alarms that were raised, without updates and ends."""
        return [alarm for alarm in self.alarms if alarm.event is AlarmEvent.RAISE]

    @property
    def active(self) -> dict[str, Alarm]:
        """The latest event of each alarm that is not over, by type."""
        latest = {alarm.type: alarm for alarm in self.alarms}
        return {kind: alarm for kind, alarm in latest.items() if alarm.event is not AlarmEvent.CLEAR}

    @property
    def failure(self) -> str:
        """The sentence of the exception that ended the run; empty if none has, or if the run was resumed."""
        failed = self.active.get(RUN_FAILED)
        return "" if failed is None else alarm_text(failed)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the incidents, in order."""
        return sorted({alarm.incident for alarm in self.alarms})

    def of(self, number: int) -> list[Alarm]:
        """Return the alarms of one incident."""
        return [alarm for alarm in self.alarms if alarm.incident == number]

    def rows(self) -> list[list[Any]]:
        """Return one row per alarm, its `ALARM_COLUMNS`."""
        return [_row(alarm) for alarm in self.alarms]

    def page(self) -> str:
        """Return the page of all incidents, headed by the exception that ended the run."""
        return "\n\n".join(["# What went wrong", *self.headline(), *map(self.incident, self.numbers)]) + "\n"

    def headline(self) -> list[str]:
        """Return the sentence of `failure` in Markdown, or nothing."""
        return [f"**{safe(self.failure)}**"] if self.failure else []

    def incident(self, number: int) -> str:
        """Return the page of one incident: its cause, and a line for each event of its alarms."""
        return "\n".join(_incident_lines(number, self.of(number)))

    def to_json(self) -> str:
        """Return all incidents with their evidence as JSON, the first alarm of each first."""
        incidents = [_plain_incident(self.of(number)) for number in self.numbers]
        return json.dumps(incidents, indent=1, ensure_ascii=False) + "\n"


def cause_of(alarms: Iterable[Alarm]) -> Alarm | None:
    """Return the raised alarm that the incident's latest event names as its cause, else the first; None if none was raised."""
    events = list(alarms)
    raised = [alarm for alarm in events if alarm.event is AlarmEvent.RAISE]
    cause = events[-1].cause if events else ""
    return next((alarm for alarm in raised if alarm.type == cause), raised[0] if raised else None)


def alarm_text(alarm: Alarm) -> str:
    """Return the sentence of an alarm's event."""
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
        bound = "" if alarm.threshold is None else f", threshold {_number(alarm.threshold)}"
        reading = f"{safe(alarm.key)} {_number(alarm.value)}".strip() + bound
        yield f"- **{safe(alarm.type)}** ({state}; {place}; {reading}): {safe(alarm_text(alarm))}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _row(alarm: Alarm) -> list[Any]:
    axes = {"update": alarm.axes.update, "env_step": alarm.axes.env_step}
    texts = {"event": str(alarm.event), "level": str(alarm.level)}
    converted = axes | texts
    return [converted[name] if name in converted else getattr(alarm, name) for name in ALARM_COLUMNS]


def _plain_incident(alarms: list[Alarm]) -> dict[str, Any]:
    cause = cause_of(alarms)
    return {
        "incident": alarms[0].incident,
        "since": min(alarm.since for alarm in alarms),
        "cause": cause.type if cause else alarms[0].cause,
        "text": alarm_text(cause) if cause else "",
        "alarms": [
            {
                **dict(zip(ALARM_COLUMNS, _row(alarm), strict=True)),
                "since": alarm.since,
                "evidence": dict(alarm.evidence),
            }
            for alarm in alarms
        ],
    }
