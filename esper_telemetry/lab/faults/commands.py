"""The commands `list`, `score` and `demo` of `python -m esper_telemetry.lab.faults`; each returns the exit code."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from esper_telemetry.cli.arguments import wrong_use
from esper_telemetry.core.record import Level, RunStatus
from esper_telemetry.lab.faults.fault import NEEDS
from esper_telemetry.lab.faults.fault_catalogue import FAULTS, find, schedule
from esper_telemetry.lab.faults.runs import ENVIRONMENTS, FaultRun, find_environment, plan_runs, train_all, worker_pool
from esper_telemetry.lab.faults.score import THRESHOLD_FACTORS, score_figures, tuning_and_held_out
from esper_telemetry.lab.faults.verdicts import RunVerdicts, list_runs, run_verdicts
from esper_telemetry.ppo.config import preset
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.trainer import PPO
from esper_telemetry.sinks.console import is_live, make_console
from esper_telemetry.sinks.sink_registry import as_sink
from esper_telemetry.telemetry import Telemetry, attach, session_of
from esper_telemetry.views.verdict_text import Summary

if TYPE_CHECKING:
    from esper_telemetry.lab.faults.__main__ import Demo, List, Score

DOSES = {"lr": (3, 10, 30, 100), "forget": (-2, -4, -10), "reward": (10, 100, 1e4)}
"""Doses of `score --doses`, from mild to severe."""

PIPED_WIDTH_COLUMNS = 150

FAULT_COLUMNS = ("fault", "what it does", "dose", "needs", "alarms that name it", "within")


def fault_entries() -> list[dict[str, Any]]:
    """Return all faults as plain data."""
    return [
        {
            "name": fault.name,
            "family": fault.family or fault.name,
            "what": fault.what,
            "dose": fault.dose,
            "doses": list(fault.doses),
            "needs": [NEEDS[need].text for need in fault.needs],
            "alarms": list(fault.accepts),
            "bound": fault.bound,
        }
        for fault in FAULTS
    ]


def fault_table() -> Table:
    """Return all faults as a table for the terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in FAULT_COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name in ("fault", "dose"))
    for entry in fault_entries():
        low, high = entry["doses"]
        dose = f"{entry['dose']:g} ({low:g} to {high:g})" if low < high else ""
        needs, alarms = "; ".join(entry["needs"]), ", ".join(entry["alarms"])
        table.add_row(entry["name"], entry["what"], dose, needs, alarms, str(entry["bound"]))
    return table


def score_tables(figures: Mapping[str, Any], title: str) -> list[Table]:
    """Return a score as tables: by fault if there are broken runs, then the detectors and the baselines.

    The caption of the second table has the intervals and the types of the false alarms.
    """
    detectors = _figures_table("", {"detectors": figures, **figures["baselines"]}, DETECTOR_COLUMNS)
    detectors.title, detectors.title_justify = title, "left"
    names = {"strict_recall": "in time", "false_alarms_per_100": "false per 100"}
    parts = [f"{names[key]} {low:.3f} to {high:.3f} (95 %)" for key, (low, high) in figures["intervals"].items()]
    if figures["false_by_type"]:
        parts.append(f"false: {_counts(figures['false_by_type'])}")
    detectors.caption, detectors.caption_justify = "; ".join(parts), "left"
    return [*([_figures_table("fault", figures["per_fault"], PER_FAULT_COLUMNS)] if figures["per_fault"] else []), detectors]


def _figures_table(heading: str, rows: Mapping[str, Mapping[str, Any]], columns: Sequence[FigureColumn]) -> Table:
    """Return a table with a row per name."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(heading, overflow="fold")
    for column in columns:
        table.add_column(column.heading, overflow="fold", justify="left" if column.text is _counts else "right")
    for name, row in rows.items():
        table.add_row(name, *(column.text(row.get(column.key)) for column in columns))
    return table


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind or '?'} {count}" for kind, count in counts.items())


class FigureColumn(NamedTuple):
    """A column of a table of scores: its heading, the key of its figure, and the figure's text."""

    heading: str
    key: str
    text: Callable[[Any], str]


RECALL_COLUMNS = (
    FigureColumn("runs", "runs", str),
    FigureColumn("in time", "strict_recall", _percent),
    FigureColumn("in 20", "recall", _percent),
    FigureColumn("any", "lenient_recall", _percent),
    FigureColumn("lag", "median_lag", _number),
)
PER_FAULT_COLUMNS = (
    *RECALL_COLUMNS,
    FigureColumn("lead", "median_lead", _number),
    FigureColumn("cause", "root_cause_accuracy", _percent),
    FigureColumn("alarms that named it", "hits", _counts),
    FigureColumn("put down to", "causes", _counts),
)
DETECTOR_COLUMNS = (
    *RECALL_COLUMNS,
    FigureColumn("cause", "root_cause_accuracy", _percent),
    FigureColumn("false", "false_alarms", str),
    FigureColumn("healthy updates", "healthy_updates", str),
    FigureColumn("false per 100", "false_alarms_per_100", _number),
    FigureColumn("area", "partial_auc", _number),
)


def show_faults(options: List) -> int:
    """Print the faults."""
    if options.json:
        print(json.dumps(fault_entries(), indent=1))
    else:
        make_console(piped_width=PIPED_WIDTH_COLUMNS).print(fault_table())
    return 0


def score(options: Score) -> int:
    """Train and score runs, and print the score; every argument is checked before anything is created."""
    with wrong_use():
        plan = _plan(options)
        run_dirs = None if options.from_ is None else list_runs(Path(options.from_))
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times)
    console = make_console(stderr=True)  # outside a terminal the bar is not drawn
    progress = Progress(*columns, console=console, disable=not is_live(console))
    with worker_pool(options.workers) as pool, progress as bar:
        if run_dirs is None:
            with tempfile.TemporaryDirectory(prefix="faults-") if options.keep is None else nullcontext(options.keep) as place:
                directory = Path(place)
                directory.mkdir(parents=True, exist_ok=True)
                runs = _train(plan, directory, pool, bar, options)
                verdicts = _evaluate([directory / run.name for run in runs if not run.missing], pool, bar, options)
        else:
            runs, verdicts = [], _evaluate(run_dirs, pool, bar, options)
    _print_score(options, runs, verdicts)
    return 0


def _plan(options: Score) -> list[FaultRun]:
    """Return the runs that the options ask for; raise ValueError for unknown or contradictory options."""
    Level.parse(options.level)
    if options.workers < 1:
        raise ValueError(f"workers must be at least 1, got {options.workers}")
    if options.from_ is not None and options.keep is not None:
        raise ValueError("--from scores kept journals and --keep keeps trained ones: give one of them")
    if not options.seeds or min(options.seeds) < 0:
        raise ValueError(f"seeds must be 0 or more, and at least one, got {options.seeds}")
    if options.trainer == "sb3":
        try:
            from esper_telemetry.lab.faults.sb3_runs import plan_sb3_runs
        except ModuleNotFoundError as missing:
            raise ValueError(f"--trainer sb3 needs {missing.name}: pip install 'esper-telemetry[sb3]'") from missing
        faults = _faults_with_doses(options)
        return plan_sb3_runs(faults, options.envs, options.seeds, healthy=options.healthy, explicit=bool(options.faults))
    for env in options.envs:
        find_environment(env)
    envs = options.envs or tuple(ENVIRONMENTS)
    return plan_runs(_faults_with_doses(options), envs, options.seeds, healthy=options.healthy)


def _faults_with_doses(options: Score) -> list[tuple[str, float]]:
    """Return the faults by their own names, with their doses."""
    if options.doses is not None and not options.doses:
        names = options.faults or tuple(DOSES)
        wrong = [name for name in names if name not in DOSES]
        if wrong:
            raise ValueError(f"--doses without values supports {', '.join(DOSES)}, got {wrong[0]}")
        return [_checked(name, dose) for name in names for dose in DOSES[name]]
    named = [_split_dose(text) for text in options.faults] or [(fault.name, None) for fault in FAULTS]
    if options.doses is None:
        return [_checked(name, dose) for name, dose in named]
    if not options.faults:
        raise ValueError("--doses with values needs --faults, because doses differ between faults")
    return [_checked(name, dose) for name, _ in named for dose in options.doses]


def _split_dose(text: str) -> tuple[str, float | None]:
    name, sign, number = text.partition("=")
    try:
        return name, float(number) if sign else None
    except ValueError:
        raise ValueError(f"a fault must be a name or name=dose, got {text!r}") from None


def _checked(name: str, dose: float | None) -> tuple[str, float]:
    fault = find(name, dose)
    return fault.name, fault.checked(dose)


def _train(plan: Sequence[FaultRun], directory: Path, pool: Executor, bar: Progress, options: Score) -> list[FaultRun]:
    task = bar.add_task("training, updates", total=sum(run.trained_updates for run in plan))
    train = train_all
    if options.trainer == "sb3":
        from esper_telemetry.lab.faults.sb3_runs import train_all_sb3 as train
    done = []
    for run in train(plan, directory, pool, options.level):
        bar.advance(task, run.trained_updates)
        done.append(run)
    return done


def _evaluate(run_dirs: Sequence[Path], pool: Executor, bar: Progress, options: Score) -> list[RunVerdicts]:
    evaluate = partial(run_verdicts, factors=THRESHOLD_FACTORS if options.curve else ())
    return list(bar.track(pool.map(evaluate, run_dirs, chunksize=4), total=len(run_dirs), description="judging, runs"))


def _print_score(options: Score, runs: Sequence[FaultRun], verdicts: Sequence[RunVerdicts]) -> None:
    figures = score_figures(verdicts)
    figures["not_applicable"] = sorted({run.missing for run in runs if run.missing})
    halves = tuning_and_held_out(verdicts) if options.split else {}
    parts = {name: score_figures(part) for name, part in halves.items()}
    if options.json:
        print(json.dumps({**figures, "halves": parts} if parts else figures, indent=1))
        return
    console = make_console(piped_width=PIPED_WIDTH_COLUMNS)
    for title, part in parts.items() or {"all runs": figures}.items():
        console.print(*score_tables(part, title), sep="\n")
    for text in figures["not_applicable"]:
        console.print(f"[dim]{text}[/dim]", highlight=False)


def demo(options: Demo) -> int:
    """Train with telemetry, and break training from the middle of the run on."""
    name, dose = _split_dose(options.fault)
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
        summary = Summary()
        telemetry = Telemetry([*sinks, summary.observe], run_dir=options.run_dir or "auto", name=fault.name)
        session_of(telemetry).prints_end = False
    print(f"from update {middle} on: {fault.what}")
    status = RunStatus.INTERRUPTED
    try:
        with telemetry:
            attach(telemetry, trainer)
            trainer.learn(options.total_steps)
        status = RunStatus.FINISHED
    except FloatingPointError as error:
        status = RunStatus.FAILED
        print(f"training ended: {error}")
        return 1
    finally:
        summary.show(session_of(telemetry).run_end(status))
    return 0
