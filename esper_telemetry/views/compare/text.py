"""A comparison of runs as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from esper_telemetry.core.messages import number
from esper_telemetry.sinks.console import make_console
from esper_telemetry.views.compare import Comparison, GroupComparison, GroupSummary
from esper_telemetry.views.compare.runs import FirstDifference
from esper_telemetry.views.compare.statistics import CONFIDENCE, Divergence
from esper_telemetry.views.outcome import PIPED_WIDTH

MAX_METRICS: Final = 15
"""Metrics in the table of those that differ; `--json` has all."""
MAX_ALARMS: Final = 3
MAX_NAMED_KEYS: Final = 6
VERDICT_COLOURS: Final = {"differs": "bold yellow", "same": "default", "cannot tell": "cyan"}
Row = tuple[str, ...]


def print_comparison(comparison: Comparison) -> None:
    """Print groups, settings, what differs, repeated runs and notes."""
    console = make_console(piped_width=PIPED_WIDTH, markup=False, highlight=False)
    console.print(headline(comparison))
    _print_table(console, group_columns(), group_rows(comparison), numbers_from=3)
    for title, values in (("setting", comparison.settings), ("version", comparison.versions)):
        if values and len(comparison.groups) > 1:
            _print_table(console, (title, *(group.label for group in comparison.groups)), mapping_rows(values))
    for pair in comparison.comparisons:
        console.print(Text(f"\n{pair.text}", VERDICT_COLOURS[pair.verdict]))
        for line in pair_lines(pair):
            console.print(line)
        if pair.metrics:
            _print_table(console, metric_columns(pair), metric_rows(pair)[:MAX_METRICS], numbers_from=1)
        if len(pair.metrics) > MAX_METRICS:
            console.print(f"and {len(pair.metrics) - MAX_METRICS} more; --json lists them.")
    if comparison.repeats:
        console.print()
    for repeat in comparison.repeats:
        console.print(Text(repeat_text(repeat), "green" if repeat.update is None else "bold yellow"))
    if comparison.notes:
        console.print()
    for note in comparison.notes:
        console.print(Text(note, "dim"))


def _print_table(console: Console, columns: Row, rows: list[Row], *, numbers_from: int = 1000) -> None:
    table = Table(
        *(
            Column(name, justify="right" if at >= numbers_from else "left", overflow="fold")
            for at, name in enumerate(columns)
        )
    )
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def headline(comparison: Comparison) -> str:
    """Return the number of runs and groups, and how far they are compared."""
    runs, groups = sum(len(group.runs) for group in comparison.groups), len(comparison.groups)
    text = f"{runs} runs in {groups} groups" if groups > 1 else f"{runs} runs of one configuration"
    return f"{text}, compared up to {comparison.reach:,.0f} environment steps."


def group_columns() -> Row:
    """Return the head of the table of groups."""
    return (
        "group",
        "outcomes",
        "alarms",
        "runs",
        "seeds",
        "final return (IQM)",
        f"{CONFIDENCE:.0%} interval",
        "std",
        "min to max",
    )


def group_rows(comparison: Comparison) -> list[Row]:
    """Return a row for each group."""
    return [
        (
            group.label,
            ", ".join(f"{count} {kind}" for kind, count in group.outcomes.items()),
            _alarms(group),
            str(len(group.runs)),
            str(group.seeds),
            _number(group.level),
            "" if group.interval is None else f"{number(group.interval[0])} to {number(group.interval[1])}",
            _number(group.deviation),
            "" if group.low is None else f"{number(group.low)} to {_number(group.high)}",
        )
        for group in comparison.groups
    ]


def _alarms(group: GroupSummary) -> str:
    named = ", ".join(f"{count} {kind}" for kind, count in list(group.alarms.items())[:MAX_ALARMS])
    more = len(group.alarms) - MAX_ALARMS
    return (named or "none") + (f" and {more} types more" if more > 0 else "")


def _number(value: float | None) -> str:
    return "" if value is None else number(value)


def mapping_rows(values: Mapping[str, Mapping[str, str]]) -> list[Row]:
    """Return a row for each name, with the values of all groups."""
    return [(name, *by_group.values()) for name, by_group in values.items()]


def pair_lines(pair: GroupComparison) -> Iterator[str]:
    """Yield sentences on the final return of two groups, and on metrics that need no test."""
    interval = pair.improvement_interval
    if interval is not None and pair.improvement is not None:
        spread = f" ({CONFIDENCE:.0%} interval {interval.low:.2f} to {interval.high:.2f})"
        p = "" if pair.return_p is None else f"; p = {pair.return_p:.2g}"
        yield f"Probability that a run of {pair.second} ends above one of {pair.first}: {pair.improvement:.2f}{spread}{p}."
    if pair.return_divergence is not None:
        yield f"The returns differ {since_text(pair.return_divergence)}."
    if pair.constant:
        values = [f"{key} {number(a)} and {number(b)}" for key, (a, b) in pair.constant.items()]
        yield f"The same in all runs of a group: {_named(values)}."
    for label, keys in ((pair.first, pair.only_first), (pair.second, pair.only_second)):
        if keys:
            yield f"Only in {label}: {_named(keys)}."


def _named(names: Any) -> str:
    names = list(names)
    more = len(names) - MAX_NAMED_KEYS
    return ", ".join(names[:MAX_NAMED_KEYS]) + (f" and {more} more" if more > 0 else "")


def since_text(divergence: Divergence) -> str:
    """Return the environment steps between which groups differ."""
    end = "to the end" if divergence.until is None else f"to {divergence.until:,.0f}"
    return f"from {divergence.since:,.0f} {end}"


def metric_columns(pair: GroupComparison) -> Row:
    """Return the head of the table of metrics."""
    return ("metric", pair.first, pair.second, "mean over", "p", "differs in environment steps")


def metric_rows(pair: GroupComparison) -> list[Row]:
    """Return a row for each metric that differs, the first to diverge first."""
    return [
        (
            metric.key,
            number(metric.first),
            number(metric.second),
            "the last quarter" if metric.late else "the run",
            f"{metric.p:.2g}",
            "in no part by itself" if metric.divergence is None else since_text(metric.divergence),
        )
        for metric in pair.metrics
    ]


def repeat_text(repeat: FirstDifference) -> str:
    """Return the sentence on two runs that should be equal."""
    seed = f" (seed {repeat.seed})" if repeat.seed else ""
    head = f"{repeat.first} and {repeat.second}{seed}"
    if repeat.update is None:
        lengths = (
            f"; the runs have {repeat.updates[0]:,} and {repeat.updates[1]:,}" if len(set(repeat.updates)) > 1 else ""
        )
        return f"{head} are equal in all {repeat.equal_updates:,} updates that both have{lengths}."
    others = len(repeat.keys) - 1
    more = f" and {others} more key{'' if others == 1 else 's'}" if others else ""
    values = " and ".join(
        "absent" if value is None else "other counts or edges" if isinstance(value, tuple) else repr(value)
        for value in repeat.values
    )
    return (
        f"{head} differ first at update {repeat.update:,} (step {repeat.env_step:,}) in {repeat.key}{more}: {values}."
    )
