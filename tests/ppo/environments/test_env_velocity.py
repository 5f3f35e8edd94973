"""Hidden velocities are zero wherever the policy or the critic reads them."""

from typing import Any

import gymnasium
import numpy as np
import pytest

from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.environments.wrappers import VELOCITIES


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
