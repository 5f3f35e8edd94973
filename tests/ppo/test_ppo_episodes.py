"""Episode statistics, counted once per rollout."""

import numpy as np

from esper_telemetry.ppo.collectors.base import EpisodeTotals


def test_episodes_are_counted_over_rollouts_and_in_order() -> None:
    """Environment 0 ends at t = 1 and t = 2, environment 1 at t = 0. In the next rollout both end at t = 0."""
    counter = EpisodeTotals(2)
    rewards = np.array([[1, 10], [2, 20], [4, 40]], np.float32)

    counter.count(rewards, np.array([[0, 1], [1, 0], [1, 0]], bool), None)
    assert (counter.returns, counter.lengths) == ([10, 3, 4], [1, 2, 1])

    counter.count(rewards[:1], np.ones((1, 2), bool), None)
    assert (counter.returns, counter.lengths) == ([1, 70], [1, 3])


def test_a_rollout_without_an_end_gives_no_episode() -> None:
    counter = EpisodeTotals(1)

    counter.count(np.ones((4, 1), np.float32), np.zeros((4, 1), bool), None)

    assert (counter.returns, counter.lengths) == ([], [])


def test_invalid_rows_count_for_nothing() -> None:
    """The episode's second row is a reset, so two of three rows count."""
    counter = EpisodeTotals(1)

    counter.count(np.array([[1], [9], [1]], np.float32), np.array([[0], [0], [1]], bool), np.array([[1], [0], [1]], bool))

    assert (counter.returns, counter.lengths) == ([2], [2])
