"""Pages of text about a run, in Markdown: its description, the meaning of its metrics, and the incidents that its alarms report."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from esper_telemetry.alarms.verdict.bounds import Tone, tone_of
from esper_telemetry.core.messages import capitalized, end_text, printable
from esper_telemetry.core.metric import families, family_name
from esper_telemetry.core.record import RUN_FAILED, Alarm, AlarmEvent, MetricInfo, Record, RunInfo, template_of
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.sinks.layout import described, flattened, overview_keys

REPORT_NAME: Final = "report.html"
"""Name of the run's page in its directory, if the run writes one."""

MAX_ALARMS: Final = 1000
"""Latest alarms that are kept; a run seldom has more, because the detectors limit their rate."""

MAX_NOTE_CHARACTERS: Final = 7500
"""MLflow takes 8,000 in a tag."""
MAX_NOTE_INCIDENTS: Final = 5
MAX_QUIET_VALUES: Final = 5
"""Values in the first lines of the description of a run without incidents; its table has all headline values."""

ALARM_COLUMNS: Final = (*("update", "env_step", "event", "type", "level", "severity", "key", "value", "threshold", "incident", "text"),)


def run_readme(run: RunInfo) -> str:
    """Return the page that describes a run to a person who opens its dashboard."""
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
    facts = [f"- run id: {safe(run.run_id)}", f"- started: {started}"]
    if run.tags:
        facts.append(f"- tags: {safe(', '.join(run.tags))}")
    if run.run_dir is not None:
        facts.append(f"- directory: {code(str(run.run_dir))}; `journal.jsonl` in it holds every number of the run")
    facts.append("- x-axis: environment steps; `axis/update` and `axis/gradient_step` hold the other axes")
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
    escaped = re.sub(r"([\\`*_|\[\]])", r"\\\1", " ".join(printable(text).split()))
    # W&B shows notes as plain text in its list of runs, so `>` is escaped only if it would start HTML or a quotation.
    return re.sub("^>", "&gt;", escaped.replace("&", "&amp;").replace("<", "&lt;"))


def code(text: str) -> str:
    """Return the text as Markdown code that it cannot break out of, even inside a table."""
    return f"`{' '.join(text.replace('`', '').replace('|', '').split())}`"


def metric_description(info: MetricInfo) -> str:
    """Return the tooltip of a metric: its name, question, unit, bounds, and what to try outside the bounds."""
    levels = {"Healthy": info.healthy, "Warning": info.warn, "Critical": info.critical}
    bounds = "; ".join(f"{name}: {safe(text)}" for name, text in levels.items() if text)
    parts = (
        f"**{safe(capitalized(info.name))}.**" if info.name else "",
        safe(info.question),
        f"Unit: {safe(info.unit)}." if info.unit else "",
        f"{bounds}." if bounds else "",
        f"Not healthy? {safe(info.action)}" if info.action and bounds else "",
        safe(info.id),
    )
    return " ".join(part for part in parts if part)


def guide(keys: Iterable[str], run: RunInfo) -> str:
    """Return a table of the question, the healthy range and the advice of these metrics; empty without any."""
    infos = {template_of(key, run.metrics): run.describe(key) for key in keys}
    rows = [
        f"| **{safe(info.name or key)}** {code(key)} | {safe(info.question)} | {safe(info.healthy)} "
        f"| {safe(info.action if info.healthy else '')} |"
        for key, info in infos.items()
        if info is not None
    ]
    return "\n".join(["| metric | what it answers | healthy | if not |", "|---|---|---|---|", *rows]) if rows else ""


def glossary(run: RunInfo) -> str:
    """Return a page with a table per family: every declared metric, its question and its healthy range."""
    keys_by_family: dict[str, list[str]] = {}
    for key in run.metrics:
        keys_by_family.setdefault(family_name(key), []).append(key)
    order = families()
    chapters = []
    for name in sorted(keys_by_family, key=lambda name: (order[name].place if name in order else 0, name)):
        question = order[name].question if name in order else ""
        chapters.append(f"## {safe(name)}: {safe(question)}\n\n{guide(keys_by_family[name], run)}")
    return "\n\n".join(["# What the metrics mean", *chapters]) + "\n"


@dataclass(slots=True)
class IncidentCards:
    """The verdict on a run so far: its outcome, its alarms, and the incidents that they form."""

    alarms: list[Alarm] = field(default_factory=list)
    outcome: JournalEvent | None = None

    def add(self, *alarms: Alarm) -> None:
        """Add alarms in the order of the journal."""
        self.alarms.extend(alarms)
        del self.alarms[:-MAX_ALARMS]

    def after(self, event: Alarm | JournalEvent) -> IncidentCards:
        """Return the verdict after one more alarm, or with a new outcome; this one does not change, since a sink may refuse the event."""
        if isinstance(event, JournalEvent):
            return IncidentCards(self.alarms, event)
        return IncidentCards([*self.alarms, event][-MAX_ALARMS:], self.outcome)

    @property
    def raised(self) -> list[Alarm]:
        """The alarms that were raised, without their updates and ends."""
        return [alarm for alarm in self.alarms if alarm.event is AlarmEvent.RAISE]

    @property
    def active(self) -> dict[str, Alarm]:
        """The latest event of each alarm that is not over, by type."""
        latest = {alarm.type: alarm for alarm in self.alarms}
        return {kind: alarm for kind, alarm in latest.items() if alarm.event is not AlarmEvent.CLEAR}

    @property
    def failure(self) -> str:
        """The sentence of the exception that ended the run; empty if none did, or if the run was resumed."""
        failed = self.active.get(RUN_FAILED)
        return "" if failed is None else alarm_text(failed)

    @property
    def tone(self) -> Tone:
        """The tone of the verdict."""
        kind = "" if self.outcome is None else str(self.outcome.data.get("outcome", ""))
        return tone_of(kind, [alarm.level for alarm in self.active.values()])

    @property
    def quiet_text(self) -> str:
        """The sentence on a run without alarms."""
        explains_nothing = "No alarm explains it: esper-telemetry diagnose lists what is unusual."
        return explains_nothing if self.tone is Tone.WARN else "No alarm was raised."

    @property
    def numbers(self) -> list[int]:
        """The numbers of the incidents, in order."""
        return sorted({alarm.incident for alarm in self.alarms})

    def of(self, number: int) -> list[Alarm]:
        """Return the alarms of one incident."""
        return [alarm for alarm in self.alarms if alarm.incident == number]

    def rows(self) -> list[list[Any]]:
        """Return one row per alarm, with the columns `ALARM_COLUMNS`."""
        return [_row(alarm) for alarm in self.alarms]

    def sentence(self) -> str:
        """Return the sentence on the exception that ended the run, or on its outcome; empty while neither is known."""
        text = "" if self.outcome is None else str(self.outcome.data.get("text", ""))
        return self.failure or " ".join(text.split())

    def verdict(self) -> str:
        """Return one line of plain text, most important first, because lists cut it off.

        It has the word for the outcome, the cause of the first open incident (or else of the first incident), and the sentence.
        """
        word, _, rest = (self.sentence() or "no outcome yet").partition(": ")
        if self.failure:
            word, rest = "failed", self.failure
        causes = [cause for number in self.numbers if (cause := self.cause(number)) and cause.type != RUN_FAILED]
        active = {alarm.incident for alarm in self.active.values()}
        first = next((cause for cause in causes if cause.incident in active), causes[0] if causes else None)
        if first is None:
            reason = "" if self.failure else " (no alarm explains it)" if self.tone is Tone.WARN else " (no alarms)"
        else:
            over = "" if first.incident in active else ", ended"
            reason = f" ({first.type} since update {first.since:,}{over})"
        more = f"; {len(causes)} incidents" if len(causes) > 1 else ""
        return f"{word}{reason}: {rest}{more}" if rest else f"{word}{reason}{more}"

    def page(self) -> str:
        """Return the page of the verdict: the outcome, then the incidents, each with its cause first."""
        title = capitalized(self.sentence()) if self.outcome and not self.failure else ""
        heading = f"# {safe(title)}" if title else "# What went wrong" if self.alarms else "# No outcome yet"
        quiet = [] if self.alarms else [self.quiet_text]
        failure = [f"**{safe(self.failure)}**"] if self.failure else []
        return "\n\n".join([heading, *failure, *quiet, *map(self.incident, self.numbers)]) + "\n"

    def cause(self, number: int) -> Alarm | None:
        """Return the raised alarm that is the cause of an incident; None if none of its alarms was raised."""
        return cause_of(self.of(number))

    def state(self, alarm: Alarm) -> str:
        """Return the end of an alarm's type in its incident in words."""
        ends = [one.axes.update for one in self.of(alarm.incident) if (one.type, one.event) == (alarm.type, AlarmEvent.CLEAR)]
        active = self.active.get(alarm.type)
        is_active = active is not None and active.incident == alarm.incident
        return end_text(None if is_active or not ends else ends[-1])

    def incident(self, number: int, *, heading: bool = True) -> str:
        """Return the page of one incident: its cause with the advice, then a line for each alarm that came with it."""
        alarms = self.of(number)
        cause = self.cause(number) or alarms[0]
        latest: dict[str, Alarm] = {}
        for alarm in alarms:
            latest[alarm.type] = alarm if alarm.event is not AlarmEvent.CLEAR else latest.get(alarm.type, alarm)
        text, level = safe(alarm_text(latest[cause.type])), f"({latest[cause.type].level}, {self.state(cause)})"
        since = min(alarm.since for alarm in alarms)
        lines = [f"**{safe(cause.type)}** {level}: {text}"]
        if heading:
            lines = [f"## Incident {number}, since update {since:,}: {safe(cause.type)}", "", f"**{text}** {level}"]
        others = [alarm for kind, alarm in latest.items() if kind != cause.type]
        if others:
            lines += ["", "With it came:", ""]
        for alarm in others:
            first_sentence = alarm_text(alarm).split(". ", 1)[0].rstrip(".")
            lines.append(f"- **{safe(alarm.type)}** ({alarm.level}, {self.state(alarm)}): {safe(first_sentence)}.")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return all incidents with their evidence as JSON, the first alarm of each first."""
        incidents = [_plain_incident(self.of(number)) for number in self.numbers]
        return json.dumps(incidents, indent=1, ensure_ascii=False) + "\n"


def run_note(cards: IncidentCards, record: Record | None, run: RunInfo) -> str:
    """Return the description of a run for its page in a backend, at most `MAX_NOTE_CHARACTERS` of Markdown.

    It has the verdict with the first incidents, the headline values of the last record, and the user's notes.
    """
    first = cards.numbers[:MAX_NOTE_INCIDENTS]
    sentence = cards.sentence() or "No outcome yet"
    # Backends cut the description after a few lines, so it is written without headings.
    parts = [f"**{safe(capitalized(sentence))}**"]
    keys = [] if record is None else [key for key in overview_keys(run) if key in record.values]
    if first:
        parts += [cards.incident(number, heading=False) for number in first]
    else:
        values = [
            f"{safe(described(key, run).name or key)} {_number(record.values[key])}"
            for key in keys[:MAX_QUIET_VALUES]
            if record is not None
        ]
        parts.append(f"{cards.quiet_text} {capitalized(', '.join(values))}".strip())
    if later := len(cards.numbers) - len(first):
        parts.append(f"{later} later incident{'s' * (later > 1)}: see the artifact or table of alarms.")
    if record is not None and keys:
        place = f"at update {record.axes.update:,}, step {record.axes.env_step:,}"
        rows = [
            f"| {safe(info.name or key)} {code(key)} | {_number(record.values[key])} | {safe(info.healthy)} |"
            for key in keys
            for info in [described(key, run)]
        ]
        parts.append("\n".join([f"| value | {place} | healthy |", "|---|---|---|", *rows]))
    text = "\n\n".join([*parts, *([run.notes] if run.notes else [])])
    return text if len(text) <= MAX_NOTE_CHARACTERS else text[:MAX_NOTE_CHARACTERS].rpartition("\n")[0]


def cause_of(alarms: Iterable[Alarm]) -> Alarm | None:
    """Return the raised alarm that the incident's latest event names as its cause, else the first raised one, or None."""
    events = list(alarms)
    raised = [alarm for alarm in events if alarm.event is AlarmEvent.RAISE]
    cause = events[-1].cause if events else ""
    return next((alarm for alarm in raised if alarm.type == cause), raised[0] if raised else None)


def alarm_text(alarm: Alarm) -> str:
    """Return the sentence of an alarm's event."""
    if alarm.event is AlarmEvent.CLEAR:
        return f"{end_text(alarm.axes.update)}, after {alarm.axes.update - alarm.since:,} updates"
    return " ".join(alarm.text.split()) or f"{alarm.key} = {_number(alarm.value)}"


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
            {**dict(zip(ALARM_COLUMNS, _row(alarm), strict=True)), "since": alarm.since, "evidence": dict(alarm.evidence)}
            for alarm in alarms
        ],
    }
