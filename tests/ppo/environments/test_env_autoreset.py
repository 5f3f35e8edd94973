"""The trainer sees the same rollouts in every autoreset mode."""

from typing import Any

import numpy as np
import pytest
import torch
from counting_env import counting_vector
from gymnasium.vector import AutoresetMode

from esper_telemetry.events import EpisodeEnd, MinibatchEnd, UpdateEnd
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments.gymnasium import GymnasiumEnvironment

COLUMNS = ("observations", "log_probs", "rewards", "values", "next_values", "ended", "terminated")


def counting(mode: AutoresetMode, lengths: tuple[int, ...] = (3, 5), **settings: Any) -> PPO:
    """Return a small trainer for counting environments."""
    env = GymnasiumEnvironment(counting_vector(mode, lengths), seed=1)
    return PPO(env, PPOConfig(num_steps=8, hidden_sizes=(16,), **settings))


def valid_rows(mode: AutoresetMode) -> tuple[list[dict[str, Any]], list[float], int]:
    """Return each environment's transitions in order, under a policy without noise; returns of episodes; counted steps."""
    trainer = counting(mode)
    head = trainer.policy.head("action")
    head.noise = lambda shape, generator: torch.zeros(*shape, 2)  # type: ignore[method-assign]  # actions depend on observations alone
    columns: list[dict[str, list[Any]]] = [{name: [] for name in COLUMNS} for _ in range(2)]
    returns: list[float] = []
    steps = 0
    for _ in range(5):
        rollout = trainer.collector.collect()
        returns += trainer.collector.episodes.returns
        valid = torch.ones_like(rollout.ended) if rollout.valid is None else rollout.valid
        steps += int(valid.sum())
        for env, collected in enumerate(columns):
            for name in COLUMNS:
                collected[name] += getattr(rollout, name)[:, env][valid[:, env]].tolist()
    return [{name: np.array(rows) for name, rows in collected.items()} for collected in columns], returns, steps


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_every_autoreset_mode_gives_the_same_valid_rollout(mode: AutoresetMode) -> None:
    """Episodes of 3 and 5 steps over five rollouts of 8. Some end inside a rollout, some on its edge."""
    reference, reference_returns, reference_steps = valid_rows(AutoresetMode.SAME_STEP)
    columns, returns, steps = valid_rows(mode)

    for collected, expected in zip(columns, reference, strict=True):
        rows = len(collected["rewards"])
        inside = slice(0, rows - 1)  # the last row's next value depends on where the rollout stops
        assert rows >= 30
        for name in COLUMNS:
            assert np.allclose(collected[name][inside], expected[name][:rows][inside], atol=1e-6), name
    assert sum(len(collected["rewards"]) for collected in columns) == steps <= reference_steps == 80
    assert sorted(set(returns)) == sorted(set(reference_returns)) == [6, 15]


def test_rows_of_a_reset_are_not_counted_as_steps() -> None:
    """Episodes of 3 steps and a reset: 6 of 8 rows are steps in both environments."""
    trainer = counting(AutoresetMode.NEXT_STEP, (3, 3), num_minibatches=1)
    steps: list[int] = []
    episodes: list[EpisodeEnd] = []
    rows: list[int] = []
    trainer.hooks.on(UpdateEnd, lambda event: steps.append(event.env_step))
    trainer.hooks.on(EpisodeEnd, episodes.append)
    trainer.hooks.on(MinibatchEnd, lambda event: rows.append(len(event.log_ratio)))

    trainer.learn(12)

    assert steps == [12] and rows == [12] * trainer.config.num_epochs
    assert [(event.returns, event.lengths) for event in episodes] == [([6] * 4, [3] * 4)]
