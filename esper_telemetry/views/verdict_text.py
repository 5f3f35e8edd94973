"""Texts about the outcome of a run: the verdict of `diagnose`, and the summary at the end of a training command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from statistics import fmean
from typing import Any, Final

from rich.table import Table

from esper_telemetry.alarms.detectors import GRADIENTS_ALONE, SYMPTOMS
from esper_telemetry.alarms.diagnosis import Diagnosis, IncidentReport, described_keys
from esper_telemetry.alarms.verdict.remarks import REMARK, is_setting
from esper_telemetry.alarms.verdict.run_outcome import OutcomeKind
from esper_telemetry.core.messages import capitalized, end_text, number
from esper_telemetry.core.record import RUN_FAILED, Record, template_of
from esper_telemetry.history.recent_return import RECENT_RETURN
from esper_telemetry.sinks.console import make_console
from esper_telemetry.sinks.end_block import RunEnd, print_lines
from esper_telemetry.views.document import Element, folded, h, items

MAX_REMEDIES: Final = 6
"""Suppliers of missing values that are named for an unexplained run; `--all` has all of them."""
NOTHING_UNUSUAL: Final = "No value whose usual range is known is unusual"
"""What is said of a bad outcome if neither an alarm nor a value explains it; imported runs have few such values."""
OUTCOME_VERBS: Final = {OutcomeKind.FLAT: "is flat", OutcomeKind.DECLINING: "declines", OutcomeKind.FAILED: "failed"}


def verdict_document(
    head: str, diagnosis: Diagnosis, ending: str = "", *, list_unanswered: bool = False
) -> Iterator[Element]:
    """Yield a verdict: the sentence of a bad ending, what the run does, its incidents, and what is open.

    Settings outside all published ranges come before incidents that may follow from them.

    Args:
        head: name and length of the run.
        diagnosis: the verdict.
        ending: the sentence of a bad ending, or nothing.
        list_unanswered: also list the questions that could not be answered.
    """
    yield h("p", head)
    if ending:  # this is the sentence of a failed run
        yield h("p", ending, css="bad")
    if not diagnosis.updates:
        yield h("p", "The journal has no records yet.", css="note")
    else:
        yield h("p", checks(diagnosis)) if ending else h("p", capitalized(diagnosis.summary), css=diagnosis.tone)
    notes = (
        [] if diagnosis.shows_remarks else [data for kind, data in diagnosis.events if kind == REMARK]
    )  # else the findings have them
    causes = [data for data in notes if is_setting(data.get("name", ""))]
    if any(incident.cause in diagnosis.certain for incident in diagnosis.incidents):
        causes = []
    yield from _remarks(causes)
    for incident in diagnosis.incidents:
        if not (ending and incident.cause == RUN_FAILED):
            note = " (a symptom; its cause is unknown)" if is_symptom_alone(diagnosis, incident) else ""
            states = ", ".join(f"{kind} ({end_text(end)})" for kind, end in incident.ends().items())
            yield h(
                "article",
                h("h3", f"incident {incident.number}, update {incident.since}: {incident.cause}{note}"),
                h("p", incident.main.text),
                h("p", f"Alarms: {states}", css="dim"),
                css=incident.main.level,
            )
    yield from findings(diagnosis)
    yield from _remarks(
        data for kind, data in diagnosis.events if (kind != REMARK or data in notes) and data not in causes
    )
    if diagnosis.unanswered:
        count = len(diagnosis.unanswered)
        questions = f"{count} question{'' if count == 1 else 's'} could not be answered"
        groups = unanswered_by_reason(diagnosis).items()
        lines = (
            f"{', '.join(kinds)}: {reason}" + (f"; supplied by {remedy}" if remedy else "")
            for (reason, remedy), kinds in groups
        )
        yield h("br")
        yield (
            folded(questions, items(lines))
            if list_unanswered
            else h("p", f"{questions}, as values were not reported; --all lists them.")
        )


def _remarks(remarks: Iterable[Mapping[str, Any]]) -> Iterator[Element]:
    return (h("p", f"update {data['update']}: {data['text']}") for data in remarks)


def checks(diagnosis: Diagnosis) -> str:
    """Return the sentence on how many checks passed."""
    return capitalized(diagnosis.summary.rpartition("; ")[2])


def findings(diagnosis: Diagnosis) -> Iterator[Element]:
    """Yield the values beyond their critical bounds, and possible explanations of a run that no alarm explains."""
    if diagnosis.gradients_alone:
        yield h("p", f"{GRADIENTS_ALONE}.", css="note")
    if diagnosis.critical:
        count, described = len(diagnosis.critical), described_keys()
        lines = []
        for key, value in diagnosis.critical.items():
            info = described.get(template_of(key, described))
            lines.append(f"{key}: {number(value)}" + (f" (critical: {info.critical})" if info else ""))
        bounds = "its critical bound" if count == 1 else "their critical bounds"
        yield folded(f"Beyond {bounds} lately ({count} value{'s'[: count > 1]})", items(lines), is_open=True)
    if diagnosis.shows_remarks:
        yield from _unexplained(diagnosis)


def _unexplained(diagnosis: Diagnosis) -> Iterator[Element]:
    """Yield possible explanations of a run that failed, is flat or declines: remarks, unusual values, and inputs that were not measured."""
    is_open, verb = diagnosis.unexplained, OUTCOME_VERBS[diagnosis.outcome.kind]
    if diagnosis.unexplained:
        effects = diagnosis.effects & {alarm.type for incident in diagnosis.incidents for alarm in incident.alarms}
        alarms = "its alarms show how but not why" if effects else "no alarm explains it"
        yield h("p", f"Unexplained: the run {verb}, and {alarms}.")
    else:
        yield h("p", f"The run {verb}, and its alarms were over before its end.")
    if diagnosis.remarks:
        remarks = (f"update {data['update']}: {data['text']}" for data in diagnosis.shown_remarks)
        yield folded("What may explain it", items(remarks), is_open=is_open)
    if diagnosis.unusual:
        values = (f"{entry.key}: {entry.text}" for entry in diagnosis.unusual)
        count = len(diagnosis.unusual)
        title = f"Most unusual ({count} value{'s'[: count > 1]}, medians over the run)"
        yield folded(title, items(values), is_open=is_open)
    if diagnosis.unexplained and not diagnosis.remarks and not any(entry.is_far for entry in diagnosis.unusual):
        known = "Each of these values occurs in some healthy runs" if diagnosis.unusual else NOTHING_UNUSUAL
        yield h("p", f"{known}: the task may be too hard for this policy, or it may need more steps.")
    suppliers, lines = Counter(diagnosis.remedies.values()), []
    for remedy, count in suppliers.most_common(MAX_REMEDIES):
        kinds = [kind for kind, supplier in diagnosis.remedies.items() if supplier == remedy]
        lines.append(f"{remedy}: {', '.join(kinds[:3])}" + (f" and {count - 3} more" if count > 3 else ""))
    if lines:
        yield folded("Not measured, and how to measure it", items(lines), is_open=is_open)


def unanswered_by_reason(diagnosis: Diagnosis) -> dict[tuple[str, str], list[str]]:
    """Return the types of alarm that cannot be raised, by reason and by what supplies what they lack."""
    alarms_by_reason: dict[tuple[str, str], list[str]] = {}
    for kind, reason in diagnosis.unanswered.items():
        alarms_by_reason.setdefault((reason, diagnosis.remedies.get(kind, "")), []).append(kind)
    return alarms_by_reason


def is_symptom_alone(diagnosis: Diagnosis, incident: IncidentReport) -> bool:
    """Return whether only gradients and optimizer steps show the incident: they name no cause."""
    return diagnosis.gradients_alone and incident.cause.startswith(SYMPTOMS)


SHARE: Final = "perf/telemetry_frac"
"""Shown as the mean of the run: an update that is sampled in full takes many times what others take."""
SUMMARY_LINES: Final[Mapping[str, tuple[str, str]]] = {
    RECENT_RETURN: ("return, last 100 episodes (or all)", ".1f"),
    "policy/kl": ("policy moved per update (KL)", ".3g"),
    "policy/clip_frac": ("ratios clipped", ".1%"),
    "policy/entropy_norm": ("exploration left (entropy)", ".0%"),
    "value/explained_variance": ("returns explained by the critic", ".0%"),
    "grad/global/norm_preclip": ("gradient norm before clipping", ".3g"),
    "train/env_steps_per_second": ("steps per second", ",.0f"),
    SHARE: ("telemetry's share of the time", ".1%"),
}
"""Label and format of the last value of each key in the summary."""
CONSTANT_RETURNS = 0.01
"""Standard deviation of the returns, as a share of their mean, below which no variance is left for the critic to explain."""


class Summary:
    """Keeps the last record of a run, and prints the end of a training command: its last values and the block about the whole run."""

    def __init__(self) -> None:
        self._last: Record | None = None
        self._shares: list[float] = []

    def observe(self, record: Record) -> None:
        """Keep a record; called as a sink."""
        self._last = record
        self._shares += [record.values[SHARE]] if SHARE in record.values else []

    def show(self, end: RunEnd) -> None:
        """Print the exception that ended the run or what it did, its incidents, its last values, and what opens it."""
        console = make_console(markup=False, highlight=False, soft_wrap=True)
        print_lines(console, end.verdict())
        if self._last is not None:
            axes, values = self._last.axes, dict(self._last.values)
            if self._shares:
                values[SHARE] = fmean(self._shares)
            table = Table("what telemetry saw last", "", header_style="bold")
            table.add_row("environment steps", f"{axes.env_step:,}")
            table.add_row("updates", f"{axes.update:,}")
            spread = values.get("ret/std", inf) / (abs(values.get("ret/mean", 0.0)) or inf)
            for key, (label, style) in SUMMARY_LINES.items():
                if key == "value/explained_variance" and spread < CONSTANT_RETURNS:
                    table.add_row(label, f"undefined: returns vary by {spread:.1%}")
                elif key in values:
                    table.add_row(label, format(values[key], style))
            console.print(table)
        print_lines(console, end.openings())
