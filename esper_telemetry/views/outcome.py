"""Texts about the outcome of a run: the verdict of `diagnose`, and the summary at the end of a training command."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from esper_telemetry.alarms.detectors import GRADIENTS_ALONE, SYMPTOMS
from esper_telemetry.alarms.diagnosis import Diagnosis, IncidentReport
from esper_telemetry.alarms.verdict.outcome import BAD, GOOD, OutcomeKind
from esper_telemetry.core.record import RUN_FAILED, AlarmLevel, Record, RunInfo
from esper_telemetry.journal.lines import encode_alarm, plain
from esper_telemetry.journal.read import alarms, last_outcome
from esper_telemetry.sinks.console import OUTCOME_COLOURS, ConsoleSink, make_console
from esper_telemetry.sinks.pages import REPORT_NAME, IncidentCards, alarm_text, cause_of
from esper_telemetry.sinks.protocol import Place, Sink, SupportsPlace

PIPED_WIDTH: Final = 120
"""Columns of the text in a pipe or a file, unless COLUMNS says how many."""
MAX_INCIDENTS: Final = 5
"""Incidents in the summary: the first ones, which tend to cause the others; the journal and `diagnose` have all."""

MAX_REMEDIES: Final = 6
"""Suppliers of missing values that are named for an unexplained run; `--all` has all of them."""
OUTCOME_VERBS: Final = {OutcomeKind.FLAT: "is flat", OutcomeKind.DECLINING: "declines", OutcomeKind.FAILED: "failed"}

COLOURS: Final = {AlarmLevel.CRITICAL: "red", AlarmLevel.WARN: "yellow", AlarmLevel.INFO: "cyan"}
PANEL_COLOURS: Final = {**COLOURS, AlarmLevel.INFO: "blue"}


def print_diagnosis(head: str, diagnosis: Diagnosis, ending: str = "", *, list_unanswered: bool = False) -> None:
    """Print a verdict: the sentence of a bad ending, what the run does, its incidents, and what is open.

    Args:
        head: name and length of the run.
        diagnosis: the verdict.
        ending: the sentence of a bad ending, or nothing.
        list_unanswered: also list the questions that could not be answered.
    """
    console = make_console(piped_width=PIPED_WIDTH, markup=False, highlight=False)
    console.print(head)
    if ending:
        console.print(Text(ending, style="bold red"))
    if not diagnosis.updates:
        console.print(Text("The journal has no records yet.", style="yellow"))
    elif ending:  # the sentence of a failed run is the ending, which stands above
        console.print(Text(capitalized(diagnosis.summary.rpartition("; ")[2])))
    else:
        console.print(Text(capitalized(diagnosis.summary), style=_colour(diagnosis)))
    for incident in diagnosis.incidents:
        if not (ending and incident.cause == RUN_FAILED):
            console.print(_panel(incident, is_symptom=_is_symptom_alone(diagnosis, incident)))
    if diagnosis.gradients_alone:
        console.print(Text(f"{GRADIENTS_ALONE}.", style="yellow"))
    if diagnosis.updates and diagnosis.outcome.kind in BAD and not diagnosis.has_lasting_explanation:
        for text in unexplained_lines(diagnosis):
            console.print(text)
    for _, data in diagnosis.events:
        console.print(f"update {data['update']}: {data['text']}")
    if diagnosis.unanswered:
        for text in unanswered_lines(diagnosis, each=list_unanswered):
            console.print(text)


def capitalized(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def _colour(diagnosis: Diagnosis) -> str:
    if diagnosis.outcome.kind in BAD:
        return "bold yellow"
    return "green" if diagnosis.outcome.kind in GOOD and not diagnosis.incidents else "default"


def unexplained_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield what is known of a run that failed, is flat or declines without an alarm: what is unusual, and what was not measured."""
    if diagnosis.unexplained:
        yield f"Unexplained: the run {OUTCOME_VERBS[diagnosis.outcome.kind]}, and no alarm says why."
    else:
        yield f"The run {OUTCOME_VERBS[diagnosis.outcome.kind]}, and the alarms above were over before its end."
    if diagnosis.unusual:
        yield f"Most unusual ({len(diagnosis.unusual)} values, medians over the run):"
        for entry in diagnosis.unusual:
            yield f"  {entry.key}: {entry.text}"
    if not any(entry.is_far for entry in diagnosis.unusual):
        yield "No value is far outside the range of healthy runs: the task may be too hard for this policy, or need more steps."
    suppliers = Counter(diagnosis.remedies.values())
    if suppliers:
        yield "Not measured, and what measures it:"
        for remedy, count in suppliers.most_common(MAX_REMEDIES):
            kinds = [kind for kind, supplier in diagnosis.remedies.items() if supplier == remedy]
            named = ", ".join(kinds[:3]) + (f" and {count - 3} more" if count > 3 else "")
            yield f"  {remedy}: {named}"


def unanswered_lines(diagnosis: Diagnosis, *, each: bool) -> Iterator[str]:
    """Yield one line with the number of questions that could not be answered, and all of them with `each`."""
    count = len(diagnosis.unanswered)
    questions = f"{count} question{'' if count == 1 else 's'} could not be answered"
    if not each:
        yield f"\n{questions}, as values were not reported; --all lists them."
        return
    yield f"\n{capitalized(questions)}:"
    for (reason, remedy), kinds in unanswered_by_reason(diagnosis).items():
        yield f"  {', '.join(kinds)}: {reason}" + (f"; supplied by {remedy}" if remedy else "")


def unanswered_by_reason(diagnosis: Diagnosis) -> dict[tuple[str, str], list[str]]:
    """Return the types of alarm that cannot be raised, by reason and by what supplies what they lack."""
    alarms_by_reason: dict[tuple[str, str], list[str]] = {}
    for kind, reason in diagnosis.unanswered.items():
        alarms_by_reason.setdefault((reason, diagnosis.remedies.get(kind, "")), []).append(kind)
    return alarms_by_reason


def diagnosis_as_dict(head: Mapping[str, Any], diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a verdict as plain values, after those of `head`."""
    return {
        **head,
        "outcome": diagnosis.outcome.data(),
        "summary": diagnosis.summary,
        "checks": diagnosis.checks,
        "incidents": [
            {
                "incident": incident.number,
                "cause": None if _is_symptom_alone(diagnosis, incident) else incident.cause,
                "since": incident.since,
                "text": incident.main.text,
                "standing": incident.ends(),
                "alarms": [encode_alarm(alarm) for alarm in incident.alarms],
            }
            for incident in diagnosis.incidents
        ],
        "events": [{"type": kind, **plain(data)} for kind, data in diagnosis.events],
        "unanswered": dict(diagnosis.unanswered),
        "remedies": dict(diagnosis.remedies),
        "unexplained": diagnosis.unexplained,
        "unusual": [entry._asdict() for entry in diagnosis.unusual],
        "gradients_alone": diagnosis.gradients_alone,
    }


def _is_symptom_alone(diagnosis: Diagnosis, incident: IncidentReport) -> bool:
    """Return whether only gradients and optimizer steps show the incident: they name no cause."""
    return diagnosis.gradients_alone and incident.cause.startswith(SYMPTOMS)


def _panel(incident: IncidentReport, *, is_symptom: bool) -> Panel:
    """Return one incident: its cause in words, and the alarms that came with it."""
    text = Text(incident.main.text)
    states = {kind: "still on" if end is None else f"over at {end}" for kind, end in incident.ends().items()}
    text.append(f"\n\nAlarms: {', '.join(f'{kind} ({state})' for kind, state in states.items())}", style="dim")
    note = " (a symptom; cause not known)" if is_symptom else ""
    title = f"incident {incident.number}, update {incident.since}: {incident.cause}{note}"
    return Panel(text, title=title, title_align="left", border_style=PANEL_COLOURS[incident.main.level])


class SummaryLine(NamedTuple):
    """A row of the summary: a label, a key and the format of its last value."""

    label: str
    key: str
    style: str = ".3g"


SUMMARY_LINES: Final = (
    SummaryLine("return, last 100 episodes", "episode/return_mean_100", ".1f"),
    SummaryLine("policy moved per update (KL)", "policy/kl"),
    SummaryLine("ratios clipped", "policy/clip_frac", ".1%"),
    SummaryLine("exploration left (entropy)", "policy/entropy_norm", ".0%"),
    SummaryLine("returns explained by the critic", "value/explained_variance", ".0%"),
    SummaryLine("gradient norm before clipping", "grad/global/norm_preclip"),
    SummaryLine("steps per second", "train/env_steps_per_second", ",.0f"),
    SummaryLine("telemetry's share of the time", "perf/telemetry_frac", ".1%"),
)


class Summary:
    """Keeps the last record of a run, and prints at its end what was reached, what went wrong, and where each backend wrote."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._last: Record | None = None

    def observe(self, record: Record) -> None:
        """Keep a record; called as a sink."""
        self._last = record

    def show(self, run_dir: Path | None, run: RunInfo | None) -> None:
        """Print the exception that ended the run or what it did, its last values, its incidents, and each backend's place and command.

        Args:
            run_dir: of the run, if it has one.
            run: its description; None where this process did not record it.
        """
        console = make_console(markup=False, highlight=False, soft_wrap=True)
        incidents = IncidentCards(list(alarms(run_dir)) if run_dir is not None and run is not None else [])
        if incidents.failure:
            console.print(incidents.failure, style="bold red")
        outcome = last_outcome(run_dir) if run_dir is not None and run is not None else None
        if outcome is not None and not incidents.failure:
            kind, text = str(outcome.data.get("outcome", "")), str(outcome.data.get("text", ""))
            console.print(capitalized(text), style=OUTCOME_COLOURS.get(kind, "cyan"))
        if self._last is not None:
            axes, values = self._last.axes, self._last.values
            table = Table("what telemetry saw last", "", header_style="bold")
            table.add_row("environment steps", f"{axes.env_step:,}")
            table.add_row("updates", f"{axes.update:,}")
            for line in SUMMARY_LINES:
                if line.key in values:
                    table.add_row(line.label, format(values[line.key], line.style))
            console.print(table)
        if run_dir is not None:
            _print_incidents(console, incidents, run_dir)
        for name, place in self._places(run):
            console.print(f"{name:<12} {place.where}")
            if place.command:
                console.print(f"{'':<12} $ {place.command}", style="bold")

    def _places(self, run: RunInfo | None) -> Iterator[tuple[str, Place]]:
        if run is None or run.run_dir is None:
            return
        yield "journal", Place(str(run.run_dir / "journal.jsonl"), "")
        if (run.run_dir / REPORT_NAME).is_file():
            yield "report", Place(str(run.run_dir / REPORT_NAME), "")
        for sink in self._sinks:
            if isinstance(sink, SupportsPlace) and not isinstance(sink, ConsoleSink):
                yield type(sink).__name__.removesuffix("Sink").replace("Wandb", "W&B"), sink.place(run)


def _print_incidents(console: Console, cards: IncidentCards, run_dir: Path) -> None:
    """Print the first incidents, each with its cause, its state and the other alarms; nothing if no alarm was raised."""
    numbers = sorted({alarm.incident for alarm in cards.raised})
    if not numbers:
        return
    console.print("what went wrong", style="bold")
    for number in numbers[:MAX_INCIDENTS]:
        cause = cause_of(cards.of(number))
        if cause is None or cause.type == RUN_FAILED:  # printed above
            continue
        is_active = any(alarm.incident == number for alarm in cards.active.values())
        state = "still so at the end" if is_active else "over"
        console.print(f"  {cause.type}, since update {cause.since:,}, {state}", style=COLOURS[cause.level])
        console.print(f"    {alarm_text(cause)}")
        others = sorted({alarm.type for alarm in cards.of(number)} - {cause.type})
        if others:
            console.print(f"    with it came {', '.join(others)}")
    if len(numbers) > MAX_INCIDENTS:
        console.print(f"  and {len(numbers) - MAX_INCIDENTS} later incidents")
    console.print(f"{'':<12} $ {shlex.join(['esper-telemetry', 'diagnose', str(run_dir)])}", style="bold")
