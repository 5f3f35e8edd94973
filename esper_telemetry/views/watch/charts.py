"""Values in the terminal: lines that can be chosen, short numbers, sparklines, and the chart of a metric over environment steps."""

from __future__ import annotations

import math
import re
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rich.text import Text

from esper_telemetry.core.record import template_of
from esper_telemetry.views.panels import view_declarations
from esper_telemetry.views.run_parts import HealthyRange, Series, drawable
from esper_telemetry.views.run_view import RunView

BARS: Final = "▁▂▃▄▅▆▇█"
RUN_MARKS: Final = (("●", "bright_blue"), ("▲", "yellow"), ("■", "magenta"), ("◆", "cyan"), ("+", "green"), ("×", "red"))
"""Mark and colour of each run, which stay apart for colour-blind readers by their shapes."""
SHORT_UNITS: Final = frozenset({"nats", "steps", "ms", "s", "MiB", "σ", "σ_R", "cores"})
"""Units that follow a number; the page of the metric names all."""
LEVEL_STYLES: Final = {"": "", "outside": "yellow", "warn": "yellow", "critical": "bold red"}


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
        pinned: keys that are shown first.
        log: charts are logarithmic if all values are positive.
        cursor: environment steps at which values are shown; None for the latest.
    """

    pattern: str = ""
    pinned: list[str] = field(default_factory=list)
    log: bool = False
    cursor: int | None = None

    def matches(self, text: str) -> bool:
        """Return whether the filter lets a text through; an invalid regular expression is taken literally."""
        try:
            return re.search(self.pattern, text, re.IGNORECASE) is not None
        except re.error:
            return self.pattern.lower() in text.lower()


def run_mark(index: int) -> Text:
    """Return the mark by which a run is known among several, and a blank."""
    mark, colour = RUN_MARKS[index % len(RUN_MARKS)]
    return Text(f"{mark} ", colour)


def run_names(views: Sequence[RunView]) -> list[str]:
    """Return the names of runs; if two are equal, their sources."""
    names = [view.name for view in views]
    return [view.source if names.count(view.name) > 1 else view.name for view in views]


def metric_name(views: Sequence[RunView], key: str, *, short: bool = False) -> str:
    """Return the name of a metric as its description has it, `mean of a gate (forget)` for a template; the key if no run describes it.

    Args:
        views: runs that may describe it.
        key: of the metric.
        short: take the declared label of the chart that the key leads, if there is one.
    """
    view = next((view for view in views if view.info.describe(key)), None)
    if view is None or (info := view.info.describe(key)) is None:
        return key
    parts, template = view.placeholders(key), template_of(key, view.info.metrics)
    charts = (chart for panel in view_declarations().panels for chart in panel.charts) if short else ()
    label = next((chart.label for chart in charts if chart.label and chart.keys[0] in (key, template)), "")
    name = label or info.name
    return " ".join([name, *(f"({part})" for part in parts.values())]) if name else key


def with_unit(value: float | None, unit: str) -> str:
    """Return a number in eight characters or fewer, with its unit if that is short; a dash for None."""
    return "─" if value is None else f"{compact(value)} {unit}" if unit in SHORT_UNITS else compact(value)


def justified(left: Text, right: Text, width: int) -> Text:
    """Return two texts at the left and the right edge; the left one is cut if there is not enough room."""
    left = left.copy()
    space = width - left.cell_len - right.cell_len
    if space < 1:
        left.truncate(max(1, width - right.cell_len - 1), overflow="ellipsis")
        space = width - left.cell_len - right.cell_len
    return left.append(" " * max(1, space)).append_text(right)


def paragraph(text: str, width: int, style: str = "", *, indent: str = "") -> list[Line]:
    """Return a sentence as lines of at most that width, and nothing for an empty one."""
    width = max(20, width - len(indent))
    parts = textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)
    return [Line(Text.assemble(indent, (part, style))) for part in parts]


def cut(text: str, width: int) -> str:
    """Return the text in at most that many characters, cut between words if it has some, with an ellipsis."""
    head = text[: max(0, width - 1)]
    return text if len(text) <= width else (head.rpartition(" ")[0] or head) + "…"


def range_text(low: float | None, high: float | None) -> str:
    """Return `0.002 to 0.02`, `> 0.3` or `< 0.2`."""
    if low is None or high is None:
        return f"< {compact(high)}" if high is not None else f"> {compact(low)}" if low is not None else ""
    return f"{compact(low)} to {compact(high)}"


def compact(value: float) -> str:
    """Return a number in at most eight characters, with up to four digits."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    texts = (f"{value:.{digits}g}" for digits in (4, 3))
    return next((text for text in texts if len(text) <= 8), f"{value:.2g}")


def value_at(series: Series, env_step: int | None) -> float | None:
    """Return the value at that many environment steps or the last one before; the latest for None."""
    place = len(series.values) if env_step is None else bisect_right(series.env_steps, env_step)
    return series.values[place - 1] if place else None


def in_columns(series: Series, columns: int, ends: tuple[int, int]) -> list[list[float]]:
    """Return the values in each of equally wide parts between two numbers of environment steps."""
    first, last = ends
    parts: list[list[float]] = [[] for _ in range(columns)]
    for step, value in zip(series.env_steps, series.values, strict=True):
        if first <= step <= last:
            parts[min(columns - 1, int((step - first) / max(1, last - first) * columns))].append(value)
    return parts


def sparkline(series: Series, columns: int, ends: tuple[int, int], *, log: bool = False, until: int | None = None) -> str:
    """Return the course of the values in one line between two steps; between two values the earlier one holds, up to the step `until`."""
    held: list[float | None] = []
    last = columns if until is None else math.ceil((until - ends[0]) / max(1, ends[1] - ends[0]) * columns)
    for column, part in enumerate(in_columns(series, columns, ends)):
        held.append(sum(part) / len(part) if part else held[-1] if held and column < last else None)
    return bars(held, log=log)


def bars(values: Sequence[float | None], *, log: bool = False) -> str:
    """Return one bar per value, a blank for None; the middle bar if all are equal."""
    present = [value for value in values if value is not None]
    scale = scaling(present, log=log)
    heights = [None if value is None else scale(value) for value in values]
    low, high = (pick(map(scale, present), default=0.0) for pick in (min, max))
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        return "".join(" " if height is None else BARS[3] for height in heights)
    return "".join(" " if height is None else BARS[min(7, int((height - low) / (high - low) * 8))] for height in heights)


def scaling(values: Sequence[float], *, log: bool) -> Callable[[float], float]:
    """Return the scale of an axis: the logarithm if no value is negative, with zeros at the smallest positive number, else the value."""
    positive = min((value for value in values if value > 0), default=0.0)
    if not (log and positive and min(values) >= 0):
        return drawable
    return lambda value: math.log10(max(drawable(value), positive))


def chart_page(views: Sequence[RunView], key: str, state: WatchState, width: int, height: int) -> list[Line]:
    """Return a chart of one metric over environment steps, all runs on the same axes, with its description and healthy range."""
    charts = [(index, view, chart) for index, view in enumerate(views) if (chart := view.chart(key)) is not None]
    if not charts:
        return [Line(Text(f"No run has {key}.", "dim"))]
    chart = charts[0][2]
    line, info, healthy = chart.lines[0], chart.info, chart.healthy
    title = f"{metric_name(views, key)} {key}" + (f" [{chart.unit}]" if chart.unit else "")
    lines = paragraph(title, width, "bold") + paragraph(chart.question, width, "dim")
    when = "latest" if state.cursor is None else f"at {state.cursor:,} {views[0].x_label}"
    for index, view, _ in charts:
        value = Text(f"  {with_unit(value_at(view.series(key), state.cursor), chart.unit)}  {when}")
        name = cut(run_names(views)[index], max(1, width - value.cell_len - 2))
        lines.append(Line(run_mark(index).append(name).append_text(value)))
    if healthy is not None:
        lines += paragraph(f"Healthy {range_text(healthy.low, healthy.high)} {healthy.condition}", width, "green")
    if info and info.action and line.judgement in ("warn", "critical"):
        lines += paragraph(f"Try: {info.action}", width, "green")
    series = [(RUN_MARKS[index % len(RUN_MARKS)], view.series(key)) for index, view, _ in charts]
    rows = max(4, height - len(lines) - 1)
    return [*lines, *plot(series, state, healthy, views[0].x_label, width, rows)]


def plot(
    series: Sequence[tuple[tuple[str, str], Series]], state: WatchState, healthy: HealthyRange | None, x_label: str, width: int, rows: int
) -> list[Line]:
    """Return the values of some runs as rows of their marks, with both axes, the healthy range as dots, and the cursor.

    A column of several updates shows their mean, smallest and largest value.
    """
    values = [value for _, one in series for value in one.values]
    steps = [step for _, one in series for step in one.env_steps]
    if not values:
        return []
    scale = scaling(values, log=state.log)
    log = scale is not drawable
    low, high = scale(min(values)), scale(max(values))
    if high - low <= 1e-12 * max(1.0, abs(low), abs(high)):
        margin = max(0.5, 1e-6 * abs(high))
        low, high = low - margin, high + margin
    columns, ends = max(8, width - 11), (min(steps), max(steps))
    canvas = [[(" ", "")] * columns for _ in range(rows - 1)]

    def put(column: int, value: float, mark: tuple[str, str]) -> None:
        canvas[rows - 2 - round((scale(value) - low) / (high - low) * (rows - 2))][column] = mark

    for limit in () if healthy is None else (healthy.low, healthy.high):
        if limit is not None and (not log or limit > 0) and low <= scale(limit) <= high:
            for column in range(columns):
                put(column, limit, ("·", "green"))
    if state.cursor is not None:
        at = int((state.cursor - ends[0]) / max(1, ends[1] - ends[0]) * (columns - 1))
        for row in canvas if 0 <= at < columns else ():
            row[at] = ("│", "dim")
    for mark, one in series:
        for column, part in enumerate(in_columns(one, columns, ends)):
            for value in (min(part), max(part), sum(part) / len(part)) if part else ():
                put(column, value, mark)
    lines = []
    for place, row in enumerate(canvas):
        height = high - (high - low) * place / max(1, rows - 2)
        tick = compact(10**height if log else height) if place in (0, (rows - 1) // 2, rows - 2) else ""
        lines.append(Line(Text.assemble((tick.rjust(9), "dim"), ("┤" if tick else "│", "dim"), *row)))
    first, last = f"{'log' if log else '':>9} {ends[0]:,}", f" {ends[1]:,}"
    axis = first + x_label.center(max(0, width - len(first) - len(last))) + last
    return [*lines, Line(Text(axis, "dim"))]
