"""The pages of the terminal dashboard as lines of styled text: strip, header, overview, incident, table.

Colours are the 16 of every terminal, and nothing is said by colour alone. A line that can be chosen has an id, by which the app finds it
after a refresh.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from rich.console import Console
from rich.text import Text

from esper_telemetry.alarms.verdict.bounds import Tone
from esper_telemetry.core.messages import capitalized, end_text
from esper_telemetry.core.record import AlarmEvent
from esper_telemetry.sinks.console import ALARM_COLOURS
from esper_telemetry.views.document import STYLES
from esper_telemetry.views.panels import TableCell, TableDeclaration, TableView
from esper_telemetry.views.run_parts import ChartView, IncidentView, Judgement, duration, number_text
from esper_telemetry.views.run_view import RunView
from esper_telemetry.views.watch.charts import (
    LEVEL_STYLES,
    RUN_MARKS,
    SHORT_UNITS,
    Line,
    WatchState,
    cut,
    justified,
    metric_name,
    paragraph,
    range_text,
    run_mark,
    run_names,
    sparkline,
    value_at,
    with_unit,
)

LEVEL_MARKS: Final = {"": " ", "outside": "!", "warn": "!", "critical": "‼"}
STALENESS: Final = {"ok": ("●OK", "green"), "warn": ("◐WARN", "yellow"), "bad": ("○BAD", "bold red"), "ended": ("", "dim")}
MAX_INCIDENTS, MAX_EVENTS, MAX_MATCHES = 5, 8, 60
NAME_COLUMNS, VALUE_COLUMNS, RANGE_COLUMNS, MIN_BARS = 46, 17, 16, 10
WIDE_COLUMNS: Final = 100
"""Width from which on metrics have their whole names."""


def strip(views: Sequence[RunView], width: int | None = None) -> Text:
    """Return the anomaly strip; strips of several runs are joined, each after its mark and without causes.

    If it is wider than the screen, causes are left out first, then all but the first part of each run.
    """
    if not any(view.axes for view in views):
        return Text("Waiting for data...", "dim")
    parts = [[(item.text, item.level) for item in view.strip()] for view in views]
    brief = [[(words.partition(": ")[0], level) for words, level in items] for items in parts]
    first = [[*items[:1], *((f"{len(items) - 1} more", level) for _, level in items[1:2])] for items in brief]
    versions = [parts, brief, first] if len(views) == 1 else [brief, first]
    texts = [_strip_text(views, version) for version in versions]
    text = next((text for text in texts if width is None or text.cell_len <= width), texts[-1])
    if width is not None:
        text.truncate(width, overflow="ellipsis")
    return text


def _strip_text(views: Sequence[RunView], parts: Sequence[Sequence[tuple[str, Judgement]]]) -> Text:
    text = Text("ANOMALIES: ", "bold red", end="") if any(parts) else Text()
    for index, (view, items) in enumerate(zip(views, parts, strict=True)):
        if len(views) > 1:
            text.append("   " if index else "").append_text(run_mark(index))
        if view.axes is None:
            text.append("Waiting for data...", "dim")
        elif not items:
            is_good = view.diagnosis.tone is Tone.GOOD
            text.append(*(("ALL CLEAR ✓", "bold green") if is_good else ("No anomalies so far", "")))
        for place, (words, level) in enumerate(items):
            text.append(" | " if place else "", "dim").append(words, "bold red" if level == "critical" else "yellow")
    return text


def header(views: Sequence[RunView], width: int, now: float | None = None) -> list[Line]:
    """Return who runs, how far and how fast: two lines for one run, one line for each of several."""
    if len(views) == 1:
        return _single_header(views[0], width, now)
    lines = []
    for index, (view, name) in enumerate(zip(views, run_names(views), strict=True)):
        progress = view.progress(now)
        left = Text.assemble(run_mark(index), (name, "bold"), f"  update {progress.update:,}")
        percent = "" if progress.fraction is None else f" ({progress.fraction:.0%})"
        left.append(f"  {progress.env_step:,} {view.x_label}{percent}", "dim")
        lines.append(Line(justified(left, _state(view, now), width)))
    return lines


def _single_header(view: RunView, width: int, now: float | None) -> list[Line]:
    progress, state = view.progress(now), _state(view, now)
    facts = " · ".join(filter(None, (view.facts.env, view.facts.trainer)))
    left, split = Text.assemble((view.name, "bold"), (f"  {facts}", "dim")), progress.time_split.items()
    shares = ("  ".join(f"{name} {share:.0%}" for name, share in split), " ".join(f"{name[:3]} {share:.0%}" for name, share in split))
    room = width - left.cell_len - state.cell_len - 4
    fitting = next((text for text in shares if len(text) <= room), "")
    first = justified(left, Text(fitting, "dim").append("  ").append_text(state), width)
    total = f" of {progress.total_steps:,}" if progress.total_steps else ""
    second = Text(f"update {progress.update:,}  step {progress.env_step:,}{total}")
    if progress.fraction is not None and not view.ended:
        done = round(10 * progress.fraction)
        second.append("  " + "█" * done, "green").append("░" * (10 - done), "dim").append(f" {progress.fraction:.0%}")
    if progress.eta_seconds is not None:
        second.append(f"  ETA {duration(progress.eta_seconds)}")
    rate = Text(f"{progress.steps_per_second:,.0f} steps/s" if progress.steps_per_second else "", "bold")
    return [Line(first), Line(justified(second, rate, width))]


def _state(view: RunView, now: float | None) -> Text:
    """Return how the run ended, or the age of its last record."""
    reading = ("reading all updates  " if view.sampled else "", "dim")
    if view.ended:
        return Text.assemble(reading, (str(view.status or "imported"), STYLES[view.diagnosis.tone]))
    progress = view.progress(now)
    age = "" if progress.age_seconds is None else f" {duration(progress.age_seconds)}"
    return Text.assemble(reading, STALENESS[progress.staleness], (age, "dim"))


def overview(views: Sequence[RunView], state: WatchState, width: int) -> list[Line]:
    """Return outcome, pinned metrics, incidents, panels by question and the last events; or the metrics that match the filter."""
    if views[0].axes is None and not views[0].incidents:
        return [Line(Text("There is no record yet.", "dim")), *paragraph(views[0].source, width, "dim")]

    def charts(keys: Iterable[str], *, by_key: bool = False) -> list[Line]:
        lines = (_chart_line(views, key, state, width, by_key=by_key) for key in keys)
        return [*chain.from_iterable(lines)]

    pinned = _section("Pinned", charts(state.pinned))
    if state.pattern:
        keys = list(dict.fromkeys(key for view in views for key in view.keys))
        matching = [key for key in keys if state.matches(key) or state.matches(metric_name(views, key))]
        more = f", the first {MAX_MATCHES} of which are shown" if len(matching) > MAX_MATCHES else ""
        title = f"{len(matching)} metrics match '{state.pattern}'{more}"
        return [*pinned, Line(Text(title, "bold")), *charts(matching[:MAX_MATCHES], by_key=True)]
    questions: dict[str, dict[str, None]] = {}  # the first key of each chart, of all runs together
    for panel in (panel for view in views for panel in view.panels()):
        questions.setdefault(panel.question, {}).update(dict.fromkeys(chart.lines[0].key for chart in panel.charts))
    sections = [_section(question, charts(first_keys)) for question, first_keys in questions.items()]
    problems = dict.fromkeys(problem for view in views for problem in view.problems)
    plugins = chain.from_iterable(paragraph(problem, width, "yellow") for problem in problems)
    return [
        *(line for index, view in enumerate(views) for line in _outcome(view, width, index if len(views) > 1 else None)),
        *pinned,
        *_section("What goes wrong", _incidents(views, width)),
        *chain.from_iterable(sections),
        *_section("Plugins", plugins),
        *_section("Last events", _events(views, width)),
    ]


def _section(title: str, lines: Iterable[Line]) -> list[Line]:
    """Return lines below their title, and nothing without lines."""
    inside = list(lines)
    return [Line(Text(title, "bold underline")), *inside] if inside else []


def _outcome(view: RunView, width: int, index: int | None) -> list[Line]:
    lines = paragraph(capitalized(view.outcome.text), width - 2, STYLES[view.diagnosis.tone])
    if view.damage:
        damaged = "1 line" if len(view.damage) == 1 else f"{len(view.damage):,} lines"
        lines += paragraph(f"{damaged} of the journal could not be read: left out", width - 2, "yellow")
    return lines if index is None else [Line(run_mark(index).append_text(line.text)) for line in lines]


def _chart_line(views: Sequence[RunView], key: str, state: WatchState, width: int, *, by_key: bool = False) -> Iterator[Line]:
    """Yield the line of a metric: name, value, sparkline, healthy range and mark; values of several runs are side by side."""
    charts = [view.chart(key) if key in view.last else None for view in views]
    first = next((chart for chart in charts if chart), None)
    if first is None:
        return
    name = key if by_key else metric_name(views, key, short=width < WIDE_COLUMNS)
    steps = [step for view in views if view.axes for step in (view.first_step, view.axes.env_step)]
    ends = (min(steps), max(steps))
    if len(views) == 1:
        name_width = max(18, min(NAME_COLUMNS, width - VALUE_COLUMNS - RANGE_COLUMNS - MIN_BARS))
        label = Text(cut(name, name_width - 1).ljust(name_width))
        yield Line(_single(first, label, state, width, ends, views[0].updates), f"key:{key}")
        return
    name_width = max(18, width // 4)
    if len(name) >= name_width:  # on a separate line
        yield Line(Text(cut(name, width)))
        name, name_width = "", 2
    text, room = Text(name.ljust(name_width)), max(12, (width - name_width) // len(views))
    number_width = 8 + (len(first.unit) + 1 if first.unit in SHORT_UNITS else 0)
    columns = max(0, room - number_width - 4)
    for index, (view, chart) in enumerate(zip(views, charts, strict=True)):
        value, style, bars = None, "dim", ""
        if chart is not None:
            value, until = value_at(view.series(key), state.cursor), view.axes.env_step if view.axes else 0
            style = LEVEL_STYLES[chart.lines[0].judgement] or ("dim" if value is None else "")
            bars = sparkline(view.series(key), columns, ends, log=state.log, until=until)
        text.append_text(run_mark(index)).append(with_unit(value, first.unit).rjust(number_width), style)
        text.append(" " + bars.ljust(columns) + " ", RUN_MARKS[index % len(RUN_MARKS)][1])
    yield Line(text, f"key:{key}")


def _single(chart: ChartView, label: Text, state: WatchState, width: int, ends: tuple[int, int], updates: int) -> Text:
    line, healthy = chart.lines[0], chart.healthy
    value = line.value if state.cursor is None else value_at(line.series, state.cursor)
    style, (number, _, unit) = LEVEL_STYLES[line.judgement], with_unit(value, chart.unit).partition(" ")
    label.append(f"{number:>8} {unit:<6}", style).append(f"{LEVEL_MARKS[line.judgement]} ", style)
    bounds = "" if healthy is None else range_text(healthy.low, healthy.high) + (" *" if healthy.condition else "")
    columns = width - label.cell_len - RANGE_COLUMNS
    if columns < MIN_BARS:
        columns, bounds = max(0, width - label.cell_len), ""
    bars = sparkline(line.series, min(columns, updates), ends, log=state.log)
    return label.append(bars.ljust(columns), style or "cyan").append(f" {bounds}" if bounds else "", "dim")


def _incidents(views: Sequence[RunView], width: int) -> Iterator[Line]:
    for index, view in enumerate(views):
        incidents = sorted(view.incidents, key=lambda incident: (incident.until is not None, incident.number))
        for incident in incidents[:MAX_INCIDENTS]:
            head = run_mark(index) if len(views) > 1 else Text()
            head.append(incident.cause, ALARM_COLOURS[incident.level] if incident.until is None else "dim")
            yield Line(head.append(f"  {incident.state}", "dim"), f"incident:{index}:{incident.number}")
            if incident.until is None and len(views) == 1:
                yield from _sentences(incident, width, "  ")
        if (more := len(incidents) - MAX_INCIDENTS) > 0:
            yield Line(Text(f"  and {more} more incidents", "dim"))


def _sentences(incident: IncidentView, width: int, indent: str = "") -> list[Line]:
    """Return what happened, and what to try."""
    advice = f"Try: {incident.advice}" if incident.advice else ""
    return paragraph(incident.text, width, indent=indent) + paragraph(advice, width, "green", indent=indent)


def _events(views: Sequence[RunView], width: int) -> Iterator[Line]:
    """Yield the latest alarms and events of all runs, the last one first."""
    entries: list[tuple[float, int, Text]] = []
    for index, view in enumerate(views):
        mark = f"{RUN_MARKS[index % len(RUN_MARKS)][0]} " if len(views) > 1 else ""
        for alarm in view.alarms[-MAX_EVENTS:]:
            text = Text(f"{mark}{f'update {alarm.axes.update:,}':<13} ")
            style = "green" if alarm.event is AlarmEvent.CLEAR else ALARM_COLOURS[alarm.level]
            text.append(f"{alarm.event.value:<6} ", style).append(f"{alarm.type} ({alarm.level.value})")
            entries.append((alarm.axes.wall_time, alarm.seq, text))
        for event in list(view.events)[-MAX_EVENTS:]:
            words = next((str(event.data[name]) for name in ("text", "reason", "sentence") if event.data.get(name)), "")
            place = f"update {event.axes.update:,}" if event.axes else ""
            text = Text(f"{mark}{place:<13} {event.type:<18} {words}")
            entries.append((event.axes.wall_time if event.axes else 0.0, event.seq, text))
    for _, _, text in sorted(entries, key=lambda entry: entry[:2], reverse=True)[:MAX_EVENTS]:
        text.truncate(width, overflow="ellipsis")
        yield Line(text)


def incident_page(view: RunView, number: int, width: int) -> list[Line]:
    """Return everything about one incident: sentence, advice, its alarms and the evidence."""
    incident = next((one for one in view.incidents if one.number == number), None)
    if incident is None:
        return [Line(Text("This incident does not exist any more.", "dim"))]
    rows = []
    for row in incident.evidence:
        if row.value.startswith(("[", "{")):
            continue  # in the report
        info = view.info.describe(row.key)
        unit = info.unit if info and info.unit in SHORT_UNITS else ""
        text = Text(cut(row.key, 40).ljust(41))
        text.append(f"{cut(row.value, 24):>12} {unit}", LEVEL_STYLES[row.judgement])
        text.append(f"  usually {row.usual}" if row.usual else "", "dim")
        rows.append(Line(text.append(f"  healthy {row.healthy}" if row.healthy else "", "dim")))
    for name, evidence in incident.lists.items():
        rows += [Line(Text()), Line(Text(name, "bold")), *_item_lines(evidence[:MAX_EVENTS], width)]
    alarms = ", ".join(f"{kind} ({end_text(end)})" for kind, end in incident.ends.items())
    return [
        Line(Text(f"Incident {number}: {incident.cause}", ALARM_COLOURS[incident.level])),
        Line(Text()),
        *_sentences(incident, width),
        Line(Text()),
        *paragraph(f"Alarms: {alarms}", width, "dim"),
        Line(Text()),
        *_section("Evidence", rows),
    ]


def _item_lines(items: Sequence[Mapping[str, object]], width: int) -> Iterator[Line]:
    """Yield a heading and a row for each piece of evidence, with as many of its plain values as there is room for."""
    names = dict.fromkeys(name for item in items for name, value in item.items() if isinstance(value, str | int | float))
    rows = [Text() for _ in range(len(items) + 1)]
    for place, name in enumerate(names):
        column = [name, *(number_text(item.get(name, "")) for item in items)]
        size = max(map(len, column)) + 2
        if place and rows[0].cell_len + size > width:
            break
        is_text = any(isinstance(item.get(name), str) for item in items)
        for row, cell in zip(rows, column, strict=True):
            row.append(cell.ljust(size) if is_text else f"{cell}  ".rjust(size))
    rows[0].stylize("dim")
    yield from map(Line, rows)


def table_page(table: TableView, state: WatchState) -> tuple[Line, list[Line]]:
    """Return the heading and the rows of a table, zebra-striped, as wide as they need; rows are filtered by `WatchState.pattern`.

    Digits match the text of the first column exactly, other words any part of a row.
    """
    rows, foot = [[*map(cell_text, row)] for row in table.rows], [*map(cell_text, table.footer)]
    widths = [
        max(Text(name).cell_len, *(row[place].cell_len for row in (*rows, foot) if place < len(row)), 0)
        for place, name in enumerate(table.columns)
    ]
    head = Text("  ".join(name.ljust(width) for name, width in zip(table.columns, widths, strict=True)), "bold")
    lines: list[Line] = []
    for number, texts in enumerate(rows):
        if not state.pattern or _row_matches(texts, state.pattern):
            lines.append(Line(_row(texts, widths, len(lines) % 2 == 1), f"row:{number}"))
    if not lines:
        lines.append(Line(Text(f"No environments match '{state.pattern}'" if state.pattern else "No rows yet", "dim")))
    elif table.footer and not state.pattern and len(rows) > 1:
        lines.append(Line(_row(foot, widths, striped=False), "footer"))
    return Line(head, "head"), lines


def _row_matches(texts: Sequence[Text], pattern: str) -> bool:
    if pattern.isdigit():
        return pattern in re.findall(r"\d+", texts[0].plain)
    return any(pattern.lower() in text.plain.lower() for text in texts)


def cell_text(cell: TableCell) -> Text:
    """Return the styled text of a cell."""
    return cell.text if isinstance(cell.text, Text) else Text(cell.text, cell.style)


def _row(texts: Sequence[Text], widths: Sequence[int], striped: bool) -> Text:
    """Return a row; every second one has lines between its columns, which do not depend on colours."""
    line = Text()
    for place, (text, width) in enumerate(zip(texts, widths, strict=False)):
        line.append(("┊ " if striped else "  ") if place else "", "dim")
        line.append_text(text).append(" " * (width - text.cell_len))
    return line


HELP: Final[Mapping[str, str]] = {
    "↑ ↓  PgUp PgDn  Home End": "move",
    "Enter, click": "chart of the metric, evidence of the incident, detail of the environment",
    "Esc  q": "back; q leaves from the overview",
    "t  Tab": "next table (environments), and back to the overview",
    "/": "filter metrics by a regular expression; in a table digits match the id, text any part of a row",
    "p": "pin or unpin the metric",
    "l": "logarithmic axis if no value is negative",
    "← →": "move the cursor over time, in all charts at once; in a table scroll sideways",
    "c": "take the cursor away: the latest values",
    "?": "this help",
}


def help_page(width: int, tables: Sequence[TableDeclaration] = ()) -> list[Line]:
    """Return the keys, the marks, and the columns of the tables."""
    marks = (
        Text.assemble(("!", "yellow"), " outside of the healthy range   ", ("‼", "bold red"), " critical"),
        Text("* healthy under a condition that the metric's page (Enter) names, with the unit of the number"),
        Text.assemble(
            *("Last record: ", STALENESS["ok"], " up to 2 update times ago  "),
            *(STALENESS["warn"], " up to 10  ", STALENESS["bad"], " longer"),
        ),
        Text("Time of an update: env environments, inf inference, upd learning, oth the rest"),
        Text("▁▂▃ each line from its smallest to its largest value; Enter shows all runs on one axis"),
        Text("Only files are read: the run does not notice.", "dim"),
    )
    console = Console(width=width)
    lines = _explained("Keys", HELP.items(), width)
    lines += [Line(Text()), *_section("Marks", (Line(part) for mark in marks for part in mark.wrap(console, width)))]
    for table in tables:
        if table.headings:
            lines += [Line(Text()), *_explained(f"Columns of the table {table.title}", table.headings, width)]
    return lines


def _explained(title: str, meanings: Iterable[tuple[str, str]], width: int) -> list[Line]:
    lines: list[Line] = []
    for words, meaning in meanings:
        first, *others = paragraph(meaning, width, indent=" " * 26)
        lines += [Line(Text(words.ljust(26), "cyan").append_text(first.text[26:])), *others]
    return _section(title, lines)


FOOTERS: Final[Mapping[str, str]] = {
    "overview": "↑↓ choose  Enter open  / filter  p pin  l log  ←→ time  t tables  ? help  q quit",
    "chart": "Esc back  ←→ time  c latest  l log axis  p pin  ? help",
    "table": "Esc back  ↑↓ choose  Enter detail  ←→ columns  / filter  t next table  ? help",
}


def footer(kind: str, width: int) -> Text:
    """Return the keys of a page, as many as there is room for."""
    keys = FOOTERS.get(kind, "Esc back  ↑↓ scroll  ? help")
    while len(keys) > width:
        keys = keys.rpartition("  ")[0]
    return Text(keys, "dim")
