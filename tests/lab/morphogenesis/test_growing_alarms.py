"""Every alarm about seeds, raised by a fault that is really there in a run that really trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from growing import tiny
from torch import Tensor

from esper_telemetry import PPOConfig, Telemetry, attach, read_run
from esper_telemetry.events import UpdateEnd
from esper_telemetry.journal import alarms
from esper_telemetry.lab.morphogenesis import Morphogenesis, rewards
from esper_telemetry.lab.morphogenesis.controllers import OracleController, ScriptedRun
from esper_telemetry.lab.morphogenesis.slots import Op
from esper_telemetry.lab.morphogenesis.telemetry import GrowthStep

SEED_ALARMS = {"seed/explode", "seed/vanish", "seed/dormant", "seed/stalled", "seed/reward_hacking"}
FROM = 5
"""The fault begins when this update ends, in the middle of an episode of two."""


def watched(path: Path, env: Morphogenesis, updates: int, fault: Callable[[ScriptedRun], None]) -> dict[str, int]:
    """Lets the oracle act for so many updates; returns in which update each alarm about seeds was first raised."""
    run = ScriptedRun(env, PPOConfig(policy="oracle", num_steps=16))

    def begin(event: UpdateEnd) -> None:
        if event.update == FROM:
            fault(run)

    with Telemetry(run_dir=path, offload=False) as telemetry:
        attach(telemetry, run)
        run.hooks.on(UpdateEnd, begin)
        run.learn(updates * 16 * env.num_envs)
    found = [alarm for alarm in alarms(path) if alarm.type in SEED_ALARMS]
    return {alarm.type: alarm.since for alarm in reversed(found)}


def explode(run: ScriptedRun) -> None:
    """All weights of seeds are ten thousand times as large."""
    run.env.colony.seeds.mul_(1e4)


def kill_units(run: ScriptedRun) -> None:
    """Biases are pulled so low that no unit of any seed is ever active, so no gradient comes back."""
    packing = run.env.colony.network.seed

    def pull(_: object) -> None:
        packing.unpack(run.env.colony.seeds)["enter_bias"].fill_(-100.0)

    run.hooks.on(GrowthStep, pull)


def cut_off(run: ScriptedRun) -> None:
    """Whatever hosts learn, their last layer does not listen to what is before it, so no loss reaches a seed."""
    colony = run.env.colony
    train, last = colony._optimizer, f"weight_{colony.network.slots}"

    def deaf(rows: Tensor, *rest: Any) -> None:
        train(rows, *rest)
        colony.network.host.unpack(rows[:, 0])[last].zero_()

    colony._optimizer = deaf
    colony.network.host.unpack(colony.hosts)[last].zero_()


def stop_learning(run: ScriptedRun) -> None:
    """The learning rate is zero, so no seed ever improves its host."""
    object.__setattr__(run.env.colony.task, "learning_rate", 0.0)


@pytest.mark.parametrize(
    ("alarm", "fault", "settings", "updates", "by"),
    [
        ("seed/explode", explode, {}, 7, FROM + 1),
        ("seed/vanish", kill_units, {}, 8, FROM + 2),
        ("seed/dormant", cut_off, {}, 10, FROM + 3),
        ("seed/stalled", stop_learning, {"strict": True, "horizon": 16}, 12, FROM + 6),
    ],
)
def test_a_fault_raises_its_alarm(
    alarm: str,
    fault: Callable[[ScriptedRun], None],
    settings: dict[str, Any],
    updates: int,
    by: int,
    tmp_path: Path,
) -> None:
    """Within as many updates as its rule is patient, and not before the fault began."""
    found = watched(tmp_path / "run", tiny(**settings), updates, fault)

    assert FROM < found[alarm] <= by, found


@pytest.mark.slow
def test_a_healthy_run_raises_none(tmp_path: Path) -> None:
    assert watched(tmp_path / "run", Morphogenesis(8, seed=0), 16, lambda run: None) == {}


class Churn(OracleController):
    """Has found out that operations are paid for: germinates and prunes whenever that is possible."""

    def __call__(self, env: Morphogenesis) -> dict[str, Tensor]:
        actions, possible = super().__call__(env), env.action_masks()["slot"]
        for wanted in (Op.PRUNE, Op.GERMINATE):
            here = possible[:, wanted]
            actions["op"] = torch.where(here.any(1), int(wanted), actions["op"])
            actions["slot"] = torch.where(here.any(1), here.int().argmax(1), actions["slot"])
        return actions


@pytest.mark.slow
def test_a_controller_that_is_paid_for_the_wrong_thing_is_told_by_its_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward pays for operations instead of charging for them, and after five episodes the controller lives by that."""
    monkeypatch.setitem(rewards.REWARDS, "shaped", {"op_cost": 1.0})
    run = ScriptedRun(Morphogenesis(8, seed=0), PPOConfig(policy="oracle", num_steps=32))

    def learn(event: UpdateEnd) -> None:
        if event.update == FROM:
            run._choose = Churn()

    with Telemetry(run_dir=tmp_path / "run", offload=False) as telemetry:
        attach(telemetry, run)
        run.hooks.on(UpdateEnd, learn)
        run.learn(14 * 32 * 8)

    records = read_run(tmp_path / "run").records
    before, after = records[FROM - 1].values, records[-1].values
    assert after["episode/return_mean"] > before["episode/return_mean"] and after["env/score"] < before["env/score"]
    assert "seed/reward_hacking" in {alarm.type for alarm in alarms(tmp_path / "run")}
