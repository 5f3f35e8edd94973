"""The pages of the terminal dashboard as lines of styled text: strip, header, overview, chart, incident, table.

Colours are the 16 of every terminal, and nothing is said by colour alone. A line that can be chosen has an id, by which the app finds it
after a refresh.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rich.text import Text

from esper_telemetry.alarms.verdict.outcome import BAD, GOOD
from esper_telemetry.core.record import Alarm, AlarmLevel
from esper_telemetry.views.panels import TableCell, TableView
from esper_telemetry.views.run_view import ChartView, IncidentView, LineView, RunView, number_text
from esper_telemetry.views.series import Series

BARS: Final = "▁▂▃▄▅▆▇█"
RUN_MARKS: Final = (
    ("●", "bright_blue"),
    ("▲", "yellow"),
    ("■", "magenta"),
    ("◆", "cyan"),
    ("+", "green"),
    ("×", "red"),
)
"""Mark and colour of each run, which stay apart for colour-blind readers by their shapes."""
LEVEL_STYLES: Final = {"": "", "outside": "yellow", "warn": "yellow", "critical": "bold red"}
LEVEL_MARKS: Final = {"": " ", "outside": "!", "warn": "!", "critical": "‼"}
ALARM_STYLES: Final = {AlarmLevel.CRITICAL: "bold red", AlarmLevel.WARN: "yellow", AlarmLevel.INFO: "cyan"}
STALENESS: Final = {
    "ok": ("●OK", "green"),
    "warn": ("◐WARN", "yellow"),
    "bad": ("○BAD", "bold red"),
    "ended": ("", "dim"),
}
MAX_INCIDENTS, MAX_EVENTS, MAX_MATCHES = 5, 8, 60
NAME_COLUMNS, VALUE_COLUMNS, RANGE_COLUMNS = 32, 10, 16


class Line(NamedTuple):
    """One line of a page.

    Attributes:
        text: as shown.
        id: by which it is chosen, such as `key:policy/kl`; empty for lines that cannot be.
    """

    text: Text
    id: str = ""


@dataclass(slots=True)
class WatchState:
    """Choices of the reader that pages depend on.

    Attributes:
        pattern: metrics are shown whose key or name contains it, as a regular expression; empty for the panels.
        pinned: keys that stand first.
        log: charts are logarithmic where all values are positive.
        cursor: environment steps at which values are shown; None for the latest.
    """

    pattern: str = ""
    pinned: list[str] = field(default_factory=list)
    log: bool = False
    cursor: int | None = None

    def matches(self, text: str) -> bool:
        """Return whether the filter lets a text through; a pattern that is no regular expression is taken literally."""
        try:
            return re.search(self.pattern, text, re.IGNORECASE) is not None
        except re.error:
            return self.pattern.lower() in text.lower()


def strip(views: Sequence[RunView]) -> Text:
    """Return the anomaly strip; of several runs one after the other, each behind its mark."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for index, view in enumerate(views):
        if len(views) > 1:
            mark, style = RUN_MARKS[index % len(RUN_MARKS)]
            text.append(f"{'   ' if index else ''}{mark} ", style)
        items = view.strip()
        if view.axes is None:
            text.append("Waiting for data...", "dim")
        elif not items:
            text.append("ALL CLEAR ✓", "bold green")
        else:
            text.append("ANOMALIES: ", "bold red")
            for place, item in enumerate(items):
                text.append(" | " if place else "", "dim")
                text.append(item.text, "bold red" if item.level == "critical" else "yellow")
    return text or Text("Waiting for data...", "dim")


def header(views: Sequence[RunView], width: int, now: float | None = None) -> list[Line]:
    """Return who runs, how far and how fast: two lines for one run, one line for each of several."""
    if len(views) == 1:
        return [*_single_header(views[0], width, now)]
    lines = []
    for index, view in enumerate(views):
        mark, style = RUN_MARKS[index % len(RUN_MARKS)]
        progress = view.progress(now)
        left = Text.assemble((f"{mark} ", style), (view.name, "bold"), f"  update {progress.update:,}")
        left.append(f"  {progress.env_step:,} {view.x_label}" + _percent(progress.fraction), "dim")
        lines.append(Line(_justified(left, _state(view, now), width)))
    return lines


def _single_header(view: RunView, width: int, now: float | None) -> Iterator[Line]:
    progress = view.progress(now)
    facts = [str(view.info.facts.get("env") or ""), view.trainer]
    left = Text.assemble((view.name, "bold"), ("  " + " · ".join(filter(None, facts)), "dim"))
    yield Line(_justified(left, _state(view, now), width))
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
    yield Line(_justified(second, rate, width))


def _state(view: RunView, now: float | None) -> Text:
    """Return how the run ended, or the age of its last record."""
    if view.ended:
        status = str(view.status or "imported")
        return Text(status, "green" if status in ("finished", "imported") else "bold red")
    progress = view.progress(now)
    mark, style = STALENESS[progress.staleness]
    age = "" if progress.age_seconds is None else f" {duration(progress.age_seconds)}"
    return Text.assemble((mark, style), (age, "dim"))


def _justified(left: Text, right: Text, width: int) -> Text:
    left = left.copy()
    space = width - left.cell_len - right.cell_len
    if space < 1:
        left.truncate(max(1, width - right.cell_len - 1), overflow="ellipsis")
        space = width - left.cell_len - right.cell_len
    return left.append(" " * max(1, space)).append_text(right)


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
        return [Line(Text("Waiting for data...", "dim")), Line(Text(f"{first.source} has no record yet.", "dim"))]
    lines: list[Line] = []
    if not state.pattern:
        for index, view in enumerate(views):
            lines += _outcome(view, width, index if len(views) > 1 else None)
    lines += _section("Pinned", (line for key in state.pinned for line in _chart_lines(views, key, state, width)))
    if state.pattern:
        keys = list(dict.fromkeys(key for view in views for key in view.keys))
        names = {key: f"{key} {_name(views, key)}" for key in keys}
        matching = [key for key in keys if state.matches(names[key])]
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
    for part in _wrapped(text, width - 2, style):
        if index is not None:
            mark, colour = RUN_MARKS[index % len(RUN_MARKS)]
            part = Text.assemble((f"{mark} ", colour), part)
        yield Line(part)


def _wrapped(text: str, width: int, style: str = "") -> list[Text]:
    """Return a sentence in lines of that width."""
    lines: list[str] = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > max(20, width):
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return [Text(line, style) for line in lines]


def _panels(views: Sequence[RunView]) -> list[tuple[str, list[str]]]:
    """Return questions with the first key of each chart, of all runs together."""
    questions: dict[str, dict[str, None]] = {}
    for view in views:
        for panel in view.panels():
            questions.setdefault(panel.question, {}).update(dict.fromkeys(chart.lines[0].key for chart in panel.charts))
    return [(question, list(keys)) for question, keys in questions.items()]


def _name(views: Sequence[RunView], key: str) -> str:
    info = next((info for view in views if (info := view.info.describe(key))), None)
    return info.name if info and info.name else key


def _chart_lines(
    views: Sequence[RunView], key: str, state: WatchState, width: int, *, by_key: bool = False
) -> Iterator[Line]:
    """Yield the line of a metric: name, value, sparkline, healthy range and mark; of several runs their values side by side."""
    charts = [view.chart(key) if key in view.last else None for view in views]
    if not any(charts):
        return
    name = key if by_key else _name(views, key)
    name_width = min(NAME_COLUMNS + max(0, (width - 100) // 4), max(18, width // 3))
    label = Text(_cut(name, name_width - 1).ljust(name_width))
    if len(views) == 1 and charts[0] is not None:
        yield Line(_single(charts[0].lines[0], label, state, width), f"key:{key}")
        return
    room = max(12, (width - name_width) // len(views))
    for index, (view, chart) in enumerate(zip(views, charts, strict=True)):
        mark, colour = RUN_MARKS[index % len(RUN_MARKS)]
        value = None if chart is None else value_at(view.series(key), state.cursor)
        text = "─" if value is None else compact(value)
        judged = "" if chart is None else LEVEL_STYLES[chart.lines[0].judgement]
        label.append(f"{mark} ", colour)
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


def range_text(low: float | None, high: float | None) -> str:
    """Return `0.002 to 0.02`, `> 0.3` or `< 0.2`."""
    if low is None or high is None:
        return f"< {compact(high)}" if high is not None else f"> {compact(low)}" if low is not None else ""
    return f"{compact(low)} to {compact(high)}"


def compact(value: float) -> str:
    """Return a number in at most eight characters."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def value_at(series: Series, env_step: int | None) -> float | None:
    """Return the value at that many environment steps or the last one before; the latest for None."""
    place = len(series.values) if env_step is None else bisect_right(series.env_steps, env_step)
    return series.values[place - 1] if place else None


def resampled(series: Series, columns: int, ends: tuple[int, int] | None = None) -> list[float | None]:
    """Return the mean of the values in each of equally wide parts of the run; None where there is none."""
    if not series.values or columns < 1:
        return []
    first, last = ends or (series.env_steps[0], series.env_steps[-1])
    parts: list[list[float]] = [[] for _ in range(columns)]
    for step, value in zip(series.env_steps, series.values, strict=True):
        if first <= step <= last:
            parts[min(columns - 1, int((step - first) / max(1, last - first) * columns))].append(value)
    return [sum(part) / len(part) if part else None for part in parts]


def sparkline(series: Series, columns: int, *, log: bool = False) -> str:
    """Return the course of the values in one line; of a run with few updates one column for each."""
    values = resampled(series, min(columns, len(series.values)))
    values = [value for value in values if value is not None]
    return bars(values, log=log)


def bars(values: Sequence[float | None], *, log: bool = False) -> str:
    """Return one bar per value, a blank where there is none; the middle one where all are equal."""
    present = [value for value in values if value is not None]
    scale = math.log10 if log and present and min(present) > 0 else float
    heights = [None if value is None else scale(value) for value in values]
    low, high = (pick(map(scale, present), default=0.0) for pick in (min, max))
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        return "".join(" " if height is None else BARS[3] for height in heights)
    return "".join(
        " " if height is None else BARS[min(7, int((height - low) / (high - low) * 8))] for height in heights
    )


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
    head = Text(f"{RUN_MARKS[index % len(RUN_MARKS)][0]} " if marked else "")
    head.append(f"{incident.cause}", style)
    head.append(f"  since update {incident.since:,}, {state}", "dim")
    yield Line(head, f"incident:{index}:{incident.number}")
    if incident.until is None:
        yield from (Line(Text("  ").append_text(part)) for part in _wrapped(incident.text, width - 2))
        if incident.advice:
            yield from (
                Line(Text("  ").append_text(part)) for part in _wrapped(f"Try: {incident.advice}", width - 2, "green")
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
    lines += [Line(part) for part in _wrapped(incident.text, width)]
    if incident.advice:
        lines += [Line(Text()), *(Line(part) for part in _wrapped(f"Try: {incident.advice}", width, "green"))]
    ends = [f"{kind} ({'still on' if end is None else f'over at {end:,}'})" for kind, end in incident.ends.items()]
    lines += [
        Line(Text()),
        *(Line(part) for part in _wrapped("Alarms: " + ", ".join(ends), width, "dim")),
        Line(Text()),
    ]
    rows = [
        Line(
            Text.assemble(
                (_cut(row.key, 40).ljust(41)),
                (str(row.value).rjust(12), LEVEL_STYLES[row.judgement]),
                (f"  usually {row.usual}" if row.usual else "", "dim"),
                (f"  healthy {row.healthy}" if row.healthy else "", "dim"),
            )
        )
        for row in incident.evidence
    ]
    return [*lines, *_section("Evidence", rows)]


class Canvas:
    """Characters by row and column, with a style each.

    Args:
        columns, rows: its size.
    """

    def __init__(self, columns: int, rows: int) -> None:
        self._cells = [[(" ", "")] * columns for _ in range(rows)]

    def put(self, column: int, row: int, character: str, style: str) -> None:
        """Draw one character; what lies outside is left out."""
        if 0 <= row < len(self._cells) and 0 <= column < len(self._cells[row]):
            self._cells[row][column] = (character, style)

    def lines(self) -> list[Text]:
        """Return the rows from top to bottom."""
        return [Text.assemble(*row) for row in self._cells]


def chart_page(views: Sequence[RunView], key: str, state: WatchState, width: int, height: int) -> list[Line]:
    """Return a chart of one metric over environment steps, all runs on the same axes, with its description and healthy range."""
    charts = [(index, view, view.chart(key)) for index, view in enumerate(views) if key in view.last]
    if not charts:
        return [Line(Text(f"No run has {key}.", "dim"))]
    chart: ChartView = charts[0][2]
    line, info = chart.lines[0], chart.info
    title = Text.assemble(
        (_name(views, key), "bold"), (f"  {key}" + (f"  [{chart.unit}]" if chart.unit else ""), "dim")
    )
    lines = [Line(title)]
    if info and info.question:
        lines += [Line(part) for part in _wrapped(info.question, width, "dim")]
    for index, view, _ in charts:
        mark, colour = RUN_MARKS[index % len(RUN_MARKS)]
        value = value_at(view.series(key), state.cursor)
        lines.append(
            Line(Text.assemble((f"{mark} ", colour), view.name, "  ", number_text(value) if value is not None else "─"))
        )
    where = "latest value" if state.cursor is None else f"at {state.cursor:,} {views[0].x_label}"
    healthy = (
        ""
        if line.healthy is None
        else f"  healthy {range_text(line.healthy.low, line.healthy.high)} {line.healthy.condition}"
    )
    lines.append(Line(Text(f"{where}{healthy}", "dim")))
    lines += plot(
        [(index, view.series(key)) for index, view, _ in charts], state, line, width, max(4, height - len(lines) - 3)
    )
    if info and info.action and line.judgement:
        lines += [Line(part) for part in _wrapped(f"Try: {info.action}", width, "green")]
    return lines


def plot(series: Sequence[tuple[int, Series]], state: WatchState, line: LineView, width: int, rows: int) -> list[Line]:
    """Return the values of some runs as rows of marks, with the axis on the left, the healthy range as dots, and the cursor."""
    values = [value for _, one in series for value in one.values]
    steps = [step for _, one in series for step in one.env_steps]
    if not values:
        return []
    log = state.log and min(values) > 0
    scale = math.log10 if log else float
    low, high = scale(min(values)), scale(max(values))
    low, high = (low - 0.5, high + 0.5) if high - low < 1e-12 else (low, high)
    columns, ends = max(8, width - 11), (min(steps), max(steps))
    canvas = Canvas(columns, rows)

    def row_of(value: float) -> int:
        return rows - 1 - round((scale(value) - low) / (high - low) * (rows - 1))

    for limit in () if line.healthy is None else (line.healthy.low, line.healthy.high):
        if limit is not None and (not log or limit > 0) and low <= scale(limit) <= high:
            for column in range(columns):
                canvas.put(column, row_of(limit), "·", "green")
    if state.cursor is not None:
        at = int((state.cursor - ends[0]) / max(1, ends[1] - ends[0]) * (columns - 1))
        for row in range(rows):
            canvas.put(at, row, "│", "dim")
    for index, one in series:
        mark, colour = RUN_MARKS[index % len(RUN_MARKS)]
        for column, value in enumerate(resampled(one, columns, ends)):
            if value is not None:
                canvas.put(column, row_of(value), mark, colour)
    lines = []
    for row, text in enumerate(canvas.lines()):
        height = high - (high - low) * row / max(1, rows - 1)
        tick = compact(10**height if log else height) if row in (0, rows // 2, rows - 1) else ""
        lines.append(Line(Text.assemble((tick.rjust(9), "dim"), ("┤" if tick else "│", "dim"), text)))
    axis = _justified(Text(f"{'log' if log else '':>9} {ends[0]:,}", "dim"), Text(f"{ends[1]:,}", "dim"), width)
    return [*lines, Line(axis)]


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
    lines = []
    for number, row in enumerate(table.rows):
        texts = [cell_text(cell) for cell in row]
        if state.pattern and not _row_matches(texts, state.pattern):
            continue
        lines.append(Line(_row(texts, widths, len(lines) % 2 == 1), f"row:{number}"))
    if not lines:
        lines.append(Line(Text(f"No environments match '{state.pattern}'" if state.pattern else "No rows yet", "dim")))
    elif table.footer and not state.pattern and len(table.rows) > 1:
        lines.append(Line(_row([cell_text(cell) for cell in table.footer], widths, striped=False)))
    return Line(head), lines


def _row_matches(texts: Sequence[Text], pattern: str) -> bool:
    if pattern.isdigit():
        return pattern in re.findall(r"\d+", texts[0].plain)
    return any(pattern.lower() in text.plain.lower() for text in texts)


def cell_text(cell: TableCell) -> Text:
    """Return the styled text of a cell."""
    return cell.text if isinstance(cell.text, Text) else Text(cell.text, cell.style)


def _row(texts: Sequence[Text], widths: Sequence[int], striped: bool) -> Text:
    """Return a row; every second one has dots between its columns, which need no colour of the background."""
    line = Text()
    for place, (text, width) in enumerate(zip(texts, widths, strict=False)):
        line.append(("· " if striped else "  ") if place else "", "dim")
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
