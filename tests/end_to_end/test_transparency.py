"""Telemetry changes nothing: weights after training are bit-identical for every level and place of measurement."""

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
        f"{index}.{name}": moment for index, state in trainer.optimizer.state_dict()["state"].items() for name, moment in state.items()
    }
    return {**trainer.policy.state_dict(), **moments, "generator": torch.get_rng_state()}


@cache
def alone(env: str, **settings: Any) -> dict[str, Tensor]:
    return trained(env, None, **settings)


def assert_equal_bit_for_bit(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


POLICIES: list[tuple[str, dict[str, Any]]] = [
    *((env, {"shared_trunk": shared}) for env in ("CartPole-v1", "Pendulum-v1") for shared in (False, True)),
    ("CartPole-v1", {"policy": "lstm", "lstm_size": 16, "normalize_observations": True}),
    ("CartPole-v1", {"policy": "gru", "lstm_size": 16, "normalize_observations": True}),
    ("cue-recall", {"policy": "lstm", "lstm_size": 16}),
    ("Pendulum-v1", {"squash": True}),
    ("Pendulum-v1", {"state_dependent_std": True}),
    ("Pendulum-v1", {"squash": True, "state_dependent_std": True, "policy": "lstm"}),
    ("Pendulum-v1", {"squash": True, "precision": "bf16"}),
    ("Spotlight-v0", {"shared_trunk": True}),
    ("Spotlight-v0", {"policy": "lstm"}),
    ("SpotlightParts-v0", {"normalize_observations": True}),
    ("SpotlightParts-v0", {"policy": "gru", "shared_trunk": True}),
    ("FrozenLake-v1", {"normalize_observations": True}),
    # telemetry alone needs norms without clipping and an entropy that is not in the loss
    *(("CartPole-v1", setting) for setting in ({"max_grad_norm": None}, {"normalize_advantages": False})),
    ("CartPole-v1", {"entropy_coef": 0.0}),
]


@pytest.mark.parametrize(
    ("env", "settings", "level"),
    [
        *(("CartPole-v1", {}, level) for level in ("off", "minimal")),
        *((*policy, level) for policy in POLICIES for level in ("normal", "debug")),
    ],
    ids=str,
)
def test_weights_are_bit_identical(env: str, settings: dict[str, Any], level: str) -> None:
    """At DEBUG a policy with memory makes three more passes over every rollout, and a copy of it is trained."""
    settings = {"entropy_coef": 0.01, **settings}
    bare = alone(env, **settings)
    memory = MemorySink()

    with Telemetry([memory], run_dir=None, level=level) as telemetry:
        watched = trained(env, telemetry, **settings)

    assert_equal_bit_for_bit(watched, bare)
    assert len(memory.records) == (0 if level == "off" else UPDATES)


def test_weights_are_bit_identical_beside_other_processes(tmp_path: Path) -> None:
    bare = alone("CartPole-v1")

    with Telemetry(["tensorboard"], run_dir=tmp_path / "run", level="debug") as telemetry:
        watched = trained("CartPole-v1", telemetry)

    assert_equal_bit_for_bit(watched, bare)
    assert len(read_run(tmp_path / "run").records) == UPDATES


def test_another_seed_gives_other_weights() -> None:
    """Otherwise the comparison could pass for any weights."""
    bare = alone("CartPole-v1")
    other = PPO(make_env("CartPole-v1", num_envs=4), PPOConfig(seed=4))

    assert any(not torch.equal(bare[name], weight) for name, weight in other.policy.state_dict().items())
