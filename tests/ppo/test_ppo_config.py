"""Wrong settings end in one sentence with the offending value."""

from __future__ import annotations

from typing import Any

import pytest

from esper_telemetry.environments import make_env
from esper_telemetry.ppo import PPO, PPOConfig


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"num_epochs": -1}, "num_epochs must be at least 1, got -1"),
        ({"num_minibatches": 0}, "num_minibatches must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be positive and finite, got 0.0"),
        ({"learning_rate": float("inf")}, "learning_rate must be positive and finite, got inf"),
        ({"clip": -0.1}, "clip must be positive and finite, got -0.1"),
        ({"gamma": 1.1}, "gamma must be between 0 and 1, got 1.1"),
        ({"gae_lambda": float("nan")}, "gae_lambda must be between 0 and 1, got nan"),
        ({"entropy_coef": -1}, "entropy_coef must be finite, 0 or more, got -1"),
        ({"max_grad_norm": 0}, "max_grad_norm must be positive, got 0"),
        ({"hidden_sizes": ()}, r"hidden_sizes must name at least one layer, got \(\)"),
        ({"hidden_sizes": (64, 0)}, r"hidden_sizes must be at least 1 each, got \(64, 0\)"),
        ({"activation": "swish"}, "activation must be one of tanh, relu, got 'swish'"),
        ({"seed": -1}, "seed must be between 0 and 4294967295, got -1"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PPOConfig(**settings)


def test_minibatches_must_divide_the_rollout() -> None:
    with pytest.raises(ValueError, match="rollout of 3 x 128 = 384 rows, got 5; the nearest that do are 2, 3, 4, 6"):
        PPO(make_env("CartPole-v1", num_envs=3), PPOConfig(num_minibatches=5))


def test_steps_that_are_collected_already_are_no_goal() -> None:
    trainer = PPO(make_env("CartPole-v1", num_envs=2, seed=0), PPOConfig(num_steps=8, hidden_sizes=(4,)))
    trainer.learn(16)

    with pytest.raises(ValueError, match="total_steps must exceed the 16 steps already collected, got 16"):
        trainer.learn(16)
