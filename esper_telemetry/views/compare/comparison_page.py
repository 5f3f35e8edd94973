"""A comparison of runs as a document: tables in the terminal, a section of a report, and a separate page that works offline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from esper_telemetry.alarms.verdict.run_outcome import NAMES
from esper_telemetry.core.messages import capitalized, number
from esper_telemetry.views.compare import Comparison, GroupComparison
from esper_telemetry.views.compare.compared_runs import FirstDifference
from esper_telemetry.views.compare.seed_statistics import CONFIDENCE, Divergence
from esper_telemetry.views.document import Element, folded, h, scroll_card, table, to_html
from esper_telemetry.views.report_charts import ReportCharts, html_page
from esper_telemetry.views.run_parts import Series

MAX_OPEN_METRICS: Final = 20
"""Metrics of a table that is unfolded at first."""
MAX_PRINTED_METRICS: Final = 15
"""Differing metrics in the table on a terminal; `--json` has all."""
MAX_ALARMS: Final = 3
MAX_NAMED_KEYS: Final = 6
VERDICT_CLASSES: Final = {"differs": "warn", "same": "open", "cannot tell": "info"}
GROUP_COLUMNS: Final = (
    *("group", "outcomes", "alarms", "runs", "seeds", "final return (IQM)", f"{CONFIDENCE:.0%} interval", "std"),
    "min to max",
)


def printed_comparison(comparison: Comparison) -> Iterator[Element]:
    """Yield groups, settings, what differs, repeated runs and notes, for a terminal."""
    yield h("p", headline(comparison))
    yield _groups(comparison)
    yield from _differing(comparison)
    for pair in comparison.comparisons:
        yield h("br")
        yield h("p", pair.text, css=VERDICT_CLASSES[pair.verdict])
        yield from (h("p", line) for line in pair_lines(pair))
        if pair.metrics:
            yield _metrics(pair, MAX_PRINTED_METRICS)
        if len(pair.metrics) > MAX_PRINTED_METRICS:
            yield h("p", f"and {len(pair.metrics) - MAX_PRINTED_METRICS} more; --json lists them.")
    if comparison.repeats:
        yield h("br")
    for repeat in comparison.repeats:
        yield h("p", repeat_text(repeat), css="good" if repeat.update is None else "warn")
    if comparison.notes:
        yield h("br")
    yield from (h("p", note, css="dim") for note in comparison.notes)


def comparison_page(comparison: Comparison) -> str:
    """Return a page in the style of a report; raises ModuleNotFoundError without plotly."""
    charts, title = ReportCharts(), "Comparison of runs"
    return html_page(title, to_html((h("h1", title), comparison_section(comparison, charts))), charts)


def comparison_section(comparison: Comparison, charts: ReportCharts) -> Element:
    """Return the comparison as a section of a page, verdicts first; its chart is added to the page's charts."""
    verdicts = []
    for pair in comparison.comparisons:
        style = VERDICT_CLASSES[pair.verdict]
        text = h("p", pair.text, css=f"outcome {style}")
        verdicts.append(h("div", text, (h("p", line) for line in pair_lines(pair)), css=f"card banner {style}"))
    metrics = (
        folded(
            f"{len(pair.metrics)} metrics that differ between {pair.first} and {pair.second}",
            scroll_card(_metrics(pair)),
            is_open=len(pair.metrics) <= MAX_OPEN_METRICS,
        )
        for pair in comparison.comparisons
        if pair.metrics
    )
    return h(
        "section",
        h("p", headline(comparison)),
        verdicts,
        (h("p", h("strong", repeat_text(repeat))) for repeat in comparison.repeats),
        scroll_card(_groups(comparison)),
        _figure(comparison, charts),
        map(scroll_card, _differing(comparison)),
        metrics,
        (h("p", note, css="dim") for note in comparison.notes),
        css="comparison",
    )


def headline(comparison: Comparison) -> str:
    """Return the number of runs and groups, and how far they are compared."""
    runs, groups = sum(len(group.runs) for group in comparison.groups), len(comparison.groups)
    text = f"{runs} runs in {groups} groups" if groups > 1 else f"{runs} runs of one configuration"
    return f"{text}, compared up to {comparison.reach:,.0f} environment steps."


def _groups(comparison: Comparison) -> Element:
    rows = [
        (
            group.label,
            ", ".join(f"{count} {kind}" for kind, count in group.outcomes.items()),
            _first([f"{count} {kind}" for kind, count in group.alarms.items()], MAX_ALARMS, " types") or "none",
            str(len(group.runs)),
            str(group.seeds),
            "" if group.level is None else number(group.level),
            "" if group.interval is None else f"{number(group.interval.low)} to {number(group.interval.high)}",
            "" if group.deviation is None else number(group.deviation),
            "" if group.low is None or group.high is None else f"{number(group.low)} to {number(group.high)}",
        )
        for group in comparison.groups
    ]
    return table(GROUP_COLUMNS, rows, numbers_from=3)


def _first(names: Sequence[str], count: int, kind: str = "") -> str:
    """Return the first names, and how many others there are."""
    more = len(names) - count
    return ", ".join(names[:count]) + (f" and {more}{kind} more" if more > 0 else "")


def _differing(comparison: Comparison) -> Iterator[Element]:
    """Yield the tables of settings and versions in which groups differ."""
    labels = [group.label for group in comparison.groups]
    for name, values in (("setting", comparison.settings), ("version", comparison.versions)):
        if values and len(labels) > 1:
            yield table((name, *labels), [(key, *by_group.values()) for key, by_group in values.items()])


def _metrics(pair: GroupComparison, count: int | None = None) -> Element:
    """Return the table of metrics that differ, the first to diverge first."""
    rows = [
        (
            metric.key,
            number(metric.first),
            number(metric.second),
            "the last quarter" if metric.late else "the run",
            f"{metric.p:.2g}",
            "in the whole run only" if metric.divergence is None else since_text(metric.divergence),
        )
        for metric in pair.metrics[:count]
    ]
    columns = ("metric", pair.first, pair.second, "mean over", "p", "differs in environment steps")
    return table(columns, rows, numbers_from=1)


def pair_lines(pair: GroupComparison) -> Iterator[str]:
    """Yield sentences on the final return of two groups, and on metrics without a test."""
    interval = pair.improvement_interval
    if interval is not None and pair.improvement is not None and pair.return_p is not None:
        spread = f" ({CONFIDENCE:.0%} interval {interval.low:.2f} to {interval.high:.2f})"
        ends = f"a run of {pair.second} ends above one of {pair.first}"
        yield f"Probability that {ends}: {pair.improvement:.2f}{spread}; p = {pair.return_p:.2g}."
    if pair.return_divergence is not None:
        yield f"The returns differ {since_text(pair.return_divergence)}."
    if pair.constant:
        values = [f"{key} {number(first)} and {number(second)}" for key, (first, second) in pair.constant.items()]
        yield f"The same in all runs of a group: {_first(values, MAX_NAMED_KEYS)}."
    for label, keys in ((pair.first, pair.only_first), (pair.second, pair.only_second)):
        if keys:
            yield f"Only in {label}: {_first(keys, MAX_NAMED_KEYS)}."


def since_text(divergence: Divergence) -> str:
    """Return the environment steps between which groups differ."""
    end = "to the end" if divergence.until is None else f"to {divergence.until:,.0f}"
    return f"from {divergence.since:,.0f} {end}"


def repeat_text(repeat: FirstDifference) -> str:
    """Return the sentence on two runs that should be equal."""
    seed = f" (seed {repeat.seed})" if repeat.seed else ""
    head, (first, second) = f"{repeat.first} and {repeat.second}{seed}", repeat.updates
    if repeat.update is None:
        lengths = "" if first == second else f"; the runs have {first:,} and {second:,}"
        return f"{head} are equal in all {repeat.equal_updates:,} updates that both have{lengths}."
    others = len(repeat.keys) - 1
    more = f" and {others} more key{'' if others == 1 else 's'}" if others else ""
    values = " and ".join(
        "absent" if value is None else "other counts or edges" if isinstance(value, tuple) else text
        for value, text in zip(repeat.values, _distinct(*repeat.values), strict=True)
    )
    return f"{head} differ first at update {repeat.update:,} (step {repeat.env_step:,}) in {repeat.key}{more}: {values}."


def _distinct(*values: Any) -> tuple[str, ...]:
    """Return numbers with as few digits as tell them apart; all digits if only the last ones do."""
    texts = tuple(number(value) if isinstance(value, float) else repr(value) for value in values)
    return texts if len(set(texts)) > 1 else tuple(map(repr, values))


def _figure(comparison: Comparison, charts: ReportCharts) -> Element | None:
    """Return the returns of all groups with their intervals over environment steps; None if no run has returns."""
    if not comparison.return_key:
        return None
    run, lines, areas = charts.add_run(comparison.reach), [], []
    for place, group in enumerate(comparison.groups):
        own = group.course
        course = [*zip(own.env_steps, own.level, own.low, own.high, strict=True)]
        levels = [(round(step), level) for step, level, _, _ in course if level is not None]
        steps = tuple(step for step, _ in levels)
        series = Series(steps, steps, tuple(level for _, level in levels))
        lines.append(charts.line(run, group.label, series, group.label))
        bounds = [(step, low, high) for step, _, low, high in course if low is not None and high is not None]
        areas.append({"line": place, "bounds": bounds})
    name = NAMES.get(comparison.return_key, comparison.return_key)
    legend = f"{capitalized(name)}, mean of the middle half of the seeds, over environment steps."
    plot = h("div", css="plot tall", data_chart=charts.overlay(lines, areas))
    return h("div", plot, h("p", legend, css="dim"), css="card")
