"""Damaged or malicious logs: everything readable is read, and the rest is reported in one sentence."""

import json
import os
from pathlib import Path

import pytest
from run_cli import run_cli

from esper_telemetry.importers import read_foreign, read_source
from esper_telemetry.importers.records import parse_number
from esper_telemetry.importers.text_logs import read_text

TABLE = "time/total_timesteps,train/value_loss,rollout/ep_rew_mean\n256,0.5,1\n512,0.25,2\n768,0.125,3\n"
ROWS = [{"step": step, "train/ppo_clip_ratio": 0.1, "train/reward": step} for step in (1, 2, 3)]
LINES = "\n".join(map(json.dumps, ROWS))
DEEP = "[" * 100_000


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_mark_of_the_encoding_costs_no_column(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(TABLE, encoding=encoding)
    (tmp_path / "a.jsonl").write_text(LINES, encoding=encoding)

    assert [point.x for point in read_text(tmp_path / "a.csv")[0].points["train/value_loss"]] == [256, 512, 768]
    assert [point.x for point in read_text(tmp_path / "a.jsonl")[0].points["train/reward"]] == [1, 2, 3]


@pytest.mark.parametrize(
    "line",
    [
        '{"a": ' + DEEP,
        "{'a': " + "(" * 5000 + "}",
        "{'a': " + "-" * 100_000 + "1}",
        '{"step": ' + "9" * 5000 + "}",
        "===== Step " + "9" * 5000 + "/9 =====",
        "{" + '"a": 1,' * 200_000 + "}",
        "\0\ufffd",
    ],
    ids=range(7),
)
def test_a_line_that_is_no_row_is_passed_over(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(f"{line}\n{LINES}\n{line}\n")

    assert [point.value for point in read_text(tmp_path / "a.log")[0].points["train/reward"]] == [1, 2, 3]


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("runs/a", "--from takes a file, a folder, tensorboard:..., wandb:..., csv:..., log:..., mlflow:..., got 'runs/a'"),
        ("tensorboard:", "--from tensorboard: needs what to read, such as tensorboard:runs/PPO_1"),
        ("tensorboard:nowhere", "nowhere does not exist"),
        ("tensorboard:folder", "found no event files of TensorBoard in folder"),
        ("tensorboard:.", "events.out.tfevents.1.fifo is not a regular file"),
        ("csv:fifo", "fifo is not a file"),
        ("csv:empty.csv", "found no rows in empty.csv"),
        ("csv:long.csv", "long.csv is not a table: field larger than field limit"),
        ("csv:other.csv", "these are the columns of no known trainer: accuracy; name what they hold: esper-telemetry diagnose"),
        ("log:fifo", "fifo is not a file"),
        ("log:empty.log", "found no line with metrics in empty.log"),
        ("log:a/trainer_state.json", "found no line with metrics in a/trainer_state.json"),
        ("log:b/trainer_state.json", "found no line with metrics in b/trainer_state.json"),
        ("wandb:nothing", "wandb: needs a folder of a run, or entity/project/run, got 'nothing'"),
        ("mlflow:sqlite:///x.db?run=a", "x.db does not exist"),
        ("mlflow:?run=a", " does not exist"),
        ("mlflow:sqlite:///other.csv?run=a", "cannot be read: DatabaseError: (sqlite3.DatabaseError) file is not"),
        ("mlflow:folder?run=a", "MLflow at folder cannot be read: MlflowException: "),
        ("mlflow:sqlite:///x.db", "mlflow: needs the run, such as mlflow:sqlite:///mlflow.db?run=0123456789abcdef"),
    ],
)
def test_a_log_that_cannot_be_read_is_a_sentence(
    address: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 2, and no files are written."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "folder"):
        Path(folder).mkdir()
    for fifo in ("fifo", "events.out.tfevents.1.fifo"):
        os.mkfifo(fifo)
    contents = {"empty.csv": "", "empty.log": "", "other.csv": "epoch,accuracy\n1,0.5\n", "long.csv": f'{TABLE}"{"x" * 200_000}"'}
    contents |= {"a/trainer_state.json": DEEP, "b/trainer_state.json": f'{{"log_history": {DEEP}}}'}
    for name, content in contents.items():
        Path(name).write_text(content)
    before = sorted(tmp_path.rglob("*"))

    code, _, error = run_cli(["diagnose", "--from", address], capsys)

    assert code == 2
    assert error.startswith("esper-telemetry: ") and sentence in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_names_of_tags_are_printable(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J.csv"
    path.write_text(TABLE.replace("rollout/ep_rew_mean", "a\x1b[31m\x07"))

    run = read_source(f"csv:{path}")

    assert (run.name, sorted(run.points)) == ("a", ["a", "train/value_loss"])


def test_numbers_beyond_those_of_the_machine_are_not_finite(tmp_path: Path) -> None:
    """Each key has 1e308, -1e308 and a number of 400 digits, which is not finite. SB3 logs losses one update late. No sum overflows."""
    rows = [f"{256 * place},{value},{value}\n" for place, value in enumerate(("1e308", "-1e308", "9" * 400), 1)]
    (tmp_path / "a.csv").write_text(TABLE.partition("\n")[0] + "\n" + "".join(rows))

    records = read_foreign(read_source(f"csv:{tmp_path / 'a.csv'}")).records

    assert parse_number(-(10**400)) == -float("inf")
    assert [record.values["numerics/nonfinite"] for record in records] == [0.0, 1.0, 1.0]
