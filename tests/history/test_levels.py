"""Averages, drift and robust distance from history."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from esper_telemetry.history.deviations import Ema, LogDrift, RobustHistory, decades, medians, n_eff, robust_z

SERIES = arrays(np.float64, st.integers(2, 40), elements=st.floats(-100, 100, allow_subnormal=False))


@given(st.floats(-1e6, 1e6), st.integers(1, 30))
def test_average_of_a_constant_is_the_constant_from_the_first_value_on(value: float, count: int) -> None:
    ema = Ema(1)
    for _ in range(count):
        ema.step(np.array([value]))

    assert ema.mean[0] == value
    assert ema.std[0] == 0.0


@given(SERIES)
def test_average_and_spread_are_those_under_the_decaying_weights(x: np.ndarray) -> None:
    beta, n = 0.9, len(x)
    weights = (1 - beta) * beta ** np.arange(n - 1, -1, -1) / (1 - beta**n)
    ema = Ema(1, beta)
    for value in x:
        ema.step(np.array([value]))

    mean = weights @ x
    assert ema.mean[0] == pytest.approx(mean, abs=1e-9)
    assert ema.std[0] == pytest.approx(math.sqrt(weights @ (x - mean) ** 2), abs=1e-6)


def test_effective_samples_start_at_one_and_end_at_the_memory() -> None:
    assert n_eff(np.array([1.0]), 0.9)[0] == pytest.approx(1.0)
    assert n_eff(np.array([1e6]), 0.9)[0] == pytest.approx(19.0)
    assert (n_eff(np.array([11.0, 12.0]), 0.9) < 10).tolist() == [True, False]


def test_nothing_is_defined_before_the_first_value_and_missing_values_wait() -> None:
    ema = Ema(2)
    ema.step(np.array([1.0, np.nan]))
    ema.step(np.array([np.nan, np.inf]))

    assert ema.t.tolist() == [1.0, 0.0]
    assert ema.mean[0] == 1.0
    assert math.isnan(ema.mean[1]) and math.isnan(ema.std[1])


def test_beta_lies_between_zero_and_one() -> None:
    with pytest.raises(ValueError, match=r"beta must be between 0 and 1, got 1\.0"):
        Ema(1, 1.0)


def test_drift_of_a_constant_is_zero_and_doubling_and_halving_are_alike() -> None:
    state = LogDrift(2)
    assert np.isnan(state.step(np.array([3.0, 3.0])).drift).all()  # type: ignore[arg-type]  # measured
    assert state.step(np.array([3.0, 3.0])).drift == pytest.approx([0.0, 0.0], abs=1e-15)
    assert state.step(np.array([6.0, 1.5])).drift == pytest.approx([math.log(2), -math.log(2)])


def test_what_is_not_positive_has_no_logarithm_and_leaves_the_average_alone() -> None:
    state = LogDrift(1)
    state.step(np.array([2.0]))
    result = state.step(np.array([0.0]), ("grad/global/norm_preclip",))

    assert result.values() == {}
    assert state.fast.t[0] == 1


@given(arrays(np.float64, (3, 7), elements=st.floats(-5, 5) | st.just(math.nan)))
def test_medians_skip_what_is_missing(values: np.ndarray) -> None:
    expected = [np.median(row[~np.isnan(row)]) if (~np.isnan(row)).any() else math.nan for row in values]

    assert medians(values) == pytest.approx(expected, nan_ok=True)


def test_history_keeps_the_last_values_of_each_series() -> None:
    history = RobustHistory(2, window=3)
    for step in range(5):
        history.push(np.array([float(step), np.nan if step % 2 else step]))

    assert history.ordered(0).tolist() == [2.0, 3.0, 4.0]
    assert history.ordered(1).tolist() == [0.0, 2.0, 4.0]

    history.clear(np.array([True, False]))
    assert history.ordered(0).tolist() == []


def test_spike_far_above_its_history_stands_out_and_series_do_not_mix() -> None:
    """Histories around 1 and around 1000; the value 1000 is unusual in the first only."""
    noise = np.random.default_rng(0).normal(0, 0.1, (2, 50))
    z = robust_z(decades(np.array([1000.0, 1000.0])), noise + np.array([[0.0], [3.0]]), keys=("a", "b"))

    values = z.values()
    assert values["a/robust_z"] > 15
    assert abs(values["b/robust_z"]) < 1


def test_robust_z_seldom_exceeds_six_on_noise() -> None:
    """Null rate of the catalogue: at most 1e-3 per point, for any memory of the noise."""
    rng = np.random.default_rng(0)
    for phi in (0.0, 0.6, 0.9):
        x = np.zeros((100, 150))
        x[:, 0] = rng.normal(size=100) / math.sqrt(1 - phi**2)
        for t in range(1, 150):
            x[:, t] = phi * x[:, t - 1] + rng.normal(size=100)
        z = [robust_z(x[:, t], x[:, max(0, t - 100) : t], scale_min=0.0).robust_z for t in range(50, 150)]
        assert (np.abs(np.array(z)) > 6).mean() <= 3e-3
