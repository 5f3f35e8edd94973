"""Small runners of RSL-RL with PPO, feed-forward and recurrent."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from adapter_runs import moments, recorded, taps_in
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from rsl_vector import SignedCartPole
from tensordict import TensorDict
from torch import Tensor

from esper_telemetry import Telemetry
from esper_telemetry.adapters.rsl_rl import attach_runner
from esper_telemetry.journal.read import Run

ENVS, STEPS = 8, 16
ROLLOUT = ENVS * STEPS
FAILING = ("next_values", "evaluated_minibatches")
IN_BACKENDS = ("cartpole", "lstm")


class Pendulum(VecEnv):  # type: ignore[misc] # the package has no type information
    """Pendulum-v1 with actions scaled from [-1, 1] to the full torque; only the time limit ends episodes, within two rollouts."""

    def __init__(self, num_envs: int, seed: int, *, steps: int = 20) -> None:
        self.num_envs, self.num_actions, self.max_episode_length = num_envs, 1, steps
        self.device = "cpu"
        self.cfg: dict[str, Any] = {}
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long)
        same_step = gym.vector.AutoresetMode.SAME_STEP
        self._env = gym.vector.SyncVectorEnv(
            [lambda: gym.make("Pendulum-v1", max_episode_steps=steps)] * num_envs, autoreset_mode=same_step
        )
        self._observations, _ = self._env.reset(seed=seed)

    def get_observations(self) -> TensorDict:
        rows = torch.as_tensor(np.asarray(self._observations, np.float32).copy())
        return TensorDict({"policy": rows}, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        torques = 2.0 * actions.clamp(-1, 1).numpy()
        self._observations, rewards, terminated, truncated, _ = self._env.step(torques)
        paid = torch.as_tensor(0.1 * np.asarray(rewards), dtype=torch.float32)
        done = torch.as_tensor(np.asarray(terminated) | np.asarray(truncated)).long()
        return self.get_observations(), paid, done, {"time_outs": torch.as_tensor(np.asarray(truncated))}


class Larger(SignedCartPole):
    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        observations, rewards, dones, extras = super().step(actions)
        return observations, 1e4 * rewards, dones, extras


class Blind(SignedCartPole):
    def get_observations(self) -> TensorDict:
        return super().get_observations() * 0


GAUSSIAN = {"class_name": "GaussianDistribution", "init_std": 1.0}


def config(*, model: str = "MLPModel", distribution: Mapping[str, Any] = GAUSSIAN, steps: int = STEPS, **settings: Any) -> dict[str, Any]:
    """Return a configuration; settings named `model_*` belong to the models, all others to the algorithm."""
    networks: dict[str, Any] = {"hidden_dims": [32, 32], "activation": "tanh"}
    if model == "RNNModel":
        networks |= {"rnn_hidden_dim": 16}
    networks |= {name.removeprefix("model_"): value for name, value in settings.items() if name.startswith("model_")}
    algorithm = {
        "class_name": "PPO",
        "num_learning_epochs": 2,
        "num_mini_batches": 4,
        "entropy_coef": 0.01,
        **{name: value for name, value in settings.items() if not name.startswith("model_")},
    }
    return {
        "num_steps_per_env": steps,
        "save_interval": 1000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": algorithm,
        "actor": {"class_name": model, **networks, "distribution_cfg": dict(distribution)},
        "critic": {"class_name": model, **networks},
    }


def runner(
    env: Callable[[int, int], Any] = SignedCartPole,
    *,
    seed: int = 1,
    envs: int = ENVS,
    log_dir: Path | None = None,
    logger: Any = None,
    device: str = "cpu",
    **settings: Any,
) -> OnPolicyRunner:
    torch.manual_seed(seed)
    configuration = {**config(**settings), **({} if logger is None else {"logger": logger})}
    with contextlib.redirect_stdout(io.StringIO()):
        return OnPolicyRunner(env(envs, seed), configuration, log_dir=None if log_dir is None else str(log_dir), device=device)


MODELS: Mapping[str, Callable[..., OnPolicyRunner]] = {
    "cartpole": runner,
    "pendulum": lambda **changes: runner(Pendulum, model_obs_normalization=True, **changes),
    "per_minibatch": lambda **changes: runner(normalize_advantage_per_mini_batch=True, **changes),
    "fixed_rate": lambda **changes: runner(schedule="fixed", use_clipped_value_loss=False, **changes),
    "state_dependent_std": lambda **changes: runner(distribution={"class_name": "HeteroscedasticGaussianDistribution"}, **changes),
    "beta": lambda **changes: runner(distribution={"class_name": "BetaDistribution"}, **changes),
    "lstm": lambda **changes: runner(Pendulum, model="RNNModel", **changes),
    "gru": lambda **changes: runner(model="RNNModel", model_rnn_type="gru", model_rnn_num_layers=2, **changes),
}


LARGE: Mapping[str, Any] = {"envs": 16, "steps": 64, "num_learning_epochs": 4}
"""Settings with which CartPole is learned."""


def drifting_normalizer() -> OnPolicyRunner:
    """Changes the observation statistics between acting and training, as RSL-RL did before leggedrobotics/rsl_rl#225."""
    model = runner(model_obs_normalization=True, **LARGE)
    alg, compute_returns = model.alg, model.alg.compute_returns

    def compute_returns_and_update(observations: TensorDict) -> None:
        compute_returns(observations)
        alg.actor.update_normalization(alg.storage.observations.flatten(0, 1))

    alg.compute_returns = compute_returns_and_update
    return model


BROKEN: Mapping[str, Callable[[], OnPolicyRunner]] = {
    "learning_rate_x100": lambda: runner(schedule="fixed", learning_rate=0.1, **LARGE),
    "reward_1e4": lambda: runner(Larger, **LARGE),
    "constant_observations": lambda: runner(Blind, **LARGE),
    "drifting_normalizer": drifting_normalizer,
}
CAUSES = {
    "learning_rate_x100": {"policy/kl_spike", "opt/update_too_large"},
    "reward_1e4": {"reward/unscaled"},
    "constant_observations": {"obs/constant"},
    "drifting_normalizer": {"integrity/ratio_init"},
}
HEALTHY = {
    "mlp": partial(runner, **LARGE),
    "rnn": partial(runner, **LARGE, model="RNNModel"),
    "normalized": partial(runner, **LARGE, model_obs_normalization=True),
}
"""The rate follows the KL divergence, and changes by a factor of a hundred within one update."""


def learn(model: OnPolicyRunner, iterations: int) -> None:
    """Learn without RSL-RL's table of numbers."""
    with contextlib.redirect_stdout(io.StringIO()):
        model.learn(iterations)


def train(model: OnPolicyRunner, updates: int, telemetry: Telemetry | None = None) -> OnPolicyRunner:
    if telemetry is not None:
        attach_runner(telemetry, model)
    learn(model, updates)
    return model


def recorded_run(model: OnPolicyRunner, run_dir: Path, **settings: Any) -> Run:
    return recorded(train, model, run_dir, **settings)[0]


def taps_of(model: Any) -> list[str]:
    alg = model.alg
    return taps_in([model, model.logger, alg, alg.storage, *alg.actor.modules(), *alg.critic.modules()], alg.optimizer)


def fingerprint(model: OnPolicyRunner) -> dict[str, Tensor]:
    alg = model.alg
    weights = {f"{part}.{name}": tensor.clone() for part in ("actor", "critic") for name, tensor in getattr(alg, part).state_dict().items()}
    return {**weights, **moments(alg.optimizer), "generator": torch.get_rng_state(), "rate": torch.tensor(alg.learning_rate)}
