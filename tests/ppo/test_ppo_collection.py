"""Mistakes in what the bundled trainer collects are named."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from esper_telemetry import Telemetry, attach
from esper_telemetry.equations.equation import EQUATION_KEY, equations
from esper_telemetry.journal.read import read_run
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.rollout import Rollout


def values_of(run_dir: Path, change: Callable[[Rollout], Rollout], policy: str) -> Mapping[str, float]:
    """Return the largest value of each equation key in three updates."""
    trainer = PPO(make_env("CartPole-v1", num_envs=4), PPOConfig(seed=2, num_steps=48, policy=policy))
    collect = trainer.collector.collect
    trainer.collector.collect = lambda resets: change(collect(resets))  # type: ignore[method-assign, assignment, misc]  # replaced on the object
    with Telemetry([], level="debug", run_dir=run_dir, offload=False) as telemetry:
        attach(telemetry, trainer)
        trainer.learn(total_steps=3 * 48 * 4)
    values: dict[str, float] = {}
    for record in read_run(run_dir).records:
        for key, value in record.values.items():
            if key.startswith(EQUATION_KEY):
                name = key.removeprefix(EQUATION_KEY)
                values[name] = max(value, values.get(name, 0.0))
    return values


def late(rollout: Rollout) -> Rollout:
    """Return the rollout with memory that training resets one step late."""
    assert rollout.recurrence is not None
    fresh = rollout.recurrence.fresh
    shifted = np.concatenate([np.zeros_like(fresh[:1]), fresh[:-1]])
    return replace(rollout, recurrence=replace(rollout.recurrence, fresh=shifted))


def never(rollout: Rollout) -> Rollout:
    """Return the rollout with memory that training never resets."""
    assert rollout.recurrence is not None
    return replace(rollout, recurrence=replace(rollout.recurrence, fresh=np.zeros_like(rollout.recurrence.fresh)))


def moved(steps: int) -> Callable[[Rollout], Rollout]:
    return lambda rollout: replace(rollout, observations=rollout.observations.roll(steps, 0))


@pytest.mark.system
@pytest.mark.parametrize(
    ("change", "policy", "names"),
    [
        (late, "lstm", {"replayed_log_probs_memory_reset_early", "values_memory_reset_early"}),
        (never, "lstm", set[str]()),
        (moved(1), "mlp", {"replayed_log_probs_observation_after"}),
        (moved(-1), "mlp", {"replayed_log_probs_observation_before"}),
    ],
)
def test_mistakes_of_collection_are_named(change: Callable[[Rollout], Rollout], policy: str, names: set[str], tmp_path: Path) -> None:
    values = values_of(tmp_path, change, policy)

    assert values["values"] > equations()["values"].tolerance_at("fp32")
    assert names <= values.keys()
    if policy == "mlp":
        assert {label for label in values if label.startswith("replayed_log_probs_")} == names
