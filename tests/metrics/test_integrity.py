"""Identities, losses, episodes, actions and normalisers: small cases worked by hand."""

import math

import numpy as np
import pytest
import torch
from worked_cases import Case, check, parameters

from esper_telemetry.alarms.rules.integrity_alarms import RATIO_INIT_BOUNDS, ratio_init_bounds
from esper_telemetry.core.metric import declared
from esper_telemetry.history.critic import entropy_rate, largest_shift
from esper_telemetry.metrics.actions import (
    StandardizedShift,
    action_counts,
    action_shift,
    gaussian_action_shift,
    greedy_agreement,
    log_prob_stats,
)
from esper_telemetry.metrics.episodes import episode_stats, evaluation_stats
from esper_telemetry.metrics.integrity import buffer_age, gae_identity, mask_violation, nonfinite_count, rows_repeated
from esper_telemetry.metrics.losses import loss_terms, ppo_losses
from esper_telemetry.metrics.ratio import RatioDiagnostics
from esper_telemetry.metrics.rollout_stats import cut_entries, normalizer_clipping

REPEATED = torch.tensor([[3, 1, 3], [0, 3, 1]])
FIRST_FOUR = torch.tensor([[True, True, True], [True, False, False]])
ONES, NONE = torch.ones(3), torch.zeros(3, dtype=torch.bool)
ACTIONS, MASKS = {"move": torch.tensor([0, 1, 1, 1])}, {"move": torch.tensor([[True, False]] * 4)}
BROKEN = torch.tensor([math.nan, math.inf, 1.0])
LOG_PROBS = torch.tensor([-9.0, -3.0, -1.0])
OLD, NEW = {"a": torch.eye(2), "b": torch.eye(2)}, {"a": torch.eye(2), "b": torch.eye(2).flip(0)}
COUNTS = torch.tensor([1.0, 2.0, 0.0])
SHIFT = "policy/head/a/action_shift_js"
EPISODES = {"return_mean": 2.0, "return_std": 1.0, "return_min": 1.0, "return_max": 3.0, "length_mean": 20.0, "count": 2.0}
LOSSES = torch.tensor([1.0, 3.0])
ZERO, ONE = torch.zeros(2, 3), torch.ones(2, 3)

CASES: dict[str, list[Case]] = {
    "In six rows, 3 occurs three times and 1 twice, so three of six repeat an earlier row; padding does not count": [
        Case(lambda: rows_repeated(REPEATED), {"integrity/rows_repeated": 0.5}),
        Case(lambda: rows_repeated(REPEATED, valid=FIRST_FOUR), {"integrity/rows_repeated": 0.25}),
        Case(lambda: rows_repeated(torch.arange(4)), {"integrity/rows_repeated": 0.0}),
    ],
    "Advantages plus values are off by 2, with returns of up to 4": [
        Case(lambda: gae_identity(ONES, ONES, ONES * 2), {"integrity/gae_identity": 0.0}),
        Case(lambda: gae_identity(ONES, ONES, torch.tensor([4.0, 2.0, 2.0])), {"integrity/gae_identity": 0.5}),
        Case(lambda: gae_identity(ONES, ONES, ONES, valid=NONE), {}),
    ],
    "Forbidden actions count where their head is relevant and the row is valid": [
        Case(lambda: mask_violation(ACTIONS, MASKS), {"integrity/mask_violation": 3.0}),
        Case(
            lambda: mask_violation(
                ACTIONS, MASKS, relevant={"move": torch.tensor([True, True, False, True])}, valid=torch.tensor([True, True, True, False])
            ),
            {"integrity/mask_violation": 1.0},
        ),
        Case(lambda: mask_violation({}, {}), {"integrity/mask_violation": 0.0}),
    ],
    "Numbers that are not finite are counted where they are valid": [
        Case(lambda: nonfinite_count([BROKEN, torch.ones(2)]), {"numerics/nonfinite": 2.0}),
        Case(lambda: nonfinite_count([BROKEN], valid=torch.tensor([True, False, True])), {"numerics/nonfinite": 1.0}),
        Case(lambda: nonfinite_count([]), {"numerics/nonfinite": 0.0}),
    ],
    "Data of an older policy have an age": [Case(lambda: buffer_age(7, 5), {"buffer/age_updates": 2.0})],
    "Losses are weighted by their rows, (1 · 1 + 3 · 3) / 4; one that is not finite is left out and counted": [
        Case(
            lambda: loss_terms(LOSSES, LOSSES, -LOSSES, LOSSES, count=[1.0, 3.0]),
            {"loss/policy": 2.5, "loss/value": 2.5, "loss/entropy": -2.5, "loss/total": 2.5},
        ),
        Case(
            lambda: loss_terms(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])),
            {"loss/policy": 1.0, "loss/value": 1.5, "loss/policy_nonfinite": 1.0},
        ),
    ],
    "Minibatches at ratio 1: the policy loss is -mean A, the value loss half the squared error, the entropy loss minus the mean": [
        Case(
            lambda: ppo_losses(ZERO, ONE, ONE * 2, ZERO, ONE, clip=0.2, value_coef=0.5, entropy_coef=0.1, dim=-1),
            {"loss/policy": -1.0, "loss/value": 2.0, "loss/entropy": -1.0, "loss/total": -0.1},
        )
    ],
    "Episodes of an update, of the last hundred, and of an evaluation": [
        Case(
            lambda: episode_stats([1.0, 3.0], [10, 30], recent_returns=[1.0, 3.0, 5.0]),
            {**{f"episode/{name}": value for name, value in EPISODES.items()}, "episode/return_mean_100": 3.0},
        ),
        Case(lambda: evaluation_stats([1.0, 3.0], [10, 30]), {f"eval/{name}": value for name, value in EPISODES.items()}),
        Case(lambda: episode_stats([], []), {"episode/count": 0.0}),
    ],
    "The unlikeliest action is one of the valid ones": [
        Case(lambda: log_prob_stats(LOG_PROBS, valid=torch.tensor([False, True, True])), {"policy/logp/min": -3.0})
    ],
    "Favourites agree when those of all relevant heads do": [
        Case(lambda: greedy_agreement(OLD, NEW), {"policy/greedy_agreement": 0.0}),
        Case(lambda: greedy_agreement(OLD, NEW, relevant={"b": torch.tensor([True, False])}), {"policy/greedy_agreement": 0.5}),
    ],
    "A shift of actions is zero for the same mix and one for disjoint ones": [
        Case(lambda: action_shift("a", COUNTS, 2 * COUNTS), {SHIFT: 0.0}),
        Case(lambda: action_shift("a", COUNTS, torch.tensor([0.0, 0.0, 5.0])), {SHIFT: 1.0}),
        Case(lambda: action_shift("a", COUNTS, torch.zeros(3)), {}),
    ],
    "Means 1 and 2 were 0 and 2, σ 2 and 1: (0.5 + 0) / 2": [
        Case(
            lambda: gaussian_action_shift("a", torch.tensor([[0.0, 2.0], [2.0, 2.0]]), torch.tensor([0.0, 2.0]), torch.tensor([2.0, 1.0])),
            {"policy/head/a/action_shift": 0.25},
        )
    ],
    "What the normaliser cuts off lies beyond its limit": [
        Case(lambda: normalizer_clipping("obs", torch.tensor([[10.0, 10.1], [-11.0, math.nan]]), clip=10.0), {"norm/obs/clip_frac": 2 / 3})
    ],
    "Entropy falls by a tenth per update": [
        Case(lambda: entropy_rate([math.exp(-0.1 * t) for t in range(30)]), {"policy/entropy_rate": -0.1}),
        Case(lambda: entropy_rate([1.0]), {}),
        Case(lambda: entropy_rate([1.0, -0.5]), {}),
    ],
    "The largest shift of no head is absent": [
        Case(lambda: largest_shift([]), {}),
        Case(lambda: largest_shift([0.1, 0.3]), {"policy/action_shift_js": 0.3}),
    ],
}


@pytest.mark.parametrize("case", parameters(CASES))
def test_values_of(case: Case) -> None:
    check(case)


def test_actions_are_counted_where_they_are_valid() -> None:
    actions, valid = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[True, True], [True, False]])

    assert action_counts(actions, 3, valid=valid).tolist() == COUNTS.tolist()


@pytest.mark.parametrize("correction", [0, 1])
def test_advantages_that_were_normalised_over_all_rows_after_the_returns_agree(correction: int) -> None:
    """A = (R - V - mean) / std. The same advantages in another order, or with another value in one row, do not agree."""
    values, advantages = torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(1)) * 3
    returns = advantages + values
    normalized = (advantages - advantages.mean()) / advantages.std(correction=correction)
    wrong = returns.clone()
    wrong[7, 1] += 1

    assert gae_identity(normalized, values, returns).values()["integrity/gae_identity"] < 1e-6
    assert gae_identity(normalized.flip(0), values, returns).values()["integrity/gae_identity"] > 0.1
    assert gae_identity(normalized, values, wrong).values()["integrity/gae_identity"] > 0.01
    assert gae_identity(advantages, values, normalized + values).values()["integrity/gae_identity"] > 0.1
    assert gae_identity(advantages, values, values).values()["integrity/gae_identity"] > 0.1


def test_bounds_of_the_first_minibatch_are_strict_and_widen_with_small_sigma() -> None:
    bounds = ratio_init_bounds("fp32")
    assert [bounds.severity(value) for value in (1e-5, 2e-5, 1e-3, 2e-3)] == [0.0, 0.5, 0.5, 1.0]
    assert ratio_init_bounds("fp32", smallest_std=0.1).severity(5e-5) == 0.0
    assert ratio_init_bounds("fp32", smallest_std=10.0) == RATIO_INIT_BOUNDS["fp32"]
    with pytest.raises(ValueError, match="precision must be one of fp32, tf32, bf16, fp16, got 'int8'"):
        ratio_init_bounds("int8")


def test_the_catalogue_quotes_the_bounds_that_the_grade_uses() -> None:
    metric = next(metric for _, metric in declared(RatioDiagnostics) if metric.key == "integrity/ratio_init")

    for precision, bounds in RATIO_INIT_BOUNDS.items():
        for text, bound in ((metric.warn, bounds.warn), (metric.critical, bounds.critical)):
            assert precision in text
            assert f"{bound:.0e}".replace("e-0", "e-") in text


def test_processes_that_knew_a_mean_each_shift_from_the_mean_of_both() -> None:
    """Before: 3 actions of 1 and 1 of 5, mean 2. Now: one action of 4 and three of 0, mean 1, σ 1 and three times 3: 1 / 2.5."""
    parts = [
        gaussian_action_shift("a", torch.tensor([[4.0]]), torch.tensor([1.0]), torch.tensor([1.0]), previous_count=3),
        gaussian_action_shift("a", torch.zeros(3, 1), torch.tensor([5.0]), torch.full((3, 1), 3.0), previous_count=1),
    ]

    merged = StandardizedShift.merge(np.stack([[[float(slot) for slot in part.shift.slots()]] for part in parts]))

    assert StandardizedShift.statistics["shift"](merged[0]) == pytest.approx(0.4)


def test_every_episode_has_a_length() -> None:
    with pytest.raises(ValueError, match="1 returns and 0 lengths"):
        episode_stats([1.0], [])
    with pytest.raises(ValueError, match="got 2 and 1"):
        evaluation_stats([1.0, 2.0], [3])


def test_entries_at_the_limit_were_cut() -> None:
    """Two of the four entries of the valid row."""
    normalized = torch.tensor([[[10.0, -10.0, 9.9, 0.0]], [[10.0, 10.0, 10.0, 10.0]]])
    valid = torch.tensor([[True], [False]])

    assert [int(n) for n in cut_entries(normalized, 10.0, valid=valid)] == [2, 4]
    assert [int(n) for n in cut_entries(normalized, 10.0)] == [6, 8]
    assert [int(n) for n in cut_entries(normalized[..., 0], 10.0, valid=valid)] == [1, 1]
