"""`doctor` finds the damage in a real backend, prints the command that repairs it, and then reports no problem."""

import json
import os
import shlex
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from backends_read import mlflow_run
from command_line import Finished
from run_cli import run_cli

from esper_telemetry import read_run
from esper_telemetry.cli.main import main

pytestmark = pytest.mark.system


@pytest.fixture
def run_dir(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_SILENT", "true")
    return Path(shutil.copytree(finished.run_dir, tmp_path / "run"))


def examined(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    code, out, _ = run_cli(["doctor", run_dir, "--json"], capfd)
    return code, {sink["name"]: sink for sink in json.loads(out)["sinks"]}


def carried_out(command: str) -> int:
    program, *arguments = shlex.split(command)
    assert program == "esper-telemetry"
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(str(stop.value.code))


def event_file(run_dir: Path) -> Path:
    (file,) = (run_dir / "tensorboard").glob("*tfevents*")
    return file


def cut_events(run_dir: Path) -> None:
    """Like a machine that lost power."""
    os.truncate(event_file(run_dir), event_file(run_dir).stat().st_size * 2 // 3)


def delete_events(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "tensorboard")


def cut_wandb(run_dir: Path) -> None:
    (file,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    os.truncate(file, file.stat().st_size * 2 // 3)


def delete_wandb(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "wandb")


def delete_metrics(run_dir: Path) -> None:
    """Two updates in the middle, and one key everywhere."""
    second, third = (record.axes.env_step for record in read_run(run_dir).records[1:3])
    change(run_dir, f"DELETE FROM metrics WHERE step IN ({second}, {third}) OR key = 'policy/kl'")


def change(run_dir: Path, statement: str) -> None:
    with closing(sqlite3.connect(run_dir / "mlflow.db")) as database:
        database.execute(statement)
        database.commit()


def test_a_run_that_was_delivered_is_whole(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, sinks = examined(run_dir, capfd)

    assert code == 0
    assert sorted(sinks) == ["console", "mlflow", "tensorboard", "wandb:walker"]
    assert {name: sink["equal"] for name, sink in sinks.items() if name != "console"} == dict.fromkeys(
        ("mlflow", "tensorboard", "wandb:walker"), True
    )
    updates = len(read_run(run_dir).records)
    assert all(sinks[name]["updates"] == updates for name in ("mlflow", "tensorboard", "wandb:walker"))
    assert all(sinks[name]["numbers"] > 100 * updates for name in ("mlflow", "tensorboard", "wandb:walker"))


@pytest.mark.parametrize(
    ("sink", "damage"),
    [
        ("tensorboard", cut_events),
        ("tensorboard", delete_events),
        ("wandb:walker", cut_wandb),
        ("wandb:walker", delete_wandb),
        ("mlflow", delete_metrics),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_damaged_is_found_and_the_command_that_is_named_repairs_it(
    sink: str, damage: Callable[[Path], None], run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(run_dir)

    code, report = examined(run_dir, capfd)
    assert code == 1
    assert [name for name, entry in report.items() if entry["equal"] is False] == [sink]
    assert report[sink]["missing"]
    assert carried_out(report[sink]["command"]) == 0

    code, repaired = examined(run_dir, capfd)
    assert code == 0
    assert repaired[sink]["equal"]
    assert repaired[sink]["repeated"] == {}
    assert carried_out(report[sink]["command"]) == 0  # repeating the command changes nothing
    assert examined(run_dir, capfd)[0] == 0


def test_a_number_that_is_not_the_journals_is_found(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change(run_dir, "UPDATE metrics SET value = value + 1 WHERE key = 'policy/kl'")

    code, report = examined(run_dir, capfd)

    assert code == 1
    assert report["mlflow"]["different"] == {"policy/kl": len(read_run(run_dir).records)}
    assert report["mlflow"]["command"] == ""


def test_a_run_whose_trainer_is_gone_is_ended_here_and_in_mlflow(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As after a power failure: the journal lacks its end line, and MLflow lists the run as running."""
    journal = run_dir / "journal.jsonl"
    *lines, end = journal.read_bytes().splitlines(keepends=True)
    assert b'"kind":"end"' in end
    journal.write_bytes(b"".join(lines))
    change(run_dir, "UPDATE runs SET status = 'RUNNING', end_time = NULL")
    assert examined(run_dir, capfd)[0] == 0
    assert read_run(run_dir).status is None  # its last line may be recent

    long_ago = time.time() - 3600
    os.utime(journal, (long_ago, long_ago))
    code, report = examined(run_dir, capfd)

    assert code == 0
    assert read_run(run_dir).status == "killed"
    assert mlflow_run(run_dir).info.status == "KILLED"
    assert report["mlflow"]["note"] == "it was left open, and has been closed now"


def test_a_page_for_people_names_what_is_missing_and_the_command(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    delete_events(run_dir)
    updates = len(read_run(run_dir).records)

    head, *lines = run_cli(["doctor", run_dir], capfd).out.splitlines()

    assert head == f"{run_dir}: {updates} records, the run ended as finished"
    (line,) = [line for line in lines if line.startswith("tensorboard")]
    assert f"numbers are missing, in updates 1-{updates}; repair it with: " in line
    assert line.endswith(f"esper-telemetry replay {run_dir} --to tensorboard --missing")
