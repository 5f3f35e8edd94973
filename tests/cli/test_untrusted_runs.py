"""Run directories from somebody else cannot control the terminal, touch files outside or cause connections."""

import io
import json
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from healthy_run import run
from made_runs import hostile_run
from run_cli import run_cli

from esper_telemetry import Telemetry
from esper_telemetry.core.record import RunInfo, RunStatus
from esper_telemetry.delivery.catch_up import doctor
from esper_telemetry.journal.file import JOURNAL_NAME
from esper_telemetry.journal.lines import encode_end, encode_record, encode_run, to_json
from esper_telemetry.pipeline.run_recorder import lease_new_run

UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.mark.parametrize(
    "words",
    [
        ["diagnose"],
        ["diagnose", "--json"],
        ["report", "--format", "markdown"],
        ["doctor"],
        ["check"],
        ["compare", "other"],
        ["replay", "--to", "console"],
        ["compress"],
    ],
    ids=" ".join,
)
def test_no_command_writes_escape_sequences_or_stops_at_a_malformed_line(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile_run(tmp_path / "other")

    code, out, err = run_cli([words[0], hostile_run(tmp_path / "run"), *words[1:]], capfd)

    assert code in (0, 1, 2 if words == ["check"] else 0)  # `check` finds nothing to compare
    assert "Traceback" not in err
    assert UNPRINTABLE.search(out + err) is None


def test_diagnose_names_each_damaged_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = hostile_run(tmp_path / "run")

    _, out, _ = run_cli(["diagnose", run_dir], capfd)

    assert f"4 lines of {run_dir / JOURNAL_NAME} are damaged (1: num_envs of facts is text" in " ".join(out.split())
    assert "2: JSON nested more than 64 levels deep; 3: policy/kl of values is null" in " ".join(out.split())
    assert "[/red][link=file:///x]" in out


@pytest.mark.system
def test_a_report_of_hostile_texts_has_no_element_of_theirs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    runs = [hostile_run(tmp_path / name) for name in ("a", "b")]
    for run_dir in runs:
        journal = run_dir / JOURNAL_NAME
        journal.write_text(journal.read_text(errors="replace").replace("[/red]", "</script><script>alert(1)</script>"))

    assert run_cli(["report", *runs, "-o", tmp_path / "page.html"], capfd)[0] == 0
    assert run_cli(["compare", *runs, "-o", tmp_path / "comparison.html"], capfd)[0] == 0

    for name in ("page.html", "comparison.html"):
        page = (tmp_path / name).read_text()
        assert "alert(1)" in page
        assert "<script>alert(1)" not in page


@pytest.mark.parametrize("words", [["diagnose"], ["report"], ["check"], ["compare", "other"]], ids=" ".join)
def test_the_largest_numbers_can_be_judged_and_drawn(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of twenty records alternate between 1.7e308 and -1.7e308."""
    monkeypatch.chdir(tmp_path)
    for name in ("run", "other"):
        records = [replace(record, values={key: (-1) ** place * 1.7e308 for place, key in enumerate(record.values)}) for record in run(20)]
        lines = [encode_run(RunInfo("r1", name, None, 1e9)), *map(encode_record, records)]
        Path(name).mkdir()
        (Path(name) / JOURNAL_NAME).write_bytes(b"".join(map(to_json, lines)))

    code, _, err = run_cli([words[0], "run", *words[1:]], capfd)

    assert (code in (0, 1, 2), "Traceback" in err) == (True, False)


@pytest.mark.parametrize("name", ["config.json", "cursors.json", "status.json", "trainer.lock"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "deep"])
def test_other_files_of_the_directory_may_be_anything(kind: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = hostile_run(tmp_path / "run")
    path = run_dir / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("[" * 100_000)

    for words in (["doctor", run_dir], ["report", run_dir, "--format", "markdown"]):
        code, _, err = run_cli(words, capfd)
        assert code in (0, 1)
        assert "Traceback" not in err


@pytest.mark.system
def test_links_in_a_prepared_directory_are_replaced_and_not_followed(tmp_path: Path) -> None:
    """A new run there writes its own files, and the links' target stays unchanged."""
    names = ("config.json", "status.json", "cursors.json", "trainer.lock", "sinks.lock", "writer.lock", "sinks.log")
    outside = tmp_path / "outside"
    outside.write_text("kept")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for name in names:
        (run_dir / name).symlink_to(outside)

    with Telemetry(["tensorboard"], run_dir=run_dir) as telemetry:
        telemetry.log({"my/number": 1.0})
        telemetry.flush(env_step=1)

    assert outside.read_text() == "kept"
    assert [name for name in names if (run_dir / name).is_symlink() and name != "writer.lock"] == []
    assert json.loads((run_dir / "config.json").read_text())["name"].endswith("/run")


@pytest.mark.parametrize("name", ["../../x", "/x", "..", "a\0b", "\n"])
def test_a_name_is_no_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    lease = lease_new_run("auto", name)
    lease.release()

    assert lease.journal.run_dir is not None
    assert lease.journal.run_dir.parent == tmp_path / "runs"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("run/journal.jsonl", "it is a file of the run"),
        ("run/config.json", "it is a file of the run"),
        ("run/link.html", "it is a symbolic link in a run directory"),
        ("run", "it is a directory"),
    ],
)
def test_a_page_never_replaces_a_file_of_a_run(output: str, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = hostile_run(tmp_path / "run")
    (run_dir / "link.html").symlink_to(tmp_path / "target")
    before = (run_dir / JOURNAL_NAME).read_bytes()

    for words in (["report", run_dir], ["compare", run_dir]):
        code, _, err = run_cli([*words, "-o", tmp_path / output], capfd)
        assert (code, reason in err) == (2, True)

    assert (run_dir / JOURNAL_NAME).read_bytes() == before


def test_a_report_goes_to_a_device_and_through_a_link(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = hostile_run(tmp_path / "run")
    (tmp_path / "link.md").symlink_to(tmp_path / "target.md")

    for output in ("/dev/null", tmp_path / "link.md"):
        assert run_cli(["report", run_dir, "--format", "markdown", "-o", output], capfd)[0] == 0

    assert Path("/dev/null").is_char_device()
    assert (tmp_path / "link.md").is_symlink()
    assert (tmp_path / "target.md").read_text().startswith("## ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


SERVER = "mlflow:http://127.0.0.1:1"


def test_doctor_connects_to_an_address_of_the_directory_only_if_the_user_agrees(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens on port 1, so an attempt to connect shows in the output."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run_dir = hostile_run(tmp_path / "run")
    (run_dir / "status.json").write_text(json.dumps({"sinks": {"mlflow": {"uri": SERVER}}}))

    refused = run_cli(["doctor", run_dir], capfd)
    named = run_cli(["doctor", run_dir, "--sink", SERVER], capfd)
    typed = []
    for answer in ("n\n", "y\n"):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        monkeypatch.setattr(sys, "stderr", Terminal())
        typed.append(run_cli(["doctor", run_dir], capfd))

    sentence = f"not read, because files in the run directory name its address: allow it with --sink {SERVER}"
    assert [sentence in out for _, out, _ in (refused, named, *typed)] == [True, False, True, False]
    assert ["does not answer" in out for _, out, _ in (refused, named, *typed)] == [False, True, False, True]
    assert [code for code, _, _ in (refused, named)] == [1, 1]
    assert [sink.unreadable for sink in doctor(run_dir).sinks] == [True]


def resumable(run_dir: Path, **config: Any) -> Path:
    from esper_telemetry.cli.main import Train
    from esper_telemetry.cli.resume import config_of

    run_dir.mkdir()
    options = Train(env="CartPole-v1")
    settings = {**config_of(options), **asdict(options.ppo), **config}
    lines = [encode_run(RunInfo("r1", "run", None, 1e9, config=settings)), encode_end(RunStatus.INTERRUPTED, seq=1)]
    (run_dir / JOURNAL_NAME).write_bytes(b"".join(map(to_json, lines)))
    return run_dir


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"env": "stranger:Env-v0"}, "names the environment stranger:Env-v0, whose module would be imported: allow it with --env"),
        ({"sinks": [SERVER]}, f"names the backend {SERVER}, which would receive your token: allow it with --sink"),
        ({"sinks": "console"}, "cannot be read: name them with --sink"),
        ({"num_envs": "eight"}, "is not a run of esper-telemetry train: num_envs is 'eight'"),
        ({"hidden_sizes": 64}, "is not a run of esper-telemetry train: hidden_sizes is '64'"),
    ],
)
def test_a_resumed_run_imports_and_sends_nothing_that_the_user_has_not_named(
    config: dict[str, Any], sentence: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)

    code, _, err = run_cli(["train", "--resume", resumable(tmp_path / "run", **config)], capfd)

    assert (code, sentence in err) == (2, True), err


def test_a_named_environment_is_imported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = resumable(tmp_path / "run", env="nowhere:Env-v0")

    _, _, err = run_cli(["train", "--resume", run_dir, "--env", "nowhere:Env-v0"], capfd)

    assert "module of environment 'nowhere:Env-v0' cannot be imported" in err
