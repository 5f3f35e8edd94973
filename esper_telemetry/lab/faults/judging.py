"""What detectors, or a baseline, say of the records of one run.

What people do instead of detectors, scored by the same rules: NaN checks, fixed thresholds, a falling return, a relative average.

What all judges say of kept runs: the detectors, with several thresholds if asked, and the baselines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from esper_telemetry.alarms.detectors import Detectors
from esper_telemetry.alarms.rules.integrity import NONFINITE
from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Record
from esper_telemetry.journal.read import read_run
from esper_telemetry.lab.faults.runs import DESCRIPTION, TrainingCourse, read_course


class Raised(NamedTuple):
    """An alarm that was raised: when, which, and as part of which incident."""

    update: int
    type: str
    incident: int = 0


@dataclass(frozen=True, slots=True)
class Judged:
    """A run and what was said of it.

    Attributes:
        course: the run.
        raised: alarms raised, in order.
        causes: what each incident was put down to in the end.
        updates: updates that were recorded.
        symptom: first update in which the return was visibly broken; None where it never was.
    """

    course: TrainingCourse
    raised: tuple[Raised, ...]
    causes: Mapping[int, str]
    updates: int
    symptom: int | None = None


class Judge(Protocol):
    """Reads the records of one run in order."""

    def step(self, record: Record) -> Iterable[Alarm]:
        """Alarms raised by the next record."""

    def intervention(self) -> None:
        """The user says that the next update is different on purpose."""


OFF = frozenset({"telemetry/overhead"})
"""Not judged: runs of the fault bed share their cores with one another and with what measures them, so this alarm is right there."""


class ByDetectors:
    """The detectors as a judge."""

    def __init__(self, facts: Mapping[str, Any], thresholds: Thresholds) -> None:
        self._detectors = Detectors(facts, thresholds.without(OFF))
        self.intervention = self._detectors.intervention

    def step(self, record: Record) -> Iterable[Alarm]:
        """Alarms of the next record."""
        return self._detectors.step(record).alarms


MakeJudge = Callable[[Mapping[str, Any]], Judge]
"""A judge for a run with those facts."""


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """A run as its journal keeps it."""

    course: TrainingCourse
    facts: Mapping[str, Any]
    records: Sequence[Record]


def kept(run_dir: Path) -> JudgedRun:
    """The run in a directory; raises ValueError where there is none of the fault bed."""
    course, run = read_course(run_dir), read_run(run_dir)
    return JudgedRun(course, run.info.facts, run.records)


def judged(run: JudgedRun, make: MakeJudge) -> Judged:
    """What a judge says of a run."""
    judge = make(run.facts)
    raised, causes = [], {}
    for record in run.records:
        if record.axes.update in run.course.interventions:
            judge.intervention()
        for alarm in judge.step(record):
            causes[alarm.incident] = alarm.cause
            if alarm.event is AlarmEvent.RAISE:
                raised.append(Raised(record.axes.update, alarm.type, alarm.incident))
    return Judged(run.course, tuple(raised), causes, len(run.records), symptom(run))


RETURN = "episode/return_mean"
DROP, STREAK = 0.2, 3
"""A return counts as broken where it is below the mean before the fault by that share of it, for so many updates with episodes."""


def symptom(run: JudgedRun) -> int | None:
    """The first update of the first streak of broken returns, or the one in which training ended by an exception."""
    course = run.course
    if course.fault is None:
        return None
    before = [r.values[RETURN] for r in run.records if r.axes.update < course.at_update and RETURN in r.values]
    after = [
        (r.axes.update, r.values[RETURN])
        for r in run.records
        if r.axes.update >= course.at_update and RETURN in r.values
    ]
    crash = run.records[-1].axes.update if course.status != "done" else None
    if not before:
        return crash
    usual = sum(before) / len(before)
    low = [update if value < usual - DROP * abs(usual) else None for update, value in after]
    for start in range(len(low) - STREAK + 1):
        if None not in low[start : start + STREAK]:
            return low[start] if crash is None else min(crash, low[start] or crash)
    return crash


Finds = Callable[[Record], Iterable[str]]


class PlainBaseline:
    """Raises an alarm when a finding begins, or has lasted for `streak` updates, and again after it has ended."""

    def __init__(self, find: Finds, streak: int = 1) -> None:
        self._find, self._streak = find, streak
        self._lasting: dict[str, int] = {}

    def step(self, record: Record) -> Iterable[Alarm]:
        """Alarms that this record raises."""
        found = set(self._find(record))
        self._lasting = {kind: self._lasting.get(kind, 0) + 1 for kind in found}
        raised = sorted(kind for kind, lasted in self._lasting.items() if lasted == self._streak)
        return [alarm(kind, record) for kind in raised]

    def intervention(self) -> None:
        """Means nothing to it."""


def alarm(kind: str, record: Record) -> Alarm:
    """A raised alarm of that type, which is its own cause."""
    incident = record.axes.update
    blank = Alarm(record.seq, record.axes, kind, AlarmEvent.RAISE, 1.0, AlarmLevel.CRITICAL, "")
    return replace(blank, incident=incident, cause=kind)


def nonfinite(record: Record) -> Iterable[str]:
    """NaN or infinity anywhere."""
    values = record.values
    counted = any(values[key] > 0 for key in values if key.endswith((NONFINITE, "/nonfinite")))
    return ["numerics/nonfinite"] if counted else []


BOUNDS: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("policy/ratio/max", "policy/ratio_explosion", lambda value: value > 5),
    ("policy/ratio/min", "policy/ratio_explosion", lambda value: value < 0.1),
    ("policy/entropy_norm", "policy/entropy_collapse", lambda value: value < 0.1),
    ("policy/kl", "policy/kl_spike", lambda value: value > 0.1),
    ("value/explained_variance", "value/fit_collapse", lambda value: value < 0),
    ("grad/global/norm_preclip_max", "grad/explode", lambda value: value > 100),
)
"""(key, type, rule): the thresholds that are found most often in trainers and tutorials."""

WARM_UP = 10
"""Updates in which a negative explained variance means nothing yet."""


def beyond_bounds(record: Record) -> Iterable[str]:
    """Fixed thresholds, and NaN."""
    values, early = record.values, record.axes.update <= WARM_UP
    found = [
        kind
        for key, kind, breaks in BOUNDS
        if key in values and breaks(values[key]) and not (early and key == "value/explained_variance")
    ]
    return [*found, *nonfinite(record)]


class ReturnDrop:
    """A return 30 % below the best average so far."""

    def __init__(self) -> None:
        self._average: float | None = None
        self._best = -math.inf

    def __call__(self, record: Record) -> Iterable[str]:
        """Whether it is."""
        value = record.values.get("episode/return_mean")
        if value is None:
            return []
        self._average = value if self._average is None else 0.9 * self._average + 0.1 * value
        self._best = max(self._best, self._average)
        return ["task/return_drop"] if value < self._best - 0.3 * abs(self._best) else []


class RelativeDrift:
    """A gradient norm half above or below its slow average, with no warm-up."""

    def __init__(self) -> None:
        self._average: float | None = None

    def __call__(self, record: Record) -> Iterable[str]:
        """Whether it is."""
        value = record.values.get("grad/global/norm_preclip")
        if value is None:
            return []
        before, self._average = self._average, value if self._average is None else 0.99 * self._average + 0.01 * value
        if before is None or abs(value - before) <= 0.5 * before:
            return []
        return ["grad/explode" if value > before else "grad/vanish"]


BASELINES: Mapping[str, Callable[[Mapping[str, Any]], PlainBaseline]] = {
    "nan_only": lambda facts: PlainBaseline(nonfinite),
    "fixed_thresholds": lambda facts: PlainBaseline(beyond_bounds),
    "return_drop": lambda facts: PlainBaseline(ReturnDrop(), streak=3),
    "relative_ema": lambda facts: PlainBaseline(RelativeDrift()),
}
"""Each as a judge for a run with those facts."""


@dataclass(frozen=True, slots=True)
class Opinions:
    """What is said of one run.

    Attributes:
        detectors: by the detectors.
        baselines: by each baseline.
        scaled: by the detectors with all thresholds multiplied by a factor.
    """

    detectors: Judged
    baselines: Mapping[str, Judged] = field(default_factory=dict)
    scaled: Mapping[float, Judged] = field(default_factory=dict)


def opinions(run_dir: Path, factors: Sequence[float] = ()) -> Opinions:
    """What all judges say of the run in a directory; raises ValueError where there is none of the fault bed."""
    run = kept(run_dir)
    usual = Thresholds()
    return Opinions(
        judged(run, partial(ByDetectors, thresholds=usual)),
        {name: judged(run, make) for name, make in BASELINES.items()},
        {factor: judged(run, partial(ByDetectors, thresholds=usual.scaled(factor))) for factor in factors},
    )


def all_opinions(run_dirs: Sequence[Path], pool: Executor, factors: Sequence[float] = ()) -> Iterator[Opinions]:
    """Of all runs, in order."""
    yield from pool.map(opinions, run_dirs, [tuple(factors)] * len(run_dirs), chunksize=4)


def kept_runs(directory: Path) -> list[Path]:
    """The runs in a directory, by name; raises ValueError where there is none."""
    found = sorted(path.parent for path in directory.glob(f"*/{DESCRIPTION}") if not path.parent.name.endswith(".part"))
    if not found:
        raise ValueError(f"{directory} holds no runs of the fault bed")
    return found
