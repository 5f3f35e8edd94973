"""A comparison of runs as HTML: a section that a report can hold, and a page of its own that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Final

from esper_telemetry.alarms.verdict.outcome import NAMES
from esper_telemetry.views.compare import Comparison, GroupSummary
from esper_telemetry.views.compare.text import (
    Row,
    group_columns,
    group_rows,
    headline,
    mapping_rows,
    metric_columns,
    metric_rows,
    pair_lines,
    repeat_text,
)
from esper_telemetry.views.report_charts import ReportCharts, html_page

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442")
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""
BAND_OPACITY: Final = "33"
MAX_OPEN_METRICS: Final = 20
"""Metrics of a table that is unfolded at first."""

VERDICT_STYLES: Final = {"differs": "warn", "same": "", "cannot tell": ""}


def comparison_page(comparison: Comparison, title: str = "Comparison of runs") -> str:
    """Return a page like that of a report; raises ModuleNotFoundError without plotly."""
    return html_page(title, f"<h1>{escape(title)}</h1>{comparison_section(comparison)}", ReportCharts())


def comparison_section(comparison: Comparison) -> str:
    """Return the comparison as a `<section>`, for a page with the style of a report and plotly.js; raises ImportError without plotly."""
    parts = [f"<p>{escape(headline(comparison))}</p>"]
    for pair in comparison.comparisons:
        style = VERDICT_STYLES[pair.verdict]
        details = "".join(f"<p>{escape(line)}</p>" for line in pair_lines(pair))
        parts.append(
            f'<div class="card banner {style}"><p class="outcome {style}">{escape(pair.text)}</p>{details}</div>'
        )
    parts += [f"<p><strong>{escape(repeat_text(repeat))}</strong></p>" for repeat in comparison.repeats]
    parts.append(f'<div class="card">{_table(group_columns(), group_rows(comparison))}</div>')
    figure = _figure(comparison)
    if figure is not None:
        settings = {"displayModeBar": False, "responsive": True}
        plot = figure.to_html(full_html=False, include_plotlyjs=False, config=settings)
        parts.append(f'<div class="card">{plot}</div>')
    labels = tuple(group.label for group in comparison.groups)
    for name, values in (("setting", comparison.settings), ("version", comparison.versions)):
        if values and len(labels) > 1:
            parts.append(f'<div class="card">{_table((name, *labels), mapping_rows(values))}</div>')
    for pair in comparison.comparisons:
        if pair.metrics:
            unfolded = " open" if len(pair.metrics) <= MAX_OPEN_METRICS else ""
            title = f"{len(pair.metrics)} metrics that differ between {pair.first} and {pair.second}"
            table = _table(metric_columns(pair), metric_rows(pair))
            parts.append(
                f'<details{unfolded}><summary>{escape(title)}</summary><div class="card">{table}</div></details>'
            )
    parts += [f'<p class="dim">{escape(note)}</p>' for note in comparison.notes]
    return f'<section class="comparison">{"".join(parts)}</section>'


def _table(columns: Row, rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(comparison: Comparison) -> Any:
    """Return the returns of all groups with their intervals over environment steps; None where no run has returns."""
    if not comparison.return_key:
        return None
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise ImportError("an HTML page needs plotly: pip install 'esper-telemetry[views]'") from None
    figure = go.Figure()
    for place, group in enumerate(comparison.groups):
        for trace in _traces(group, COLOURS[place % len(COLOURS)]):
            figure.add_trace(go.Scatter(**trace))
    figure.update_layout(
        xaxis_title="environment steps",
        yaxis_title=f"{escape(NAMES.get(comparison.return_key, comparison.return_key))}, mean of the middle half of the seeds",
        margin={"l": 60, "r": 10, "t": 10, "b": 50},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#888"},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top"},
        height=400,
    )
    figure.update_xaxes(gridcolor="#8884", zeroline=False)
    figure.update_yaxes(gridcolor="#8884", zeroline=False)
    return figure


def _traces(group: GroupSummary, colour: str) -> list[dict[str, Any]]:
    """Return the band of a group, where it has an interval, and its line."""
    course = group.course
    points = [
        (step, low, high)
        for step, low, high in zip(course.env_steps, course.low, course.high, strict=True)
        if low is not None and high is not None
    ]
    band = {
        "x": [step for step, _, _ in points] + [step for step, _, _ in reversed(points)],
        "y": [low for _, low, _ in points] + [high for _, _, high in reversed(points)],
        "fill": "toself",
        "fillcolor": colour + BAND_OPACITY,
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": group.label,
    }
    line = {
        "x": list(course.env_steps),
        "y": list(course.level),
        "mode": "lines+markers",
        "connectgaps": True,
        "name": escape(group.label),  # plotly.js reads some HTML in texts
        "legendgroup": group.label,
        "line": {"color": colour},
    }
    return [band, line] if points else [line]
