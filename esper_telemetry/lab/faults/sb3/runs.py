"""Runs of the fault bed over Stable-Baselines3: which there are, and how one is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

from esper_telemetry.adapters.sb3.callback import TelemetryCallback
from esper_telemetry.lab.faults.fault import Undo
from esper_telemetry.lab.faults.runs import TrainingCourse, attempted, read_course, recorded, whole
from esper_telemetry.lab.faults.sb3.breaks import BREAKS
from esper_telemetry.lab.faults.sb3.models import NotForThisModelError, bed


def courses(
    faults: Sequence[tuple[str, float]], envs: Sequence[str], seeds: Sequence[int], *, healthy: bool = True
) -> list[TrainingCourse]:
    """The runs of every fault on every bed with every seed, and the healthy ones."""
    names = [env if env.startswith("sb3-") else f"sb3-{env}" for env in envs]
    broken = [TrainingCourse(env, seed, name, dose) for seed in seeds for env in names for name, dose in faults]
    return [*(TrainingCourse(env, seed) for seed in seeds for env in names if healthy), *broken]


def faults_among(faults: Sequence[tuple[str, float]], *, named: bool) -> list[tuple[str, float]]:
    """Those that can be injected here; raises ValueError for one that was `named` and cannot."""
    wrong = [name for name, _ in faults if name not in BREAKS]
    if named and wrong:
        raise ValueError(f"{wrong[0]} cannot be injected into sb3 from outside; these can: {', '.join(BREAKS)}")
    return [(name, dose) for name, dose in faults if name in BREAKS]


def train_all(
    work: Sequence[TrainingCourse], directory: Path, pool: Executor, level: str = "normal"
) -> Iterator[TrainingCourse]:
    """Trains what the directory does not hold yet, and yields every run when it is there or does not apply."""
    kept = [course for course in work if (directory / course.name).exists()]
    yield from (read_course(directory / course.name) for course in kept)
    rest = [course for course in work if course not in kept]
    for done in as_completed([pool.submit(run, course, directory, level) for course in rest]):
        yield done.result()


def run(course: TrainingCourse, directory: Path, level: str) -> TrainingCourse:
    """One run, from its first update to its last; where the fault does not apply nothing is kept."""
    model = bed(course.env)(course.seed)
    breaking = Breaking(course)
    missing = breaking.missing(model)
    if missing:
        return replace(course, missing=f"{course.fault} does not apply to {course.env}: {missing}")

    def train(run_dir: Path) -> TrainingCourse:
        steps = model.n_steps * model.n_envs * course.last
        with recorded(run_dir, level) as telemetry:
            callbacks: list[BaseCallback] = [TelemetryCallback(telemetry), breaking]
            status = attempted(lambda: model.learn(steps, callback=callbacks), telemetry)
        found = replace(course, status=status)
        found.write(run_dir)
        return found

    return whole(directory / course.name, train)


class Breaking(BaseCallback):
    """Breaks a model before the rollout of the course's first broken update."""

    def __init__(self, course: TrainingCourse) -> None:
        super().__init__()
        self._course, self._rollouts = course, 0

    def missing(self, model: Any) -> str:
        """Why the fault does not apply to a model; empty where it does."""
        try:
            self._broken(model)()
        except NotForThisModelError as lacks:
            return str(lacks)
        return ""

    def _on_rollout_start(self) -> None:
        self._rollouts += 1
        if self._rollouts == self._course.at_update:
            self._broken(self.model)

    def _on_step(self) -> bool:
        return True

    def _broken(self, model: Any) -> Undo:
        fault = self._course.fault
        return (lambda: None) if fault is None else BREAKS[fault](model, self._course.dose)
