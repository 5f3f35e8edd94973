"""`esper-telemetry diagnose`: the same detectors applied to a journal."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from healthy_run import FACTS, multiplied, run, set_to
from run_cli import run_cli

from esper_telemetry.core.record import Record, RunInfo, RunStatus
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.lines import JournalEvent, encode_end, encode_event, encode_record, encode_run

SPOILED = multiplied({"loss/value": 1e4, "grad/global/norm_preclip_max": 1e3})


def learning_run(updates: int) -> list[Record]:
    """Records of a healthy run whose return rises by a tenth in every update."""
    return run(updates, set_to(dict.fromkeys(("episode/return_mean", "episode/return_mean_100"), lambda ago: 5 + 0.5 * ago)), since=1)


def journal(
    directory: Path, records: list[Record], *, status: RunStatus | None = RunStatus.FINISHED, announced: int = 0, **facts: Any
) -> Path:
    """A run directory with these records; `announced` is the record after which a deliberate change was announced."""
    path = directory / "run"
    book = Journal.create(path)
    book.write(encode_run(RunInfo("r1", "run", path, 1e9, facts={**FACTS, **facts})))
    for entry in records:
        book.write(encode_record(entry))
        if entry.seq == announced:
            book.write(encode_event(JournalEvent("intervention", {}, seq=entry.seq, axes=entry.axes)))
    if status is not None:
        book.write(encode_end(status, seq=len(records)))
    book.close()
    return path


def test_it_names_the_incident_since_when_and_what_to_try(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = journal(tmp_path, run(40, SPOILED))

    code, out, _ = run_cli(["diagnose", str(path)], capsys)

    assert code == 0
    assert "incident 1, update 30: value/loss_jump" in out
    assert "Since update 30, the critic's loss has jumped to" in " ".join(out.split())
    assert "grad/explode (still active)" in out


def test_a_healthy_run_says_what_it_does_and_what_was_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(["diagnose", str(journal(tmp_path, learning_run(60)))], capsys)

    assert code == 0
    first, second = out.splitlines()[:2]
    assert first == "run: 60 updates, finished"
    assert re.fullmatch(r"Learning: return [\d.]+ -> [\d.]+ in 60 updates; \d+ checks passed\.", second)
    assert "incident" not in out and "Unexplained" not in out


def test_a_run_that_settles_far_below_the_threshold_is_unexplained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    returns: dict[str, Any] = {"episode/return_mean": lambda ago: min(200.0, 10.0 + 6.4 * ago), "episode/return_mean_100": None}
    path = journal(tmp_path, run(60, set_to(returns), since=1), reward_threshold=900.0)

    code, text, _ = run_cli(["diagnose", str(path), "--again"], capsys)

    assert (
        code == 0 and "Converged: return" in text and "Unexplained: the run has settled far below the threshold" in " ".join(text.split())
    )


def test_a_flat_run_without_an_alarm_is_unexplained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No rule judges the share of dead units; the report names a value that healthy runs never have."""
    path = journal(tmp_path, run(60, set_to({"repr/dead_frac": 0.9}), since=1))

    text = run_cli(["diagnose", str(path)], capsys)[1]
    data: dict[str, Any] = json.loads(run_cli(["diagnose", str(path), "--json"], capsys)[1])

    assert "Flat: return" in text and "Unexplained: the run is flat, and no alarm explains it." in text
    assert data["unexplained"] and data["outcome"]["outcome"] == "flat"
    assert [entry["is_far"] for entry in data["unusual"] if entry["key"] == "repr/dead_frac"] == [True]
    assert "repr/dead_frac: 0.9 (" in text and "critical: > 0.7" in text


@pytest.mark.system
def test_remarks_come_first_in_what_may_explain_a_flat_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Many correct runs have a constant reward, so the remark appears only if the return does not rise."""
    equal = set_to({"reward/std": 0.0, "reward/mean": -1.0, "reward/absmax": 1.0})
    entries = run(60, equal, since=1)
    flat = journal(tmp_path / "flat", [replace(one, axes=replace(one.axes, env_step=1024 * one.seq)) for one in entries])
    killed = journal(tmp_path / "killed", entries, status=RunStatus.KILLED)

    text = " ".join(run_cli(["diagnose", str(flat)], capsys)[1].split())
    data: dict[str, Any] = json.loads(run_cli(["diagnose", str(flat), "--json"], capsys)[1])
    by_hand = run_cli(["diagnose", str(killed)], capsys)[1]

    assert text.index("What may explain it:") < text.index("had the same reward, -1") < text.index("Most unusual")
    assert text.count("had the same reward") == 1
    assert [remark["name"] for remark in data["remarks"]] == ["equal rewards"]
    assert "Unexplained" not in by_hand and "What may explain it" not in by_hand


def test_an_alarm_about_an_effect_explains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A ratio collapse describes an effect in a flat run; a KL spike may be its cause."""
    effect = run_cli(["diagnose", str(journal(tmp_path / "a", run(60, set_to({"policy/ratio/p01": 0.01}))))], capsys)[1]
    cause = run_cli(["diagnose", str(journal(tmp_path / "b", run(60, set_to({"policy/kl": 2.0}))))], capsys)[1]

    assert "policy/ratio_collapse (still active)" in effect
    assert "Unexplained: the run is flat, and its alarms show how but not why." in " ".join(effect.split())
    assert "policy/kl_spike (still active)" in cause and "Unexplained" not in cause


def test_a_run_that_goes_on_or_was_killed_is_diagnosed_as_far_as_it_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = journal(tmp_path, run(40, SPOILED), status=None)
    with (path / "journal.jsonl").open("ab") as file:
        file.write(b'{"kind":"record","seq":41,"axes":{"upd')

    code, out, _ = run_cli(["diagnose", str(path)], capsys)

    assert code == 0
    assert "40 updates, not ended" in out and "value/loss_jump" in out


def test_json_has_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run_cli(["diagnose", str(journal(tmp_path, run(40, SPOILED))), "--json"], capsys)
    data: dict[str, Any] = json.loads(out)

    (incident,) = data["incidents"]
    assert (incident["cause"], incident["since"]) == ("value/loss_jump", 30)
    assert incident["standing"] == {"value/loss_jump": None, "grad/explode": None}
    assert incident["alarms"][0]["evidence"]["values"]["loss/value"] > 1000
    assert data["unanswered"] == {}


@pytest.mark.parametrize(("announced", "off"), [(0, ("value/loss_jump", "grad/explode")), (29, ())])
def test_alarms_that_are_off_or_announced_are_not_raised(
    announced: int, off: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = journal(tmp_path, run(60, SPOILED), announced=announced)

    out = run_cli(["diagnose", path, *(word for alarm in off for word in ("--threshold", f"{alarm}=off"))], capsys).out

    assert "checks passed." in out and "incident" not in out


def test_an_empty_journal_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(["diagnose", str(journal(tmp_path, []))], capsys)

    assert code == 0
    assert "The journal has no records yet." in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "there is no run directory nowhere"),
        (["HERE", "--threshold", "kl=1"], "unknown threshold 'kl'"),
    ],
)
def test_wrong_use_is_one_sentence(arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(journal(tmp_path, run(3)))

    code, out, err = run_cli(["diagnose", *[path if text == "HERE" else text for text in arguments]], capsys)

    assert (code, out) == (2, "")
    assert err.startswith("esper-telemetry: ") and sentence in err and err.count("\n") == 1
