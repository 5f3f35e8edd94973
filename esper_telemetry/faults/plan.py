"""Which runs a score is made of, and training them in several processes."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from esper_telemetry.faults.course import Course, one_thread, read_course, train_fault, train_healthy, train_prefix
from esper_telemetry.faults.healthy import HEALTHY, PLAIN

Tell = Callable[[Course], None]


@dataclass(frozen=True, slots=True)
class Job:
    """Runs that one process trains one after the other: all faults of one environment and seed, or one healthy run."""

    courses: tuple[Course, ...]
    level: str = "normal"

    @property
    def updates(self) -> int:
        """How many updates are trained, at most."""
        first = self.courses[0]
        if first.fault is None:
            return first.last
        return first.at_update - 1 + sum(course.last - course.at_update + 1 for course in self.courses)


def jobs(
    faults: Sequence[tuple[str, float]], envs: Sequence[str], seeds: Sequence[int], *, healthy: bool = True
) -> list[Job]:
    """The runs of every fault with its dose on every environment with every seed, and the healthy ones."""
    broken = [
        Job(tuple(Course(env, seed, fault=name, dose=dose) for name, dose in faults))
        for seed in seeds
        for env in envs
        if faults
    ]
    sound = [
        Job((Course(env, seed, healthy=name, last=kind.updates),))
        for seed in seeds
        for name, kind in HEALTHY.items()
        for env in (envs if name == PLAIN else [env for env in kind.beds if env in envs])
        if healthy
    ]
    return sorted([*broken, *sound], key=lambda job: -job.updates)


def run_job(job: Job, directory: Path) -> list[Course]:
    """Trains the runs of a job that the directory does not hold yet; each gets a directory of its own there."""
    one_thread()
    first = job.courses[0]
    if first.fault is None:
        return [_once(directory / first.name, lambda target: train_healthy(first, target, job.level))]
    prefix = directory / f".{first.env}-s{first.seed}".replace("/", "_")
    done = []
    for course in job.courses:
        if not (directory / course.name).exists() and not prefix.exists():
            train_prefix(first.env, first.seed, prefix, at_update=first.at_update, level=job.level)
        done.append(_once(directory / course.name, lambda target, c=course: train_fault(c, prefix, target, job.level)))  # type: ignore[misc]
    shutil.rmtree(prefix, ignore_errors=True)
    return done


def _once(target: Path, run: Callable[[Path], Course]) -> Course:
    """The run, trained unless its directory is there; one that was interrupted leaves nothing that looks whole."""
    if target.exists():
        return read_course(target)
    work = target.with_name(f".{target.name}")
    shutil.rmtree(work, ignore_errors=True)
    course = run(work)
    if work.exists():
        work.rename(target)
    return course


def run_jobs(work: Sequence[Job], directory: Path, workers: int) -> Iterator[tuple[Job, list[Course]]]:
    """Trains all, `workers` at a time, and yields what is done as it is done."""
    directory.mkdir(parents=True, exist_ok=True)
    if workers == 1:
        yield from ((job, run_job(job, directory)) for job in work)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=one_thread) as pool:
        futures: dict[Future[list[Course]], Job] = {pool.submit(run_job, job, directory): job for job in work}
        for future in as_completed(futures):
            yield futures[future], future.result()
