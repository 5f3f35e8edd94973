"""`esper-telemetry train --resume DIR`: the settings of the resumed run, which of them may change, and its checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin, get_type_hints

from esper_telemetry.cli.arguments import WrongUse, agrees, wrong_use
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.record import RunInfo
from esper_telemetry.core.redaction import HIDDEN, masked
from esper_telemetry.journal.lock import HELPER_ROLES, Role, is_held
from esper_telemetry.journal.read import run_info
from esper_telemetry.journal.schema import TEXTS
from esper_telemetry.ppo.checkpoint import TrainingRun, read
from esper_telemetry.ppo.config import PPOConfig
from esper_telemetry.sinks.sink_registry import leads_outside

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Train

STORED_OPTIONS: Final = (
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
"""Options that a run stores in its settings, in addition to the fields of `PPOConfig`."""

MAX_QUOTED: Final = 100
"""Maximum characters of a setting in a message."""

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
"""Options that the weights, statistics and episodes of a checkpoint depend on. A change would make another run."""


def config_of(options: Train) -> dict[str, Any]:
    """Return the settings that a run stores; the trainer adds its own, and telemetry the level."""
    sinks = [masked(sink) for sink in options.sink]
    settings = {name: getattr(options, name) for name in STORED_OPTIONS}
    # An address of notify is a secret, so only its scheme is stored; without --notify a resumed run keeps the earlier schemes.
    notify = {"notify": [address.partition(":")[0] for address in options.notify]} if options.notify else {}
    return {**settings, "preset": options.preset_name, "sinks": sinks, **notify}


def saved_options(form: Callable[..., Train], run_dir: str) -> Train:
    """Return the options of the run in that directory, without its sinks, because the option --sink would add to them.

    Raises WrongUse unless the directory holds a run of `esper-telemetry train`.
    """
    run = _trained_run(run_dir)
    # JSON has lists instead of tuples. A setting that this version has added keeps its default.
    stored: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in run.config.items()}
    settings: dict[str, Any] = {name: stored[name] for name in STORED_OPTIONS if name in stored}
    settings |= {"preset_name": stored["preset"], "level": Facts.of(run.facts).level or "normal"}
    ppo = {field.name: stored[field.name] for field in fields(PPOConfig) if field.name in stored}
    for kind, values in ((form, settings), (PPOConfig, ppo)):
        hints = get_type_hints(kind)
        for name, value in values.items():
            if not _fits(value, hints[name]):
                raise WrongUse(f"{run_dir} is not a run of esper-telemetry train: {name} is {str(value)[:MAX_QUOTED]!r}")
    with wrong_use():
        return form(**settings, resume=run_dir, ppo=PPOConfig(**ppo), sink=())


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a JSON value has the type of an option: a class, a union, a tuple of one type or a list of words."""
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return value in parts
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, parts[0]) for item in value)
    if parts:
        return any(_fits(value, part) for part in parts)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def checked(options: Train, saved: Train) -> Train:
    """Return the options of the resumed run; raises WrongUse for an option that cannot change."""
    assert options.resume is not None
    for before, now, names in ((saved, options, FIXED), (saved.ppo, options.ppo, FIXED_PPO)):
        for name in names:
            if getattr(before, name) != getattr(now, name):
                raise WrongUse(
                    f"--{name.replace('_', '-')} cannot change when a run is resumed: {options.resume} was trained with "
                    f"{getattr(before, name)}, got {getattr(now, name)}"
                )
    for name in ("run_dir", "preset"):
        if getattr(options, name) != getattr(saved, name):
            raise WrongUse(f"--{name.replace('_', '-')} goes with a new run: --resume takes it from {options.resume}")
    if options.level.lower() == "off":
        raise WrongUse("--level off keeps no journal, so a run cannot be resumed with it")
    return options


def saved_sinks(run_dir: str) -> tuple[str, ...]:
    """Return the sinks of the run; raises WrongUse for an address without its password, and for one that the user does not accept."""
    sinks = _trained_run(run_dir).config["sinks"]
    if not TEXTS.accepts(sinks):
        raise WrongUse(f"the sinks that {run_dir} was trained with cannot be read: name them with --sink")
    for sink in sinks:
        if HIDDEN in sink:
            raise WrongUse(f"the password in sink {sink} was not stored: name the sinks again with --sink")
        if leads_outside(sink, Path(run_dir)) and not agrees(f"{run_dir} names the backend {sink}: send your token there?"):
            raise WrongUse(
                f"{run_dir} names the backend {sink}, which would receive your token: allow it with --sink {shlex.quote(sink)}, and "
                "name all other sinks too"
            )
    return tuple(sinks)


def check_saved_env(run_dir: str, env: str) -> None:
    """Raise WrongUse for an environment whose module would be imported, unless the user accepts that."""
    if ":" in env and not agrees(f"{run_dir} names the environment {env}: import that module?"):
        raise WrongUse(f"{run_dir} names the environment {env}, whose module would be imported: allow it with --env {shlex.quote(env)}")


def command(run_dir: Path, options: Train) -> str:
    """Return the command that resumes a run; it includes what `--resume` would have to ask about."""
    env = ["--env", options.env] if ":" in options.env else []
    outside = any(leads_outside(sink, run_dir) for sink in options.sink)
    sinks = [word for sink in options.sink for word in ("--sink", masked(sink))] if outside else []
    return shlex.join(["esper-telemetry", "train", "--resume", str(run_dir), *env, *sinks])


def check_ranks(run_dir: str, ranks: int) -> None:
    """Raise WrongUse unless the run was trained by the same number of processes, because each continues its own episodes."""
    before = _trained_run(run_dir).config.get("ranks", 1)
    if before != ranks:
        noun = "process" if before == 1 else "processes"
        raise WrongUse(f"{run_dir} was trained by {before} {noun}, here {'is' if ranks == 1 else 'are'} {ranks}")


def load_checkpoint(trainer: TrainingRun, options: Train) -> str:
    """Load the run's latest checkpoint into a trainer; returns a sentence that says where the run continues.

    Raises WrongUse if the checkpoint is missing or does not fit, no steps are left, or the run is still being trained.
    """
    assert options.resume is not None
    run_dir = Path(options.resume)
    if is_held(run_dir, Role.TRAINER):
        raise WrongUse(f"{run_dir} is still being trained: only one process at a time can continue a run")
    path = latest_checkpoint(run_dir)
    if not path.is_file():
        raise WrongUse(f"{run_dir} cannot be resumed without a checkpoint: {path} does not exist")
    state = read(path)
    steps = state["counts"]["env_steps"]
    if steps >= options.total_steps:
        raise WrongUse(f"{run_dir} has trained {steps:,} steps of {options.total_steps:,}: to train more, pass a larger --total-steps")
    trainer.load(path)
    has_episodes = state["collector"].get("environment")
    note = "" if has_episodes else "; the state of this environment cannot be saved, so new episodes begin"
    schemes = _trained_run(options.resume).config.get("notify", [])
    if TEXTS.accepts(schemes) and schemes and not options.notify:
        note += f"; {', '.join(schemes)} gets no messages, because addresses are not stored: name them with --notify"
    return f"{run_dir} continues after update {trainer.updates:,}, step {trainer.env_steps:,}{note}"


def latest_checkpoint(run_dir: Path) -> Path:
    """Return the path of the checkpoint from which a run continues."""
    return run_dir / "checkpoints" / "latest.pt"


def print_wait_for_helpers(run_dir: str) -> None:
    """Print a line if helper processes of a killed trainer still work."""
    if any(is_held(Path(run_dir), helper) for helper in HELPER_ROLES):
        print("waiting until the backends have the records from before the run stopped", flush=True)


def _trained_run(run_dir: str) -> RunInfo:
    with wrong_use():
        info = run_info(run_dir)
    needed = {*STORED_OPTIONS, "preset", "sinks", "policy", "num_steps", "learning_rate"}
    missing = sorted(needed - info.config.keys())
    if missing:
        raise WrongUse(f"{run_dir} is not a run of esper-telemetry train: its settings lack {missing[0]}")
    return info
