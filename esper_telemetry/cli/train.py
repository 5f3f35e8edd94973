"""`esper-telemetry train`: the bundled trainer with telemetry, checkpoints, evaluations and a profile."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.cli import resume
from esper_telemetry.cli.arguments import WrongUse, is_first_rank, wrong_use
from esper_telemetry.cli.rank_agreement import RankLostError, agreed, largest_over_ranks, own_device, process_group, watching_ranks
from esper_telemetry.core.metric import segment
from esper_telemetry.core.record import Level, RunStatus
from esper_telemetry.core.redaction import masked
from esper_telemetry.core.requirements import require_count, require_path
from esper_telemetry.events import Hooks, MinibatchEnd, RolloutEnd, UpdateEnd
from esper_telemetry.journal.file import HOLDS_RUN, holds_run
from esper_telemetry.ppo.checkpoint import Checkpoints, TrainingRun
from esper_telemetry.ppo.config import POLICIES, PPOConfig
from esper_telemetry.ppo.environments.environment_protocol import Environment, layout_of
from esper_telemetry.ppo.environments.environment_registry import every_environment, make_env, registered
from esper_telemetry.ppo.gradient_ranks import Ranks
from esper_telemetry.ppo.trainer import PPO
from esper_telemetry.sinks.notify import NotifySink
from esper_telemetry.sinks.sink_protocol import Sink
from esper_telemetry.sinks.sink_registry import SinkLike, as_sink
from esper_telemetry.telemetry import Telemetry, attach, session_of
from esper_telemetry.views.verdict_text import Summary

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Train

MAX_STEPS = 1 << 53
"""Maximum number of steps: backends store it as float64, which cannot represent larger odd numbers."""
MAX_ENVS = 1 << 20
MAX_THREADS = 1 << 12
MIN_THREADED_WIDTH = 256  # of a network; measured for LSTMs of 64 and 256
DONE, FAILED, INTERRUPTED, TERMINATED = 0, 1, 130, 143
STATUSES = {DONE: RunStatus.FINISHED, INTERRUPTED: RunStatus.INTERRUPTED, TERMINATED: RunStatus.PREEMPTED}


def train(options: Train) -> int:
    """Train; every argument is checked before anything is created.

    Under `torchrun` every process trains on its share of the environments. Only rank 0 has the journal, the sinks, the evaluations, the
    checkpoints and the terminal.
    """
    with process_group(options.device):
        env, device, sinks = agreed(partial(_prepared, options))
        with wrong_use():
            environment = registered(options.env)
            if environment and environment.control and options.ppo.policy in environment.controllers:
                trainer = environment.control(env, options.ppo)  # it acts but does not learn
            else:
                trainer = PPO(env, options.ppo, device=device)
            load = partial(resume.load_checkpoint, trainer, options)
            beginning = agreed(load) if options.resume else _preset_sentence(options)
            summary = Summary()
            telemetry = _telemetry([*sinks, summary.observe], options)
            session_of(telemetry).prints_end = False
        if is_first_rank() and beginning:
            print(beginning)
        code = _run(trainer, telemetry, options)
        if is_first_rank():
            status = STATUSES.get(code, RunStatus.FAILED)
            run_dir, resume_line = telemetry.run_dir, "the run cannot be resumed, because no checkpoint was saved"
            if run_dir is not None and resume.latest_checkpoint(run_dir).is_file():
                resume_line = f"resume with: {resume.command(run_dir, options)}"
            summary.show(session_of(telemetry).run_end(status, resume_line))
        return code


def _check_task(options: Train) -> None:
    """Refuse a task or a controller of another environment, and an evaluation of a controller."""
    environments, policy = every_environment(), options.ppo.policy
    with_task = [name for name, environment in environments.items() if "task" in environment.train_options]
    if options.task != "synthetic" and options.env not in with_task:
        raise WrongUse(f"--task {options.task} is for --env {' or '.join(with_task)}, got --env {options.env}")
    if policy in POLICIES:
        return
    with_policy = [name for name, environment in environments.items() if policy in environment.controllers]
    if options.env not in with_policy:
        raise WrongUse(f"--policy {policy} is for --env {' or '.join(with_policy)}, got --env {options.env}")
    if options.eval_every > 0:
        raise WrongUse(f"--policy {policy} does not learn, so --eval-every cannot be used with it")


def _check_level_off(options: Train) -> None:
    """Refuse options without effect at level off: only checkpoints are written then, into a run directory that is given."""
    for option, is_given in (("--profile", options.profile), ("--report", options.report)):
        if is_given:
            raise WrongUse(f"{option} writes into the run directory, which level off does not create")
    if options.run_dir is None and options.checkpoint_every not in (0, type(options).checkpoint_every):
        raise WrongUse("--checkpoint-every needs --run-dir with --level off, which does not create a run directory")
    if options.run_dir is not None and holds_run(Path(options.run_dir)):
        raise WrongUse(f"{options.run_dir} {HOLDS_RUN}")


def _make_env(options: Train, num_envs: int, device: torch.device) -> Environment:
    """Return the environments; a registered environment gets the options that it accepts."""
    environment = registered(options.env)
    values: dict[str, Any] = {"task": options.task, "gamma": options.ppo.gamma, "device": device}
    arguments = {name: values[name] for name in environment.train_options} if environment else {}
    return make_env(options.env, num_envs=num_envs, mask_velocity=options.mask_velocity, **arguments)


def _prepared(options: Train) -> tuple[Environment, torch.device, list[Sink]]:
    """Return the objects made from the arguments before anything is created on disk."""
    _check_numbers(options)
    _profile_schedule(options)
    if Level.parse(options.level) is Level.OFF:
        _check_level_off(options)
    _check_task(options)
    _thresholds(options)
    device = _device(own_device(options.device))
    size = Ranks.current().size
    if options.resume:
        resume.check_ranks(options.resume, size)
    if options.num_envs % size:
        raise WrongUse(f"num_envs must be a multiple of the {size} processes, got {options.num_envs}")
    env = _make_env(options, options.num_envs // size, device)
    # Small networks without convolutions get one thread: waiting for a second thread costs more than it saves.
    layout, widths = layout_of(env), (*options.ppo.hidden_sizes, *options.ppo.encoder_sizes, options.ppo.lstm_size)
    if options.threads is not None or (max(widths) < MIN_THREADED_WIDTH and not layout.images):
        torch.set_num_threads(options.threads or 1)
    sinks = [*map(as_sink, options.sink or ("console",)), *map(NotifySink, options.notify)] if is_first_rank() else []
    return env, device, sinks


def _check_numbers(options: Train) -> None:
    """Refuse numbers that are out of range, and empty paths, as left by an unset shell variable."""
    with wrong_use():
        for name, low in (("total_steps", 1), ("eval_every", 0), ("checkpoint_every", 0)):
            require_count(name, getattr(options, name), low=low, high=MAX_STEPS)
        require_count("num_envs", options.num_envs, low=1, high=MAX_ENVS)
        require_count("eval_episodes", options.eval_episodes, low=1, high=MAX_ENVS)
        if options.threads is not None:
            require_count("threads", options.threads, low=1, high=MAX_THREADS)
        for updates in options.profile_schedule:
            require_count("each of profile_schedule", updates, high=MAX_STEPS)
    if options.run_dir is not None and not options.run_dir.strip():
        raise WrongUse(f"run_dir must name a directory, got {options.run_dir!r}")


def _telemetry(sinks: Sequence[SinkLike], options: Train) -> Telemetry:
    if options.resume and is_first_rank():
        resume.print_wait_for_helpers(options.resume)
    return Telemetry(
        sinks,
        run_dir=options.resume or options.run_dir or "auto",
        name=None if options.run_dir else segment(options.env),
        level=options.level,
        budget=options.telemetry_budget,
        close_timeout=options.close_timeout,
        detect=options.detect and _thresholds(options),
        escalation=options.escalation,
        config={**resume.config_of(options), "ranks": Ranks.current().size},
        resume=options.resume is not None,
        report=options.report,
    )


def _thresholds(options: Train) -> Thresholds:
    """Return the bounds of the detectors; raises WrongUse for an unknown bound, and if detectors are off."""
    if options.threshold and not options.detect:
        raise WrongUse(f"--threshold {options.threshold[0]} is for alarms, which --no-detect switches off")
    try:
        return Thresholds.parse(options.threshold)
    except ValueError as error:
        raise WrongUse(str(error)) from error


def _preset_sentence(options: Train) -> str:
    """Return the settings that the preset and the options changed; empty without a preset."""
    if options.preset_name == "none":
        return ""
    plain = asdict(PPOConfig())
    changed = {name: value for name, value in asdict(options.ppo).items() if value != plain[name]}
    settings = " ".join(f"{name}={value}" for name, value in {"num_envs": options.num_envs, **changed}.items())
    return f"preset {options.preset_name} (--preset none for the defaults): {settings}"


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise WrongUse(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error


def _run(trainer: TrainingRun, telemetry: Telemetry, options: Train) -> int:
    try:
        with _stopped_by_signals(trainer) as signals, telemetry, watching_ranks(partial(_give_up, telemetry)):
            if is_first_rank() and isinstance(trainer, PPO):
                _evaluate(trainer, options)
            with _profiled(trainer, telemetry, options):
                run_dir, every = telemetry.run_dir, options.checkpoint_every
                if telemetry.level is Level.OFF and options.run_dir is not None:
                    run_dir = require_path("run_dir", options.run_dir)
                checkpoints = Checkpoints(trainer, run_dir / "checkpoints", every=every) if run_dir and every > 0 else None
                trainer.learn(options.total_steps)
            saved = checkpoints is None or checkpoints.save()
            code, received = DONE, largest_over_ranks(max(signals, default=0))
            if received and trainer.env_steps < options.total_steps:  # after its last step, training is done anyway
                code = TERMINATED if received == signal.SIGTERM else INTERRUPTED
            # Training has ended, so Ctrl-C now ends the wait for backends.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            telemetry.close(STATUSES[code])
    except KeyboardInterrupt:
        return INTERRUPTED
    except RankLostError as lost:
        _report(lost)
        return FAILED
    except Exception:
        sys.stderr.write(masked(traceback.format_exc()))
        return FAILED
    return code if saved else code or FAILED


def _give_up(telemetry: Telemetry, lost: RankLostError) -> None:
    """End the run while the training thread waits for a rank that has ended."""
    _report(lost)
    session_of(telemetry).abandon(lost)


def _report(lost: RankLostError) -> None:
    if is_first_rank():
        sys.stderr.write(f"esper-telemetry: {masked(str(lost))}\n")


@contextmanager
def _profiled(trainer: TrainingRun, telemetry: Telemetry, options: Train) -> Iterator[None]:
    """Attach telemetry, and trace some updates if --profile says so."""
    if not options.profile or telemetry.run_dir is None or not is_first_rank():
        attach(telemetry, trainer)
        yield
        return
    directory, timing = telemetry.run_dir / "profile", _profile_schedule(options)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    handler = tensorboard_trace_handler(str(directory), use_gzip=True)
    with (
        profile(activities=activities, schedule=timing, on_trace_ready=handler, record_shapes=True) as profiler,
        _named_ranges(trainer.hooks, profiler.step, partial(attach, telemetry, trainer)),
    ):
        yield
    traces = sorted(directory.glob("*.pt.trace.json.gz"))
    if not traces:
        print(f"profile: nothing was traced, because the run ended before update {sum(options.profile_schedule)}")
    for trace in traces:
        print(f"profile      {trace}\n             open it in https://ui.perfetto.dev")


def _profile_schedule(options: Train) -> Callable[[int], ProfilerAction]:
    """Return what the profiler does in each update; raises ValueError if a number of updates is negative, or none is traced."""
    wait, warm_up, active = options.profile_schedule
    if min(wait, warm_up) < 0 or active < 1:
        raise ValueError(f"a profile waits 0 or more updates, warms up 0 or more and traces 1 or more, got {wait}, {warm_up} and {active}")
    return schedule(wait=wait, warmup=warm_up, active=active, repeat=1)


@contextmanager
def _named_ranges(hooks: Hooks, step: Callable[[], None], attach: Callable[[], object]) -> Iterator[None]:
    """Name ranges of time in a trace; the hooks that `attach` registers run between these hooks, as a separate range."""
    open_ranges: dict[str, record_function] = {}

    def end(name: str, _: object = None) -> None:
        if name in open_ranges:
            open_ranges.pop(name).__exit__(None, None, None)

    def begin(name: str, _: object = None) -> None:
        end(name)
        open_ranges[name] = record_function(name)
        open_ranges[name].__enter__()

    removers = [
        hooks.on(RolloutEnd, partial(end, "rollout")),
        hooks.on(RolloutEnd, partial(begin, "telemetry")),
        hooks.on(MinibatchEnd, partial(end, "minibatch")),
        hooks.on(UpdateEnd, partial(end, "minibatch")),
        hooks.on(UpdateEnd, partial(end, "update")),
        hooks.on(UpdateEnd, partial(begin, "telemetry")),
    ]
    attach()
    removers += [
        hooks.on(RolloutEnd, partial(end, "telemetry")),
        hooks.on(RolloutEnd, partial(begin, "update")),
        hooks.on(RolloutEnd, partial(begin, "minibatch")),
        hooks.on(MinibatchEnd, partial(begin, "minibatch")),
        hooks.on(UpdateEnd, partial(end, "telemetry")),
        hooks.on(UpdateEnd, lambda _: step()),
        hooks.on(UpdateEnd, partial(begin, "rollout")),
    ]
    begin("rollout")
    try:
        yield
    finally:
        for remove in removers:
            remove()
        for name in reversed([*open_ranges]):
            end(name)


def _evaluate(trainer: PPO, options: Train) -> None:
    """Evaluate whenever training passes a multiple of --eval-every steps; the result joins the record of the next update."""
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
def _stopped_by_signals(trainer: TrainingRun) -> Iterator[list[int]]:
    """End training on SIGTERM and Ctrl-C after the update in progress; yields the list of received signals.

    A second Ctrl-C ends a single process at once. Several ranks receive the signal at different moments, and all must stop after the
    same update.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in received and trainer.ranks.alone:
            raise KeyboardInterrupt
        received.append(number)
        trainer.stop()
        earlier = before[number]
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)  # also call a handler that was installed before

    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
