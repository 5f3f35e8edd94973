"""The critic against Stable-Baselines3's explained variance, and the identities between its metrics."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper_telemetry.history.critic import CriticFit, CriticMoments, VarianceAverage, critic_fit
from esper_telemetry.metrics.statistics import discounted_sums
from esper_telemetry.metrics.values import ending_bias, monte_carlo_fit, terminal_error, value_fit, value_movement


def pairs(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return correlated values and returns [16, 8]."""
    generator = torch.Generator().manual_seed(seed)
    returns = torch.randn(16, 8, generator=generator, dtype=torch.float64) * 3 + 1
    return returns * 0.7 + torch.randn(16, 8, generator=generator, dtype=torch.float64), returns


def fit(values: Tensor, returns: Tensor) -> CriticFit:
    """Return the derived values of the first update."""
    result = value_fit(values, returns).values()
    keys = ("value/bias", "value/err/std", "value/std", "value/target/std")
    return critic_fit(CriticMoments(*map(result.get, keys)), VarianceAverage())[0]


@given(st.floats(-100, 100))
def test_a_constant_error_shows_in_r2_and_not_in_explained_variance(offset: float) -> None:
    values, returns = pairs()
    variance = float(returns.var(correction=0))

    plain, shifted = fit(values, returns), fit(values + offset, returns)
    assert plain.explained_variance is not None and shifted.explained_variance is not None and shifted.r2 is not None
    bias = float((values + offset - returns).mean())

    assert shifted.explained_variance == pytest.approx(plain.explained_variance, rel=1e-9)
    assert shifted.explained_variance - shifted.r2 == pytest.approx(bias**2 / variance, rel=1e-6, abs=1e-9)
    assert shifted.r2 <= shifted.explained_variance <= 1


def test_returns_that_do_not_vary_leave_only_the_bias() -> None:
    values = value_fit(torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.1])).values()

    assert values["value/bias"] == pytest.approx(1.4)
    assert fit(torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.1])).values() == {}


def test_the_variance_average_of_equal_variances_is_that_variance_from_the_first_update_on() -> None:
    average = VarianceAverage()
    assert average.mean == 0.0
    for _ in range(5):
        average = average.after(2.5)
        assert average.mean == pytest.approx(2.5)


def test_nothing_measured_changes_nothing() -> None:
    earlier = VarianceAverage().after(1.0)

    assert critic_fit(CriticMoments(None, None, None, None), earlier) == (CriticFit(), earlier)


def test_invalid_and_non_finite_pairs_are_left_out() -> None:
    values, returns = pairs()
    valid = torch.ones_like(values, dtype=torch.bool)
    valid[0], values[0], returns[1, 0] = False, math.nan, math.inf

    result = value_fit(values, returns, valid=valid).values()

    assert result.pop("value/explained_variance_nonfinite") == 1.0
    mask = valid.clone()
    mask[1, 0] = False
    assert result == pytest.approx(value_fit(values[mask], returns[mask]).values(), rel=1e-12)


def test_movement_is_scaled_by_the_spread_of_all_returns_of_the_update() -> None:
    """Moves of 1 and 3, and returns 0, 2 | 4, 6 with a spread of √5: 2 / √5, not the mean of 1/1 and 3/1."""
    old = torch.zeros(2, 2, dtype=torch.float64)
    new = torch.tensor([[1.0, -1.0], [3.0, 3.0]], dtype=torch.float64)
    returns = torch.tensor([[0.0, 2.0], [4.0, 6.0]], dtype=torch.float64)

    values = value_movement(new, old, returns, clip=1.0, dim=-1).values()

    assert values["value/move_over_std"] == pytest.approx(2 / math.sqrt(5))
    assert values["value/clip_frac"] == 0.5


def test_without_value_clipping_there_is_no_clip_fraction() -> None:
    assert "value/clip_frac" not in value_movement(*(torch.rand(3, 4) for _ in range(3))).values()


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13])
def test_discounted_sums_follow_the_recurrence(length: int) -> None:
    x, factors = torch.rand(length, 2, dtype=torch.float64), torch.rand(length, 2, dtype=torch.float64)
    expected: list[Tensor] = []
    after = torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(length)):
        after = x[t] + factors[t] * after
        expected.insert(0, after)

    assert torch.allclose(discounted_sums(x, factors), torch.stack(expected), rtol=1e-12)
    assert discounted_sums(x * 1e308, factors + 1e308).shape == x.shape  # overflow is no warning


def test_only_episodes_that_terminate_count_for_the_monte_carlo_fit() -> None:
    """Returns of the first two steps are 1 + 0.5 · 3 and 3. The rollout cuts the third step's episode."""
    rewards, values = torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([[2.5], [3.0], [0.0]])
    done = torch.tensor([[False], [True], [False]])

    assert monte_carlo_fit(values, rewards, done, done, gamma=0.5).values() == {"value/ev_mc": 1.0}
    assert monte_carlo_fit(values, rewards, done, torch.zeros_like(done), gamma=0.5).values() == {}


def test_terminal_errors_ignore_time_limits() -> None:
    values, rewards = torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0, 0.0]])

    assert terminal_error(values, rewards, torch.tensor([[True, False]])).values() == {"value/terminal_err": 2.0}
    assert terminal_error(values, rewards, torch.zeros(1, 2, dtype=torch.bool)).values() == {}


@pytest.mark.parametrize(("bootstrap", "truncated"), [(10.0, 0.0), (0.0, 9.0)])
def test_a_time_limit_treated_as_an_end_shows_in_the_bias_at_time_limits(bootstrap: float, truncated: float) -> None:
    """A reward of 1 per step at γ = 0.9 is worth 10 at a time limit. The critic is right, unless 0 is taken as the next value.

    At the termination the critic says 10, but the true value is 1. Each end counts once, separately.
    """
    ended = torch.tensor([[False, False], [True, True]])
    terminated = torch.tensor([[False, False], [True, False]])
    values = torch.full((2, 2), 10.0)
    returns = torch.tensor([[10.0, 10.0], [1.0, 1.0 + 0.9 * bootstrap]])

    result = ending_bias(values, returns, ended, terminated).values()

    assert result == pytest.approx({"value/bias_truncated": truncated, "value/bias_terminated": 9.0}, abs=1e-5)
    assert ending_bias(values, returns, ended, terminated, valid=~terminated).values().keys() == {"value/bias_truncated"}
    assert ending_bias(values, returns, torch.zeros_like(ended), torch.zeros_like(ended)).values() == {}
