"""Advantages, returns and rewards against SciPy and NumPy, and the effects of masks and normalisation."""

import math

import pytest
import torch
from torch import Tensor

from esper_telemetry.history.critic import advantage_scale
from esper_telemetry.metrics.advantages import advantage_stats, flips_in_order, normalized_advantage_stats
from esper_telemetry.metrics.rollout_stats import return_stats, reward_stats


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return random skewed numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).exp() - 1


def test_a_large_common_offset_costs_no_precision() -> None:
    """Raw power sums would lose all digits of the skew at mean/std = 1e6."""
    import scipy.stats

    x = numbers(512)

    values = advantage_stats(x + 1e6).values()

    assert values["adv/raw/skew"] == pytest.approx(scipy.stats.skew(x.numpy()), rel=1e-6)


@pytest.mark.parametrize("stats", [advantage_stats, return_stats, reward_stats])
def test_invalid_entries_have_no_influence(stats: object) -> None:
    assert callable(stats)
    x, valid = numbers(10, 4), torch.rand(10, 4, generator=torch.Generator().manual_seed(1)) > 0.3

    masked = stats(x.masked_fill(~valid, math.nan), valid=valid).values()

    assert masked == pytest.approx(stats(x[valid]).values(), rel=1e-12)


@pytest.mark.parametrize("stats", [advantage_stats, return_stats])
def test_nothing_valid_means_nothing_reported(stats: object) -> None:
    assert callable(stats)

    assert stats(torch.ones(3), valid=torch.zeros(3, dtype=torch.bool)).values() == {}
    assert stats(torch.ones(0)).values() == {}


def test_rewards_in_training_are_compared_with_those_of_the_environment() -> None:
    import numpy as np

    raw, valid = numbers(10, 4), torch.rand(10, 4, generator=torch.Generator().manual_seed(1)) > 0.3
    trained = 3 * raw + numbers(10, 4, seed=2)

    values = reward_stats(raw, trained=trained, valid=valid).values()

    assert values["reward/trained_correlation"] == pytest.approx(np.corrcoef(raw[valid], trained[valid])[0, 1])
    assert reward_stats(raw, trained=torch.full((10, 4), 0.1)).values()["reward/trained_correlation"] == 0
    assert "reward/trained_correlation" not in reward_stats(raw).values()
    assert "reward/trained_correlation" not in reward_stats(torch.full((10, 4), 0.1), trained=raw).values()


def test_a_single_value_has_no_shape() -> None:
    values = return_stats(torch.tensor([3.0])).values()

    assert values == {f"ret/{key}": 3.0 for key in ("mean", "min", "max", "p10", "p50", "p90")} | {"ret/std": 0.0}


def test_normalisation_over_the_update_is_judged_over_all_its_minibatches() -> None:
    x = numbers(4, 50)
    normalized = (x - x.mean()) / x.std(correction=0)

    values = normalized_advantage_stats(normalized, x, dim=-1).values()

    assert values["adv/norm/mean"] == pytest.approx(0.0, abs=1e-12)
    assert values["adv/norm/std"] == pytest.approx(1.0)
    assert values["integrity/adv_norm"] == pytest.approx(0.0, abs=1e-12)


def test_equal_advantages_are_flagged() -> None:
    scale = advantage_scale(0.1, 0.0, 0.1, 0.1)

    assert scale.values() == {"adv/std_floored": 1.0}
    assert advantage_scale(None, None, None, None).values() == {}


def test_flips_follow_the_order_where_rows_have_no_indices() -> None:
    """1 and 2 of the four are between 0 and the mean of 3.25. Shuffled and masked, they are the same two."""
    raw, valid = torch.tensor([[1.0, 2.0, 99.0], [-1.0, 11.0, math.nan]]), torch.tensor([[1, 1, 0], [1, 1, 0]]).bool()
    used = raw[valid] - 3.25

    result = flips_in_order(used.flip(0), raw, valid=valid)

    assert float(result.total / result.count) == 0.5
    by_row = normalized_advantage_stats(used, raw[valid]).values()["adv/sign_flip_frac"]
    assert by_row == 0.5


def test_flips_are_undefined_where_rows_are_missing() -> None:
    result = flips_in_order(torch.ones(3), torch.ones(4))

    assert float(result.count) == 0
