"""The bridge to Gymnasium: transitions are the same in every autoreset mode, and errors name the wrong use."""

import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from counting_env import Counting, counting_vector
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from seeing_env import spotlights

from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, Step
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.environments.gymnasium import GymnasiumEnvironment

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


def single(action_space: gymnasium.Space[Any]) -> tuple[GymnasiumEnvironment, Counting]:
    inner = Counting(action_space=action_space)
    return GymnasiumEnvironment(SyncVectorEnv([lambda: inner])), inner


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


def test_the_row_after_an_episode_is_invalid_under_next_step() -> None:
    env = GymnasiumEnvironment(counting_vector(AutoresetMode.NEXT_STEP, (2, 9)), seed=0)
    env.reset()

    steps = [env.step({"action": np.zeros(2, np.int64)}) for _ in range(4)]

    assert [None if step.valid is None else step.valid.tolist() for step in steps] == [None, None, [False, True], None]
    assert steps[1].terminated.tolist() == [True, False]


def test_final_observations_are_those_before_the_reset() -> None:
    env = GymnasiumEnvironment(counting_vector(AutoresetMode.SAME_STEP, (2, 9)), seed=0)
    env.reset()
    env.step({"action": np.zeros(2, np.int64)})

    step = env.step({"action": np.zeros(2, np.int64)})

    assert step.final_observations is not None
    assert step.final_observations[0, 0] == 2 and step.observations[0, 0] == 0


def test_a_seed_makes_episodes_repeatable_and_the_one_of_construction_comes_first() -> None:
    env = make_env("CartPole-v1", num_envs=3, seed=1)

    assert np.array_equal(np.asarray(env.reset(7)), np.asarray(make_env("CartPole-v1", num_envs=3).reset(1)))


def test_native_vector_environments_are_used_where_registered() -> None:
    env: Any = make_env("CartPole-v1", num_envs=2)

    assert type(env._vector).__name__ == "CartPoleVectorEnv"
    assert (env.name, env.num_envs, env.observation_shape) == ("CartPole-v1", 2, (4,))


def test_other_tasks_step_one_after_the_other_without_wasted_rows() -> None:
    env: Any = make_env("Acrobot-v1", num_envs=2)

    assert env._vector.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP


@pytest.mark.parametrize(
    ("space", "specs", "chosen", "taken"),
    [
        (Discrete(3), {"action": ActionSpec("categorical", 3)}, {"action": [2]}, 2),
        (Discrete(3, start=5), {"action": ActionSpec("categorical", 3)}, {"action": [2]}, 7),
        (
            MultiDiscrete([2, 4]),
            {"action_0": ActionSpec("categorical", 2), "action_1": ActionSpec("categorical", 4)},
            {"action_0": [1], "action_1": [3]},
            [1, 3],
        ),
        (Box(-2, 2, (1,)), {"action": ActionSpec("continuous", 1, low=(-2.0,), high=(2.0,))}, {"action": [[5.0]]}, [2.0]),
        (
            Box(-1, 1, (2, 2)),
            {"action": ActionSpec("continuous", 4, low=(-1.0,) * 4, high=(1.0,) * 4)},
            {"action": [[0.1, -3, 0, 1]]},
            np.array([[0.1, -1], [0, 1]], np.float32),
        ),
    ],
)
def test_parts_of_an_action_are_joined_into_what_the_space_takes(
    space: gymnasium.Space[Any], specs: dict[str, ActionSpec], chosen: dict[str, Any], taken: Any
) -> None:
    env, inner = single(space)
    env.reset(0)

    env.step({name: np.array(part, np.float32 if "Box" in str(space) else np.int64) for name, part in chosen.items()})

    assert env.action_specs == specs
    assert np.array_equal(inner.actions[0], taken)


def test_steps_unpack_in_the_order_of_gymnasium() -> None:
    env: Any = make_env("Pendulum-v1", num_envs=2, seed=0)
    env.reset()

    step = env.step({"action": np.zeros((2, 1), np.float32)})

    assert isinstance(step, Step) and step.valid is None and step.final_observations is None
    assert step.observations.shape == (2, 3) and step.rewards.shape == (2,)


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
