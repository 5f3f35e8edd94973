"""Entropy losses and total losses as programs compute them, correctly and with mistakes."""

import math
from collections.abc import Callable

import pytest
import torch
from explained import names
from torch import Tensor
from torch.distributions import Categorical, Normal

from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.entropy_loss import check_entropy, check_total_loss

MINIBATCHES, ROWS, ACTIONS, DIMENSIONS = 6, 32, 5, 3


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits(seed: int, actions: int = ACTIONS) -> Tensor:
    return torch.randn(MINIBATCHES, ROWS, actions, generator=generator(seed)) * 1.5


CATEGORICAL: dict[str, Callable[[Categorical, Tensor], Tensor]] = {
    "sign": lambda pi, a: pi.entropy().mean(-1),
    "sample": lambda pi, a: pi.log_prob(a).mean(-1),
    "sample_sign": lambda pi, a: -pi.log_prob(a).mean(-1),
    "sum": lambda pi, a: -pi.entropy().sum(-1),
    "sum_of_rows": lambda pi, a: (pi.probs * pi.logits).sum(-2).mean(-1),
    "mean_of_entries": lambda pi, a: (pi.probs * pi.logits).mean((-1, -2)),
    "bits": lambda pi, a: -pi.entropy().mean(-1) / math.log(2),
    "normalized": lambda pi, a: -pi.entropy().mean(-1) / math.log(ACTIONS),
    "probabilities": lambda pi, a: pi.probs.square().sum(-1).mean(-1),
    "weighted": lambda pi, a: -0.013 * pi.entropy().mean(-1),
    "accumulated": lambda pi, a: -pi.entropy().mean(-1) / 3,
    "scaled": lambda pi, a: -0.6 * pi.entropy().mean(-1),
}


@pytest.mark.parametrize("name", CATEGORICAL)
def test_a_mistake_in_the_entropy_of_choices_is_named_and_no_other(name: str, seed: int) -> None:
    pi = Categorical(logits=logits(seed))
    actions = torch.randint(ACTIONS, (MINIBATCHES, ROWS), generator=generator(seed))

    result = check_entropy(CATEGORICAL[name](pi, actions), logits={"": logits(seed)}, chosen_log_probs=pi.log_prob(actions), weight=0.013)

    assert names(result) == {name}
    assert check_entropy(-pi.entropy().mean(-1), logits={"": logits(seed)}).matches


GAUSSIAN: dict[str, Callable[[Normal, Tensor], Tensor]] = {
    "sign": lambda pi, a: pi.entropy().sum(-1).mean(-1),
    "sample": lambda pi, a: pi.log_prob(a).sum(-1).mean(-1),
    "sum": lambda pi, a: -pi.entropy().sum((-1, -2)),
    "sum_of_rows": lambda pi, a: -pi.entropy().sum(-2).mean(-1),
    "mean_of_entries": lambda pi, a: -pi.entropy().mean((-1, -2)),
    "std": lambda pi, a: -pi.stddev.sum(-1).mean(-1),
    "mean_std": lambda pi, a: -pi.stddev.mean((-1, -2)),
    "log_std": lambda pi, a: -pi.stddev.log().sum(-1).mean(-1),
    "variance": lambda pi, a: -Normal(pi.mean, pi.variance).entropy().sum(-1).mean(-1),
}


@pytest.mark.parametrize("name", GAUSSIAN)
def test_a_mistake_in_the_entropy_of_gaussians_is_named_and_no_other(name: str, seed: int) -> None:
    shape = (MINIBATCHES, ROWS, DIMENSIONS)
    log_std = torch.randn(shape, generator=generator(seed)) * 0.5
    pi = Normal(torch.randn(shape, generator=generator(seed + 100)), log_std.exp())
    actions = torch.randn(shape, generator=generator(seed + 200))
    given = {"log_std": {"": log_std}, "chosen_log_probs": pi.log_prob(actions).sum(-1)}

    assert names(check_entropy(GAUSSIAN[name](pi, actions), **given)) == {name}
    assert check_entropy(-pi.entropy().sum(-1).mean(-1), log_std={"": log_std}).matches


def test_several_heads_masks_and_relevance(seed: int) -> None:
    first, second = logits(seed), logits(seed + 50, 3)
    mask = torch.rand(MINIBATCHES, ROWS, ACTIONS, generator=generator(seed)) > 0.4
    mask[..., 0] = True
    relevant = torch.rand(MINIBATCHES, ROWS, generator=generator(seed + 1)) > 0.5
    masked = Categorical(logits=first.masked_fill(~mask, -1e8)).entropy()
    other = Categorical(logits=second).entropy()
    given = {"logits": {"a": first, "b": second}, "masks": {"a": mask}, "relevance": {"b": relevant}}

    def check(rows: Tensor) -> EquationCheck:
        return check_entropy(-rows, **given)  # type: ignore[arg-type]

    gated = torch.where(relevant, other, 0.0).mean(-1)
    assert check(masked.mean(-1) + gated).matches
    assert names(check(Categorical(logits=first).entropy().mean(-1) + gated)) == {"unmasked"}
    assert names(check(masked.mean(-1) + other.mean(-1))) == {"irrelevant_heads"}
    assert names(check(masked.mean(-1) + (other * relevant).sum(-1) / relevant.sum(-1))) == {"relevant_rows"}
    assert names(check((masked.mean(-1) + gated) / 2)) == {"mean_of_heads"}


def test_logits_that_are_masked_already_need_no_mask() -> None:
    masked = logits(0).masked_fill(torch.rand(MINIBATCHES, ROWS, ACTIONS, generator=generator(1)) > 0.6, -1e8)
    masked[..., 0] = 0.3

    assert check_entropy(-Categorical(logits=masked).entropy().mean(-1), logits={"": masked}).matches


def test_a_squashed_policy_may_take_its_sample(seed: int) -> None:
    """A squashed Gaussian's entropy lacks a closed form. A plain Gaussian's has one, so using its sample is a mistake."""
    actions = torch.randn(MINIBATCHES, ROWS, 1, generator=generator(seed))
    plain = Normal(0.0, 1.0).log_prob(actions).squeeze(-1)
    squashed = plain - (1 - actions.squeeze(-1).tanh() ** 2).log()
    given = {"log_std": {"": torch.zeros_like(actions)}, "chosen_log_probs": plain, "log_probs": squashed}

    assert check_entropy(squashed.mean(-1), **given).holds
    assert names(check_entropy(squashed.mean(-1), **given)) == {"squashed_sample"}
    assert not check_entropy(plain.mean(-1), **given).holds


def test_an_entropy_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one head"):
        check_entropy(torch.zeros(()))


VALUE_COEF, ENTROPY_COEF = 0.6, 0.02

TOTALS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "entropy_sign": lambda pg, v, h: pg + VALUE_COEF * v + ENTROPY_COEF * h,
    "value_sign": lambda pg, v, h: pg - VALUE_COEF * v - ENTROPY_COEF * h,
    "policy_sign": lambda pg, v, h: -pg + VALUE_COEF * v - ENTROPY_COEF * h,
    "sign": lambda pg, v, h: -(pg + VALUE_COEF * v - ENTROPY_COEF * h),
    "entropy_missing": lambda pg, v, h: pg + VALUE_COEF * v,
    "value_missing": lambda pg, v, h: pg - ENTROPY_COEF * h,
    "policy_missing": lambda pg, v, h: VALUE_COEF * v - ENTROPY_COEF * h,
    "value_doubled": lambda pg, v, h: pg + VALUE_COEF * (2 * v) - ENTROPY_COEF * h,
    "value_halved": lambda pg, v, h: pg + 0.5 * VALUE_COEF * v - ENTROPY_COEF * h,
    "value_unweighted": lambda pg, v, h: pg + v - ENTROPY_COEF * h,
    "entropy_unweighted": lambda pg, v, h: pg + VALUE_COEF * v - h,
    "weights_swapped": lambda pg, v, h: pg + ENTROPY_COEF * v - VALUE_COEF * h,
    "entropy_alone_weighted": lambda pg, v, h: pg + ENTROPY_COEF * (v - h),
    "accumulated": lambda pg, v, h: (pg + VALUE_COEF * v - ENTROPY_COEF * h) / 4,
    "entropy_weight": lambda pg, v, h: pg + VALUE_COEF * v - 0.011 * h,
    "value_weight": lambda pg, v, h: pg + 0.41 * v - ENTROPY_COEF * h,
    "scaled": lambda pg, v, h: 0.7 * (pg + VALUE_COEF * v - ENTROPY_COEF * h),
}


def losses(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.rand(3, MINIBATCHES, generator=generator(seed))
    return 0.1 * noise[0] - 0.05, 2 * noise[1] + 0.2, 0.5 + noise[2]


@pytest.mark.parametrize("name", TOTALS)
def test_a_mistake_in_the_total_is_named_and_no_other(name: str, seed: int) -> None:
    policy, value, entropy = losses(seed)

    def check(total: Tensor) -> EquationCheck:
        return check_total_loss(total, policy, value, -entropy, value_coef=VALUE_COEF, entropy_coef=ENTROPY_COEF)

    assert names(check(TOTALS[name](policy, value, entropy))) == {name}
    assert check(policy + VALUE_COEF * value - ENTROPY_COEF * entropy).matches


def test_a_total_with_further_terms_is_not_checked() -> None:
    policy, value, entropy = losses(0)
    total = policy + VALUE_COEF * value + torch.rand(MINIBATCHES, generator=generator(9))

    result = check_total_loss(total, policy, value, -entropy, value_coef=VALUE_COEF, entropy_coef=ENTROPY_COEF)

    assert result.error is None
    assert result.text == "the total losses could not be checked: it has further terms, or other weights than the settings"


def test_a_weight_of_the_entropy_needs_the_entropy() -> None:
    with pytest.raises(ValueError, match="needs the entropy loss"):
        check_total_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2), value_coef=0.5, entropy_coef=0.01)


@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 100.0, 1e4])
def test_a_right_entropy_matches_however_certain_the_choice(scale: float, seed: int) -> None:
    column = scale * logits(seed)

    assert check_entropy(-Categorical(logits=column).entropy().mean(-1), logits={"": column}).matches
    normalized = column.log_softmax(-1)
    assert check_entropy((normalized.exp() * normalized).sum(-1).mean(-1), logits={"": column}).matches


def test_rows_of_padding_do_not_count_in_the_entropy() -> None:
    pi, valid = Categorical(logits=logits(1)), torch.rand(MINIBATCHES, ROWS, generator=generator(2)) < 0.8
    mean = (pi.entropy() * valid).sum(-1) / valid.sum(-1)

    assert check_entropy(-mean, logits={"": logits(1)}, valid=valid).matches
    assert not check_entropy(-mean, logits={"": logits(1)}).matches
