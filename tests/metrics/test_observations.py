"""Copies of environments, observations that stay the same, and the scale of features."""

import math

import pytest
import torch
from worked_cases import Case, check, parameters

from esper_telemetry.metrics.actions import spread_over_range
from esper_telemetry.metrics.advantages import minibatch_rows
from esper_telemetry.metrics.entropy import entropy_rows, head_mix
from esper_telemetry.metrics.rollout_stats import (
    MAX_WINDOW_ENTRIES,
    observation_change,
    observation_measurements,
    observation_scale,
    observation_window,
)

RUNNING = torch.zeros(4, 3, dtype=torch.bool)
ONE_RUNNING = RUNNING[:, :1]
COPIES = torch.tensor([[0.0, 5.0, 0.0], [1.0, 6.0, 1.0], [2.0, 7.0, 2.0], [3.0, 8.0, 3.0]]).unsqueeze(-1)
PAIRS = torch.tensor([1.0, 1.0, 2.0, 2.0]).reshape(4, 1, 1)
ENDED = torch.tensor([False, True, False, False]).reshape(4, 1)
STEP = (torch.arange(12) % 3).reshape(12, 1, 1).expand(12, 4, 1)
PLACE = torch.randn(12, generator=torch.Generator().manual_seed(0)).reshape(12, 1, 1).expand(12, 4, 1)
ALL_RUNNING = torch.zeros(12, 4, dtype=torch.bool)
OFFSET = torch.tensor([[0.5, 1002.0, 7.0], [-0.5, 998.0, 7.0]]).unsqueeze(1)
HEADS = {"op": torch.tensor([[0.99, 0.01]]).log().expand(8, 2), "arg": torch.zeros(8, 4)}
IDENTICAL, STILL = "obs/identical_frac", "obs/still_frac"

CASES: dict[str, list[Case]] = {
    "The first and the last of three environments have the same four numbers; a single one repeats none": [
        Case(lambda: observation_change(COPIES, RUNNING), {IDENTICAL: 2 / 3, STILL: 0.0}),
        Case(lambda: observation_change(torch.arange(4.0).reshape(4, 1, 1), ONE_RUNNING), {STILL: 0.0}),
    ],
    "The observation is 1, 1, 2, 2 and the episode ends with the second step: both pairs within an episode are equal": [
        Case(lambda: observation_change(PAIRS, ENDED), {STILL: 1.0}),
        Case(lambda: observation_change(PAIRS, ONE_RUNNING), {STILL: 2 / 3}),
    ],
    "Steps that do not count are not compared": [
        Case(
            lambda: observation_change(
                torch.tensor([1.0, 1.0, 2.0, 3.0]).reshape(4, 1, 1),
                ONE_RUNNING,
                valid=torch.tensor([True, False, True, True]).reshape(4, 1),
            ),
            {STILL: 0.0},
        )
    ],
    "Four environments with the same observations, in episodes of three steps that all begin at once: alike by nature if they "
    "follow the step of the episode": [
        Case(lambda: observation_change(STEP.double(), STEP[..., 0] == 2), {IDENTICAL: None}, others=True),
        Case(lambda: observation_change(PLACE, STEP[..., 0] == 2), {IDENTICAL: 1.0}, others=True),
        Case(lambda: observation_change(STEP.double(), ALL_RUNNING), {IDENTICAL: 1.0}, others=True),
    ],
    "One feature of ±0.5, one of 1000 ± 2, and one that is always 7 and does not count": [
        Case(
            lambda: observation_scale(OFFSET),
            {"obs/rms_max": 1000.002, "obs/rms_median": 0.5, "obs/rms_ratio": 2000.004, "obs/offset": 500.0},
        )
    ],
    "A height of 1.4 that varies by 0.001 is no offset": [
        Case(lambda: observation_scale(torch.tensor([[1.401, 0.5], [1.399, -0.5]]).unsqueeze(1)), {"obs/offset": 0.0}, others=True)
    ],
    "Whole numbers, images and constants have no scale, but large whole numbers are quantities": [
        *(
            Case(lambda window=window: observation_scale(window), {})  # type: ignore[misc]
            for window in (
                torch.tensor([[0.0, 255.0], [3.0, 200.0]]).unsqueeze(1),
                torch.tensor([[0, 1], [1, 0]]).unsqueeze(1),
                torch.rand(2, 1, 600),
                torch.full((2, 1, 2), 0.3),
                torch.full((2, 1, 2), torch.nan),
            )
        ),
        Case(lambda: observation_scale(torch.tensor([[[1000.0, 0.0]], [[3000.0, 1.0]]])), {"obs/rms_max": math.sqrt(5e6)}, others=True),
    ],
    "Rows that do not count have no scale": [
        Case(
            lambda: observation_scale(
                torch.tensor([[0.5], [-0.5], [900.5]]).unsqueeze(1), valid=torch.tensor([True, True, False]).reshape(3, 1)
            ),
            {"obs/rms_max": 0.5},
            others=True,
        )
    ],
    "σ = 1 in a range from -0.1 to 0.1 is ten times half the range; a dimension without bounds does not count": [
        Case(
            lambda: spread_over_range("action", torch.zeros(2), low=torch.tensor([-0.1, -torch.inf]), high=torch.tensor([0.1, torch.inf])),
            {"policy/head/action/std_of_range": 10.0},
        )
    ],
    "The head takes its first of two actions, except with a probability of 1 in 100: 0.056 nats of 0.693": [
        Case(lambda: head_mix("op", entropy_rows(HEADS)), {"policy/head/op/entropy_marginal_norm": 0.0807931}),
        Case(lambda: head_mix("arg", entropy_rows(HEADS)), {"policy/head/arg/entropy_marginal_norm": 1.0}),
    ],
    "Rows of minibatches": [Case(lambda: minibatch_rows([64, 64, 32]), {"adv/minibatch_rows": 160 / 3})],
}


@pytest.mark.parametrize("case", parameters(CASES))
def test_values_of(case: Case) -> None:
    check(case)


def test_rows_without_environments_have_a_scale() -> None:
    window = torch.tensor([[0.5, 3.0], [-0.5, 4.0]])

    assert observation_scale(window).values() == observation_scale(window.unsqueeze(1)).values()


def test_a_window_of_images_has_two_steps_at_least_and_fits() -> None:
    images = torch.zeros(16, 64, 4, 84, 84, dtype=torch.uint8)

    window = observation_window(images)

    assert window.shape[:2] == (2, 64) and window.shape[2] <= 1024
    assert observation_window(torch.zeros(512, 16, 8)).numel() == MAX_WINDOW_ENTRIES


def test_observations_that_no_one_shows_are_not_measured() -> None:
    assert list(observation_measurements(None, None, ended=RUNNING, valid=None)) == []
    assert len(list(observation_measurements(torch.zeros(4, 3, 2), None, ended=RUNNING, valid=None))) == 2
