"""Reductions merge associatively, and their statistics equal those computed from all data at once."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from esper_telemetry.core.reduction import Ess, Last, Max, Min, Moments, OfLargest, PooledMean, Reduction, Sum

Floats = npt.NDArray[np.float64]
samples = arrays(np.float64, st.integers(1, 20), elements=st.floats(-100, 100))


def moments(x: Floats) -> Floats:
    if len(x) == 0:
        return np.zeros(5)
    d = x - x.mean()
    return np.array([len(x), x.mean(), (d**2).sum(), (d**3).sum(), (d**4).sum()])


def ess(x: Floats) -> Floats:
    if len(x) == 0:
        return np.array([0, -np.inf, 0, 0])
    e = np.exp(x - x.max())
    return np.array([len(x), x.max(), e.sum(), (e**2).sum()])


def merged(reduction: type[Reduction], *parts: Floats) -> list[float]:
    rows = np.stack(parts)[:, None]
    return list(reduction.merge(rows)[0].tolist())


@given(samples, samples)
def test_moments_of_parts_are_moments_of_the_whole(a: Floats, b: Floats) -> None:
    whole = moments(np.concatenate([a, b]))

    assert merged(Moments, moments(a), moments(b)) == pytest.approx(whole, rel=1e-9, abs=1e-6)


def test_moments_survive_a_large_mean() -> None:
    """Raw power sums lose everything at mean/std = 1e8; centred sums keep the shape."""
    from scipy import stats

    x = np.random.default_rng(0).gamma(2.0, size=1000)
    parts = np.split(x + 1e8, 10)

    slots = merged(Moments, *map(moments, parts))

    assert Moments.statistics["std"](slots) == pytest.approx(x.std(), rel=1e-6)
    assert Moments.statistics["skew"](slots) == pytest.approx(stats.skew(x), rel=1e-5)
    assert Moments.statistics["kurtosis"](slots) == pytest.approx(stats.kurtosis(x), rel=1e-5)


def test_seven_times_a_tenth_has_no_spread_and_no_shape() -> None:
    slots = moments(np.full(7, 0.1)).tolist()

    assert Moments.statistics["std"](slots) == 0.0
    assert math.isnan(Moments.statistics["skew"](slots))


def test_an_empty_part_changes_nothing() -> None:
    x = np.array([1.0, 2.0, 4.0])

    assert merged(Moments, moments(x), moments(np.array([]))) == pytest.approx(moments(x).tolist())
    assert merged(Ess, ess(np.array([])), ess(x)) == pytest.approx(ess(x).tolist())


@given(samples, samples)
def test_effective_sample_size_of_parts_is_that_of_the_whole(a: Floats, b: Floats) -> None:
    whole = Ess.statistics["frac"](ess(np.concatenate([a, b])).tolist())

    assert Ess.statistics["frac"](merged(Ess, ess(a), ess(b))) == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize(("reduction", "expected"), [(Sum, 6.0), (Min, 1.0), (Max, 3.0), (Last, 3.0)])
def test_one_slot_reductions(reduction: type[Reduction], expected: float) -> None:
    assert merged(reduction, np.array([1.0]), np.array([2.0]), np.array([3.0])) == [expected]


def test_what_belongs_to_the_largest() -> None:
    """The second of three has the largest size, 9; without a finite size the result is undefined."""
    rows = np.array([3.0, 1.0]), np.array([5.0, 9.0]), np.array([4.0, -math.inf])

    assert OfLargest.statistics["of_largest"](merged(OfLargest, *rows)) == 5.0
    assert math.isnan(OfLargest.statistics["of_largest"]([4.0, -math.inf]))


def test_a_pooled_mean_adds_up_over_ranks_and_not_over_steps() -> None:
    """Two ranks of 32 and 16 rows in each of two steps: 48 rows a step."""
    ranks = np.array([[[64.0, 2.0]], [[32.0, 2.0]]])

    assert PooledMean.statistics["mean"](PooledMean.join(ranks)[0].tolist()) == 48.0
    assert PooledMean.statistics["mean"](merged(PooledMean, np.array([64.0, 2.0]), np.array([32.0, 2.0]))) == 24.0
