"""Runs of the fault bench: their environments, the plan of a score, and training each run into a journal.

Runs of the same environment and seed share the updates before the fault: these are trained once, and every fault continues from their
checkpoint and a copy of their journal. A run directory appears atomically, so an interrupted score can be continued.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from esper_telemetry.events import UpdateEnd
from esper_telemetry.lab.faults.fault import change_env_steps
from esper_telemetry.lab.faults.fault_catalogue import find, schedule
from esper_telemetry.ppo.config import preset
from esper_telemetry.ppo.environments.environment_protocol import Array, Step
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.trainer import PPO
from esper_telemetry.telemetry import Telemetry, attach

RUN_FILE = "course.json"
"""File of a run directory with the fields of its `FaultRun`."""

CHECKPOINT_FILE = "checkpoint.pt"

FIRST_BROKEN_UPDATE, LAST_UPDATE = 25, 45
"""The policy is half-trained when it breaks, and `WINDOW_UPDATES` updates follow in which an alarm counts."""

REWARD_CHANGE_UPDATE = 31
"""First update of the tripled rewards of the healthy kind `rewards_x3`."""


@dataclass(frozen=True, slots=True)
class FaultEnvironment:
    """A small task, and a policy for it.

    Attributes:
        env: name for `make_env`.
        policy: `mlp` or `lstm`.
        mask_velocity: velocities are hidden.
        settings: settings that differ from the preset's.
        updates: updates of a full run, over which schedules anneal.
    """

    env: str
    policy: str
    mask_velocity: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    updates: int = 150

    def trainer(self, seed: int, **changes: Any) -> PPO:
        """Return a trainer of that seed; `changes` override the settings."""
        tuned = preset(self.env, self.policy, mask_velocity=self.mask_velocity)
        env = make_env(self.env, num_envs=tuned.num_envs, mask_velocity=self.mask_velocity)
        return PPO(env, tuned.config(**{**self.settings, "seed": seed, **changes}))


ENVIRONMENTS: Mapping[str, FaultEnvironment] = {
    "cue-recall": FaultEnvironment("cue-recall", "lstm"),
    "cartpole": FaultEnvironment("CartPole-v1", "mlp"),
    "cartpole-lstm": FaultEnvironment("CartPole-v1", "lstm", mask_velocity=True),
    "acrobot": FaultEnvironment("Acrobot-v1", "mlp", settings={"activation": "relu"}),
    "pendulum": FaultEnvironment("Pendulum-v1", "mlp", settings={"num_steps": 128, "num_epochs": 8, "normalize_rewards": False}),
}


def find_environment(name: str) -> FaultEnvironment:
    """Return that environment, or the preset of any other task; raise ValueError if it cannot be made."""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    make_env(name, num_envs=1).close()
    return FaultEnvironment(name, "mlp")


def triple_rewards(trainer: PPO) -> None:
    """Multiply rewards by three from `REWARD_CHANGE_UPDATE` on, as a curriculum would."""

    def tripled(step: Step, _: Mapping[str, Array]) -> Step:
        return step._replace(rewards=3 * step.rewards)

    def change(event: UpdateEnd) -> None:
        if event.update == REWARD_CHANGE_UPDATE - 1:
            change_env_steps(trainer, tripled)

    trainer.hooks.on(UpdateEnd, change, last=True)


@dataclass(frozen=True, slots=True)
class HealthyKind:
    """A kind of healthy run; some look unhealthy, so that every alarm in them is false.

    Attributes:
        what: description.
        updates: length of the run.
        environments: names of the environments in which it is run.
        settings: settings that differ from the environment's.
        prepare: changes the trainer before training.
        anneals: schedules end within the run.
        interventions: updates whose changes the user announces.
    """

    what: str
    updates: int
    environments: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[PPO], None] = lambda trainer: None
    anneals: bool = False
    interventions: tuple[int, ...] = ()


PLAIN = "plain"

HEALTHY_KINDS: Mapping[str, HealthyKind] = {
    PLAIN: HealthyKind("as the preset says", 150, tuple(ENVIRONMENTS)),
    "annealed": HealthyKind(
        "learning rate and entropy bonus fall to 0 within the run",
        80,
        tuple(ENVIRONMENTS),
        {"anneal_learning_rate": True, "entropy_coef": 0.02, "final_entropy_coef": 0.0},
        anneals=True,
    ),
    "plateau": HealthyKind("training continues on a solved task", 250, ("cue-recall", "cartpole")),
    "slow": HealthyKind("the learning rate is a tenth", 100, ("cue-recall", "acrobot", "pendulum"), {"learning_rate": 2.5e-4}),
    "rewards_x3": HealthyKind(
        "rewards grow threefold, and the user says so",
        80,
        ("cue-recall", "pendulum", "cartpole-lstm"),
        prepare=triple_rewards,
        interventions=(REWARD_CHANGE_UPDATE,),
    ),
}


@dataclass(frozen=True, slots=True)
class FaultRun:
    """One run of a score.

    Attributes:
        env: name of the environment.
        seed: seed of the trainer.
        fault: name of the fault; None in a healthy run.
        dose: dose of the fault.
        healthy: kind of a healthy run.
        at_update: first broken update.
        last: last update.
        status: `done`, or the exception that ended training.
        missing: sentence that says why the fault does not apply; the run was not trained then.
        interventions: updates whose changes the user announced.
    """

    env: str
    seed: int
    fault: str | None = None
    dose: float = 1.0
    healthy: str = PLAIN
    at_update: int = FIRST_BROKEN_UPDATE
    last: int = LAST_UPDATE
    status: str = "done"
    missing: str = ""
    interventions: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Name of its directory."""
        what = f"healthy-{self.healthy}" if self.fault is None else f"{self.fault}-{self.dose:g}"
        return f"{self.env}-{what}-s{self.seed}".replace("/", "_")

    @property
    def trained_updates(self) -> int:
        """Updates that it trains itself, without the shared ones before the fault."""
        return self.last if self.fault is None else self.last - self.at_update + 1

    def prefix_dir(self, directory: Path) -> Path:
        """Return the directory of the updates before the fault, shared by all runs of an environment and seed."""
        return directory / f".{self.env}-{self.at_update}-s{self.seed}".replace("/", "_")

    def write(self, run_dir: Path) -> FaultRun:
        """Write the fields to `RUN_FILE`, and return the run."""
        (run_dir / RUN_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")
        return self


def read_fault_run(run_dir: Path) -> FaultRun:
    """Return the run of a directory; raise ValueError if it has none."""
    try:
        fields = json.loads((run_dir / RUN_FILE).read_text(encoding="utf-8"))
        return FaultRun(**{**fields, "interventions": tuple(fields["interventions"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{run_dir} is not a run of the fault bench: {error}") from error


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Context with the path of a temporary directory, which becomes `target` if it was created and the block did not raise."""
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    yield part
    if part.exists():
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)


def train_prefix(run: FaultRun, directory: Path, level: str) -> None:
    """Train the updates before the fault into a directory, and save a checkpoint."""
    environment = find_environment(run.env)
    trainer = environment.trainer(run.seed)
    with atomic_directory(run.prefix_dir(directory)) as run_dir, journal_telemetry(run_dir, level) as telemetry:
        attach(telemetry, trainer)
        train(trainer, updates=run.at_update - 1, planned=environment.updates)
        trainer.save(run_dir / CHECKPOINT_FILE)


def train_fault(run: FaultRun, directory: Path, level: str) -> FaultRun:
    """Continue from the prefix, break the trainer, and return the run with its status; do not write if the fault does not apply."""
    assert run.fault is not None
    environment = find_environment(run.env)
    trainer = environment.trainer(run.seed)
    missing = find(run.fault, run.dose).missing(trainer)
    if missing is not None:
        return replace(run, missing=missing)
    with atomic_directory(directory / run.name) as run_dir:
        shutil.copytree(run.prefix_dir(directory), run_dir)
        with journal_telemetry(run_dir, level, resume=True) as telemetry:
            attach(telemetry, trainer)
            trainer.load(run_dir / CHECKPOINT_FILE)
            undo = schedule(trainer, run.fault, run.dose, at_update=run.at_update)
            status = training_status(lambda: train(trainer, updates=run.last, planned=environment.updates), telemetry)
            undo()
        (run_dir / CHECKPOINT_FILE).unlink()
        return replace(run, status=status).write(run_dir)


def train_healthy(run: FaultRun, directory: Path, level: str) -> FaultRun:
    """Train a healthy run into its directory, and return it with its status."""
    kind, environment = HEALTHY_KINDS[run.healthy], find_environment(run.env)
    trainer = environment.trainer(run.seed, **kind.settings)
    with atomic_directory(directory / run.name) as run_dir:
        with journal_telemetry(run_dir, level) as telemetry:
            attach(telemetry, trainer)
            kind.prepare(trainer)
            planned = run.last if kind.anneals else max(run.last, environment.updates)
            status = training_status(lambda: train(trainer, updates=run.last, planned=planned), telemetry)
        return replace(run, status=status, interventions=kind.interventions).write(run_dir)


def journal_telemetry(run_dir: Path, level: str, *, resume: bool = False) -> Telemetry:
    """Return telemetry that writes a journal in this process, without sinks."""
    return Telemetry([], run_dir=run_dir, level=level, offload=False, resume=resume)


def train(trainer: PPO, *, updates: int, planned: int) -> None:
    """Train up to that many updates of a run whose schedules are `planned` for more."""
    per_update = trainer.config.num_steps * trainer.env.num_envs
    unsubscribe = trainer.hooks.on(UpdateEnd, lambda event: trainer.stop() if event.update >= updates else None)
    try:
        trainer.learn(per_update * planned)
    finally:
        unsubscribe()


def training_status(training: Callable[[], None], telemetry: Telemetry) -> str:
    """Train; return `done`, or close the run as failed and return the exception in one line."""
    try:
        training()
    except Exception as error:
        telemetry.__exit__(type(error), error, error.__traceback__)
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "done"


def plan_runs(faults: Sequence[tuple[str, float]], envs: Sequence[str], seeds: Sequence[int], *, healthy: bool = True) -> list[FaultRun]:
    """Return the runs of every fault and dose on every environment with every seed, after the healthy ones, longest first."""
    broken = [FaultRun(env, seed, name, dose) for seed in seeds for env in envs for name, dose in faults]
    sound = [
        FaultRun(env, seed, healthy=name, last=kind.updates)
        for seed in seeds
        for name, kind in HEALTHY_KINDS.items()
        for env in envs
        if healthy and (name == PLAIN or env in kind.environments)
    ]
    return [*sorted(sound, key=lambda run: -run.last), *broken]


@contextmanager
def worker_pool(workers: int) -> Iterator[Executor]:
    """Yield a pool of processes with one thread each; jobs that have not begun are cancelled if the block raises."""
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_use_one_thread)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _use_one_thread() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def train_all(runs: Sequence[FaultRun], directory: Path, pool: Executor, level: str = "normal") -> Iterator[FaultRun]:
    """Train the runs that the directory does not hold yet, and yield every run when it is done or does not apply."""
    runs_by_prefix: dict[Path, list[FaultRun]] = {}
    running: dict[Future[Any], Path | None] = {}
    for run in runs:
        if (directory / run.name).exists():
            yield read_fault_run(directory / run.name)
        elif run.fault is None:
            running[pool.submit(train_healthy, run, directory, level)] = None
        else:
            runs_by_prefix.setdefault(run.prefix_dir(directory), []).append(run)
    for prefix, broken in runs_by_prefix.items():
        running[pool.submit(train_prefix, broken[0], directory, level)] = prefix
    while running:
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            shared, result = running.pop(done), done.result()
            if result is not None:
                yield result
            if shared is not None:
                running |= {pool.submit(train_fault, run, directory, level): None for run in runs_by_prefix.pop(shared)}
    for prefix in {run.prefix_dir(directory) for run in runs}:
        shutil.rmtree(prefix, ignore_errors=True)
