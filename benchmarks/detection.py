"""Time of detection per update, in microseconds of one thread and as a share of the update.

`python benchmarks/detection.py` trains three small runs, then judges their records repeatedly. With a worker, detection runs there
(`docs/architecture.md`); the share is its part of the training thread's time without a worker.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import tyro
from results import Row, save

from esper_telemetry import Telemetry, attach, read_run
from esper_telemetry.alarms import Detectors
from esper_telemetry.journal.read import Run
from esper_telemetry.lab.faults.runs import find_environment, train

WARM = 25
"""Updates until every history is full; earlier updates cost less."""


@dataclass(frozen=True)
class Settings:
    """Judges records of small runs, round by round."""

    envs: tuple[str, ...] = ("cue-recall", "cartpole-lstm", "acrobot")
    """Environments of the fault benchmark."""
    updates: int = 60
    """Updates of every run."""
    rounds: int = 20
    """Number of times that each run is judged; the result is the median, and the fastest is also shown."""
    save: bool = False
    """Save the medians in docs/benchmarks.json."""


def recorded(env: str, updates: int, run_dir: Path) -> Run:
    """Return a run at NORMAL without detection."""
    trainer = find_environment(env).trainer(1)
    with Telemetry([], run_dir=run_dir, detect=False, offload=False) as telemetry:
        attach(telemetry, trainer)
        train(trainer, updates=updates, planned=updates)
    return read_run(run_dir)


def cost(run: Run) -> float:
    """Return the processor seconds per update, once histories are full."""
    detectors = Detectors(run.info.facts)
    for record in run.records[:WARM]:
        detectors.step(record)
    gc.collect()
    start = time.process_time()
    for record in run.records[WARM:]:
        detectors.step(record)
    return (time.process_time() - start) / len(run.records[WARM:])


def update_seconds(run: Run) -> float:
    """Return the median wall time of an update with its rollout."""
    return statistics.median(b.axes.wall_time - a.axes.wall_time for a, b in pairwise(run.records))


def row(env: str, run: Run, costs: Sequence[float]) -> Row:
    """Print one line of the table, and return the page's row."""
    median, best, update = statistics.median(costs), min(costs), update_seconds(run)
    keys = statistics.median(len(record.values) for record in run.records)
    share = median / update
    print(f"{env:16}{keys:8.0f}{1e6 * median:12.0f}{1e6 * best:12.0f}{1e3 * update:12.1f}{share:11.2%}")
    return Row(f"{env}, {keys:.0f} metrics in updates of {1e3 * update:.0f} ms", f"{1e3 * median:.2f} ms")


def main(settings: Settings) -> None:
    """Print a table."""
    torch.set_num_threads(1)
    print(f"{'environment':16}{'keys':>8}{'µs, median':>12}{'µs, best':>12}{'update, ms':>12}{'share':>11}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="detection-") as directory:
        for env in settings.envs:
            run = recorded(env, settings.updates, Path(directory) / env)
            rows.append(row(env, run, [cost(run) for _ in range(settings.rounds)]))
    if settings.save:
        save("alarms", rows)


if __name__ == "__main__":
    main(tyro.cli(Settings))
