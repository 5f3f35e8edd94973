"""A plugin of pytest: `pytest --esper-check SCRIPT` checks the equations of a script, and `assert_healthy_run` judges a run.

Both start the commands `check` and `diagnose` in processes of their own, so that pytest itself loads nothing of this package.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--esper-check`."""
    parser.getgroup("esper-telemetry").addoption(
        "--esper-check",
        action="append",
        default=[],
        metavar="SCRIPT",
        help="also compare a PPO script with the equations of PPO; with options and arguments as `esper-telemetry check` takes them: "
        '--esper-check "--updates 5 ppo.py --seed 1" (repeatable)',
    )


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for each script."""
    items.extend(
        ScriptCheck.from_parent(session, name=f"esper-check {words}", words=shlex.split(words))
        for words in config.getoption("--esper-check")
    )


class ScriptDiffers(Exception):  # noqa: N818 - it is the result of a check
    """The equations that differ, and what the script has printed."""


class ScriptCheck(pytest.Item):
    """The test that a script computes the equations of PPO; its run is kept in `runs/`."""

    def __init__(self, *, words: Iterable[str], **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]  # pytest passes what its own class takes
        self._words = [*words]

    def runtest(self) -> None:
        """Run the command; raises ScriptDiffers if an equation differs, the script fails, or nothing could be checked."""
        finished = command("check", "--json", *self._words)
        if finished.returncode:
            printed = finished.stderr.strip()
            found, lines = [*mistakes(finished.stdout)], printed.splitlines()
            found = found or (lines[-1:] if len(lines) > 1 else [])  # the last line of a traceback
            raise ScriptDiffers("\n".join([*found, "", printed]).strip())

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        """Return the equations that differ, the first one in the first line, which pytest's summary shows."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return the name of the test."""
        return self.config.rootpath.name, None, self.name


def mistakes(tables: str) -> Iterator[str]:
    """Yield lines on each equation that differs in the JSON of `check`, then on each one that was not traced."""
    values = json.loads(tables) if tables.strip() else {}
    rows = [row for run in values.get("runs", [values]) for row in run.get("equations", ())]
    for row in (row for row in rows if row["state"] == "differs"):
        differs = "differ from their reference equation, and no known mistake explains it"
        differs = f"have been {row['over_run']}" if row["over_run"] else differs
        equal = " or ".join(one["text"] for one in row["explanations"])
        yield f"{row['quantity']} {f'equal {equal}' if equal else differs}"
        yield f"  reference: {row['reference']}"
        yield from [f"  computed in {row['place']}"] if row["place"] else []
        yield from [f"  try: {row['advice']}"] if row["advice"] else []
    yield from (f"{row['quantity']} were not traced: {row['reason']}" for row in rows if row["state"] == "untraced")


AssertHealthyRun = Callable[..., None]


@pytest.fixture
def assert_healthy_run() -> AssertHealthyRun:
    """Return a function that fails a test with the diagnosis of an unhealthy run.

    `assert_healthy_run(run, fail_on="warn")` takes a run directory. By default a run must not have failed, be flat or decline, and must not
    have raised alarms of level warn or above; `fail_on` is that of `esper-telemetry diagnose`.
    """

    def check(run: str | os.PathLike[str], *, fail_on: Literal["warn", "critical", "flat"] = "warn") -> None:
        finished = command("diagnose", os.fspath(run), "--fail-on", fail_on)
        if finished.returncode:
            pytest.fail(finished.stdout or finished.stderr, pytrace=False)

    return check


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of this package and return its output."""
    program = [sys.executable, "-m", "esper_telemetry", *words]
    return subprocess.run(program, capture_output=True, text=True, check=False)
