"""Ends of episodes, and observations that never change."""

import pytest
import torch

from esper_telemetry.metrics.episodes import episode_ends
from esper_telemetry.metrics.losses import loss_weights
from esper_telemetry.metrics.rollout_stats import constant_observations, constant_rows

ENDED = torch.tensor([[True, False], [False, True], [True, True]])
TERMINATED = torch.tensor([[True, False], [False, False], [False, True]])


def test_lengths_belong_to_their_ends_in_the_order_of_time_and_environment() -> None:
    """The episodes of 7 and 9 steps terminated; the episodes of 30 and 2 steps were truncated."""
    result = episode_ends(ENDED, TERMINATED, [7, 30, 2, 9]).values()

    assert result == {
        "episode/truncated_frac": 0.5,
        "episode/truncated_length_min": 2.0,
        "episode/truncated_length_max": 30.0,
        "episode/terminated_length_min": 7.0,
        "episode/terminated_length_max": 9.0,
    }


def test_rows_that_do_not_count_end_nothing() -> None:
    """The last row is masked: one episode of 7 steps terminated, and one of 30 was truncated."""
    valid = torch.tensor([[True, True], [True, True], [False, False]])

    result = episode_ends(ENDED, TERMINATED, [7, 30], valid=valid).values()

    assert result["episode/truncated_frac"] == 0.5
    assert (result["episode/terminated_length_max"], result["episode/truncated_length_min"]) == (7.0, 30.0)


@pytest.mark.parametrize("lengths", [[], [7, 30, 2], [7, 30, 2, 9, 1]])
def test_lengths_that_nobody_can_assign_are_left_out(lengths: list[int]) -> None:
    assert episode_ends(ENDED, TERMINATED, lengths).values() == {"episode/truncated_frac": 0.5}


def test_without_an_end_nothing_is_said() -> None:
    assert episode_ends(ENDED & False, TERMINATED & False, []).values() == {}


def test_an_environment_is_constant_where_no_step_differs_from_the_one_before() -> None:
    """The first environment changes in the last step, the second in one pixel, the third never."""
    observations = torch.zeros(4, 3, 2, 2)
    observations[3, 0] = 1.0
    observations[1, 1, 1, 0] = 1.0

    assert constant_rows(observations).tolist() == [False, False, True]
    assert constant_observations(constant_rows(observations)).values() == {"obs/constant_frac": pytest.approx(1 / 3)}


def test_steps_that_do_not_count_are_not_compared() -> None:
    """The first environment changes in an invalid step. In the second, valid steps are never adjacent."""
    observations = torch.tensor([[0.0, 5.0], [9.0, 5.0], [0.0, 5.0], [0.0, 5.0]])
    valid = torch.tensor([[True, True], [False, False], [True, True], [True, False]])

    assert constant_rows(observations, valid=valid).tolist() == [True, False]


def test_a_single_step_says_nothing() -> None:
    assert constant_rows(torch.zeros(1, 2, 3)).tolist() == [False, False]


def test_nan_is_not_constant_and_bytes_are_compared_too() -> None:
    assert constant_rows(torch.full((3, 1, 2), torch.nan)).tolist() == [False]
    assert constant_rows(torch.zeros(3, 1, 84, 84, dtype=torch.uint8)).tolist() == [True]


def test_weights_of_losses_are_reported_where_they_are_given() -> None:
    assert loss_weights({"policy": 1.0, "value": 0.5, "entropy": 0.01}).values() == {"loss/value_coef": 0.5, "loss/entropy_coef": 0.01}
    assert loss_weights({}).values() == {}
