"""Runs of Stable-Baselines3 with one fault each."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import FlattenExtractor
from torch import Tensor, nn

SETTINGS = {"n_steps": 128, "batch_size": 128, "n_epochs": 4, "device": "cpu", "seed": 1}
ROLLOUT = 128 * 8


class Larger(gym.RewardWrapper[Any, Any]):
    """Rewards 10,000 times as large."""

    def reward(self, reward: Any) -> float:
        return 1e4 * float(reward)


class OtherInTraining(FlattenExtractor):
    """Normalises observations by their own mean and standard deviation in training, and not in acting."""

    def forward(self, observations: Tensor) -> Tensor:
        rows = super().forward(observations)
        return (rows - rows.mean(0)) / (rows.std(0) + 1e-8) if self.training else rows


def ppo(env: Any = None, **settings: Any) -> PPO:
    return PPO("MlpPolicy", env or make_vec_env("CartPole-v1", 8, seed=1), **{**SETTINGS, **settings})


def healthy() -> PPO:
    return ppo()


def learning_rate_x100() -> PPO:
    return ppo(learning_rate=3e-2)


def reward_1e4() -> PPO:
    return ppo(make_vec_env("CartPole-v1", 8, seed=1, wrapper_class=Larger))


def other_observations() -> PPO:
    return ppo(policy_kwargs={"features_extractor_class": OtherInTraining})


def dead_relu() -> PPO:
    model = ppo(policy_kwargs={"activation_fn": nn.ReLU})
    with torch.no_grad():
        for network in (model.policy.mlp_extractor.policy_net, model.policy.mlp_extractor.value_net):
            network.get_parameter("0.bias").fill_(-10.0)
    return model
