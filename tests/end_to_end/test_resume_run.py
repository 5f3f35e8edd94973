"""A run that is killed and resumed equals the run that was never killed: the same weights and numbers, each once in every backend."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from backends_read import assert_the_same_numbers_in_all_four, mlflow_run, wandb_entries, wandb_exit_codes
from broken_environments import KILLED
from command_line import ENDLESS, SLOW, Ended, ended, in_full_swing, started, trained, trained_in_fork, with_all_sinks

from esper_telemetry import RunStatus, read_run
from esper_telemetry.journal.read import Run

pytestmark = pytest.mark.system

KILLING = "broken_environments:Killing-v0"
SETTINGS = ("--total-steps", "8000", "--checkpoint-every", "4000", "--seed", "3", "--num-epochs", "2", "--num-envs", "8")
EVALUATION = ("--eval-every", "3000", "--eval-episodes", "2")
UPDATES, SAVED, RECORDED = 8, 4, 6
"""Rollouts of 1,024 steps: the fourth passes 4,000 and is saved, the process is killed in the seventh.

From the ninth update on, the clock decides which updates are sampled.
"""

UNSAVED = ("--checkpoint-every", ENDLESS[1])
"""No checkpoint is due."""

OF_TIME = ("perf/", "train/env_steps_per_second", "telemetry/queue_depth", "telemetry/sample_every")
"""Prefixes of keys that depend on the speed of the machine."""


class Resumed(NamedTuple):
    """The same training twice: without a break, and killed and resumed."""

    whole: Path
    cut: Path
    killed: Ended
    resumed: Ended


@pytest.fixture(scope="module", params=[pytest.param("mlp", marks=pytest.mark.slow), "lstm"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    options = (*SETTINGS, *EVALUATION, "--policy", request.param)
    cut = tmp_path_factory.mktemp("cut") / "run"
    killed = trained_in_fork(cut, *with_all_sinks(cut, KILLING), *options)
    resumed = trained_in_fork(cut, "--resume", str(cut), "--env", KILLING)
    whole = tmp_path_factory.mktemp("whole") / "run"
    (whole.parent / KILLED).touch()
    assert trained_in_fork(whole, "--env", KILLING, "--run-dir", str(whole), *options, one_core=True).code == 0
    return Resumed(whole, cut, killed, resumed)


def checkpoint(run_dir: Path) -> dict[str, Any]:
    return dict(torch.load(run_dir / "checkpoints" / "latest.pt", weights_only=True))


def untimed(run: Run) -> list[dict[str, Any]]:
    """Axes and values of every record, except values that depend on time."""
    return [{"step": record.axes.env_step, "gradient_step": record.axes.gradient_step, **timeless(record.values)} for record in run.records]


def timeless(values: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if not key.startswith(OF_TIME) and "/lag_" not in key}


def test_the_process_was_killed_and_went_on_by_itself(runs: Resumed) -> None:
    assert (runs.killed.code, runs.resumed.code) == (-signal.SIGKILL, 0), runs
    assert (runs.killed.stderr, runs.resumed.stderr) == ("", "")
    assert f"{runs.cut} continues after update 4, step 4,096\n" in runs.resumed.stdout


def test_weights_optimizer_and_generators_are_bit_identical(runs: Resumed) -> None:
    whole, cut = checkpoint(runs.whole), checkpoint(runs.cut)

    assert whole["counts"] == cut["counts"] == {"env_steps": 8192, "updates": UPDATES, "gradient_steps": cut["counts"]["gradient_steps"]}
    assert [name for name, weight in whole["policy"].items() if not torch.equal(weight, cut["policy"][name])] == []
    assert torch.equal(whole["generator"], cut["generator"])
    assert torch.equal(whole["collector"]["generator"], cut["collector"]["generator"])
    for index, moments in whole["optimizer"]["state"].items():
        assert all(torch.equal(moment, cut["optimizer"]["state"][index][name]) for name, moment in moments.items())


def test_every_number_of_every_update_is_that_of_the_run_without_a_break(runs: Resumed) -> None:
    whole, cut = untimed(read_run(runs.whole)), untimed(read_run(runs.cut))

    assert len(whole) == UPDATES
    assert cut == whole
    assert sum("eval/return_mean" in values for values in cut) == 2


def test_the_journal_says_from_where_the_run_went_on(runs: Resumed) -> None:
    """Updates 5 and 6 are kept as recorded before the kill; the journal holds each update once."""
    run = read_run(runs.cut)
    lines = (runs.cut / "journal.jsonl").read_text().splitlines()

    assert run.info.resumed_from is not None
    assert (run.info.resumed_from["update"], run.info.resumed_from["recorded"]) == (SAVED, RECORDED)
    assert run.info.resumed_from["env_step"] == 4096
    assert [record.axes.update for record in run.records] == list(range(1, UPDATES + 1))
    assert sum(line.startswith('{"kind":"record"') for line in lines) == UPDATES
    assert [json.loads(line)["status"] for line in lines if line.startswith('{"kind":"end"')] == ["killed", "finished"]
    seqs = [record.seq for record in run.records]
    assert seqs == sorted(set(seqs))


def test_every_backend_shows_one_curve_without_gaps_or_doubles(runs: Resumed) -> None:
    assert_the_same_numbers_in_all_four(runs.cut)


def test_every_backend_has_one_run_that_finished(runs: Resumed) -> None:
    assert read_run(runs.cut).status is RunStatus.FINISHED
    assert mlflow_run(runs.cut).info.status == "FINISHED"
    assert wandb_exit_codes(wandb_entries(runs.cut)) == [128 + signal.SIGKILL, 0]


def test_nobody_holds_the_run_any_more(runs: Resumed) -> None:
    assert list(runs.cut.glob("*.lock")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "status"), [(signal.SIGTERM, 143, "preempted"), (signal.SIGINT, 130, "interrupted")])
def test_a_run_that_is_stopped_is_saved_delivered_and_resumed(number: signal.Signals, code: int, status: str, tmp_path: Path) -> None:
    """No checkpoint is due before the signal, so the signal saves one; no update is trained twice. A terminal sends Ctrl-C to the group."""
    run_dir = tmp_path / "run"
    process = started(run_dir, *ENDLESS, *UNSAVED, env=SLOW)
    in_full_swing(run_dir, process)
    os.kill(process.pid, number) if number is signal.SIGTERM else os.killpg(process.pid, number)
    command = ended(process)

    assert (command.code, command.stderr) == (code, "")
    assert f"{status} after" in command.stdout
    assert (read_run(run_dir).status, mlflow_run(run_dir).info.status) == (status, "KILLED")
    last = read_run(run_dir).records[-1].axes

    steps = str(last.env_step + 2000)
    resumed = ended(trained(run_dir, "--resume", str(run_dir), "--env", SLOW, "--total-steps", steps))

    assert (resumed.code, resumed.stderr) == (0, ""), resumed
    run = read_run(run_dir)
    assert run.status is RunStatus.FINISHED
    assert run.info.resumed_from is not None
    assert run.info.resumed_from["update"] == run.info.resumed_from["recorded"] == last.update
    assert [record.axes.update for record in run.records] == list(range(1, len(run.records) + 1))
    assert len(run.records) > last.update
    assert mlflow_run(run_dir).info.status == "FINISHED"
    assert wandb_exit_codes(wandb_entries(run_dir)) == [code, 0]
    assert_the_same_numbers_in_all_four(run_dir)
