"""`esper-telemetry train`: the bundled trainer with telemetry, and what is left to say at its end."""

from __future__ import annotations

import shlex
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from esper_telemetry.adapters.attach import attach
from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.cli import resume
from esper_telemetry.cli.mistakes import WrongUse, wrong_use
from esper_telemetry.cli.outcome import Summary
from esper_telemetry.cli.profiling import UpdateProfiler
from esper_telemetry.cli.ranks import RankLostError, agreed, first, own_device, process_group, strongest, watching_ranks
from esper_telemetry.core.metric import segment
from esper_telemetry.core.record import Level, RunStatus
from esper_telemetry.events import RolloutEnd
from esper_telemetry.lab.morphogenesis.environment import Morphogenesis
from esper_telemetry.ppo.checkpoint import Checkpoints
from esper_telemetry.ppo.config import SCRIPTED, PPOConfig
from esper_telemetry.ppo.environments.make import make_env
from esper_telemetry.ppo.environments.observations import ObservationLayout, layout_of
from esper_telemetry.ppo.environments.protocol import Environment
from esper_telemetry.ppo.ranks import Ranks
from esper_telemetry.ppo.scripted import ScriptedRun
from esper_telemetry.ppo.trainer import PPO
from esper_telemetry.sinks.protocol import Sink
from esper_telemetry.sinks.registry import SinkLike, as_sink
from esper_telemetry.telemetry import Telemetry, session_of

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Train

SMALL = 256  # width from which a second thread pays: measured for LSTMs of 64 and 256
DONE, FAILED, INTERRUPTED, TERMINATED = 0, 1, 130, 143
STATUSES = {DONE: RunStatus.FINISHED, INTERRUPTED: RunStatus.INTERRUPTED, TERMINATED: RunStatus.PREEMPTED}


class Prepared(NamedTuple):
    """What was made of the arguments before anything is created."""

    env: Environment
    device: torch.device
    sinks: list[Sink]


def train(options: Train) -> int:
    """Trains; every argument is checked before anything is created.

    Under `torchrun` every process trains on its share of the environments; the first has the journal, the sinks, the evaluations, the
    checkpoints and the terminal.
    """
    with process_group(options.device):
        prepared = agreed(partial(_prepared, options))
        with wrong_use():
            trainer = _trainer(prepared, options)
            beginning = (
                agreed(partial(resume.load_checkpoint, trainer, options)) if options.resume else _preset(options)
            )
            summary = Summary(prepared.sinks)
            telemetry = _telemetry([*prepared.sinks, summary.observe], options)
        if first() and beginning:
            print(beginning)
        code = _run(trainer, telemetry, options)
        if first():
            summary.show(telemetry)
            if code in (INTERRUPTED, TERMINATED):
                _print_resume_command(telemetry.run_dir)
        return code


def _print_resume_command(run_dir: Path | None) -> None:
    """Print the command that goes on with a run that was stopped, or why there is none."""
    if run_dir is not None and resume.latest_checkpoint(run_dir).is_file():
        print(f"go on with: {shlex.join(['esper-telemetry', 'train', '--resume', str(run_dir)])}")
    else:
        print("the run cannot go on, as it has no checkpoint")


def _trainer(prepared: Prepared, options: Train) -> PPO | ScriptedRun:
    """What acts in the environments, and learns unless its policy is a script."""
    if options.ppo.policy in SCRIPTED:
        assert isinstance(prepared.env, Morphogenesis)
        return ScriptedRun(prepared.env, options.ppo)
    return PPO(prepared.env, options.ppo, device=prepared.device)


def _check_task(options: Train) -> None:
    """Refuses what belongs to morphogenesis where the environment is another, and what a script cannot do."""
    grows, scripted = options.env == Morphogenesis.name, options.ppo.policy in SCRIPTED
    if options.task != "synthetic" and not grows:
        raise WrongUse(f"--task {options.task} is for --env morphogenesis, got --env {options.env}")
    if scripted and not grows:
        raise WrongUse(f"--policy {options.ppo.policy} is for --env morphogenesis, got --env {options.env}")
    if scripted and options.eval_every > 0:
        raise WrongUse(f"--policy {options.ppo.policy} does not learn, so --eval-every has nothing to evaluate")


def _make_env(options: Train, num_envs: int, device: torch.device) -> Environment:
    """The environments; what morphogenesis needs besides goes to it alone."""
    grown: dict[str, Any] = {"task": options.task, "gamma": options.ppo.gamma, "device": device}
    extra = grown if options.env == Morphogenesis.name else {}
    return make_env(options.env, num_envs=num_envs, mask_velocity=options.mask_velocity, **extra)


def _check_profile(options: Train) -> None:
    """Refuses a profile that could not be written."""
    _profiler(options, Path())
    if options.profile and Level.parse(options.level) is Level.OFF:
        raise WrongUse("--profile writes into the run directory, and at level off there is none")


def _prepared(options: Train) -> Prepared:
    _check_numbers(options)
    _check_profile(options)
    _check_task(options)
    _thresholds(options)
    device = _device(own_device(options.device))
    size = Ranks.current().size
    if options.resume:
        resume.check_ranks(options.resume, size)
    if options.num_envs % size:
        raise WrongUse(f"num_envs must be a multiple of the {size} processes, got {options.num_envs}")
    env = _make_env(options, options.num_envs // size, device)
    _choose_threads(options, layout_of(env))
    return Prepared(env, device, [as_sink(sink) for sink in options.sink or ("console",)] if first() else [])


def _check_numbers(options: Train) -> None:
    """Refuses sizes that are none, and an empty directory, which an unset variable of the shell leaves."""
    least = {"total_steps": 1, "threads": 1, "eval_episodes": 1, "eval_every": 0, "checkpoint_every": 0}
    for name, smallest in least.items():
        number = getattr(options, name)
        if number is not None and number < smallest:
            raise WrongUse(f"{name} must be at least {smallest}, got {number}")
    if options.run_dir is not None and not options.run_dir.strip():
        raise WrongUse(f"run_dir must name a directory, got {options.run_dir!r}")


def _telemetry(sinks: Sequence[SinkLike], options: Train) -> Telemetry:
    if options.resume and first():
        resume.say_what_is_waited_for(options.resume)
    return Telemetry(
        sinks,
        run_dir=options.resume or options.run_dir or "auto",
        name=None if options.run_dir else segment(options.env),
        level=options.level,
        budget=options.telemetry_budget,
        close_timeout=options.close_timeout,
        detect=options.detect and _thresholds(options),
        config={**resume.kept_config(options), "ranks": Ranks.current().size},
        resume=options.resume is not None,
    )


def _thresholds(options: Train) -> Thresholds:
    """The bounds of the detectors; raises WrongUse for one that does not exist, or that nobody would look at."""
    if options.threshold and not options.detect:
        raise WrongUse(f"--threshold {options.threshold[0]} is for alarms, which --no-detect switches off")
    try:
        return Thresholds.parse(options.threshold)
    except ValueError as error:
        raise WrongUse(str(error)) from error


def _preset(options: Train) -> str:
    """What the preset and the options changed of the defaults; empty where there is no preset."""
    if options.preset_name == "none":
        return ""
    plain = asdict(PPOConfig())
    changed = {name: value for name, value in asdict(options.ppo).items() if value != plain[name]}
    settings = " ".join(f"{name}={value}" for name, value in {"num_envs": options.num_envs, **changed}.items())
    return f"preset {options.preset_name} (--preset none for the defaults): {settings}"


def _choose_threads(options: Train, layout: ObservationLayout) -> None:
    """One thread for small networks without convolutions: waiting for a second one costs more than it computes."""
    widest = max((*options.ppo.hidden_sizes, *options.ppo.encoder_sizes, options.ppo.lstm_size))
    if options.threads is not None or (widest < SMALL and not layout.images):
        torch.set_num_threads(options.threads or 1)


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise WrongUse(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error


def _run(trainer: PPO | ScriptedRun, telemetry: Telemetry, options: Train) -> int:
    try:
        with _stopped_by_signals(trainer) as came, telemetry, watching_ranks(partial(_give_up, telemetry)):
            if first() and isinstance(trainer, PPO):
                _evaluate(trainer, options)
            with _profiled(trainer, telemetry, options):
                checkpoints = _checkpoints(trainer, telemetry, options)
                trainer.learn(options.total_steps)
            saved = checkpoints is None or checkpoints.save()
            code = _code(trainer, options, strongest(max(came, default=0)))
            signal.signal(
                signal.SIGINT, signal.default_int_handler
            )  # there is no training to stop: Ctrl-C ends the wait for backends
            telemetry.close(STATUSES[code])
    except KeyboardInterrupt:
        return INTERRUPTED
    except RankLostError as lost:
        _say(lost)
        return FAILED
    except Exception:
        traceback.print_exc()
        return FAILED
    return code if saved else code or FAILED


def _code(trainer: PPO | ScriptedRun, options: Train, number: int) -> int:
    """The exit code of training that returned after that signal, 0 for none; one that has all its steps is done all the same."""
    if not number or trainer.env_steps >= options.total_steps:
        return DONE
    return TERMINATED if number == signal.SIGTERM else INTERRUPTED


def _give_up(telemetry: Telemetry, lost: RankLostError) -> None:
    """Ends the run while the training thread waits for a rank that has gone."""
    _say(lost)
    session_of(telemetry).abandon(lost)


def _say(lost: RankLostError) -> None:
    if first():
        sys.stderr.write(f"esper-telemetry: {lost}\n")


@contextmanager
def _profiled(trainer: PPO | ScriptedRun, telemetry: Telemetry, options: Train) -> Iterator[None]:
    """Attaches telemetry; within, some updates are traced if that was asked for."""
    if not options.profile or telemetry.run_dir is None or not first():
        attach(telemetry, trainer)
        yield
        return
    profiler = _profiler(options, telemetry.run_dir)
    with profiler.around(trainer.hooks, lambda: attach(telemetry, trainer)):
        yield
    if not profiler.traces:
        print(f"profile: nothing was traced, as the run ended before update {profiler.updates}")
    for trace in profiler.traces:
        print(f"profile      {trace}\n             open it in https://ui.perfetto.dev")


def _profiler(options: Train, run_dir: Path) -> UpdateProfiler:
    wait, warm_up, active = options.profile_schedule
    return UpdateProfiler(run_dir / "profile", wait=wait, warm_up=warm_up, active=active)


def _checkpoints(trainer: PPO | ScriptedRun, telemetry: Telemetry, options: Train) -> Checkpoints | None:
    if options.checkpoint_every <= 0 or telemetry.run_dir is None:
        return None
    return Checkpoints(trainer, telemetry.run_dir / "checkpoints", every=options.checkpoint_every)


def _evaluate(trainer: PPO, options: Train) -> None:
    """Evaluates whenever training passes a multiple of so many steps; what is found joins the record of the update it precedes."""
    if options.eval_every <= 0:
        return
    env = _make_env(options, options.eval_episodes, _device(own_device(options.device)))
    passed = trainer.env_steps // options.eval_every

    def evaluate(event: RolloutEnd) -> None:
        nonlocal passed
        before, passed = passed, event.env_step // options.eval_every
        if passed > before:
            trainer.evaluate(env, seed=options.ppo.seed + 1)

    trainer.hooks.on(RolloutEnd, evaluate)


@contextmanager
def _stopped_by_signals(trainer: PPO | ScriptedRun) -> Iterator[list[int]]:
    """Within it SIGTERM and Ctrl-C end training after the update in progress; yields the signals that came.

    A second Ctrl-C ends one process at once. Where several train, each gets the signal at another moment, and all have to stop after the
    same update.
    """
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in came and trainer.ranks.alone:
            raise KeyboardInterrupt
        came.append(number)
        trainer.stop()
        earlier = before[number]
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)  # whoever listened before us still does

    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
