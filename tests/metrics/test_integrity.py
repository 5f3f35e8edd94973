"""Identities, losses, episodes, actions and normalisers: small cases worked by hand."""

import math

import numpy as np
import pytest
import torch

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


def test_rows_that_come_again_in_a_pass() -> None:
    """In six rows, 3 occurs three times and 1 twice, so three of six repeat an earlier row. Padding does not count."""
    rows = torch.tensor([[3, 1, 3], [0, 3, 1]])
    valid = torch.tensor([[True, True, True], [True, False, False]])

    assert rows_repeated(rows).values() == {"integrity/rows_repeated": 0.5}
    assert rows_repeated(rows, valid=valid).values() == {"integrity/rows_repeated": 0.25}
    assert rows_repeated(torch.arange(4)).values() == {"integrity/rows_repeated": 0.0}


def test_advantages_plus_values_must_be_the_returns() -> None:
    """Off by 2, with returns of up to 4: 2 / 4."""
    ones = torch.ones(3)

    assert gae_identity(ones, ones, ones * 2).values() == {"integrity/gae_identity": 0.0}
    assert gae_identity(ones, ones, torch.tensor([4.0, 2.0, 2.0])).values() == {"integrity/gae_identity": 0.5}
    assert gae_identity(ones, ones, ones, valid=torch.zeros(3, dtype=torch.bool)).values() == {}


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


def test_forbidden_actions_count_where_their_head_is_relevant_and_the_row_is_valid() -> None:
    actions = {"move": torch.tensor([0, 1, 1, 1])}
    masks = {"move": torch.tensor([[True, False]] * 4)}
    relevant = {"move": torch.tensor([True, True, False, True])}
    valid = torch.tensor([True, True, True, False])

    assert mask_violation(actions, masks).values() == {"integrity/mask_violation": 3.0}
    violations = mask_violation(actions, masks, relevant=relevant, valid=valid)
    assert violations.values() == {"integrity/mask_violation": 1.0}
    assert mask_violation({}, {}).values() == {"integrity/mask_violation": 0.0}


def test_non_finite_numbers_are_counted_where_they_are_valid() -> None:
    x = torch.tensor([math.nan, math.inf, 1.0])

    assert nonfinite_count([x, torch.ones(2)]).values() == {"numerics/nonfinite": 2.0}
    valid = torch.tensor([True, False, True])
    assert nonfinite_count([x], valid=valid).values() == {"numerics/nonfinite": 1.0}
    assert nonfinite_count([]).values() == {"numerics/nonfinite": 0.0}


def test_data_of_an_older_policy_have_an_age() -> None:
    assert buffer_age(7, 5).values() == {"buffer/age_updates": 2.0}


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


def test_losses_are_weighted_by_their_rows() -> None:
    """(1 · 1 + 3 · 3) / 4."""
    term = torch.tensor([1.0, 3.0])

    values = loss_terms(term, term, -term, term, count=[1.0, 3.0]).values()

    assert values == {"loss/policy": 2.5, "loss/value": 2.5, "loss/entropy": -2.5, "loss/total": 2.5}


def test_a_loss_that_is_not_finite_is_left_out_and_counted() -> None:
    broken = torch.tensor([1.0, math.nan])
    fine = torch.tensor([1.0, 2.0])

    values = loss_terms(broken, fine, fine, broken).values()

    assert (values["loss/policy"], values["loss/value"], values["loss/policy_nonfinite"]) == (1.0, 1.5, 2.0)


def test_losses_from_their_parts_keep_minibatches_apart() -> None:
    """At ratio 1: policy -mean A, value half the squared error, entropy minus the mean."""
    zero, one = torch.zeros(2, 3), torch.ones(2, 3)

    values = ppo_losses(zero, one, one * 2, zero, one, clip=0.2, value_coef=0.5, entropy_coef=0.1, dim=-1).values()

    assert values == pytest.approx({"loss/policy": -1.0, "loss/value": 2.0, "loss/entropy": -1.0, "loss/total": -0.1})


def test_episodes_of_an_update_and_of_the_last_hundred() -> None:
    values = episode_stats([1.0, 3.0], [10, 20], recent_returns=[1.0, 3.0, 5.0]).values()

    assert values == {
        "episode/return_mean": 2.0,
        "episode/return_std": 1.0,
        "episode/return_min": 1.0,
        "episode/return_max": 3.0,
        "episode/length_mean": 15.0,
        "episode/count": 2.0,
        "episode/return_mean_100": 3.0,
    }


def test_without_a_finished_episode_there_is_only_their_count() -> None:
    assert episode_stats([], []).values() == {"episode/count": 0.0}
    with pytest.raises(ValueError, match="1 returns and 0 lengths"):
        episode_stats([1.0], [])


def test_the_unlikeliest_action_is_one_of_the_valid_ones() -> None:
    log_probs = torch.tensor([-9.0, -3.0, -1.0])

    assert log_prob_stats(log_probs).values() == {"policy/logp/min": -9.0}
    assert log_prob_stats(log_probs, valid=torch.tensor([False, True, True])).values() == {"policy/logp/min": -3.0}


def test_favourites_agree_when_those_of_all_relevant_heads_do() -> None:
    old = {"a": torch.eye(2), "b": torch.eye(2)}
    new = {"a": torch.eye(2), "b": torch.eye(2).flip(0)}

    assert greedy_agreement(old, new).values() == {"policy/greedy_agreement": 0.0}
    relevant = {"b": torch.tensor([True, False])}
    assert greedy_agreement(old, new, relevant=relevant).values() == {"policy/greedy_agreement": 0.5}


def test_a_shift_of_actions_is_zero_for_the_same_mix_and_one_for_disjoint_ones() -> None:
    counts = action_counts(torch.tensor([[0, 1], [1, 2]]), 3, valid=torch.tensor([[True, True], [True, False]]))

    assert counts.tolist() == [1.0, 2.0, 0.0]
    key = "policy/head/a/action_shift_js"
    assert action_shift("a", counts, 2 * counts).values() == {key: pytest.approx(0.0, abs=1e-15)}
    assert action_shift("a", counts, torch.tensor([0.0, 0.0, 5.0])).values() == {key: pytest.approx(1.0)}
    assert action_shift("a", counts, torch.zeros(3)).values() == {}


def test_continuous_actions_shift_in_units_of_sigma() -> None:
    """Means 1 and 2 were 0 and 2, σ 2 and 1: (0.5 + 0) / 2."""
    actions = torch.tensor([[0.0, 2.0], [2.0, 2.0]])

    shift = gaussian_action_shift("a", actions, torch.tensor([0.0, 2.0]), torch.tensor([2.0, 1.0]))

    assert shift.values() == {"policy/head/a/action_shift": 0.25}


def test_processes_that_knew_a_mean_each_shift_from_the_mean_of_both() -> None:
    """Before: 3 actions of 1 and 1 of 5, mean 2. Now: one action of 4 and three of 0, mean 1, σ 1 and three times 3: 1 / 2.5."""
    parts = [
        gaussian_action_shift("a", torch.tensor([[4.0]]), torch.tensor([1.0]), torch.tensor([1.0]), previous_count=3),
        gaussian_action_shift("a", torch.zeros(3, 1), torch.tensor([5.0]), torch.full((3, 1), 3.0), previous_count=1),
    ]

    merged = StandardizedShift.merge(np.stack([[[float(slot) for slot in part.shift.slots()]] for part in parts]))

    assert StandardizedShift.statistics["shift"](merged[0]) == pytest.approx(0.4)


def test_what_the_normaliser_cuts_off_lies_beyond_its_limit() -> None:
    values = normalizer_clipping("obs", torch.tensor([[10.0, 10.1], [-11.0, math.nan]]), clip=10.0).values()

    assert values == {"norm/obs/clip_frac": pytest.approx(2 / 3)}


def test_entropy_that_falls_by_a_tenth_per_update_has_that_rate() -> None:
    rate = entropy_rate([math.exp(-0.1 * t) for t in range(30)]).values()

    assert rate == {"policy/entropy_rate": pytest.approx(-0.1)}
    assert entropy_rate([1.0]).values() == {}
    assert entropy_rate([1.0, -0.5]).values() == {}


def test_the_largest_shift_of_no_head_is_absent() -> None:
    assert largest_shift([]).values() == {}
    assert largest_shift([0.1, 0.3]).values() == {"policy/action_shift_js": 0.3}


def test_entries_at_the_limit_were_cut() -> None:
    """Two of the four entries of the valid row."""
    normalized = torch.tensor([[[10.0, -10.0, 9.9, 0.0]], [[10.0, 10.0, 10.0, 10.0]]])
    valid = torch.tensor([[True], [False]])

    assert [int(n) for n in cut_entries(normalized, 10.0, valid=valid)] == [2, 4]
    assert [int(n) for n in cut_entries(normalized, 10.0)] == [6, 8]
    assert [int(n) for n in cut_entries(normalized[..., 0], 10.0, valid=valid)] == [1, 1]


def test_evaluated_episodes_have_returns_and_lengths() -> None:
    values = evaluation_stats([1.0, 3.0], [10, 30]).values()

    assert values == {
        "eval/return_mean": 2.0,
        "eval/return_std": 1.0,
        "eval/return_min": 1.0,
        "eval/return_max": 3.0,
        "eval/length_mean": 20.0,
        "eval/count": 2.0,
    }


def test_every_evaluated_episode_has_a_length() -> None:
    with pytest.raises(ValueError, match="got 2 and 1"):
        evaluation_stats([1.0, 2.0], [3])
