"""The command line in a separate process, as a terminal starts it."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from backends_read import BACKEND_SECONDS, all_backends_have
from forked import run_python
from waiting import wait_until

from esper_telemetry.sinks.mlflow.database import ensure_database

SINKS = ("--sink", "console", "--sink", "tensorboard", "--sink", "wandb:walker?mode=offline", "--sink", "mlflow")
SLOW = "broken_environments:Slow-v0"
ENDLESS = ("--total-steps", "100000000")
CLOSE_DEADLINE_SECONDS = 50.0
"""On a slow machine MLflow takes half a minute to make its first database."""

CLOSING = ("--close-timeout", f"{CLOSE_DEADLINE_SECONDS:g}")


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


class Finished(NamedTuple):
    run_dir: Path
    command: Ended


def started(run_dir: Path, *options: str, env: str = "CartPole-v1") -> subprocess.Popen[str]:
    """Start `esper-telemetry train` with the console and all three backends, in a new process group."""
    return trained(run_dir, *with_all_sinks(run_dir, env), *options)


def with_all_sinks(run_dir: Path, env: str) -> tuple[str, ...]:
    """Make the run directory, and return options for a run in it with the console and all three backends.

    The run gets a copy of MLflow's empty database: creating its tables takes MLflow three seconds.
    """
    run_dir.mkdir(parents=True)
    shutil.copy(Path(empty_database().name) / "mlflow.db", run_dir)
    return "--env", env, "--run-dir", str(run_dir), *CLOSING, *SINKS


def python_path() -> str:
    """The import path of a child process: this folder, for its environments, and the path of this process."""
    return os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


@cache
def empty_database() -> tempfile.TemporaryDirectory[str]:
    """A directory with MLflow's tables in `mlflow.db`, kept until these tests end."""
    directory = tempfile.TemporaryDirectory()
    ensure_database(Path(directory.name) / "mlflow.db")
    return directory


def trained(run_dir: Path, *options: str) -> subprocess.Popen[str]:
    """Start `esper-telemetry train` with these options in the parent of the run directory, in a new process group."""
    return subprocess.Popen(
        [sys.executable, "-m", "esper_telemetry", "train", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=run_dir.parent,
        env={**os.environ, "PYTHONPATH": python_path()},
        start_new_session=True,
    )


def trained_in_fork(run_dir: Path, *options: str, one_core: bool = False) -> Ended:
    """Run `esper-telemetry train` with these options in the parent of the run directory, to its end."""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    words = ("-m", "esper_telemetry", "train", *options)
    done = run_python(*words, cwd=run_dir.parent, env=environment, one_core=one_core)
    return Ended(done.returncode, done.stdout, WAITING.sub("", done.stderr))


WAITING = re.compile(r"^esper-telemetry: (delivering to |sink \S+ is slow).*\n", re.MULTILINE)
"""Messages on a busy machine: `close` waits for a backend, and a sink does not answer."""


def ended(process: subprocess.Popen[str], seconds: float = 240.0) -> Ended:
    """Wait for the command; kill it and raise TimeoutExpired if it does not end."""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Ended(process.returncode, stdout, WAITING.sub("", stderr))


def in_full_swing(run_dir: Path, process: subprocess.Popen[str]) -> None:
    """Wait until every backend has some records; kill the command if that fails."""
    try:
        wait_until(lambda: process.poll() is not None or all_backends_have(3, run_dir), "three records in every backend", BACKEND_SECONDS)
        assert process.poll() is None, ended(process)
    except BaseException:
        process.kill()
        raise
