"""The bridge to Gymnasium: every autoreset mode gives the same transitions and rollouts, and errors name the wrong use."""

import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from counting_env import Counting, counting_vector
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from esper_telemetry.events import EpisodeEnd, MinibatchEnd, UpdateEnd
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments import environment_registry as registry
from esper_telemetry.ppo.environments.environment_protocol import ActionSpec
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.environments.gymnasium import GymnasiumEnvironment
from esper_telemetry.ppo.environments.wrappers import VELOCITIES


def test_a_seed_makes_episodes_repeatable_and_the_one_of_construction_comes_first() -> None:
    env = make_env("CartPole-v1", num_envs=3, seed=1)

    assert np.array_equal(np.asarray(env.reset(7)), np.asarray(make_env("CartPole-v1", num_envs=3).reset(1)))


def test_native_vector_environments_are_used_where_registered_and_others_waste_no_rows() -> None:
    env: Any = make_env("CartPole-v1", num_envs=2)

    assert type(env._vector).__name__ == "CartPoleVectorEnv"
    assert (env.name, env.num_envs, env.observation_shape) == ("CartPole-v1", 2, (4,))
    other: Any = make_env("Acrobot-v1", num_envs=2)
    assert other._vector.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP


@pytest.mark.parametrize(
    ("space", "spec", "chosen", "taken"),
    [
        (Discrete(3, start=5), ActionSpec("categorical", 3), [2], 7),
        (Box(-2, 2, (1,)), ActionSpec("continuous", 1, low=(-2.0,), high=(2.0,)), [[5.0]], [2.0]),
        (Box(-1, 1, (2, 2)), ActionSpec("continuous", 4, low=(-1.0,) * 4, high=(1.0,) * 4), [[0.5, -3, 0, 1]], [[0.5, -1], [0, 1]]),
    ],
)
def test_an_action_becomes_what_the_space_takes(space: gymnasium.Space[Any], spec: ActionSpec, chosen: list[Any], taken: Any) -> None:
    inner = Counting(action_space=space)
    env = GymnasiumEnvironment(SyncVectorEnv([lambda: inner]))
    env.reset(0)

    env.step({"action": np.array(chosen, np.int64 if spec.kind == "categorical" else np.float32)})

    assert env.action_specs == {"action": spec}
    assert np.array_equal(inner.actions[0], taken)


def test_an_unknown_id_names_close_ones() -> None:
    with pytest.raises(ValueError, match=r"no environment 'CartPol-v1'; did you mean .*CartPole-v1"):
        make_env("CartPol-v1")


def test_a_module_may_register_the_environment(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tasks.py").write_text(
        "import gymnasium\nfrom counting_env import Counting\ngymnasium.register('MyCounting-v0', Counting, max_episode_steps=4)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    assert make_env("my_tasks:MyCounting-v0", num_envs=2).name == "MyCounting-v0"
    gymnasium.registry.pop("MyCounting-v0")


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"'nowhere_to_be:Task-v0' cannot be imported"):
        make_env("nowhere_to_be:Task-v0")


@pytest.mark.parametrize("count", [0, -3])
def test_there_must_be_environments(count: int) -> None:
    with pytest.raises(ValueError, match=f"num_envs must be at least 1, got {count}"):
        make_env("CartPole-v1", num_envs=count)


@pytest.mark.parametrize("env_id", [env_id for env_id in VELOCITIES if env_id in gymnasium.registry])
def test_velocities_are_zero_and_the_rest_is_as_it_was(env_id: str) -> None:
    hidden: Any = make_env(env_id, num_envs=2, seed=0, mask_velocity=True)
    plain: Any = make_env(env_id, num_envs=2, seed=0)
    visible = [index for index in range(plain.observation_shape[0]) if index not in VELOCITIES[env_id]]
    observations, expected = hidden.reset(), plain.reset()
    kind = plain.action_specs["action"]
    action = np.ones((2, 1), np.float32) if kind.kind == "continuous" else np.ones(2, np.int64)
    for _ in range(250):
        assert (observations[:, list(VELOCITIES[env_id])] == 0).all()
        assert np.array_equal(observations[:, visible], expected[:, visible])
        left, right = hidden.step({"action": action}), plain.step({"action": action})
        if left.final_observations is not None:
            assert (left.final_observations[:, list(VELOCITIES[env_id])] == 0).all()
            assert np.array_equal(left.final_observations[:, visible], right.final_observations[:, visible])
        observations, expected = left.observations, right.observations


def test_the_name_says_so_and_other_tasks_are_refused() -> None:
    assert make_env("CartPole-v1", mask_velocity=True).name == "CartPole-v1 without velocities"
    with pytest.raises(ValueError, match=r"mask_velocity supports CartPole-v0, .*, got 'Blackjack-v1'"):
        make_env("Blackjack-v1", mask_velocity=True)


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


@pytest.fixture
def broken_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A plugin whose module exits the process with a message for the terminal."""
    (tmp_path / "exiting_plugin.py").write_text("raise SystemExit('\\x1b[31mno')\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries = {
        name: EntryPoint(name, target, registry.ENTRY_POINT_GROUP)
        for name, target in {**registry.BUNDLED, "broken": "exiting_plugin:make"}.items()
    }
    monkeypatch.setattr(registry, "_registered", lambda: entries)
    registry.every_environment.cache_clear()
    yield
    registry.every_environment.cache_clear()


@pytest.mark.usefixtures("broken_plugin")
def test_a_plugin_that_ends_the_process_costs_its_environment(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "esper_telemetry"):
        assert list(registry.every_environment()) == ["cue-recall"]
        assert registry.controllers() == ()

    sentence = "the environment 'broken' of exiting_plugin:make cannot be loaded: SystemExit: no"
    assert [one.getMessage() for one in caplog.records] == [sentence]
    with pytest.raises(ValueError, match=sentence):
        registry.make_env("broken")
