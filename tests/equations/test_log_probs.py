"""Log-probabilities at collection: exactly the known mistake is named."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from explained import names
from torch import Tensor
from torch.distributions import Categorical, Normal

from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.log_probs import check_log_probs

STEPS, ENVS, DIMENSIONS, CHOICES = 48, 4, 3, 5
BOUNDS = torch.tensor([[-1.0] * DIMENSIONS, [1.0] * DIMENSIONS])


class Gaussians:
    """Samples of a Gaussian policy with a constant standard deviation."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.means = torch.randn(STEPS, ENVS, DIMENSIONS, generator=generator)
        self.log_std = 0.5 * torch.randn(DIMENSIONS, generator=generator)
        noise = torch.randn(STEPS, ENVS, DIMENSIONS, generator=generator)
        self.actions = self.means + self.log_std.exp() * noise
        self.log_probs = self.of(self.actions).sum(-1)

    def of(self, actions: Tensor) -> Tensor:
        densities: Tensor = Normal(self.means, self.log_std.exp()).log_prob(actions)
        return densities

    @property
    def slope(self) -> Tensor:
        return torch.log(1 - self.actions.double().tanh().square() + 1e-12).sum(-1).float()

    def check(self, actions: Tensor, log_probs: Tensor, **settings: Any) -> EquationCheck:
        return check_log_probs(actions, log_probs, means=self.means, log_std=self.log_std, bounds=BOUNDS, **settings)


def test_log_probs_of_the_stored_actions_match(seed: int) -> None:
    policy = Gaussians(seed)
    logits = torch.randn(STEPS, ENVS, CHOICES)
    chosen = Categorical(logits=logits).sample()

    assert policy.check(policy.actions, policy.log_probs).matches
    assert policy.check(policy.actions, policy.log_probs - policy.slope, squashed=True).matches
    assert check_log_probs(chosen, Categorical(logits=logits).log_prob(chosen), logits=logits).matches


MISTAKES: Mapping[str, Callable[[Gaussians], tuple[Tensor, Tensor]]] = {
    "clipped_actions": lambda policy: (policy.actions.clamp(-1, 1), policy.log_probs),
    "mean_over_dimensions": lambda policy: (policy.actions, policy.log_probs / DIMENSIONS),
    "log_det_missing": lambda policy: (policy.actions, policy.log_probs),
    "squashed_before_storing": lambda policy: (policy.actions.tanh(), policy.log_probs),
    "likeliest_action": lambda policy: (policy.actions, policy.of(policy.means).sum(-1)),
    "probabilities": lambda policy: (policy.actions, policy.log_probs.exp()),
    "step_before": lambda policy: (policy.actions, policy.log_probs.roll(1, 0)),
    "step_after": lambda policy: (policy.actions, policy.log_probs.roll(-1, 0)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_real_numbers_is_named(seed: int, mistake: str) -> None:
    policy = Gaussians(seed)

    check = policy.check(*MISTAKES[mistake](policy), squashed=mistake == "log_det_missing")

    assert not check.holds
    assert names(check) == {mistake}


def test_actions_that_are_stored_with_a_cut_are_named_where_nobody_says_the_bounds(seed: int) -> None:
    policy = Gaussians(seed)

    check = check_log_probs(policy.actions.clamp(-1, 1), policy.log_probs, means=policy.means, log_std=policy.log_std)

    assert names(check) == {"clipped_actions"}


@pytest.mark.parametrize("places", [(4, 3, 2, 1, 0), (1, 2, 3, 4, 0), (0, 1, 3, 2, 4)])
def test_choices_in_another_order_are_named(seed: int, places: tuple[int, ...]) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(STEPS, ENVS, CHOICES)
    drawn = Categorical(logits=logits).sample()

    check = check_log_probs(torch.tensor(places)[drawn], Categorical(logits=logits).log_prob(drawn), logits=logits)

    assert names(check) == {"permuted_choices"}


def test_choices_under_the_next_distribution_are_named(seed: int) -> None:
    """`next_distribution`: the logits of a sequence of tokens are one position late."""
    torch.manual_seed(seed)
    logits = torch.randn(STEPS, ENVS, CHOICES)
    drawn = Categorical(logits=logits).sample()

    check = check_log_probs(drawn, Categorical(logits=logits.roll(-1, 0)).log_prob(drawn), logits=logits)

    assert names(check) == {"next_distribution"}


def test_a_tanh_that_nobody_declares_is_a_variant(seed: int) -> None:
    policy = Gaussians(seed)
    narrow = policy.actions.clamp(-1.5, 1.5)  # keeps the digits of the tanh in float32

    before = policy.check(policy.actions, policy.log_probs - policy.slope)
    after = policy.check(narrow.tanh(), policy.of(narrow).sum(-1) - torch.log(1 - narrow.tanh().square()).sum(-1))

    assert before.holds
    assert names(before) == {"squashed_gaussian"}
    assert after.holds
    assert names(after) == {"squashed_actions"}


@pytest.mark.parametrize("stretched", [False, True])
def test_a_tanh_that_is_scaled_to_the_bounds_is_a_variant(stretched: bool) -> None:
    policy = Gaussians(0)
    narrow = policy.actions.clamp(-1.5, 1.5)
    density = policy.of(narrow).sum(-1) - torch.log(1 - narrow.tanh().square()).sum(-1)
    scaled = torch.tensor([[-1.0], [3.0]]).expand(2, DIMENSIONS)

    after = check_log_probs(
        1 + 2 * narrow.tanh(),
        density - stretched * DIMENSIONS * math.log(2),
        means=policy.means,
        log_std=policy.log_std,
        bounds=scaled,
    )

    assert after.holds
    assert names(after) == {"squashed_actions"}


@pytest.mark.parametrize("std", [1e-3, 10.0])
def test_rounding_of_narrow_and_wide_gaussians_is_no_difference(std: float) -> None:
    means = 5 * torch.randn(STEPS, ENVS, 2)
    actions = means + std * torch.randn(STEPS, ENVS, 2)
    stored = Normal(means, std).log_prob(actions).sum(-1)

    check = check_log_probs(actions, stored, means=means, log_std=torch.full((2,), std).log())

    assert check.matches


def masked_heads(seed: int) -> dict[str, Any]:
    """Two heads of choices: `move` is masked, and `aim` is relevant in about half the rows."""
    generator = torch.Generator().manual_seed(seed)
    logits = {head: torch.randn(STEPS, ENVS, CHOICES, generator=generator) for head in ("move", "aim")}
    mask = torch.rand(STEPS, ENVS, CHOICES, generator=generator) < 0.6
    mask[..., 0] = True
    relevant = torch.rand(STEPS, ENVS, generator=generator) < 0.5
    masked = {"move": logits["move"].masked_fill(~mask, -1e8), "aim": logits["aim"]}
    actions = {
        head: torch.multinomial(part.softmax(-1).flatten(0, 1), 1, generator=generator).view(STEPS, ENVS) for head, part in masked.items()
    }
    return {"logits": logits, "masked": masked, "actions": actions, "mask": mask, "relevant": relevant}


def chosen(logits: Tensor, actions: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("mistake", ["", "mask_missing", "heads_left_out", "irrelevant_heads"])
def test_a_mistake_with_several_heads_is_named(seed: int, mistake: str) -> None:
    heads = masked_heads(seed)
    parts: Mapping[str, Tensor] = {head: chosen(heads["masked"][head], a) for head, a in heads["actions"].items()}
    raw = chosen(heads["logits"]["move"], heads["actions"]["move"])
    aim = torch.where(heads["relevant"], parts["aim"], 0.0)
    numbers = {
        "": parts["move"] + aim,
        "mask_missing": raw + aim,
        "heads_left_out": parts["move"],
        "irrelevant_heads": parts["move"] + parts["aim"],
    }[mistake]

    check = check_log_probs(
        heads["actions"], numbers, logits=heads["logits"], action_masks={"move": heads["mask"]}, relevant={"aim": heads["relevant"]}
    )

    assert check.matches == (not mistake)
    assert names(check) == ({mistake} - {""})


def test_rows_that_do_not_count_are_left_out() -> None:
    policy = Gaussians(0)
    valid = torch.ones(STEPS, ENVS, dtype=torch.bool)
    valid[5] = False
    broken = policy.log_probs.clone()
    broken[5] = 7.0

    assert policy.check(policy.actions, broken, valid=valid).matches
    assert not policy.check(policy.actions, broken).matches


def test_wrong_arguments_say_what_is_missing() -> None:
    policy = Gaussians(0)

    with pytest.raises(ValueError, match="got neither"):
        check_log_probs(policy.actions, policy.log_probs)
    with pytest.raises(ValueError, match="no log_std"):
        check_log_probs(policy.actions, policy.log_probs, means=policy.means)
    with pytest.raises(ValueError, match="shapes must agree"):
        check_log_probs(policy.actions[:-1], policy.log_probs, means=policy.means, log_std=policy.log_std)
    with pytest.raises(ValueError, match="head 'aim' has a distribution but no actions"):
        check_log_probs({"move": policy.actions}, policy.log_probs, logits={"aim": policy.means})


def test_choices_of_other_rows_are_named(seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(STEPS, ENVS, CHOICES)
    drawn = Categorical(logits=logits).sample()
    others = drawn.flatten()[torch.randperm(drawn.numel())].view_as(drawn)

    (explanation,) = check_log_probs(drawn, Categorical(logits=logits).log_prob(others), logits=logits).explanations

    assert explanation.hypothesis.name == "other_choices"
    assert explanation.fitted == pytest.approx(float((others != drawn).double().mean()))
