"""The command line: the arguments of every command, and the dispatch to the module that implements it.

Exit codes: 0 done; 1 the run failed; 2 wrong use (one sentence on stderr, nothing created or changed); 3 the run meets the condition of
`diagnose --fail-on`; 130 interrupted and 143 ended by SIGTERM, after saving a checkpoint for `train --resume`. Without
arguments it prints the help and exits with 0, as pip, cargo and docker do.

Only the parser of the given command is built, and a command's implementation is imported when it runs, so that help, `diagnose`, `report`
and `doctor` start without torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from importlib import import_module
from io import TextIOWrapper
from operator import or_
from typing import Annotated, Any, Final, Literal

import tyro

from esper_telemetry import __version__
from esper_telemetry.cli.arguments import PROGRAM, WrongUse, is_first_rank, parse_arguments, with_help
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
    """Gymnasium id, module:Id, cue-recall or morphogenesis; required unless --resume is given."""
    resume: str | None = None
    """Continue the run in this directory, from its latest checkpoint and with its settings.

    --total-steps and most other options may change; sinks that are given replace the earlier ones. It asks before it imports the module of
    an environment module:Id, or sends a token to a server, unless --env or --sink names it."""
    task: Literal["synthetic", "digits", "text"] = "synthetic"
    """What the hosts of morphogenesis learn. With morphogenesis, --policy may also be heuristic, oracle or random, which do not learn."""
    mask_velocity: bool = False
    """Hide the velocities of a classic-control task, so that it needs memory: --policy lstm."""
    preset: Literal["auto", "none"] = "auto"
    """Settings tuned for the task, if there are any; none for the plain defaults. Explicit options override them."""
    total_steps: int = 100_000
    """Environment steps to train for, over all environments."""
    num_envs: int = 8
    """Number of environments that step together."""
    run_dir: str | None = None
    """Directory for the journal and the local backends; runs/<env>-<time> by default."""
    sink: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """console, tensorboard[:DIR], wandb[:PROJECT][?mode=offline|online&entity=NAME&group=NAME&job_type=NAME],
    mlflow[:URI][?experiment=NAME&parent=RUN&checkpoints=true], prometheus[:FILE|:PORT],
    trackio[:PROJECT], or a plugin's.

    Console by default."""
    notify: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Address of Apprise, such as slack://TOKEN_A/TOKEN_B/TOKEN_C, for messages about critical incidents and the outcome (repeatable).

    It is not stored: give it again with --resume."""
    level: str = "normal"
    """How much is measured: off, minimal, normal or debug."""
    detect: bool = True
    """Raise alarms if the numbers show that training goes wrong; --no-detect switches them off."""
    threshold: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE: another bound of a rule; or an alarm type, on or off: grad/noise_dominated=on."""
    escalation: int | None = None
    """Number of updates at DEBUG after a critical alarm, 0 for none; by default each alarm asks for 2 to 10"""
    telemetry_budget: float = 0.02
    """Fraction of the wall time that telemetry may take on the training thread; costly metrics are sampled accordingly."""
    close_timeout: float = 60.0
    """Maximum number of seconds that the end of the run waits for backends that still take records; then a background process continues."""
    report: bool = False
    """Write RUN_DIR/report.html when the run ends, as the command report does; MLflow and W&B store it as an artifact."""
    profile: bool = False
    """Trace some updates with torch's profiler into RUN_DIR/profile, for Perfetto or TensorBoard."""
    profile_schedule: tuple[int, int, int] = (3, 1, 2)
    """Number of updates that the profiler waits, warms up and traces."""
    device: str = "cpu"
    """Device that trains the policy: cpu, cuda, cuda:1, ..."""
    checkpoint_every: int = 50_000
    """Environment steps between checkpoints in RUN_DIR/checkpoints; 0 for none. With --level off, --run-dir must be given."""
    eval_every: int = 0
    """Environment steps between evaluations, one episode in each of --eval-episodes environments; 0 for none."""
    eval_episodes: int = 10
    """Episodes per evaluation, with the most likely actions."""
    threads: int | None = None
    """CPU threads of torch; by default 1 for networks narrower than 256 without convolutions, because more threads slow these down."""
    ppo: Annotated[PPOConfig, tyro.conf.arg(name="")] = field(default_factory=PPOConfig)
    preset_name: tyro.conf.Suppress[str] = "none"


@dataclass(frozen=True)
class RunScript:
    """Run an unchanged training script with telemetry; see `esper-telemetry run --help`.

    Example: esper-telemetry run --sink tensorboard ppo.py --env-id CartPole-v1
    """


@dataclass(frozen=True)
class Check:
    """Compare the numbers of a script or a run with the equations of PPO; see `esper-telemetry check --help`.

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
    """Sink URI, as for `train --sink`; several sinks are served one after the other."""
    follow: bool = False
    """Wait for further records until the run ends."""
    missing: bool = False
    """Read the backend first and send what it lacks, even if it was sent before."""


@dataclass(frozen=True)
class Doctor:
    """Compare every backend of a run with its journal, number by number, and print what is missing and how to repair it.

    A run whose trainer is gone is ended as killed.

    Example: esper-telemetry doctor runs/a
    """

    run_dir: tyro.conf.Positional[str]
    """The run directory."""
    sink: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Sink URI, as for train --sink: a server that the run directory names and you trust, or an address with a password."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Compress:
    """Compress the journals of finished runs to about a fifth of their size; every command reads compressed journals.

    Example: esper-telemetry compress runs/a runs/b
    """

    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """The run directories."""


@dataclass(frozen=True)
class Workspace:
    """Write a W&B dashboard of the run: charts by question, their meaning, alarms, runs; --push saves it as a workspace.

    Example: esper-telemetry workspace runs/a --push
    """

    run_dir: tyro.conf.Positional[str]
    """The run directory; the workspace shows every run of the project."""
    push: bool = False
    """Save it in the project, replacing the workspace with that name; needs an API key."""
    project: str = ""
    """W&B project; by default the project that the run was sent to."""
    entity: str = ""
    """User or team; the owner of the API key by default."""
    name: str = "esper_telemetry"
    """Name of the workspace."""
    output: str | None = None
    """File for the specification; RUN_DIR/wandb_workspace.json by default."""


@dataclass(frozen=True)
class Metrics:
    """Print the catalogue: every key, its meaning, its normal range, and what to try outside that range.

    Example: esper-telemetry metrics policy/kl
    """

    key: tyro.conf.Positional[str] = ""
    """A key, such as grad/actor/rms, a prefix, such as policy/ratio, or a part of a key, such as kl; all metrics by default."""
    json: bool = False
    """Print JSON, one object per metric."""


@dataclass(frozen=True)
class Diagnose:
    """Print what goes wrong in a run, since when and what to try, from its journal; the run may still be under way.

    Example: esper-telemetry diagnose runs/a --threshold kl_spike_high=0.5
    """

    run_dir: tyro.conf.Positional[str] = ""
    """The run directory; or --from."""
    source: Annotated[str, tyro.conf.arg(name="from", metavar="LOGS")] = ""
    """Logs of another trainer: a file or a folder, or tensorboard:DIR, csv:FILE, log:FILE, wandb:PATH (a folder, or
    entity/project/run), mlflow:URI?run=ID.

    The trainers in docs/old_logs.md are supported; --map reads any other logs."""
    map: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=COLUMN")] = ()
    """The column of the logs that holds a metric, such as episode/return_mean=reward; env_step is the position (repeatable)."""
    run: int | None = None
    """Number of the run if the logs hold several; the newest by default."""
    json: bool = False
    """Print JSON of at most 8 kB: the outcome, incidents with evidence and advice, equations, and the next command
    (docs/diagnose.schema.json)."""
    all: bool = False
    """List the questions that could not be answered, and how to provide their input; with --json, everything."""
    again: bool = False
    """Judge all records again, instead of the verdict in the journal."""
    threshold: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE: a bound of a rule, replacing the run's own; or an alarm type, on or off: grad/noise_dominated=on. Implies --again."""
    fail_on: Literal["warn", "critical", "flat"] | None = None
    """Exit with 3 if the run failed or has an alarm of this level or above; warn also includes flat and declining runs. flat considers
    only the outcome: failed, flat or declining"""


@dataclass(frozen=True)
class Report:
    """Write a run as one HTML file that works offline: outcome, incidents, charts with healthy ranges; or as Markdown for a CI job.

    Several runs go into one file, with a comparison. A run may still be under way.

    Example: esper-telemetry report runs/a -o a.html
    """

    run_dirs: tyro.conf.Positional[tuple[str, ...]] = ()
    """The run directories; or --from."""
    source: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="from", metavar="LOGS")] = ()
    """Logs of another trainer, as for diagnose (repeatable)."""
    output: Annotated[str | None, tyro.conf.arg(aliases=("-o",), metavar="FILE")] = None
    """Output file; RUN_DIR/report.html by default, or ./report.html for several runs and for logs. Markdown is printed by default."""
    format: Literal["html", "markdown"] = "html"
    """html, or markdown for only the verdict."""


@dataclass(frozen=True)
class Watch:
    """Show runs live in the terminal: what is wrong, metrics by question with healthy ranges, environments. ? shows the keys.

    It only reads files, so it works during training, over SSH and in tmux. Several runs are drawn in the same charts.

    Example: esper-telemetry watch runs/a
    """

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run directories, live or finished; or logs of another trainer, as for diagnose --from."""
    wait: bool = False
    """Wait for run directories that do not exist yet."""


@dataclass(frozen=True)
class Compare:
    """Compare runs: groups of seeds by permutation tests, and runs of one seed record by record.

    Example: esper-telemetry compare runs/slow-1 runs/slow-2 runs/fast-1 runs/fast-2 -o comparison.html
    """

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run directories, or folders of them. Runs with the same configuration, apart from the seed, form a group. The first run's group is
    the baseline."""
    ignore: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY")] = ()
    """A setting that does not count as configuration (repeatable)."""
    by: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY")] = ()
    """Only this setting counts as configuration; also a name, such as exp_name (repeatable)."""
    output: Annotated[str | None, tyro.conf.arg(aliases=("-o",))] = None
    """Also write an HTML page to this file."""
    json: bool = False
    """Print JSON, with every metric that differs."""


@dataclass(frozen=True)
class Mcp:
    """Let agents read runs: a server of the Model Context Protocol on stdin and stdout, with tools that only read.

    Tools: list_runs, diagnose, check, compare, metric_history, explain_metric, explain_alarm. docs/agents.md sets up clients.

    Example: esper-telemetry mcp --root runs
    """

    root: str = "runs"
    """Directory of runs; paths that lead out of it are refused."""


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
    "mcp": Mcp,
}
MODULES: Final = {
    **dict.fromkeys(("replay", "doctor", "compress", "workspace"), "stored_runs"),
    **dict.fromkeys(("watch", "report", "compare", "metrics"), "show"),
}
"""Modules of commands that are not named after the command."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, TextIOWrapper) and words[:1] != ["run"]:
        sys.stdout.reconfigure(errors="replace")  # a pipe of Windows is cp1252
    if words[:1] == ["run"]:
        from esper_telemetry.cli.run import main as run_script

        run_script(words[1:])
    if words[:1] == ["--version"]:
        print(f"{PROGRAM} {__version__}")
        raise SystemExit(0)
    try:
        raise SystemExit(run(words))
    except WrongUse as mistake:
        if is_first_rank():  # one of several processes prints the mistake for all
            sys.stderr.write(f"esper-telemetry: {one_line(str(mistake))}\n")
        raise SystemExit(WRONG_USE) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter's last flush must not fail
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
    """Return the command's arguments, with the preset's settings unless an option overrides them; raises WrongUse for wrong arguments."""
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
    # Repeatable options append to their defaults, so the second parsing begins with empty ones.
    tuned = replace(command, sink=(), notify=(), threshold=(), num_envs=chosen.num_envs, ppo=chosen.config())
    explicit: Train = parse_arguments(rest, Train, default=tuned, program=program)
    return replace(explicit, preset_name=chosen.name)


def _resumed_run(arguments: Sequence[str]) -> str | None:
    """Return the directory given to `train --resume`; its settings are the defaults of the other options."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--resume", nargs="?")
    if list(arguments[:1]) != ["train"] or {"-h", "--help"} & set(arguments):
        return None
    resume: str | None = finder.parse_known_args(list(arguments[1:]))[0].resume
    return resume
