"""Equations of a rollout's targets in sampled updates of the bundled trainer: correct runs match, and steps with a mistake are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env
from esper_telemetry.core.record import Record
from esper_telemetry.equations.equation import EQUATION_KEY
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.ppo.ppo_objective import generalized_advantages
from esper_telemetry.ppo.rollout import Rollout

TARGETS = ("advantages", "returns", "normalized_advantages")
SMALL: dict[str, Any] = {"num_steps": 48, "num_epochs": 2, "num_minibatches": 2, "hidden_sizes": (8, 8)}


def trainer(env: str = "CartPole-v1", num_envs: int = 4, **settings: Any) -> PPO:
    return PPO(make_env(env, num_envs=num_envs, seed=1), PPOConfig(**{**SMALL, **settings}))


def recall(**settings: Any) -> PPO:
    config = PPOConfig(policy="lstm", num_steps=32, num_epochs=2, num_minibatches=2, lstm_size=8, **settings)
    return PPO(CueRecall(8, seed=0), config)


def run(source: PPO, updates: int = 3) -> tuple[list[Record], set[str]]:
    """Return the records of that many sampled updates, and the types of alarms."""
    records: list[Record] = []
    alarms: set[str] = set()
    with Telemetry([records.append], run_dir=None, level="debug", offload=False) as telemetry:
        telemetry.on_alarm(lambda alarm: alarms.add(alarm.type))
        attach(telemetry, source)
        while source.updates < updates:
            source.learn(source.env_steps + 1)
    return records, alarms


def explanations(records: list[Record], equation: str) -> list[set[str]]:
    """Return the hypotheses of each record whose numbers differ from the equation."""
    key = EQUATION_KEY + equation
    return [
        {name.removeprefix(f"{key}_") for name in record.values if name.startswith(f"{key}_")}
        for record in records
        if record.values[key] > 1e-4
    ]


HEALTHY: dict[str, Callable[[], PPO]] = {
    "cartpole": trainer,
    "one environment": lambda: trainer(num_envs=1, num_steps=128),
    "pendulum": lambda: trainer("Pendulum-v1", num_envs=2, num_steps=256),
    "frozen lake": lambda: trainer("FrozenLake-v1", gamma=1.0, gae_lambda=1.0),
    "cliff": lambda: trainer("CliffWalking-v1", num_steps=256, gae_lambda=0.0),
    "acrobot": lambda: trainer("Acrobot-v1", num_envs=2, num_steps=600),
    "mountain car": lambda: trainer("MountainCarContinuous-v0", num_envs=1, num_steps=1024, normalize_rewards=True),
    "whole batch": lambda: trainer(normalize_minibatches=False),
    "floor": lambda: trainer(advantage_std_floor=20.0),
    "as they are": lambda: trainer(normalize_advantages=False),
    "uneven minibatches": lambda: trainer(num_steps=33, num_minibatches=6),
    "memory": recall,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_follows_its_equations(name: str) -> None:
    """To rounding: errors are 1e-8 to 3e-6, the latter if normalised advantages are only rounding errors."""
    records, alarms = run(HEALTHY[name](), updates=2)

    for equation in TARGETS:
        assert max(record.values[EQUATION_KEY + equation] for record in records) < 2e-5
    assert not alarms & {"integrity/equation", "integrity/gae_identity", "integrity/adv_norm"}


def without_ends(rollout: Rollout, gamma: float, gae_lambda: float) -> Tensor:
    advantages = torch.zeros_like(rollout.rewards)
    following = torch.zeros_like(rollout.rewards[0])
    for t in range(len(advantages) - 1, -1, -1):
        delta = rollout.rewards[t] + gamma * rollout.next_values[t] - rollout.values[t]
        following = delta + gamma * gae_lambda * following
        advantages[t] = following
    return advantages


def swapped_settings(rollout: Rollout, gamma: float, gae_lambda: float) -> Tensor:
    return generalized_advantages(rollout, 0.9, gae_lambda)


def twice_centred(advantages: Tensor) -> Tensor:
    return advantages - advantages.mean()


def of_the_batch(advantages: Tensor) -> Tensor:
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


MISTAKES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ends": ("advantages", "ends_ignored", {"advantages": without_ends}),
    "discount": ("advantages", "other_gamma", {"advantages": swapped_settings}),
    "sign": ("advantages", "sign", {"advantages": lambda *arguments: -generalized_advantages(*arguments)}),
    "normalised": ("returns", "normalized", {"returns": lambda advantages, values: of_the_batch(advantages) + values}),
    "baseline": ("returns", "values_missing", {"returns": lambda advantages, values: advantages}),
    "centred": ("normalized_advantages", "mean_alone", {"normalize": twice_centred}),
    "scaled": ("normalized_advantages", "std_alone", {"normalize": lambda a: a / (a.std() + 1e-8)}),
    "raw": ("normalized_advantages", "not_normalized", {"normalize": lambda a: a}),
    "permuted": ("normalized_advantages", "other_rows", {"normalize": lambda a: of_the_batch(a).flip(0)}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_step_with_a_mistake_is_named(name: str) -> None:
    equation, hypothesis, steps = MISTAKES[name]
    source = trainer("CartPole-v1", num_steps=96)
    source.steps = replace(source.steps, **steps)

    records, alarms = run(source)

    assert explanations(records, equation) == [{hypothesis}] * 3
    assert "integrity/equation" in alarms
    for other in TARGETS:
        if other != equation:
            assert explanations(records, other) == []


def test_minibatches_that_are_normalised_though_the_rollout_should_be_are_named() -> None:
    """The trainer normalises the rollout, and another step each minibatch: the result equals normalising minibatches alone."""
    source = trainer(normalize_minibatches=False)
    cut = source.steps.minibatches

    def again(batch: Any, count: int, generator: Any) -> Any:
        return (replace(part, advantages=of_the_batch(part.advantages)) for part in cut(batch, count, generator))

    source.steps = replace(source.steps, minibatches=again)

    assert explanations(run(source)[0], "normalized_advantages") == [{"over_minibatch"}] * 3


def test_advantages_of_the_rollout_before_are_named() -> None:
    kept: list[Tensor] = []

    def stale(rollout: Rollout, gamma: float, gae_lambda: float) -> Tensor:
        kept.append(generalized_advantages(rollout, gamma, gae_lambda))
        return kept[-2] if len(kept) > 1 else kept[-1]

    source = trainer()
    source.steps = replace(source.steps, advantages=stale)

    assert explanations(run(source)[0], "advantages") == [{"stale"}] * 2


def test_advantages_that_were_normalised_after_the_returns_raise_nothing() -> None:
    def normalized(rollout: Rollout, gamma: float, gae_lambda: float) -> Tensor:
        return of_the_batch(generalized_advantages(rollout, gamma, gae_lambda))

    def returns(advantages: Tensor, values: Tensor) -> Tensor:
        return raw[-1] + values

    raw: list[Tensor] = []

    def remembered(rollout: Rollout, gamma: float, gae_lambda: float) -> Tensor:
        raw.append(generalized_advantages(rollout, gamma, gae_lambda))
        return normalized(rollout, gamma, gae_lambda)

    source = trainer()
    source.steps = replace(source.steps, advantages=remembered, returns=returns)
    records, alarms = run(source)

    assert explanations(records, "advantages") == [{"normalized"}] * 3
    assert explanations(records, "returns") == [{"normalized_after"}] * 3
    assert not alarms & {"integrity/equation", "integrity/gae_identity"}
