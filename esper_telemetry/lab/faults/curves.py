"""How certain a score is, and what it would be with other thresholds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from esper_telemetry.lab.faults.judging import Judged
from esper_telemetry.lab.faults.scoring import DetectionScore, cases_of, quiet, score

RESAMPLES = 1000
FACTORS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""By which all thresholds are multiplied together."""

MOST_FALSE = 1.0
"""False alarms per 100 healthy updates up to which the area is taken."""


class Interval(NamedTuple):
    """Between which a figure lies in 95 % of the resamples."""

    low: float
    high: float


def intervals(runs: Sequence[Judged], seed: int = 0) -> dict[str, Interval]:
    """Bootstrap intervals over runs, of strict recall and of false alarms per 100 updates (Efron 1979, percentiles)."""
    generator = np.random.default_rng(seed)
    strict = np.array([found.strict for found in cases_of(runs)], float)
    calm = [quiet([run]) for run in alone(runs)]
    false = np.array([len(one.false) for one in calm], float)
    updates = np.array([one.updates for one in calm], float)
    found = {}
    if len(strict):
        found["strict_recall"] = _interval(
            strict[generator.integers(len(strict), size=(RESAMPLES, len(strict)))].mean(1)
        )
    if updates.sum():
        drawn = generator.integers(len(false), size=(RESAMPLES, len(false)))
        found["false_alarms_per_100"] = _interval(100 * false[drawn].sum(1) / updates[drawn].sum(1))
    return found


def alone(runs: Sequence[Judged]) -> list[Judged]:
    """Runs that hold healthy updates of their own: healthy ones, and one broken run per environment and seed."""
    first: dict[tuple[str, int], Judged] = {}
    for run in runs:
        if run.course.fault is not None:
            first.setdefault((run.course.env, run.course.seed), run)
    return [run for run in runs if run.course.fault is None] + list(first.values())


def _interval(samples: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Interval:
    low, high = np.quantile(samples, [0.025, 0.975])
    return Interval(float(low), float(high))


class CurvePoint(NamedTuple):
    """A score with all thresholds multiplied by `factor`."""

    factor: float
    false_alarms_per_100: float
    strict_recall: float


def curve(judge_all: Callable[[float], Sequence[Judged]], factors: Sequence[float] = FACTORS) -> list[CurvePoint]:
    """Scores by factor; those without broken or without healthy updates are left out."""
    found: Mapping[float, DetectionScore] = {factor: score(judge_all(factor)) for factor in factors}
    return [
        CurvePoint(factor, one.false_alarms_per_100, one.strict_recall)
        for factor, one in found.items()
        if one.false_alarms_per_100 is not None and one.strict_recall is not None
    ]


def partial_area(points: Sequence[CurvePoint]) -> float | None:
    """Mean over 0 to 1 false alarms per 100 updates of the best recall that costs no more; None without points."""
    if not points:
        return None
    area, reached, best = 0.0, 0.0, 0.0
    for point in sorted(points, key=lambda point: point.false_alarms_per_100):
        at = min(point.false_alarms_per_100, MOST_FALSE)
        area += best * (at - reached)
        reached = at
        if point.false_alarms_per_100 <= MOST_FALSE:
            best = max(best, point.strict_recall)
    return (area + best * (MOST_FALSE - reached)) / MOST_FALSE
