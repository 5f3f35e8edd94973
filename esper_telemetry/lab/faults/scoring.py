"""How good a judge is, over many runs: recall, lag, false alarms, causes.

An alarm of an accepted type in [u0, u0 + 20], where u0 is the first broken update, is a *hit*; *strict* recall asks for it within the
bound of the fault, *lenient* recall for any alarm there. Alarms before u0 and in healthy runs are *false*, whatever their level. What
several runs share before they break counts once.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from esper_telemetry.lab.faults.catalogue import find
from esper_telemetry.lab.faults.fault import WINDOW, Fault
from esper_telemetry.lab.faults.judging import Judged, Raised


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
