"""Calibration of actions against their distributions: samples match, and each known mistake is named."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from explained import names
from torch import Tensor

from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.drawn_actions import check_actions

STEPS, ENVS = 256, 8
BOUNDS = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])


def scores_over_time(seed: int, size: int, *, memory: float = 0.6) -> Tensor:
    """Scores [T, B, size] that change from step to step like a policy's."""
    torch.manual_seed(seed)
    scores = torch.randn(STEPS, ENVS, size)
    for t in range(1, STEPS):
        scores[t] = memory * scores[t - 1] + (1 - memory**2) ** 0.5 * scores[t]
    return scores


def sticky(actions: Tensor, share: float = 0.4) -> Tensor:
    """Repeat the previous step's action in some steps."""
    result = actions.clone()
    for t in range(1, STEPS):
        keeps = (torch.rand(ENVS) < share).view(-1, *[1] * (actions.dim() - 2))
        result[t] = torch.where(keeps, result[t - 1], actions[t])
    return result


def shuffle(actions: Tensor) -> Tensor:
    return torch.stack([row[torch.randperm(ENVS)] for row in actions])


def with_one_noise(probabilities: Tensor) -> Tensor:
    """Choices by inverting the distribution function, with one uniform number for all environments."""
    return (probabilities.cumsum(-1) < torch.rand(STEPS, 1, 1)).sum(-1).clamp(max=probabilities.shape[-1] - 1)


CHOICES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "": lambda p, a: a,
    "deterministic": lambda p, a: p.argmax(-1),
    "independent": lambda p, a: torch.randint(0, p.shape[-1], a.shape),
    "permuted": lambda p, a: a.roll(1, 1),
    "step_before": lambda p, a: a.roll(1, 0),
    "step_after": lambda p, a: a.roll(-1, 0),
    "repeated": lambda p, a: sticky(a),
    "same_noise": lambda p, a: with_one_noise(p),
    "shuffled": lambda p, a: shuffle(a),
    "mixed": lambda p, a: torch.where(torch.rand(a.shape) < 0.4, torch.randint(0, p.shape[-1], a.shape), a),
}


@pytest.mark.parametrize("mistake", CHOICES)
def test_a_mistake_with_choices_is_named(seed: int, mistake: str) -> None:
    logits = 1.8 * scores_over_time(seed, 4)
    drawn = torch.distributions.Categorical(logits=logits).sample()

    check = check_actions(CHOICES[mistake](logits.softmax(-1), drawn), logits=logits)

    assert check.matches == (not mistake)
    assert names(check) == ({mistake} - {""})


Numbers = Callable[[Tensor, Tensor, Tensor], Tensor]

NUMBERS: Mapping[str, Numbers] = {
    "": lambda mean, std, a: a,
    "deterministic": lambda mean, std, a: mean,
    "independent": lambda mean, std, a: 2 * torch.rand_like(a) - 1,
    "constant_noise": lambda mean, std, a: mean + std * torch.randn(a.shape[-1]),
    "permuted": lambda mean, std, a: a.flip(1),
    "step_before": lambda mean, std, a: a.roll(1, 0),
    "step_after": lambda mean, std, a: a.roll(-1, 0),
    "repeated": lambda mean, std, a: sticky(a),
    "cut_at_bounds": lambda mean, std, a: a.clamp(-1, 1),
    "same_noise": lambda mean, std, a: mean + std * torch.randn(STEPS, 1, a.shape[-1]),
    "shuffled": lambda mean, std, a: shuffle(a),
}


@pytest.mark.parametrize("mistake", NUMBERS)
def test_a_mistake_with_real_numbers_is_named(seed: int, mistake: str) -> None:
    means, std = scores_over_time(seed, 2), torch.tensor([0.5, 0.8])
    drawn = means + std * torch.randn(STEPS, ENVS, 2)

    check = check_actions(NUMBERS[mistake](means, std, drawn), means=means, log_std=std.log(), bounds=BOUNDS)

    assert check.matches == (not mistake)
    assert names(check) == ({mistake} - {""})


@pytest.mark.parametrize("mistake", ["independent", "cut_at_bounds"])
def test_short_rollouts_show_actions_that_never_leave_the_bounds(seed: int, mistake: str) -> None:
    """384 actions: a fifth of N(m, 0.74²) exceeds ±1. The bounds are unknown to the check."""
    means = 0.2 * scores_over_time(seed, 1)[:96, :4]
    drawn = means + 0.74 * torch.randn(means.shape)
    actions = {"independent": 2 * torch.rand_like(drawn) - 1, "cut_at_bounds": drawn.clamp(-1, 1)}[mistake]

    check = check_actions(actions, means=means, log_std=torch.tensor([0.74]).log())

    assert names(check) == {mistake}
    assert check_actions(drawn, means=means, log_std=torch.tensor([0.74]).log()).matches


@pytest.mark.parametrize("size", [0.6, 3.0])
def test_a_tanh_of_the_actions_is_a_variant_and_no_shuffle(seed: int, size: float) -> None:
    means = size * scores_over_time(seed, 2)
    drawn = means + 0.8 * torch.randn(STEPS, ENVS, 2)
    settings: Any = {"means": means, "log_std": torch.tensor([0.8, 0.8]).log()}

    assert names(check_actions(drawn.tanh(), **settings)) == {"squashed"}
    assert names(check_actions(2 * drawn.tanh(), bounds=2 * BOUNDS, **settings)) == {"squashed"}
    assert check_actions(drawn.tanh(), **settings).holds


def test_coarse_numbers_are_no_cut() -> None:
    torch.manual_seed(4)
    for _ in range(10):
        means = torch.randn(STEPS, ENVS, 2)
        drawn = (means + 0.5 * torch.randn_like(means)).bfloat16().float()
        assert check_actions(drawn, means=means, log_std=torch.tensor([0.5, 0.5]).log()).matches


@pytest.mark.parametrize("held", ["one action always", "the first action of each environment"])
def test_actions_that_never_change_are_told_by_the_environments(seed: int, held: str) -> None:
    logits = 1.8 * scores_over_time(seed, 4)
    first = torch.arange(ENVS) % 4
    actions = torch.zeros_like(first) if held == "one action always" else first

    check = check_actions(actions.expand(STEPS, ENVS), logits=logits)

    assert names(check) == {"independent" if held == "one action always" else "repeated"}


def test_coloured_noise_is_a_variant(seed: int) -> None:
    means, noise = scores_over_time(seed, 2), scores_over_time(seed + 100, 2, memory=0.7)

    check = check_actions(means + 0.5 * noise, means=means, log_std=torch.full((2,), 0.5).log())

    assert check.holds
    assert names(check) == {"coloured_noise"}


def test_a_wrong_spread_is_a_difference_without_an_explanation(seed: int) -> None:
    means = scores_over_time(seed, 2)

    check = check_actions(means + torch.randn(STEPS, ENVS, 2), means=means, log_std=torch.full((2,), 0.5).log())

    assert not check.holds
    assert names(check) == set()


@pytest.mark.parametrize("sharpness", [0.0, 0.1, 3.0, 30.0, 1000.0])
@pytest.mark.parametrize("shape", [(4, 1), (16, 2), (256, 8)])
def test_draws_match_however_sharp_the_policy_and_small_the_rollout(sharpness: float, shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    for _ in range(10):
        logits = sharpness * torch.randn(*shape, 3)
        drawn = torch.distributions.Categorical(logits=logits).sample()
        assert check_actions(drawn, logits=logits).matches


@pytest.mark.parametrize("std", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("shape", [(4, 1, 1), (16, 2, 3), (256, 8, 2)])
def test_draws_of_gaussians_match(std: float, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(2)
    for _ in range(10):
        means = torch.randn(shape)
        drawn = means + std * torch.randn(shape)
        assert check_actions(drawn, means=means, log_std=torch.full(shape[-1:], std).log()).matches


def test_a_sharp_policy_that_takes_its_likeliest_action_is_no_mistake() -> None:
    logits = 40 * torch.nn.functional.one_hot(torch.randint(0, 3, (STEPS, ENVS)), 3).float()

    assert check_actions(logits.argmax(-1), logits=logits).matches


def test_masked_irrelevant_and_invalid_rows_do_not_count() -> None:
    torch.manual_seed(3)
    logits = 2 * torch.randn(STEPS, ENVS, 4)
    mask = torch.rand(STEPS, ENVS, 4) < 0.6
    mask[..., 0] = True
    drawn = torch.distributions.Categorical(logits=logits.masked_fill(~mask, -1e8)).sample()
    relevant = torch.rand(STEPS, ENVS) < 0.5
    stored = torch.where(relevant, drawn, 0)

    def check(**settings: Tensor) -> EquationCheck:
        heads: dict[str, Any] = {name: {"move": value} for name, value in settings.items()}
        return check_actions({"move": stored}, logits={"move": logits}, **heads)

    assert check(action_masks=mask, relevant=relevant).matches
    assert not check(action_masks=mask).matches
    assert not check(relevant=relevant).matches


def test_wrong_arguments_say_what_is_missing() -> None:
    actions = torch.zeros(STEPS, ENVS)

    with pytest.raises(ValueError, match="got neither"):
        check_actions(actions)
    with pytest.raises(ValueError, match=r"must have shape \[T, B\]"):
        check_actions(actions[0], logits=torch.zeros(ENVS, 3))
    with pytest.raises(ValueError, match="no log_std"):
        check_actions(actions.unsqueeze(-1), means=torch.zeros(STEPS, ENVS, 1))
    with pytest.raises(ValueError, match="shapes must agree"):
        check_actions(actions, logits=torch.zeros(STEPS, ENVS + 1, 3))
