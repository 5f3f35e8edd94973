"""Ends of episodes, and observations that never change."""

from __future__ import annotations

import pytest
import torch
from worked_cases import Case, check, parameters

from esper_telemetry.metrics.episodes import episode_ends
from esper_telemetry.metrics.losses import loss_weights
from esper_telemetry.metrics.rollout_stats import constant_observations, constant_rows

ENDED = torch.tensor([[True, False], [False, True], [True, True]])
TERMINATED = torch.tensor([[True, False], [False, False], [False, True]])
FIRST_TWO = torch.tensor([[True, True], [True, True], [False, False]])

CASES: dict[str, list[Case]] = {
    "Lengths belong to their ends in the order of time and environment: 7 and 9 terminated, 30 and 2 were truncated": [
        Case(
            lambda: episode_ends(ENDED, TERMINATED, [7, 30, 2, 9]),
            {
                "episode/truncated_frac": 0.5,
                "episode/truncated_length_min": 2.0,
                "episode/truncated_length_max": 30.0,
                "episode/terminated_length_min": 7.0,
                "episode/terminated_length_max": 9.0,
            },
        )
    ],
    "The last row is masked: one episode of 7 steps terminated, and one of 30 was truncated": [
        Case(
            lambda: episode_ends(ENDED, TERMINATED, [7, 30], valid=FIRST_TWO),
            {"episode/truncated_frac": 0.5, "episode/terminated_length_max": 7.0, "episode/truncated_length_min": 30.0},
            others=True,
        )
    ],
    "Lengths that no one can assign are left out, and without an end nothing is said": [
        Case(lambda: episode_ends(ENDED, TERMINATED, []), {"episode/truncated_frac": 0.5}),
        Case(lambda: episode_ends(ENDED, TERMINATED, [7, 30, 2]), {"episode/truncated_frac": 0.5}),
        Case(lambda: episode_ends(ENDED, TERMINATED, [7, 30, 2, 9, 1]), {"episode/truncated_frac": 0.5}),
        Case(lambda: episode_ends(ENDED & False, TERMINATED & False, []), {}),
    ],
    "Weights of losses are reported where they are given": [
        Case(
            lambda: loss_weights({"policy": 1.0, "value": 0.5, "entropy": 0.01, "penalty": 3.0}),
            {"loss/value_coef": 0.5, "loss/entropy_coef": 0.01, "loss/penalty_coef": 3.0},
        ),
        Case(lambda: loss_weights({}), {}),
    ],
}


@pytest.mark.parametrize("case", parameters(CASES))
def test_values_of(case: Case) -> None:
    check(case)


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


def test_a_single_step_says_nothing_nan_is_not_constant_and_bytes_are_compared_too() -> None:
    assert constant_rows(torch.zeros(1, 2, 3)).tolist() == [False, False]
    assert constant_rows(torch.full((3, 1, 2), torch.nan)).tolist() == [False]
    assert constant_rows(torch.zeros(3, 1, 84, 84, dtype=torch.uint8)).tolist() == [True]
