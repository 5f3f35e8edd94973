"""The corpus of programs with one mistake each: list it, run a tool on it, and score the tool's findings.

    python -m benchmarks.mistakes list equations
    python -m benchmarks.mistakes run equations --only subclass-pg     # programs whose names contain this
    python -m benchmarks.mistakes run correct --cleanrl DIR            # correct programs, for false alarms
    python -m benchmarks.mistakes run tasks --half tuning              # long runs; can be interrupted, finished runs are kept
    python -m benchmarks.mistakes score tasks --half tuning            # tables of the finished runs
    python -m benchmarks.mistakes run equations --tool "my-tool check" # another tool, on every program and its correct twin
    python -m benchmarks.mistakes score equations --tool "my-tool check"
    python -m benchmarks.mistakes sound                                # do the mistakes change what is trained?

Programs run one after the other, each in its own process. Results are saved in `runs/mistakes/`, which git ignores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import competitors, equation_score, outside_tool, running, training_score
from .corpus import EQUATION_PROGRAMS, HERE, TASK_PROGRAMS, Program, language_programs
from .correct import CORRECT, of_cleanrl

RESULTS = HERE.parents[1] / "runs" / "mistakes"


def chosen(options: argparse.Namespace) -> list[Program]:
    """Return the programs that the options name; tasks come with the correct twins of the wrong programs."""
    if options.set == "tasks":
        programs = [one for one in TASK_PROGRAMS if one.kind != "correct" and options.half in ("all", one.half)]
    elif options.set == "correct":
        programs = [*CORRECT, *(of_cleanrl(options.cleanrl) if options.cleanrl else ())]
    else:
        programs = list(language_programs() if options.set == "language" else EQUATION_PROGRAMS)
    pieces = options.only
    programs = [one for one in programs if not pieces or any(piece in one.name for piece in pieces)][:: options.every]
    if options.set == "tasks":
        twins = {one.twin for one in programs if one.kind == "wrong"}
        programs = [one for one in TASK_PROGRAMS if one.name in twins or one in programs]
    return programs


def saved(directory: Path, programs: Iterable[Program], seeds: int) -> list[Any]:
    """Return the verdicts of the finished programs."""
    paths = [directory / f"{one.name}-{seed}.json" for one in programs for seed in range(1, seeds + 1)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def run(options: argparse.Namespace, programs: list[Program]) -> None:
    """Run the programs."""
    running.preload()
    if options.set == "tasks":
        running.run_long(RESULTS / "tasks", programs, options.seeds)
        return
    runner = equation_score.run_correct if options.set == "correct" else equation_score.run_wrong
    directory = RESULTS / options.set
    directory.mkdir(parents=True, exist_ok=True)
    for verdict in runner(programs, options.seeds):
        (directory / f"{verdict.name}-{verdict.seed}.json").write_text(json.dumps(asdict(verdict), indent=1))


def score(options: argparse.Namespace, programs: list[Program]) -> None:
    """Print the tables of the finished runs."""
    if options.set == "tasks":
        scores = training_score.score(RESULTS / "tasks", programs)
        if options.save:
            training_score.save_truth(RESULTS / "tasks", programs)
        if options.competitors:
            competitors.compare(RESULTS / "tasks", programs, scores, options.competitors)
        return
    verdicts = saved(RESULTS / options.set, programs, options.seeds)
    if options.set == "correct":
        equation_score.print_correct(verdicts)
    else:
        equation_score.print_results(verdicts, {one.name: one for one in programs})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["list", "run", "score", "sound"])
    parser.add_argument("set", nargs="?", choices=["equations", "tasks", "language", "correct"], default="equations")
    parser.add_argument("--tool", help="command of another tool, called with the program and its options")
    parser.add_argument("--only", nargs="*", default=[], help="pieces of names")
    parser.add_argument("--every", type=int, default=1, help="only every such program")
    parser.add_argument("--half", choices=["tuning", "test", "all"], default="all", help="of tasks")
    parser.add_argument("--seeds", type=int, help="1; for tasks, up to 3 of wrong programs and their twins")
    parser.add_argument("--cleanrl", type=Path, help="directory with CleanRL's ppo.py and ppo_continuous_action.py")
    parser.add_argument("--competitors", type=Path, help="folder with zen-rl and rlwatch, to compare with on tasks")
    parser.add_argument("--save", action="store_true", help="with the score of tasks: put the truth into truth.json")
    options = parser.parse_args()
    options.seeds = options.seeds or (3 if options.set == "tasks" else 1)
    if options.set == "language" and importlib.util.find_spec("trl") is None:
        parser.error("the set language needs TRL: pip install '.[trl]'")
    results = RESULTS / "tools" / outside_tool.slug(options.tool) / options.set if options.tool else RESULTS / options.set
    if options.what == "score" and not any(results.rglob("*.json")):
        parser.error(f"no finished runs of {options.set}: python -m benchmarks.mistakes run {options.set}")
    programs = chosen(options)
    if options.what == "list":
        for one in programs:
            place = one.env if one.task else equation_score.quantity(one)
            print(f"{one.half:8}{one.kind:11}{one.name:42}{place:22}{one.source}")
    elif options.tool:
        if options.what == "run":
            outside_tool.run(options.tool, programs, results, long=options.set == "tasks")
        outside_tool.print_score(results)
    elif options.what == "sound":
        running.preload()
        sys.exit(bool(equation_score.check_soundness(programs)))
    else:
        if options.what == "run":
            run(options, programs)
        if options.what == "score" or options.set != "tasks":
            score(options, programs)


if __name__ == "__main__":
    main()
