"""Metrics of language models, on numbers worked by hand."""

import math

import pytest
import torch
from worked_cases import Case, check, parameters

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
TURNS = turns_of(torch.tensor([[1, 1, 0, 1, 0, 0], [1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0]]))
REWARDS = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
LENGTHS = torch.tensor([2, 4, 3, 3, 3, 3])
UNEQUAL = (torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 1, 2, 2]), torch.ones(4))

CASES: dict[str, list[Case]] = {
    "Tokens -1, -2 and -3 are learned from; -90 is padding": [
        Case(
            lambda: token_stats(torch.tensor([[-1.0, -2.0, -90.0], [-3.0, -90.0, -90.0]]), MASK, entropy=torch.full((2, 3), 0.5)),
            {"lm/tokens": 3, "lm/logprob/mean": -2, "lm/logprob/min": -3, "lm/entropy": 0.5},
            others=True,
        )
    ],
    "Without any token there are no values": [
        Case(lambda: token_stats(-torch.ones(2, 3), torch.zeros(2, 3), entropy=torch.zeros(2, 3)), {"lm/tokens": 0})
    ],
    "Surprise over entropy: deviations 0.5 and 0.5 have mean 0.5, which is 1 / sqrt(0.5) standard errors from 0": [
        Case(
            lambda: calibration(torch.tensor([[-1.5, -1.5]]), torch.ones(1, 2), torch.ones(1, 2)),
            {"lm/surprise/gap": 0.5, "lm/surprise/z": math.sqrt(2)},
            others=True,
        )
    ],
    "Ratios to the engine are 1, 1, 1 and 2, with the same factors of disagreement; k3 of the last is 1 - ln 2, and a NaN is left out": [
        Case(
            lambda: sampling_mismatch(
                torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5]])),
                torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.2, math.nan]])),
                torch.ones(1, 5),
            ),
            {
                "lm/mismatch/mult_error": 1.25,
                "lm/mismatch/ratio_mean": 1.25,
                "lm/mismatch/ratio_min": 1.0,
                "lm/mismatch/outside_frac": 0.25,
                "lm/mismatch/kl": (1 - math.log(2)) / 4,
            },
            others=True,
        )
    ],
    "Two turns: engine and trainer agree about the first, and disagree by the factors 2 and 4 in the second; one turn has no later one": [
        Case(
            lambda: sampling_mismatch(
                torch.log(torch.tensor([[0.1, 0.9, 0.4, 0.4]])),
                torch.log(torch.tensor([[0.1, 0.1, 0.2, 0.1]])),
                torch.tensor([[1, 0, 1, 1]]),
            ),
            {"lm/mismatch/mult_error": 7 / 3, "lm/mismatch/later_turns_error": 3.0},
            others=True,
        ),
        Case(
            lambda: sampling_mismatch(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2)),
            {"lm/mismatch/mult_error": 1.0, "lm/mismatch/later_turns_error": None},
            others=True,
        ),
    ],
    "Half as likely as under the reference: 2 - ln 2 - 1; equally likely: 0": [
        Case(
            lambda: reference_kl(torch.log(torch.tensor([[0.25, 0.5]])), torch.log(torch.tensor([[0.5, 0.5]])), torch.ones(1, 2)),
            {"lm/kl_reference": (1 - math.log(2)) / 2, "lm/kl_reference_max": 1 - math.log(2)},
            others=True,
        )
    ],
    "Sums of log-ratios of whole completions are 0.3 and -0.1; the first has two tokens, so 0.15 per token": [
        Case(
            lambda: sequence_ratio(torch.tensor([[0.1, 0.2, 9.0], [-0.1, 9.0, 9.0]]), MASK),
            {"lm/sequence/logratio_std": 0.2, "lm/sequence/logratio_absmax": 0.3, "lm/sequence/mean_logratio_absmax": 0.15},
            others=True,
        )
    ],
    "Lengths and cut completions, and turns, which are passages of own tokens": [
        Case(
            lambda: completion_stats(torch.tensor([2, 4]), torch.tensor([False, True])),
            {"lm/length/mean": 3, "lm/length/max": 4, "lm/truncated_frac": 0.5, "lm/completions": 2, "lm/turns/mean": None},
            others=True,
        ),
        Case(lambda: completion_stats(torch.tensor([4, 6, 0]), turns=TURNS), {"lm/turns/mean": 5 / 3, "lm/turns/max": 3}, others=True),
    ],
    "One of three groups has different rewards, the others only the best or only the worst; the shorter completion is better": [
        Case(
            lambda: group_stats(
                REWARDS, torch.tensor([0, 0, 1, 1, 2, 2]), LENGTHS, advantages=torch.tensor([0.7, -0.7, 0, 0, 0, 0]), size=2
            ),
            {
                "lm/reward/mean": 0.5,
                "lm/groups/zero_advantage": 2 / 3,
                "lm/groups/all_best": 1 / 3,
                "lm/groups/all_worst": 1 / 3,
                "lm/groups/sign_agreement": 1,
                "lm/groups/mixed": 0,
                "lm/reward/length_correlation": -1,
            },
            others=True,
        )
    ],
    "Advantages of the wrong sign, and groups of several prompts": [
        Case(
            lambda: group_stats(REWARDS, torch.tensor([0, 0, 1, 2, 1, 2]), LENGTHS, advantages=0.5 - REWARDS, size=2),
            {"lm/groups/sign_agreement": 0, "lm/groups/mixed": 2 / 3},
            others=True,
        )
    ],
    "Two of three prompts have one completion; trainers that do not compare completions have no such groups": [
        Case(lambda: group_stats(*UNEQUAL, advantages=UNEQUAL[0]), {"lm/groups/single": 2 / 3}, others=True),
        Case(lambda: group_stats(*UNEQUAL), {"lm/groups/single": None}, others=True),
    ],
    "Each reward function by itself": [
        Case(
            lambda: reward_components(
                {"Format OK": torch.tensor([1.0, math.nan, 3.0]), "length": torch.tensor([1.0, 2.0, 3.0])}, torch.tensor([10, 20, 30])
            ),
            {"lm/reward/format_ok/mean": 2, "lm/reward/length/length_correlation": 1},
            others=True,
        )
    ],
}


@pytest.mark.parametrize("case", parameters(CASES))
def test_values_of(case: Case) -> None:
    check(case)


def test_turns_of_a_completion_are_counted() -> None:
    assert TURNS.tolist() == [2, 3, 0]


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
