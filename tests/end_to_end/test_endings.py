"""Runs that do not finish: killed, interrupted, failed. Everything measured is stored everywhere, with the ending."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from backends_read import (
    assert_the_same_numbers_in_all_four,
    mlflow_run,
    wandb_entries,
    wandb_exit_code,
)
from command_line import Ended, trained_in_fork, with_all_sinks

from esper_telemetry import RunStatus, read_run

pytestmark = pytest.mark.system


def failure(run_dir: Path) -> Mapping[str, str]:
    (event,) = [event for event in read_run(run_dir).events if event.type == "failure"]
    return event.data


def test_an_exception_in_training_fails_the_run_everywhere_and_is_shown(tmp_path: Path) -> None:
    """The simulator crashes in the third rollout, so there are two records."""
    run_dir = tmp_path / "failed"
    command = trained_in_fork(run_dir, *with_all_sinks(run_dir, "broken_environments:Crashing-v0"))

    assert command.code == 1
    assert command.stderr.startswith("Traceback (most recent call last):\n")
    assert command.stderr.endswith("RuntimeError: the simulator crashed\n")
    run = read_run(run_dir)
    assert (run.status, len(run.records)) == (RunStatus.FAILED, 2)
    assert failure(run_dir) == {"exception": "RuntimeError", "message": "the simulator crashed", "first_nonfinite": ""}
    assert mlflow_run(run_dir).info.status == "FAILED"
    assert wandb_exit_code(wandb_entries(run_dir)) == 1
    assert_the_same_numbers_in_all_four(run_dir)


def trained_to_failure(env: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ended:
    """The same in this process and with the journal alone, which is faster."""
    from esper_telemetry.cli.main import main

    monkeypatch.syspath_prepend(Path(__file__).parent)
    with pytest.raises(SystemExit) as stop:
        main(["train", "--env", f"broken_environments:{env}", "--run-dir", str(run_dir)])
    out, err = capfd.readouterr()
    assert isinstance(stop.value.code, int)
    return Ended(stop.value.code, out, err)


def test_a_reward_that_is_not_a_number_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The 300th step of an environment is number 43 of its third rollout, from 0. That update is recorded as partial."""
    command = trained_to_failure("NanReward-v0", tmp_path / "run", monkeypatch, capfd)

    assert command.code == 1
    assert "FloatingPointError: the policy's weights are not finite after this update" in command.stderr
    assert "first non-finite tensor: rewards[43, 0] = nan" in caplog.text
    run = read_run(tmp_path / "run")
    assert (run.status, len(run.records)) == (RunStatus.FAILED, 3)
    assert failure(tmp_path / "run")["first_nonfinite"] == "rewards[43, 0] = nan"
    assert [(record.axes.env_step, record.partial) for record in run.records] == [(1024, False), (2048, False), (3072, True)]
    assert run.records[-1].values["reward/nonfinite"] > 0


def test_an_observation_that_is_not_a_number_is_named_before_anything_is_learned_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = trained_to_failure("NanObservation-v0", tmp_path / "run", monkeypatch, capfd)

    assert command.code == 1
    assert "FloatingPointError: environment 0 returned at step 44 of the rollout an observation" in command.stderr
    run = read_run(tmp_path / "run")
    assert (run.status, len(run.records)) == (RunStatus.FAILED, 2)
    assert "[nan nan nan nan]" in failure(tmp_path / "run")["message"]
    assert failure(tmp_path / "run")["first_nonfinite"].startswith("observations[44, 0, 0] = nan")
    assert [alarm.type for alarm in run.alarms] == ["numerics/nonfinite", "run/failed"]
