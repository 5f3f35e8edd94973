"""Logs written by Stable-Baselines3 itself, of a healthy run and of one with a far too high learning rate."""

from pathlib import Path
from typing import Any

import pytest

from esper_telemetry.alarms import diagnose
from esper_telemetry.importers import Foreign, read_foreign, read_source

pytestmark = pytest.mark.system


def trained(directory: Path, learning_rate: float) -> dict[int, float]:
    """Train with SB3's own logger; return the KL of every update by the number of steps collected before it."""
    pytest.importorskip("stable_baselines3")
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import configure

    kl_by_step: dict[int, float] = {}

    class Noting(PPO):
        def train(self) -> None:
            super().train()
            kl_by_step[self.num_timesteps] = float(self.logger.name_to_value["train/approx_kl"])

    model: Any = Noting("MlpPolicy", "CartPole-v1", n_steps=128, n_epochs=4, learning_rate=learning_rate, seed=1, device="cpu")
    model.set_logger(configure(str(directory), ["tensorboard", "csv"]))
    model.learn(128 * 25)
    model.logger.close()
    return kl_by_step


def causes(run: Foreign) -> set[str]:
    return {incident.cause for incident in diagnose(run.facts, run.records).incidents}


def test_a_healthy_run_and_a_broken_one(tmp_path: Path) -> None:
    """Each KL is assigned to the steps it was learned from; only the broken run moved too far."""
    healthy, broken = trained(tmp_path / "healthy", 3e-4), trained(tmp_path / "broken", 5e-2)
    first, second = (read_foreign(read_source(f"tensorboard:{tmp_path / name}")) for name in ("healthy", "broken"))

    for run, expected in ((first, healthy), (second, broken)):
        read = {record.axes.env_step: record.values.get("policy/kl") for record in run.records}
        assert read.pop(128 * 25) is None  # SB3 never logs its last update
        assert read == pytest.approx({step: kl for step, kl in expected.items() if step in read}, rel=1e-5)
    assert causes(first) == set()
    assert "policy/kl_spike" in causes(second)


def test_the_table_says_the_same(tmp_path: Path) -> None:
    trained(tmp_path / "run", 3e-4)
    events, table = (read_foreign(read_source(where)) for where in (f"tensorboard:{tmp_path}/run", f"csv:{tmp_path}/run/progress.csv"))

    assert [record.axes.env_step for record in table.records] == [record.axes.env_step for record in events.records]
    losses, others = ([record.values.get("loss/value") for record in run.records] for run in (events, table))
    assert losses[-1] is None and losses[:-1] == pytest.approx(others[:-1], rel=1e-4)  # SB3 never logs its last update
