"""Small models of every algorithm of Stable-Baselines3 that `TelemetryCallback` supports."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from adapter_runs import moments, taps_in
from gymnasium import spaces
from mistakes.corpus import BY_NAME
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from esper_telemetry import Telemetry
from esper_telemetry.adapters.sb3 import TelemetryCallback
from esper_telemetry.journal.read import Run, read_run
from esper_telemetry.lab.faults import sb3_models
from esper_telemetry.lab.faults.fault_catalogue import find
from esper_telemetry.lab.faults.sb3_models import MaskedArms, WithoutVelocities
from esper_telemetry.lab.faults.sb3_runs import BREAKS

ROLLOUT = 128
SETTINGS = {"n_steps": 32, "device": "cpu", "seed": 3}
MINIBATCHES: Mapping[str, Any] = {**SETTINGS, "batch_size": 32, "n_epochs": 2}
FAILING = (
    *(f"sb3_minibatches.{name}" for name in ("loss_columns", "sample_columns", "MinibatchListener.before_clip", "ops.checked_norms")),
    *(f"sb3_rollouts.RolloutRecorder.{name}" for name in ("after_action", "after_step")),
)
IN_BACKENDS = ("recurrent", "pendulum")


def of_corpus(name: str, *, correct: bool = False) -> Any:
    """The classes of a program of `benchmarks/mistakes`, or of its correct twin."""
    program = BY_NAME[name]
    names: dict[str, Any] = {"__name__": name}
    exec((program.correct() if correct else program).text(), names)
    return SimpleNamespace(**names)


class Several(gym.Env[Any, Any]):
    """Actions with several parts; the reward is the fraction of zeros."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.action_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        paid = float(np.mean(np.asarray(action) == 0))
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), paid, self._steps >= 7, False, {}


class Pictures(gym.Env[Any, Any]):
    observation_space = spaces.Box(0, 255, (1, 36, 36), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._picture(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._picture(), float(action), bool(self.np_random.random() < 0.1), False, {}

    def _picture(self) -> Any:
        return self.np_random.integers(0, 256, (1, 36, 36), dtype=np.uint8)


class Parts(gym.ObservationWrapper[Any, int, Any]):
    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        part = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = spaces.Dict({"cart": part, "pole": part})

    def observation(self, observation: Any) -> dict[str, Any]:
        return {"cart": observation[:2], "pole": observation[2:]}


def cartpole(num_envs: int = 4) -> Any:
    return make_vec_env("CartPole-v1", num_envs, seed=1)


def masked_cartpole(num_envs: int = 4) -> Any:
    return make_vec_env(lambda: WithoutVelocities(gym.make("CartPole-v1")), num_envs, seed=1)


def ppo(**changes: Any) -> PPO:
    return PPO("MlpPolicy", cartpole(), **{**MINIBATCHES, **changes})


def ppo_alone(**changes: Any) -> PPO:
    return PPO("MlpPolicy", cartpole(1), **{**MINIBATCHES, "n_steps": ROLLOUT, **changes})


def pendulum(**changes: Any) -> PPO:
    env = VecNormalize(make_vec_env("Pendulum-v1", 4, seed=1))
    return PPO("MlpPolicy", env, **{**MINIBATCHES, "clip_range_vf": 0.2, **changes})


def pendulum_sde(**changes: Any) -> PPO:
    kwargs = {"squash_output": True}
    settings = {**MINIBATCHES, "use_sde": True, "policy_kwargs": kwargs, **changes}
    return PPO("MlpPolicy", make_vec_env("Pendulum-v1", 4, seed=1), **settings)


def stopping_early(**changes: Any) -> PPO:
    return ppo(**{"target_kl": 1e-5, "learning_rate": 0.01, "n_epochs": 4, **changes})


def multi_discrete(**changes: Any) -> PPO:
    env = make_vec_env(lambda: Several(spaces.MultiDiscrete([3, 2])), 4, seed=1)
    return PPO("MlpPolicy", env, **{**MINIBATCHES, **changes})


def multi_binary(**changes: Any) -> PPO:
    env = make_vec_env(lambda: Several(spaces.MultiBinary(3)), 4, seed=1)
    return PPO("MlpPolicy", env, **{**MINIBATCHES, **changes})


def pictures(**changes: Any) -> PPO:
    return PPO("CnnPolicy", make_vec_env(Pictures, 2, seed=1), **{**MINIBATCHES, "n_steps": ROLLOUT // 2, **changes})


def a2c(**changes: Any) -> A2C:
    return A2C("MlpPolicy", cartpole(), **{**SETTINGS, **changes})


def recurrent(**changes: Any) -> RecurrentPPO:
    kwargs = {"lstm_hidden_size": 16, "net_arch": [16], **changes.pop("policy_kwargs", {})}
    return RecurrentPPO("MlpLstmPolicy", masked_cartpole(), policy_kwargs=kwargs, **{**MINIBATCHES, **changes})


def recurrent_shared(**changes: Any) -> RecurrentPPO:
    return recurrent(policy_kwargs={"shared_lstm": True, "enable_critic_lstm": False, "n_lstm_layers": 2}, **changes)


def maskable(**changes: Any) -> MaskablePPO:
    return MaskablePPO("MlpPolicy", make_vec_env(MaskedArms, 4, seed=1), **{**MINIBATCHES, **changes})


MODELS: Mapping[str, Callable[..., Any]] = {
    factory.__name__: factory
    for factory in (
        *(ppo, ppo_alone, pendulum, pendulum_sde, stopping_early, multi_discrete, multi_binary, pictures),
        *(a2c, recurrent, recurrent_shared, maskable),
    )
}

CAUSES = {
    "lr_x100": {"opt/update_too_large", "policy/kl_spike"},
    "reward_1e4": {"reward/unscaled"},
    "obs_mismatch": {"integrity/ratio_init"},
    "dead_relu": {"repr/dormant"},
}
HEALTHY: Mapping[str, Callable[[], Any]] = {"cartpole": lambda: sb3_models.MODELS["sb3-cartpole"](1)}


def broken(fault: str) -> Any:
    model = HEALTHY["cartpole"]()
    BREAKS[fault](model, find(fault).dose)
    return model


BROKEN: Mapping[str, Callable[[], Any]] = {fault: partial(broken, fault) for fault in CAUSES}


def train(model: Any, updates: int, telemetry: Telemetry | None = None) -> Any:
    callback = None if telemetry is None else TelemetryCallback(telemetry, updates_per_record=1)
    return model.learn(updates * model.n_steps * model.n_envs, callback=callback)


def recorded_run(model: Any, run_dir: Path, *, steps: int = 384, level: str = "normal", sinks: Sequence[str] = (), **settings: Any) -> Run:
    with Telemetry(sinks, run_dir=run_dir, level=level, **{"offload": False, **settings}) as telemetry:
        model.learn(steps, callback=TelemetryCallback(telemetry))
    return read_run(run_dir)


def fingerprint(model: Any) -> dict[str, Any]:
    numpy_state = torch.as_tensor(np.random.get_state()[1].astype(np.int64))  # type: ignore[index]  # the legacy generator's keys
    return {**model.policy.state_dict(), **moments(model.policy.optimizer), "torch": torch.get_rng_state(), "numpy": numpy_state}


def taps_of(model: Any) -> list[str]:
    outputs = model._logger.output_formats if hasattr(model, "_logger") else []
    copies = [type(output).__name__ for output in outputs if type(output).__name__ == "LogCopy"]
    return taps_in([model, model.rollout_buffer, *model.policy.modules()], model.policy.optimizer) + copies
