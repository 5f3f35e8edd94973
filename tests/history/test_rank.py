"""Rank correlations."""

import numpy as np
import pytest

from esper_telemetry.history.trend import advantage_gradient, ranks, spearman


def test_equal_values_share_the_average_rank() -> None:
    assert ranks(np.array([10.0, 20.0, 10.0, 30.0])).tolist() == [1.5, 3.0, 1.5, 4.0]


def test_correlation_is_that_of_scipy() -> None:
    from scipy import stats

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 10, (2, 60)).astype(float)

    assert spearman(x, y) == pytest.approx(float(stats.spearmanr(x, y).statistic), rel=1e-12)


def test_pairs_with_a_missing_value_do_not_count_and_constants_have_no_correlation() -> None:
    assert spearman(np.array([1.0, np.nan, 2.0, 3.0]), np.array([1.0, 9.0, 2.0, 3.0])) == 1.0
    assert spearman(np.ones(5), np.arange(5.0)) is None
    assert spearman(np.array([]), np.array([])) is None


def test_leak_of_the_advantages_scale_needs_twenty_updates_and_looks_at_the_last_fifty() -> None:
    x = np.arange(100.0)
    y = np.r_[np.zeros(50), -np.arange(50.0)]

    assert advantage_gradient(x, y).values() == {"adv/grad_corr": -1.0}
    assert advantage_gradient(x[:19], x[:19]).values() == {}
