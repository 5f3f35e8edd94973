"""The command line `python -m esper_telemetry.lab.faults list | score | demo`.

Exit codes: 0 done, 1 a run could not be trained, 2 wrong use (one sentence on stderr, nothing created), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is imported: its threads do not help on small networks

from esper_telemetry.cli.arguments import WrongUse, parse_arguments

PROGRAM = "python -m esper_telemetry.lab.faults"
WRONG_USE, INTERRUPTED = 2, 130


@dataclass(frozen=True)
class List:
    """List every fault, its dose, and the alarms that name it.

    Example: python -m esper_telemetry.lab.faults list
    """

    json: bool = False
    """Print JSON, one object per fault."""


@dataclass(frozen=True)
class Score:
    """Break many runs on purpose, and score the alarms: how many faults they find, how soon, and how many alarms are false.

    Example: python -m esper_telemetry.lab.faults score --faults lr_x100 h0_zero --envs cue-recall cartpole --seeds 1 2
    """

    trainer: Literal["esper", "sb3"] = "esper"
    """Trainer to break: the bundled one, or Stable-Baselines3 under TelemetryCallback."""
    faults: tuple[str, ...] = ()
    """Names, or name=dose; all by default."""
    envs: tuple[str, ...] = ()
    """Environments: cue-recall, cartpole, cartpole-lstm, acrobot, pendulum or any Gymnasium id; these five by default. For sb3: cartpole,
    pendulum, cartpole-lstm, masked-arms, two-choices."""
    seeds: tuple[int, ...] = (3,)
    """Seeds of the runs; thresholds were set on runs of 1 and 2."""
    doses: tuple[float, ...] | None = None
    """Doses of the faults that are named; without values, a table of doses for lr, forget and reward."""
    workers: int = 2
    """Processes that train in parallel, with one thread each."""
    healthy: bool = True
    """Also train healthy runs."""
    curve: bool = True
    """Also score with all thresholds multiplied by 1/4 to 4."""
    split: bool = False
    """Report the seeds and environments on which thresholds were set separately from the others."""
    keep: str | None = None
    """Directory for the journals; runs that it already holds are not trained again."""
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Directory whose journals are scored, without training."""
    level: str = "normal"
    """Telemetry level: minimal, normal or debug."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Demo:
    """Train with telemetry, and break training half-way.

    Example: python -m esper_telemetry.lab.faults demo --fault lr_x100 --sink console --sink tensorboard
    """

    fault: str = "lr_x100"
    """Name, or name=dose."""
    env: str = "CartPole-v1"
    """Environment, as for train."""
    policy: str = "lstm"
    """mlp or lstm."""
    mask_velocity: bool = True
    """Hide velocities."""
    total_steps: int = 80_000
    """Environment steps to train for."""
    seed: int = 1
    """Seed of the run."""
    run_dir: str | None = None
    """Directory of the journal and the local backends; runs/<fault>-<time> by default."""
    sink: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Sinks, as for train; console by default."""


Command = (
    Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Score, tyro.conf.subcommand("score")]
    | Annotated[Demo, tyro.conf.subcommand("demo")]
)


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code; raise WrongUse before anything is created."""
    command: List | Score | Demo = parse_arguments(arguments, Command, program=PROGRAM)
    from esper_telemetry.lab.faults import commands

    table: dict[type, Callable[[Any], int]] = {List: commands.show_faults, Score: commands.score, Demo: commands.demo}
    return table[type(command)](command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    try:
        raise SystemExit(run(sys.argv[1:] if arguments is None else arguments))
    except WrongUse as mistake:
        sys.stderr.write(f"faults: {mistake}\n")
        raise SystemExit(WRONG_USE) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
