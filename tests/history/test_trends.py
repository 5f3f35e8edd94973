"""Trend, period and change: what they find, and how often they find something in noise.

The rates come from the catalogue's null table, on autoregressive noise x_t = φ x_(t-1) + e_t, 100 points a series.
"""

import math
from functools import lru_cache

import numpy as np
import pytest

from esper_telemetry.core.metric import Array
from esper_telemetry.history.deviations import CUSUM_LEVEL, Cusum, PageHinkley, level_model
from esper_telemetry.history.trend import acf, fisher_p, mann_kendall, memory, periods, prewhiten, theil_sen, trends

SERIES, POINTS = 500, 100


@lru_cache
def noise(phi: float, points: int = POINTS) -> Array:
    """[SERIES, points] of autoregressive noise with unit standard deviation."""
    rng = np.random.default_rng(int(100 * phi) + points)
    x = np.empty((SERIES, points))
    x[:, 0] = rng.normal(size=SERIES)
    for t in range(1, points):
        x[:, t] = phi * x[:, t - 1] + math.sqrt(1 - phi**2) * rng.normal(size=SERIES)
    return x


@pytest.mark.parametrize(("phi", "most"), [(0.0, 0.02), (0.6, 0.02), (0.9, 0.05)])
def test_trend_test_seldom_fires_on_noise(phi: float, most: float) -> None:
    scores = trends(list(noise(phi))).mk_z

    assert (np.abs(np.asarray(scores)) > 3).mean() <= most


def test_trend_of_a_twentieth_of_the_noise_per_update_is_significant() -> None:
    scores = trends(list(noise(0.6) + 0.05 * np.arange(POINTS))).mk_z

    assert (np.abs(np.asarray(scores)) > 3).mean() >= 0.95


@pytest.mark.parametrize("phi", [0.0, 0.6, 0.9])
def test_period_test_seldom_fires_on_noise(phi: float) -> None:
    result = periods([prewhiten(x).y for x in noise(phi)])

    assert (np.asarray(result.p) < 1e-3).mean() <= 0.01


def test_period_of_a_strong_oscillation_is_reported() -> None:
    wave = math.sqrt(2) * np.sin(2 * np.pi * np.arange(POINTS) / 7)
    result = periods([prewhiten(x + wave).y for x in noise(0.3)])

    assert (np.asarray(result.p) < 1e-3).mean() >= 0.8
    assert np.median(np.asarray(result.length)) == pytest.approx(7, abs=0.5)


@pytest.mark.parametrize(("phi", "most"), [(0.0, 0.05), (0.6, 0.09), (0.9, 0.22)])
def test_cusum_on_prewhitened_scores_is_a_hint(phi: float, most: float) -> None:
    cusum = Cusum(SERIES)
    scores = np.array([level_model(x[:50]).score(x[50:], x[49:-1]) for x in noise(phi, 150)])
    peaks = np.array([cusum.step(z).cusum for z in scores.T])

    assert (peaks.max(0) > CUSUM_LEVEL).mean() <= most


def test_cusum_finds_a_step_of_three_deviations() -> None:
    x = noise(0.0, 150).copy()
    x[:, 100:] += 3
    cusum = Cusum(SERIES)
    peaks = np.array([cusum.step(z).cusum for z in np.array([level_model(row[:50]).score(row[50:], row[49:-1]) for row in x]).T])

    assert (peaks[-1] > CUSUM_LEVEL).mean() >= 0.95


def test_missing_value_holds_the_sums_and_reset_clears_one_series() -> None:
    cusum = Cusum(2, slack=0.5)
    cusum.step(np.array([2.0, -2.0]))
    assert np.isnan(np.asarray(cusum.step(np.array([np.nan, np.nan])).cusum)).all()
    assert cusum.step(np.array([0.5, -0.5]), ("a", "b")).values() == {"a/cusum": 1.5, "b/cusum": 1.5}

    cusum.reset(np.array([True, False]))

    assert cusum.up.tolist() == [0.0, 0.0]
    assert cusum.down.tolist() == [0.0, 1.5]


def test_page_hinkley_sees_a_rise_and_not_a_fall() -> None:
    rise, fall = PageHinkley(1, 0.1), PageHinkley(1, 0.1)
    steps = np.r_[np.zeros(20), np.ones(20)]
    up = [float(np.asarray(rise.step(np.array([x])).page_hinkley)[0]) for x in steps]
    down = [float(np.asarray(fall.step(np.array([-x])).page_hinkley)[0]) for x in steps]

    assert max(up[:20]) == 0.0 and up[-1] > 5
    assert max(down) == 0.0


def test_page_hinkley_passes_over_missing_values() -> None:
    state = PageHinkley(1, 0.1)
    assert state.step(np.array([np.nan]), ("a",)).values() == {}
    state.step(np.array([1.0]))

    assert np.asarray(state.step(np.array([2.0])).page_hinkley)[0] == pytest.approx(0.4)


def test_slope_is_the_median_over_pairs_so_that_one_outlier_does_not_matter() -> None:
    x = np.arange(20.0)
    x[7] = 1000

    assert theil_sen(x) == 1.0
    assert math.isnan(theil_sen(x[:1]))


def test_constants_and_short_series_have_no_significance() -> None:
    result = trends([np.full(10, 0.1), np.arange(4.0)], ("constant", "short"))

    assert result.values() == {"constant/trend/slope": 0.0}
    assert mann_kendall(np.ones(5)).z is None
    with pytest.raises(ValueError, match="at least 5 values, got 4"):
        prewhiten(np.arange(4.0))


def test_constants_and_short_series_have_no_period() -> None:
    assert periods([np.full(7, 0.1), np.arange(4.0)], ("a", "b")).values() == {}
    assert memory([np.full(7, 0.1), np.ones(1)], ("a", "b")).values() == {}
    assert periods([]).values() == {}


def test_fisher_probability_lies_in_its_range_even_where_terms_cancel() -> None:
    for m in (2, 10, 50, 99):
        p = [fisher_p(g, m) for g in np.linspace(1 / m, 1, 50)]
        assert all(0 <= value <= 1 for value in p)
        assert p == sorted(p, reverse=True)
        assert p[0] == 1.0


def test_ping_pong_has_negative_memory() -> None:
    assert acf(np.tile([1.0, -1.0], 20), 1) < -0.9
