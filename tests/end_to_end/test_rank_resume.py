"""One of two ranks is killed and both are resumed: the result equals an uninterrupted run, with each update once."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from broken_environments import KILLED
from command_line import ended, trained
from torchrun import PATIENCE_SECONDS, TRAIN, output, started

from esper_telemetry import RunStatus, read_run
from esper_telemetry.core.record import RUN_FAILED

ENVIRONMENT = "broken_environments:Killing-v0"  # to resume, too: a module is imported only if the command names it
SETTINGS = (
    *("--env", ENVIRONMENT, "--run-dir", "run", "--num-envs", "8", "--policy", "lstm"),
    *("--total-steps", "8000", "--checkpoint-every", "4000", "--num-epochs", "2", "--normalize-rewards"),
    *("--eval-every", "3000", "--eval-episodes", "2"),
)
UPDATES, SAVED = 8, 4
"""Rollouts of 1,024 steps: the fourth passes 4,000 and is saved, a rank is killed in the seventh."""

OF_TIME = ("perf/", "train/env_steps_per_second", "telemetry/")


pytestmark = pytest.mark.slow  # three runs of two processes; `make test` covers resuming one process


class Resumed(NamedTuple):
    """The directories of the uninterrupted and the resumed training, and the resumed training's output."""

    whole: Path
    cut: Path
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    whole, cut = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cut")
    (whole / KILLED).touch()
    together(whole, *SETTINGS)
    together(cut, *SETTINGS)
    assert (cut / KILLED).exists() and read_run(cut / "run").status is not RunStatus.FINISHED
    return Resumed(whole, cut, *together(cut, "--resume", "run", "--env", ENVIRONMENT))


def together(directory: Path, *options: str) -> tuple[str, str]:
    with started(*TRAIN, *options, cwd=directory) as launcher:
        return output(launcher, PATIENCE_SECONDS)


def checkpoint(directory: Path) -> dict[str, Any]:
    return dict(torch.load(directory / "run" / "checkpoints" / "latest.pt", weights_only=True))


def records(directory: Path) -> list[dict[str, Any]]:
    """Axes and values of every record, except values that depend on time."""
    return [
        {"step": record.axes.env_step, "update": record.axes.update}
        | {key: value for key, value in record.values.items() if not key.startswith(OF_TIME)}
        for record in read_run(directory / "run").records
    ]


def test_every_number_of_every_update_is_that_of_the_run_without_a_break(runs: Resumed) -> None:
    whole, cut = records(runs.whole), records(runs.cut)

    assert [values["update"] for values in cut] == list(range(1, UPDATES + 1))
    # if the alarm was raised, it is cleared when the run continues
    severities = {values.pop(f"alarm/{RUN_FAILED}", 0.0) for values in cut}
    assert severities == {0.0}
    assert cut == whole
    assert sum("eval/return_mean" in values for values in cut) == 2
    assert read_run(runs.cut / "run").status is RunStatus.FINISHED


def test_both_ranks_end_where_they_would_have_ended(runs: Resumed) -> None:
    whole, cut = checkpoint(runs.whole), checkpoint(runs.cut)

    assert whole["counts"] == cut["counts"] and whole["counts"]["updates"] == UPDATES
    assert [name for name, weight in whole["policy"].items() if not torch.equal(weight, cut["policy"][name])] == []
    for ours, theirs in ((whole, cut), (whole["others"][0], cut["others"][0])):
        assert torch.equal(ours["collector"]["observations"], theirs["collector"]["observations"])
        assert torch.equal(ours["collector"]["generator"], theirs["collector"]["generator"])
        assert ours["checkpointables"]["telemetry"]["recent"] == theirs["checkpointables"]["telemetry"]["recent"]


def test_one_rank_says_from_where_they_went_on(runs: Resumed) -> None:
    info = read_run(runs.cut / "run").info

    assert runs.stdout.count(f"run continues after update {SAVED}, step 4,096\n") == 1, runs.stderr
    assert info.resumed_from is not None
    assert info.resumed_from["update"] == SAVED < info.resumed_from["recorded"] < UPDATES


def test_another_number_of_processes_is_refused(runs: Resumed) -> None:
    before = (runs.cut / "run" / "journal.jsonl").read_bytes()

    alone = ended(trained(runs.cut / "run", "--resume", "run", "--env", ENVIRONMENT, "--total-steps", "20000"))

    assert (alone.code, alone.stderr) == (2, "esper-telemetry: run was trained by 2 processes, here is 1\n")
    assert (runs.cut / "run" / "journal.jsonl").read_bytes() == before
