"""Interference, alignment, sparsity, concentration and noise of gradients."""

import math

import pytest
import torch

from esper_telemetry.metrics.gradients.actor_critic import (
    MAX_COMPARED_HEADS,
    group_interference,
    head_interference,
    interference,
    layer_interference,
    leaf_interference,
    parameter_interference,
)
from esper_telemetry.metrics.gradients.directions import (
    concentration,
    gradient_signs,
    gradient_zeros,
    layer_concentration,
    minibatch_alignment,
    shard_noise,
    successive_alignment,
    two_batch_noise,
)
from esper_telemetry.metrics.gradients.norms import gradient_norms


def test_sizes_of_actor_and_critic_are_compared_step_by_step() -> None:
    """Norms (1, 100) and (1, 1): ratios of 2 and 0 decades."""
    result = interference(torch.tensor([1.0, 1.0]), torch.tensor([100.0, 1.0]), coefs=torch.tensor([0.5, 1.0])).values()

    assert result["grad/interference/log_ratio"] == pytest.approx(1.0)
    assert result["grad/interference/critic_share"] == pytest.approx((10000 / 10001 + 0.5) / 2)
    assert result["grad/interference/actor_effective"] == 0.75
    assert "grad/interference/cos_feat" not in result


def test_steps_that_are_not_finite_do_not_count() -> None:
    result = interference(torch.tensor([1.0, math.nan]), torch.tensor([10.0, 1.0])).values()

    assert result["grad/interference/log_ratio"] == pytest.approx(1.0)
    assert result["grad/interference/actor_effective"] == 1.0


def test_separate_networks_are_compared_by_their_parameters() -> None:
    """Actor 3, critic 4 in step one, limit 1: clipping leaves a fifth of the actor's norm. In step two the critic is not finite."""
    norms = torch.tensor([[3.0, 4.0], [3.0, math.nan]])
    result = gradient_norms(norms, ["a", "c"], {"actor": ["a"], "critic": ["c"]}, max_norm=1.0)

    values = group_interference(result).values()

    assert values["grad/interference/actor_effective"] == pytest.approx(0.6, rel=1e-6)
    assert values["grad/interference/critic_share"] == pytest.approx(16 / 25)
    assert group_interference(result, critic="value").values() == {}


def test_agreement_by_layer_of_actor_and_critic() -> None:
    """(3, 4) and (4, 3): 24/25. Opposite directions: -1. A zero gradient is left out; a matrix is treated as one vector."""
    actor = [torch.tensor([3.0, 4.0]), torch.ones(2, 2), torch.zeros(3)]
    critic = [torch.tensor([4.0, 3.0]), -2 * torch.ones(2, 2), torch.ones(3)]

    assert layer_interference(actor, critic, ["trunk.0.bias", "trunk.0.weight", "trunk.2.bias"]).values() == {
        "grad/layer/trunk_0_bias/interference_cos": pytest.approx(0.96),
        "grad/layer/trunk_0_weight/interference_cos": pytest.approx(-1.0),
    }
    assert layer_interference([], [], []).values() == {}
    with pytest.raises(ValueError, match="gradients of 3 parameters need as many names, got 1"):
        layer_interference(actor, critic, ["trunk.0.bias"])


def test_agreement_of_heads() -> None:
    """Heads a and b agree in the first layer and conflict in the second, which is twice as large: (1 - 4) / 5. Head c is orthogonal to a
    in the first layer and has no gradient in the second.
    """
    first, second = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    heads = {"a": [first, second], "b": [first, -second], "c": [torch.tensor([0.0, 1.0]), torch.zeros(2)]}

    groups = head_interference(heads, ["one", "two"])

    assert groups.pairs.values() == {
        "grad/heads/a_vs_b/cos": pytest.approx(-0.6),
        "grad/heads/a_vs_c/cos": 0.0,
        "grad/heads/b_vs_c/cos": 0.0,
    }
    assert groups.layers.values() == {"grad/layer/one/heads_cos": 0.0, "grad/layer/two/heads_cos": pytest.approx(-1.0)}
    assert [group.values() for group in head_interference({"a": [first]}, ["one"])] == [{}, {}]


def test_only_the_first_heads_are_compared() -> None:
    heads = {f"h{place}": [torch.ones(2)] for place in range(MAX_COMPARED_HEADS + 2)}

    assert len(head_interference(heads, ["one"]).pairs.values()) == MAX_COMPARED_HEADS * (MAX_COMPARED_HEADS - 1) // 2


def test_nothing_is_lost_where_nothing_is_clipped() -> None:
    result = gradient_norms(torch.tensor([[3.0, 4.0]]), ["a", "c"], {"actor": ["a"], "critic": ["c"]})

    assert group_interference(result).values()["grad/interference/actor_effective"] == 3.0


def test_leaf_gradients_of_one_trunk_have_a_cosine() -> None:
    """[1, 0] against [1, 1]: cos 45°, in minibatches of different sizes."""
    actors = [torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])]
    critics = [torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])]

    result = leaf_interference(actors, critics).values()

    assert result["grad/interference/cos_feat"] == pytest.approx(math.sqrt(0.5))
    assert result["grad/interference/actor_effective"] == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_leaf_gradients_may_be_of_any_type(dtype: torch.dtype) -> None:
    leaf = torch.full((64, 16), 200.0, dtype=dtype)

    assert leaf_interference([leaf], [leaf]).values()["grad/interference/cos_feat"] == pytest.approx(1.0)


def test_separate_trunks_have_sizes_and_no_cosine() -> None:
    result = leaf_interference([torch.ones(2, 3)], [torch.ones(2, 3)], shared=False).values()

    assert "grad/interference/cos_feat" not in result
    assert result["grad/interference/critic_share"] == 0.5


def test_opposite_parameter_gradients_cancel() -> None:
    result = parameter_interference([torch.tensor([1.0]), torch.ones(2, 2)], [torch.tensor([-1.0]), -torch.ones(2, 2)])

    assert result.values() == pytest.approx({"grad/interference/cos": -1.0, "grad/interference/cancel": 1.0})
    assert parameter_interference([], []).values() == {}


def test_one_minibatch_or_a_zero_gradient_has_no_alignment() -> None:
    assert minibatch_alignment(torch.ones(1, 4)).values() == {}
    assert "grad/align/mean_pair_cos" not in minibatch_alignment(torch.tensor([[1.0], [0.0]])).values()
    assert successive_alignment(torch.ones(2), None).values() == {}


def test_zeros_are_counted_over_entries_not_over_layers() -> None:
    """Three of four entries in one layer and none of two in the other: 3/6, not (3/4 + 0)/2."""
    overall, layers = gradient_zeros([torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.ones(2)], ["dead", "live"])

    assert overall.values() == {"grad/zero_frac": 0.5}
    assert layers.values() == {"grad/layer/dead/zero_frac": 0.75, "grad/layer/live/zero_frac": 0.0}


def test_without_gradients_nothing_is_reported() -> None:
    zeros, layers = gradient_zeros([], [])

    assert zeros.values() == layers.values() == gradient_signs([]).values() == concentration([]).values() == {}


def test_concentration_does_not_depend_on_how_entries_are_split_nor_on_their_scale() -> None:
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))

    whole = concentration([gradient]).values()

    assert concentration(list(torch.split(gradient, 300))).values() == pytest.approx(whole)
    assert concentration([gradient * 1e-30]).values() == pytest.approx(whole, rel=1e-5)
    assert concentration([gradient * 1e30]).values() == pytest.approx(whole, rel=1e-5)


def test_concentration_of_gaussian_entries_is_the_published_reference() -> None:
    """Entropy 1 - 0.7296/ln n, participation 1/3, Hoyer's sparsity 0.203."""
    n = 100_000
    result = concentration([torch.randn(n, generator=torch.Generator().manual_seed(0))]).values()

    assert result["grad/concentration/entropy"] == pytest.approx(1 - 0.7296 / math.log(n), abs=2e-3)
    assert result["grad/concentration/participation"] == pytest.approx(1 / 3, abs=0.01)
    assert result["grad/concentration/hoyer"] == pytest.approx(0.203, abs=0.01)


def test_layer_entropy_averages_over_steps_and_skips_zero_ones() -> None:
    norms = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])

    assert layer_concentration(norms).values()["grad/concentration/layer_entropy"] == pytest.approx(0.5)
    assert layer_concentration(norms[:, :1]).values() == {}


def test_noise_estimates_are_unbiased_for_shards_of_any_size() -> None:
    """Known gradient |G|² = 4 and noise tr Σ = 50 per sample. The mean of 2000 estimates is within three standard errors."""
    generator = torch.Generator().manual_seed(0)
    d, batches = 8, [4, 8, 20]
    truth = torch.full((d,), math.sqrt(4 / d), dtype=torch.float64)
    deviations = torch.tensor([math.sqrt(50 / d / b) for b in batches], dtype=torch.float64)[:, None]
    draws = torch.randn(2000, len(batches), d, dtype=torch.float64, generator=generator)

    shards = truth + deviations * draws
    estimates = torch.tensor([list(shard_noise(shard, batches).values().values()) for shard in shards])

    error = estimates.std(0) / math.sqrt(len(draws))
    assert (estimates.mean(0) - torch.tensor([4.0, 50.0])).abs().le(3 * error).all()


def test_noise_needs_two_shards_and_fitting_sizes() -> None:
    assert shard_noise(torch.ones(1, 3), [4]).values() == {}
    with pytest.raises(ValueError, match="2 gradients need as many batch sizes, got 1"):
        shard_noise(torch.ones(2, 3), [4])
    with pytest.raises(ValueError, match="0 < b_small < b_big, got 8 and 8"):
        two_batch_noise(torch.ones(()), torch.ones(()), b_small=8, b_big=8)
