"""`esper-telemetry train`: the bundled trainer with telemetry, and what is left to say at its end."""

from __future__ import annotations

import sys
import traceback
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from esper_telemetry.commands.mistakes import WrongUse, wrong_use
from esper_telemetry.commands.summary import Summary
from esper_telemetry.environments import make_env
from esper_telemetry.metric import segment
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.sinks import as_sink
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.wiring import attach

if TYPE_CHECKING:
    from esper_telemetry.cli import Train

SMALL = 256  # width from which a second thread pays: measured for LSTMs of 64 and 256
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
            config={
                "env": options.env,
                "mask_velocity": options.mask_velocity,
                "preset": options.preset_name,
                "total_steps": options.total_steps,
                "num_envs": options.num_envs,
            },
        )
    _say_preset(options)
    code = _run(trainer, telemetry, options.total_steps)
    summary.show(telemetry)
    return code


def _trainer(options: Train) -> PPO:
    if options.total_steps < 1:
        raise WrongUse(f"total_steps must be at least 1, got {options.total_steps}")
    device = _device(options.device)
    _choose_threads(options)
    env = make_env(options.env, num_envs=options.num_envs, mask_velocity=options.mask_velocity)
    return PPO(env, options.ppo, device=device)


def _say_preset(options: Train) -> None:
    """Prints what the preset and the options changed of the defaults; nothing where there is no preset."""
    if options.preset_name == "none":
        return
    plain = asdict(PPOConfig())
    changed = {name: value for name, value in asdict(options.ppo).items() if value != plain[name]}
    settings = " ".join(f"{name}={value}" for name, value in {"num_envs": options.num_envs, **changed}.items())
    print(f"preset {options.preset_name} (--preset none for the defaults): {settings}", file=sys.stderr)


def _choose_threads(options: Train) -> None:
    """One thread for small networks: waiting for a second one costs more than it computes."""
    widest = max((*options.ppo.hidden_sizes, *options.ppo.encoder_sizes, options.ppo.lstm_size))
    if options.threads is not None or widest < SMALL:
        torch.set_num_threads(options.threads or 1)


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise WrongUse(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error


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
