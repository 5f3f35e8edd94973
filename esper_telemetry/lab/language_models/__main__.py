"""Score the alarms on the fault bed of language models.

python -m esper_telemetry.lab.language_models --seeds 5 --steps 60

Prints a table in Markdown: per fault the runs in which an alarm that names it was raised, and in which it was the first cause; for healthy
runs those with any alarm.
"""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
import tyro
from transformers import PrinterCallback

from esper_telemetry.adapters.trl import TelemetryCallback
from esper_telemetry.core.record import AlarmEvent
from esper_telemetry.journal import read_run
from esper_telemetry.lab.language_models.faults import FAULTS, HEALTHY, Fault
from esper_telemetry.lab.language_models.task import build_trainer, save_model
from esper_telemetry.telemetry import Telemetry


class RunVerdict(NamedTuple):
    """Outcome of one run: the types of all alarms raised, and the type that the first incident gives as its cause."""

    alarms: tuple[str, ...]
    cause: str
    update: int


def run_fault(fault: Fault, *, seed: int, steps: int, directory: Path) -> RunVerdict:
    """Train with a fault and return what the alarms say."""
    model = save_model(directory / f"{fault.name}-{seed}", seed=seed)
    run_dir = model / "run"
    with Telemetry([], run_dir=run_dir) as telemetry:
        trainer = build_trainer(
            model,
            seed=seed,
            steps=steps,
            rewards=fault.reward,
            callbacks=[TelemetryCallback(telemetry)],
            trainer=fault.trainer,
            **fault.settings,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    raised = [alarm for alarm in read_run(run_dir).alarms if alarm.event is AlarmEvent.RAISE]
    first = min(raised, key=lambda alarm: alarm.axes.update, default=None)
    if first is None:
        return RunVerdict((), "", 0)
    incident = [alarm for alarm in raised if alarm.incident == first.incident]
    cause = incident[-1].cause or first.type
    return RunVerdict(tuple(sorted({alarm.type for alarm in raised})), str(cause).partition(":")[0], first.axes.update)


@dataclass(frozen=True, slots=True)
class Options:
    """Score the alarms on the fault bed of language models.

    Attributes:
        seeds: runs of each fault, and of healthy training.
        steps: optimizer steps of each run; two make an update.
        only: names of faults, or `healthy`; all where none is given.
        verbose: print each run's alarms.
    """

    seeds: int = 5
    steps: int = 60
    only: tuple[str, ...] = ()
    verbose: bool = False


def score(options: Options) -> str:
    """Run the bed and return its table."""
    lines = ["| run | named | first cause | update | other alarms |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as directory:
        for fault in (HEALTHY, *FAULTS):
            if options.only and fault.name not in options.only:
                continue
            runs = [
                run_fault(fault, seed=seed, steps=options.steps, directory=Path(directory))
                for seed in range(1, options.seeds + 1)
            ]
            for run in runs if options.verbose else ():
                print(fault.name, run)
            named = sum(bool(set(run.alarms) & set(fault.named_by)) for run in runs)
            causes = sum(run.cause in fault.named_by for run in runs)
            others = sorted({alarm for run in runs for alarm in run.alarms} - set(fault.named_by))
            updates = sorted(run.update for run in runs if run.cause)
            median = str(updates[len(updates) // 2]) if updates else ""
            if fault is HEALTHY:
                alarmed = sum(bool(run.alarms) for run in runs)
                lines.append(
                    f"| healthy | {alarmed} of {len(runs)} with any alarm | | {median} | {', '.join(others)} |"
                )
            else:
                lines.append(
                    f"| {fault.name} | {named} of {len(runs)} | {causes} of {len(runs)} | {median} | {', '.join(others)} |"
                )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(score(tyro.cli(Options, args=arguments)))


if __name__ == "__main__":
    main()
