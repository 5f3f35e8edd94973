"""The bridge to Gymnasium: transitions are the same in every autoreset mode, and errors name the wrong use."""

import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from counting_env import Counting, counting_vector
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from seeing_env import spotlights

from esper_telemetry.ppo.environments.environment_protocol import ActionSpec
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.environments.gymnasium import GymnasiumEnvironment

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


def transitions(vector: VectorEnv, steps: int) -> list[list[list[float]]]:
    """Return each environment's valid transitions in one row: observation, reward, both ends, next observation."""
    env = GymnasiumEnvironment(vector, seed=5)
    observations = env.reset().copy()
    transitions_of_envs: list[list[list[float]]] = [[], []]
    for _ in range(steps):
        step = env.step({"action": np.zeros(2, np.int64)})
        for index in np.flatnonzero(np.ones(2) if step.valid is None else step.valid):
            following = step.observations[index]
            if step.terminated[index] or step.truncated[index]:
                assert step.final_observations is not None
                following = step.final_observations[index]
            outcome = [float(x[index]) for x in (step.rewards, step.terminated, step.truncated)]
            transitions_of_envs[index].append([*observations[index].ravel(), *outcome, *following.ravel()])
        observations = step.observations.copy()
    return transitions_of_envs


@pytest.mark.parametrize("make", [counting_vector, partial(spotlights, parts=False), partial(spotlights, parts=True)])
def test_every_autoreset_mode_gives_the_same_transitions(make: Any) -> None:
    """Episodes of 3 and 5 steps with vectors, images and several parts. NEXT_STEP needs more calls for the same transitions."""
    next_step, same_step, disabled = (transitions(make(mode), 40) for mode in MODES)

    assert same_step == disabled
    for index in range(2):
        assert next_step[index] == same_step[index][: len(next_step[index])]
        assert len(next_step[index]) >= 30


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


def test_without_gymnasium_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)

    with pytest.raises(ImportError, match=r"pip install 'esper-telemetry\[train\]'"):
        make_env("CartPole-v1")
