"""Comparison of runs, as plain data: groups of seeds, their final returns, what differs beyond the seeds, and first exact differences.

Runs of one configuration are a group, with any seeds. Each later group is compared with the first one over the
environment steps that all but much shorter runs reach.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from esper_telemetry.alarms.verdict.run_outcome import NONFINITE
from esper_telemetry.views.compare.compared_runs import RETURN_KEYS, ComparedRun, FirstDifference, configurations, first_difference
from esper_telemetry.views.compare.seed_statistics import (
    METRICS_LEVEL,
    RETURN_LEVEL,
    BootstrapInterval,
    Divergence,
    MetricDifference,
    MetricMeans,
    StepAxis,
    bootstrap_interval,
    final_return_test,
    improvement,
    iqm,
    seeds_needed,
    smallest_p,
)

MAX_LABEL_SETTINGS: Final = 3
"""Settings that name a group."""
MAX_NAMED_RUNS: Final = 5
MIN_REACH_SHARE: Final = 0.9
"""Share of the longest run's steps that all runs reach if they are of one length."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run: its place, seed, end, outcome and final return; `final_return` is None without returns."""

    place: str
    name: str
    seed: str
    status: str | None
    outcome: str
    text: str
    updates: int
    env_steps: int
    final_return: float | None


@dataclass(frozen=True, slots=True)
class GroupCourse:
    """Interquartile mean return of a group along the environment steps, with its interval; None if no episode ended."""

    env_steps: tuple[float, ...]
    level: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """Runs of one configuration.

    Attributes:
        label: the settings in which it differs from other groups.
        runs: all of them.
        seeds: number of runs with different seeds, which are what tests count.
        outcomes: number of runs by outcome.
        alarms: number of runs by type of alarm that was raised.
        level, interval: interquartile mean of the final returns, and its bootstrap interval.
        deviation, low, high: standard deviation, smallest and largest of the final returns.
        course: return along the run.
    """

    label: str
    runs: tuple[RunSummary, ...]
    seeds: int
    outcomes: Mapping[str, int]
    alarms: Mapping[str, int]
    level: float | None
    interval: BootstrapInterval | None
    deviation: float | None
    low: float | None
    high: float | None
    course: GroupCourse


@dataclass(frozen=True, slots=True)
class GroupComparison:
    """A group against the first one.

    Attributes:
        first, second: labels of the groups.
        seeds: of both.
        verdict: `differs`, `same` if nothing differs beyond the seeds, `cannot tell` with too few of them.
        text: in one or more sentences.
        improvement, improvement_interval: probability that a run of the second group has the higher final return.
        return_p: of the final return; None if it could not be tested.
        return_divergence: first sustained one of the return.
        metrics: differing metrics, by the environment step of their first divergence.
        tested: number of metrics that were tested.
        constant: metrics that are constant over the runs of each group, and differ: values of both.
        only_first, only_second: metrics that only one group has.
    """

    first: str
    second: str
    seeds: tuple[int, int]
    verdict: str
    text: str
    improvement: float | None
    improvement_interval: BootstrapInterval | None
    return_p: float | None
    return_divergence: Divergence | None
    metrics: tuple[MetricDifference, ...]
    tested: int
    constant: Mapping[str, tuple[float, float]]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of several runs.

    Attributes:
        groups: in the order of their first runs.
        comparisons: of each later group with the first one.
        repeats: of runs of one configuration and seed with the first such run.
        return_key: the metric that is the return; empty if no run has one.
        reach: environment steps up to which runs are compared.
        settings: in which groups differ: value by group label; `none` for a setting that a group lacks.
        versions: of software that are not the same in all runs: by group label.
        notes: sentences on runs that are shorter, damaged or without records.
    """

    groups: tuple[GroupSummary, ...]
    comparisons: tuple[GroupComparison, ...]
    repeats: tuple[FirstDifference, ...]
    return_key: str
    reach: float
    settings: Mapping[str, Mapping[str, str]]
    versions: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values


def comparison(runs: Sequence[ComparedRun], *, ignore: Collection[str] = (), by: Collection[str] = ()) -> Comparison:
    """Compare at least two runs; raises ValueError for fewer, ImportError without SciPy. `ignore` and `by` as for `configurations`."""
    if len(runs) < 2:
        raise ValueError(f"a comparison needs at least two runs, got {len(runs)}")
    grouped: dict[tuple[tuple[str, str], ...], list[ComparedRun]] = {}
    for run, configuration in zip(runs, configurations(runs, ignore=ignore, by=by), strict=True):
        grouped.setdefault(tuple(sorted(configuration.items())), []).append(run)
    groups, settings = list(grouped.values()), [dict(configuration) for configuration in grouped]
    names = sorted({name for each in settings for name in each if len({other.get(name) for other in settings}) > 1})
    labels = _labels(settings, names)
    return_key = next((key for key in RETURN_KEYS if any(key in run.keys for run in runs)), "")
    axis = StepAxis.of(runs)
    independent = [_one_per_seed(group) for group in groups]
    return Comparison(
        groups=tuple(
            _summary(label, group, seeds, return_key, axis) for label, group, seeds in zip(labels, groups, independent, strict=True)
        ),
        comparisons=tuple(
            _compare((labels[0], label), (independent[0], seeds), return_key, axis)
            for label, seeds in zip(labels[1:], independent[1:], strict=True)
        ),
        repeats=tuple(difference for group in groups for difference in _repeats(group)),
        return_key=return_key,
        reach=axis.reach,
        settings={name: {label: _word(each.get(name)) for label, each in zip(labels, settings, strict=True)} for name in names},
        versions=_versions(labels, groups),
        notes=tuple(_notes(runs, groups, independent, return_key, axis)),
    )


def _labels(settings: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[str]:
    """Return a name for each group: its own values of the settings that differ between groups."""
    if len(settings) == 1:
        return ["all runs"]
    more = f" and {len(names) - MAX_LABEL_SETTINGS} more" if len(names) > MAX_LABEL_SETTINGS else ""
    labels = [", ".join(f"{name}={_word(each.get(name))}" for name in names[:MAX_LABEL_SETTINGS]) + more for each in settings]
    repeated = {label for label, count in Counter(labels).items() if count > 1}
    return [f"{label} ({place})" if label in repeated else label for place, label in enumerate(labels, 1)]


def _word(value: str | None) -> str:
    return "none" if value is None else value.strip('"')


def _repeats(group: Sequence[ComparedRun]) -> list[FirstDifference]:
    """Return first differences of runs with the seed of an earlier one; without seeds, of two runs that begin alike."""
    by_seed: dict[str, list[ComparedRun]] = {}
    for run in group:
        by_seed.setdefault(run.seed, []).append(run)
    differences = [first_difference(runs[0], run) for seed, runs in by_seed.items() if seed or len(group) == 2 for run in runs[1:]]
    return [one for one in differences if one.seed or one.equal_updates]


def _one_per_seed(group: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return the runs of a group that have records, the longest of each seed: repeated runs of a seed are one observation."""
    chosen: dict[str, ComparedRun] = {}
    for place, run in enumerate(group):
        seed = run.seed or f"run {place}"
        if len(run.updates) and (seed not in chosen or run.last_step > chosen[seed].last_step):
            chosen[seed] = run
    return list(chosen.values())


def _summary(label: str, group: Sequence[ComparedRun], independent: Sequence[ComparedRun], return_key: str, axis: StepAxis) -> GroupSummary:
    finals = np.array([run.final_return(return_key, axis.reach) for run in independent])
    finals = finals[np.isfinite(finals)]
    courses = np.array([axis.means(run, run.column(return_key)[:, None])[:, 0] for run in independent])
    columns = [column[np.isfinite(column)] for column in courses.reshape(len(independent), axis.bins).T]
    intervals = [bootstrap_interval(iqm, column) for column in columns]
    has_returns = len(finals) > 0
    return GroupSummary(
        label,
        runs=tuple(_run_summary(run, run.final_return(return_key, axis.reach)) for run in group),
        seeds=len(independent),
        outcomes=dict(Counter(str(run.outcome) for run in group).most_common()),
        alarms=dict(Counter(kind for run in group for kind in sorted(run.alarms)).most_common()),
        level=float(iqm(finals)) if has_returns else None,
        interval=bootstrap_interval(iqm, finals),
        deviation=float(np.std(finals, ddof=1)) if len(finals) > 1 else None,
        low=float(finals.min()) if has_returns else None,
        high=float(finals.max()) if has_returns else None,
        course=GroupCourse(
            tuple(((axis.edges[:-1] + axis.edges[1:]) / 2).tolist()),
            tuple(float(iqm(column)) if len(column) else None for column in columns),
            tuple(one and one.low for one in intervals),
            tuple(one and one.high for one in intervals),
        ),
    )


def _run_summary(run: ComparedRun, final: float) -> RunSummary:
    return RunSummary(
        *(run.place, run.info.name, run.seed, None if run.status is None else str(run.status), str(run.outcome), run.outcome_text),
        *(len(run.updates), int(run.last_step), final if math.isfinite(final) else None),
    )


def _compare(
    labels: tuple[str, str], groups: tuple[Sequence[ComparedRun], Sequence[ComparedRun]], return_key: str, axis: StepAxis
) -> GroupComparison:
    """Compare two groups of runs, one per seed."""
    finals = [np.array([run.final_return(return_key, axis.reach) for run in group]) for group in groups]
    present = [values[np.isfinite(values)] for values in finals]
    has_returns = all(len(values) for values in present)
    return_p, return_divergence = final_return_test(groups, finals, return_key, axis)
    table = MetricMeans.of(groups, axis)
    metrics, return_differs = table.differences(), return_p is not None and return_p <= RETURN_LEVEL
    verdict = "differs" if metrics or return_differs else "same"
    if return_p is None and not table.is_testable:
        verdict = "cannot tell"
    comparison = GroupComparison(
        *labels,
        (len(groups[0]), len(groups[1])),
        verdict,
        "",
        improvement(*present) if has_returns else None,
        bootstrap_interval(improvement, *present) if has_returns else None,
        return_p,
        return_divergence,
        metrics,
        len(table.tested),
        table.constant(),
        *table.only_in_one(),
    )
    levels = [float(iqm(values)) if len(values) else math.nan for values in present]
    return replace(comparison, text=_text(comparison, levels))


def _text(comparison: GroupComparison, levels: Sequence[float]) -> str:
    first, second = comparison.seeds
    seeds = f"{first} and {second} seeds"
    if comparison.verdict == "cannot tell":
        if smallest_p(first, second) <= METRICS_LEVEL:
            return f"Cannot tell: the groups have {seeds}, and no metric that all of them report up to a common step."
        return (
            f"Cannot tell with {seeds}: a difference of metrics shows from {seeds_needed(METRICS_LEVEL)} seeds per group on,"
            f" one of the final return from {seeds_needed(RETURN_LEVEL)} on."
        )
    missing = (
        f" The final return was not tested: it needs {seeds_needed(RETURN_LEVEL)} seeds with returns per group."
        if comparison.return_p is None
        else ""
    )
    if comparison.verdict == "same":
        return f"Nothing differs beyond the seeds: {seeds}, {comparison.tested} metrics tested.{missing}"
    parts = []
    if comparison.return_p is not None and comparison.return_p <= RETURN_LEVEL:
        direction = "higher" if levels[1] > levels[0] else "lower"
        parts.append(f"its final return is {direction} (p = {comparison.return_p:.2g})")
    if comparison.metrics:
        leading = comparison.metrics[0]
        since = ""
        if leading.divergence:
            until = " on" if leading.divergence.until is None else f" to {leading.divergence.until:,.0f}"
            since = f", first {leading.key} from step {leading.divergence.since:,.0f}{until}"
        parts.append(f"{len(comparison.metrics)} of {comparison.tested} metrics differ{since}")
    return f"{comparison.second} differs from {comparison.first}: {', and '.join(parts)} ({seeds}).{missing}"


def _versions(labels: Sequence[str], groups: Sequence[Sequence[ComparedRun]]) -> dict[str, dict[str, str]]:
    """Return the versions of software that are not the same in all runs, by group."""
    names = dict.fromkeys(name for group in groups for run in group for name in run.info.versions)
    versions = {}
    for name in names:
        by_group = [sorted({run.info.versions.get(name, "none") for run in group}) for group in groups]
        if len({version for each in by_group for version in each}) > 1:
            versions[name] = {label: ", ".join(each) for label, each in zip(labels, by_group, strict=True)}
    return versions


def _notes(
    runs: Sequence[ComparedRun],
    groups: Sequence[Sequence[ComparedRun]],
    independent: Sequence[Sequence[ComparedRun]],
    return_key: str,
    axis: StepAxis,
) -> Iterator[str]:
    """Yield sentences on runs of which only a part, or nothing, is compared."""
    if len(groups) == 1:
        yield "All runs have one configuration: there are not two groups to compare."
    if axis.reach < MIN_REACH_SHARE * max(run.last_step for run in runs):
        yield f"Runs have different lengths: they are compared up to {axis.reach:,.0f} environment steps."
    for run in runs:
        name = f"{run.place} ({run.info.name})"
        if run.damage:
            yield f"{run.damage}."
        if not len(run.updates):
            yield f"{name} has no records: only its settings and how it ended are compared."
            continue
        if run.last_step < axis.reach:
            yield f"{name} ends at {run.last_step:,.0f} environment steps: its metrics are not compared with longer runs."
        if return_key and not np.isfinite(run.final_return(return_key, axis.reach)):
            yield f"{name} has no returns."
        if NONFINITE in run.keys and (since := np.flatnonzero(run.column(NONFINITE) > 0)).size:
            yield f"{name} has numbers that are not finite since update {run.updates[since[0]]:,}; they are left out of its metrics."
    if not return_key:
        yield "No run has returns: only metrics are compared."
    repeated = [
        run.place
        for group, kept in zip(groups, independent, strict=True)
        for run in group
        if len(run.updates) and not any(run is one for one in kept)
    ]
    if repeated:
        places = ", ".join(repeated[:MAX_NAMED_RUNS]) + ", ..." * (len(repeated) > MAX_NAMED_RUNS)
        yield (
            f"{len(repeated)} of the runs repeat{'s' if len(repeated) == 1 else ''} a seed of the group: the longest run of each seed"
            f" counts, without {places}."
        )
    if any(not run.seed for run in runs) and len(runs) > 1:
        yield "Some runs record no seed: each is treated as a different seed."
