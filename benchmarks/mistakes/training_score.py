"""Long runs on tasks: findings about harmful programs, false alarms, and outcomes, from the journals of the runs.

A harmful program is *named* if an alarm or a shown remark is one of its causes, and *named wrongly* if only other alarms were raised.
Otherwise it is *unexplained* if the verdict says so, or *called fine*. A remark counts only with a bad outcome, which shows it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

from esper_telemetry.alarms.diagnosis import NOT_EXPLAINING, Diagnosis, diagnose
from esper_telemetry.alarms.rules.task_alarms import Failure
from esper_telemetry.alarms.verdict.run_outcome import BAD, GOOD, OutcomeKind
from esper_telemetry.core.record import Alarm, AlarmEvent
from esper_telemetry.equations.equation import EQUATION_KEY, equations
from esper_telemetry.journal.read import read_run

from .corpus import HERE, Program
from .equation_score import named_by
from .truth import Truth, harm, truth_of

SEEDS: Final = (1, 2, 3)
EQUATION: Final = "integrity/equation"
TRUTH: Final = HERE / "truth.json"


@dataclass(frozen=True)
class Score:
    """Verdict on one run.

    Attributes:
        program, kind, seed, updates: of the run.
        harmful: of the program; None if too few seeds were run.
        learns, truth: by the returns.
        outcome: by the package.
        result: named, named wrongly, unexplained, or called fine; of wrong programs.
        root_first: the cause of the first incident is right.
        alarms: raised, as type and, for equations, the equation.
        remarks: names of the shown remarks.
        raised: number of alarms, including each repetition of an alarm that ended.
        right_outcome: the outcome agrees with the truth; None if the truth is undecided.
    """

    program: str
    kind: str
    seed: int
    updates: int
    harmful: bool | None
    learns: bool | None
    truth: str
    outcome: str
    result: str
    root_first: bool
    alarms: tuple[str, ...]
    remarks: tuple[str, ...]
    raised: int
    right_outcome: bool | None


def score(results: Path, programs: Sequence[Program]) -> list[Score]:
    """Print the tables, write the score of every run to `scores.json`, and return the scores."""
    scores = list(scored(results, programs))
    runs = {(one.name, seed) for one in programs for seed in SEEDS if truth_of(results, one.name, seed).kind != "missing"}
    print(f"{len(runs)} runs of {len({name for name, _ in runs})} programs; {len(programs)} are declared.")
    print_harmful(scores)
    print_misses(programs, scores)
    print_false_alarms(scores)
    print_outcomes(scores)
    (results / "scores.json").write_text(json.dumps([asdict(one) for one in scores], indent=1))
    return scores


def save_truth(results: Path, programs: Sequence[Program]) -> None:
    """Save the truth about runs, and whether a mistake does harm, in `truth.json`; programs that were not run keep their entry."""
    known = json.loads(TRUTH.read_text())
    for one in programs:
        seeds = {seed: truth.text for seed in SEEDS if (truth := truth_of(results, one.name, seed)).kind != "missing"}
        if seeds:
            harmful = harm(results, one.name, one.twin, SEEDS) if one.kind == "wrong" else False
            known[one.name] = {"harmful": harmful, "seeds": seeds}
    lines = [f" {json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known)]
    TRUTH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def scored(results: Path, programs: Iterable[Program]) -> Iterator[Score]:
    """Yield the scores of the finished runs."""
    for program in programs:
        harmful = harm(results, program.name, program.twin, SEEDS) if program.kind == "wrong" else False
        for seed in SEEDS:
            truth = truth_of(results, program.name, seed)
            run_dir = results / program.name / str(seed) / "run"
            if truth.kind != "missing" and (run_dir / "journal.jsonl").exists():
                yield score_of(program, seed, harmful, truth, verdict_of(run_dir))


@cache
def verdict_of(run_dir: Path) -> Diagnosis:
    """Return the output of `esper-telemetry diagnose`."""
    run = read_run(run_dir)
    failures = [Failure(one.seq, one.axes, one.data) for one in run.events if one.type == "failure" and one.axes]
    interventions = [one.seq for one in run.events if one.type == "intervention"]
    return diagnose(
        run.info.facts,
        run.records,
        interventions=interventions,
        failures=failures,
        alarms=run.alarms,
        status=run.status,
    )


def score_of(program: Program, seed: int, harmful: bool | None, truth: Truth, verdict: Diagnosis) -> Score:
    """Return the score of a run."""
    raised = [alarm for incident in verdict.incidents for alarm in incident.alarms if alarm.event is AlarmEvent.RAISE]
    raised = [alarm for alarm in raised if not alarm.type.startswith(NOT_EXPLAINING)]
    named = [alarm for alarm in raised if is_right(program, alarm)]
    remarks, named_remarks = shown_remarks(program, verdict)
    if program.kind != "wrong":
        result = ""
    elif named or named_remarks:
        result = "named"
    elif verdict.unexplained:
        result = "unexplained"
    else:
        result = "named wrongly" if raised else "called fine"
    explaining = [one for one in verdict.incidents if not one.cause.startswith(NOT_EXPLAINING)]
    root = is_right(program, explaining[0].main) if explaining else bool(named_remarks)
    kinds = {"learns": GOOD, "flat": {"flat"}, "declining": {"declining"}, "failed": {"failed"}}.get(truth.kind)
    labels = [f"{one.type}:{one.key.removeprefix(EQUATION_KEY)}" if one.type == EQUATION else one.type for one in raised]
    return Score(
        *(
            program.name,
            program.kind,
            seed,
            verdict.updates,
            harmful,
            truth.good,
            truth.text,
            str(verdict.outcome.kind),
            result,
        ),
        root_first=root,
        alarms=tuple(dict.fromkeys(labels)),
        remarks=tuple(remarks),
        raised=len(raised),
        right_outcome=None if kinds is None else verdict.outcome.kind in kinds,
    )


def shown_remarks(program: Program, verdict: Diagnosis) -> tuple[list[str], list[str]]:
    """Return the names of the remarks that a bad outcome shows, and those that are causes of the program."""
    shown = [data for data in verdict.remarks if verdict.shows_remarks or not data.get("quiet")]
    names = [str(data["name"]) for data in shown] if verdict.outcome.kind in BAD else []
    return names, [name for name in names if any(f"remark/{name}".startswith(cause) for cause in program.causes)]


def is_right(program: Program, alarm: Alarm) -> bool:
    """True for an alarm that names what is wrong with the program."""
    if alarm.type == EQUATION and program.quantities:
        named = named_by((*program.quantities, *program.follows), equations(), losses=True)
        return alarm.key.removeprefix(EQUATION_KEY) in {*named, "opt/lr"}
    return alarm.type in program.causes


def share(part: int, whole: int) -> str:
    """Return `0.85 (17 of 20)`."""
    return f"{part / whole:.2f} ({part} of {whole})" if whole else "-"


def print_harmful(scores: Sequence[Score]) -> None:
    """Print the findings about harmful programs, by run."""
    runs = [one for one in scores if one.harmful and not one.learns]
    print(f"\n{len({one.program for one in runs})} programs are harmful.")
    counts = Counter(one.result for one in runs)
    print("\n| harmful programs, by run | share | goal |\n|---|---|---|")
    for result, goal in (("named", "≥ .85"), ("unexplained", "≤ .15"), ("named wrongly", "0"), ("called fine", "0")):
        print(f"| {result} | {share(counts[result], len(runs))} | {goal} |")
    alarmed = [one for one in runs if one.result == "named"]
    print(f"| root cause first, of those named | {share(sum(one.root_first for one in alarmed), len(alarmed))} | ≥ .8 |")


def print_misses(programs: Sequence[Program], scores: Sequence[Score]) -> None:
    """Print every run of a wrong program that was not named with the right cause first."""
    sources = {one.name: one for one in programs}
    print("\n| program | seed | harmful | truth | outcome | result | alarms and remarks |\n|---|---|---|---|---|---|---|")
    for one in scores:
        if one.kind != "wrong" or (one.result == "named" and one.root_first):
            continue
        text = ", ".join((*one.alarms, *(f"remark {name}" for name in one.remarks))) or "none"
        harmful = {True: "yes", False: "no", None: "unknown"}[one.harmful]
        result = one.result + (", not first" if one.result == "named" else "")
        env = sources[one.program].env.split("/")[-1]
        print(f"| {one.program} ({env}) | {one.seed} | {harmful} | {one.truth} | {one.outcome} | {result} | {text} |")


def print_false_alarms(scores: Sequence[Score]) -> None:
    """Print alarms in correct programs, by kind."""
    print("\n| correct programs | runs | updates | alarms | per 100 updates | runs with any | goal |\n|---|---|---|---|---|---|---|")
    goals = {"published": "≤ 0.1; one run in ten", "variant": "0", "correct": "0"}
    for kind, goal in goals.items():
        runs = [one for one in scores if one.kind == kind]
        updates, alarms = sum(one.updates for one in runs), sum(one.raised for one in runs)
        rate = 100 * alarms / max(1, updates)
        print(f"| {kind} | {len(runs)} | {updates} | {alarms} | {rate:.2f} | {sum(bool(one.alarms) for one in runs)} | {goal} |")
    for one in scores:
        if one.kind != "wrong" and one.alarms:
            print(f"- {one.program}, seed {one.seed}: {', '.join(one.alarms)}; {one.truth}; {one.outcome}")


def print_outcomes(scores: Sequence[Score]) -> None:
    """Print how often the outcome agrees with the truth."""
    decided = [one for one in scores if one.right_outcome is not None]
    judged = [one for one in decided if one.outcome != OutcomeKind.TOO_SHORT]
    print(f"\nOutcome right: {share(sum(one.right_outcome is True for one in decided), len(decided))}; goal ≥ .95.")
    print(f"Without runs that are too short to tell: {share(sum(one.right_outcome is True for one in judged), len(judged))}.")
    pairs = Counter((one.truth.split()[0], one.outcome) for one in decided if not one.right_outcome)
    for (truth, outcome), count in pairs.most_common():
        names = ", ".join(f"{one.program} {one.seed}" for one in decided if (one.truth.split()[0], one.outcome) == (truth, outcome))
        print(f"- {truth} by the returns, {outcome} by the package: {count} ({names})")
