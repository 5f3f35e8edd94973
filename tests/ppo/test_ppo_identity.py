"""The rollout acts in NumPy, the update runs in torch: before its first step, both have the same probabilities and values."""

from typing import Any

import pytest
from ppo_builders import SMALL, cartpole, pendulum
from short_trainings import learned

from esper_telemetry.events import MinibatchEnd
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.collectors.collector import TensorCollector
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.ppo.environments.environment_registry import make_env

NORMALIZED: dict[str, Any] = {"normalize_observations": True, "normalize_rewards": True}


def seeing(name: str, **settings: Any) -> PPO:
    return PPO(make_env(f"seeing_env:{name}-v0", num_envs=4, seed=1), PPOConfig(**{**SMALL, "num_steps": 16, **settings}))


def recall_on_the_device(**settings: Any) -> PPO:
    trainer = PPO(CueRecall(8, seed=1), PPOConfig(**{**SMALL, "num_steps": 16, **settings}))
    trainer.collector = TensorCollector(CueRecall(8, seed=1), trainer.policy, 16, 0)
    return trainer


SETTINGS: list[dict[str, Any]] = [
    {},
    {"shared_trunk": True},
    NORMALIZED,
    {"policy": "lstm"},
    {"policy": "gru"},
    {"policy": "lstm", "shared_trunk": True, **NORMALIZED},
    {"policy": "gru", "shared_trunk": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("make", [cartpole, pendulum])
def test_the_first_minibatch_finds_the_probabilities_and_values_of_collection(make: Any, settings: dict[str, Any]) -> None:
    expect_identity(make(num_minibatches=2, lstm_size=16, **settings), bound=1e-5 if "policy" in settings else 2e-6)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["Spotlight", "SpotlightParts"])
def test_so_it_does_with_images(name: str, settings: dict[str, Any]) -> None:
    expect_identity(seeing(name, num_minibatches=2, lstm_size=16, **settings), bound=1e-5, updates=2)


@pytest.mark.parametrize(("squash", "state_dependent"), [(True, False), (False, True), (True, True)])
def test_so_it_does_with_other_gaussians(squash: bool, state_dependent: bool) -> None:
    expect_identity(pendulum(squash=squash, state_dependent_std=state_dependent), bound=1e-5)


def test_so_it_does_with_rollouts_of_the_device() -> None:
    expect_identity(recall_on_the_device(policy="lstm", lstm_size=8, num_minibatches=2), bound=1e-5)


def expect_identity(trainer: PPO, *, bound: float, updates: int = 8) -> None:
    emitted = learned(trainer, updates * trainer.config.num_steps * trainer.env.num_envs, MinibatchEnd)

    first = [event for event in emitted.events if event.step == 0]
    assert len(first) >= updates
    assert max(event.log_ratio.abs().max().item() for event in first) < bound
    assert max((event.values - event.old_values).abs().max().item() for event in first) < 1e-4
