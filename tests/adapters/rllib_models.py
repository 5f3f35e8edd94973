"""Small configurations of RLlib's PPO: categorical and Gaussian, shared encoder, LSTM, two modules, two learners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.learner import general_advantage_estimation
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from torch import Tensor

from esper_telemetry import Telemetry
from esper_telemetry.adapters.rllib import attach_config
from esper_telemetry.journal.read import Run, read_run


class CartAndPendulum(MultiAgentEnv):  # type: ignore[misc, unused-ignore]  # Ray may be absent
    """Two agents with different actions; an episode ends when both have ended."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.envs = {"cart": gym.make("CartPole-v1"), "pendulum": gym.make("Pendulum-v1", max_episode_steps=30)}
        self.agents = self.possible_agents = [*self.envs]
        self.observation_spaces = {name: env.observation_space for name, env in self.envs.items()}
        self.action_spaces = {name: env.action_space for name, env in self.envs.items()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.ended: set[str] = set()
        return {name: env.reset(seed=seed)[0] for name, env in self.envs.items()}, {}

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        steps = {name: self.envs[name].step(action) for name, action in actions.items()}
        seen, rewards, terminated, truncated = ({name: step[i] for name, step in steps.items()} for i in range(4))
        self.ended |= {name for name in steps if terminated[name] or truncated[name]}
        return seen, rewards, {**terminated, "__all__": len(self.ended) == 2}, {**truncated, "__all__": False}, {}


def config(env: Any = "CartPole-v1", *, seed: int = 1, envs: int = 4, **settings: Any) -> PPOConfig:
    small = {"train_batch_size_per_learner": 256, "minibatch_size": 64, "num_epochs": 3, "lr": 1e-3}
    result = PPOConfig().environment(env).env_runners(num_env_runners=0, num_envs_per_env_runner=envs)
    return result.training(**{**small, **settings}).debugging(seed=seed, log_level="ERROR")


def pendulum() -> PPOConfig:
    unclipped: dict[str, Any] = {"vf_clip_param": float("inf"), "use_kl_loss": False, "grad_clip": 0.5, "entropy_coeff": 0.01}
    result = config("Pendulum-v1", lambda_=0.95, **unclipped)
    return result.rl_module(model_config=DefaultModelConfig(free_log_std=True))


def with_model(**settings: Any) -> PPOConfig:
    scheduled = [[0, 0.02], [1000, 0.0]]
    return config(entropy_coeff=scheduled).rl_module(model_config=DefaultModelConfig(**settings))


def two_modules() -> PPOConfig:
    one_env = config(CartAndPendulum, envs=1, grad_clip=0.5)
    gaussian = RLModuleSpec(model_config=DefaultModelConfig(free_log_std=True))
    specs = {"cart": RLModuleSpec(), "pendulum": gaussian}
    one_env.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
    return one_env.multi_agent(policies={"cart", "pendulum"}, policy_mapping_fn=lambda agent, *_, **__: agent)


def two_learners() -> PPOConfig:
    return config(envs=1).learners(num_learners=2).env_runners(num_env_runners=4)


CONFIGS: Mapping[str, Callable[[], PPOConfig]] = {
    "categorical": config,
    "gaussian": pendulum,
    "shared": partial(with_model, vf_share_layers=True),
    "lstm": partial(with_model, use_lstm=True, lstm_cell_size=16, max_seq_len=8),
    "two_modules": two_modules,
}


class RecordingLearner(PPOTorchLearner):  # type: ignore[misc, unused-ignore]  # Ray may be absent
    """Keeps what its last update computed: for each minibatch and module RLlib's columns, outputs, values and loss.

    A learner writes it to `learner_config_dict["path"]`, with its number in the name.
    """

    def build(self) -> None:
        super().build()
        self.minibatches: list[dict[str, dict[str, Any]]] = []
        self.norms: list[float] = []

    def compute_losses(self, *, fwd_out: Any, batch: Any) -> Any:
        losses = super().compute_losses(fwd_out=fwd_out, batch=batch)
        columns = ("actions", "action_logp", "advantages", "value_targets", "loss_mask")
        self.minibatches.append(
            {
                name: {
                    **{key: batch[name][key].clone() for key in columns},
                    "outputs": fwd_out[name]["action_dist_inputs"].detach(),
                    "values": self.module[name].unwrapped().compute_values(batch[name]).detach(),
                    "loss": loss.detach(),
                }
                for name, loss in losses.items()
            }
        )
        return losses

    def compute_gradients(self, loss_per_module: Any, **kwargs: Any) -> Any:
        gradients = super().compute_gradients(loss_per_module, **kwargs)
        self.norms.append(float(torch.stack([x.norm() for x in gradients.values()]).norm()))
        return gradients

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.minibatches, self.norms = [], []
        result = super().update(*args, **kwargs)
        path = self.config.learner_config_dict["path"]
        torch.save((self.minibatches, self.norms), f"{path}{self._learner_index}.pt")
        return result


class WrongTargets(PPOTorchLearner):  # type: ignore[misc, unused-ignore]  # Ray may be absent
    """Computes advantages with settings of the connector that differ from the configuration."""

    def build(self) -> None:
        super().build()
        self._learner_connector.connectors[-1].lambda_ = 0.5


class EndlessTargets(PPOTorchLearner):  # type: ignore[misc, unused-ignore]  # Ray may be absent
    """Computes advantages with the value of the state after a termination, as after a time limit."""

    def build(self) -> None:
        super().build()
        connector, compute = self._learner_connector.connectors[-1], general_advantage_estimation.compute_value_targets

        def endless(*, terminateds: Any, truncateds: Any, **columns: Any) -> Any:
            return compute(terminateds=0.0 * terminateds, truncateds=np.maximum(terminateds, truncateds), **columns)

        def call(**arguments: Any) -> Any:
            general_advantage_estimation.compute_value_targets = endless
            try:
                return connector(**arguments)
            finally:
                general_advantage_estimation.compute_value_targets = compute

        self._learner_connector.connectors[-1] = call


class WithoutClip(PPOTorchLearner):  # type: ignore[misc, unused-ignore]  # Ray may be absent
    def compute_loss_for_module(self, *, config: Any, **arguments: Any) -> Any:
        if not hasattr(self, "unclipped"):
            self.unclipped = config.copy(copy_frozen=False).training(clip_param=1e9)
        return super().compute_loss_for_module(config=self.unclipped, **arguments)


LARGE: Mapping[str, Any] = {"train_batch_size_per_learner": 1024, "minibatch_size": 128, "num_epochs": 6, "envs": 8}
"""Settings with which CartPole is learned in some updates."""


def learning_config(**settings: Any) -> PPOConfig:
    return config(**{**LARGE, "vf_clip_param": float("inf"), "vf_loss_coeff": 0.01, "lambda_": 0.95, **settings})


BROKEN: Mapping[str, Callable[[], PPOConfig]] = {
    "learning_rate_x100": lambda: learning_config(lr=0.1),
    "lambda": lambda: learning_config().learners(learner_class=WrongTargets),
    "no_terminals": lambda: learning_config().learners(learner_class=EndlessTargets),
    "no_clip": lambda: learning_config(lr=3e-3).learners(learner_class=WithoutClip),
}


def default_config(seed: int) -> PPOConfig:
    """RLlib's own defaults for learning, with environments in this process."""
    result = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0, num_envs_per_env_runner=8)
    return result.debugging(seed=seed, log_level="ERROR")


def recorded_run(configuration: PPOConfig, run_dir: Path, *, updates: int = 3, sinks: Any = (), **settings: Any) -> Run:
    attach_config(configuration, lambda: Telemetry(sinks, run_dir=run_dir, **{"offload": False, **settings}))
    train(configuration, updates)
    return read_run(run_dir)


def train(configuration: PPOConfig, updates: int) -> dict[str, Tensor]:
    """Train, and return weights and optimizer states of the learner, and the state of the random generators."""
    algorithm = configuration.build_algo()
    for _ in range(updates):
        algorithm.train()
    state = algorithm.learner_group.get_state()["learner"]
    generators = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.random.get_state(legacy=False)["state"]["key"].astype(np.int64)),
    }
    algorithm.stop()
    return {**tensors({"module": state["rl_module"], "optimizer": state["optimizer"]}), **generators}


def tensors(tree: Any, path: str = "") -> dict[str, Tensor]:
    if isinstance(tree, Mapping):
        return {key: x for name, part in tree.items() for key, x in tensors(part, f"{path}/{name}").items()}
    return {path: torch.as_tensor(tree)} if isinstance(tree, np.ndarray | float | Tensor) else {}
