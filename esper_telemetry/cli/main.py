"""The command line: the arguments of every command, and the dispatch to the module that implements it.

Exit codes: 0 done, 1 the run failed, 2 wrong use (one sentence on stderr, nothing created or changed), 3 the run has what
`diagnose --fail-on` names; 130 interrupted and 143 ended by SIGTERM, after saving a checkpoint from which `train --resume` goes on. Without
arguments it prints the help and exits with 0, as pip, cargo and docker do.

Only the parser of the given command is built, and a command's implementation is imported when it runs: help, `diagnose`, `report` and
`doctor` start without torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from importlib import import_module
from operator import or_
from typing import Annotated, Any, Final, Literal

import tyro

from esper_telemetry import __version__
from esper_telemetry.cli.arguments import PROGRAM, WrongUse, parse_arguments, with_help
from esper_telemetry.core.lazy import collection_paused
from esper_telemetry.core.messages import did_you_mean, one_line
from esper_telemetry.ppo.config import PPOConfig, preset

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130
HELP: Final = ("-h", "--help")


@dataclass(frozen=True)
class Train:
    """Train the bundled PPO with telemetry.

    Example: esper-telemetry train --env CartPole-v1 --total-steps 100000 --sink console --sink tensorboard
    """

    env: str
    """Gymnasium id, module:Id, cue-recall or morphogenesis; required but with --resume."""
    resume: str | None = None
    """Go on with the run in this directory, from its latest checkpoint and with its settings.

    --total-steps and most others may change; sinks are replaced by those given. It asks before it imports the module of an environment
    module:Id, or sends a token to a server, unless --env or --sink names it."""
    task: Literal["synthetic", "digits", "text"] = "synthetic"
    """What the hosts of morphogenesis learn. There --policy may also be heuristic, oracle or random, which learn nothing."""
    mask_velocity: bool = False
    """Hide the velocities of a classic-control task, so that it needs memory: --policy lstm."""
    preset: Literal["auto", "none"] = "auto"
    """Settings tuned for the task, where there are some; none for the plain defaults. Explicit options win."""
    total_steps: int = 100_000
    """Environment steps to train for, over all environments."""
    num_envs: int = 8
    """Environments that step together."""
    run_dir: str | None = None
    """Where the journal and the local backends go; runs/<env>-<time> by default."""
    sink: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """console, tensorboard[:DIR], wandb[:PROJECT][?mode=offline|online&entity=NAME&group=NAME&job_type=NAME],
    mlflow[:URI][?experiment=NAME&parent=RUN&checkpoints=true], prometheus[:FILE|:PORT], or a plugin's.

    Console by default."""
    level: str = "normal"
    """How much is measured: off, minimal, normal or debug."""
    detect: bool = True
    """Raise alarms where the numbers show that training goes wrong; --no-detect does not."""
    threshold: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE: another bound of a rule; or a type of alarm, on or off: grad/noise_dominated=on."""
    escalation: int | None = None
    """Updates at DEBUG that follow a critical alarm, 0 for none; by default each alarm asks for its own number, 2 to 10"""
    telemetry_budget: float = 0.02
    """Share of the wall time that telemetry may take on the training thread; costly metrics are sampled accordingly."""
    close_timeout: float = 60.0
    """Seconds that the end of the run waits at most for backends that still take records; after them a background process goes on."""
    report: bool = False
    """Write RUN_DIR/report.html when the run ends, as the command report does; MLflow and W&B get it as an artifact."""
    profile: bool = False
    """Trace some updates with torch's profiler into RUN_DIR/profile, for Perfetto or TensorBoard."""
    profile_schedule: tuple[int, int, int] = (3, 1, 2)
    """Updates that the profiler waits, warms up and traces."""
    device: str = "cpu"
    """Where the policy trains: cpu, cuda, cuda:1, ..."""
    checkpoint_every: int = 50_000
    """Environment steps between checkpoints in RUN_DIR/checkpoints; 0 for none."""
    eval_every: int = 0
    """Environment steps between evaluations, one episode in each of --eval-episodes environments; 0 for none."""
    eval_episodes: int = 10
    """Episodes per evaluation, with the likeliest actions."""
    threads: int | None = None
    """CPU threads of torch; by default one for networks narrower than 256 without convolutions, where more cost time."""
    ppo: Annotated[PPOConfig, tyro.conf.arg(name="")] = field(default_factory=PPOConfig)
    preset_name: tyro.conf.Suppress[str] = "none"


@dataclass(frozen=True)
class RunScript:
    """Run an unchanged training script with telemetry; `esper-telemetry run --help` says more.

    Example: esper-telemetry run --sink tensorboard ppo.py --env-id CartPole-v1
    """


@dataclass(frozen=True)
class Check:
    """Compare a script's numbers, or those of a run, with the equations of PPO; `esper-telemetry check --help` says more.

    Example: esper-telemetry check --seconds 60 ppo.py --env-id CartPole-v1
    """


@dataclass(frozen=True)
class Replay:
    """Send a run's journal to backends, once or as it grows.

    Example: esper-telemetry replay runs/a --to mlflow
    """

    run_dir: tyro.conf.Positional[str]
    """The run directory."""
    to: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Sink URI, as for `train --sink`; several are served one after the other."""
    follow: bool = False
    """Wait for more until the run ends."""
    missing: bool = False
    """Read the backend first and send what it lacks, whatever it has been sent before."""


@dataclass(frozen=True)
class Doctor:
    """Compare every backend of a run with its journal, number by number, and print what is missing and what repairs it.

    A run whose trainer is gone without ending it is ended as killed.

    Example: esper-telemetry doctor runs/a
    """

    run_dir: tyro.conf.Positional[str]
    """The run directory."""
    sink: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Sink URI, as for train --sink: a server that the run directory names and you trust, or an address with a password."""
    json: bool = False
    """As JSON."""


@dataclass(frozen=True)
class Compress:
    """Pack the journals of runs that are over, to about a fifth; every command reads packed journals.

    Example: esper-telemetry compress runs/a runs/b
    """

    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """The run directories."""


@dataclass(frozen=True)
class Workspace:
    """Write a dashboard of the run for W&B: charts by question, their meaning, alarms, runs; --push saves it as a workspace.

    Example: esper-telemetry workspace runs/a --push
    """

    run_dir: tyro.conf.Positional[str]
    """The run directory; the workspace shows every run of the project."""
    push: bool = False
    """Save it in the project, in place of the one of that name; needs an API key."""
    project: str = ""
    """W&B project; the one that the run was sent to by default."""
    entity: str = ""
    """User or team; that of the API key by default."""
    name: str = "esper_telemetry"
    """What the workspace is called."""
    output: str = ""
    """File for the specification; RUN_DIR/wandb_workspace.json by default."""


@dataclass(frozen=True)
class Metrics:
    """Print the catalogue: every key, what it means, what is normal, and what to try when it is not.

    Example: esper-telemetry metrics policy/kl
    """

    key: tyro.conf.Positional[str] = ""
    """A key, such as grad/actor/rms, the beginning of several, such as policy/ratio, or a part of it, such as kl; everything by default."""
    json: bool = False
    """As JSON, one object per metric."""


@dataclass(frozen=True)
class Diagnose:
    """Print what goes wrong in a run, since when and what to try, from its journal; the run may still be under way.

    Example: esper-telemetry diagnose runs/a --threshold kl_spike_high=0.5
    """

    run_dir: tyro.conf.Positional[str] = ""
    """The run directory; or --from."""
    source: Annotated[str, tyro.conf.arg(name="from", metavar="LOGS")] = ""
    """Logs of another trainer: tensorboard:DIR, csv:FILE, wandb:PATH (a folder, or entity/project/run), mlflow:URI?run=ID, or
    log:FILE (JSON lines, trainer_state.json, or what TRL, verl, OpenRLHF and NeMo-RL print).

    Those of Stable-Baselines3, CleanRL, PufferLib, RSL-RL, RLlib, skrl, Sample Factory, rl_games, TorchRL, TRL, verl, OpenRLHF and
    NeMo-RL are understood."""
    json: bool = False
    """As JSON: the outcome, incidents with their alarms, task events, and questions that could not be answered."""
    all: bool = False
    """List the questions that could not be answered, and what supplies the input of each."""
    threshold: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE: another bound of a rule than the run had; or a type of alarm, on or off: grad/noise_dominated=on."""
    fail_on: Literal["warn", "critical", "flat"] | None = None
    """Exit with 3 if the run failed or has an alarm of this level or a higher one; warn also if it is flat or declines. flat asks for
    the outcome alone: failed, flat or declining"""


@dataclass(frozen=True)
class Report:
    """Write a run as one HTML file that needs no network: outcome, incidents, charts with healthy ranges; or as Markdown for a CI job.

    Several runs go into one file, with a comparison. A run may still be under way.

    Example: esper-telemetry report runs/a -o a.html
    """

    run_dirs: tyro.conf.Positional[tuple[str, ...]] = ()
    """The run directories; or --from."""
    source: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="from", metavar="LOGS")] = ()
    """Logs of another trainer, as for diagnose (repeatable)."""
    output: Annotated[str, tyro.conf.arg(aliases=("-o",), metavar="FILE")] = ""
    """File to write; RUN_DIR/report.html by default, report.html here for several runs and for logs; Markdown goes to the terminal."""
    format: Literal["html", "markdown"] = "html"
    """html, or markdown: the verdict alone."""


@dataclass(frozen=True)
class Watch:
    """Show runs in the terminal as they go on: what is wrong, metrics by question with healthy ranges, environments. ? shows the keys.

    Only files are read, so it works beside a training, over SSH and in tmux. Several runs are laid over each other.

    Example: esper-telemetry watch runs/a
    """

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run directories, live or over; or logs of another trainer, as for diagnose --from."""
    wait: bool = False
    """Wait for run directories that do not exist yet."""


@dataclass(frozen=True)
class Compare:
    """Compare runs: groups of seeds by permutation tests, and runs of one seed record by record.

    Example: esper-telemetry compare runs/slow-1 runs/slow-2 runs/fast-1 runs/fast-2 -o comparison.html
    """

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run directories, or folders of them; those of one configuration, whatever the seed, are a group. The first run's group is
    what the others are compared with."""
    output: Annotated[str, tyro.conf.arg(aliases=("-o",))] = ""
    """Also write an HTML page to this file."""
    json: bool = False
    """As JSON, with every metric that differs."""


COMMANDS: Final[dict[str, type]] = {
    "train": Train,
    "run": RunScript,
    "check": Check,
    "replay": Replay,
    "doctor": Doctor,
    "compress": Compress,
    "diagnose": Diagnose,
    "watch": Watch,
    "report": Report,
    "compare": Compare,
    "workspace": Workspace,
    "metrics": Metrics,
}
MODULES: Final = {
    **dict.fromkeys(("replay", "doctor", "compress", "workspace"), "stored_runs"),
    **dict.fromkeys(("watch", "report", "compare"), "show"),
}
"""Modules of the commands whose module has another name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["run"]:
        from esper_telemetry.cli.run import main as run_script

        run_script(words[1:])
    if words[:1] == ["check"]:
        from esper_telemetry.cli.check import main as check

        check(words[1:])
    if words[:1] == ["--version"]:
        print(f"{PROGRAM} {__version__}")
        raise SystemExit(0)
    try:
        raise SystemExit(run(words))
    except WrongUse as mistake:
        if os.environ.get("RANK", "0") == "0":  # one of several processes prints what all of them found
            sys.stderr.write(f"esper-telemetry: {one_line(str(mistake))}\n")
        raise SystemExit(WRONG_USE) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's last flush is quiet
        raise SystemExit(FAILED) from None


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code; raises WrongUse before anything is created."""
    if list(arguments[:1]) == ["check"]:
        from esper_telemetry.cli import check

        return check.check(check.parse(arguments[1:]))
    command = parse(arguments)
    name = type(command).__name__.lower()
    with collection_paused():
        function: Callable[[Any], int] = getattr(import_module(f"esper_telemetry.cli.{MODULES.get(name, name)}"), name)
    return function(command)


def parse(arguments: Sequence[str]) -> Any:
    """Return the command's arguments, with the preset's settings unless an option replaces them; raises WrongUse for wrong arguments."""
    name, *rest = arguments or HELP
    if name in HELP:
        forms = (Annotated[form, tyro.conf.subcommand(command)] for command, form in COMMANDS.items())
        parse_arguments([name], reduce(or_, forms))
    if name not in COMMANDS:
        kind, names = ("option", ("--help", "--version")) if name.startswith("-") else ("command", tuple(COMMANDS))
        raise WrongUse(with_help(f"there is no {kind} {name!r}{did_you_mean(name, names)}", PROGRAM))
    run_dir = _resumed_run(arguments)
    if run_dir is not None:
        from esper_telemetry.cli import resume

        saved = resume.saved_options(Train, run_dir)
        options: Train = parse_arguments(rest, Train, default=saved, program=f"{PROGRAM} train")
        if not any(word.partition("=")[0] == "--env" for word in rest):
            resume.check_saved_env(run_dir, saved.env)
        return resume.checked(replace(options, sink=options.sink or resume.saved_sinks(run_dir)), saved)
    program = f"{PROGRAM} {name}"
    command = parse_arguments(rest, COMMANDS[name], program=program)
    if not isinstance(command, Train) or command.preset == "none":
        return command
    chosen = preset(command.env, command.ppo.policy, mask_velocity=command.mask_velocity)
    # options that may be repeated add to their defaults, so the second parsing begins without them
    tuned = replace(command, sink=(), threshold=(), num_envs=chosen.num_envs, ppo=chosen.config())
    explicit: Train = parse_arguments(rest, Train, default=tuned, program=program)
    return replace(explicit, preset_name=chosen.name)


def _resumed_run(arguments: Sequence[str]) -> str | None:
    """Return the directory that `train --resume` names, whose settings are the defaults of the other options."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--resume", nargs="?")
    if list(arguments[:1]) != ["train"] or {"-h", "--help"} & set(arguments):
        return None
    resume: str | None = finder.parse_known_args(list(arguments[1:]))[0].resume
    return resume
