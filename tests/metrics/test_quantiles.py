"""Quantiles of one sample are exact; quantiles of several samples are within one bin of 1/64 of the rows."""

from functools import reduce

import numpy as np
import pytest
import torch

from esper_telemetry.core.reduction import Array
from esper_telemetry.metrics.statistics import COARSE, FINE, NAMED, Quantiles, as_quantiles, ascending, quantiles, sample

BIN = 1 / 64


def slots(x: Array, levels: tuple[float, ...] = FINE) -> Array:
    """Return the slots [1 + levels] of a sample."""
    s = sample(torch.from_numpy(x))
    result = as_quantiles(quantiles(ascending(s), s.count, levels), s.count)
    return np.array([float(slot) for slot in result.slots()])


def merged(*parts: Array) -> Array:
    """Merge the slots of several samples."""
    result: Array = Quantiles.merge(np.stack(parts)[:, None])[0]
    return result


def test_one_sample_has_its_own_quantiles() -> None:
    x = np.random.default_rng(0).normal(size=1000)

    for name, level in NAMED.items():
        assert Quantiles.statistics[name](slots(x).tolist()) == pytest.approx(np.quantile(x, level), rel=1e-12)
        assert Quantiles.statistics[name](slots(x, COARSE).tolist()) == pytest.approx(np.quantile(x, level), rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_quantiles_of_several_samples_lie_within_a_bin_of_those_of_their_union(ranks: int) -> None:
    """Samples of different sizes, places and widths, one with heavy tails and one with a single value."""
    rng = np.random.default_rng(ranks)
    parts = [rng.normal(rank, 1 + rank, size=200 + 300 * rank) for rank in range(ranks)]
    parts[0] = rng.standard_cauchy(size=500) * 100
    parts[-1] = np.full(700, 2.5)
    union = np.concatenate(parts)

    result = merged(*map(slots, parts))
    assert result[0] == len(union)
    for name, level in NAMED.items():
        lowest, highest = np.quantile(union, [max(0.0, level - BIN), min(1.0, level + BIN)])
        assert lowest <= Quantiles.statistics[name](result.tolist()) <= highest, name


def test_the_order_of_merging_changes_no_more_than_a_bin() -> None:
    parts = [np.random.default_rng(seed).normal(seed, 1, size=400) for seed in range(6)]
    union = np.concatenate(parts)

    result = reduce(merged, map(slots, parts))
    for name, level in NAMED.items():
        lowest, highest = np.quantile(union, [max(0.0, level - 2 * BIN), min(1.0, level + 2 * BIN)])
        assert lowest <= Quantiles.statistics[name](result.tolist()) <= highest, name


def test_samples_without_values_and_samples_that_agree_change_nothing() -> None:
    x = slots(np.arange(50.0))
    empty = slots(np.array([np.nan]))

    assert merged(x, empty).tolist() == x.tolist()
    assert merged(x, x)[1:].tolist() == x[1:].tolist()
    assert np.isnan(Quantiles.statistics["p50"](merged(empty, empty).tolist()))
