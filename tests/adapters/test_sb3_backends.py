"""Three backends with the worker, and `WandbCallback` in the same W&B run."""

import subprocess
import sys
from pathlib import Path

import pytest
from backends_read import wandb_entries, wandb_exit_codes, wandb_rows

from esper_telemetry import read_run

pytestmark = pytest.mark.sb3

BESIDE = """
import sys
import wandb
from stable_baselines3 import PPO
from wandb.integration.sb3 import WandbCallback
from esper_telemetry import Telemetry, WandbSink
from esper_telemetry.adapters.sb3 import TelemetryCallback

directory = sys.argv[1]
run = wandb.init(mode="offline", dir=directory, project="beside", sync_tensorboard=True)
model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2, seed=1, device="cpu",
            tensorboard_log=f"{directory}/theirs")
theirs = WandbCallback(gradient_save_freq=2, model_save_path=f"{directory}/models", model_save_freq=50)
with Telemetry([WandbSink(run=run)], run_dir=f"{directory}/run") as telemetry:
    model.learn(256, callback=[theirs, TelemetryCallback(telemetry)])
assert wandb.run is run
run.finish()
"""


def test_both_callbacks_share_one_run_of_wandb(tmp_path: Path) -> None:
    """Both callbacks' rows, models and gradients are stored, and the run's owner ends the run.

    W&B's callbacks log with `step=`, after training has moved on. Of our records within one of their steps only the newest is stored, once.
    """
    done = subprocess.run([sys.executable, "-c", BESIDE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    entries = wandb_entries(tmp_path)
    rows, records = wandb_rows(entries), read_run(tmp_path / "run").records
    ours = [row for row in rows if "policy/kl" in row]
    recorded = [(record.axes.env_step, record.values["policy/kl"]) for record in records]
    delivered = [(row["axis/env_step"], row["policy/kl"]) for row in ours]
    assert [step for step, _ in recorded] == [64, 128, 192, 256]
    assert delivered == [point for point in recorded if point in delivered]
    assert delivered[-1] == recorded[-1]
    assert any("rollout/ep_rew_mean" in row or "train/loss" in row for row in rows if row not in ours)
    assert any(key.startswith("gradients/") for row in rows for key in row)
    assert (tmp_path / "models/model.zip").exists()
    assert wandb_exit_codes(entries) == [0]
