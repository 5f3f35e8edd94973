"""Runs of programs, each in its own process with one torch thread.

A long run keeps its journal, its true returns and `run.json`. A program runs with a third seed only if two do not agree on whether it
learns.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .corpus import HERE, PROGRAMS, Program
from .truth import truth_of

TIME_LIMIT_SECONDS = 300
LONG_LIMIT_SECONDS = 900


def forked(command: Sequence[str], directory: Path, limit_seconds: float = TIME_LIMIT_SECONDS) -> int:
    """Run a command of `esper-telemetry`, or a script, in a fork of this process, which has imported torch; return the exit code.

    The fork has one core, so it makes the records itself, instead of a worker process that would import torch again.
    """
    pid = os.fork()
    if pid:
        deadline = time.monotonic() + limit_seconds
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return -signal.SIGKILL
    code = 1
    atexit._clear()  # exit functions of this process would remove the directory
    try:
        for number, stream in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(directory / stream, os.O_WRONLY | os.O_CREAT), number)
        os.chdir(directory)
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[os.getpid() % len(os.sched_getaffinity(0))]})
        sys.path[:0] = [str(directory), str(PROGRAMS)]
        if command[0] == "run":
            from esper_telemetry.cli.main import main as esper_telemetry

            esper_telemetry(list(command))
        else:
            sys.argv = list(command)
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else bool(end.code)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def preload() -> None:
    """Import the programs' modules, and torch's compiler, whose import takes half the time of a program."""
    import sb3_contrib
    import stable_baselines3
    import torch
    import torch._dynamo

    import esper_telemetry.adapters.sb3
    import esper_telemetry.adapters.script.listener
    import esper_telemetry.cli.main
    import esper_telemetry.lab.faults.runs
    import esper_telemetry.pipeline.run_recorder

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    del sb3_contrib, stable_baselines3, esper_telemetry


def run_long(results: Path, programs: Iterable[Program], seeds: int) -> None:
    """Run programs on their tasks, except for finished runs."""
    for program, seed in plan(results, list(programs), seeds):
        directory = results / program.name / str(seed)
        if (directory / "run.json").exists():
            continue
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        text, words = program.long_run(seed)
        (directory / "program.py").write_text(text)
        run_dir = ["--run-dir", str(directory / "run")]
        own = program.base == "library_program.py"
        command = ["program.py", *words, *run_dir] if own else ["run", *run_dir, "program.py", *words]
        os.environ |= {"TRUE_RETURNS": str(directory / "returns.txt"), "WRONG_WRAPPER": program.wrapper}
        started = time.perf_counter()
        code = forked(command, directory, LONG_LIMIT_SECONDS)
        seconds = time.perf_counter() - started
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
        facts = {"program": program.name, "seed": seed, "exit": code, "seconds": seconds, "commit": git.stdout.strip()}
        (directory / "run.json").write_text(json.dumps(facts))
        truth = truth_of(results, program.name, seed)
        print(f"{program.name:40}{seed} {seconds:6.0f} s  exit {code}  {truth.text}", flush=True)


def plan(results: Path, programs: list[Program], seeds: int) -> Iterator[tuple[Program, int]]:
    """Yield the runs: every program once, the wrong ones and their twins twice, and a third time if two runs do not agree.

    Programs that may be harmful by their first seed, and their twins, come first.
    """
    paired = [one for one in programs if one.kind in ("wrong", "correct")]
    order = {"correct": 0, "wrong": 1, "published": 2, "variant": 3}
    for program in sorted(programs, key=lambda one: order[one.kind]):
        yield program, 1
    candidates = [one for one in paired if one.kind == "wrong" and not truth_of(results, one.name, 1).good]
    first = {one.name for one in candidates} | {one.twin for one in candidates}
    for seed in range(2, seeds + 1):
        for program in sorted(paired, key=lambda one: (one.name not in first, order[one.kind])):
            if seed < 3 or len({truth_of(results, program.name, one).good for one in (1, 2)}) > 1:
                yield program, seed
