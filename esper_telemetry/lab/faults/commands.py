"""What `list`, `score` and `demo` do; each returns the exit code.

Faults and scores as tables.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from esper_telemetry.adapters.attach import attach
from esper_telemetry.cli.arguments import wrong_use
from esper_telemetry.core.record import Level
from esper_telemetry.lab.faults.catalogue import FAULTS, find, schedule
from esper_telemetry.lab.faults.judging import Opinions, all_opinions, kept_runs
from esper_telemetry.lab.faults.runs import BEDS, TrainingCourse, bed, cost, courses, processes, train_all
from esper_telemetry.lab.faults.score import FACTORS, halves, result
from esper_telemetry.ppo.config import preset
from esper_telemetry.ppo.environments.registry import make_env
from esper_telemetry.ppo.trainer import PPO
from esper_telemetry.sinks.console import is_live, make_console
from esper_telemetry.sinks.registry import as_sink
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.views.outcome import Summary

if TYPE_CHECKING:
    from esper_telemetry.lab.faults.__main__ import Demo, List, Score

Result = Mapping[str, Any]


def fault_entries() -> list[dict[str, Any]]:
    """All faults as plain data."""
    return [
        {
            "name": fault.name,
            "family": fault.family or fault.name,
            "what": fault.what,
            "dose": fault.dose,
            "doses": list(fault.doses),
            "needs": [(need.__doc__ or "").rstrip(".") for need in fault.needs],
            "alarms": list(fault.accepts),
            "bound": fault.bound,
        }
        for fault in FAULTS
    ]


def fault_table() -> Table:
    """All faults."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("fault", "what it does", "dose", "needs", "alarms that name it", "within"):
        table.add_column(name, overflow="fold", no_wrap=name in ("fault", "dose"))
    for entry in fault_entries():
        low, high = entry["doses"]
        dose = f"{entry['dose']:g} ({low:g} to {high:g})" if low < high else ""
        table.add_row(
            entry["name"],
            entry["what"],
            dose,
            "; ".join(entry["needs"]),
            ", ".join(entry["alarms"]),
            str(entry["bound"]),
        )
    return table


def result_tables(result: Result, title: str) -> list[Table]:
    """A score: by fault, then as a whole beside the baselines."""
    tables = [judges_table(result, title)]
    if result["per_fault"]:
        tables.insert(0, per_fault_table(result))
    return tables


def per_fault_table(result: Result) -> Table:
    """Recall, lag and causes by fault."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "fault",
        "runs",
        "in time",
        "in 20",
        "any",
        "lag",
        "lead",
        "cause",
        "alarms that named it",
        "put down to",
    ):
        table.add_column(name, overflow="fold", justify="right" if name in NUMERIC else "left")
    for name, row in result["per_fault"].items():
        table.add_row(
            name,
            str(row["runs"]),
            *(percent(row[key]) for key in ("strict_recall", "recall", "lenient_recall")),
            number(row["median_lag"]),
            number(row["median_lead"]),
            percent(row["root_cause_accuracy"]),
            listed(row["hits"]),
            listed(row["causes"]),
        )
    return table


NUMERIC = ("runs", "in time", "in 20", "any", "lag", "lead", "cause")


def judges_table(result: Result, title: str) -> Table:
    """The detectors beside the baselines."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    heads = ("", "runs", "in time", "in 20", "any", "lag", "cause", "false", "healthy updates", "false per 100", "area")
    for name in heads:
        table.add_column(name, justify="left" if not name else "right")
    for name, row in {"detectors": result, **result["baselines"]}.items():
        table.add_row(
            name,
            str(row["runs"]),
            *(percent(row[key]) for key in ("strict_recall", "recall", "lenient_recall")),
            number(row["median_lag"]),
            percent(row["root_cause_accuracy"]),
            str(row["false_alarms"]),
            str(row["healthy_updates"]),
            number(row["false_alarms_per_100"]),
            number(row.get("partial_auc")),
        )
    table.caption = caption(result)
    table.caption_justify = "left"
    return table


def caption(result: Result) -> str:
    """What the intervals are, and which alarms were false."""
    names = {"strict_recall": "in time", "false_alarms_per_100": "false per 100"}
    parts = [f"{names[key]} {low:.3f} to {high:.3f} (95 %)" for key, (low, high) in result["intervals"].items()]
    if result["false_by_type"]:
        parts.append(f"false: {listed(result['false_by_type'])}")
    return "; ".join(parts)


def percent(value: float | None) -> str:
    """A share."""
    return "" if value is None else f"{100 * value:.0f} %"


def number(value: float | None) -> str:
    """A number with as many digits as matter."""
    return "" if value is None else f"{value:.3g}"


def listed(counts: Mapping[str, int]) -> str:
    """Types and how often."""
    return ", ".join(f"{kind or '?'} {count}" for kind, count in counts.items())


def fault_markdown() -> str:
    """All faults as a table for the documentation."""
    rows = ["| fault | what it does | dose | needs | alarms that name it | within |", "|---|---|---|---|---|---|"]
    for entry in fault_entries():
        low, high = entry["doses"]
        dose = f"{entry['dose']:g} ({low:g} to {high:g}, as `{entry['family']}`)" if low < high else ""
        alarms = ", ".join(f"`{alarm}`" for alarm in entry["alarms"])
        needs = "; ".join(entry["needs"])
        rows.append(f"| `{entry['name']}` | {entry['what']} | {dose} | {needs} | {alarms} | {entry['bound']} |")
    return "\n".join(rows) + "\n"


DOSES = {"lr": (3, 10, 30, 100), "forget": (-2, -4, -10), "reward": (10, 100, 1e4)}
"""Faults whose dose matters, from mild to plain."""

WIDTH = 150


def show_faults(options: List) -> int:
    """Prints the faults."""
    if options.json:
        print(json.dumps(fault_entries(), indent=1))
    else:
        make_console(piped_width=WIDTH).print(fault_table())
    return 0


def score(options: Score) -> int:
    """Trains, judges and prints; every argument is checked before anything is created."""
    with wrong_use():
        work = planned(options)
        directory = None if options.from_ is None else kept_runs(Path(options.from_))
    errors = make_console(stderr=True)
    with processes(options.workers) as pool, progress_bar(errors) as bar:
        if directory is None:
            with kept_in(options.keep) as keep:
                done = trained(work, keep, pool, bar, options.level)
                found = judged([keep / course.name for course in done if not course.missing], pool, bar, options)
        else:
            done, found = [], judged(directory, pool, bar, options)
    show(options, done, found)
    return 0


def planned(options: Score) -> list[TrainingCourse]:
    """The runs that were asked for; raises ValueError for what does not exist or makes no sense."""
    Level.parse(options.level)
    if options.workers < 1:
        raise ValueError(f"workers must be at least 1, got {options.workers}")
    if options.from_ is not None and options.keep is not None:
        raise ValueError("--from scores what is kept and --keep keeps what is trained: give one of them")
    if not options.seeds or min(options.seeds) < 0:
        raise ValueError(f"seeds must be 0 or more, and at least one, got {options.seeds}")
    if options.trainer == "sb3":
        return planned_for_sb3(options)
    for env in options.envs:
        bed(env)
    return courses(dosed(options), options.envs or tuple(BEDS), options.seeds, healthy=options.healthy)


def planned_for_sb3(options: Score) -> list[TrainingCourse]:
    """The same for Stable-Baselines3; raises ValueError where it is not installed, too."""
    try:
        from esper_telemetry.lab.faults.sb3 import models as sb3_beds
        from esper_telemetry.lab.faults.sb3 import runs as sb3_courses
    except ModuleNotFoundError as missing:
        raise ValueError(f"--trainer sb3 needs {missing.name}: pip install 'esper-telemetry[sb3]'") from missing
    for env in options.envs:
        sb3_beds.bed(env)
    faults = sb3_courses.faults_among(dosed(options), named=bool(options.faults))
    return sb3_courses.courses(faults, options.envs or tuple(sb3_beds.BEDS), options.seeds, healthy=options.healthy)


def dosed(options: Score) -> list[tuple[str, float]]:
    """Faults and their doses."""
    if options.doses is not None and not options.doses:
        names = options.faults or tuple(DOSES)
        wrong = [name for name in names if name not in DOSES]
        if wrong:
            raise ValueError(f"--doses without values knows {', '.join(DOSES)}, got {wrong[0]}")
        return [one(name, dose) for name in names for dose in DOSES[name]]
    named = [split_dose(text) for text in options.faults] or [(fault.name, None) for fault in FAULTS]
    if options.doses is None:
        return [one(name, dose) for name, dose in named]
    if not options.faults:
        raise ValueError("--doses with values needs --faults: doses of one fault mean nothing to another")
    return [one(name, dose) for name, _ in named for dose in options.doses]


def split_dose(text: str) -> tuple[str, float | None]:
    """`name` or `name=dose`."""
    name, sign, number = text.partition("=")
    try:
        return name, float(number) if sign else None
    except ValueError:
        raise ValueError(f"a fault is a name or name=dose, got {text!r}") from None


def one(name: str, dose: float | None) -> tuple[str, float]:
    """A fault by its own name, with its dose; raises ValueError for one that does not exist."""
    fault = find(name, dose)
    return fault.name, fault.checked(dose)


@contextmanager
def kept_in(keep: str | None) -> Iterator[Path]:
    """The directory for journals: that one, or one that is removed in the end."""
    if keep is not None:
        Path(keep).mkdir(parents=True, exist_ok=True)
        yield Path(keep)
        return
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        yield Path(directory)


def progress_bar(console: Console) -> Progress:
    """A bar on the terminal; nothing where there is none."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not is_live(console))


def trained(
    work: Sequence[TrainingCourse], keep: Path, pool: Executor, bar: Progress, level: str
) -> list[TrainingCourse]:
    """All runs, when they are there."""
    task = bar.add_task("training, updates", total=sum(map(cost, work)))
    done = []
    for course in trainer_of(work)(work, keep, pool, level):
        bar.advance(task, cost(course))
        done.append(course)
    return done


def trainer_of(work: Sequence[TrainingCourse]) -> Callable[..., Iterator[TrainingCourse]]:
    """What trains these runs: all of one trainer."""
    if not work or not work[0].env.startswith("sb3-"):
        return train_all
    from esper_telemetry.lab.faults.sb3.runs import train_all as train_sb3

    return train_sb3


def judged(run_dirs: Sequence[Path], pool: Executor, bar: Progress, options: Score) -> list[Opinions]:
    """What is said of all runs."""
    task = bar.add_task("judging, runs", total=len(run_dirs))
    found = []
    for said in all_opinions(run_dirs, pool, FACTORS if options.curve else ()):
        bar.advance(task)
        found.append(said)
    return found


def show(options: Score, done: Sequence[TrainingCourse], found: Sequence[Opinions]) -> None:
    """Prints the score."""
    whole = result(found)
    whole["not_applicable"] = sorted({course.missing for course in done if course.missing})
    parts = {name: result(part) for name, part in halves(found).items()} if options.split else {}
    if options.json:
        print(json.dumps({**whole, "halves": parts} if parts else whole, indent=1))
        return
    console = make_console(piped_width=WIDTH)
    for title, part in parts.items() or {"all runs": whole}.items():
        console.print(*result_tables(part, title), sep="\n")
    for text in whole["not_applicable"]:
        console.print(f"[dim]{text}[/dim]", highlight=False)


def demo(options: Demo) -> int:
    """Trains with telemetry; from the middle on training is broken."""
    name, dose = split_dose(options.fault)
    with wrong_use():
        fault = find(name, dose)
        tuned = preset(options.env, options.policy, mask_velocity=options.mask_velocity)
        config = tuned.config(seed=options.seed)
        env = make_env(options.env, num_envs=tuned.num_envs, mask_velocity=options.mask_velocity)
        trainer = PPO(env, config)
        middle = options.total_steps // (2 * config.num_steps * env.num_envs) + 1
        schedule(trainer, fault, dose, at_update=middle)
        torch.set_num_threads(1)
        sinks = [as_sink(sink) for sink in options.sink or ("console",)]
        summary = Summary(sinks)
        telemetry = Telemetry([*sinks, summary.observe], run_dir=options.run_dir or "auto", name=fault.name)
    print(f"from update {middle} on: {fault.what}")
    try:
        with telemetry:
            attach(telemetry, trainer)
            trainer.learn(options.total_steps)
    except FloatingPointError as error:
        print(f"training ended: {error}")
        return 1
    finally:
        summary.show(telemetry.run_dir, telemetry.run)
    return 0
