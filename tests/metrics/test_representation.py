"""Features: ranks, activity, drift and excess ratios on numbers worked by hand."""

import math

import pytest
import torch

from esper_telemetry.metrics.representation import capacity_loss, excess_ratio, feature_rank, layer_responses, unit_activity


def test_the_definitions_of_rank_differ() -> None:
    """Singular values 100, 1: shares 0.990 and 0.9999 of the sum and of the squares. 1 / √100 is the first that exceeds 0.01."""
    features = torch.zeros(10_000, 2, dtype=torch.float64)
    features[0, 0], features[1, 1] = 100.0, 1.0

    result = feature_rank(features, delta=0.005).values()

    assert result["repr/srank"] == 2
    assert result["repr/pca99"] == 1
    assert result["repr/feature_rank"] == 1
    assert 1 < result["repr/effective_rank"] < 1.1


def test_rows_that_are_not_valid_change_no_rank() -> None:
    features = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    valid = torch.arange(20) < 12
    plain = feature_rank(features[:12]).values()
    features[12:] = math.nan

    assert feature_rank(features, valid=valid).values() == pytest.approx(plain)


@pytest.mark.parametrize("features", [torch.ones(2, 3), torch.zeros(5, 3), torch.full((5, 3), math.nan)])
def test_features_without_a_rank_have_none(features: torch.Tensor) -> None:
    assert set(feature_rank(features).values()) <= {"repr/feature_rank"}


def test_dormant_units_are_counted_details_and_over_all_units() -> None:
    """First layer: one of two dormant. Second: none of three. Overall: 1 of 5."""
    first, second = torch.tensor([[1.0, 0.0], [1.0, 0.01]]), torch.ones(2, 3)

    result = unit_activity({"actor.0": first, "actor.2": second}, activation="relu")

    assert result.layers.values() == {"repr/dormant_frac/actor_0": 0.5, "repr/dormant_frac/actor_2": 0.0}
    assert result.all.values() == {"repr/dormant_frac": pytest.approx(0.2), "repr/dead_frac": 0.0}


def test_rows_that_are_not_valid_wake_no_unit() -> None:
    x = torch.tensor([[1.0, 0.0], [1.0, 5.0]])

    result = unit_activity({"trunk": x}, activation="relu", valid=torch.tensor([True, False])).all.values()

    assert result == {"repr/dormant_frac": 0.5, "repr/dead_frac": 0.5}


def test_dead_units_of_an_unknown_nonlinearity_are_unknown() -> None:
    assert unit_activity({"trunk": torch.ones(2, 3)}).all.values() == {"repr/dormant_frac": 0}


def test_without_rows_nothing_is_dormant_or_dead() -> None:
    result = unit_activity({"trunk": torch.ones(2, 3)}, activation="relu", valid=torch.zeros(2, dtype=torch.bool))

    assert result.all.values() == {} == result.layers.values()


def test_without_a_clipped_sample_there_is_no_excess() -> None:
    assert excess_ratio(torch.zeros(3), clip=0.2).values() == {}


def network(width: int) -> torch.nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh())


def test_a_network_that_learns_fits_more_of_random_targets_than_a_saturated_one() -> None:
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    fresh, dead = network(64), network(64)
    weight = dead.get_parameter("0.weight")
    with torch.no_grad():
        weight.copy_(1e4 * weight[:1].expand_as(weight))

    losses = [
        capacity_loss(net, list(net.parameters()), inputs, steps=200, learning_rate=0.01).values()["repr/capacity_loss"]
        for net in (fresh, dead)
    ]

    assert losses[0] < 0.5 < losses[1] <= 1


def test_testing_capacity_leaves_the_generators_of_others_alone() -> None:
    before = torch.get_rng_state()

    first, second = (capacity_loss(net, list(net.parameters()), torch.ones(8, 4)) for net in (network(8), network(8)))

    assert first.values() == second.values()
    assert torch.equal(torch.get_rng_state(), before)


def test_responses_of_a_layer_have_quantiles() -> None:
    """0 to 20 in some order, and a NaN. A layer without finite entries is left out."""
    first = torch.randperm(21, generator=torch.Generator().manual_seed(0)).float()
    layers = {"trunk.0": torch.cat([first, torch.tensor([math.nan])]).reshape(11, 2), "trunk.1": torch.full((4, 1), math.inf)}

    assert layer_responses(layers).values() == pytest.approx(
        {"repr/response/trunk_0/p05": 1.0, "repr/response/trunk_0/p50": 10.0, "repr/response/trunk_0/p95": 19.0}
    )
    assert layer_responses({}).values() == {}
