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
    ("address", "content", "sentence"),
    [
        ("log:trainer_state.json", DEEP, "found no line with metrics in trainer_state.json"),
        ("log:trainer_state.json", '{"log_history": ' + DEEP + "}", "found no line with metrics in trainer_state.json"),
        ("csv:a.csv", TABLE + '"' + "x" * 200_000 + '"', "a.csv is not a table: field larger than field limit"),
        ("csv:fifo", "", "fifo is not a file"),
        ("log:fifo", "", "fifo is not a file"),
        ("tensorboard:.", "", "events.out.tfevents.1.fifo is not a regular file"),
    ],
)
def test_a_log_that_cannot_be_read_is_a_sentence(
    address: str, content: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for fifo in ("fifo", "events.out.tfevents.1.fifo"):
        os.mkfifo(fifo)
    Path(address.partition(":")[2]).write_text(content) if content else None

    code, _, error = run_cli(["diagnose", "--from", address], capsys)

    assert code == 2 and sentence in error


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
