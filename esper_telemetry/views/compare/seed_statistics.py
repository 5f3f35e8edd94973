"""Statistics over the seeds of one or two groups of runs: levels with intervals, and permutation tests of many metrics at once.

SciPy gives the intervals, and not `rliable`, which computes the same: the interquartile mean is a trimmed mean, and each group is resampled
within itself (Agarwal et al. 2021, "Deep RL at the Edge of the Statistical Precipice"). `rliable` needs seaborn, pandas and `arch`, and
cannot be imported if `arch` and pandas do not fit. The permutation test is written here, as SciPy's tests one statistic at a time.

Two groups of one configuration are said to differ with a probability of at most `LEVEL`: the final return has `RETURN_LEVEL` of it,
all metrics together `METRICS_LEVEL`. The only assumption is that runs of one configuration are exchangeable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from esper_telemetry.alarms.alarm_state import ALARMS_FAMILY
from esper_telemetry.core.metric import Array, family_name
from esper_telemetry.views.compare.compared_runs import ComparedRun, base_key, is_reproducible, is_sampled

RETURN_LEVEL: Final = 0.02
METRICS_LEVEL: Final = 0.03
LEVEL: Final = RETURN_LEVEL + METRICS_LEVEL
"""Probability that groups of one configuration are said to differ."""
MAX_BINS: Final = 20
"""Parts of the axis of environment steps in which courses are compared."""
LATE_SHARE: Final = 0.25
"""Last part of a run, whose means are tested as well as the means of the whole run."""
MIN_REACH_SHARE: Final = 0.5
"""Runs that are shorter than this share of the longest one do not shorten the axis."""
SUSTAINED_BINS: Final = 2
"""Neighbouring parts of the axis in which a divergence that is sustained shows."""
RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95
MIN_INTERVAL_RUNS: Final = 3
"""Runs of a group from which on an interval is given: resampling two gives their smallest and largest value."""
MAX_SPLITS: Final = 5_000
"""All splits of the runs are tested up to this number, else as many random ones; 7 and 7 runs have 3,432."""
SPLITS_AT_ONCE: Final = 256
"""Splits that are held in memory together."""
TRIMMED_SHARE: Final = 0.25
"""Share of the runs that the interquartile mean leaves out at either end."""
TIE: Final = 1e-9
"""Relative difference up to which two statistics are equal: the mirrored split is computed in another order."""


class BootstrapInterval(NamedTuple):
    """Bootstrap interval of `CONFIDENCE`."""

    low: float
    high: float


def iqm(values: Array, axis: int = -1) -> Array:
    """Return the interquartile mean, the mean of the middle half."""
    trimmed: Array = _scipy_stats().trim_mean(values, TRIMMED_SHARE, axis=axis)
    return trimmed


def improvement(first: Array, second: Array, axis: int = -1) -> float:
    """Return the probability that a run of the second group is above one of the first, ties counted half; shapes [..., runs].

    SciPy's bootstrap passes `axis`, which is the last one.
    """
    above = second[..., :, None] > first[..., None, :]
    equal = second[..., :, None] == first[..., None, :]
    return (above + 0.5 * equal).mean(axis=(-2, -1))  # type: ignore[no-any-return]  # an array in the bootstrap


def bootstrap_interval(statistic: Callable[..., Any], *samples: Array) -> BootstrapInterval | None:
    """Return the interval of a statistic of groups [runs], each resampled within itself; None if one has too few runs."""
    if min(len(sample) for sample in samples) < MIN_INTERVAL_RUNS:
        return None
    result = _scipy_stats().bootstrap(
        samples,
        statistic,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",  # the others are undefined if all runs of a small group are equal
        random_state=np.random.default_rng(0),
    )
    return BootstrapInterval(float(result.confidence_interval.low), float(result.confidence_interval.high))


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError:
        raise ImportError("comparing runs needs scipy: pip install 'esper-telemetry[views]'") from None
    return stats


def smallest_p(first: int, second: int) -> float:
    """Return the smallest p-value that the permutation test of groups of so many runs can give."""
    if min(first, second) < 2:  # the spread within a group of one is not known
        return 1.0
    # the statistic is two-sided: with equal sizes the mirrored split has the same value
    return (2 if first == second else 1) / comb(first + second, first)


def seeds_needed(level: float) -> int:
    """Return the smallest number of seeds per group with which the permutation test can reach the level."""
    return next(count for count in range(2, 1000) if smallest_p(count, count) <= level)


def permutation_p(values: Array, first: int) -> Array:
    """Return p-values [features] of a difference between two groups, adjusted for the number of features.

    A step-down permutation test of the largest absolute t statistic (Westfall and Young 1993, algorithm 4.1): under the null hypothesis the
    probability that any p-value is at most a level is at most that level, however the features depend on one another.

    Args:
        values: [runs, features], NaN if a run lacks it; the runs of the first group come first.
        first: number of runs of the first group.
    """
    runs, features = values.shape
    if not features:
        return np.zeros(0)
    observed = _scores(values, np.arange(runs)[None, :] < first)[0]
    order = np.argsort(-observed, kind="stable")
    ordered, bound = values[:, order], observed[order] * (1 - TIE)
    reached, count = np.zeros(features), 0
    for splits in _splits(runs, first):
        scores = _scores(ordered, splits)
        # the largest statistic among a feature and those below it
        largest = np.maximum.accumulate(scores[:, ::-1], axis=1)[:, ::-1]
        reached += (largest >= bound).sum(axis=0)
        count += len(splits)
    adjusted = np.empty(features)
    adjusted[order] = np.maximum.accumulate(reached / count)
    return adjusted


def _splits(runs: int, first: int) -> Iterator[npt.NDArray[np.bool_]]:
    """Yield masks [splits, runs] of the first group: all, or the observed one and random ones."""
    if comb(runs, first) <= MAX_SPLITS:
        members = combinations(range(runs), first)
        while chunk := list(islice(members, SPLITS_AT_ONCE)):
            masks = np.zeros((len(chunk), runs), bool)
            np.put_along_axis(masks, np.array(chunk), True, axis=1)
            yield masks
        return
    yield np.arange(runs)[None, :] < first
    rng = np.random.default_rng(0)
    for begin in range(1, MAX_SPLITS, SPLITS_AT_ONCE):
        size = min(SPLITS_AT_ONCE, MAX_SPLITS - begin)
        yield rng.permuted(np.tile(np.arange(runs) < first, (size, 1)), axis=1)


def _scores(values: Array, splits: npt.NDArray[np.bool_]) -> Array:
    """Return absolute t statistics [splits, features]; 0 if a group has fewer than two values, or all values are equal."""
    present = np.isfinite(values)
    count = present.sum(axis=0)
    filled = np.where(present, values, 0.0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        centred = np.where(present, filled - filled.sum(axis=0) / count, 0.0)
        largest = np.abs(centred).max(axis=0)
        scaled = centred / largest  # so that squares neither overflow nor vanish
        varies = np.isfinite(largest) & (largest > TIE * np.abs(filled).max(axis=0))
        scaled = np.where(varies, scaled, 0.0)
        weights = splits.astype(float)
        n_first = weights @ present
        n_second = count - n_first
        sum_first, total = weights @ scaled, scaled.sum(axis=0)
        sum_second = total - sum_first
        squares = (scaled**2).sum(axis=0)
        within = np.maximum(squares - sum_first**2 / n_first - sum_second**2 / n_second, TIE * squares)
        error = np.sqrt(within / (count - 2) * (1 / n_first + 1 / n_second))
        scores = np.abs(sum_first / n_first - sum_second / n_second) / error
    return np.where((n_first >= 2) & (n_second >= 2) & np.isfinite(scores), scores, 0.0)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Environment steps from which on two groups differ, and from which on they are equal again; None if they differ to the end."""

    since: float
    until: float | None


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """A metric in which two groups differ.

    Attributes:
        key, name: of the metric.
        first, second: means of the groups.
        late: True if the means are taken over the last part of the runs, else over the whole runs.
        p: adjusted for all metrics that were tested.
        divergence: the first sustained one; None if no single part of the run shows one.
    """

    key: str
    name: str
    first: float
    second: float
    late: bool
    p: float
    divergence: Divergence | None


@dataclass(frozen=True, slots=True)
class StepAxis:
    """Environment steps up to `reach`, in `bins` equal parts."""

    reach: float
    bins: int

    @classmethod
    def of(cls, runs: Sequence[ComparedRun]) -> StepAxis:
        """Return the axis that the runs have in common."""
        longest = max(run.last_step for run in runs)
        reach = min((run.last_step for run in runs if run.last_step >= MIN_REACH_SHARE * longest), default=0.0)
        records = [int((run.env_steps <= reach).sum()) for run in runs if run.last_step >= reach]
        return cls(reach, max(1, min([MAX_BINS, *records])))

    @property
    def edges(self) -> Array:
        """Ends of the parts, [bins + 1]."""
        return np.linspace(0.0, self.reach, self.bins + 1)

    def means(self, run: ComparedRun, values: Array) -> Array:
        """Return means [bins, keys] of values [records, keys], NaN without a value."""
        parts = np.searchsorted(self.edges, run.env_steps, side="left") - 1
        means = np.full((self.bins, values.shape[1]), math.nan)
        for part in range(self.bins):
            rows = values[parts == part] if part else values[(parts <= 0) & (run.env_steps <= self.edges[1])]
            means[part] = _mean(rows)
        return means


def _mean(rows: Array) -> Array:
    """Return means over rows without absent values; NaN if all are absent."""
    count = np.isfinite(rows).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        means: Array = np.nansum(rows, axis=0) / np.where(count, count, math.nan)
    return means


def final_return_test(
    groups: Sequence[Sequence[ComparedRun]], finals: Sequence[Array], return_key: str, axis: StepAxis
) -> tuple[float | None, Divergence | None]:
    """Return the p-value of the final return, and the first divergence of its course if it differs.

    None and None with too few runs. The course is tested after the final return, and only then, so both have the level together.

    Args:
        groups: runs of both, one per seed.
        finals: their final returns, NaN for a run without returns.
        return_key: the return.
        axis: of the course.
    """
    counts = [int(np.isfinite(values).sum()) for values in finals]
    if smallest_p(*counts) > RETURN_LEVEL:
        return None, None
    levels = np.concatenate(finals)
    with_return = np.isfinite(levels)
    p = float(permutation_p(levels[with_return, None], counts[0])[0])
    if p > RETURN_LEVEL:
        return p, None
    runs = [run for run, has in zip([*groups[0], *groups[1]], with_return, strict=True) if has]
    courses = np.array([axis.means(run, run.column(return_key)[:, None])[:, 0] for run in runs])
    return p, _divergence(permutation_p(courses, counts[0]) <= RETURN_LEVEL, axis)


def _divergence(differs: npt.NDArray[np.bool_], axis: StepAxis) -> Divergence | None:
    """Return the first divergence that lasts for `SUSTAINED_BINS` parts of the axis, and its end if it is over for as many."""
    count = len(differs)
    begin = next((at for at in range(count) if differs[at : at + SUSTAINED_BINS].sum() == SUSTAINED_BINS), None)
    if begin is None:
        return None
    end = int(np.flatnonzero(differs)[-1]) + 1
    return Divergence(float(axis.edges[begin]), float(axis.edges[end]) if count - end >= SUSTAINED_BINS else None)


@dataclass(frozen=True, slots=True)
class MetricMeans:
    """Means of metrics in two groups, over the runs that reach the end of the axis.

    Attributes:
        sizes: number of these runs of both groups.
        runs: the first group's runs are first.
        keys: metrics that say something about training: no histories, no alarms, none of time and memory.
        courses: [runs, bins, keys].
        axis: of the bins.
    """

    sizes: tuple[int, int]
    runs: Sequence[ComparedRun]
    keys: tuple[str, ...]
    courses: Array
    axis: StepAxis

    @classmethod
    def of(cls, groups: Sequence[Sequence[ComparedRun]], axis: StepAxis) -> MetricMeans:
        """Return the table of two groups, one run per seed."""
        kept = [[run for run in group if run.last_step >= axis.reach] for group in groups]
        runs = [*kept[0], *kept[1]]
        names = dict.fromkeys(key for run in runs for key in run.keys)
        keys = tuple(key for key in names if _says_something(key, runs))
        courses = np.full((len(runs), axis.bins, len(keys)), math.nan)
        for row, run in enumerate(runs):
            places = {key: column for column, key in enumerate(run.keys)}
            shared = [column for column, key in enumerate(keys) if key in places]
            means = axis.means(run, run.values[:, [places[keys[column]] for column in shared]])
            courses[row][:, shared] = means
        # how often a metric is sampled depends on the machine: only parts of the axis count that all runs have
        sampled = np.array([any(is_sampled(key, run.info) for run in runs[:1] + runs[-1:]) for key in keys], bool)
        missing = ~np.isfinite(courses).all(axis=0)
        courses[:, missing & sampled] = math.nan
        return cls((len(kept[0]), len(kept[1])), runs, keys, courses, axis)

    @property
    def is_testable(self) -> bool:
        """True if the test can reach its level and has a metric to test."""
        return smallest_p(*self.sizes) <= METRICS_LEVEL and bool(self.tested)

    @property
    def windows(self) -> Array:
        """Means [2, runs, keys] over the whole axis and over its last part."""
        late = min(self.axis.bins - 1, round(self.axis.bins * (1 - LATE_SHARE)))
        return np.array([[_mean(course[begin:]) for course in self.courses] for begin in (0, late)]).reshape(
            2, len(self.runs), len(self.keys)
        )

    @property
    def tested(self) -> tuple[int, ...]:
        """Columns of metrics that most runs have, and whose means differ from run to run.

        Counts and settings with few different values separate two groups by chance in many splits, and would hide every other metric.
        The choice is the same for all splits, so the test stays exact.
        """
        whole = self.windows[0]
        return tuple(
            column
            for column in range(len(self.keys))
            if np.isfinite(whole[:, column]).sum() >= 0.75 * len(self.runs)
            and len(np.unique(whole[np.isfinite(whole[:, column]), column])) > max(self.sizes)
        )

    def differences(self) -> tuple[MetricDifference, ...]:
        """Return the metrics that differ, by the step of their first divergence, then by p-value."""
        if not self.is_testable:
            return ()
        columns, windows, first = list(self.tested), self.windows, self.sizes[0]
        p = permutation_p(np.concatenate(list(windows[:, :, columns]), axis=1), first).reshape(2, len(columns))
        differences = []
        for place, column in enumerate(columns):
            late = bool(p[1, place] < p[0, place])
            if p[int(late), place] > METRICS_LEVEL:
                continue
            key, values = self.keys[column], windows[int(late), :, column]
            described = next((info for run in self.runs if (info := run.info.describe(key))), None)
            differences.append(
                MetricDifference(
                    key,
                    described.name if described else "",
                    float(np.nanmean(values[:first])),
                    float(np.nanmean(values[first:])),
                    late,
                    float(p[int(late), place]),
                    _divergence(permutation_p(self.courses[:, :, column], first) <= METRICS_LEVEL, self.axis),
                )
            )
        return tuple(sorted(differences, key=lambda one: (one.divergence.since if one.divergence else math.inf, one.p)))

    def constant(self) -> dict[str, tuple[float, float]]:
        """Return metrics whose means are equal over the runs of each group, and differ between the groups."""
        if smallest_p(*self.sizes) > METRICS_LEVEL:
            return {}
        parts = self.windows[0][: self.sizes[0]], self.windows[0][self.sizes[0] :]
        (first, second), (first_high, second_high) = ([pick(part, axis=0) for part in parts] for pick in (np.min, np.max))
        columns = (first == first_high) & (first != second) & (second == second_high)
        return {self.keys[at]: (float(first[at]), float(second[at])) for at in np.flatnonzero(columns)}

    def only_in_one(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return metrics that all runs of one group have and no run of the other, the first group's metrics first."""
        if smallest_p(*self.sizes) > METRICS_LEVEL:
            return (), ()
        has = np.array([[key in run.keys for key in self.keys] for run in self.runs]).reshape(len(self.runs), -1)
        sampled = np.array([is_sampled(key, self.runs[0].info) for key in self.keys], bool)

        def only(mine: npt.NDArray[np.bool_], other: npt.NDArray[np.bool_]) -> tuple[str, ...]:
            return tuple(np.array(self.keys)[mine.all(0) & ~other.any(0) & ~sampled].tolist())

        first, second = has[: self.sizes[0]], has[self.sizes[0] :]
        return only(first, second), only(second, first)


def _says_something(key: str, runs: Sequence[ComparedRun]) -> bool:
    described = next((info for run in runs if (info := run.info.describe(key))), None)
    return base_key(key) == key and family_name(key) != ALARMS_FAMILY.name and is_reproducible(key, described)
