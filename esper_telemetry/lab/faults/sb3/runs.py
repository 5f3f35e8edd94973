"""Runs of the fault bench over Stable-Baselines3: the plan of a score, and training one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

from esper_telemetry.adapters.sb3.callback import TelemetryCallback
from esper_telemetry.lab.faults.fault import Undo
from esper_telemetry.lab.faults.runs import (
    FaultRun,
    journal_telemetry,
    read_fault_run,
    training_status,
    write_atomically,
)
from esper_telemetry.lab.faults.sb3.breaks import BREAKS
from esper_telemetry.lab.faults.sb3.models import MODELS, ModelNotApplicableError


def plan_sb3_runs(
    faults: Sequence[tuple[str, float]],
    envs: Sequence[str],
    seeds: Sequence[int],
    *,
    healthy: bool = True,
    explicit: bool = True,
) -> list[FaultRun]:
    """Return the healthy runs, and those of every fault on every model with every seed.

    Args:
        faults: names and doses.
        envs: names of models, with or without `sb3-` before them; all models where empty.
        seeds: seeds of the models.
        healthy: plan healthy runs too.
        explicit: the user named the faults; one that cannot be injected raises ValueError instead of being left out.

    Raises:
        ValueError: an unknown model.
    """
    names = [env if env.startswith("sb3-") else f"sb3-{env}" for env in envs] or list(MODELS)
    for env, name in zip(envs, names, strict=False):
        if name not in MODELS:
            raise ValueError(f"there is no environment {env!r} for sb3; there are {', '.join(MODELS)}")
    wrong = [name for name, _ in faults if name not in BREAKS]
    if explicit and wrong:
        raise ValueError(f"{wrong[0]} cannot be injected into sb3 from outside; these can: {', '.join(BREAKS)}")
    injectable = [(name, dose) for name, dose in faults if name in BREAKS]
    broken = [FaultRun(env, seed, name, dose) for seed in seeds for env in names for name, dose in injectable]
    return [*(FaultRun(env, seed) for seed in seeds for env in names if healthy), *broken]


def train_all_sb3(
    runs: Sequence[FaultRun], directory: Path, pool: Executor, level: str = "normal"
) -> Iterator[FaultRun]:
    """Train the runs that the directory does not hold yet, and yield every run when it is done or does not apply."""
    done = [run for run in runs if (directory / run.name).exists()]
    yield from (read_fault_run(directory / run.name) for run in done)
    rest = [run for run in runs if run not in done]
    for future in as_completed([pool.submit(train_run, run, directory, level) for run in rest]):
        yield future.result()


def train_run(run: FaultRun, directory: Path, level: str) -> FaultRun:
    """Train one run from its first update to its last; write nothing where the fault does not apply."""
    model = MODELS[run.env](run.seed)
    fault_callback = FaultCallback(run)
    missing = fault_callback.missing(model)
    if missing:
        return replace(run, missing=f"{run.fault} does not apply to {run.env}: {missing}")

    def train(run_dir: Path) -> FaultRun:
        steps = model.n_steps * model.n_envs * run.last
        with journal_telemetry(run_dir, level) as telemetry:
            callbacks: list[BaseCallback] = [TelemetryCallback(telemetry), fault_callback]
            status = training_status(lambda: model.learn(steps, callback=callbacks), telemetry)
        finished = replace(run, status=status)
        finished.write(run_dir)
        return finished

    return write_atomically(directory / run.name, train)


class FaultCallback(BaseCallback):
    """Breaks a model before the rollout of the run's first broken update."""

    def __init__(self, run: FaultRun) -> None:
        super().__init__()
        self._run, self._rollouts = run, 0

    def missing(self, model: Any) -> str:
        """Return why the fault does not apply to a model; empty where it does."""
        try:
            self._break(model)()
        except ModelNotApplicableError as lacks:
            return str(lacks)
        return ""

    def _on_rollout_start(self) -> None:
        self._rollouts += 1
        if self._rollouts == self._run.at_update:
            self._break(self.model)

    def _on_step(self) -> bool:
        return True

    def _break(self, model: Any) -> Undo:
        fault = self._run.fault
        return (lambda: None) if fault is None else BREAKS[fault](model, self._run.dose)
