"""The table of single environments: returns and lengths over several rollouts."""

from pathlib import Path

import numpy as np
import pytest
from attached_run import learned

from esper_telemetry import PPO, PPOConfig, make_env
from esper_telemetry.updates.joining import EnvironmentTable


def test_episodes_are_followed_over_rollouts() -> None:
    """Environment 0: rewards 1, 2 | 4 end, 8. Environment 1: ends after 1, then after 2, and continues with 4 and 8."""
    table = EnvironmentTable()
    first, second = np.array([[1.0, 1.0], [2.0, 2.0]]), np.array([[4.0, 4.0], [8.0, 8.0]])

    table._follow(first, np.array([[False, True], [False, True]]))
    columns = table._follow(second, np.array([[True, False], [False, False]]))

    assert {name: column.tolist() for name, column in columns.items()} == {
        "return": [8, 12],
        "length": [1, 2],
        "last_return": [7, 2],
        "last_length": [3, 1],
        "episodes": [1, 2],
    }


def test_a_resumed_run_does_not_know_the_episodes_under_way() -> None:
    columns = EnvironmentTable(resumed=True)._follow(np.ones((3, 2)), np.array([[False, True], [False, True], [False] * 2]))

    assert np.isnan(columns["return"][0]) and np.isnan(columns["last_return"][0])
    assert (columns["return"][1], columns["last_return"][1], columns["last_length"][1]) == (1, 1, 1)


@pytest.mark.parametrize("num_envs", [1, 3, 70])
def test_the_journal_has_a_table_of_every_update(num_envs: int, tmp_path: Path) -> None:
    """Steps of unfinished and finished episodes add up to all steps, as long as no environment has finished two."""
    env = make_env("cue-recall", num_envs=num_envs)
    run = learned(PPO(env, PPOConfig(num_steps=8, num_epochs=1, num_minibatches=1)), tmp_path / "run", 2 * 8 * num_envs)

    events = [event for event in run.events if event.type == "environments"]
    if num_envs == 1:
        assert events == []
        return
    assert len(events) == 2 and events[-1].axes is not None and events[-1].axes.update == 2
    data = events[-1].data
    assert data["environments"] == num_envs and len(data["return"]) == min(64, num_envs)
    assert all(isinstance(flag, bool) for flag in data["constant"])
    for length, last, episodes in zip(data["length"], data["last_length"], data["episodes"], strict=True):
        assert (last is None) == (episodes == 0) and 0 <= length <= 16
        assert episodes > 1 or length + (last or 0) == 16
