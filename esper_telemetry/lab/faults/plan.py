"""Which runs a score is made of, and training them in several processes."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from esper_telemetry.lab.faults.course import (
    TrainingCourse,
    one_thread,
    read_course,
    train_fault,
    train_healthy,
    train_prefix,
)
from esper_telemetry.lab.faults.healthy import HEALTHY, PLAIN

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
