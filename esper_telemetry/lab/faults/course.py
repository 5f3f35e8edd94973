"""One run of the fault bed: which it is, how it is trained, and the journal it leaves.

Runs of the same environment and seed share what comes before the fault: it is trained once, and every fault goes on from its
checkpoint and a copy of its journal.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from esper_telemetry.adapters.attach import attach
from esper_telemetry.events import UpdateEnd
from esper_telemetry.lab.faults.catalogue import find
from esper_telemetry.lab.faults.environments import bed
from esper_telemetry.lab.faults.healthy import HEALTHY, PLAIN, Healthy
from esper_telemetry.lab.faults.injection import schedule
from esper_telemetry.ppo.trainer import PPO
from esper_telemetry.telemetry import Telemetry

DESCRIPTION = "course.json"
CHECKPOINT = "checkpoint.pt"

AT_UPDATE, LAST = 25, 45
"""The first broken update, and the last one that is trained: the policy is half-trained, and an alarm has 20 updates to come."""


@dataclass(frozen=True, slots=True)
class TrainingCourse:
    """One run.

    Attributes:
        env: name of the bed.
        seed: of the trainer.
        fault: what breaks it; None in a healthy run.
        dose: how much.
        healthy: what happens in a healthy run.
        at_update: the first broken update.
        last: the last update.
        status: `done`, or the exception that ended training.
        missing: why the fault does not apply here; nothing was trained then.
        interventions: updates whose changes the user announced.
    """

    env: str
    seed: int
    fault: str | None = None
    dose: float = 1.0
    healthy: str = PLAIN
    at_update: int = AT_UPDATE
    last: int = LAST
    status: str = "done"
    missing: str = ""
    interventions: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Name of its directory."""
        what = f"healthy-{self.healthy}" if self.fault is None else f"{self.fault}-{self.dose:g}"
        return f"{self.env}-{what}-s{self.seed}".replace("/", "_")

    def write(self, run_dir: Path) -> None:
        """Says in its directory which run it is."""
        (run_dir / DESCRIPTION).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_course(run_dir: Path) -> TrainingCourse:
    """The run that a directory holds; raises ValueError where it does not say so."""
    try:
        found = json.loads((run_dir / DESCRIPTION).read_text(encoding="utf-8"))
        return TrainingCourse(**{**found, "interventions": tuple(found["interventions"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{run_dir} holds no run of the fault bed: {error}") from error


def train_prefix(env: str, seed: int, run_dir: Path, *, at_update: int, level: str = "normal") -> None:
    """What comes before the fault, with its checkpoint."""
    trainer = bed(env).trainer(seed)
    with recorded(run_dir, level) as telemetry:
        attach(telemetry, trainer)
        train(trainer, updates=at_update - 1, planned=bed(env).updates)
        trainer.save(run_dir / CHECKPOINT)


def train_fault(course: TrainingCourse, prefix: Path, run_dir: Path, level: str = "normal") -> TrainingCourse:
    """A run that goes on from the prefix and breaks; where the fault does not apply nothing is kept."""
    assert course.fault is not None
    trainer = bed(course.env).trainer(course.seed)
    missing = find(course.fault, course.dose).missing(trainer)
    if missing is not None:
        return _with(course, missing=missing)
    shutil.copytree(prefix, run_dir)
    with recorded(run_dir, level, resume=True) as telemetry:
        attach(telemetry, trainer)
        trainer.load(run_dir / CHECKPOINT)
        undo = schedule(trainer, course.fault, course.dose, at_update=course.at_update)
        status = attempted(lambda: train(trainer, updates=course.last, planned=bed(course.env).updates), telemetry)
        undo()
    (run_dir / CHECKPOINT).unlink()
    course = _with(course, status=status)
    course.write(run_dir)
    return course


def train_healthy(course: TrainingCourse, run_dir: Path, level: str = "normal") -> TrainingCourse:
    """A run in which nothing is wrong, whatever it looks like."""
    kind: Healthy = HEALTHY[course.healthy]
    trainer = kind.trainer(bed(course.env), course.seed)
    with recorded(run_dir, level) as telemetry:
        attach(telemetry, trainer)
        kind.prepare(trainer)
        planned = course.last if kind.whole else max(course.last, bed(course.env).updates)
        status = attempted(lambda: train(trainer, updates=course.last, planned=planned), telemetry)
    course = _with(course, status=status, interventions=kind.interventions)
    course.write(run_dir)
    return course


def recorded(run_dir: Path, level: str, *, resume: bool = False) -> Telemetry:
    """Telemetry that leaves a journal and nothing else, in this process."""
    return Telemetry([], run_dir=run_dir, level=level, offload=False, resume=resume)


def train(trainer: PPO, *, updates: int, planned: int) -> None:
    """Trains up to that many updates of a run that was planned with more."""
    per_update = trainer.config.num_steps * trainer.env.num_envs
    stop = trainer.hooks.on(UpdateEnd, lambda event: trainer.stop() if event.update >= updates else None)
    try:
        trainer.learn(per_update * planned)
    finally:
        stop()


def attempted(training: Callable[[], None], telemetry: Telemetry) -> str:
    """Trains, and closes the run with what came of it: `done`, or the exception in one line."""
    try:
        training()
    except Exception as error:
        telemetry.__exit__(type(error), error, error.__traceback__)
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "done"


def one_thread() -> None:
    """Prepares a process that trains beside others."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def _with(course: TrainingCourse, **changes: Any) -> TrainingCourse:
    return TrainingCourse(**{**asdict(course), **changes})
