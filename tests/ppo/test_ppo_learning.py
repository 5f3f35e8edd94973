"""Learning curves: medians over five seeds of the mean return of the last 100 episodes. Minutes, not seconds."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

import pytest

from esper_telemetry.environments import make_env
from esper_telemetry.events import EpisodeEnd
from esper_telemetry.ppo import PPO, PPOConfig


def final_return(env_id: str, total_steps: int, seed: int, settings: dict[str, Any]) -> float:
    trainer = PPO(make_env(env_id, seed=seed), PPOConfig(seed=seed, **settings))
    returns: deque[float] = deque(maxlen=100)
    trainer.hooks.on(EpisodeEnd, lambda event: returns.extend(event.returns))
    trainer.learn(total_steps)
    return statistics.fmean(returns)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "total_steps", "goal", "settings"),
    [
        ("CartPole-v1", 100_000, 475, {}),
        ("Acrobot-v1", 120_000, -100, {}),
        ("Pendulum-v1", 100_000, -300, {"gamma": 0.9}),
    ],
)
def test_the_defaults_learn_classic_control(
    env_id: str, total_steps: int, goal: float, settings: dict[str, Any]
) -> None:
    returns = [final_return(env_id, total_steps, seed, settings) for seed in range(5)]

    print(env_id, total_steps, *(f"{value:.1f}" for value in returns))
    assert statistics.median(returns) >= goal
