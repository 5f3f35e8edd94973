"""Score of another tool, which runs every program and its correct twin.

The tool is called as `CMD program.py OPTIONS`, in the directory of the program. It runs the program in any way, and reports each finding
as a line of its standard output that begins with `finding:`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from .corpus import HERE, PROGRAMS, Program
from .equation_score import short_args
from .running import LONG_LIMIT_SECONDS

PREFIX = "finding:"


def slug(tool: str) -> str:
    """Return a directory name for a command."""
    return re.sub(r"\W+", "-", tool).strip("-")


def commands(programs: Sequence[Program]) -> Iterator[tuple[Program, str, list[str]]]:
    """Yield programs with their text and options, and short runs with their correct twins, except loops with this package's checks."""
    twins = [one.correct() for one in programs if one.kind == "wrong"]
    seen = set()
    for program in (*programs, *twins):
        text, words = program.text(), [*short_args(program), "--seed", "1"]
        if program.trainer != "loop" and (text, *words) not in seen:
            seen.add((text, *words))
            yield program, text, words


def run(tool: str, programs: Sequence[Program], directory: Path, *, long: bool) -> None:
    """Run the tool on each program, and save its findings."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join([str(PROGRAMS), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    for program, text, words in ((one, *one.long_run(1)) for one in programs) if long else commands(programs):
        with tempfile.TemporaryDirectory(prefix="mistakes-") as place:
            script = Path(place, Path(program.base).name)
            script.write_text(text)
            done = subprocess.run(
                [*shlex.split(tool), script.name, *words],
                cwd=place,
                env=os.environ | {"PYTHONPATH": paths, "WRONG_WRAPPER": program.wrapper},
                capture_output=True,
                text=True,
                check=False,
                timeout=LONG_LIMIT_SECONDS,
            )
        lines = [line.removeprefix(PREFIX).strip() for line in done.stdout.splitlines() if line.startswith(PREFIX)]
        result = judge(program, lines)
        facts = {
            "name": program.name,
            "kind": program.kind,
            "exit": done.returncode,
            "result": result,
            "findings": lines,
        }
        (directory / f"{program.name}.json").write_text(json.dumps(facts, indent=1))
        print(f"{program.name:42}{result:22}{'; '.join(lines)}", flush=True)


def judge(program: Program, findings: Sequence[str]) -> str:
    """Return True if the findings name the mistake."""
    if not findings:
        return "silent"
    if program.kind != "wrong":
        return "false alarm"
    right = [one for one in findings if re.search(program.words, one, re.IGNORECASE)]
    return ("right" if len(right) == len(findings) else "right, and others") if right else "wrong name"


def print_score(directory: Path) -> None:
    """Print the table of a tool."""
    results = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    columns = ("right", "right, and others", "wrong name", "silent", "false alarm")
    print(f"| programs | number | {' | '.join(columns)} |\n|{'---|' * (2 + len(columns))}")
    for label, wrong in (("with a mistake", True), ("correct", False)):
        counts = Counter(one["result"] for one in results if (one["kind"] == "wrong") is wrong)
        print(f"| {label} | {counts.total()} | {' | '.join(str(counts[column]) for column in columns)} |")
