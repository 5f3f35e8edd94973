"""`torchrun` with two ranks: one journal, one set of messages, and one ending for both."""

import os
import signal
from pathlib import Path

import pytest
from backends_read import (
    BACKEND_SECONDS,
    all_backends_closed,
    all_backends_have,
    assert_the_same_numbers_in_all_four,
    mlflow_run,
    wandb_entries,
    wandb_exit_code,
)
from broken_environments import STUCK_MARK
from command_line import ENDLESS, SINKS, SLOW
from forked import run_python
from torchrun import LAUNCHER, TRAIN, environment, output, pid_of, started, until
from waiting import wait_until

from esper_telemetry import RunStatus, read_run

pytestmark = pytest.mark.system

DEAD_RANK_SECONDS = 90.0
"""Limit for a run to end after a rank has died."""


def records(run_dir: Path) -> int:
    try:
        return len(read_run(run_dir).records)
    except (FileNotFoundError, ValueError):  # it is missing, or its first line is incomplete
        return 0


def test_two_ranks_learn_and_speak_with_one_voice(tmp_path: Path) -> None:
    """16 environments, 8 in each process; a record counts the steps of both."""
    options = ("--env", "CartPole-v1", "--num-envs", "16", "--total-steps", "12000", "--run-dir", "run")
    every = ("--eval-every", "6000", "--checkpoint-every", "6000")
    done = run_python(*LAUNCHER, *TRAIN, *options, *every, cwd=tmp_path, env=environment(), one_core=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished after") == done.stdout.count("preset CartPole-v1") == 1
    run = read_run(tmp_path / "run")
    assert run.status is RunStatus.FINISHED
    assert run.info.facts["ranks"] == 2 and run.info.facts["num_envs"] == 16
    assert [record.axes.update for record in run.records] == list(range(1, len(run.records) + 1))
    assert 1900 < run.records[0].axes.env_step <= 2048 and run.records[-1].axes.env_step >= 12_000
    assert run.records[-1].values["episode/return_mean_100"] > run.records[0].values["episode/return_mean_100"] + 5
    assert any("eval/return_mean" in record.values for record in run.records)
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"latest.pt", "best.pt"}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_two_ranks_write_one_run_in_each_backend(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with started(*TRAIN, "--env", SLOW, "--run-dir", "run", *ENDLESS, *SINKS, cwd=tmp_path) as launcher:
        until(lambda: all_backends_have(3, run_dir), launcher)

        os.kill(pid_of(0, launcher), signal.SIGTERM)
        output(launcher, DEAD_RANK_SECONDS)

    assert read_run(run_dir).status is RunStatus.PREEMPTED
    assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 1
    assert_the_same_numbers_in_all_four(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("dying", [1, 0])
def test_a_killed_rank_ends_the_run_in_bounded_time(tmp_path: Path, dying: int) -> None:
    """Rank 1's death is a failure in rank 0. If rank 0 dies, the process that feeds the sinks ends the run as killed."""
    run_dir = tmp_path / "run"
    with started(*TRAIN, "--env", SLOW, "--run-dir", "run", *ENDLESS, *SINKS, cwd=tmp_path) as launcher:
        until(lambda: all_backends_have(3, run_dir), launcher)

        victim = pid_of(dying, launcher)
        os.kill(victim, signal.SIGKILL)
        _, stderr = output(launcher, DEAD_RANK_SECONDS)
    wait_until(lambda: all_backends_closed(run_dir), "the end of the run in every backend", BACKEND_SECONDS)

    assert launcher.returncode == 1
    run = read_run(run_dir)
    assert run.status is (RunStatus.FAILED if dying else RunStatus.KILLED)
    assert mlflow_run(run_dir).info.status == ("FAILED" if dying else "KILLED")
    assert wandb_exit_code(wandb_entries(run_dir)) == (1 if dying else 128 + signal.SIGKILL)
    if dying:
        (failure,) = [event for event in run.events if event.type == "failure"]
        assert failure.data["message"].startswith(f"rank 1 (process {victim} on ")
        assert stderr.count("esper-telemetry: rank 1 (process ") == 1


@pytest.mark.slow
def test_a_rank_that_hears_of_no_death_is_told_by_another_thread(tmp_path: Path) -> None:
    """Rank 0 hangs in its third rollout, as in an exchange that does not notice the death of rank 1."""
    with started(*TRAIN, "--env", "broken_environments:Stuck-v0", "--run-dir", "run", cwd=tmp_path) as launcher:
        until((tmp_path / STUCK_MARK).exists, launcher)

        os.kill(pid_of(1, launcher), signal.SIGKILL)
        _, stderr = output(launcher, DEAD_RANK_SECONDS)

    assert stderr.count("esper-telemetry: rank 1 (process ") == 1
    run = read_run(tmp_path / "run")
    assert run.status is RunStatus.FAILED
    assert "rank 1 (process " in next(event.data["message"] for event in run.events if event.type == "failure")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "code"), [(signal.SIGTERM, RunStatus.PREEMPTED, 143), (signal.SIGINT, RunStatus.INTERRUPTED, 130)]
)
def test_a_signal_to_one_rank_ends_all_of_them_after_the_same_update(
    tmp_path: Path, number: signal.Signals, status: RunStatus, code: int
) -> None:
    with started(*TRAIN, "--env", SLOW, "--run-dir", "run", *ENDLESS, cwd=tmp_path) as launcher:
        until(lambda: records(tmp_path / "run") >= 3, launcher)

        os.kill(pid_of(1, launcher), number)
        _, stderr = output(launcher, DEAD_RANK_SECONDS)

    run = read_run(tmp_path / "run")
    assert run.status is status and not any(record.partial for record in run.records)
    assert f"exitcode  : {code} " in stderr and "ended early" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--num-envs", "7"), "num_envs must be a multiple of the 2 processes, got 7"),
        (("--sink", "carrier-pigeon"), "carrier-pigeon"),
        (("--run-dir", "taken"), "taken"),
        (("--total-steps", "many"), "many"),
    ],
)
def test_a_mistake_is_said_once_and_ends_every_rank(tmp_path: Path, options: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "journal.jsonl").write_text("{}\n", encoding="utf-8")

    with started(*TRAIN, "--env", "CartPole-v1", *options, cwd=tmp_path) as launcher:
        _, stderr = output(launcher, DEAD_RANK_SECONDS)

    messages = [line for line in stderr.splitlines() if line.startswith("esper-telemetry: ")]
    assert len(messages) == 1 and sentence in messages[0]
    assert stderr.count("exitcode  : 2 ") >= 1 and "exitcode  : 1 " not in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
