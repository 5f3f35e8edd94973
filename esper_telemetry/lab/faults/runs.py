"""One run of the fault bed: which it is, how it is trained, and the journal it leaves.

Runs of the same environment and seed share what comes before the fault: it is trained once, and every fault goes on from its
checkpoint and a copy of its journal.

The environments on which faults are tried: small, quick, and of different kinds.

Runs in which nothing is wrong, some of which look as if something were: who raises an alarm there cries wolf.

Which runs a score is made of, and training them in several processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from esper_telemetry.adapters.attach import attach
from esper_telemetry.events import UpdateEnd
from esper_telemetry.lab.faults.catalogue import find, schedule
from esper_telemetry.lab.faults.data import Altered
from esper_telemetry.lab.faults.fault import environment
from esper_telemetry.ppo.config import preset
from esper_telemetry.ppo.environments.protocol import Array, Step
from esper_telemetry.ppo.environments.registry import make_env
from esper_telemetry.ppo.trainer import PPO
from esper_telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Bed:
    """A task and a policy for it.

    Attributes:
        env: what `make_env` takes.
        policy: `mlp` or `lstm`.
        mask_velocity: whether velocities are hidden.
        settings: where they differ from the preset's.
        updates: updates of a full run, which schedules refer to.
    """

    env: str
    policy: str
    mask_velocity: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    updates: int = 150

    def trainer(self, seed: int, **changes: Any) -> PPO:
        """A trainer of that seed; `changes` of its settings win."""
        tuned = preset(self.env, self.policy, mask_velocity=self.mask_velocity)
        env = make_env(self.env, num_envs=tuned.num_envs, mask_velocity=self.mask_velocity)
        return PPO(env, tuned.config(**{**self.settings, "seed": seed, **changes}))


BEDS: Mapping[str, Bed] = {
    "cue-recall": Bed("cue-recall", "lstm"),
    "cartpole": Bed("CartPole-v1", "mlp"),
    "cartpole-lstm": Bed("CartPole-v1", "lstm", mask_velocity=True),
    "acrobot": Bed("Acrobot-v1", "mlp", settings={"activation": "relu"}),
    "pendulum": Bed("Pendulum-v1", "mlp", settings={"num_steps": 128, "num_epochs": 8, "normalize_rewards": False}),
}


def bed(name: str) -> Bed:
    """That bed, or the preset of any other environment; raises ValueError for one that cannot be made."""
    if name in BEDS:
        return BEDS[name]
    make_env(name, num_envs=1).close()
    return Bed(name, "mlp")


PLAIN = "plain"


def nothing(trainer: PPO) -> None:
    """Leaves the trainer alone."""


def threefold(step: Step, _: Mapping[str, Array]) -> Step:
    """A step with three times the reward."""
    return step._replace(rewards=3 * step.rewards)


def rewards_x3(trainer: PPO) -> None:
    """Gives three times the reward from update 31 on, as a curriculum would."""

    def change(event: UpdateEnd) -> None:
        if event.update == CHANGE - 1:
            environment(trainer, partial(Altered, threefold))

    trainer.hooks.on(UpdateEnd, change, last=True)


CHANGE = 31
"""The first update with changed rewards."""


@dataclass(frozen=True, slots=True)
class Healthy:
    """A kind of healthy run.

    Attributes:
        what: in words.
        updates: how many.
        beds: where it is tried.
        settings: where they differ from the bed's.
        prepare: what is done to the trainer before training.
        whole: schedules come to their end within the run.
        interventions: updates whose changes the user announces.
    """

    what: str
    updates: int
    beds: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[PPO], None] = nothing
    whole: bool = False
    interventions: tuple[int, ...] = ()

    def trainer(self, bed: Bed, seed: int) -> PPO:
        """A trainer for it."""
        return bed.trainer(seed, **self.settings)


EVERYWHERE = ("cue-recall", "cartpole", "cartpole-lstm", "acrobot", "pendulum")

HEALTHY: Mapping[str, Healthy] = {
    PLAIN: Healthy("as the preset says", 150, EVERYWHERE),
    "annealed": Healthy(
        "learning rate and entropy bonus fall to 0 within the run",
        80,
        EVERYWHERE,
        {"anneal_learning_rate": True, "entropy_coef": 0.02, "final_entropy_coef": 0.0},
        whole=True,
    ),
    "plateau": Healthy("a solved task is trained on", 250, ("cue-recall", "cartpole")),
    "slow": Healthy(
        "the learning rate is a hundredth", 100, ("cue-recall", "acrobot", "pendulum"), {"learning_rate": 2.5e-5}
    ),
    "rewards_x3": Healthy(
        "rewards grow threefold, and the user says so",
        80,
        ("cue-recall", "pendulum", "cartpole-lstm"),
        prepare=rewards_x3,
        interventions=(CHANGE,),
    ),
}


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


Result = TypeVar("Result")
Group = tuple[str, int]
"""Environment and seed."""


def courses(
    faults: Sequence[tuple[str, float]], envs: Sequence[str], seeds: Sequence[int], *, healthy: bool = True
) -> list[TrainingCourse]:
    """The runs of every fault with its dose on every environment with every seed, and the healthy ones, the longest first."""
    broken = [TrainingCourse(env, seed, name, dose) for seed in seeds for env in envs for name, dose in faults]
    sound = [
        TrainingCourse(env, seed, healthy=name, last=kind.updates)
        for seed in seeds
        for name, kind in HEALTHY.items()
        for env in envs
        if healthy and (name == PLAIN or env in kind.beds)
    ]
    return [*sorted(sound, key=lambda course: -course.last), *broken]


def cost(course: TrainingCourse) -> int:
    """Updates that it trains, what it shares with others left out."""
    return course.last if course.fault is None else course.last - course.at_update + 1


@contextmanager
def processes(workers: int) -> Iterator[Executor]:
    """So many processes of one thread each; what waits is dropped when something raises."""
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=one_thread)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def train_all(
    work: Sequence[TrainingCourse], directory: Path, pool: Executor, level: str = "normal"
) -> Iterator[TrainingCourse]:
    """Trains what the directory does not hold yet, and yields every run when it is there or does not apply."""
    waiting: dict[Group, list[TrainingCourse]] = {}
    running: dict[Future[TrainingCourse], Group | None] = {}
    for course in work:
        if (directory / course.name).exists():
            yield read_course(directory / course.name)
        elif course.fault is None:
            running[pool.submit(healthy_run, course, directory, level)] = None
        else:
            waiting.setdefault((course.env, course.seed), []).append(course)
    for group, broken in waiting.items():
        running[pool.submit(prefix_run, broken[0], directory, level)] = group
    while running:
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            shared, course = running.pop(done), done.result()
            if shared is None:
                yield course
            else:
                running |= {pool.submit(fault_run, one, directory, level): None for one in waiting.pop(shared)}
    remove_prefixes(work, directory)


def prefix_run(course: TrainingCourse, directory: Path, level: str) -> TrainingCourse:
    """What comes before the fault, for all runs of an environment and seed."""
    target = prefix_of(course, directory)
    whole(target, lambda work: train_prefix(course.env, course.seed, work, at_update=course.at_update, level=level))
    return course


def fault_run(course: TrainingCourse, directory: Path, level: str) -> TrainingCourse:
    """A run that breaks."""
    return whole(directory / course.name, lambda work: train_fault(course, prefix_of(course, directory), work, level))


def healthy_run(course: TrainingCourse, directory: Path, level: str) -> TrainingCourse:
    """A run in which nothing is wrong."""
    return whole(directory / course.name, lambda work: train_healthy(course, work, level))


def prefix_of(course: TrainingCourse, directory: Path) -> Path:
    """Where runs of this environment and seed begin."""
    return directory / f".{course.env}-{course.at_update}-s{course.seed}".replace("/", "_")


def remove_prefixes(work: Sequence[TrainingCourse], directory: Path) -> None:
    """Removes what runs began with."""
    for prefix in {prefix_of(course, directory) for course in work}:
        shutil.rmtree(prefix, ignore_errors=True)


def whole(target: Path, run: Callable[[Path], Result]) -> Result:
    """What `run` gives, and what it writes as a directory that is there whole or not at all."""
    work = target.with_name(f"{target.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    found = run(work)
    if work.exists():
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
    return found
