"""Every alarm about hosts and seeds, raised by a fault in a training run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from growing import recorded, tiny
from run_cli import run_cli
from torch import Tensor

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, read_run
from esper_telemetry.events import UpdateEnd
from esper_telemetry.journal.read import alarms
from esper_telemetry.lab.morphogenesis import feedback
from esper_telemetry.lab.morphogenesis.controllers import OracleController, ScriptedRun
from esper_telemetry.lab.morphogenesis.environment import Morphogenesis
from esper_telemetry.lab.morphogenesis.growth_telemetry import GrowthStep
from esper_telemetry.lab.morphogenesis.kinds import Op
from esper_telemetry.ppo.config import preset

GROWTH_ALARMS = {"env/rollback", "seed/explode", "seed/vanish", "seed/dormant", "seed/stalled", "seed/reward_hacking"}
LAST_HEALTHY_UPDATE = 5
"""The fault begins after this update, in the middle of an episode of two updates."""


def raised_alarms(path: Path, env: Morphogenesis, updates: int, fault: Callable[[ScriptedRun], None]) -> dict[str, int]:
    """Run the oracle for that many updates; return the update in which each growth alarm was first raised."""
    run = ScriptedRun(env, PPOConfig(policy="oracle", num_steps=16))

    def begin(event: UpdateEnd) -> None:
        if event.update == LAST_HEALTHY_UPDATE:
            fault(run)

    with Telemetry(run_dir=path, offload=False) as telemetry:
        attach(telemetry, run)
        run.hooks.on(UpdateEnd, begin)
        run.learn(updates * 16 * env.num_envs)
    growth_alarms = [alarm for alarm in alarms(path) if alarm.type in GROWTH_ALARMS]
    return {alarm.type: alarm.since for alarm in reversed(growth_alarms)}


def explode(run: ScriptedRun) -> None:
    """Multiply all weights of seeds by 10,000."""
    run.env.colony.seeds.mul_(1e4)


def raise_rate(run: ScriptedRun) -> None:
    """Multiply the learning rate of hosts and seeds by 100."""
    run.env.colony.task = replace(run.env.colony.task, learning_rate=1.0)


def kill_units(run: ScriptedRun) -> None:
    """Keep biases so low that no unit of any seed is active, so its gradient is zero."""
    packing = run.env.colony.network.seed

    def pull(_: object) -> None:
        packing.unpack(run.env.colony.seeds)["enter_bias"].fill_(-100.0)

    run.hooks.on(GrowthStep, pull)


def cut_off(run: ScriptedRun) -> None:
    """Keep the weights of the hosts' last layer at zero, so that no gradient reaches a seed."""
    colony = run.env.colony
    train, last = colony._optimizer, f"weight_{colony.network.slots}"

    def train_and_zero(rows: Tensor, *rest: Any) -> None:
        train(rows, *rest)
        colony.network.host.unpack(rows[:, 0])[last].zero_()

    colony._optimizer = train_and_zero
    colony.network.host.unpack(colony.hosts)[last].zero_()


def break_hosts(run: ScriptedRun) -> None:
    """Set the weights of every second host to NaN."""
    run.env.colony.hosts[::2] = torch.nan


def stop_learning(run: ScriptedRun) -> None:
    """Set the learning rate to zero, so that no seed improves its host."""
    run.env.colony.task = replace(run.env.colony.task, learning_rate=0.0)


@pytest.mark.system
@pytest.mark.parametrize(
    ("alarm", "fault", "settings", "updates", "by"),
    [
        ("seed/explode", explode, {}, 7, LAST_HEALTHY_UPDATE + 1),
        ("seed/explode", raise_rate, {}, 8, LAST_HEALTHY_UPDATE + 2),
        ("env/rollback", break_hosts, {}, 7, LAST_HEALTHY_UPDATE + 1),
        ("seed/vanish", kill_units, {}, 8, LAST_HEALTHY_UPDATE + 2),
        ("seed/dormant", cut_off, {}, 10, LAST_HEALTHY_UPDATE + 3),
        ("seed/stalled", stop_learning, {"strict": True, "horizon": 16}, 12, LAST_HEALTHY_UPDATE + 6),
    ],
)
def test_a_fault_raises_its_alarm(
    alarm: str, fault: Callable[[ScriptedRun], None], settings: dict[str, Any], updates: int, by: int, tmp_path: Path
) -> None:
    """The alarm comes within the updates that its rule requires, and not before the fault."""
    raised = raised_alarms(tmp_path / "run", tiny(**settings), updates, fault)

    assert LAST_HEALTHY_UPDATE < raised[alarm] <= by, raised


@pytest.mark.slow
def test_a_healthy_run_raises_none(tmp_path: Path) -> None:
    assert raised_alarms(tmp_path / "run", Morphogenesis(8, seed=0), 16, lambda run: None) == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_controller_that_learns_raises_none(seed: int, tmp_path: Path) -> None:
    """40 updates with the preset. Gradients of single minibatches exceed 32 clip limits."""
    trainer = PPO(Morphogenesis(16, seed=seed), preset("morphogenesis", "lstm").config(seed=seed))
    scores = [record.values["env/score"] for record in recorded(trainer, tmp_path / "run", 40 * 512)]

    assert sum(scores[-5:]) > sum(scores[:5])
    assert not GROWTH_ALARMS & {alarm.type for alarm in alarms(tmp_path / "run")}


@pytest.mark.system
def test_hosts_that_break_explain_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the sixth update on, half of the hosts lose their weights in every epoch, and the return falls."""

    def begin(run: ScriptedRun) -> None:
        run.hooks.on(GrowthStep, lambda _: break_hosts(run))

    raised_alarms(tmp_path / "run", tiny(horizon=16), 20, begin)

    out = run_cli(["diagnose", tmp_path / "run"], capsys).out
    text = " ".join(out.replace("│", " ").split())
    assert "Declining" in text and "Unexplained" not in text
    assert "in environments 0, 2, 4 and 6" in text and "nonfinite" in text


class Churn(OracleController):
    """A controller that germinates and prunes whenever possible."""

    def __call__(self, env: Morphogenesis) -> dict[str, Tensor]:
        actions, possible = super().__call__(env), env.action_masks()["slot"]
        for wanted in (Op.PRUNE, Op.GERMINATE):
            here = possible[:, wanted]
            actions["op"] = torch.where(here.any(1), int(wanted), actions["op"])
            actions["slot"] = torch.where(here.any(1), here.int().argmax(1), actions["slot"])
        return actions


@pytest.mark.slow
def test_a_reward_for_operations_raises_reward_hacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward pays for operations instead of charging for them; after five episodes the controller exploits this."""
    monkeypatch.setitem(feedback.REWARDS, "shaped", {"op_cost": 1.0})
    run = ScriptedRun(Morphogenesis(8, seed=0), PPOConfig(policy="oracle", num_steps=32))

    def learn(event: UpdateEnd) -> None:
        if event.update == LAST_HEALTHY_UPDATE:
            run._choose = Churn()

    with Telemetry(run_dir=tmp_path / "run", offload=False) as telemetry:
        attach(telemetry, run)
        run.hooks.on(UpdateEnd, learn)
        run.learn(14 * 32 * 8)

    records = read_run(tmp_path / "run").records
    before, after = records[LAST_HEALTHY_UPDATE - 1].values, records[-1].values
    assert after["episode/return_mean"] > before["episode/return_mean"] and after["env/score"] < before["env/score"]
    assert "seed/reward_hacking" in {alarm.type for alarm in alarms(tmp_path / "run")}
