"""Runs of trainers with telemetry attached."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper_telemetry import PPO, Telemetry, attach, read_run
from esper_telemetry.journal.read import Run

TIMED = ("perf/", "train/env_steps_per_second", "telemetry/")


def learned(source: PPO, run_dir: Path, steps: int = 1, **options: Any) -> Run:
    """Train for these environment steps, measured in this process unless the options differ; return the run."""
    with Telemetry(run_dir=run_dir, **{"offload": False, **options}) as telemetry:
        attach(telemetry, source)
        source.learn(steps)
    return read_run(run_dir)


def untimed(values: Mapping[str, float]) -> dict[str, float]:
    """Leave out the values that depend on the clock."""
    return {key: value for key, value in values.items() if not key.startswith(TIMED)}
