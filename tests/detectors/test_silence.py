"""What looks wrong and is not: each rule beside the healthy run that it must not misjudge."""

from __future__ import annotations

import pytest
from healthy_run import FACTS, Values, alarms, both, judged, multiplied, raised, run, set_to

from esper_telemetry.record import AlarmLevel

SINCE = 30


def test_a_learning_rate_that_is_annealed_to_nothing_is_no_stall() -> None:
    """KL falls with the square of the rate, to 1e-8 in the last updates."""

    def anneal(found: Values, ago: int) -> None:
        share = max(0.0, 1 - ago / 69)
        found["opt/lr"] *= share
        found["opt/update_to_weight"] *= share
        found["opt/update_to_weight/encoder_weight"] *= share
        found["policy/kl"] *= share**2
        found["policy/kl_max"] *= share**2

    assert alarms(judged(run(100, anneal))) == []


def test_a_solved_task_with_little_entropy_is_no_collapse() -> None:
    """The policy is sure in every state, and does different things in different states."""
    solved = set_to({"policy/entropy_norm": 0.04, "policy/entropy_marginal_norm": 0.97})

    assert alarms(judged(run(100, solved))) == []


def test_a_constant_reward_per_step_is_no_fault() -> None:
    """As in tasks that are about surviving: 1 per step from the first step on."""
    lives = set_to({"reward/std": 0.0, "reward/mean": 1.0, "reward/absmax": 1.0})

    assert alarms(judged(run(100, lives, since=1))) == []


def test_a_rare_reward_may_stay_away_for_as_long_as_it_did_before() -> None:
    def rare(found: Values, ago: int) -> None:
        if ago % 8:
            found.update({"reward/std": 0.0, "reward/mean": 0.0, "reward/absmax": 0.0})

    assert "reward/constant" not in raised(judged(run(100, rare, since=1)))


def test_a_first_success_is_no_change_of_scale() -> None:
    """Where a cost of 0.1 per step was all there was, a reward of 100 turns the mean's sign."""

    def success(found: Values, ago: int) -> None:
        paid = ago >= 50
        found.update({"reward/absmax": 100.0 if paid else 0.1, "reward/mean": 0.3 if paid else -0.03})

    assert "value/scale_shift" not in raised(judged(run(100, success, since=1)))


def test_an_explained_variance_that_falls_because_returns_became_equal_is_no_fault() -> None:
    equal = both(
        set_to({"value/r2": -2.0, "value/explained_variance": -1.0}), multiplied({"ret/std": 0.1, "loss/value": 0.05})
    )

    assert "value/fit_collapse" not in raised(judged(run(100, equal)))


@pytest.mark.parametrize(("precision", "told"), [("fp32", True), ("bf16", False)])
def test_the_precision_decides_what_is_rounding(precision: str, told: bool) -> None:
    mismatch = set_to({"integrity/ratio_init": 5e-3})

    assert ("integrity/ratio_init" in raised(judged(run(40, mismatch), {**FACTS, "precision": precision}))) is told


def test_a_mismatch_between_the_bounds_warns_and_raises_no_level() -> None:
    verdicts = judged(run(40, set_to({"integrity/ratio_init": 1e-4})))

    (alarm,) = alarms(verdicts)
    assert alarm.level is AlarmLevel.WARN
    assert {verdict.remaining for verdict in verdicts} == {0}


def test_narrow_gaussians_round_more() -> None:
    narrow = set_to({"integrity/ratio_init": 5e-4, "policy/head/op/std/min": 0.01})

    assert alarms(judged(run(40, narrow))) == []


def test_an_episode_that_ends_with_the_rollout_is_reset_in_the_next() -> None:
    """Every second rollout all episodes end at its last step, and the next one begins with zeros."""

    def together(found: Values, ago: int) -> None:
        found.update({"episode/count": 16.0 * (ago % 2), "lstm/reset_rate": 0.5 - 0.5 * (ago % 2)})

    assert alarms(judged(run(60, together, since=1))) == []


def test_resets_that_are_missing_for_two_rollouts_are_a_fault() -> None:
    few = set_to({"episode/count": 2.0, "lstm/reset_rate": 0.0})

    assert raised(judged(run(60, few)))["lstm/reset_missing"] == SINCE + 1


def test_a_forget_gate_that_shuts_shows_in_the_cell_state_before_gates_are_looked_at() -> None:
    """A cell that keeps nothing holds what one step writes, at most 1."""
    shut = both(
        multiplied({"lstm/c/rms": 0.2}),
        set_to({"lstm/c/absmax": 0.98, "lstm/c_growth": -0.4, "lstm/gate/f/sat_lo": None}),
    )

    assert raised(judged(run(40, shut)))["lstm/forget_closed"] == SINCE


def test_a_learning_rate_that_was_raised_shows_before_weights_are_looked_at() -> None:
    sampled = set_to({"opt/update_to_weight": None, "opt/lr": 0.25})

    assert raised(judged(run(40, sampled)))["opt/update_too_large"] == SINCE


@pytest.mark.parametrize(("rate", "told"), [(0.025, True), (0.0025, False)])
def test_a_learning_rate_that_jumps_above_what_was_set_is_no_schedule(rate: float, told: bool) -> None:
    """Small networks bear a raised rate for a while; restarts of a schedule come back to the rate that was set."""
    jump = set_to({"opt/update_to_weight": None, "opt/lr": rate})
    found = judged(run(40, jump), {**FACTS, "learning_rate": 0.0025})

    assert ("opt/update_too_large" in raised(found)) == told


def test_a_critic_that_was_never_right_learns_slowly_and_is_not_biased() -> None:
    wrong = set_to({"value/bias_over_std": 3.0, "value/bias": 30.0, "ret/mean": 10.0, "ret/std": 10.0})

    assert "value/bias" not in raised(judged(run(90, wrong)[SINCE:]))
    assert "value/bias" in raised(judged(run(60, wrong)))
