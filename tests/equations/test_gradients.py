"""A gradient compared with the PPO loss's gradient, from gradients of its terms."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from explained import names
from torch import Tensor, nn

from esper_telemetry.core.minibatch_objective import LossRows
from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.gradient import LossGradients, check_gradient

COEFFICIENTS = {"policy": 1.0, "value": 0.5, "entropy": 0.02}

Gradients = dict[str, Tensor]
Terms = Mapping[str, Gradients]


def terms(seed: int) -> Terms:
    """A shared trunk, an actor and a critic; the critic's gradient is a hundred times the actor's."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "policy": {"trunk": normal(4, 3), "actor": normal(2, 4), "critic": torch.zeros(1, 4)},
        "value": {"trunk": 100 * normal(4, 3), "actor": torch.zeros(2, 4), "critic": 100 * normal(1, 4)},
        "entropy": {"trunk": normal(4, 3), "actor": normal(2, 4), "critic": torch.zeros(1, 4)},
    }


def weighted(of: Terms, **coefficients: float) -> Gradients:
    weights = {**COEFFICIENTS, **coefficients}
    return {name: sum(weights[term] * of[term][name] for term in of) for name in of["policy"]}  # type: ignore[misc]


def check(gradients: Gradients, of: Terms, **arguments: object) -> EquationCheck:
    return check_gradient(gradients, of, coefficients=COEFFICIENTS, **arguments)  # type: ignore[arg-type]


def without(gradients: Gradients, *parameters: str) -> Gradients:
    return {name: torch.zeros_like(g) if name in parameters else g for name, g in gradients.items()}


MISTAKES: Mapping[str, Callable[[Terms], Gradients]] = {
    "sign": lambda of: {name: -g for name, g in weighted(of).items()},
    "policy_sign": lambda of: weighted(of, policy=-1.0),
    "value_sign": lambda of: weighted(of, value=-0.5),
    "entropy_sign": lambda of: weighted(of, entropy=-0.02),
    "policy_missing": lambda of: weighted(of, policy=0.0),
    "value_missing": lambda of: weighted(of, value=0.0),
    "entropy_missing": lambda of: weighted(of, entropy=0.0),
    "value_halved": lambda of: weighted(of, value=0.25),
    "value_doubled": lambda of: weighted(of, value=1.0),
    "summed": lambda of: {name: 32 * g for name, g in weighted(of).items()},
    "policy_summed": lambda of: weighted(of, policy=32.0),
    "value_summed": lambda of: weighted(of, value=16.0),
    "entropy_summed": lambda of: weighted(of, entropy=0.64),
    "zero": lambda of: without(weighted(of), "trunk", "actor", "critic"),
    "parts_missing": lambda of: without(weighted(of), "actor"),
    "critic_stopped": lambda of: {**weighted(of), "trunk": weighted(of, value=0.0)["trunk"]},
    "actor_stopped": lambda of: {**weighted(of), "trunk": weighted(of, policy=0.0, entropy=0.0)["trunk"]},
    "value_weight": lambda of: weighted(of, value=0.7),
    "entropy_weight": lambda of: weighted(of, entropy=0.001),
    "policy_weight": lambda of: weighted(of, policy=0.3),
    "scaled": lambda of: {name: g / 3 for name, g in weighted(of).items()},
    "clipped_by_value": lambda of: {name: g.clamp(-20, 20) for name, g in weighted(of).items()},
}


def test_the_gradient_of_the_loss_matches(seed: int) -> None:
    of = terms(seed)

    result = check(weighted(of), of, rows=32)

    assert result.matches
    assert result.error is not None and result.error < 1e-6


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_named_alone(name: str, seed: int) -> None:
    of = terms(seed)

    result = check(MISTAKES[name](of), of, rows=32)

    assert names(result) == {name}
    assert not result.holds


def test_fitted_weights_are_those_that_were_used(seed: int) -> None:
    of = terms(seed)
    used = {"value_weight": 0.7, "entropy_weight": 0.001, "policy_weight": 0.3, "scaled": 1 / 3, "clipped_by_value": 20.0}

    for name, value in used.items():
        (explanation,) = check(MISTAKES[name](of), of).explanations
        assert explanation.fitted == pytest.approx(value, rel=1e-3)


def test_a_gradient_that_was_not_cleared_is_the_sum_with_the_one_before(seed: int) -> None:
    of, before = terms(seed), weighted(terms(seed + 100))

    result = check({name: g + before[name] for name, g in weighted(of).items()}, of, previous=before)

    assert names(result) == {"not_cleared"}
    assert result.text.startswith("the gradients before clipping equal the sum of this minibatch's gradient and the previous gradient")


def test_the_last_of_several_passes_is_named_if_the_others_were_cleared(seed: int) -> None:
    of = terms(seed)
    last = {name: 0.25 * g for name, g in weighted(terms(seed + 100)).items()}

    assert names(check(last, of, alternatives={"last_pass": last})) == {"last_pass"}
    assert check(weighted(of), of, alternatives={"last_pass": last}).matches


@pytest.mark.parametrize(("weight", "name"), [(0.3, "kl_penalty"), (-0.3, "kl_reward")])
def test_a_penalty_on_the_divergence_is_a_variant_and_a_reward_a_mistake(weight: float, name: str) -> None:
    of, divergence = terms(0), weighted(terms(100))

    result = check({key: g + weight * divergence[key] for key, g in weighted(of).items()}, of, alternatives={"kl_penalty": divergence})

    (explanation,) = result.explanations
    assert explanation.hypothesis.name == name
    assert explanation.fitted == pytest.approx(weight, rel=1e-3)
    assert result.holds is (weight > 0)


def test_parameters_that_were_not_cleared_are_told_from_the_others() -> None:
    """The optimizer, which clears the gradients, lacks the actor's parameters."""
    of, before = terms(0), weighted(terms(100))
    gradients = weighted(of)

    result = check({**gradients, "actor": gradients["actor"] + before["actor"]}, of, previous=before)

    assert names(result) == {"parts_not_cleared"}


def test_a_weight_is_not_fitted_to_a_single_number() -> None:
    """The entropy depends on a single number, so any gradient of that number fits some weight of the entropy."""
    of = {"policy": {"log_std": torch.tensor([0.3])}, "entropy": {"log_std": torch.tensor([-1.0])}}

    result = check({"log_std": torch.tensor([0.7])}, of)

    assert not result.matches
    assert names(result) == set()


def test_a_penalty_on_the_weights_is_named_with_its_weight() -> None:
    of, weights = terms(0), weighted(terms(7))

    result = check({name: g + 0.01 * weights[name] for name, g in weighted(of).items()}, of, weights=weights)

    assert names(result) == {"weight_penalty"}
    assert result.explanations[0].fitted == pytest.approx(0.01, rel=1e-4)


def test_a_critic_that_leaks_into_a_trunk_is_named() -> None:
    """The reference stops the critic's gradient at the trunk."""
    whole = terms(0)
    stopped = {**whole, "value": without(dict(whole["value"]), "trunk")}

    result = check(weighted(whole), stopped, alternatives={"critic_leaks": whole["value"]})

    assert names(result) == {"critic_leaks"}


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_another_value_loss_is_recognised_wherever_its_half_is_placed(factor: float) -> None:
    of, huber = terms(0), terms(100)["value"]
    gradients = {name: g + factor * 0.5 * huber[name] for name, g in weighted(of, value=0.0).items()}

    result = check(gradients, of, alternatives={"value_huber": huber})

    assert names(result) == {"value_huber"}
    assert result.holds


def test_a_gradient_clipped_by_its_norm_is_no_mistake() -> None:
    of = terms(0)
    gradients = weighted(of)
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm()

    result = check({name: g * 0.5 / norm for name, g in gradients.items()}, of, max_norm=0.5)

    assert names(result) == {"clipped_already"}
    assert result.holds


@pytest.mark.parametrize("size", [1e-3, 1e-2, 1.0])
def test_an_unknown_mistake_of_any_size_is_given_no_name(seed: int, size: float) -> None:
    of, noise = terms(seed), weighted(terms(seed + 50))

    result = check({name: g + size * noise[name] for name, g in weighted(of).items()}, of, rows=32)

    assert not result.matches
    assert names(result) == set()
    assert "no known mistake" in result.text


def test_parameters_stand_for_their_gradients_and_none_for_zeros() -> None:
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    expected = [layer.weight.grad, layer.bias.grad]

    assert check_gradient(list(layer.parameters()), {"policy": expected}, coefficients={}).matches
    assert names(check_gradient([None, layer.bias.grad], {"policy": expected}, coefficients={})) == {"parts_missing"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"terms": {}}, "terms of the loss must be among policy, value, entropy, got none"),
        ({"terms": {"critic": [torch.ones(2)]}}, "got critic"),
        ({"terms": {"value": [torch.ones(2)]}}, "coefficients must have a weight for value"),
        ({"terms": {"policy": [torch.ones(2), torch.ones(2)]}}, "same number of tensors"),
        ({"terms": {"policy": [torch.ones(3)]}}, "must have the shapes"),
        ({"alternatives": {"magic": [torch.ones(2)]}}, "alternatives must be among .*no_clip, .*, got magic"),
    ],
)
def test_wrong_arguments_are_refused_with_a_reason(arguments: dict[str, object], message: str) -> None:
    given = {"gradients": [torch.ones(2)], "terms": {"policy": [torch.ones(2)]}, "coefficients": {}, **arguments}

    with pytest.raises(ValueError, match=message):
        check_gradient(**given)  # type: ignore[arg-type]


def test_frozen_parameters_have_no_gradient_and_are_not_called_detached() -> None:
    torch.manual_seed(0)
    states, body, actor, critic = torch.randn(6, 3), nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)
    body.requires_grad_(False)

    @contextmanager
    def rows() -> Iterator[LossRows]:
        features = body(states)
        log_probs = actor(features).log_softmax(-1)
        chosen, values = log_probs[:, 0], critic(features).squeeze(-1)
        yield LossRows(
            log_ratio=chosen - chosen.detach(),
            log_probs=chosen,
            values=values,
            entropy=-(log_probs.exp() * log_probs).sum(-1),
            advantages=torch.arange(6.0) - 2,
            old_values=values.detach(),
            returns=torch.ones(6),
            clip=0.2,
        )

    parameters = [parameter for part in (body, actor, critic) for parameter in part.parameters()]
    gradients = LossGradients(rows, parameters)

    total, count = gradients.total({"policy": 1.0, "value": 0.5})

    frozen = sum(parameter.numel() for parameter in body.parameters())
    assert count == 6 and not bool(total[:frozen].any()) and bool((total[frozen:] != 0).all())
    assert gradients.detached() == [False] * len(parameters)
