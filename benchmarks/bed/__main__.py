"""Score of telemetry on programs that are wrong from their first line, their correct twins, harmless variants and published settings.

    python benchmarks/bed list
    python benchmarks/bed run --half tuning          # can be interrupted; runs that are there are kept
    python benchmarks/bed score --half tuning        # tables, from the journals of the runs that are there

Programs run one after the other, in a process each, with one torch thread. `runs/bed/`, which git ignores, holds for each run
its journal, its true returns and `run.json`. A program runs with a third seed only where two do not agree on whether it learns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

BED = Path(__file__).resolve().parent
sys.path[:0] = [str(BED), str(BED.parent)]

import bed_competitors  # noqa: E402
import bed_score  # noqa: E402
import bed_truth  # noqa: E402
import equations  # noqa: E402
from bed_programs import PROGRAMS_OF_BED, Program  # noqa: E402

RESULTS = BED.parents[1] / "runs" / "bed"
TIME_LIMIT_SECONDS = 900


def chosen(half: str, only: Iterable[str] = ()) -> list[Program]:
    """Return the programs of a half, with the correct twins of those that are wrong."""
    pieces = tuple(only)
    programs = [one for one in PROGRAMS_OF_BED if one.kind != "correct" and half in ("all", one.half)]
    programs = [one for one in programs if not pieces or any(piece in one.name for piece in pieces)]
    twins = {one.twin for one in programs if one.kind == "wrong"}
    return [one for one in PROGRAMS_OF_BED if one.name in twins or one in programs]


def plan(programs: Iterable[Program], seeds: int) -> Iterator[tuple[Program, int]]:
    """Yield what to run: every program once, the wrong ones and their twins a second time, and a third time where two do not agree.

    Those that may be harmful by their first seed, and their twins, come first.
    """
    programs = list(programs)
    paired = [one for one in programs if one.kind in ("wrong", "correct")]
    order = {"correct": 0, "wrong": 1, "published": 2, "variant": 3}
    for program in sorted(programs, key=lambda one: order[one.kind]):
        yield program, 1
    wrong = [one for one in paired if one.kind == "wrong"]
    suspects = [one for one in wrong if not bed_truth.truth_of(RESULTS, one.name, 1).good]
    first = {one.name for one in suspects} | {one.twin for one in suspects}
    for seed in range(2, seeds + 1):
        for program in sorted(paired, key=lambda one: (one.name not in first, order[one.kind])):
            if seed < 3 or len({bed_truth.truth_of(RESULTS, program.name, one).good for one in (1, 2)}) > 1:
                yield program, seed


def run(program: Program, seed: int) -> None:
    """Run a program with a seed, unless it has been run."""
    directory = RESULTS / program.name / str(seed)
    if (directory / "run.json").exists():
        return
    subprocess.run(["rm", "-rf", str(directory)], check=True)
    directory.mkdir(parents=True)
    text, words = program.command(seed, str(directory / "run"))
    (directory / "program.py").write_text(text)
    os.environ |= {"BED_RETURNS": str(directory / "returns.txt"), "BED_WRAPPERS": ",".join(program.wrappers)}
    started = time.perf_counter()
    code = equations.forked(words, directory, TIME_LIMIT_SECONDS)
    facts = {"program": program.name, "seed": seed, "exit": code, "seconds": time.perf_counter() - started}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=BED, capture_output=True, text=True, check=False
    )
    facts["commit"] = commit.stdout.strip()
    (directory / "run.json").write_text(json.dumps(facts))
    truth = bed_truth.truth_of(RESULTS, program.name, seed)
    print(f"{program.name:40}{seed} {facts['seconds']:6.0f} s  exit {code}  {truth.text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["list", "run", "score"])
    parser.add_argument("--half", choices=["tuning", "test", "all"], default="all")
    parser.add_argument("--only", nargs="*", default=[], help="pieces of names")
    parser.add_argument(
        "--seeds", type=int, choices=[1, 2, 3], default=3, help="at most, of programs that are wrong and their twins"
    )
    parser.add_argument("--json", type=Path, help="file for the score of every run")
    parser.add_argument("--competitors", type=Path, help="folder with zen-rl and rlwatch, to compare with")
    options = parser.parse_args()
    programs = chosen(options.half, options.only)
    if options.what == "list":
        for one in programs:
            print(f"{one.half:8}{one.kind:11}{one.name:42}{one.task.env:22}{one.source}")
    elif options.what == "score":
        scores = bed_score.score(RESULTS, programs, options.json)
        if options.competitors:
            bed_competitors.compare(RESULTS, programs, scores, options.competitors)
    else:
        equations.preload()
        importlib.import_module("torch._dynamo")  # else each fork's optimizer takes two seconds to import it

        for program, seed in plan(programs, options.seeds):
            run(program, seed)


if __name__ == "__main__":
    main()
