"""Telemetry never writes, sends or prints a secret: in a run with all backends, in commands on it, and in a script under `run`."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from forked import run_python
from planted_secrets import COMMAND, ENVIRONMENT, SECRETS

from esper_telemetry.core.backends import wandb_records

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
SCRIPT = HERE.parent / "script" / "scripts" / "categorical.py"


def leaks(text: bytes) -> list[str]:
    """Return the secrets of which a text contains either half."""
    return [secret for secret in SECRETS if secret[:10].encode() in text or secret[-10:].encode() in text]


def contents(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of every file, joined with the contents that databases and W&B's files store in pieces."""
    for file in directory.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            if file.suffix == ".wandb":
                content += b"".join(wandb_records(content))
            elif file.suffix == ".db":
                with closing(sqlite3.connect(file)) as database:
                    content += "\n".join(database.iterdump()).encode()
            yield file.name, content


def assert_clean(directory: Path, **outputs: str) -> dict[str, bytes]:
    """Check all files and printed outputs for secrets; return the contents of the files by name."""
    files = dict(contents(directory))
    found = {name: leaks(text) for name, text in [*contents(directory), *((n, t.encode()) for n, t in outputs.items())]}
    assert {name: secrets for name, secrets in found.items() if secrets} == {}
    return files


def train(run_dir: Path, *, worker: bool) -> str:
    program = run_python(
        *("-c", f"from planted_secrets import *; main(Path({str(run_dir)!r}), worker={worker})"),
        env={**os.environ, "PYTHONPATH": str(HERE)},
        one_core=not worker,
    )
    assert program.returncode == 0, program.stderr
    return program.stdout + program.stderr


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run recorded in its own process, without a worker; its output is in `printed.txt` next to it."""
    directory = tmp_path_factory.mktemp("in_process")
    (directory / "printed.txt").write_text(train(directory / "run", worker=False))
    return directory / "run"


def assert_masked(files: dict[str, bytes]) -> None:
    """Check that the files of all backends exist and contain the texts around the secrets."""
    assert {"journal.jsonl", "config.json", "status.json", "sinks.log", "report.html", "mlflow.db", "metrics.prom"} <= files.keys()
    assert any(name.endswith(".wandb") for name in files)
    assert any(name.startswith("events.out") for name in files)
    assert b"the store says 401 (Cookie: ***)" in files["journal.jsonl"]
    assert b"refused: api_key=***; ***; https://***@host/ Incorrect API key provided: ***" in files["journal.jsonl"]
    assert b"401 for ***, bearer ***, ***" in files["status.json"]
    assert b"password=*** and ***" in files["sinks.log"]


def test_no_secret_leaves_a_run(run_dir: Path) -> None:
    """Every input contains a secret, every bundled backend is real, and two of them fail."""
    assert len(SECRETS) > 40
    assert_masked(assert_clean(run_dir.parent))


def test_no_secret_leaves_a_run_with_a_worker(tmp_path: Path) -> None:
    printed = train(tmp_path / "run", worker=True)

    files = assert_clean(tmp_path, printed=printed)
    assert_masked(files)
    assert "summary.log" in files


def test_commands_print_no_secret_of_a_run(run_dir: Path, tmp_path: Path) -> None:
    commands = {
        "diagnose": ("diagnose", run_dir),
        "json": ("diagnose", run_dir, "--json"),
        "report": ("report", run_dir, "-o", tmp_path / "page.html"),
        "markdown": ("report", run_dir, "--format", "markdown"),
        "compare": ("compare", run_dir, run_dir, "-o", tmp_path / "compare.html"),
        "doctor": ("doctor", run_dir),
        "replay": ("replay", run_dir, "--to", f"tensorboard:{tmp_path / 'more'}"),
        "wrong": ("replay", run_dir, "--to", f"mlflow:gopher://me:{SECRETS[0]}@host"),
    }

    printed = {}
    for name, words in commands.items():
        done = run_python("-m", "esper_telemetry", *words)
        assert done.returncode in (0, 1, 2), done.stderr
        printed[name] = done.stdout + done.stderr

    assert_clean(tmp_path, **printed)
    assert "mine/refused" in printed["diagnose"]
    assert "gopher://me:***@host" in printed["wrong"]


def test_the_address_of_logs_is_masked(tmp_path: Path) -> None:
    logs, page = tmp_path / f"token={SECRETS[0]}" / "progress.csv", tmp_path / "page.html"
    logs.parent.mkdir()
    logs.write_text("time/total_timesteps,train/approx_kl,rollout/ep_rew_mean\n1,0.1,2\n2,0.2,3\n")

    done = run_python("-m", "esper_telemetry", "report", "--from", f"csv:{logs}", "-o", page)

    assert done.returncode == 0, done.stderr
    assert_clean(tmp_path, printed=done.stdout + done.stderr)
    assert f"read from csv:{tmp_path}/token=***" in page.read_text()


def test_a_script_under_run_loses_no_secret(tmp_path: Path) -> None:
    """A script may print and raise anything; telemetry's lines and files must not contain secrets."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.read_text().replace('"out of luck"', "sys.argv[1] + ' and ' + os.environ['PGPASSWORD']"))
    words = [f"--api_key={COMMAND[1]}", "--end=crashed"]

    done = run_python(
        *("-m", "esper_telemetry", "run", "--run-dir", "run", "--sink", "tensorboard", "script.py", *words),
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
    )

    lines = [line for line in done.stderr.splitlines() if line.startswith("esper-telemetry: ")]
    files = assert_clean(tmp_path, printed="\n".join(lines))
    assert COMMAND[1] in done.stderr
    assert any("--api_key=*** and ***" in line for line in lines)
    assert b'"--api_key=***"' in files["config.json"]
