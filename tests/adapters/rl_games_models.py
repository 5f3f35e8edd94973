"""Small runners of rl_games: continuous and discrete PPO, an LSTM, a central value function, normalisers."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from adapter_runs import moments, taps_in
from torch import Tensor

from esper_telemetry import Telemetry
from esper_telemetry.adapters.rl_games import TelemetryObserver

with warnings.catch_warnings():  # rl_games uses functions of torch that are deprecated
    warnings.simplefilter("ignore")
    from rl_games.common import env_configurations, vecenv
    from rl_games.common.ivecenv import IVecEnv
    from rl_games.torch_runner import Runner

ENVS, STEPS = 8, 16
ROLLOUT = ENVS * STEPS
FAILING = ("next_values", "joined_heads", "AlgoListener._columns")
IN_BACKENDS = ("discrete", "lstm")


class VectorEnv(IVecEnv):  # type: ignore[misc] # the package has no type information
    """Environments of Gymnasium with tensors and time limits, as Isaac Lab's wrapper gives them."""

    def __init__(
        self, name: str, envs: int, *, seed: int = 1, states: bool = False, reward_scale: float = 1.0, blind: bool = False, **settings: Any
    ) -> None:
        same_step = gym.vector.AutoresetMode.SAME_STEP
        self._env = gym.vector.SyncVectorEnv([lambda: gym.make(name, **settings)] * envs, autoreset_mode=same_step)
        self._seed, self._states, self._scale, self._blind = seed, states, reward_scale, blind

    def get_env_info(self) -> dict[str, Any]:
        observations, actions = self._env.single_observation_space, self._env.single_action_space
        unit = gym.spaces.Box(-1.0, 1.0, actions.shape) if isinstance(actions, gym.spaces.Box) else actions
        info = {"observation_space": observations, "action_space": unit}
        return {**info, "state_space": observations} if self._states else info

    def reset(self) -> Any:
        observations, _ = self._env.reset(seed=self._seed)
        return self._returned(observations)

    def step(self, actions: Tensor) -> Any:
        chosen = actions.cpu().numpy()
        chosen = 2.0 * chosen if chosen.dtype.kind == "f" else chosen
        observations, rewards, terminated, truncated, _ = self._env.step(chosen)
        paid = torch.as_tensor(self._scale * np.asarray(rewards), dtype=torch.float32)
        limits = torch.as_tensor(np.asarray(truncated) & ~np.asarray(terminated))
        done = torch.as_tensor(np.asarray(terminated) | np.asarray(truncated))
        return self._returned(observations), paid, done, {"time_outs": limits}

    def _returned(self, observations: Any) -> Any:
        rows = torch.as_tensor(np.asarray(observations, np.float32).copy())
        rows = 0 * rows if self._blind else rows
        return {"obs": rows, "states": rows} if self._states else rows


vecenv.register("SMALL", lambda config_name, num_actors, **settings: VectorEnv(envs=num_actors, **settings))
env_configurations.register("small", {"vecenv_type": "SMALL", "env_creator": lambda **_: None})

CARTPOLE: Mapping[str, Any] = {"name": "CartPole-v1"}
PENDULUM: Mapping[str, Any] = {"name": "Pendulum-v1", "reward_scale": 0.1}
SHORT: Mapping[str, Any] = {**PENDULUM, "max_episode_steps": 20}
"""A pendulum whose episodes end within two rollouts."""

MLP = {"units": [32, 32], "activation": "tanh", "initializer": {"name": "default"}}
SPACE = {
    "mu_activation": "None",
    "sigma_activation": "None",
    "mu_init": {"name": "default"},
    "sigma_init": {"name": "const_initializer", "val": 0},
    "fixed_sigma": True,
}


def configuration(
    env: Mapping[str, Any] = SHORT,
    *,
    seed: int = 1,
    envs: int = ENVS,
    steps: int = STEPS,
    separate: bool = False,
    rnn: bool = False,
    central: bool = False,
    mlp: Mapping[str, Any] = MLP,
    **settings: Any,
) -> dict[str, Any]:
    discrete = env["name"] == "CartPole-v1"
    network = {"name": "actor_critic", "separate": separate, "mlp": mlp}
    network["space"] = {"discrete": {}} if discrete else {"continuous": SPACE}
    if rnn:
        network["rnn"] = {"name": "lstm", "units": 16, "layers": 1}
    config: dict[str, Any] = {
        "name": "small",
        "full_experiment_name": "small",
        "train_dir": tempfile.mkdtemp(prefix="rl_games-"),
        "env_name": "small",
        "env_config": {**env, "states": central, "seed": seed},
        "device": "cpu",
        "ppo": True,
        "mixed_precision": False,
        "torch_compile": False,
        "normalize_input": False,
        "normalize_value": False,
        "normalize_advantage": True,
        "value_bootstrap": True,
        "num_actors": envs,
        "reward_shaper": {"scale_value": 1.0},
        "gamma": 0.99,
        "tau": 0.95,
        "learning_rate": 3e-4,
        "lr_schedule": "adaptive",
        "kl_threshold": 0.008,
        "max_epochs": 3,
        "save_best_after": 10_000,
        "grad_norm": 1.0,
        "entropy_coef": 0.01,
        "truncate_grads": True,
        "e_clip": 0.2,
        "horizon_length": steps,
        "minibatch_size": steps * envs // 4,
        "mini_epochs": 2,
        "critic_coef": 2.0,
        "clip_value": True,
        "bounds_loss_coef": 1e-4,
        "print_stats": False,
        **settings,
    }
    if central:
        names = ("learning_rate", "clip_value", "normalize_input", "minibatch_size", "mini_epochs", "truncate_grads")
        config["central_value_config"] = {
            **{name: config[name] for name in names},
            "lr_schedule": "constant",
            "network": {"name": "actor_critic", "central_value": True, "mlp": MLP},
        }
    return {
        "params": {
            "seed": seed,
            "torch_threads": 0,
            "algo": {"name": "a2c_discrete" if discrete else "a2c_continuous"},
            "model": {"name": "discrete_a2c" if discrete else "continuous_a2c_logstd"},
            "network": network,
            "config": config,
        }
    }


CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "continuous": {},
    "separate": {"separate": True, "lr_schedule": "linear", "reward_shaper": {"scale_value": 0.5}},
    "discrete": {"env": CARTPOLE},
    "lstm": {"rnn": True, "seq_length": 8},
    "central_value": {"central": True, "normalize_value": True},
    "normalized_value": {"normalize_value": True, "bounds_loss_coef": 0.01, "clip_value": False},
    "mixed_precision": {"mixed_precision": True, "value_bootstrap": False, "schedule_type": "legacy"},
}

MODELS: Mapping[str, Callable[[], Mapping[str, Any]]] = {name: partial(dict, settings) for name, settings in CONFIGURATIONS.items()}

LARGE: Mapping[str, Any] = {"env": CARTPOLE, "envs": 16, "steps": 64, "mini_epochs": 4, "learning_rate": 1e-3}
"""Settings with which CartPole is learned."""

HEALTHY: Mapping[str, Callable[[], Mapping[str, Any]]] = {f"seed {seed}": partial(dict, LARGE, seed=seed) for seed in (1, 2, 3)}

BROKEN: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "learning_rate_x100": partial(dict, LARGE, lr_schedule="constant", learning_rate=0.1),
    "reward_1e4": partial(dict, LARGE, env={**CARTPOLE, "reward_scale": 1e4}),
    "constant_observations": partial(dict, LARGE, env={**CARTPOLE, "blind": True}),
    "normalized_observations": partial(dict, LARGE, normalize_input=True),
}
CAUSES = {
    "learning_rate_x100": {"policy/kl_spike", "opt/update_too_large"},
    "reward_1e4": {"reward/unscaled"},
    "constant_observations": {"obs/constant", "opt/stalled_weights"},  # weights whose inputs are 0 do not change
    "normalized_observations": {"integrity/ratio_init"},
}


class Keeper:
    algo: Any = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None

    def after_init(self, algo: Any) -> None:
        self.algo = algo


def train(settings: Mapping[str, Any], updates: int, telemetry: Telemetry | None = None) -> Any:
    """Return the agent after some updates, without rl_games' prints."""
    keeper = Keeper()
    with contextlib.redirect_stdout(io.StringIO()):
        runner = Runner(keeper if telemetry is None else TelemetryObserver(telemetry, keeper))
        runner.load(configuration(**{**copy.deepcopy(dict(settings)), "max_epochs": updates}))
        runner.run_train({})
    return keeper.algo


def fingerprint(algo: Any) -> dict[str, Tensor]:
    parts = {"model": algo.model}
    if algo.has_central_value:
        parts["central"] = algo.central_value_net
    weights = {f"{part}.{name}": x.clone() for part, module in parts.items() for name, x in module.state_dict().items()}
    return {**weights, **moments(algo.optimizer), "generator": torch.get_rng_state(), "rate": torch.tensor(algo.last_lr)}


def taps_of(algo: Any) -> list[str]:
    return taps_in([algo, algo.model, algo.scaler, algo.writer], algo.optimizer)
