"""How good a judge is, over many runs: recall, lag, false alarms, causes.

An alarm of an accepted type in [u0, u0 + 20], where u0 is the first broken update, is a *hit*; *strict* recall asks for it within the
bound of the fault, *lenient* recall for any alarm there. Alarms before u0 and in healthy runs are *false*, whatever their level. What
several runs share before they break counts once.

How certain a score is, and what it would be with other thresholds.

A score as plain data, for JSON and for tables.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from esper_telemetry.lab.faults.catalogue import find
from esper_telemetry.lab.faults.fault import WINDOW, Fault
from esper_telemetry.lab.faults.judging import BASELINES, Judged, Opinions, Raised


@dataclass(frozen=True, slots=True)
class Case:
    """A broken run as it counts.

    Attributes:
        fault: what broke it.
        judged: what was said of it.
        hit: the first alarm of an accepted type in the window; None where there is none.
        strict: it came within the fault's bound.
        lenient: there was any alarm in the window.
        rooted: the incident of the hit was put down to the fault; None without a hit.
        others: types of the other alarms in the window.
    """

    fault: Fault
    judged: Judged
    hit: Raised | None
    strict: bool
    lenient: bool
    rooted: bool | None
    others: tuple[str, ...]

    @property
    def lag(self) -> int | None:
        """Updates from the first broken one to the hit."""
        return None if self.hit is None else self.hit.update - self.judged.course.at_update

    @property
    def lead(self) -> int | None:
        """Updates from the hit to the visible drop of the return; None where one of them is missing."""
        symptom = self.judged.symptom
        return None if self.hit is None or symptom is None else symptom - self.hit.update


def case(run: Judged) -> Case:
    """A broken run as it counts."""
    course = run.course
    assert course.fault is not None
    fault, start = find(course.fault, course.dose), course.at_update
    inside = [alarm for alarm in run.raised if start <= alarm.update <= start + WINDOW]
    accepted = [alarm for alarm in inside if alarm.type in fault.accepts]
    hit = accepted[0] if accepted else None
    return Case(
        fault=fault,
        judged=run,
        hit=hit,
        strict=hit is not None and hit.update <= start + fault.bound,
        lenient=bool(inside),
        rooted=None if hit is None else run.causes.get(hit.incident) in fault.named_by,
        others=tuple(alarm.type for alarm in inside if alarm.type not in fault.accepts),
    )


@dataclass(frozen=True, slots=True)
class Quiet:
    """Healthy updates and the alarms in them.

    Attributes:
        updates: how many.
        false: alarms raised in them.
        runs: healthy runs, and how many of them had an alarm.
        alarmed: healthy runs that had an alarm.
    """

    updates: int
    false: tuple[Raised, ...]
    runs: int
    alarmed: int

    @property
    def per_100(self) -> float | None:
        """False alarms per 100 updates."""
        return 100 * len(self.false) / self.updates if self.updates else None


def quiet(runs: Sequence[Judged]) -> Quiet:
    """What is healthy in these runs: healthy ones, and, once per environment and seed, what comes before a fault."""
    sound = [run for run in runs if run.course.fault is None]
    before: dict[tuple[str, int], Judged] = {}
    for run in runs:
        if run.course.fault is not None:
            before.setdefault((run.course.env, run.course.seed), run)
    false = [alarm for run in sound for alarm in run.raised]
    for run in before.values():
        false += [alarm for alarm in run.raised if alarm.update < run.course.at_update]
    updates = sum(run.updates for run in sound) + sum(
        min(run.updates, run.course.at_update - 1) for run in before.values()
    )
    return Quiet(updates, tuple(false), len(sound), sum(bool(run.raised) for run in sound))


@dataclass(frozen=True, slots=True)
class DetectionScore:
    """Figures of one judge; None where nothing was there to count.

    Attributes:
        runs: broken runs.
        strict_recall: share with an accepted alarm within the fault's bound.
        recall: share with an accepted alarm within 20 updates.
        lenient_recall: share with any alarm within 20 updates.
        healthy_updates, false_alarms: how many.
        false_alarms_per_100: in healthy updates.
        updates_between_false_alarms: their mean time apart.
        healthy_runs_alarmed: share of the healthy runs with an alarm.
        median_lag, p90_lag: updates from the first broken one to the accepted alarm.
        root_cause_accuracy: share of the hits whose incident was put down to the fault.
        median_lead: updates from the accepted alarm to the visible drop of the return, where there was one.
        ahead: share of the hits with a drop that came an update before it at least.
        never_symptomatic: share of the broken runs whose return never dropped.
        false_by_type: false alarms by type.
    """

    runs: int
    strict_recall: float | None
    recall: float | None
    lenient_recall: float | None
    healthy_updates: int
    false_alarms: int
    false_alarms_per_100: float | None
    updates_between_false_alarms: float | None
    healthy_runs_alarmed: float | None
    median_lag: float | None
    p90_lag: float | None
    root_cause_accuracy: float | None
    median_lead: float | None
    ahead: float | None
    never_symptomatic: float | None
    false_by_type: Mapping[str, int]


def score(runs: Sequence[Judged]) -> DetectionScore:
    """The figures of a judge over these runs."""
    cases, calm = cases_of(runs), quiet(runs)
    lags = [found.lag for found in cases if found.lag is not None]
    leads = [found.lead for found in cases if found.lead is not None]
    return DetectionScore(
        runs=len(cases),
        strict_recall=share(found.strict for found in cases),
        recall=share(found.hit is not None for found in cases),
        lenient_recall=share(found.lenient for found in cases),
        healthy_updates=calm.updates,
        false_alarms=len(calm.false),
        false_alarms_per_100=calm.per_100,
        updates_between_false_alarms=calm.updates / len(calm.false) if calm.false else None,
        healthy_runs_alarmed=calm.alarmed / calm.runs if calm.runs else None,
        median_lag=statistics.median(lags) if lags else None,
        p90_lag=quantile(lags, 0.9),
        root_cause_accuracy=share(found.rooted for found in cases if found.rooted is not None),
        median_lead=statistics.median(leads) if leads else None,
        ahead=share(lead >= 1 for lead in leads),
        never_symptomatic=share(found.judged.symptom is None for found in cases),
        false_by_type=dict(Counter(alarm.type for alarm in calm.false).most_common()),
    )


def cases_of(runs: Iterable[Judged]) -> list[Case]:
    """The broken runs as they count."""
    return [case(run) for run in runs if run.course.fault is not None]


def share(flags: Iterable[bool]) -> float | None:
    """Share of those that hold; None of nothing."""
    found = list(flags)
    return sum(found) / len(found) if found else None


def quantile(values: Sequence[float], level: float) -> float | None:
    """The smallest value that at least that share of the values does not exceed; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(level * len(ordered)) - 1)] if ordered else None


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


HELD_OUT = ("acrobot",)
"""Environments on which no threshold was set."""

TUNING_SEEDS = (1, 2)
"""Seeds of the runs on which thresholds were set."""


def result(found: Sequence[Opinions]) -> dict[str, Any]:
    """All figures: `strict_recall`, `lenient_recall`, `false_alarms_per_100`, `median_lag`, `root_cause_accuracy`, `per_fault` and more."""
    runs = [one.detectors for one in found]
    cases = cases_of(runs)
    points = curve(lambda factor: [one.scaled[factor] for one in found]) if scaled(found) else []
    return {
        **asdict(score(runs)),
        "core_strict_recall": share(case.strict for case in cases if case.fault.core),
        "intervals": {name: tuple(interval) for name, interval in intervals(runs).items()},
        "per_fault": {name: summary(group) for name, group in grouped(cases, label).items()},
        "per_env": {
            name: summary(group) for name, group in grouped(cases, lambda case: case.judged.course.env).items()
        },
        "curve": [point._asdict() for point in points],
        "partial_auc": partial_area(points),
        "baselines": {name: asdict(score([one.baselines[name] for one in found])) for name in BASELINES if found},
        "false": [
            {"run": run.course.name, "update": alarm.update, "type": alarm.type}
            for run in runs
            for alarm in run.raised
            if run.course.fault is None
        ],
    }


def scaled(found: Sequence[Opinions]) -> bool:
    """Whether all runs were judged with all factors."""
    return bool(found) and all(set(one.scaled) >= set(FACTORS) for one in found)


def halves(found: Sequence[Opinions]) -> dict[str, list[Opinions]]:
    """The runs on which thresholds may have been set, and the others."""
    parts: dict[str, list[Opinions]] = {"tuning": [], "held_out": []}
    for one in found:
        parts["tuning" if tuned_on(one.detectors) else "held_out"].append(one)
    return parts


def tuned_on(run: Judged) -> bool:
    """Whether thresholds may have been set on it."""
    return run.course.seed in TUNING_SEEDS and run.course.env not in HELD_OUT


def label(case: Case) -> str:
    """What a run of a fault is listed under: its name, with the dose where that is not the usual one."""
    dose = case.judged.course.dose
    return case.fault.name if dose == case.fault.dose else f"{case.fault.family or case.fault.name}={dose:g}"


def grouped(cases: Sequence[Case], key: Callable[[Case], str]) -> dict[str, list[Case]]:
    """Cases by what `key` says of them, in the order in which that appears."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(key(case), []).append(case)
    return groups


def summary(cases: Sequence[Case]) -> dict[str, Any]:
    """The figures of some broken runs, and what was raised in them."""
    lags = [case.lag for case in cases if case.lag is not None]
    return {
        "runs": len(cases),
        "strict_recall": share(case.strict for case in cases),
        "recall": share(case.hit is not None for case in cases),
        "lenient_recall": share(case.lenient for case in cases),
        "median_lag": statistics.median(lags) if lags else None,
        "root_cause_accuracy": share(case.rooted for case in cases if case.rooted is not None),
        "median_lead": median([case.lead for case in cases if case.lead is not None]),
        "hits": counts(case.hit.type for case in cases if case.hit is not None),
        "causes": counts(cause(case) for case in cases if case.hit is not None),
        "others": counts(kind for case in cases for kind in set(case.others)),
        "missed": [case.judged.course.name for case in cases if not case.strict],
    }


def median(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return statistics.median(values) if values else None


def counts(kinds: Any) -> Mapping[str, int]:
    """How often each, the commonest first."""
    return dict(Counter(kinds).most_common())


def cause(case: Case) -> str:
    """What the incident of the hit was put down to."""
    return case.judged.causes.get(case.hit.incident, "") if case.hit else ""
