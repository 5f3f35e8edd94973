"""`esper-telemetry train --resume DIR`: the settings of the run that goes on, what of them may change, and its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from esper_telemetry.cli.mistakes import WrongUse, wrong_use
from esper_telemetry.core.redaction import MASKED, masked
from esper_telemetry.journal.lock import HELPER_ROLES, Role, is_held
from esper_telemetry.journal.read import run_info
from esper_telemetry.ppo.checkpoint import read
from esper_telemetry.ppo.config import PPOConfig
from esper_telemetry.ppo.scripted import ScriptedRun
from esper_telemetry.ppo.trainer import PPO

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Train

KEPT: Final = (
    "total_steps",
    "env",
    "task",
    "mask_velocity",
    "num_envs",
    "device",
    "checkpoint_every",
    "eval_every",
    "eval_episodes",
    "threads",
)
"""Options, besides those of `PPOConfig`, that a run keeps with itself as they are."""

FIXED: Final = ("env", "task", "mask_velocity", "num_envs")
FIXED_PPO: Final = (
    "policy",
    "hidden_sizes",
    "encoder_sizes",
    "lstm_size",
    "lstm_layers",
    "activation",
    "shared_trunk",
    "log_std",
    "state_dependent_std",
    "squash",
    "normalize_observations",
    "normalize_rewards",
    "seed",
)
"""What weights, statistics and episodes of a checkpoint were made with: to change it is to begin another run."""


def kept_config(options: Train) -> dict[str, Any]:
    """What a run keeps of its options; the trainer adds its own settings, and telemetry the level."""
    sinks = [masked(sink) for sink in options.sink]
    return {**{name: getattr(options, name) for name in KEPT}, "preset": options.preset_name, "sinks": sinks}


def saved_options(form: Callable[..., Train], run_dir: str) -> Train:
    """The options of the run in that directory; sinks apart, which an option would add to.

    Raises WrongUse where it holds no run of ours.
    """
    config, facts = _kept(run_dir)
    settings = {name: config[name] for name in KEPT if name in config}
    level = facts.get("level", "normal")
    return form(**settings, resume=run_dir, level=level, ppo=_ppo(config), preset_name=config["preset"], sink=())


def checked(given: Train, saved: Train) -> Train:
    """The options with which the run goes on; raises WrongUse for one that cannot change."""
    assert given.resume is not None
    for name in FIXED:
        _refuse_change(name, getattr(saved, name), getattr(given, name), given.resume)
    for name in FIXED_PPO:
        _refuse_change(name, getattr(saved.ppo, name), getattr(given.ppo, name), given.resume)
    for name in ("run_dir", "preset"):
        if getattr(given, name) != getattr(saved, name):
            raise WrongUse(f"--{name.replace('_', '-')} goes with a new run: --resume takes it from {given.resume}")
    if given.level.lower() == "off":
        raise WrongUse("--level off keeps no journal, so there is nothing to resume with it")
    return given


def saved_sinks(run_dir: str) -> tuple[str, ...]:
    """The sinks of the run; raises WrongUse where an address is not complete without its password."""
    config, _ = _kept(run_dir)
    for sink in config["sinks"]:
        if MASKED in sink:
            raise WrongUse(f"the password in sink {sink} was not kept: name the sinks again with --sink")
    return tuple(config["sinks"])


def check_ranks(run_dir: str, ranks: int) -> None:
    """Raises WrongUse unless the run has been trained by as many processes: each goes on with its own episodes."""
    before = _kept(run_dir)[0].get("ranks", 1)
    if before != ranks:
        noun = "process" if before == 1 else "processes"
        raise WrongUse(f"{run_dir} was trained by {before} {noun}, here {'is' if ranks == 1 else 'are'} {ranks}")


def load_checkpoint(trainer: PPO | ScriptedRun, options: Train) -> str:
    """Makes a trainer go on from the run's latest checkpoint; returns a sentence that says from where.

    Raises WrongUse where there is none, it does not fit, nothing is left to do, or the run is still being trained.
    """
    assert options.resume is not None
    run_dir = Path(options.resume)
    if is_held(run_dir, Role.TRAINER):
        raise WrongUse(f"{run_dir} is still being trained: a run goes on in one process at a time")
    path = latest_checkpoint(run_dir)
    if not path.is_file():
        raise WrongUse(f"{run_dir} holds no checkpoint to go on from: there is no {path}")
    state = read(path)
    steps = state["counts"]["env_steps"]
    if steps >= options.total_steps:
        raise WrongUse(
            f"{run_dir} has trained {steps:,} steps of {options.total_steps:,}: more need a larger --total-steps"
        )
    trainer.load(path)
    anew = (
        ""
        if state["collector"]["environment"]
        else "; the state of this environment cannot be saved, so new episodes begin"
    )
    return f"{run_dir} goes on after update {trainer.updates:,}, step {trainer.env_steps:,}{anew}"


def latest_checkpoint(run_dir: Path) -> Path:
    """Return the checkpoint that a run goes on from, where it has one."""
    return run_dir / "checkpoints" / "latest.pt"


def say_what_is_waited_for(run_dir: str) -> None:
    """Prints a line where helpers of a killed trainer are at work."""
    if any(is_held(Path(run_dir), helper) for helper in HELPER_ROLES):
        print("waiting until the backends have what was measured before the run stopped", flush=True)


def _kept(run_dir: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    with wrong_use():
        info = run_info(run_dir)
    needed = {*KEPT, "preset", "sinks", *(field.name for field in fields(PPOConfig))}
    missing = sorted(needed - info.config.keys())
    if missing:
        raise WrongUse(f"{run_dir} is not a run of esper-telemetry train: its settings say nothing of {missing[0]}")
    return info.config, info.facts


def _ppo(config: Mapping[str, Any]) -> PPOConfig:
    """The trainer's settings; JSON has lists for tuples."""
    settings: dict[str, Any] = {field.name: config[field.name] for field in fields(PPOConfig)}
    tuples = {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
    return PPOConfig(**{**settings, **tuples})


def _refuse_change(name: str, before: object, now: object, run_dir: str) -> None:
    if before != now:
        option = name.replace("_", "-")
        raise WrongUse(
            f"--{option} cannot change when a run is resumed: {run_dir} was trained with {before}, got {now}"
        )
