"""The score of a detector over many runs: recall, lag, false alarms and causes, with intervals, as plain data.

An alarm of an accepted type in [u0, u0 + 20], with u0 the first broken update, is a *hit*. So is `integrity/equation` with a
hypothesis that names the fault. *Strict* recall counts hits within the bound of the fault, *lenient* recall any alarm in the window.
Alarms before u0 and in healthy runs are *false*, regardless of their level. Updates that several runs share before they break count
once.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from esper_telemetry.lab.faults.fault import WINDOW_UPDATES, Fault
from esper_telemetry.lab.faults.fault_catalogue import find
from esper_telemetry.lab.faults.verdicts import BASELINES, RaisedAlarm, RunVerdict, RunVerdicts

THRESHOLD_FACTORS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Factors by which all thresholds are multiplied together."""

MAX_FALSE_PER_100 = 1.0
"""False alarms per 100 healthy updates up to which the area under the curve is taken."""

BOOTSTRAP_RESAMPLES = 1000

HELD_OUT_ENVIRONMENTS = ("acrobot",)
"""Environments on which no threshold was set."""

TUNING_SEEDS = (1, 2)
"""Seeds of the runs on which thresholds were set."""


@dataclass(frozen=True, slots=True)
class BrokenRun:
    """The outcome of detection in one broken run.

    Attributes:
        fault: fault of the run.
        verdict: alarms of the run.
        hit: first alarm of an accepted type in the window, or None.
        strict: whether the hit came within the fault's bound.
        lenient: whether there was any alarm in the window.
        correct_cause: whether the cause of the hit's incident is accepted; None without a hit.
        others: types of the other alarms in the window.
    """

    fault: Fault
    verdict: RunVerdict
    hit: RaisedAlarm | None
    strict: bool
    lenient: bool
    correct_cause: bool | None
    others: tuple[str, ...]

    @classmethod
    def of(cls, verdict: RunVerdict) -> BrokenRun:
        """Return the outcome for a run with a fault."""
        run = verdict.run
        assert run.fault is not None
        fault, start = find(run.fault, run.dose), run.at_update
        inside = [alarm for alarm in verdict.alarms if start <= alarm.update <= start + WINDOW_UPDATES]
        naming = [alarm for alarm in inside if not alarm.hypotheses.isdisjoint(fault.hypotheses)]
        hit = next((alarm for alarm in inside if alarm.type in fault.accepts or alarm in naming), None)
        causes = {*fault.accepts, *(alarm.type for alarm in naming if hit and alarm.incident == hit.incident)}
        return cls(
            fault=fault,
            verdict=verdict,
            hit=hit,
            strict=hit is not None and hit.update <= start + fault.bound,
            lenient=bool(inside),
            correct_cause=None if hit is None else verdict.causes.get(hit.incident) in causes,
            others=tuple(alarm.type for alarm in inside if alarm.type not in fault.accepts and alarm not in naming),
        )

    @property
    def lag(self) -> int | None:
        """Updates from the first broken one to the hit."""
        return None if self.hit is None else self.hit.update - self.verdict.run.at_update

    @property
    def lead(self) -> int | None:
        """Updates from the hit to the visible drop of the return; None if one of them is missing."""
        symptom = self.verdict.symptom
        return None if self.hit is None or symptom is None else symptom - self.hit.update

    @property
    def label(self) -> str:
        """Name of the fault, with the dose if it is not the default."""
        dose = self.verdict.run.dose
        return self.fault.name if dose == self.fault.dose else f"{self.fault.family or self.fault.name}={dose:g}"


def broken_runs(verdicts: Iterable[RunVerdict]) -> list[BrokenRun]:
    """Return the outcomes of the runs with a fault."""
    return [BrokenRun.of(verdict) for verdict in verdicts if verdict.run.fault is not None]


@dataclass(frozen=True, slots=True)
class HealthyUpdates:
    """Healthy updates and the alarms in them.

    Attributes:
        updates: number of healthy updates.
        false_alarms: alarms raised in them.
        runs: number of healthy runs.
        alarmed_runs: healthy runs with an alarm.
    """

    updates: int
    false_alarms: tuple[RaisedAlarm, ...]
    runs: int
    alarmed_runs: int

    @property
    def false_per_100(self) -> float | None:
        """False alarms per 100 updates."""
        return 100 * len(self.false_alarms) / self.updates if self.updates else None


def independent_runs(verdicts: Sequence[RunVerdict]) -> list[RunVerdict]:
    """Return the runs with distinct healthy updates: healthy runs, and one broken run per environment and seed."""
    first: dict[tuple[str, int], RunVerdict] = {}
    for verdict in verdicts:
        if verdict.run.fault is not None:
            first.setdefault((verdict.run.env, verdict.run.seed), verdict)
    return [verdict for verdict in verdicts if verdict.run.fault is None] + list(first.values())


def healthy_updates(verdicts: Sequence[RunVerdict]) -> HealthyUpdates:
    """Return the healthy updates: of healthy runs, and, once per environment and seed, before a fault."""
    updates, false_alarms = 0, list[RaisedAlarm]()
    for verdict in independent_runs(verdicts):
        last = verdict.updates if verdict.run.fault is None else min(verdict.updates, verdict.run.at_update - 1)
        healthy = verdict.run.fault is None
        updates += last
        false_alarms += [alarm for alarm in verdict.alarms if healthy or alarm.update < verdict.run.at_update]
    sound = [verdict for verdict in verdicts if verdict.run.fault is None]
    return HealthyUpdates(updates, tuple(false_alarms), len(sound), sum(bool(verdict.alarms) for verdict in sound))


def score(verdicts: Sequence[RunVerdict]) -> dict[str, Any]:
    """Return the figures of a detector over these runs, as plain data; None without data.

    - `runs`: broken runs.
    - `strict_recall`: fraction with an accepted alarm within the fault's bound.
    - `recall`: fraction with an accepted alarm within 20 updates.
    - `lenient_recall`: fraction with any alarm within 20 updates.
    - `median_lag`, `p90_lag`: updates from the first broken one to the accepted alarm.
    - `root_cause_accuracy`: fraction of the hits whose incident has an accepted cause.
    - `median_lead`: updates from the accepted alarm to the visible drop of the return, if any.
    - `ahead`: fraction of the hits with a drop that came at least an update before it.
    - `never_symptomatic`: fraction of the broken runs whose return never dropped.
    - `healthy_updates`, `false_alarms`: numbers of both.
    - `false_alarms_per_100`: false alarms in 100 healthy updates.
    - `updates_between_false_alarms`: healthy updates per false alarm.
    - `healthy_runs_alarmed`: fraction of the healthy runs with an alarm.
    - `false_by_type`: false alarms by type.
    """
    broken, healthy = broken_runs(verdicts), healthy_updates(verdicts)
    leads, false = _leads(broken), len(healthy.false_alarms)
    return {
        **_recall_figures(broken),
        "p90_lag": quantile(_lags(broken), 0.9),
        "ahead": fraction(lead >= 1 for lead in leads),
        "never_symptomatic": fraction(run.verdict.symptom is None for run in broken),
        "healthy_updates": healthy.updates,
        "false_alarms": false,
        "false_alarms_per_100": healthy.false_per_100,
        "updates_between_false_alarms": healthy.updates / false if false else None,
        "healthy_runs_alarmed": healthy.alarmed_runs / healthy.runs if healthy.runs else None,
        "false_by_type": _count(alarm.type for alarm in healthy.false_alarms),
    }


def _recall_figures(broken: Sequence[BrokenRun]) -> dict[str, Any]:
    """Return the figures of broken runs that are in a whole score and in the score of a part of the runs."""
    return {
        "runs": len(broken),
        "strict_recall": fraction(run.strict for run in broken),
        "recall": fraction(run.hit is not None for run in broken),
        "lenient_recall": fraction(run.lenient for run in broken),
        "median_lag": _median(_lags(broken)),
        "root_cause_accuracy": fraction(run.correct_cause for run in broken if run.correct_cause is not None),
        "median_lead": _median(_leads(broken)),
    }


def _lags(broken: Iterable[BrokenRun]) -> list[int]:
    return [run.lag for run in broken if run.lag is not None]


def _leads(broken: Iterable[BrokenRun]) -> list[int]:
    return [run.lead for run in broken if run.lead is not None]


def fraction(flags: Iterable[bool]) -> float | None:
    """Fraction of true flags; None without any flag."""
    flags = list(flags)
    return sum(flags) / len(flags) if flags else None


def quantile(values: Sequence[float], level: float) -> float | None:
    """Return the smallest value that is not exceeded by a fraction `level` of the values; None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(level * len(ordered)) - 1)] if ordered else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _count(kinds: Iterable[str]) -> dict[str, int]:
    """Return the number of each, most frequent first."""
    return dict(Counter(kinds).most_common())


def bootstrap_intervals(verdicts: Sequence[RunVerdict]) -> dict[str, list[float]]:
    """Bootstrap intervals over runs, [low, high] at 95 %, of strict recall and of false alarms per 100 updates (Efron 1979)."""
    generator = np.random.default_rng(0)
    strict = np.array([run.strict for run in broken_runs(verdicts)], float)
    healthy = [healthy_updates([verdict]) for verdict in independent_runs(verdicts)]
    false = np.array([len(part.false_alarms) for part in healthy], float)
    updates = np.array([part.updates for part in healthy], float)
    samples = {}
    if len(strict):
        resampled = strict[generator.integers(len(strict), size=(BOOTSTRAP_RESAMPLES, len(strict)))]
        samples["strict_recall"] = resampled.mean(1)
    if updates.sum():
        rows = generator.integers(len(false), size=(BOOTSTRAP_RESAMPLES, len(false)))
        samples["false_alarms_per_100"] = 100 * false[rows].sum(1) / updates[rows].sum(1)
    return {name: np.quantile(values, [0.025, 0.975]).tolist() for name, values in samples.items()}


class CurvePoint(NamedTuple):
    """A score with all thresholds multiplied by `factor`."""

    factor: float
    false_alarms_per_100: float
    strict_recall: float


def threshold_curve(verdicts: Sequence[RunVerdicts]) -> list[CurvePoint]:
    """Return scores by factor, except factors without broken runs or healthy updates; empty if a run lacks a factor."""
    if not verdicts or not all(set(one.scaled) >= set(THRESHOLD_FACTORS) for one in verdicts):
        return []
    scores = {factor: score([one.scaled[factor] for one in verdicts]) for factor in THRESHOLD_FACTORS}
    return [
        CurvePoint(factor, one["false_alarms_per_100"], one["strict_recall"])
        for factor, one in scores.items()
        if one["false_alarms_per_100"] is not None and one["strict_recall"] is not None
    ]


def partial_area(points: Sequence[CurvePoint]) -> float | None:
    """Return the mean, over 0 to 1 false alarms per 100 updates, of the best recall within that cost; None without points."""
    if not points:
        return None
    area, reached, best = 0.0, 0.0, 0.0
    for point in sorted(points, key=lambda point: point.false_alarms_per_100):
        at = min(point.false_alarms_per_100, MAX_FALSE_PER_100)
        area += best * (at - reached)
        reached = at
        if point.false_alarms_per_100 <= MAX_FALSE_PER_100:
            best = max(best, point.strict_recall)
    return (area + best * (MAX_FALSE_PER_100 - reached)) / MAX_FALSE_PER_100


def score_figures(verdicts: Sequence[RunVerdicts]) -> dict[str, Any]:
    """Return all figures of the detectors, by fault and environment, and of the baselines, as plain data for JSON."""
    of_detectors = [one.detectors for one in verdicts]
    broken = broken_runs(of_detectors)
    points = threshold_curve(verdicts)
    return {
        **score(of_detectors),
        "core_strict_recall": fraction(run.strict for run in broken if run.fault.core),
        "intervals": bootstrap_intervals(of_detectors),
        "per_fault": figures_by(broken, lambda run: run.label),
        "per_env": figures_by(broken, lambda run: run.verdict.run.env),
        "curve": [point._asdict() for point in points],
        "partial_auc": partial_area(points),
        "baselines": {name: score([one.baselines[name] for one in verdicts]) for name in BASELINES if verdicts},
        "false": [
            {"run": verdict.run.name, "update": alarm.update, "type": alarm.type}
            for verdict in of_detectors
            for alarm in verdict.alarms
            if verdict.run.fault is None
        ],
    }


def tuning_and_held_out(verdicts: Sequence[RunVerdicts]) -> dict[str, list[RunVerdicts]]:
    """Return the runs on which thresholds may have been set, and the others."""
    parts: dict[str, list[RunVerdicts]] = {"tuning": [], "held_out": []}
    for one in verdicts:
        run = one.detectors.run
        tuning = run.seed in TUNING_SEEDS and run.env not in HELD_OUT_ENVIRONMENTS
        parts["tuning" if tuning else "held_out"].append(one)
    return parts


def figures_by(broken: Sequence[BrokenRun], key: Callable[[BrokenRun], str]) -> dict[str, dict[str, Any]]:
    """Return the figures of broken runs by `key`, in the order of its first values."""
    groups: dict[str, list[BrokenRun]] = {}
    for run in broken:
        groups.setdefault(key(run), []).append(run)
    return {
        name: {
            **_recall_figures(group),
            "hits": _count(run.hit.type for run in group if run.hit is not None),
            "causes": _count(run.verdict.causes.get(run.hit.incident, "") for run in group if run.hit is not None),
            "others": _count(kind for run in group for kind in set(run.others)),
            "missed": [run.verdict.run.name for run in group if not run.strict],
        }
        for name, group in groups.items()
    }
