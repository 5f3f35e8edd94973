"""`esper-telemetry check`: the table of a script that runs for a limited time, and of a recorded run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import run_python
from made_runs import wrong_script
from run_cli import CommandOutput

from esper_telemetry import RunStatus, Telemetry, check_gae, read_run
from esper_telemetry.cli.arguments import WrongUse
from esper_telemetry.cli.check import DEFAULT_SECONDS, UNLIMITED_SECONDS, CheckOptions, parse
from esper_telemetry.cli.main import run

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "script" / "scripts"
SPINNING = "import time\nprint('spinning', flush=True)\nwhile True:\n    time.sleep(0.01)\n"


def check(directory: Path, *words: str) -> CommandOutput:
    done = run_python("-m", "esper_telemetry", "check", *words, cwd=directory)
    return CommandOutput(done.returncode, done.stdout, done.stderr)


def row(output: CommandOutput, equation: str) -> dict[str, Any]:
    (values,) = [each for each in json.loads(output.out)["equations"] if each["equation"] == equation]
    return dict(values)


@pytest.mark.system
def test_a_correct_script_matches_until_it_ends(tmp_path: Path) -> None:
    """All of its four updates are checked; the script's output stays on stdout, before the table."""
    output = check(tmp_path, "--run-dir", "run", str(SCRIPTS / "categorical.py"), "--seed=2")

    assert output.code == 0, output.err
    assert output.out.startswith("called as ")
    (line,) = [line for line in output.out.splitlines() if line.startswith("│ advantages  ")]
    assert [cell.strip() for cell in line.split("│")][2:4] == ["matches", "4"]
    assert read_run(tmp_path / "run").status is RunStatus.FINISHED


@pytest.mark.system
def test_a_mistake_is_named_and_the_recorded_run_says_the_same(tmp_path: Path) -> None:
    live = check(tmp_path, "--json", "--updates", "3", "--run-dir", "run", str(wrong_script(tmp_path)), "--seed=2")
    recorded = check(tmp_path, "run", "--json")

    assert (live.code, recorded.code) == (1, 1)
    assert json.loads(live.out) | {"run_dir": "run"} == json.loads(recorded.out)
    values = row(live, "advantages")
    assert (values["state"], values["updates"]) == ("differs", 3)
    assert [one["hypothesis"] for one in values["explanations"]] == ["ends_ignored"]
    assert "norm" in live.err  # printed by the script
    assert "wrong.py: stopped after 3 updates" in live.err
    assert read_run(tmp_path / "run").status is RunStatus.INTERRUPTED


@pytest.mark.system
def test_every_update_is_sampled_and_its_cost_raises_no_alarm(tmp_path: Path) -> None:
    """Forty updates of 32 steps, a large share of whose time telemetry uses."""
    script = str(SCRIPTS / "categorical.py")
    output = check(tmp_path, "--json", "--run-dir", "run", script, "--num_steps=16", "--num_envs=2", "--total_timesteps=1280")

    assert row(output, "advantages")["updates"] == 40
    assert [alarm.type for alarm in read_run(tmp_path / "run").alarms if alarm.type == "telemetry/overhead"] == []


@pytest.mark.system
def test_a_script_is_stopped_when_the_time_is_up(tmp_path: Path) -> None:
    (tmp_path / "spinning.py").write_text(SPINNING, encoding="utf-8")

    output = check(tmp_path, "--seconds", "0.5", "spinning.py")

    assert (output.code, output.out) == (2, "spinning\n")
    assert "spinning.py: stopped after 0.5 seconds" in output.err
    assert "found nothing to measure" in output.err
    assert "Traceback" not in output.err


def test_worker_processes_of_a_script_end_with_it(tmp_path: Path) -> None:
    """They wait for messages, and Python waits for them."""
    lines = (
        "import multiprocessing",
        "multiprocessing.set_start_method('fork')",
        "own, other = multiprocessing.Pipe()",
        "multiprocessing.Process(target=other.recv).start()",
        SPINNING,
    )
    (tmp_path / "workers.py").write_text("\n".join(lines), encoding="utf-8")

    assert "workers.py: stopped after 0.5 seconds" in check(tmp_path, "--seconds", "0.5", "workers.py").err


def test_a_script_that_saves_its_model_when_it_is_interrupted_does_so(tmp_path: Path) -> None:
    saving = SPINNING.replace("while", "try:\n  while").replace("    time", "     time")
    (tmp_path / "saving.py").write_text(f"{saving}except KeyboardInterrupt:\n  print('saved')\n", encoding="utf-8")

    assert check(tmp_path, "--seconds", "0.5", "saving.py").out == "spinning\nsaved\n"


def test_the_exception_of_a_script_is_shown_and_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("raise RuntimeError('of the script')\n", encoding="utf-8")

    output = check(tmp_path, "failing.py")

    assert output.code == 1
    assert output.err.splitlines()[-1] == "RuntimeError: of the script"


@pytest.mark.sb3
def test_a_model_of_stable_baselines3_is_checked(tmp_path: Path) -> None:
    output = check(tmp_path, "--json", "--updates", "2", "--run-dir", "run", str(SCRIPTS / "sb3_model.py"))

    assert output.code == 0, output.err
    assert row(output, "advantages")["state"] == "matches"
    assert "sb3_model.py: stopped after 2 updates" in output.err


def recorded_run(run_dir: Path, *, wrong: bool) -> None:
    advantages = [[2.0], [0.0], [1.0]] if wrong else [[1.0], [-1.0], [1.0]]
    values, next_values, ended = [[1.0], [2.0], [4.0]], [[2.0], [0.0], [4.0]], [[False], [True], [False]]
    with Telemetry(run_dir=run_dir) as telemetry:
        telemetry.observe(check_gae([[1.0]] * 3, values, advantages, ended=ended, next_values=next_values, gamma=1.0, gae_lambda=1.0))
        telemetry.flush(env_step=3)


@pytest.mark.parametrize("wrong", [True, False])
def test_the_table_of_an_own_loop(wrong: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded_run(tmp_path / "run", wrong=wrong)

    code = run(["check", str(tmp_path / "run")])

    text = capsys.readouterr().out
    assert code == int(wrong)
    assert ("differs: equal GAE that" in text) == wrong
    assert "could not be checked" in text


@pytest.mark.system
def test_the_table_of_a_run_needs_no_torch(tmp_path: Path) -> None:
    recorded_run(tmp_path / "run", wrong=False)
    code = (
        "import sys\nfrom esper_telemetry.__main__ import main\ntry:\n    main()\n"
        "except SystemExit as stop:\n    assert stop.code == 0\nassert 'torch' not in sys.modules\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, "check", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_a_run_of_which_nothing_was_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Telemetry(run_dir=tmp_path / "run") as telemetry:
        telemetry.log({"own/number": 1.0})
        telemetry.flush(env_step=1)

    assert run(["check", str(tmp_path / "run")]) == 2
    assert "Nothing was checked." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["missing.py"], "cannot read the script missing.py: No such file or directory"),
        (["x" * 300], "File name too long"),
        (["--seconds", "0", "a.py"], "--seconds must be positive, got 0"),
        (["--updates", "0", "a.py"], "--updates must be 1 or more, got 0"),
        ([".", "--seed=1"], "is the directory of a run and cannot take arguments, got '--seed=1'"),
        (["."], "no journal"),
        ([], "the following arguments are required: SCRIPT|RUN"),
        (["text.py"], "text.py is not a Python script"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_sentence(words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.py").write_text("This is not Python.\n", encoding="utf-8")

    with pytest.raises(WrongUse) as mistake:
        run(["check", *words])
    assert sentence in str(mistake.value)
    assert [path.name for path in tmp_path.iterdir()] == ["text.py"]


def test_options_after_the_script_are_its_own() -> None:
    options = parse(["--updates", "3", "a.py", "--updates", "4", "--json"])

    assert options == CheckOptions("a.py", ("--updates", "4", "--json"), UNLIMITED_SECONDS, updates=3)
    assert parse(["a.py"]).seconds == DEFAULT_SECONDS
