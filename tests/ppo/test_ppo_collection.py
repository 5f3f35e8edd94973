"""Mistakes in what the bundled trainer collects are named."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper_telemetry import Telemetry, attach
from esper_telemetry.equations.equation import EQUATION_KEY, equations
from esper_telemetry.journal.read import read_run
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.rollout import Rollout


def values_of(run_dir: Path, env: str, change: Callable[[Rollout], Rollout], **settings: Any) -> Mapping[str, float]:
    """Return the largest value of each equation key in three updates."""
    trainer = PPO(make_env(env, num_envs=4), PPOConfig(seed=2, num_steps=48, **settings))
    collect = trainer.collector.collect
    trainer.collector.collect = lambda resets: change(collect(resets))  # type: ignore[method-assign, assignment, misc]  # replaced on the object
    with Telemetry([], level="debug", run_dir=run_dir, offload=False) as telemetry:
        attach(telemetry, trainer)
        trainer.learn(total_steps=3 * 48 * 4)
    values: dict[str, float] = {}
    for record in read_run(run_dir).records:
        for key, value in record.values.items():
            if key.startswith(EQUATION_KEY):
                values[key.removeprefix(EQUATION_KEY)] = max(value, values.get(key.removeprefix(EQUATION_KEY), 0.0))
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


@pytest.mark.system
def test_a_memory_that_training_resets_late_is_named(tmp_path: Path) -> None:
    values = values_of(tmp_path, "CartPole-v1", late, policy="lstm")

    assert "replayed_log_probs_memory_reset_early" in values
    assert "values_memory_reset_early" in values


@pytest.mark.system
def test_a_memory_that_training_never_resets_differs(tmp_path: Path) -> None:
    values = values_of(tmp_path, "CartPole-v1", never, policy="lstm")

    assert values["values"] > equations()["values"].tolerance_at("fp32")


@pytest.mark.system
@pytest.mark.parametrize(("steps", "name"), [(1, "observation_after"), (-1, "observation_before")])
def test_observations_that_are_stored_in_another_step_are_named(steps: int, name: str, tmp_path: Path) -> None:
    def moved(rollout: Rollout) -> Rollout:
        return replace(rollout, observations=rollout.observations.roll(steps, 0))

    values = values_of(tmp_path, "CartPole-v1", moved)

    named = {label for label in values if label.startswith("replayed_log_probs_")}
    assert named == {f"replayed_log_probs_{name}"}
    assert values["values"] > equations()["values"].tolerance_at("fp32")
