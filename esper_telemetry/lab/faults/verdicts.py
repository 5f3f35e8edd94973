"""Alarms raised in the journal of a run: by the detectors, with several thresholds if asked, and by four baselines.

The baselines are common alternatives to detectors: NaN checks, fixed thresholds, a falling return, a drifting gradient norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from esper_telemetry.alarms.detectors import Detectors
from esper_telemetry.alarms.rules.integrity_alarms import NONFINITE
from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Record
from esper_telemetry.equations.equation import EQUATION_KEY, equations
from esper_telemetry.equations.schedules import SCHEDULES
from esper_telemetry.journal.read import read_run
from esper_telemetry.lab.faults.runs import RUN_FILE, FaultRun, read_fault_run

EXCLUDED_ALARMS = frozenset({"telemetry/overhead"})
"""Not scored: runs of the fault bench share their cores with one another, so this alarm is correct there."""

EQUATION_ALARM = "integrity/equation"

RETURN = "episode/return_mean"

MIN_RETURN_DROP, SYMPTOM_UPDATES = 0.2, 3
"""A return is broken if it is below the mean before the fault by this fraction, for this many updates with episodes."""


class RaisedAlarm(NamedTuple):
    """An alarm raised in an update, as part of an incident; `hypotheses` are the labels of hypotheses that explain its equation."""

    update: int
    type: str
    incident: int = 0
    hypotheses: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The alarms of one run.

    Attributes:
        run: the run.
        alarms: alarms raised, in order.
        causes: last cause of each incident.
        updates: number of recorded updates.
        symptom: first update in which the return was visibly broken; None without one.
    """

    run: FaultRun
    alarms: tuple[RaisedAlarm, ...]
    causes: Mapping[int, str]
    updates: int
    symptom: int | None = None


@dataclass(frozen=True, slots=True)
class JournaledRun:
    """A run with the facts and the records of its journal."""

    run: FaultRun
    facts: Mapping[str, Any]
    records: Sequence[Record]


def read_journaled_run(run_dir: Path) -> JournaledRun:
    """Return the run in a directory; raise ValueError if it is not a run of the fault bench."""
    run, journal = read_fault_run(run_dir), read_run(run_dir)
    return JournaledRun(run, journal.info.facts, journal.records)


def detect(
    journaled: JournaledRun, step: Callable[[Record], Iterable[Alarm]], intervention: Callable[[], None] = lambda: None
) -> RunVerdict:
    """Return the alarms that a detector raises in a run.

    Args:
        journaled: the run.
        step: takes the records in order, and returns the alarms that each raises.
        intervention: called before an update that the user changes on purpose.
    """
    alarms, causes = list[RaisedAlarm](), dict[int, str]()
    for record in journaled.records:
        if record.axes.update in journaled.run.interventions:
            intervention()
        for alarm in step(record):
            causes[alarm.incident] = alarm.cause
            if alarm.event is AlarmEvent.RAISE:
                alarms.append(RaisedAlarm(record.axes.update, alarm.type, alarm.incident, equation_hypotheses(alarm, record)))
    return RunVerdict(journaled.run, tuple(alarms), causes, len(journaled.records), symptom_update(journaled))


def detect_by_rules(journaled: JournaledRun, thresholds: Thresholds) -> RunVerdict:
    """Return the alarms that the detectors of the package raise in a run, without `EXCLUDED_ALARMS`."""
    detectors = Detectors(journaled.facts, thresholds.without(EXCLUDED_ALARMS))
    return detect(journaled, lambda record: detectors.step(record).alarms, detectors.intervention)


def equation_hypotheses(alarm: Alarm, record: Record) -> frozenset[str]:
    """Return the labels of the hypotheses that explain the equation of an alarm; for learning rates the name of the equation."""
    if alarm.type != EQUATION_ALARM:
        return frozenset()
    equation = equations().get(alarm.key.removeprefix(EQUATION_KEY))
    if equation is None:
        return frozenset({SCHEDULES.name})
    return frozenset(map(equation.label, equation.explanations(record.values)))


def symptom_update(journaled: JournaledRun) -> int | None:
    """Return the first update of the first streak of broken returns, or the update in which an exception ended training."""
    run, records = journaled.run, journaled.records
    if run.fault is None:
        return None
    returns = [(record.axes.update, record.values[RETURN]) for record in records if RETURN in record.values]
    before = [value for update, value in returns if update < run.at_update]
    crash = records[-1].axes.update if run.status != "done" else None
    if not before:
        return crash
    usual = sum(before) / len(before)
    limit = usual - MIN_RETURN_DROP * abs(usual)
    after = [(update, value < limit) for update, value in returns if update >= run.at_update]
    for start in range(len(after) - SYMPTOM_UPDATES + 1):
        if all(broken for _, broken in after[start : start + SYMPTOM_UPDATES]):
            return after[start][0] if crash is None else min(crash, after[start][0])
    return crash


class BaselineDetector:
    """Raises an alarm when a check has reported a type for `streak` updates in a row, and again after it has stopped.

    Args:
        check: returns the alarm types that hold in a record.
        streak: updates in a row.
    """

    def __init__(self, check: Callable[[Record], Iterable[str]], streak: int = 1) -> None:
        self._check, self._streak = check, streak
        self._counts: dict[str, int] = {}

    def step(self, record: Record) -> Iterable[Alarm]:
        """Return the alarms raised by this record; each is the cause of its own incident."""
        self._counts = {kind: self._counts.get(kind, 0) + 1 for kind in set(self._check(record))}
        raised = sorted(kind for kind, count in self._counts.items() if count == self._streak)
        blank = Alarm(record.seq, record.axes, "", AlarmEvent.RAISE, 1.0, AlarmLevel.CRITICAL, "")
        return [replace(blank, type=kind, incident=record.axes.update, cause=kind) for kind in raised]


def nonfinite_check(record: Record) -> Iterable[str]:
    """NaN or infinity anywhere."""
    values = record.values
    counted = any(values[key] > 0 for key in values if key.endswith((NONFINITE, "/nonfinite")))
    return ["numerics/nonfinite"] if counted else []


FIXED_THRESHOLDS: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("policy/ratio/max", "policy/ratio_explosion", lambda value: value > 5),
    ("policy/ratio/min", "policy/ratio_explosion", lambda value: value < 0.1),
    ("policy/entropy_norm", "policy/entropy_collapse", lambda value: value < 0.1),
    ("policy/kl", "policy/kl_spike", lambda value: value > 0.1),
    ("value/explained_variance", "value/fit_collapse", lambda value: value < 0),
    ("grad/global/norm_preclip_max", "grad/explode", lambda value: value > 100),
)
"""(key, type, rule): the most frequent thresholds of trainers and tutorials."""

WARM_UP_UPDATES = 10
"""Updates in which a negative explained variance is normal."""


def threshold_check(record: Record) -> Iterable[str]:
    """Fixed thresholds, and NaN."""
    values, early = record.values, record.axes.update <= WARM_UP_UPDATES
    exceeded = [
        kind
        for key, kind, exceeds in FIXED_THRESHOLDS
        if key in values and exceeds(values[key]) and not (early and key == "value/explained_variance")
    ]
    return [*exceeded, *nonfinite_check(record)]


class ReturnDropCheck:
    """A return 30 % below the best average so far."""

    def __init__(self) -> None:
        self._average: float | None = None
        self._best = -math.inf

    def __call__(self, record: Record) -> Iterable[str]:
        """Return `task/return_drop` if it holds."""
        value = record.values.get(RETURN)
        if value is None:
            return []
        self._average = value if self._average is None else 0.9 * self._average + 0.1 * value
        self._best = max(self._best, self._average)
        return ["task/return_drop"] if value < self._best - 0.3 * abs(self._best) else []


class RelativeDriftCheck:
    """A gradient norm half above or below its slow average, without warm-up."""

    def __init__(self) -> None:
        self._average: float | None = None

    def __call__(self, record: Record) -> Iterable[str]:
        """Return `grad/explode` or `grad/vanish` if it holds."""
        value = record.values.get("grad/global/norm_preclip")
        if value is None:
            return []
        before, self._average = self._average, value if self._average is None else 0.99 * self._average + 0.01 * value
        if before is None or abs(value - before) <= 0.5 * before:
            return []
        return ["grad/explode" if value > before else "grad/vanish"]


BASELINES: Mapping[str, Callable[[], BaselineDetector]] = {
    "nan_only": lambda: BaselineDetector(nonfinite_check),
    "fixed_thresholds": lambda: BaselineDetector(threshold_check),
    "return_drop": lambda: BaselineDetector(ReturnDropCheck(), streak=3),
    "relative_ema": lambda: BaselineDetector(RelativeDriftCheck()),
}


@dataclass(frozen=True, slots=True)
class RunVerdicts:
    """All verdicts on one run.

    Attributes:
        detectors: verdict of the detectors.
        baselines: verdict of each baseline.
        scaled: verdict of the detectors with all thresholds multiplied by a factor.
    """

    detectors: RunVerdict
    baselines: Mapping[str, RunVerdict] = field(default_factory=dict)
    scaled: Mapping[float, RunVerdict] = field(default_factory=dict)


def run_verdicts(run_dir: Path, factors: Sequence[float] = ()) -> RunVerdicts:
    """Return all verdicts on the run in a directory; raise ValueError if it is not a run of the fault bench."""
    journaled, usual = read_journaled_run(run_dir), Thresholds()
    return RunVerdicts(
        detect_by_rules(journaled, usual),
        {name: detect(journaled, make().step) for name, make in BASELINES.items()},
        {factor: detect_by_rules(journaled, usual.scaled(factor)) for factor in factors},
    )


def list_runs(directory: Path) -> list[Path]:
    """Return the run directories in a directory, by name; raise ValueError without any."""
    runs = sorted(path.parent for path in directory.glob(f"*/{RUN_FILE}") if not path.parent.name.endswith(".part"))
    if not runs:
        raise ValueError(f"{directory} does not contain runs of the fault bench")
    return runs
