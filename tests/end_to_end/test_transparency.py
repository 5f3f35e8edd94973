"""Telemetry changes nothing: weights after training are bit-identical for every level and place of measurement."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import seeing_env  # noqa: F401  # registers the environments
import torch
from torch import Tensor

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.testing import MemorySink

pytestmark = pytest.mark.system

UPDATES = 3
STEPS = {
    "CartPole-v1": 64,
    "Pendulum-v1": 32,
    "Spotlight-v0": 16,
    "SpotlightParts-v0": 16,
    "FrozenLake-v1": 64,
    "cue-recall": 32,
}


def trained(env: str, telemetry: Telemetry | None, **settings: Any) -> dict[str, Tensor]:
    """Weights, optimizer state and torch's generator after some updates from one seed."""
    torch.manual_seed(5)
    trainer = PPO(make_env(env, num_envs=4), PPOConfig(seed=3, num_steps=STEPS[env], num_epochs=4, **settings))
    if telemetry is not None:
        attach(telemetry, trainer)
    while trainer.updates < UPDATES:
        trainer.learn(trainer.env_steps + 1)
    moments = {
        f"{index}.{name}": moment
        for index, state in trainer.optimizer.state_dict()["state"].items()
        for name, moment in state.items()
    }
    return {**trainer.policy.state_dict(), **moments, "generator": torch.get_rng_state()}


@cache
def alone(env: str, **settings: Any) -> dict[str, Tensor]:
    """The same without telemetry."""
    return trained(env, None, **settings)


def assert_equal_bit_for_bit(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("level", ["off", "minimal", "normal", "debug"])
@pytest.mark.parametrize("shared_trunk", [False, True])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_weights_are_bit_identical_at_every_level(env: str, shared_trunk: bool, level: str) -> None:
    bare = alone(env, shared_trunk=shared_trunk, entropy_coef=0.01)
    memory = MemorySink()

    with Telemetry([memory], run_dir=None, level=level) as telemetry:
        watched = trained(env, telemetry, shared_trunk=shared_trunk, entropy_coef=0.01)

    assert_equal_bit_for_bit(watched, bare)
    assert len(memory.records) == (0 if level == "off" else UPDATES)


@pytest.mark.parametrize("level", ["normal", "debug"])
@pytest.mark.parametrize(("env", "policy"), [("CartPole-v1", "lstm"), ("CartPole-v1", "gru"), ("cue-recall", "lstm")])
def test_weights_of_policies_with_memory_are_bit_identical_too(env: str, policy: str, level: str) -> None:
    """At DEBUG the policy makes three more passes over every rollout, its states get gradients, and a copy of it is trained."""
    settings = {"policy": policy, "lstm_size": 16, "normalize_observations": env == "CartPole-v1"}
    bare = alone(env, **settings)

    with Telemetry([MemorySink()], run_dir=None, level=level) as telemetry:
        watched = trained(env, telemetry, **settings)

    assert_equal_bit_for_bit(watched, bare)


@pytest.mark.parametrize("level", ["normal", "debug"])
@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("Pendulum-v1", {"squash": True}),
        ("Pendulum-v1", {"state_dependent_std": True, "entropy_coef": 0.01}),
        ("Pendulum-v1", {"squash": True, "state_dependent_std": True, "policy": "lstm"}),
        ("Pendulum-v1", {"squash": True, "precision": "bf16"}),
        ("Spotlight-v0", {"shared_trunk": True}),
        ("Spotlight-v0", {"policy": "lstm"}),
        ("SpotlightParts-v0", {"normalize_observations": True}),
        ("SpotlightParts-v0", {"policy": "gru", "shared_trunk": True}),
        ("FrozenLake-v1", {"normalize_observations": True}),
    ],
    ids=str,
)
def test_weights_are_bit_identical_for_every_kind_of_policy(env: str, settings: dict[str, Any], level: str) -> None:
    bare = alone(env, **settings)
    memory = MemorySink()

    with Telemetry([memory], run_dir=None, level=level) as telemetry:
        watched = trained(env, telemetry, **settings)

    assert_equal_bit_for_bit(watched, bare)
    assert len(memory.records) == UPDATES


def test_weights_are_bit_identical_beside_other_processes(tmp_path: Path) -> None:
    bare = alone("CartPole-v1")

    with Telemetry(["tensorboard"], run_dir=tmp_path / "run", level="debug") as telemetry:
        watched = trained("CartPole-v1", telemetry)

    assert_equal_bit_for_bit(watched, bare)
    assert len(read_run(tmp_path / "run").records) == UPDATES


@pytest.mark.parametrize("setting", [{"max_grad_norm": None}, {"entropy_coef": 0.0}, {"normalize_advantages": False}])
def test_what_only_telemetry_asks_for_leaves_no_trace(setting: dict[str, Any]) -> None:
    """Telemetry alone needs norms without clipping and an entropy that is not in the loss."""
    bare = alone("CartPole-v1", **setting)

    with Telemetry([MemorySink()], run_dir=None, level="debug") as telemetry:
        watched = trained("CartPole-v1", telemetry, **setting)

    assert_equal_bit_for_bit(watched, bare)


def test_another_seed_gives_other_weights() -> None:
    """Otherwise the comparison could pass for any weights."""
    bare = alone("CartPole-v1")
    other = PPO(make_env("CartPole-v1", num_envs=4), PPOConfig(seed=4))

    assert any(not torch.equal(bare[name], weight) for name, weight in other.policy.state_dict().items())
