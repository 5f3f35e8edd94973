"""`esper-telemetry train`: the bundled trainer with telemetry, and what is left to say at its end."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING

import torch

from esper_telemetry.commands.mistakes import WrongUse, wrong_use
from esper_telemetry.commands.summary import Summary
from esper_telemetry.environments import make_env
from esper_telemetry.metric import segment
from esper_telemetry.ppo import PPO
from esper_telemetry.sinks import as_sink
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.wiring import attach

if TYPE_CHECKING:
    from esper_telemetry.cli import Train

DONE, FAILED, INTERRUPTED = 0, 1, 130


def train(options: Train) -> int:
    """Trains; every argument is checked before anything is created."""
    with wrong_use():
        trainer = _trainer(options)
        sinks = [as_sink(sink) for sink in options.sink or ("console",)]
        summary = Summary(sinks)
        telemetry = Telemetry(
            [*sinks, summary.observe],
            run_dir=options.run_dir or "auto",
            name=segment(options.env),
            level=options.level,
            config={"env": options.env, "total_steps": options.total_steps, "num_envs": options.num_envs},
        )
    code = _run(trainer, telemetry, options.total_steps)
    summary.show(telemetry)
    return code


def _trainer(options: Train) -> PPO:
    if options.total_steps < 1:
        raise WrongUse(f"total_steps must be at least 1, got {options.total_steps}")
    device = _device(options.device)
    _leave_cores_to_others(device)
    env = make_env(options.env, num_envs=options.num_envs)
    return PPO(env, options.ppo, device=device)


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise WrongUse(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error


def _leave_cores_to_others(device: torch.device) -> None:
    """One thread unless the user asks for more: small networks gain nothing from a second, and a busy core makes it wait.

    On two busy cores the default of torch was thirty times as slow.
    """
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _run(trainer: PPO, telemetry: Telemetry, total_steps: int) -> int:
    try:
        with telemetry:
            attach(telemetry, trainer)
            trainer.learn(total_steps)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return FAILED
    return DONE
