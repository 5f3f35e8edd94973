"""A score as plain data, for JSON and for tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from esper_telemetry.lab.faults.baseline_verdicts import Opinions
from esper_telemetry.lab.faults.baselines import BASELINES
from esper_telemetry.lab.faults.curves import FACTORS, curve, intervals, partial_area
from esper_telemetry.lab.faults.judging import Judged
from esper_telemetry.lab.faults.scoring import Case, cases_of, score, share

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
