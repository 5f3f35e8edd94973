"""Short runs: results of the equation checks for programs with one mistake, and for correct programs.

The checks run in every update (level debug). For each mistake the score shows the equations that failed, the hypotheses that were named,
and whether they are right. For correct programs it shows how often each equation was checked, and the largest error as a fraction of its
tolerance.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esper_telemetry.alarms.rules.equation_alarms import RATE_KEY
from esper_telemetry.core.facts import Facts
from esper_telemetry.equations.equation import EQUATION_KEY, Equation, equations
from esper_telemetry.equations.schedules import RateHistory
from esper_telemetry.journal.read import read_run

from .corpus import Program
from .running import forked

SEGMENTS: Mapping[str, str] = {
    "normalized": "^normali",
    "values": "^values$",
    "advantages": "^advantages$",
    "actions": "^(actions|executed_actions)$",
    "gradient": "^(gradient|clipping)$",
    "transitions": "^(transitions|stored_rewards)$",
    "policy_loss": "^(policy_loss|log_ratios|total_loss)$",
    "value_loss": "^(value_loss|total_loss)$",
    "entropy": "^(entropy_loss|total_loss)$",
}
"""Regular expressions for the names of the equations of a quantity, if it is not the quantity's own name."""


@dataclass
class Reading:
    """Result of the equations in a journal.

    Attributes:
        status: how the process ended: empty if it succeeded.
        checked: number of records with an error of each equation.
        largest: largest error of each, over its tolerance.
        named: for each equation that failed, the names of the hypotheses in each such record.
        says: the sentences of these hypotheses.
        variants: equations of which every failing record names a published variant.
        alarms: types and sentences of the raised alarms; for correct programs, only of `integrity/`.
        updates: number of records.
        weights: digest of what was trained.
        seconds: wall time of the process.
    """

    status: str = ""
    checked: dict[str, int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    named: dict[str, list[list[str]]] = field(default_factory=dict)
    says: dict[str, str] = field(default_factory=dict)
    variants: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    updates: int = 0
    weights: str = ""
    seconds: float = 0.0


@dataclass
class Verdict:
    """The judgement of the findings about a mistake.

    Attributes:
        result: right, set (the right one among others), unnamed, missed, wrong name, wrong equation, or crashed.
        detail: the equations and the names.
    """

    name: str
    seed: int
    result: str
    detail: str
    reading: Reading


def run_program(program: Program, seed: int, *, telemetry: bool = True) -> Reading:
    """Run a program in its own process and return the reading of its journal."""
    with tempfile.TemporaryDirectory(prefix="mistakes-", ignore_cleanup_errors=True) as name:
        directory, text = Path(name), program.text()
        script, run_dir = directory / Path(program.base).name, directory / "run"
        script.write_text(text)
        command = [str(script), *(short_args(program) if telemetry else program.args), "--seed", str(seed)]
        if "Telemetry(" in text:
            command += ["--run-dir", str(run_dir)]
        elif telemetry:
            command = ["run", "--level", "debug", "--run-dir", str(run_dir), *command]
        started = time.perf_counter()
        code = forked(command, directory)
        seconds = time.perf_counter() - started
        output, errors = ((directory / stream).read_text() for stream in ("stdout", "stderr"))
        digest = re.search(r"^weights (\w+)", output, re.MULTILINE)
        lines = (errors.strip() or "no message").splitlines()
        reading = read_journal(run_dir) if (run_dir / "journal.jsonl").exists() else Reading()
        reading.status = f"exit {code}: {lines[-1]}" if code else "; ".join(one for one in lines if " failed (" in one)
        reading.seconds, reading.weights = seconds, digest[1] if digest else ""
        return reading


def short_args(program: Program) -> tuple[str, ...]:
    """Return the options of a run of three updates. Actions need five updates, and schedules need more."""
    first = quantity(program)
    if first == "schedule" and program.base == "script.py":
        return (*program.args, "--total-timesteps", "6144")
    long = first in ("alarms", "actions", "schedule") or program.base == "bundled.py"
    return program.args if long else (*program.args, "--total-timesteps", "1200")


def read_journal(run_dir: Path) -> Reading:
    """Return the results of the equations in a journal."""
    run, declared, reading = read_run(run_dir), equations(), Reading()
    precision = run.info.facts.get("precision")
    reading.updates = len(run.records)
    explained: dict[str, list[bool]] = defaultdict(list)
    for record in run.records:
        for name, equation in declared.items():
            error = record.values.get(EQUATION_KEY + name)
            if error is None:
                continue
            reading.checked[name] = reading.checked.get(name, 0) + 1
            share = error / equation.tolerance_at(precision)
            reading.largest[name] = max(share, reading.largest.get(name, 0.0))
            if share > 1:
                explanations = equation.explanations(record.values)
                reading.named.setdefault(name, []).append([one.name for one in explanations])
                reading.says |= {f"{name}_{one.name}": one.says for one in explanations}
                explained[name].append(any(one.variant for one in explanations))
    rates = RateHistory(Facts.of(run.info.facts))
    for record in run.records:
        rates.add(record.axes.env_step, record.values.get(RATE_KEY))
    schedule = rates.result()
    if schedule is not None:
        name, share = schedule.equation.name, (schedule.error or 0.0) / schedule.tolerance
        reading.checked[name], reading.largest[name] = len(run.records), share
        if share > 1:
            reading.named[name] = [[one.name for one in schedule.hypotheses]]
            reading.says |= {f"{name}_{one.name}": one.says for one in schedule.hypotheses}
            explained[name].append(any(one.variant for one in schedule.hypotheses))
    reading.variants = [name for name, flags in explained.items() if all(flags)]
    for name in explained.keys() - reading.variants:  # a mistake may begin after updates with a published variant
        pairs = zip(reading.named[name], explained[name], strict=True)
        reading.named[name] = [names for names, variant in pairs if not variant]
    reading.alarms = sorted({f"{alarm.type}: {alarm.text}" for alarm in run.alarms})
    return reading


def judge(program: Program, reading: Reading) -> tuple[str, str]:
    """Return the result and its detail."""
    if reading.status and not reading.updates:
        return "crashed", reading.status
    if not program.quantities:
        raised = [alarm for alarm in reading.alarms if alarm.partition(": ")[0] in program.causes]
        return ("right" if raised else "missed"), "; ".join(raised or reading.alarms)
    declared = equations()
    allowed = named_by(program.quantities, declared, losses=True)
    follows = named_by(program.follows, declared)
    failing = reading.named
    detail = "; ".join(f"{name}: {common_text(records)}" for name, records in failing.items())
    if reading.status:
        detail += f" [{reading.status}]"
    surplus = [name for name in failing if name not in {*allowed, *follows} and name not in reading.variants]
    targets = [name for name in allowed if name in failing]
    if surplus:
        return "wrong equation", detail
    if not targets:
        return "missed", detail or f"checked: {', '.join(reading.checked) or 'nothing'}"
    return max((judge_names(program, name, failing[name], reading) for name in targets), key=RANKS.index), detail


LOSSES = ("normalized", "policy_loss", "value_loss", "entropy")
"""Quantities whose mistakes also show as a gradient of another loss."""

RANKS = ("wrong name", "unnamed", "set", "right")


def judge_names(program: Program, name: str, records: Sequence[Sequence[str]], reading: Reading) -> str:
    """Return the result for one equation that failed and was allowed to fail."""
    named = [set(one) for one in records if one]
    if not named:
        return "unnamed"
    common = set.intersection(*named) or set.union(*named)
    fitting = {one for one in common if re.search(program.words, f"{one} {reading.says[f'{name}_{one}']}", re.IGNORECASE)}
    if not fitting:
        return "wrong name"
    return "right" if fitting == common else "set"


def named_by(quantities: Iterable[str], declared: Mapping[str, Equation], *, losses: bool = False) -> list[str]:
    """Return the equations of some quantities; with `losses`, a loss includes the gradient."""
    also = ["gradient" for one in quantities if losses and one in LOSSES]
    patterns = [SEGMENTS.get(one, one) for one in dict.fromkeys([*quantities, *also])]
    return [name for pattern in patterns for name in declared if re.search(pattern, name)]


def common_text(records: Sequence[Sequence[str]]) -> str:
    """Return the names in each record, the most common set first."""
    counts = Counter(" or ".join(one) or "no name" for one in records)
    return ", ".join(f"{text} ({count})" for text, count in counts.most_common())


def run_wrong(programs: Iterable[Program], seeds: int) -> Iterator[Verdict]:
    """Run programs one after the other, print a line for each, and yield the verdicts."""
    for program in programs:
        for seed in range(1, seeds + 1):
            reading = run_program(program, seed)
            result, detail = judge(program, reading)
            mark = "" if program.listed else " (not in the table)"
            print(f"{program.name:32}{quantity(program):14}{result + mark:30}{detail}", flush=True)
            yield Verdict(program.name, seed, result, detail, reading)


def quantity(program: Program) -> str:
    """Return the quantity that has the mistake."""
    return program.quantities[0] if program.quantities else "alarms"


def print_results(verdicts: Sequence[Mapping[str, Any]], programs: Mapping[str, Program]) -> None:
    """Print a table of results by equation."""
    columns = ("right", "set", "unnamed", "missed", "wrong name", "wrong equation", "crashed")
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        program = programs[verdict["name"]]
        for group in (quantity(program), "all") if program.listed else ("others",):
            rows[group][verdict["result"]] += 1
    print("\n| equation | programs | " + " | ".join(columns) + " |\n|" + "---|" * (2 + len(columns)))
    for group, counts in sorted(rows.items(), key=lambda row: (row[0] in ("all", "others"), row[0])):
        print(f"| {group} | {counts.total()} | " + " | ".join(str(counts[column]) for column in columns) + " |")


def run_correct(programs: Iterable[Program], seeds: int) -> Iterator[Verdict]:
    """Run correct programs, print a line for each, and yield the verdicts."""
    for program in programs:
        for seed in range(1, seeds + 1):
            reading = run_program(program, seed)
            reading.alarms = [one for one in reading.alarms if one.startswith("integrity/")]
            wrong = sorted(set(reading.named) - set(reading.variants))
            checked = ", ".join(f"{name} {count}" for name, count in reading.checked.items())
            worst = max(reading.largest.items(), key=lambda item: item[1], default=("nothing", 0.0))
            bad = f"  WRONG: {wrong} {[common_text(reading.named[one]) for one in wrong]} {reading.alarms}"
            print(
                f"{program.name:40}{reading.updates:4} updates; {checked or 'nothing checked'}; largest {worst[0]} {worst[1]:.2g}"
                + (f" variants {reading.variants}" if reading.variants else "")
                + (bad if wrong or reading.alarms else "")
                + (f" [{reading.status}]" if reading.status else ""),
                flush=True,
            )
            yield Verdict(program.name, seed, "false alarm" if wrong or reading.alarms else "silent", "", reading)


def print_correct(verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of the checked equations in correct programs."""
    readings = [one["reading"] for one in verdicts]
    names = list(dict.fromkeys(name for one in readings for name in one["checked"]))
    print("\n| equation | runs | checks | largest error / tolerance | runs in which it failed |\n|---|---|---|---|---|")
    for name in names:
        having = [one for one in readings if name in one["checked"]]
        failed = sum(name in one["named"] and name not in one["variants"] for one in having)
        largest = max([one["largest"][name] for one in having if name not in one["variants"]], default=0.0)
        print(f"| {name} | {len(having)} | {sum(one['checked'][name] for one in having)} | {largest:.2g} | {failed} |")
    alarms = [f"{one['name']} seed {one['seed']}: {', '.join(alarms)}" for one in verdicts if (alarms := one["reading"]["alarms"])]
    print(f"\n{len(readings)} runs, {sum(one['updates'] for one in readings)} updates, {len(alarms)} runs with alarms of integrity/")
    print("\n".join(alarms))


def check_soundness(programs: Sequence[Program]) -> list[str]:
    """Run programs and their twins without telemetry; return each program that crashes or ends with its twin's weights."""
    healthy: dict[tuple[str, tuple[str, ...]], str] = {}
    unsound = []
    for program in programs:
        twin = program.correct()
        key = twin.text(), twin.args
        if key not in healthy:
            reading = run_program(twin, 1, telemetry=False)
            assert reading.weights, f"{twin.name} crashed: {reading.status}"
            healthy[key] = reading.weights
        reading = run_program(program, 1, telemetry=False)
        same = reading.weights == healthy[key]
        if not reading.weights or (same and not program.same_weights):
            unsound.append(program.name)
            print(f"{program.name}: {'trains what the correct program trains' if same else reading.status}", flush=True)
    print(f"{len(programs)} programs, {len(unsound)} unsound")
    return unsound
