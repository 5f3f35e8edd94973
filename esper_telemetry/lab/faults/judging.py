"""What detectors, or a baseline, say of the records of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from esper_telemetry.alarms.detectors import Detectors
from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.core.record import Alarm, AlarmEvent, Record
from esper_telemetry.journal.read import read_run
from esper_telemetry.lab.faults.course import TrainingCourse, read_course


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
