"""`esper-telemetry report`: a run, or several, as one HTML file that works offline, or as Markdown for the summary of a CI job."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from esper_telemetry.alarms.verdict.bounds import Tone
from esper_telemetry.alarms.verdict.run_outcome import NAMES
from esper_telemetry.core.files import read_json, replace_file
from esper_telemetry.core.messages import capitalized, end_text
from esper_telemetry.core.record import RUN_FAILED
from esper_telemetry.core.redaction import redacted
from esper_telemetry.history.recent_return import RECENT_RETURN, UPDATE_RETURN
from esper_telemetry.sinks.layout import flattened
from esper_telemetry.sinks.pages import REPORT_NAME
from esper_telemetry.views.compare import comparison
from esper_telemetry.views.compare.compared_runs import read_compared
from esper_telemetry.views.compare.comparison_page import comparison_section
from esper_telemetry.views.document import Element, folded, h, items, scroll_card, table, text_lines, to_html, to_markdown
from esper_telemetry.views.equation_table import STATE_CLASSES, EquationRow, by_reason
from esper_telemetry.views.report_charts import TIMELINE_POINTS, WARN_SEVERITY, GradientFlow, ReportCharts, gradient_flow, html_page
from esper_telemetry.views.run_parts import ChartView, IncidentView, duration, number_text
from esper_telemetry.views.run_view import RunView, open_view
from esper_telemetry.views.verdict_text import checks, findings, unanswered_by_reason

MAX_INCIDENTS: Final = 20
"""Incidents that are shown in full; the first ones tend to cause the others."""
MAX_INCIDENT_CHARTS: Final = 4
MAX_EVIDENCE_ROWS: Final = 30
FLOW_ROW_PIXELS: Final = 18
FLOW_MARGIN_PIXELS: Final = 90
MAX_TEXT_CHARACTERS: Final = 400
"""Characters of a setting."""

_logger = logging.getLogger("esper_telemetry")

JUDGEMENT_WORDS: Final[Mapping[str, str]] = {
    "outside": "outside its healthy range",
    "warn": "beyond its warning bound",
    "critical": "beyond its critical bound",
}


def report_html(views: Sequence[RunView]) -> str:
    """Return the page of one run or of several; raises ModuleNotFoundError without plotly."""
    charts = ReportCharts()
    title = ", ".join(view.name for view in views)
    return html_page(f"{title} · esper_telemetry", to_html(_page(views, charts)), charts)


def write_run_report(run_dir: Path) -> None:
    """Write the page of a run into its directory; what fails costs a warning, as training continues after it."""
    try:
        replace_file(run_dir / REPORT_NAME, report_html([open_view(run_dir, judged=True)]))
    except (Exception, SystemExit) as error:  # an installed plugin's code among others
        _logger.warning("esper-telemetry: could not write %s of %s: %s", REPORT_NAME, run_dir, error)


def _page(views: Sequence[RunView], charts: ReportCharts) -> Iterator[Any]:
    """Yield the parts of the page; its charts are added in this order."""
    runs = [_RunSections(view, charts) for view in views]
    if len(runs) == 1:
        yield runs[0].all()
    else:
        yield h("h1", f"{len(runs)} runs")
        yield _several(runs, charts)
        yield _comparison(views, charts)
        for number, run in enumerate(runs, 1):
            yield h("section", run.all(), css="run", id=f"run-{number}")
    written = f"Written {time.strftime('%Y-%m-%d %H:%M')} by esper_telemetry."
    yield h("footer", f"{written} This page needs no network and sends nothing.", css="dim")


def _several(runs: Sequence[_RunSections], charts: ReportCharts) -> Iterator[Element]:
    """Yield the table of all runs and their curves in one chart for each key that decides."""
    rows = []
    for number, run in enumerate(runs, 1):
        view, incidents = run.view, run.incidents
        rows.append(
            (
                h("a", view.name, href=f"#run-{number}"),
                h("span", str(view.outcome.kind), css=_style(view)),
                return_text(view),
                f"{view.axes.env_step if view.axes else 0:,}",
                str(len(incidents)),
                ", ".join(dict.fromkeys(incident.cause for incident in incidents[:3])),
            )
        )
    yield scroll_card(table(("run", "outcome", "return", "environment steps", "incidents", "causes"), rows))
    references = [
        charts.line(run.place, key, run.view.series(key), run.view.name, TIMELINE_POINTS)
        for run in runs
        if (key := return_key(run.view)) in run.view.last
    ]
    if references:
        yield h("h2", "Return over environment steps")
        yield h("div", _plot(charts.overlay(references), "tall"), css="card")


def _comparison(views: Sequence[RunView], charts: ReportCharts) -> Iterator[Element]:
    """Yield what differs between the runs that have a journal."""
    places = [str(view.run_dir) for view in views if view.run_dir is not None and view.updates]
    if len(places) < 2:
        return
    yield h("h2", "Comparison")
    try:
        yield comparison_section(comparison([read_compared(place) for place in places]), charts)
    except ImportError as error:  # without SciPy
        yield h("p", str(error), css="dim")


class _RunSections:
    """The sections of one run, whose charts are added to the page's; `marks` are the environment steps at which its incidents began."""

    def __init__(self, view: RunView, charts: ReportCharts) -> None:
        self.view, self.charts, self.incidents = view, charts, view.incidents
        self.place = charts.add_run(view.axes.env_step if view.axes else 0)
        self.marks = [view.step_of(incident.since) for incident in self.incidents]

    def all(self) -> Iterator[Any]:
        """Yield all sections, in the order in which charts must be added."""
        yield h("h1", self.view.name)
        yield self._head()
        yield self._timeline()
        if self.incidents:
            yield h("h2", "What went wrong")
            yield map(self._incident, self.incidents[:MAX_INCIDENTS])
        if (more := len(self.incidents) - MAX_INCIDENTS) > 0:
            yield h("p", f"And {more} later incidents, which esper-telemetry diagnose lists.")
        for panel in self.view.panels():
            yield h("h2", panel.question)
            yield h("div", (self._chart(chart, self.marks) for chart in panel.charts), css="grid")
        for shown in self.view.tables():
            rows = [[str(cell.text) for cell in row] for row in (*shown.rows, shown.footer) if row]
            yield h("h2", shown.title), scroll_card(table(shown.columns, rows))
        yield [h("p", problem) for problem in self.view.problems]
        if (flow := gradient_flow(self.view)) is not None:
            yield self._gradient_flow(flow)
        yield _equations(self.view.equations())
        yield self._unanswered()
        yield self._provenance()

    def _head(self) -> Iterator[Element]:
        """Yield the outcome, why, and the position of the run."""
        diagnosis, style, incidents = self.view.diagnosis, _style(self.view), self.incidents
        first = next((one for one in incidents if one.cause != RUN_FAILED), incidents[0] if incidents else None)
        more = f"{len(incidents)} incidents, of which this is the first. " if len(incidents) > 1 else ""
        yield h(
            "div",
            h("p", _outcome(self.view), css=f"outcome {style}"),
            None if first is None else _sentences(first)[first.cause == RUN_FAILED :],  # whose sentence is the outcome
            h("p", f"{more}{checks(diagnosis)}", css="dim"),
            findings(diagnosis, by_reason(self.view.equations(), "untraced") if diagnosis.shows_remarks else {}),
            css=f"card banner {style}",
        )
        facts = position(self.view).items()
        yield h("dl", (h("div", h("dt", name), h("dd", value)) for name, value in facts), css="facts")
        if diagnosis.events:
            course = (f"update {data['update']}: {data['text']}" for _, data in diagnosis.events)
            yield folded("Course of the task", items(course))

    def _timeline(self) -> Iterator[Element]:
        curve = return_key(self.view)
        if not curve:
            return
        also, legend = "", ""
        if self.incidents:
            also = " and incidents"
            legend = " Each bar is an incident, from its cause to its end; dotted lines show the start of an incident."
        yield h("h2", capitalized(NAMES.get(curve, curve)) + also)
        plot = _plot(self.charts.timeline(self.place, self.view, curve, self.incidents), "tall")
        yield h("div", plot, h("p", f"Over {self.view.x_label}.{legend}", css="dim"), css="card")

    def _incident(self, incident: IncidentView) -> Element:
        charts = [chart for key in incident.keys if (chart := self.view.chart(key)) is not None]
        around = [chart for chart in charts if len(chart.lines[0].series.values) > 1][:MAX_INCIDENT_CHARTS]
        others = [f"{kind}: {end_text(end)}" for kind, end in incident.ends.items() if kind != incident.cause]
        count = f"{len(others)} more alarm{'s' if len(others) > 1 else ''} came with it"
        grid = [self._chart(chart, [self.view.step_of(incident.since)], css="") for chart in around]
        return h(
            "article",
            h("div", h("h3", f"{incident.number}. {incident.cause}"), h("span", incident.level, css=f"badge {incident.level}"), css="head"),
            h("p", incident.state, css="dim"),
            _sentences(incident),
            h("div", grid, css="grid") if grid else None,
            folded(count, items(others)) if others else None,
            folded("Evidence", _evidence(incident)) if incident.evidence or incident.lists else None,
            css=f"card incident {incident.level}",
        )

    def _gradient_flow(self, flow: GradientFlow) -> Iterator[Element]:
        """Yield the picture of the gradients of single layers."""
        height = FLOW_MARGIN_PIXELS + FLOW_ROW_PIXELS * (len(flow.layers) + any(flow.nonfinite))
        worst = f"No layer exploded or vanished (severity above {WARN_SEVERITY})."
        if flow.worst is not None:
            layer, column = flow.worst
            severity, did = float(layer.severity[column]), "exploded" if layer.severity[column] > 0 else "vanished"
            worst = f"Worst: {layer.layer} {did} with severity {abs(severity):.2f} at update {flow.updates[column]:,}."
        hidden = f" {flow.hidden} healthier layers are left out." if flow.hidden else ""
        legend = (
            f"{worst} One row per parameter tensor, from the inputs of the network to its outputs, over "
            f"{self.view.x_label}; a gap is an update without a finite gradient. Wide screens also show the norm of the last gradient "
            f"(dot) and its range in this run.{hidden}"
        )
        plot = _plot(self.charts.flow(self.place, flow, self.marks), style=f"height:{height}px", data_height=f"{height}")
        yield h("h2", "Where do gradients explode or vanish?")
        yield h("div", plot, h("p", legend, css="dim"), css="card")

    def _chart(self, chart: ChartView, marks: Sequence[float], css: str = "card") -> Element:
        line, info = chart.lines[0], chart.info
        values = [one.value for one in (chart.lines if chart.stacked else chart.lines[:1]) if one.value is not None]
        state, judged = JUDGEMENT_WORDS.get(line.judgement, ""), line.judgement or "plain"
        since = f" since update {line.since:,}" if state and line.since else ""
        notes = (
            "" if chart.unit.lower() in chart.title.lower() else chart.unit,
            f"healthy {info.healthy}" if info and info.healthy else "",
            f"{chart.hidden} more in the journal" if chart.hidden else "",
        )
        value = h("b", number_text(sum(values)) if values else "", css=judged)
        judgement = (h("br"), h("span", state + since, css=judged)) if state else None
        return h(
            "div",
            h("div", h("h3", chart.title), value, css="head"),
            h("p", "; ".join(filter(None, notes)), judgement, css="dim"),
            _plot(self.charts.chart(self.place, chart, marks)),
            css=css,
            title=chart.question,
        )

    def _unanswered(self) -> Iterator[Element]:
        groups = unanswered_by_reason(self.view.diagnosis)
        yield h("h2", "What could not be answered")
        if not groups:
            yield h("p", "Every question that applies to this run was answered.")
            return
        rows = [(", ".join(kinds), reason, remedy) for (reason, remedy), kinds in groups.items()]
        count = sum(map(len, groups.values()))
        answers = scroll_card(table(("alarm", "reason", "supplied by"), rows))
        yield folded(f"{count} question{'' if count == 1 else 's'}", answers)

    def _provenance(self) -> Iterator[Element]:
        view, outside = self.view, self.view.outside_settings()
        yield h("h2", "Settings")
        if outside:
            yield h("p", "Outside of all published settings:")
            yield items(capitalized(setting.text) for setting in outside)
        if command := command_of(view):
            yield h("p", "Command: ", h("code", command))
        sections: Mapping[str, Mapping[str, Any]] = {
            "Configuration": flattened(redacted(view.info.config)),
            "Facts": flattened(view.info.facts),
            "Versions": view.info.versions,
            "Read as": view.used,
            "Tags that were not read": dict.fromkeys(view.unused, ""),
        }
        for title, rows in sections.items():
            if rows:
                cells = [(h("code", name), str(value)[:MAX_TEXT_CHARACTERS]) for name, value in rows.items()]
                yield folded(title, scroll_card(table((), cells)))
        if view.info.notes:
            yield h("p", view.info.notes)
        journal = "" if view.run_dir is None else f"; every number is in {view.run_dir}/journal.jsonl"
        yield h("p", f"Run {view.info.run_id}, read from {view.source}{journal}.", css="dim")


def _plot(chart: str, css: str = "", **attributes: str) -> Element:
    return h("div", css=f"plot {css}".strip(), data_chart=chart, **attributes)


def _outcome(view: RunView) -> str:
    return capitalized(view.ending or view.diagnosis.outcome.text)


def _sentences(incident: IncidentView) -> list[Element]:
    """Return what happened, and what to try."""
    advice = [h("p", h("b", "Try:"), f" {incident.advice}", css="advice")] if incident.advice else []
    return [h("p", incident.text), *advice]


def _evidence(incident: IncidentView) -> Iterator[Element]:
    """Yield the table of single values, and one for each list of minibatches, layers or rows."""
    cells: list[list[Any]] = [
        [
            (h("code", row.key), h("br"), h("span", row.name, css="dim")),
            h("span", row.value, css=row.judgement or "plain"),
            row.usual,
            row.healthy,
        ]
        for row in incident.evidence[:MAX_EVIDENCE_ROWS]
    ]
    yield h("div", table(("value", "in this update", "usual in this run", "healthy"), cells), css="scroll")
    for name, evidence in incident.lists.items():
        columns = list(dict.fromkeys(column for item in evidence for column in flattened(item)))
        shown = [flattened(item) for item in evidence[:MAX_EVIDENCE_ROWS]]
        more = f" ({MAX_EVIDENCE_ROWS} of {len(evidence)})" if len(evidence) > MAX_EVIDENCE_ROWS else ""
        yield h("h4", f"{capitalized(name)}{more}")
        cells = [[number_text(item.get(column, "")) for column in columns] for item in shown]
        yield h("div", table(columns, cells), css="scroll")


def _equations(rows: Sequence[EquationRow]) -> Iterator[Element]:
    yield h("h2", "Equations checked")
    cells: list[tuple[Any, ...]] = []
    for row in rows:
        equation = row.equation
        if row.reason:
            continue
        quantity = (capitalized(equation.quantity), h("br"), h("code", equation.equation, css="dim"))
        advice = (h("br"), row.advice) if row.state == "differs" else None
        since = f", differs since update {row.since:,}" if row.since else ""
        error = "" if row.error is None else row.equation.size(row.error)
        result = (h("span", row.result, css=STATE_CLASSES[row.state]), advice)
        cells.append((quantity, result, error, f"{row.updates:,}{since}"))
    if cells:
        yield scroll_card(table(("quantity and reference", "result", "largest error", "updates"), cells))
    else:
        yield h("p", "None of them could be checked.")
    for reason, quantities in by_reason(rows, "untraced").items():
        yield h("p", f"Not traced: {', '.join(quantities)}: {reason}")
    if unchecked := by_reason(rows, "unchecked"):
        reasons = (f"{', '.join(quantities)}: {reason}" for reason, quantities in unchecked.items())
        yield folded("Equations that could not be checked", items(reasons))


def position(view: RunView) -> dict[str, str]:
    """Return status, position, duration and speed of a run in words, without what is not known."""
    progress, curve, started = view.progress(), return_key(view), view.info.started
    done = "" if progress.fraction is None else f" of {progress.total_steps:,} ({progress.fraction:.0%})"
    seconds = view.axes.wall_time - started if view.axes and started else 0.0
    rows = {
        "status": "logs" if view.run_dir is None else str(view.status or "under way"),
        NAMES.get(curve, curve): return_text(view),
        "updates": f"{view.updates:,}",
        view.x_label: f"{progress.env_step:,}{done}",
        "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(started)) if started else "",
        "duration": duration(seconds) if seconds > 0 else "",
        "steps per second": f"{progress.steps_per_second:,.0f}" if progress.steps_per_second else "",
        "time of an update": ", ".join(f"{name} {share:.0%}" for name, share in progress.time_split.items()),
        "trainer": view.facts.trainer or "",
    }
    return {name: value for name, value in rows.items() if value}


def return_key(view: RunView) -> str:
    """Return the key of the curve that decided the outcome, which is the return if there are returns."""
    decided = view.outcome.key
    decided = RECENT_RETURN if decided == UPDATE_RETURN else decided
    candidates = (decided, RECENT_RETURN, UPDATE_RETURN, "reward/mean")
    return next((key for key in candidates if key in view.last), "")


def return_text(view: RunView) -> str:
    """Return the last level of the curve that decided the outcome; empty without any."""
    level = view.outcome.last
    level = view.last.get(return_key(view)) if level is None else level
    return "" if level is None else number_text(level)


def command_of(view: RunView) -> str:
    """Return the command that made the run, as its config.json has it; empty if the file does not name one."""
    if view.run_dir is None:
        return ""
    try:
        command = read_json(view.run_dir / "config.json").get("command", ())
    except (OSError, ValueError, AttributeError):
        return ""
    return " ".join(map(str, command)) if isinstance(command, list) else ""


def report_markdown(views: Sequence[RunView]) -> str:
    """Return the verdict on each run for the summary of a CI job."""
    return to_markdown(map(_summary, views))


def _summary(view: RunView) -> Iterator[Element]:
    mark = {"good": "✅", "bad": "❌", "warn": "⚠️"}.get(_style(view), "❔")
    yield h("h2", f"{mark} {view.name}")
    yield h("p", h("b", _outcome(view)))
    yield h("p", checks(view.diagnosis))
    where = {name: value for name, value in position(view).items() if name != "time of an update"}
    yield table(list(where), [list(where.values())])
    for one in view.incidents[:MAX_INCIDENTS]:
        yield h("h3", f"{one.number}. {one.cause} ({one.level}, {one.state})")
        yield from _sentences(one)
    if lines := list(text_lines(findings(view.diagnosis))):
        yield items(lines)
    differing = [row for row in view.equations() if row.state == "differs"]
    equations = [f"{row.equation.quantity}, since update {row.since}: {row.result}" for row in differing]
    yield items([*equations, *(setting.text for setting in view.outside_settings())])


def _style(view: RunView) -> str:
    return {Tone.OPEN: "dim"}.get(view.diagnosis.tone, str(view.diagnosis.tone))
