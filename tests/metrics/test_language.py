"""Metrics of language models, on numbers worked by hand."""

import math

import pytest
import torch

from esper_telemetry.metrics.language import (
    calibration,
    completion_stats,
    group_stats,
    reference_kl,
    reward_components,
    sampling_mismatch,
    sequence_ratio,
    token_stats,
    turns_of,
)

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)


def test_tokens_outside_the_mask_do_not_count() -> None:
    """Tokens -1, -2 and -3 are learned from; -90 is padding."""
    log_probs = torch.tensor([[-1.0, -2.0, -90.0], [-3.0, -90.0, -90.0]])

    values = token_stats(log_probs, MASK, entropy=torch.full((2, 3), 0.5)).values()

    assert values["lm/tokens"] == 3
    assert values["lm/logprob/mean"] == -2
    assert values["lm/logprob/min"] == -3
    assert values["lm/entropy"] == 0.5


def test_log_probabilities_in_bfloat16_are_recognised() -> None:
    log_probs = -torch.rand(4, 100, generator=torch.Generator().manual_seed(0)) - 0.1
    mask = torch.ones(4, 100)

    exact, rounded = (token_stats(x, mask).values()["lm/logprob/bf16_frac"] for x in (log_probs, log_probs.bfloat16().float()))

    assert (exact < 0.05, rounded) == (True, 1.0)


@pytest.mark.parametrize(
    ("mask", "wrong"),
    [
        ([1, 1, 1, 0], 0.0),  # up to and including the end token
        ([0, 0, 0, 0], 0.0),  # left out on purpose
        ([0, 1, 1, 1], 1.0),  # shifted to the right
        ([1, 1, 0, 0], 1.0),  # without the end token
        ([1, 1, 1, 1], 1.0),  # with padding
        ([1, 0, 1, 0], 1.0),  # with a hole
    ],
)
def test_masks_end_with_the_first_end_token(mask: list[int], wrong: float) -> None:
    """The third token of the completion is the end token."""
    ends = torch.tensor([[False, False, True, False]])

    values = token_stats(torch.full((1, 4), -1.0), torch.tensor([mask]), ends=ends).values()

    assert values["lm/mask_errors"] == wrong


def test_surprise_over_entropy_of_another_temperature() -> None:
    """Deviations 0.5 and 0.5 have mean 0.5, which is 1 / sqrt(0.5) standard errors from 0."""
    values = calibration(torch.tensor([[-1.5, -1.5]]), torch.ones(1, 2), torch.ones(1, 2)).values()

    assert values["lm/surprise/gap"] == 0.5
    assert values["lm/surprise/z"] == pytest.approx(math.sqrt(2))


def test_engine_that_disagrees_about_one_token_of_four() -> None:
    """Ratios are 1, 1, 1 and 2, with the same factors of disagreement. k3 of the last is 1 - ln 2. A NaN is left out."""
    trainer = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5]]))
    engine = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.2, math.nan]]))

    values = sampling_mismatch(trainer, engine, torch.ones(1, 5)).values()

    assert values["lm/mismatch/mult_error"] == pytest.approx(1.25)
    assert values["lm/mismatch/ratio_mean"] == pytest.approx(1.25)
    assert values["lm/mismatch/ratio_min"] == pytest.approx(1.0)
    assert values["lm/mismatch/outside_frac"] == pytest.approx(0.25)
    assert values["lm/mismatch/kl"] == pytest.approx((1 - math.log(2)) / 4)


def test_distance_from_the_reference() -> None:
    """Half as likely as under the reference: 2 - ln 2 - 1. Equally likely: 0."""
    values = reference_kl(torch.log(torch.tensor([[0.25, 0.5]])), torch.log(torch.tensor([[0.5, 0.5]])), torch.ones(1, 2))

    assert values.values()["lm/kl_reference"] == pytest.approx((1 - math.log(2)) / 2)
    assert values.values()["lm/kl_reference_max"] == pytest.approx(1 - math.log(2))


def test_ratios_of_whole_completions() -> None:
    """Sums of log-ratios 0.3 and -0.1. The first has two tokens, so 0.15 per token."""
    values = sequence_ratio(torch.tensor([[0.1, 0.2, 9.0], [-0.1, 9.0, 9.0]]), MASK).values()

    assert values["lm/sequence/logratio_std"] == pytest.approx(0.2)
    assert values["lm/sequence/logratio_absmax"] == pytest.approx(0.3)
    assert values["lm/sequence/mean_logratio_absmax"] == pytest.approx(0.15)


def test_lengths_and_cut_completions() -> None:
    values = completion_stats(torch.tensor([2, 4]), torch.tensor([False, True])).values()

    assert values["lm/length/mean"] == 3
    assert values["lm/length/max"] == 4
    assert values["lm/truncated_frac"] == 0.5
    assert values["lm/completions"] == 2
    assert "lm/turns/mean" not in values


def test_turns_are_passages_of_own_tokens() -> None:
    own = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0]])

    values = completion_stats(torch.tensor([4, 6, 0]), turns=turns_of(own)).values()

    assert turns_of(own).tolist() == [2, 3, 0]
    assert values["lm/turns/mean"] == pytest.approx(5 / 3)
    assert values["lm/turns/max"] == 3


REWARDS = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
PROMPTS = torch.tensor([0, 0, 1, 1, 2, 2])
LENGTHS = torch.tensor([2, 4, 3, 3, 3, 3])


def test_groups_of_equal_rewards_teach_nothing() -> None:
    """One of three groups has different rewards; the others have only the best or only the worst. The shorter completion is better."""
    advantages = torch.tensor([0.7, -0.7, 0.0, 0.0, 0.0, 0.0])

    values = group_stats(REWARDS, PROMPTS, LENGTHS, advantages=advantages, size=2).values()

    assert values["lm/reward/mean"] == 0.5
    assert values["lm/groups/zero_advantage"] == pytest.approx(2 / 3)
    assert values["lm/groups/all_best"] == values["lm/groups/all_worst"] == pytest.approx(1 / 3)
    assert values["lm/groups/sign_agreement"] == 1
    assert values["lm/groups/mixed"] == 0
    assert values["lm/reward/length_correlation"] == pytest.approx(-1)


def test_advantages_of_the_wrong_sign_and_groups_of_several_prompts() -> None:
    values = group_stats(REWARDS, torch.tensor([0, 0, 1, 2, 1, 2]), LENGTHS, advantages=0.5 - REWARDS, size=2).values()

    assert values["lm/groups/sign_agreement"] == 0
    assert values["lm/groups/mixed"] == pytest.approx(2 / 3)


def test_groups_of_one_completion() -> None:
    """Two of three prompts have one completion. Trainers that do not compare completions have no such groups."""
    rewards, prompts, lengths = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 1, 2, 2]), torch.ones(4)

    assert group_stats(rewards, prompts, lengths, advantages=rewards).values()["lm/groups/single"] == pytest.approx(2 / 3)
    assert "lm/groups/single" not in group_stats(rewards, prompts, lengths).values()


def test_each_reward_function_by_itself() -> None:
    rewards = {"Format OK": torch.tensor([1.0, math.nan, 3.0]), "length": torch.tensor([1.0, 2.0, 3.0])}

    values = reward_components(rewards, torch.tensor([10, 20, 30])).values()

    assert values["lm/reward/format_ok/mean"] == 2
    assert values["lm/reward/length/length_correlation"] == pytest.approx(1)


def test_without_any_token_there_are_no_values() -> None:
    nothing = torch.zeros(2, 3)

    values = token_stats(-torch.ones(2, 3), nothing, entropy=nothing).values()

    assert values == {"lm/tokens": 0}
