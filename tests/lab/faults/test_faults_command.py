"""The command line `python -m esper_telemetry.lab.faults`. Commands that train run in their own processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_python

from esper_telemetry.alarms.thresholds import alarm_rules
from esper_telemetry.cli.arguments import WrongUse
from esper_telemetry.lab.faults import FAULTS
from esper_telemetry.lab.faults.__main__ import run
from esper_telemetry.lab.faults.commands import FAULT_COLUMNS, fault_entries

FIELDS = {"strict_recall", "lenient_recall", "false_alarms_per_100", "median_lag", "root_cause_accuracy", "per_fault"}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "esper_telemetry.lab.faults", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Journals of scoring three faults on one environment, and the output."""
    directory = tmp_path_factory.mktemp("journals")
    trained = command(
        *("score", "--faults", "lr_zero", "h0_zero", "mask_bug", "--envs", "cartpole", "--no-healthy"),
        *("--workers", "1", "--keep", str(directory), "--json", "--no-curve"),
    )
    assert trained.returncode == 0, trained.stderr
    (directory / "printed.json").write_text(trained.stdout)
    return directory


@pytest.mark.slow  # trains for a score
def test_a_score_as_json_has_all_figures(journals: Path) -> None:
    """A learning rate of 0 raises its alarm at once. The other two faults do not apply and are not counted."""
    figures = json.loads((journals / "printed.json").read_text())

    assert set(figures) >= FIELDS
    assert (figures["runs"], figures["strict_recall"], figures["healthy_updates"]) == (1, 1.0, 24)
    assert set(figures["per_fault"]) == {"lr_zero"}
    assert figures["baselines"]["nan_only"]["strict_recall"] == 0
    assert figures["not_applicable"] == [
        "h0_zero does not apply to CartPole-v1: its policy has no memory",
        "mask_bug does not apply to CartPole-v1: it has no action masks",
    ]


@pytest.mark.slow
def test_kept_journals_are_scored_again_without_training(journals: Path) -> None:
    before = json.loads((journals / "printed.json").read_text())

    again = json.loads(command("score", "--from", str(journals), "--workers", "1", "--json", "--split").stdout)

    for name in FIELDS:
        assert again[name] == before[name]
    assert again["halves"]["held_out"]["runs"] == 1
    assert again["halves"]["tuning"]["runs"] == 0
    assert len(again["curve"]) == 9


@pytest.mark.slow
def test_keep_leaves_complete_runs_and_nothing_else(journals: Path) -> None:
    assert sorted(path.name for path in journals.iterdir()) == ["cartpole-lr_zero-0-s3", "printed.json"]
    assert {path.name for path in (journals / "cartpole-lr_zero-0-s3").iterdir()} >= {"course.json", "journal.jsonl"}


def test_faults_are_listed_with_the_alarms_that_name_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "--json"]) == 0

    entries = json.loads(capsys.readouterr().out)

    assert [entry["name"] for entry in entries] == [fault.name for fault in FAULTS]
    assert entries[0]["alarms"] == ["policy/kl_spike", "opt/update_too_large"]


def test_every_alarm_that_a_fault_expects_exists() -> None:
    types = {alarm.type for alarm in alarm_rules()}

    assert {kind for fault in FAULTS for kind in fault.accepts} <= types


def test_the_documentation_lists_all_faults() -> None:
    page = (Path(__file__).parents[3] / "docs" / "faults.md").read_text(encoding="utf-8")

    rows = [f"| {' | '.join(FAULT_COLUMNS)} |", "|---" * len(FAULT_COLUMNS) + "|"]
    for entry in fault_entries():
        low, high = entry["doses"]
        dose = f"{entry['dose']:g} ({low:g} to {high:g}, as `{entry['family']}`)" if low < high else ""
        alarms = ", ".join(f"`{alarm}`" for alarm in entry["alarms"])
        needs = "; ".join(entry["needs"])
        rows.append(f"| `{entry['name']}` | {entry['what']} | {dose} | {needs} | {alarms} | {entry['bound']} |")

    assert "\n".join(rows) + "\n" in page


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["score", "--faults", "lr_x1000"], "there is no fault 'lr_x1000'; did you mean lr_x100, lr_x10"),
        (["score", "--faults", "lr=x"], "a fault must be a name or name=dose, got 'lr=x'"),
        (["score", "--faults", "lr=1"], "the dose of lr_x10 must be from 2 to 10000, got 1"),
        (["score", "--workers", "0"], "workers must be at least 1, got 0"),
        (["score", "--seeds", "-1"], "seeds must be 0 or more, and at least one, got (-1,)"),
        (["score", "--from", "nowhere"], "nowhere does not contain runs of the fault bench"),
        (["score", "--from", "a", "--keep", "b"], "--from scores kept journals and --keep keeps trained ones: give one of them"),
        (["score", "--doses", "3"], "--doses with values needs --faults, because doses differ between faults"),
        (["score", "--doses", "--faults", "h0_zero"], "--doses without values supports lr, forget, reward, got h0_zero"),
        (["demo", "--fault", "h0_zero", "--policy", "mlp", "--no-mask-velocity"], "h0_zero does not apply to CartPole-v1"),
    ],
)
def test_wrong_use_is_one_sentence_and_leaves_nothing(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(WrongUse) as mistake:
        run(arguments)

    assert sentence in str(mistake.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.system
def test_wrong_use_ends_with_two() -> None:
    done = run_python("-m", "esper_telemetry.lab.faults", "score", "--envs", "NoSuchTask-v0")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("faults: ")
    assert done.stderr.count("\n") == 1
