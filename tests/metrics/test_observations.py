"""Copies of environments, observations that stay the same, and the scale of features."""

import math

import pytest
import torch

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


def test_environments_that_repeat_another_one_are_counted() -> None:
    """The first and the last of three environments have the same four numbers."""
    window = torch.tensor([[0.0, 5.0, 0.0], [1.0, 6.0, 1.0], [2.0, 7.0, 2.0], [3.0, 8.0, 3.0]]).unsqueeze(-1)

    assert observation_change(window, RUNNING).values() == {"obs/identical_frac": pytest.approx(2 / 3), "obs/still_frac": 0.0}


def test_a_single_environment_repeats_none() -> None:
    window = torch.arange(4.0).reshape(4, 1, 1)

    assert observation_change(window, RUNNING[:, :1]).values() == {"obs/still_frac": 0.0}


def test_only_steps_within_an_episode_stand_still() -> None:
    """The observation is 1, 1, 2, 2 and the episode ends with the second step. Both pairs within an episode are equal."""
    window = torch.tensor([1.0, 1.0, 2.0, 2.0]).reshape(4, 1, 1)
    ended = torch.tensor([False, True, False, False]).reshape(4, 1)

    assert observation_change(window, ended).values()["obs/still_frac"] == 1.0
    assert observation_change(window, ended & False).values()["obs/still_frac"] == pytest.approx(2 / 3)


def test_steps_that_do_not_count_are_not_compared() -> None:
    window = torch.tensor([1.0, 1.0, 2.0, 3.0]).reshape(4, 1, 1)
    valid = torch.tensor([True, False, True, True]).reshape(4, 1)

    assert observation_change(window, RUNNING[:, :1], valid=valid).values()["obs/still_frac"] == 0.0


def test_features_are_measured_with_their_offset() -> None:
    """One feature of ±0.5, one of 1000 ± 2, and one that is always 7 and does not count."""
    window = torch.tensor([[0.5, 1002.0, 7.0], [-0.5, 998.0, 7.0]]).unsqueeze(1)

    values = observation_scale(window).values()

    assert values["obs/rms_max"] == pytest.approx(1000.002, abs=1e-3)
    assert values["obs/rms_median"] == pytest.approx(0.5)
    assert values["obs/rms_ratio"] == pytest.approx(2000.004, abs=1e-3)
    assert values["obs/offset"] == pytest.approx(500.0)


def test_a_small_feature_far_from_0_in_its_own_spread_is_no_offset() -> None:
    """A height of 1.4 that varies by 0.001."""
    window = torch.tensor([[1.401, 0.5], [1.399, -0.5]]).unsqueeze(1)

    assert observation_scale(window).values()["obs/offset"] == 0.0


@pytest.mark.parametrize(
    "window",
    [
        torch.tensor([[0.0, 255.0], [3.0, 200.0]]).unsqueeze(1),
        torch.tensor([[0, 1], [1, 0]]).unsqueeze(1),
        torch.rand(2, 1, 600),
        torch.full((2, 1, 2), 0.3),
        torch.full((2, 1, 2), torch.nan),
    ],
)
def test_whole_numbers_images_and_constants_have_no_scale(window: torch.Tensor) -> None:
    assert observation_scale(window).values() == {}


def test_rows_that_do_not_count_have_no_scale() -> None:
    window = torch.tensor([[0.5], [-0.5], [900.5]]).unsqueeze(1)
    valid = torch.tensor([True, True, False]).reshape(3, 1)

    assert observation_scale(window, valid=valid).values()["obs/rms_max"] == pytest.approx(0.5)


def test_rows_without_environments_have_a_scale() -> None:
    window = torch.tensor([[0.5, 3.0], [-0.5, 4.0]])

    assert observation_scale(window).values() == observation_scale(window.unsqueeze(1)).values()


def test_large_whole_numbers_are_quantities() -> None:
    window = torch.tensor([[[1000.0, 0.0]], [[3000.0, 1.0]]])

    assert observation_scale(window).values()["obs/rms_max"] == pytest.approx(math.sqrt(5e6))


def test_a_window_of_images_has_two_steps_at_least_and_fits() -> None:
    images = torch.zeros(16, 64, 4, 84, 84, dtype=torch.uint8)

    window = observation_window(images)

    assert window.shape[:2] == (2, 64) and window.shape[2] <= 1024
    assert observation_window(torch.zeros(512, 16, 8)).numel() == MAX_WINDOW_ENTRIES


def test_nothing_is_measured_of_observations_that_nobody_shows() -> None:
    class Flags:
        ended, valid = RUNNING, None

    assert list(observation_measurements(None, None, Flags())) == []
    assert len(list(observation_measurements(torch.zeros(4, 3, 2), None, Flags()))) == 2


def test_a_spread_is_compared_with_half_the_range() -> None:
    """σ = 1 in a range from -0.1 to 0.1 is ten times half the range. A dimension without bounds does not count."""
    low, high = torch.tensor([-0.1, -torch.inf]), torch.tensor([0.1, torch.inf])

    (value,) = spread_over_range("action", torch.zeros(2), low=low, high=high).values().values()

    assert value == pytest.approx(10.0)


def test_the_mix_of_one_head_of_several() -> None:
    """The head takes its first of two actions, except with a probability of 1 in 100: 0.056 nats of 0.693."""
    logits = {"op": torch.tensor([[0.99, 0.01]]).log().expand(8, 2), "arg": torch.zeros(8, 4)}

    rows = entropy_rows(logits)

    assert head_mix("op", rows).values() == {"policy/head/op/entropy_marginal_norm": pytest.approx(0.0808, abs=1e-4)}
    assert head_mix("arg", rows).values() == {"policy/head/arg/entropy_marginal_norm": pytest.approx(1.0)}


def test_rows_of_minibatches() -> None:
    assert minibatch_rows([64, 64, 32]).values() == {"adv/minibatch_rows": pytest.approx(160 / 3)}


@pytest.mark.parametrize(("seen", "share"), [("the step", None), ("a random place", 1.0), ("one start", 1.0)])
def test_observations_that_follow_the_step_of_the_episode_are_alike_by_nature(seen: str, share: float | None) -> None:
    """Four environments with the same observations, in episodes of three steps that all begin at once."""
    step = torch.arange(12) % 3
    place = torch.randn(12, generator=torch.Generator().manual_seed(0))
    window = (place if seen == "a random place" else step.double()).reshape(12, 1, 1).expand(12, 4, 1)
    ended = (step == 2).reshape(12, 1).expand(12, 4) if seen != "one start" else torch.zeros(12, 4, dtype=torch.bool)

    assert observation_change(window, ended).values().get("obs/identical_frac") == share
