"""Runs of the fault benchmark and the demo, read from their journals."""

from dataclasses import replace
from pathlib import Path

import pytest

from esper_telemetry.journal.read import read_run
from esper_telemetry.lab.faults.__main__ import run
from esper_telemetry.lab.faults.runs import HEALTHY_KINDS, FaultRun, plan_runs, read_fault_run, train_healthy, triple_rewards


def test_a_healthy_run_stores_its_announced_updates(tmp_path: Path) -> None:
    run = train_healthy(FaultRun("cue-recall", 1, healthy="rewards_x3", last=2), tmp_path, "normal")

    assert run == read_fault_run(tmp_path / "cue-recall-healthy-rewards_x3-s1")
    assert (run.status, run.interventions) == ("done", (31,))
    assert len(read_run(tmp_path / run.name).records) == 2


def test_announced_rewards_are_three_times_as_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The largest reward of CueRecall is 1.3; from the second update on it is 3.9."""
    monkeypatch.setattr("esper_telemetry.lab.faults.runs.REWARD_CHANGE_UPDATE", 2)
    monkeypatch.setitem(HEALTHY_KINDS, "soon", replace(HEALTHY_KINDS["rewards_x3"], prepare=triple_rewards))

    train_healthy(FaultRun("cue-recall", 1, healthy="soon", last=2), tmp_path, "normal")

    first, second = read_run(tmp_path / "cue-recall-healthy-soon-s1").records
    assert first.values["reward/absmax"] == pytest.approx(1.3)
    assert second.values["reward/absmax"] == pytest.approx(3.9)


def test_the_plan_has_every_fault_and_every_healthy_run_of_its_environments() -> None:
    """Pendulum has four kinds of healthy runs; two faults, two seeds."""
    plan = plan_runs([("lr_x10", 10), ("lr_zero", 0)], ["pendulum"], [1, 2])

    assert len([run for run in plan if run.fault is not None]) == 4
    assert {run.healthy for run in plan if run.fault is None} == {"plain", "annealed", "slow", "rewards_x3"}
    assert len({run.name for run in plan}) == len(plan) == 12


@pytest.mark.system
@pytest.mark.usefixtures("one_core")
def test_the_demo_breaks_half_way(tmp_path: Path) -> None:
    """Half of 4096 steps are two updates of 8 x 128, so the third is the first broken one."""
    settings = ("--policy", "mlp", "--no-mask-velocity", "--total-steps", "4096")

    assert run(["demo", *settings, "--run-dir", str(tmp_path / "run")]) == 0

    rates = [record.values["opt/lr"] for record in read_run(tmp_path / "run").records]
    assert rates[1] < rates[0] == 2.5e-3
    assert rates[2] > 50 * rates[1]
