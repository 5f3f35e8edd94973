"""Runs of trainers with telemetry attached."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper_telemetry import PPO, Telemetry, attach, read_run
from esper_telemetry.events import RolloutEnd
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


def rollout(log_probs: Tensor, **named: Any) -> RolloutEnd:
    """Return a rollout of T steps in B environments; missing columns are zero."""
    zeros = torch.zeros_like(log_probs)
    flags = zeros.bool()
    columns = {name: named.pop(name, zeros) for name in ("rewards", "values", "advantages", "returns", "next_values")}
    others: dict[str, Any] = {"ended": flags, "terminated": flags, "gamma": 0.99, "actions": {}} | named
    return RolloutEnd(1, 8, **columns, log_probs=log_probs, **others)
