"""A page of a report, and its charts as plain data: each key's values once, and charts that refer to them.

The map of gradients shows which single layers explode or vanish over a run, and in which part of the network. Severities follow from the
norms in the journal, as live ones do (`history.gradient_history.NormBaseline`), so runs at NORMAL have them too. If a run has more than
`MAX_COLUMNS` updates, a column is several updates: their smallest norm decides whether a layer vanishes, their largest one whether it
explodes.
"""

from __future__ import annotations

import json
import math
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, Final, NamedTuple

import numpy as np

from esper_telemetry.core.metric import Array
from esper_telemetry.history.gradient_history import DEFAULT_CLIP_LIMIT, LAYER, NormBaseline
from esper_telemetry.views.run_parts import ChartView, HealthyRange, IncidentView, Series, SeriesBuffer, drawable
from esper_telemetry.views.run_view import RunView

MAX_COLUMNS: Final = 200
"""Columns of the picture: each is some four pixels wide."""
MAX_LAYERS: Final = 64
"""Layers that are shown; a larger network shows the layers with the largest severities."""
WARN_SEVERITY: Final = 0.25
"""Severity above which `grad/layer/{layer}/severity_explode` warns."""
NONFINITE: Final = "grad/global/norm_preclip_nonfinite"


class LayerFlow(NamedTuple):
    """The gradient of one parameter tensor.

    Attributes:
        layer: its name in keys.
        severity: [columns], above 0 if it explodes, below 0 if it vanishes, NaN without a finite gradient.
        last, smallest, largest: norms.
    """

    layer: str
    severity: Array
    last: float
    smallest: float
    largest: float


class GradientFlow(NamedTuple):
    """The gradients of a network's layers.

    Attributes:
        layers: in the order of the network, from its inputs to its outputs.
        updates, env_steps: of the columns, at their ends.
        nonfinite: whether a gradient of any layer was NaN or infinite in the column.
        hidden: number of layers that are left out.
    """

    layers: tuple[LayerFlow, ...]
    updates: tuple[int, ...]
    env_steps: tuple[int, ...]
    nonfinite: tuple[bool, ...]
    hidden: int

    @property
    def worst(self) -> tuple[LayerFlow, int] | None:
        """The layer and the column with the largest severity; None if none is above `WARN_SEVERITY`."""
        sizes = np.nan_to_num(np.abs([layer.severity for layer in self.layers]))
        row, column = np.unravel_index(int(sizes.argmax()), sizes.shape)
        return (self.layers[row], int(column)) if sizes[row, column] > WARN_SEVERITY else None


def gradient_flow(view: RunView) -> GradientFlow | None:
    """Return the gradients of a run's layers; None without norms of at least two layers in two updates."""
    begin, end = LAYER
    keys = [key for key in view.keys if key.startswith(begin) and key.endswith(end)]
    series = [view.series(key) for key in keys]
    broken = view.series(NONFINITE).updates
    updates = sorted({*broken, *(update for one in series for update in one.updates)})
    if len(keys) < 2 or len(updates) < 2:
        return None
    ends = np.unique(np.linspace(0, len(updates) - 1, min(MAX_COLUMNS, len(updates))).astype(int))
    column_ends = np.array(updates)[ends]
    low, high = np.full((2, len(keys), len(ends)), np.nan)
    for row, one in enumerate(series):
        columns = np.searchsorted(column_ends, one.updates)
        np.fmin.at(low[row], columns, one.values)
        np.fmax.at(high[row], columns, one.values)
    # the severity of explosion of each layer, or below 0 the severity of vanishing
    baseline = NormBaseline(tuple(map(str, range(len(keys)))), view.facts.max_grad_norm or DEFAULT_CLIP_LIMIT)
    severity = np.full(low.shape, np.nan)
    for column, (smallest, largest) in enumerate(zip(low.T, high.T, strict=True)):
        judged, _ = baseline.step(smallest, largest)
        explode, vanish = np.asarray(judged.severity_explode), np.asarray(judged.severity_vanish)
        severity[:, column] = np.where(explode >= vanish, explode, -vanish)
    layers = [
        LayerFlow(key[len(begin) : -len(end)], own, one.values[-1], min(one.values), max(one.values))
        for key, own, one in zip(keys, severity, series, strict=True)
    ]
    worst = np.nan_to_num(np.abs(severity)).max(1)
    shown = sorted(np.argsort(-worst, kind="stable")[:MAX_LAYERS].tolist())
    return GradientFlow(
        layers=tuple(layers[row] for row in shown),
        updates=tuple(column_ends.tolist()),
        env_steps=tuple(map(view.step_of, column_ends.tolist())),
        nonfinite=tuple(np.isin(np.arange(len(ends)), np.searchsorted(column_ends, broken)).tolist()),
        hidden=len(layers) - len(shown),
    )


MAX_POINTS: Final = 200
"""Values of a line: a chart is about 350 pixels wide."""
TIMELINE_POINTS: Final = 600
MAX_BARS: Final = 8
"""Incidents below the return curve; a run seldom has more."""
MIN_DECADES: Final = 1.0
"""Length of a logarithmic axis from which on powers of ten alone are labelled."""
PADDING: Final = 0.06
"""Share of an axis that is left free at either end."""


@dataclass(slots=True)
class ReportCharts:
    """Collects the charts of a page.

    Attributes:
        runs: by run, the values of each key, as the page's script reads them.
        charts: in the order of the page.
        ends: by run, the environment steps at which its charts end.
    """

    runs: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    charts: list[dict[str, Any]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def add_run(self, last_step: float) -> int:
        """Return the place of another run, whose charts end a little after its last step."""
        self.runs.append({})
        self.ends.append(1.02 * last_step if last_step > 0 else 1.0)
        return len(self.runs) - 1

    def line(self, run: int, key: str, series: Series, label: str, max_points: int = MAX_POINTS) -> list[Any]:
        """Add a line's values, unless the page has them, and return the reference to them."""
        name = key if max_points == MAX_POINTS else f"{key} {max_points}"
        self.runs[run].setdefault(name, _encoded(thinned(series, max_points)))
        return [run, name, label]

    def chart(self, run: int, chart: ChartView, marks: Sequence[float] = ()) -> str:
        """Add a chart with vertical lines at these environment steps; return its place."""
        values = [value for line in chart.lines for value in line.series.values]
        if chart.stacked:  # from nothing to the sum
            values = [0.0, *(sum(parts) for parts in zip(*(line.series.values for line in chart.lines), strict=False))]
        low, high = y_range(values, None if chart.stacked else chart.healthy, log=chart.log)
        entry: dict[str, Any] = {
            "lines": [self.line(run, line.key, line.series, line.label) for line in chart.lines],
            "x": [0, self.ends[run]],
            "y": [_short(low), _short(high)],
            "marks": [*marks],
        }
        if chart.log:
            entry["log"] = 1
        if chart.log and high - low > MIN_DECADES:  # a shorter axis may lack a power of ten
            entry["dtick"] = max(1, math.ceil((high - low) / 5))
        if chart.stacked:
            entry["stacked"] = 1
        if chart.healthy is not None and not chart.stacked:
            entry["band"] = band(chart.healthy, low, high, log=chart.log)
        return self._added(entry)

    def timeline(self, run: int, view: RunView, key: str, incidents: Sequence[IncidentView]) -> str:
        """Add the curve of a key with a bar for each incident below it; return its place."""
        chart = view.chart(key)
        lines = chart.lines if chart else ()
        last = view.axes.env_step if view.axes else 0
        entry: dict[str, Any] = {
            "lines": [self.line(run, line.key, line.series, line.label, TIMELINE_POINTS) for line in lines],
            "marks": [view.step_of(incident.since) for incident in incidents[:MAX_BARS]],
            "x": [0, self.ends[run]],
            "bars": [
                {
                    "number": incident.number,
                    "cause": incident.cause,
                    "level": str(incident.level),
                    "begin": view.step_of(incident.since),
                    "end": last if incident.until is None else view.step_of(incident.until),
                }
                for incident in incidents[:MAX_BARS]
            ],
        }
        return self._added(entry)

    def flow(self, run: int, flow: GradientFlow, marks: Sequence[float]) -> str:
        """Add the picture of the gradients of all layers, with vertical lines at these environment steps; return its place."""
        first, second, *_ = flow.env_steps
        entry: dict[str, Any] = {
            "lines": [],
            "x": [0, self.ends[run]],
            "marks": [*marks],
            "flow": {
                "edges": [max(0, 2 * first - second), *flow.env_steps],
                "updates": [*flow.updates],
                "names": [layer.layer for layer in flow.layers],
                # in hundredths, which are as exact as a colour can be
                "severities": [[None if math.isnan(x) else round(100 * x) for x in layer.severity] for layer in flow.layers],
                "nonfinite": [100 * broken for broken in flow.nonfinite] if any(flow.nonfinite) else None,
                "norms": [[_short(norm) for norm in (layer.last, layer.smallest, layer.largest)] for layer in flow.layers],
            },
        }
        return self._added(entry)

    def overlay(self, references: Sequence[list[Any]], areas: Sequence[Mapping[str, Any]] = ()) -> str:
        """Add a chart of lines of several runs, with the areas of some lines: (step, low, high); return its place."""
        return self._added({"lines": [*references], "areas": [*areas]})

    def _added(self, entry: dict[str, Any]) -> str:
        self.charts.append(entry)
        return str(len(self.charts) - 1)

    def to_json(self) -> str:
        """Return all of it as JSON that is safe within a script element."""
        text = json.dumps({"runs": self.runs, "charts": self.charts}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def thinned(series: Series, max_points: int) -> Series:
    """Return at most that many values, without losing an extreme."""
    if len(series.values) <= max_points:
        return series
    buffer = SeriesBuffer(max_points)
    for update, step, value in zip(*series, strict=True):
        buffer.add(update, step, value)
    return buffer.series


def _encoded(series: Series) -> dict[str, Any]:
    """Return differences of updates, the steps of an update if these are all equal, and values of five digits."""
    updates, steps, values = series
    encoded: dict[str, Any] = {"u": _differences(updates), "y": [_short(value) for value in values]}
    factor = steps[0] / updates[0] if updates and updates[0] else 0.0
    if all(step == factor * update for update, step in zip(updates, steps, strict=True)):
        return encoded | {"k": factor}
    return encoded | {"s": _differences(steps)}


def _differences(numbers: Sequence[int]) -> list[int]:
    return [number - before for before, number in zip((0, *numbers), numbers, strict=False)]


def _short(value: float) -> float | int:
    rounded = float(f"{drawable(value):.5g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def y_range(values: Sequence[float], healthy: HealthyRange | None, *, log: bool) -> tuple[float, float]:
    """Return the ends of an axis, as exponents of ten for a logarithmic one: all values, and ends of the healthy range that are near."""
    finite = [math.log10(drawable(value)) if log else drawable(value) for value in values] or [0.0]
    low, high = min(finite), max(finite)
    reach = max(high - low, 1.0 if log else 0.25 * max(abs(low), abs(high)))
    for end in () if healthy is None else (healthy.low, healthy.high):
        place = None if end is None or (log and end <= 0) else math.log10(end) if log else end
        if place is not None and low - reach <= place <= high + reach:
            low, high = min(low, place), max(high, place)
    padding = PADDING * (high - low) or (0.3 if log else 0.1 * abs(high) or 1.0)
    return low - padding, high + padding


def band(healthy: HealthyRange, low: float, high: float, *, log: bool) -> list[float]:
    """Return the part of an axis that is healthy, in units of the values; the axis ends there."""
    bottom, top = (10.0**low, 10.0**high) if log else (low, high)
    ends = bottom if healthy.low is None else healthy.low, top if healthy.high is None else healthy.high
    return [_short(min(max(end, bottom), top)) for end in ends]


def html_page(title: str, body: str, charts: ReportCharts) -> str:
    """Return a page that works offline: style, script and plotly.js are in it; raises ModuleNotFoundError without plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        message = "reports need plotly: pip install 'esper-telemetry[views]'; --format markdown works without"
        raise ModuleNotFoundError(message) from None
    template = Template(files("esper_telemetry.views").joinpath("report_template.html").read_text(encoding="utf-8"))
    plotly, deflate = get_plotlyjs().encode(), zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return template.substitute(
        title=escape(title),
        plotly=b64encode(deflate.compress(plotly) + deflate.flush()).decode(),
        plotly_bytes=len(plotly),
        body=body,
        charts=charts.to_json(),
    )
