"""skrl's agents as its runner builds them from Isaac Lab's settings, on small environments in its place."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("skrl", reason="needs skrl")

import skrl_models
import torch
from skrl.utils.runner.torch import Runner

from esper_telemetry import Telemetry
from esper_telemetry.adapters.skrl import attach_agent
from esper_telemetry.journal.read import Run, read_run

pytestmark = [pytest.mark.sb3, pytest.mark.filterwarnings("ignore")]

ENVS = 64
"""Isaac Lab has 4,096; minibatches are as large a part of the rollout as there."""


SKRL: Mapping[str, Mapping[str, Any]] = {
    "cartpole": {
        "layers": [32, 32],
        "learning_epochs": 8,
        "mini_batches": 8,
        "value_loss_scale": 2.0,
        "state_preprocessor": None,
        "value_preprocessor": None,
        "rewards_shaper_scale": 1.0,
    },
    "ant": {
        "layers": [256, 128, 64],
        "learning_epochs": 4,
        "mini_batches": 2,
        "value_loss_scale": 1.0,
        "state_preprocessor": "RunningStandardScaler",
        "value_preprocessor": "RunningStandardScaler",
        "rewards_shaper_scale": 0.6,
    },
}
"""Settings in which the agents differ, with skrl's old names, which Isaac Lab uses."""


def skrl_run(task: str, run_dir: Path, **changes: Any) -> Run:
    torch.manual_seed(42)
    own = {**SKRL[task], **changes}
    network = [{"name": "net", "input": "OBSERVATIONS", "layers": own.pop("layers"), "activations": "elu"}]
    agent = {
        "class": "PPO",
        "rollouts": 16,
        "discount_factor": 0.99,
        "lambda": 0.95,
        "learning_rate": 3e-4,
        "learning_rate_scheduler": "KLAdaptiveLR",
        "learning_rate_scheduler_kwargs": {"kl_threshold": 0.008},
        "state_preprocessor_kwargs": None,
        "value_preprocessor_kwargs": None,
        "grad_norm_clip": 1.0,
        "ratio_clip": 0.2,
        "value_clip": 0.2,
        "clip_predicted_values": True,
        "entropy_loss_scale": 0.0,
        "kl_threshold": 0.0,
        "time_limit_bootstrap": False,
        "experiment": {"write_interval": 0, "checkpoint_interval": 0},
        **own,
    }
    models = {
        "separate": False,
        "policy": {"class": "GaussianMixin", "clip_actions": False, "network": network, "output": "ACTIONS"},
        "value": {"class": "DeterministicMixin", "clip_actions": False, "network": network, "output": "ONE"},
    }
    trainer = {"class": "SequentialTrainer", "timesteps": 48, "headless": True, "disable_progressbar": True}
    trainer["close_environment_at_exit"] = False
    memory = {"class": "RandomMemory", "memory_size": -1}
    runner = Runner(
        skrl_models.short_pendulum(ENVS, seed=42), {"seed": 42, "models": models, "memory": memory, "agent": agent, "trainer": trainer}
    )
    with Telemetry([], run_dir=run_dir, offload=False, level="debug") as telemetry:
        attach_agent(telemetry, runner.agent)
        runner.run()
    return read_run(run_dir)


@pytest.mark.parametrize(("task", "statistics_change"), [("cartpole", False), ("ant", True)])
def test_agents_of_isaac_lab(task: str, statistics_change: bool, tmp_path: Path) -> None:
    """The normaliser of observations changes between the rollout and the first minibatch. skrl's advantages run on over time limits."""
    with contextlib.redirect_stdout(io.StringIO()):
        run = skrl_run(task, tmp_path)

    assert len(run.records) == 3
    for record in run.records:
        values = record.values
        assert "telemetry/metric_errors" not in values
        assert values["integrity/gae_identity"] <= 1e-5
        assert (values["integrity/ratio_init"] > 1e-3) == statistics_change
        assert {"policy/kl", "grad/global/norm_preclip", "value/explained_variance"} <= values.keys()
    raised = {alarm.type for alarm in run.alarms if alarm.type.startswith("integrity/")}
    assert raised == {"integrity/equation", *(["integrity/ratio_init"] if statistics_change else [])}


def test_bootstrap_at_time_limits_ends_the_alarm_of_skrl(tmp_path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        run = skrl_run("cartpole", tmp_path, time_limit_bootstrap=True)

    assert not run.alarms
