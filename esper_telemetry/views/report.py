"""`esper-telemetry report`: a run, or several, as one HTML file that needs no network, or as Markdown for the summary of a CI job."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from esper_telemetry.alarms.detectors import GRADIENTS_ALONE
from esper_telemetry.alarms.verdict.headline import Tone
from esper_telemetry.alarms.verdict.outcome import NAMES
from esper_telemetry.core.files import read_json, replace_file
from esper_telemetry.core.record import RUN_FAILED
from esper_telemetry.core.redaction import redacted
from esper_telemetry.core.terminal import printable
from esper_telemetry.history.recent_return import RECENT_RETURN, UPDATE_RETURN
from esper_telemetry.sinks.layout import flattened
from esper_telemetry.sinks.pages import REPORT_NAME, safe
from esper_telemetry.views.compare import comparison
from esper_telemetry.views.compare.page import comparison_section
from esper_telemetry.views.compare.runs import read_compared
from esper_telemetry.views.equations import EquationRow
from esper_telemetry.views.gradient_flow import WARN_SEVERITY, gradient_flow
from esper_telemetry.views.outcome import capitalized, critical_lines, unanswered_by_reason, unexplained_lines
from esper_telemetry.views.report_charts import TIMELINE_POINTS, ReportCharts, html_page
from esper_telemetry.views.run_parts import ChartView, EvidenceRow, IncidentView, number_text
from esper_telemetry.views.run_view import RunView, open_view

MAX_INCIDENTS: Final = 20
"""Incidents that are shown in full; the first ones tend to cause the others."""
MAX_INCIDENT_CHARTS: Final = 4
MAX_EVIDENCE_ROWS: Final = 30
FLOW_ROW_PIXELS: Final = 18
FLOW_MARGIN_PIXELS: Final = 90
MAX_TEXT_CHARACTERS: Final = 400
"""Characters of a setting."""

_logger = logging.getLogger("esper_telemetry")

STATE_STYLES: Final[Mapping[str, str]] = {"matches": "good", "variant": "good", "differs": "bad", "unchecked": "dim"}
JUDGEMENT_WORDS: Final[Mapping[str, str]] = {
    "": "",
    "outside": "outside its healthy range",
    "warn": "beyond its warning bound",
    "critical": "beyond its critical bound",
}


def report_html(views: Sequence[RunView]) -> str:
    """Return the page of one run or of several; raises ModuleNotFoundError without plotly."""
    charts = ReportCharts()
    body = "\n".join(_page(views, charts))
    title = ", ".join(view.name for view in views)
    return html_page(f"{title} · esper_telemetry", body, charts)


def write_run_report(run_dir: Path) -> None:
    """Write the page of a run into its directory; what fails costs a warning, as training continues after it."""
    try:
        replace_file(run_dir / REPORT_NAME, report_html([open_view(run_dir, judged=True)]))
    except (Exception, SystemExit) as error:  # an installed plugin's code among others
        _logger.warning("esper-telemetry: there is no %s of %s: %s", REPORT_NAME, run_dir, error)


def _page(views: Sequence[RunView], charts: ReportCharts) -> Iterator[str]:
    if len(views) == 1:
        yield from _run(views[0], charts)
    else:
        yield f"<h1>{len(views)} runs</h1>"
        first = [charts.add_run(view) for view in views]
        yield from _several(views, charts, first)
        yield from _comparison(views)
        for number, view in enumerate(views, 1):
            yield f'<section class="run" id="run-{number}">'
            yield from _run(view, charts)
            yield "</section>"
    written = time.strftime("%Y-%m-%d %H:%M")
    yield f'<footer class="dim">Written {written} by esper_telemetry. This page needs no network and sends nothing.</footer>'


def _several(views: Sequence[RunView], charts: ReportCharts, places: Sequence[int]) -> Iterator[str]:
    """Yield the table of all runs and their curves in one chart for each key that decides."""
    rows = []
    for number, view in enumerate(views, 1):
        outcome = view.outcome
        rows.append(
            [
                f'<a href="#run-{number}">{_text(view.name)}</a>',
                f'<span class="{_style(view)}">{_text(str(outcome.kind))}</span>',
                _text(return_text(view)),
                f"{view.axes.env_step if view.axes else 0:,}",
                str(len(view.incidents)),
                _text(", ".join(dict.fromkeys(incident.cause for incident in view.incidents[:3]))),
            ]
        )
    headings = ("run", "outcome", "return", "environment steps", "incidents", "causes")
    yield f'<div class="card scroll">{_table(headings, rows)}</div>'
    references = [
        charts.line(place, key, view.series(key), view.name, TIMELINE_POINTS)
        for place, view in zip(places, views, strict=True)
        if (key := return_key(view)) in view.last
    ]
    if references:
        plot = f'<div class="plot tall" data-chart="{charts.overlay(references)}"></div>'
        yield f'<h2>Return over environment steps</h2><div class="card">{plot}</div>'


def _comparison(views: Sequence[RunView]) -> Iterator[str]:
    """Yield what differs between the runs that have a journal."""
    places = [str(view.run_dir) for view in views if view.run_dir is not None and view.updates]
    if len(places) < 2:
        return
    try:
        section = comparison_section(comparison([read_compared(place) for place in places]))
    except ImportError as error:  # without SciPy
        section = f'<p class="dim">{_text(str(error))}</p>'
    yield f"<h2>Comparison</h2>{section}"


def _run(view: RunView, charts: ReportCharts) -> Iterator[str]:
    """Yield the sections of one run."""
    run, incidents = charts.add_run(view), view.incidents
    yield f"<h1>{_text(view.name)}</h1>"
    yield from _head(view)
    yield from _timeline(view, charts, run, incidents)
    yield from _incidents(view, charts, run, incidents)
    yield from _panels(view, charts, run, incidents)
    yield from _gradient_flow(view, charts, run, incidents)
    yield from _equations(view.equations())
    yield from _unanswered(view)
    yield from _provenance(view)


def _head(view: RunView) -> Iterator[str]:
    """Yield the outcome, why, and the position of the run."""
    diagnosis, style = view.diagnosis, _style(view)
    yield f'<div class="card banner {style}">'
    yield f'<p class="outcome {style}">{_text(capitalized(view.ending or diagnosis.outcome.text))}</p>'
    incidents = view.incidents
    first = next((one for one in incidents if one.cause != RUN_FAILED), incidents[0] if incidents else None)
    if first is not None:
        if first.cause != RUN_FAILED:  # its sentence is the outcome
            yield f"<p>{_text(first.text)}</p>"
        if first.advice:
            yield f'<p class="advice"><b>Try:</b> {_text(first.advice)}</p>'
    more = f"{len(incidents)} incidents, of which this is the first. " if len(incidents) > 1 else ""
    yield f'<p class="dim">{more}{_text(capitalized(diagnosis.summary.rpartition("; ")[2]))}</p>'
    if diagnosis.gradients_alone:
        yield f"<p>{_text(GRADIENTS_ALONE)}.</p>"
    yield from _folded(critical_lines(diagnosis), is_open=True)
    if diagnosis.shows_remarks:
        yield from _folded(unexplained_lines(diagnosis), is_open=diagnosis.unexplained)
    yield "</div>"
    yield '<dl class="facts">'
    for name, value in position(view).items():
        yield f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>"
    yield "</dl>"
    if diagnosis.events:
        yield "<details><summary>Course of the task</summary>"
        yield _list(f"update {data['update']}: {data['text']}" for _, data in diagnosis.events)
        yield "</details>"


def position(view: RunView) -> dict[str, str]:
    """Return status, position, duration and speed of a run in words, without what is not known."""
    progress, curve = view.progress(), return_key(view)
    status = "logs" if view.run_dir is None else str(view.status or "under way")
    done = "" if progress.fraction is None else f" of {progress.total_steps:,} ({progress.fraction:.0%})"
    rows = {
        "status": status,
        NAMES.get(curve, curve): return_text(view),
        "updates": f"{view.updates:,}",
        view.x_label: f"{progress.env_step:,}{done}",
        "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(view.info.started)) if view.info.started else "",
        "duration": duration_text(view.axes.wall_time - view.info.started)
        if view.axes and view.info.started and view.axes.wall_time > view.info.started
        else "",
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


def duration_text(seconds: float) -> str:
    """Return a duration such as `2 h 5 min` or `48 s`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _timeline(view: RunView, charts: ReportCharts, run: int, incidents: Sequence[IncidentView]) -> Iterator[str]:
    curve = return_key(view)
    if not curve:
        return
    name = NAMES.get(curve, curve)
    also = " and incidents" if incidents else ""
    yield f"<h2>{_text(capitalized(name))}{also}</h2>"
    place = charts.timeline(run, view, curve, incidents)
    yield f'<div class="card"><div class="plot tall" data-chart="{place}"></div>'
    legend = (
        " Each bar is an incident, from its cause to its end; dotted lines show where one began." if incidents else ""
    )
    yield f'<p class="dim">Over {_text(view.x_label)}.{legend}</p></div>'


def _incidents(view: RunView, charts: ReportCharts, run: int, incidents: Sequence[IncidentView]) -> Iterator[str]:
    if not incidents:
        return
    yield "<h2>What went wrong</h2>"
    for incident in incidents[:MAX_INCIDENTS]:
        until = "still on at the end" if incident.until is None else f"over at update {incident.until:,}"
        yield f'<article class="card incident {incident.level}">'
        badge = f'<span class="badge {incident.level}">{incident.level}</span>'
        yield f'<div class="head"><h3>{incident.number}. {_text(incident.cause)}</h3>{badge}</div>'
        yield f'<p class="dim">since update {incident.since:,}, {until}</p>'
        yield f"<p>{_text(incident.text)}</p>"
        if incident.advice:
            yield f'<p class="advice"><b>Try:</b> {_text(incident.advice)}</p>'
        others = [
            f"{kind}: {'lasts' if end is None else f'over at update {end:,}'}"
            for kind, end in incident.ends.items()
            if kind != incident.cause
        ]
        around = [
            chart
            for key in incident.keys
            if (chart := view.chart(key)) is not None and len(chart.lines[0].series.values) > 1
        ]
        if around:
            yield '<div class="grid">'
            for chart in around[:MAX_INCIDENT_CHARTS]:
                yield from _chart(charts, run, chart, [view.step_of(incident.since)], card=False)
            yield "</div>"
        if others:
            count = f"{len(others)} more alarm{'s' if len(others) > 1 else ''} came with it"
            yield f"<details><summary>{count}</summary>{_list(others)}</details>"
        if incident.evidence:
            yield f"<details><summary>Evidence</summary>{_evidence(incident)}</details>"
        yield "</article>"
    if len(incidents) > MAX_INCIDENTS:
        yield f"<p>And {len(incidents) - MAX_INCIDENTS} later incidents, which esper-telemetry diagnose lists.</p>"


def _evidence(incident: IncidentView) -> str:
    """Return the table of single values, and one for each list of minibatches, layers or rows."""
    lists = {
        name: items
        for name, items in incident.report.main.evidence.items()
        if isinstance(items, list) and items and all(isinstance(item, Mapping) for item in items)
    }
    tables = [_values_table([row for row in incident.evidence if row.key not in lists])]
    for name, items in lists.items():
        columns = list(dict.fromkeys(column for item in items for column in flattened(item)))
        cells = [[_text(number_text(flattened(item).get(column, ""))) for column in columns] for item in items]
        more = f" ({MAX_EVIDENCE_ROWS} of {len(items)})" if len(items) > MAX_EVIDENCE_ROWS else ""
        tables += [f"<h4>{_text(capitalized(name))}{more}</h4>", _table(columns, cells[:MAX_EVIDENCE_ROWS])]
    return "".join(f"<div class='scroll'>{table}</div>" if table.startswith("<table") else table for table in tables)


def _values_table(rows: Sequence[EvidenceRow]) -> str:
    cells = [
        [
            f"<code>{_text(row.key)}</code><br><span class='dim'>{_text(row.name)}</span>",
            f"<span class='{_judged(row.judgement)}'>{_text(row.value)}</span>",
            _text(row.usual),
            _text(row.healthy),
        ]
        for row in rows[:MAX_EVIDENCE_ROWS]
    ]
    return _table(("value", "in this update", "usual in this run", "healthy"), cells)


def _panels(view: RunView, charts: ReportCharts, run: int, incidents: Sequence[IncidentView]) -> Iterator[str]:
    marks = [view.step_of(incident.since) for incident in incidents]
    for panel in view.panels():
        yield f'<h2>{_text(panel.question)}</h2><div class="grid">'
        for chart in panel.charts:
            yield from _chart(charts, run, chart, marks)
        yield "</div>"
    for table in view.tables():
        rows = [[_text(str(cell.text)) for cell in row] for row in (*table.rows, table.footer) if row]
        yield f'<h2>{_text(table.title)}</h2><div class="card scroll">{_table(table.columns, rows)}</div>'
    yield from (f"<p>{_text(problem)}</p>" for problem in view.problems)


def _gradient_flow(view: RunView, charts: ReportCharts, run: int, incidents: Sequence[IncidentView]) -> Iterator[str]:
    """Yield the picture of the gradients of single layers, if there are any."""
    flow = gradient_flow(view)
    if flow is None:
        return
    place = charts.flow(run, flow, [view.step_of(incident.since) for incident in incidents])
    height = FLOW_MARGIN_PIXELS + FLOW_ROW_PIXELS * (len(flow.layers) + any(flow.nonfinite))
    yield "<h2>Where do gradients explode or vanish?</h2>"
    yield f'<div class="card"><div class="plot" style="height:{height}px" data-height="{height}" data-chart="{place}"></div>'
    worst = f"No layer exploded or vanished (severity above {WARN_SEVERITY})."
    if flow.worst is not None:
        layer, column = flow.worst
        severity = float(layer.severity[column])
        did = "exploded" if severity > 0 else "vanished"
        worst = f"Worst: {layer.layer} {did} with severity {abs(severity):.2f} at update {flow.updates[column]:,}."
    hidden = f" {flow.hidden} healthier layers are left out." if flow.hidden else ""
    yield (
        f'<p class="dim">{_text(worst)} One row per parameter tensor, from the inputs of the network to its outputs, over '
        f"{_text(view.x_label)}; a gap is an update without a finite gradient. Wide screens also show the norm of the last gradient "
        f"(dot) and its range in this run.{hidden}</p></div>"
    )


def _chart(
    charts: ReportCharts, run: int, chart: ChartView, marks: Sequence[float], *, card: bool = True
) -> Iterator[str]:
    line = chart.lines[0]
    values = [one.value for one in (chart.lines if chart.stacked else chart.lines[:1]) if one.value is not None]
    value = number_text(sum(values)) if values else ""
    info = chart.info
    healthy = f"healthy {info.healthy}" if info and info.healthy else ""
    state = JUDGEMENT_WORDS[line.judgement]
    since = f" since update {line.since:,}" if state and line.since else ""
    hidden = f"{chart.hidden} more in the journal" if chart.hidden else ""
    unit = "" if chart.unit.lower() in chart.title.lower() else chart.unit
    notes = "; ".join(filter(None, (unit, healthy, hidden)))
    yield f'<div class="{"card" if card else ""}" title="{_text(chart.question)}">'
    yield f'<div class="head"><h3>{_text(chart.title)}</h3><b class="{_judged(line.judgement)}">{_text(value)}</b></div>'
    yield f'<p class="dim">{_text(notes)}{f"<br><span class={_judged(line.judgement)!r}>{state}{since}</span>" if state else ""}</p>'
    yield f'<div class="plot" data-chart="{charts.chart(run, chart, marks)}"></div></div>'


def _equations(rows: Sequence[EquationRow]) -> Iterator[str]:
    checked = [row for row in rows if row.state != "unchecked"]
    yield "<h2>Equations checked</h2>"
    if checked:
        cells = [
            [
                f"{_text(capitalized(row.equation.quantity))}<br><code class='dim'>{_text(row.equation.equation)}</code>",
                f"<span class='{STATE_STYLES[row.state]}'>{_text(row.result)}</span>"
                + (f"<br>{_text(row.advice)}" if row.state == "differs" else ""),
                _text("" if row.error is None else number_text(row.error)),
                f"{row.updates:,}" + (f", differs since update {row.since:,}" if row.since else ""),
            ]
            for row in checked
        ]
        yield f'<div class="card scroll">{_table(("quantity and reference", "result", "largest error", "updates"), cells)}</div>'
    else:
        yield "<p>None of them could be checked.</p>"
    unchecked: dict[str, list[str]] = {}
    for row in rows:
        if row.state == "unchecked":
            unchecked.setdefault(row.reason, []).append(row.equation.quantity.removeprefix("the "))
    if unchecked:
        yield "<details><summary>Equations that could not be checked</summary>"
        yield _list(f"{', '.join(quantities)}: {reason}" for reason, quantities in unchecked.items())
        yield "</details>"


def _unanswered(view: RunView) -> Iterator[str]:
    groups = unanswered_by_reason(view.diagnosis)
    yield "<h2>What could not be answered</h2>"
    if not groups:
        yield "<p>Every question that applies to this run was answered.</p>"
        return
    rows = [[_text(", ".join(kinds)), _text(reason), _text(remedy)] for (reason, remedy), kinds in groups.items()]
    count = sum(map(len, groups.values()))
    yield f"<details><summary>{count} question{'' if count == 1 else 's'}</summary>"
    yield f'<div class="card scroll">{_table(("alarm", "reason", "supplied by"), rows)}</div></details>'


def _provenance(view: RunView) -> Iterator[str]:
    outside = view.outside_settings()
    yield "<h2>Settings</h2>"
    if outside:
        yield "<p>Outside of all published settings:</p>"
        yield _list(capitalized(setting.text) for setting in outside)
    sections = {
        "Configuration": flattened(redacted(view.info.config)),
        "Facts": flattened(view.info.facts),
        "Versions": view.info.versions,
        "Read as": view.used,
        "Tags that were not read": dict.fromkeys(view.unused, ""),
    }
    command = command_of(view)
    if command:
        yield f"<p>Command: <code>{_text(command)}</code></p>"
    for title, rows in sections.items():
        if rows:
            cells = [
                [f"<code>{_text(name)}</code>", _text(str(value)[:MAX_TEXT_CHARACTERS])] for name, value in rows.items()
            ]
            yield f'<details><summary>{title}</summary><div class="card scroll">{_table((), cells)}</div></details>'
    if view.info.notes:
        yield f"<p>{_text(view.info.notes)}</p>"
    journal = "" if view.run_dir is None else f"; every number is in {view.run_dir}/journal.jsonl"
    yield f'<p class="dim">Run {_text(view.info.run_id)}, read from {_text(view.source)}{_text(journal)}.</p>'


def command_of(view: RunView) -> str:
    """Return the command that made the run, as its config.json has it; empty where it has none."""
    if view.run_dir is None:
        return ""
    try:
        command = read_json(view.run_dir / "config.json").get("command", ())
    except (OSError, ValueError, AttributeError):
        return ""
    return " ".join(map(str, command)) if isinstance(command, list) else ""


def report_markdown(views: Sequence[RunView]) -> str:
    """Return the verdict on each run for the summary of a CI job."""
    return "\n".join(line for view in views for line in _markdown(view))


def _markdown(view: RunView) -> Iterator[str]:
    diagnosis = view.diagnosis
    mark = {"good": "✅", "bad": "❌", "warn": "⚠️"}.get(_style(view), "❔")
    yield f"## {mark} {safe(view.name)}\n"
    yield f"**{safe(capitalized(view.ending or diagnosis.outcome.text))}**\n"
    yield f"{safe(capitalized(diagnosis.summary.rpartition('; ')[2]))}\n"
    where = {name: value for name, value in position(view).items() if name != "time of an update"}
    yield f"| {' | '.join(map(safe, where))} |"
    yield f"|{'---|' * len(where)}"
    yield f"| {' | '.join(map(safe, where.values()))} |\n"
    for incident in view.incidents[:MAX_INCIDENTS]:
        state = "still on" if incident.until is None else f"over at update {incident.until:,}"
        yield f"### {incident.number}. {safe(incident.cause)} ({incident.level}, since update {incident.since:,}, {state})\n"
        yield f"{safe(incident.text)}\n"
        if incident.advice:
            yield f"**Try:** {safe(incident.advice)}\n"
    lines = [*critical_lines(diagnosis), *(unexplained_lines(diagnosis) if diagnosis.shows_remarks else ())]
    yield from (f"- {safe(line.strip())}" for line in lines)
    if lines:
        yield ""
    for row in view.equations():
        if row.state == "differs":
            yield f"- {safe(row.equation.quantity)}, since update {row.since}: {safe(row.result)}"
    for setting in view.outside_settings():
        yield f"- {safe(setting.text)}"
    yield ""


def _style(view: RunView) -> str:
    """Return the colour of a run."""
    return {Tone.OPEN: "dim"}.get(view.diagnosis.tone, str(view.diagnosis.tone))


def _judged(judgement: str) -> str:
    return {"": "plain", "outside": "outside", "warn": "warn", "critical": "critical"}[judgement]


def _text(text: str) -> str:
    return escape(printable(text), quote=True)


def _folded(lines: Iterable[str], *, is_open: bool) -> Iterator[str]:
    """Yield each line as a paragraph, and the indented lines that follow one as a list that unfolds below it."""
    sections: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith(" ") and sections:
            sections[-1][1].append(line.strip())
        else:
            sections.append((line, []))
    for head, items in sections:
        if items:
            yield f"<details{' open' if is_open else ''}><summary>{_text(head.rstrip(':'))}</summary>{_list(items)}</details>"
        else:
            yield f"<p>{_text(head)}</p>"


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line.strip())}</li>' for line in lines)}</ul>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table of cells that are HTML."""
    head = (
        f"<thead><tr>{''.join(f'<th>{_text(heading)}</th>' for heading in headings)}</tr></thead>" if headings else ""
    )
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{head}<tbody>{body}</tbody></table>"
