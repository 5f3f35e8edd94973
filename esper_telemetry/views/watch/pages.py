"""The pages of the terminal dashboard as lines of styled text: strip, header, overview, incident, table.

Colours are the 16 of every terminal, and nothing is said by colour alone. A line that can be chosen has an id, by which the app finds it
after a refresh.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from rich.text import Text

from esper_telemetry.alarms.verdict.outcome import BAD, GOOD
from esper_telemetry.core.record import Alarm, AlarmLevel
from esper_telemetry.views.panels import TableCell, TableView
from esper_telemetry.views.run_view import IncidentView, LineView, RunView, number_text
from esper_telemetry.views.watch.charts import (
    LEVEL_STYLES,
    RUN_MARKS,
    Line,
    WatchState,
    compact,
    cut,
    justified,
    metric_name,
    range_text,
    run_mark,
    run_names,
    sparkline,
    value_at,
    wrapped,
)

LEVEL_MARKS: Final = {"": " ", "outside": "!", "warn": "!", "critical": "‼"}
ALARM_STYLES: Final = {AlarmLevel.CRITICAL: "bold red", AlarmLevel.WARN: "yellow", AlarmLevel.INFO: "cyan"}
STALENESS: Final = {
    "ok": ("●OK", "green"),
    "warn": ("◐WARN", "yellow"),
    "bad": ("○BAD", "bold red"),
    "ended": ("", "dim"),
}
MAX_INCIDENTS, MAX_EVENTS, MAX_MATCHES = 5, 8, 60
NAME_COLUMNS, VALUE_COLUMNS, RANGE_COLUMNS = 50, 10, 16


def strip(views: Sequence[RunView]) -> Text:
    """Return the anomaly strip; of several runs one after the other, each behind its mark, without causes."""
    if not any(view.axes for view in views):
        return Text("Waiting for data...", "dim")
    parts = [view.strip() for view in views]
    text = Text("ANOMALIES: ", "bold red", end="") if any(parts) else Text()
    for index, (view, items) in enumerate(zip(views, parts, strict=True)):
        if len(views) > 1:
            text.append("   " if index else "").append_text(run_mark(index))
        if view.axes is None:
            text.append("Waiting for data...", "dim")
        elif not items:
            text.append("ALL CLEAR ✓", "bold green")
        for place, item in enumerate(items):
            text.append(" | " if place else "", "dim")
            words = item.text if len(views) == 1 else item.text.partition(": ")[0]
            text.append(words, "bold red" if item.level == "critical" else "yellow")
    return text


def header(views: Sequence[RunView], width: int, now: float | None = None) -> list[Line]:
    """Return who runs, how far and how fast: two lines for one run, one line for each of several."""
    if len(views) == 1:
        return [*_single_header(views[0], width, now)]
    lines = []
    for index, (view, name) in enumerate(zip(views, run_names(views), strict=True)):
        progress = view.progress(now)
        left = Text.assemble(run_mark(index), (name, "bold"), f"  update {progress.update:,}")
        left.append(f"  {progress.env_step:,} {view.x_label}" + _percent(progress.fraction), "dim")
        lines.append(Line(justified(left, _state(view, now), width)))
    return lines


def _single_header(view: RunView, width: int, now: float | None) -> Iterator[Line]:
    progress = view.progress(now)
    facts = [str(view.info.facts.get("env") or ""), view.trainer]
    left = Text.assemble((view.name, "bold"), ("  " + " · ".join(filter(None, facts)), "dim"))
    yield Line(justified(left, _state(view, now), width))
    steps = f"update {progress.update:,}  step {progress.env_step:,}"
    steps += f" of {progress.total_steps:,}" if progress.total_steps else ""
    second = Text(steps)
    if progress.fraction is not None and not view.ended:
        done = round(10 * progress.fraction)
        second.append("  " + "█" * done, "green")
        second.append("░" * (10 - done), "dim")
        second.append(f" {progress.fraction:.0%}")
    if progress.eta_seconds is not None:
        second.append(f"  ETA {duration(progress.eta_seconds)}")
    rate = Text(f"{progress.steps_per_second:,.0f} steps/s" if progress.steps_per_second else "", "bold")
    if progress.time_split:
        shares = " ".join(f"{name[:3]} {share:.0%}" for name, share in progress.time_split.items())
        if len(second) + len(rate) + len(shares) + 5 <= width:
            rate.append(f"  {shares}", "dim")
    yield Line(justified(second, rate, width))


def _state(view: RunView, now: float | None) -> Text:
    """Return how the run ended, or the age of its last record."""
    reading = ("reading all updates  " if view.sampled else "", "dim")
    if view.ended:
        status = str(view.status or "imported")
        return Text.assemble(reading, (status, "green" if status in ("finished", "imported") else "bold red"))
    progress = view.progress(now)
    mark, style = STALENESS[progress.staleness]
    age = "" if progress.age_seconds is None else f" {duration(progress.age_seconds)}"
    return Text.assemble(reading, (mark, style), (age, "dim"))


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f" ({fraction:.0%})"


def duration(seconds: float) -> str:
    """Return `12 s`, `3 m 20 s`, `2 h 05 m` or `3 d 4 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02} s"
    return (
        f"{whole // 3600} h {whole % 3600 // 60:02} m"
        if whole < 86400
        else f"{whole // 86400} d {whole % 86400 // 3600} h"
    )


def overview(views: Sequence[RunView], state: WatchState, width: int) -> list[Line]:
    """Return outcome, pinned metrics, incidents, panels by question and the last events; with a filter the metrics that match it."""
    first = views[0]
    if first.axes is None and not first.incidents:
        waiting = Text("There is no record yet.", "dim")
        return [Line(waiting), *(Line(part) for part in wrapped(first.source, width, "dim"))]
    lines: list[Line] = []
    if not state.pattern:
        for index, view in enumerate(views):
            lines += _outcome(view, width, index if len(views) > 1 else None)
    lines += _section("Pinned", (line for key in state.pinned for line in _chart_lines(views, key, state, width)))
    if state.pattern:
        keys = list(dict.fromkeys(key for view in views for key in view.keys))
        matching = [key for key in keys if state.matches(key) or state.matches(metric_name(views, key))]
        shown = [line for key in matching[:MAX_MATCHES] for line in _chart_lines(views, key, state, width, by_key=True)]
        more = f", the first {MAX_MATCHES} of which are shown" if len(matching) > MAX_MATCHES else ""
        title = f"{len(matching)} metrics match '{state.pattern}'{more}"
        return [*lines, Line(Text(title, "bold")), *shown]
    lines += _incidents(views, width)
    for panel in _panels(views):
        charts = (line for key in panel[1] for line in _chart_lines(views, key, state, width))
        lines += _section(panel[0], charts)
    lines += _section("Last events", _events(views, width))
    return lines


def _section(title: str, lines: Iterable[Line]) -> list[Line]:
    """Return lines below their title, and nothing without lines."""
    inside = list(lines)
    return [Line(Text(title, "bold underline")), *inside] if inside else []


def _outcome(view: RunView, width: int, index: int | None) -> Iterator[Line]:
    outcome = view.outcome
    style = "bold red" if outcome.kind in BAD else "green" if outcome.kind in GOOD else ""
    text = outcome.text[:1].upper() + outcome.text[1:]
    for part in wrapped(text, width - 2, style):
        if index is not None:
            part = run_mark(index).append_text(part)
        yield Line(part)


def _panels(views: Sequence[RunView]) -> list[tuple[str, list[str]]]:
    """Return questions with the first key of each chart, of all runs together."""
    questions: dict[str, dict[str, None]] = {}
    for view in views:
        for panel in view.panels():
            questions.setdefault(panel.question, {}).update(dict.fromkeys(chart.lines[0].key for chart in panel.charts))
    return [(question, list(keys)) for question, keys in questions.items()]


def _chart_lines(
    views: Sequence[RunView], key: str, state: WatchState, width: int, *, by_key: bool = False
) -> Iterator[Line]:
    """Yield the line of a metric: name, value, sparkline, healthy range and mark; of several runs their values side by side."""
    charts = [view.chart(key) if key in view.last else None for view in views]
    if not any(charts):
        return
    name = key if by_key else metric_name(views, key)
    name_width = min(NAME_COLUMNS, max(18, width * 2 // 5)) if len(views) == 1 else max(18, width // 4)
    label = Text(cut(name, name_width - 1).ljust(name_width))
    if len(views) == 1 and charts[0] is not None:
        yield Line(_single(charts[0].lines[0], label, state, width), f"key:{key}")
        return
    room = max(12, (width - name_width) // len(views))
    for index, (view, chart) in enumerate(zip(views, charts, strict=True)):
        colour = RUN_MARKS[index % len(RUN_MARKS)][1]
        value = None if chart is None else value_at(view.series(key), state.cursor)
        text = "─" if value is None else compact(value)
        judged = "" if chart is None else LEVEL_STYLES[chart.lines[0].judgement]
        label.append_text(run_mark(index))
        label.append(text.rjust(8), judged or ("dim" if value is None else ""))
        columns = room - 12
        bars = "" if chart is None else sparkline(view.series(key), columns, log=state.log)
        label.append(" " + bars.ljust(max(0, columns)) + " ", colour)
    yield Line(label, f"key:{key}")


def _single(line: LineView, label: Text, state: WatchState, width: int) -> Text:
    value = line.value if state.cursor is None else value_at(line.series, state.cursor)
    style = LEVEL_STYLES[line.judgement]
    label.append("─" if value is None else compact(value).rjust(VALUE_COLUMNS), style)
    label.append(f" {LEVEL_MARKS[line.judgement]} ", style)
    healthy = "" if line.healthy is None else range_text(line.healthy.low, line.healthy.high)
    columns = width - label.cell_len - RANGE_COLUMNS - 1
    if columns < 8:
        columns, healthy = width - label.cell_len - 1, ""
    label.append(sparkline(line.series, columns, log=state.log).ljust(columns), style or "cyan")
    return label.append(f" {healthy}", "dim")


def _incidents(views: Sequence[RunView], width: int) -> list[Line]:
    lines: list[Line] = []
    for index, view in enumerate(views):
        incidents = view.incidents
        shown = sorted(incidents, key=lambda incident: (incident.until is not None, incident.number))[:MAX_INCIDENTS]
        for incident in shown:
            lines += _incident(incident, width, index, marked=len(views) > 1)
        if len(incidents) > len(shown):
            lines.append(Line(Text(f"  and {len(incidents) - len(shown)} more incidents", "dim")))
    return _section("What goes wrong", lines)


def _incident(incident: IncidentView, width: int, index: int, *, marked: bool) -> Iterator[Line]:
    style = ALARM_STYLES[incident.level] if incident.until is None else "dim"
    state = "still on" if incident.until is None else f"over at {incident.until:,}"
    head = run_mark(index) if marked else Text()
    head.append(f"{incident.cause}", style)
    head.append(f"  since update {incident.since:,}, {state}", "dim")
    yield Line(head, f"incident:{index}:{incident.number}")
    if incident.until is None and not marked:
        yield from (Line(Text("  ").append_text(part)) for part in wrapped(incident.text, width - 2))
        if incident.advice:
            yield from (
                Line(Text("  ").append_text(part)) for part in wrapped(f"Try: {incident.advice}", width - 2, "green")
            )


def _events(views: Sequence[RunView], width: int) -> Iterator[Line]:
    """Yield the latest alarms and events of all runs, the last one first."""
    entries: list[tuple[float, int, Text]] = []
    for index, view in enumerate(views):
        mark = f"{RUN_MARKS[index % len(RUN_MARKS)][0]} " if len(views) > 1 else ""
        alarms = view.alarms[-MAX_EVENTS:]
        entries += [(alarm.axes.wall_time, alarm.seq, _alarm_line(alarm, mark)) for alarm in alarms]
        for event in list(view.events)[-MAX_EVENTS:]:
            words = next((str(event.data[name]) for name in ("text", "reason", "sentence") if event.data.get(name)), "")
            place = f"update {event.axes.update:,}" if event.axes else ""
            text = Text(f"{mark}{place:<13} {event.type:<18} {words}")
            entries.append((event.axes.wall_time if event.axes else 0.0, event.seq, text))
    for _, _, text in sorted(entries, key=lambda entry: entry[:2], reverse=True)[:MAX_EVENTS]:
        text.truncate(width, overflow="ellipsis")
        yield Line(text)


def _alarm_line(alarm: Alarm, mark: str) -> Text:
    text = Text(f"{mark}{f'update {alarm.axes.update:,}':<13} ")
    text.append(f"{alarm.event.value:<6} ", "green" if alarm.event == "clear" else ALARM_STYLES[alarm.level])
    return text.append(f"{alarm.type} ({alarm.level.value})")


def incident_page(view: RunView, number: int, width: int) -> list[Line]:
    """Return everything about one incident: sentence, advice, its alarms and the evidence."""
    incident = next((one for one in view.incidents if one.number == number), None)
    if incident is None:
        return [Line(Text("This incident is no longer there.", "dim"))]
    lines = [Line(Text(f"Incident {number}: {incident.cause}", ALARM_STYLES[incident.level])), Line(Text())]
    lines += [Line(part) for part in wrapped(incident.text, width)]
    if incident.advice:
        lines += [Line(Text()), *(Line(part) for part in wrapped(f"Try: {incident.advice}", width, "green"))]
    ends = [f"{kind} ({'still on' if end is None else f'over at {end:,}'})" for kind, end in incident.ends.items()]
    lines += [
        Line(Text()),
        *(Line(part) for part in wrapped("Alarms: " + ", ".join(ends), width, "dim")),
        Line(Text()),
    ]
    rows = []
    for row in incident.evidence:
        text = Text(cut(row.key, 40).ljust(41))
        text.append(cut(str(row.value), 24).rjust(12), LEVEL_STYLES[row.judgement])
        text.append(f"  usually {row.usual}" if row.usual else "", "dim")
        rows.append(Line(text.append(f"  healthy {row.healthy}" if row.healthy else "", "dim")))
    for name, items in incident.report.main.evidence.items():
        if isinstance(items, list) and items and isinstance(items[0], Mapping):
            rows += [Line(Text()), Line(Text(name, "bold"))]
            rows += [Line(part) for item in items[:MAX_EVENTS] for part in wrapped(_plain_words(item), width)]
    return [*lines, *_section("Evidence", rows)]


def _plain_words(item: Mapping[str, object]) -> str:
    """Return the plain values of one piece of evidence as `environment 3, slot 1, stage training`."""
    plain = {name: value for name, value in item.items() if isinstance(value, str | int | float)}
    return ", ".join(f"{name} {number_text(value)}" for name, value in plain.items())


def table_page(table: TableView, state: WatchState) -> tuple[Line, list[Line]]:
    """Return the heading and the rows of a table, zebra-striped, as wide as they need; rows are filtered by `WatchState.pattern`.

    Digits match the text of the first column exactly, other words any part of a row.
    """
    widths = [
        max(
            [
                Text(name).cell_len,
                *(cell_text(row[place]).cell_len for row in (*table.rows, table.footer) if place < len(row)),
            ]
        )
        for place, name in enumerate(table.columns)
    ]
    head = Text("  ".join(name.ljust(width) for name, width in zip(table.columns, widths, strict=True)), "bold")
    lines: list[Line] = []
    for number, row in enumerate(table.rows):
        texts = [cell_text(cell) for cell in row]
        if state.pattern and not _row_matches(texts, state.pattern):
            continue
        lines.append(Line(_row(texts, widths, len(lines) % 2 == 1), f"row:{number}"))
    if not lines:
        lines.append(Line(Text(f"No environments match '{state.pattern}'" if state.pattern else "No rows yet", "dim")))
    elif table.footer and not state.pattern and len(table.rows) > 1:
        lines.append(Line(_row([cell_text(cell) for cell in table.footer], widths, striped=False), "footer"))
    return Line(head, "head"), lines


def _row_matches(texts: Sequence[Text], pattern: str) -> bool:
    if pattern.isdigit():
        return pattern in re.findall(r"\d+", texts[0].plain)
    return any(pattern.lower() in text.plain.lower() for text in texts)


def cell_text(cell: TableCell) -> Text:
    """Return the styled text of a cell."""
    return cell.text if isinstance(cell.text, Text) else Text(cell.text, cell.style)


def _row(texts: Sequence[Text], widths: Sequence[int], striped: bool) -> Text:
    """Return a row; every second one has lines between its columns, which need no colour of the background."""
    line = Text()
    for place, (text, width) in enumerate(zip(texts, widths, strict=False)):
        line.append(("┊ " if striped else "  ") if place else "", "dim")
        line.append_text(text).append(" " * (width - text.cell_len))
    return line


HELP: Final[Mapping[str, str]] = {
    "↑ ↓  PgUp PgDn  Home End": "move",
    "Enter": "chart of the metric, evidence of the incident, detail of the environment",
    "Esc  q": "back; q leaves from the overview",
    "t  Tab": "next table (environments), and back to the overview",
    "/": "filter metrics by a regular expression; in a table digits match the id, text any part of a row",
    "p": "pin or unpin the metric",
    "l": "logarithmic axis where all values are positive",
    "← →": "move the cursor over time, in all charts at once; in a table scroll sideways",
    "c": "take the cursor away: the latest values",
    "?": "this help",
}


def help_page() -> list[Line]:
    """Return the keys and the marks."""
    lines = [Line(Text("Keys", "bold underline"))]
    lines += [Line(Text.assemble((keys.ljust(26), "cyan"), meaning)) for keys, meaning in HELP.items()]
    lines += [Line(Text()), Line(Text("Marks", "bold underline"))]
    lines.append(
        Line(Text.assemble(("!", "yellow"), " outside of the healthy range   ", ("‼", "bold red"), " critical"))
    )
    lines.append(
        Line(
            Text.assemble(
                ("●OK", "green"),
                " up to 2 update times old  ",
                ("◐WARN", "yellow"),
                " up to 10  ",
                ("○BAD", "bold red"),
                " older",
            )
        )
    )
    lines.append(Line(Text("Only files are read: the run does not notice.", "dim")))
    return lines
