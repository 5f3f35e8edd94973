"""Gradient norms, groups and clipping."""

import math

import pytest
import torch
from torch import nn
from worked_cases import values_of, with_gradient

from esper_telemetry.metrics.gradients.gradient_health import gradient_health
from esper_telemetry.metrics.gradients.norms import gradient_norms, head_gradients, term_gradients


def test_group_without_gradients_is_absent_and_never_zero() -> None:
    results = values_of(gradient_norms(torch.tensor([1.0]), ["w"], {"actor": ["w"], "critic": ["v"]}))

    assert not any("critic" in key for key in results)


def test_heads_and_terms_have_norms_of_their_own() -> None:
    heads = head_gradients(torch.tensor([[3.0, 4.0, 1.0]]), ["pi.op.w", "pi.op.b", "pi.slot.w"], {"op": ["pi.op"]})

    assert heads.values() == {"grad/head/op/norm": 5.0}
    assert term_gradients(value=torch.tensor([1.0, math.nan, 3.0])).values() == {"grad/value/norm": 2.0}
    assert term_gradients().values() == {}


def test_zero_gradient_of_a_group_is_zero() -> None:
    results = values_of(gradient_norms(torch.tensor([0.0, 1.0]), ["w", "v"], {"actor": ["w"]}, max_norm=0.5))

    assert results["grad/actor/norm_preclip"] == 0.0
    assert results["grad/actor/norm_postclip"] == 0.0


def test_norm_that_is_not_finite_leaves_its_step_and_group_and_is_counted() -> None:
    """Step 2 is missing for the actor and the whole network. The critic keeps both steps."""
    norms = torch.tensor([[3.0, 4.0], [math.nan, 4.0], [3.0, math.inf]])
    results = values_of(gradient_norms(norms, ["w", "v"], {"actor": ["w"], "critic": ["v"]}, max_norm=5.0))

    assert results["grad/global/norm_preclip"] == pytest.approx(5.0)
    assert results["grad/global/norm_preclip_nonfinite"] == 2.0
    assert results["grad/actor/norm_preclip"] == 3.0
    assert results["grad/actor/norm_preclip_nonfinite"] == 1.0
    assert results["grad/critic/norm_preclip"] == 4.0
    assert results["grad/layer/w/norm"] == 3.0
    assert results["grad/clip/freq"] == 1.0


def test_count_of_non_finite_entries_is_silent_while_all_are_finite() -> None:
    assert not any("nonfinite" in key for key in values_of(gradient_norms(torch.ones(2, 1), ["w"])))


def test_without_parameters_or_gradients_every_key_is_absent() -> None:
    assert values_of(gradient_norms(torch.zeros(4, 0), [])) == {}
    assert values_of(gradient_health([])) == {}
    assert values_of(gradient_health(nn.Linear(2, 2), groups={"actor": ["weight"]}, max_norm=0.5)) == {}


def test_health_takes_a_module_its_parameters_or_named_ones() -> None:
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()

    by_module = values_of(gradient_health(layer))
    by_name = values_of(gradient_health(layer.named_parameters()))
    by_position = values_of(gradient_health(layer.parameters()))

    assert by_module == by_name
    assert by_module["grad/global/norm_preclip"] == by_position["grad/global/norm_preclip"] == pytest.approx(8**0.5)
    assert by_position["grad/layer/0/norm"] == by_module["grad/layer/weight/norm"]


def test_tied_parameters_count_once() -> None:
    weight = with_gradient(torch.tensor([3.0, 4.0]))

    assert values_of(gradient_health([weight, weight]))["grad/global/norm_preclip"] == 5.0


def test_group_may_be_named_by_its_module() -> None:
    agent = nn.ModuleDict({"actor": nn.Linear(2, 1), "actors": nn.Linear(2, 1)})
    agent["actor"](torch.ones(1, 2)).sum().backward()
    agent["actors"](torch.ones(1, 2)).sum().backward()

    assert values_of(gradient_health(agent, groups={"pi": ["actor"]}))["grad/pi/norm_preclip"] == pytest.approx(3**0.5)


def test_group_of_unknown_parameters_is_a_mistake_that_shows() -> None:
    with pytest.raises(ValueError, match="group 'actor' names 'pi', which is not a trainable parameter or module"):
        gradient_health(nn.Linear(2, 2), groups={"actor": ["pi"]})


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_limit_must_be_positive(limit: float) -> None:
    with pytest.raises(ValueError, match=r"max_norm must be (positive|a number)"):
        gradient_norms(torch.ones(1), ["w"], max_norm=limit)


def test_names_must_fit_the_norms() -> None:
    with pytest.raises(ValueError, match="norms of 2 tensors need as many names, got 1"):
        gradient_norms(torch.ones(2), ["w"])


def test_layout_of_a_gradient_does_not_matter() -> None:
    gradient = torch.randn(6, 4)
    reference = values_of(gradient_health([with_gradient(gradient)]))

    transposed = with_gradient(gradient.t().contiguous().t())
    strided = torch.empty(6, 8)[:, ::2]
    strided.copy_(gradient)

    assert values_of(gradient_health([transposed])) == pytest.approx(reference)
    assert values_of(gradient_health([with_gradient(strided)])) == pytest.approx(reference)
    assert values_of(gradient_health([with_gradient(gradient.flatten())])) == pytest.approx(reference)


def test_types_may_be_mixed() -> None:
    mixed = [with_gradient(torch.tensor([3.0], dtype=torch.bfloat16)), with_gradient(torch.tensor([4.0]))]

    assert values_of(gradient_health(mixed))["grad/global/norm_preclip"] == 5.0


def test_entries_that_are_not_finite_are_left_out_and_counted_and_clipping_is_undefined() -> None:
    gradients = [torch.tensor([3.0, math.nan]), torch.tensor([4.0, -math.inf, math.inf])]
    results = values_of(gradient_health([with_gradient(g) for g in gradients], max_norm=0.5))

    assert results["grad/global/norm_preclip"] == pytest.approx(5.0)
    assert results["grad/global/norm_preclip_nonfinite"] == 3.0
    assert not any(key.startswith("grad/clip") or "postclip" in key for key in results)


def test_gradients_and_random_numbers_are_left_alone() -> None:
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    before, state = layer.weight.grad.clone(), torch.get_rng_state()  # type: ignore[union-attr]  # backward has run

    gradient_health(layer, max_norm=0.1)

    assert torch.equal(layer.weight.grad, before)  # type: ignore[arg-type]  # backward has run
    assert torch.equal(torch.get_rng_state(), state)
