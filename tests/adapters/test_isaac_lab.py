"""The line of `docs/isaac_lab.md` for each trainer, with the numbers of Isaac Lab's agents, on small environments in its place."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rsl_rl", reason="needs rsl-rl-lib")
pytest.importorskip("skrl", reason="needs skrl")
pytest.importorskip("rl_games", reason="needs rl_games")

import rl_games_models
import rsl_rl_models
import skrl_models
import torch
from skrl.utils.runner.torch import Runner

from esper_telemetry import Telemetry
from esper_telemetry.adapters.skrl import attach_agent
from esper_telemetry.journal.read import Run, read_run

pytestmark = [pytest.mark.sb3, pytest.mark.filterwarnings("ignore")]  # rl_games and tensorboardX emit warnings

ENVS = 64
"""Isaac Lab has 4,096; minibatches are as large a part of the rollout as there."""


def rsl_rl_run(task: str, run_dir: Path) -> Run:
    widths, steps, rate, bonus = {"cartpole": ([32, 32], 16, 1e-3, 0.005), "ant": ([400, 200, 100], 32, 5e-4, 0.0)}[task]
    model = rsl_rl_models.runner(
        rsl_rl_models.short_pendulum,
        envs=ENVS,
        steps=steps,
        model_hidden_dims=widths,
        model_activation="elu",
        entropy_coef=bonus,
        num_learning_epochs=5,
        num_mini_batches=4,
        learning_rate=rate,
        schedule="adaptive",
        desired_kl=0.01,
        max_grad_norm=1.0,
    )
    return rsl_rl_models.recorded_run(model, run_dir, level="debug")


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


def rl_games_run(task: str, run_dir: Path) -> Run:
    own: Mapping[str, Any] = {
        "cartpole": {
            "mlp": {"units": [32, 32], "activation": "elu", "initializer": {"name": "default"}},
            "normalize_advantage": False,
            "minibatch_size": ENVS * 16 // 8,
            "mini_epochs": 8,
            "critic_coef": 4,
        },
        "ant": {
            "mlp": {"units": [256, 128, 64], "activation": "elu", "initializer": {"name": "default"}},
            "normalize_input": True,
            "normalize_value": True,
            "reward_shaper": {"scale_value": 0.6},
            "minibatch_size": ENVS * 16 // 2,
            "mini_epochs": 4,
            "critic_coef": 2,
            "mixed_precision": True,
            "schedule_type": "legacy",
        },
    }[task]
    settings = {"entropy_coef": 0.0, "kl_threshold": 0.008, "bounds_loss_coef": 1e-4, "envs": ENVS, "seed": 42, **own}
    return rl_games_models.recorded_run(settings, run_dir, level="debug")[0]


RUNS: Mapping[str, Callable[[str, Path], Run]] = {"rsl_rl": rsl_rl_run, "skrl": skrl_run, "rl_games": rl_games_run}

CHANGING_STATISTICS = {("skrl", "ant"), ("rl_games", "ant")}
"""Trainers and tasks in which normalisers of observations change between the rollout and the first minibatch."""


@pytest.mark.parametrize("task", ["cartpole", "ant"])
@pytest.mark.parametrize("trainer", RUNS)
def test_agents_of_isaac_lab(trainer: str, task: str, tmp_path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        run = RUNS[trainer](task, tmp_path)

    assert len(run.records) == 3
    for record in run.records:
        values = record.values
        assert "telemetry/metric_errors" not in values
        assert values["integrity/gae_identity"] <= 1e-5
        assert (values["integrity/ratio_init"] > 1e-3) == ((trainer, task) in CHANGING_STATISTICS)
        assert {"policy/kl", "grad/global/norm_preclip", "value/explained_variance"} <= values.keys()
    raised = {alarm.type for alarm in run.alarms if alarm.type.startswith("integrity/")}
    expected = {"integrity/ratio_init"} if (trainer, task) in CHANGING_STATISTICS else set()
    # skrl's advantages run on over time limits
    assert raised == expected | ({"integrity/equation"} if trainer == "skrl" else set())


def test_bootstrap_at_time_limits_ends_the_alarm_of_skrl(tmp_path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        run = skrl_run("cartpole", tmp_path, time_limit_bootstrap=True)

    assert not run.alarms
