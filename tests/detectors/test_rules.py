"""Every rule is raised by what it is about, in time, and by nothing else; a healthy run raises none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from healthy_run import FACTS, Spoil, Values, alarms, judged, multiplied, raised, run, set_to

from esper_telemetry.alarms import ALARMS
from esper_telemetry.detectors import Thresholds
from esper_telemetry.detectors.rules import RULES
from esper_telemetry.record import AlarmEvent, AlarmLevel

SINCE = 30


class Case(NamedTuple):
    """One way to go wrong, and for how many updates it may pass unnoticed."""

    spoil: Spoil
    lag: int = 0
    facts: Mapping[str, Any] = FACTS
    thresholds: Thresholds = Thresholds()
    updates: int = 70


def growing(key: str, factor: float) -> Spoil:
    """A value grows by a factor per update."""

    def spoil(found: Values, ago: int) -> None:
        found[key] *= factor ** (ago + 1)

    return spoil


def both(first: Spoil, second: Spoil) -> Spoil:
    """One after the other."""

    def spoil(found: Values, ago: int) -> None:
        first(found, ago)
        second(found, ago)

    return spoil


def swinging(found: Values, ago: int) -> None:
    """The test for periods, every tenth update, finds the same period."""
    if ago % 10 == 0:
        found.update({"policy/kl/period/p": 1e-9, "policy/kl/period/length": 6.0})


def without(found: Values, _: int) -> None:
    """The whole actor has no gradient any more."""
    for key in ("grad/actor/norm_preclip", "grad/layer/heads_op_weight/norm", "grad/head/op/norm"):
        found.pop(key)


def errors(found: Values, ago: int) -> None:
    """A backend fails once per update."""
    found["telemetry/errors"] = ago + 1.0


CASES: dict[str, Case] = {
    "numerics/nonfinite": Case(set_to({"numerics/nonfinite": 3.0})),
    "integrity/ratio_init": Case(set_to({"integrity/ratio_init": 0.4})),
    "integrity/gae_identity": Case(set_to({"integrity/gae_identity": 0.01})),
    "integrity/adv_norm": Case(set_to({"integrity/adv_norm": 50.0, "adv/norm/std": 100.0})),
    "integrity/mask_violation": Case(set_to({"integrity/mask_violation": 1.0})),
    "integrity/buffer_age": Case(set_to({"buffer/age_updates": 1.0})),
    "value/scale_shift": Case(multiplied({"reward/absmax": 100, "reward/mean": 100, "reward/std": 100})),
    "reward/constant": Case(set_to({"reward/std": 0.0, "reward/mean": 0.0, "reward/absmax": 0.0}), 9),
    "norm/drift": Case(set_to({"norm/obs/drift": 2.0}), 20),
    "adv/degenerate": Case(set_to({"adv/participation": 0.01, "adv/raw/absmax_over_std": 60.0}), 4),
    "opt/stalled_weights": Case(set_to({"opt/lr": 0.0})),
    "opt/state_lost": Case(set_to({"opt/state_reset": 1.0})),
    "opt/update_too_large": Case(set_to({"opt/update_to_weight": 0.4})),
    "opt/rms_spike": Case(set_to({"opt/stable_rms": 8.0})),
    "grad/missing_group": Case(without),
    "grad/vanish": Case(set_to({"grad/layer/encoder_weight/norm": 0.0})),
    "grad/actor_starved": Case(
        set_to({"grad/interference/log_ratio": 2.5, "grad/interference/critic_share": 0.9999}), 1
    ),
    "grad/explode": Case(multiplied({"grad/global/norm_preclip_max": 1000})),
    "grad/interference": Case(set_to({"grad/interference/cos": -0.9}), 10),
    "grad/clip_saturated": Case(set_to({"grad/clip/coef": 1e-4}), 1),
    "grad/oscillation": Case(swinging, 30),
    "grad/noise_dominated": Case(
        set_to({"opt/snr_share": -0.01}),
        40,
        thresholds=Thresholds().with_changes({"grad/noise_dominated": "on"}),
        updates=90,
    ),
    "grad/drift": Case(multiplied({"grad/global/norm_preclip": 300}), 4),
    "grad/concentration": Case(set_to({"grad/concentration/entropy": 0.1}), 2),
    "repr/dormant": Case(set_to({"repr/dormant_frac": 0.9})),
    "repr/rank_collapse": Case(set_to({"repr/effective_rank": 2.0}), 1),
    "repr/norm_growth": Case(growing("repr/feature_norm", 1.5), 12),
    "lstm/forget_closed": Case(set_to({"lstm/gate/f/sat_lo": 0.95, "lstm/timescale/median": 1.0})),
    "lstm/forget_open": Case(set_to({"lstm/gate/f/sat_hi": 0.99})),
    "lstm/cell_drift": Case(multiplied({"lstm/c/rms": 10})),
    "lstm/stale_state": Case(set_to({"lstm/staleness_first": 1.0})),
    "lstm/reset_missing": Case(set_to({"lstm/reset_rate": 0.0})),
    "policy/kl_spike": Case(set_to({"policy/kl": 0.5})),
    "policy/ratio_explosion": Case(set_to({"policy/ess_frac_min": 0.05, "policy/ratio/max": 40.0})),
    "policy/ratio_collapse": Case(set_to({"policy/ratio/p01": 0.01}), 2),
    "policy/clip_saturation": Case(set_to({"policy/clip_frac": 0.6}), 1),
    "policy/kl_stall": Case(set_to({"policy/kl_max": 0.0}), 2),
    "policy/entropy_collapse": Case(set_to({"policy/entropy_norm": 0.03, "policy/entropy_marginal_norm": 0.05}), 2),
    "policy/entropy_crash": Case(
        set_to({"policy/entropy_rate": -0.4, "policy/entropy_norm": 0.2}), 1, facts={**FACTS, "total_steps": 1000 * 512}
    ),
    "policy/entropy_explosion": Case(set_to({"policy/entropy_norm": 0.999, "policy/kl": 1e-6}), 9),
    "policy/action_shift": Case(set_to({"policy/action_shift_js": 0.4})),
    "policy/wrong_direction": Case(set_to({"policy/surrogate_gain": -0.03})),
    "policy/dead_head": Case(set_to({"grad/head/op/norm": 0.0}), 2),
    "value/fit_collapse": Case(
        both(set_to({"value/r2": -1.0, "value/explained_variance": -0.9}), multiplied({"loss/value": 5})), 1
    ),
    "value/loss_jump": Case(multiplied({"loss/value": 1000})),
    "value/bias": Case(set_to({"value/bias": 6.0, "value/bias_over_std": 3.0}), 9),
    "task/no_episodes": Case(set_to({"episode/count": 0.0}), 25),
    "task/return_drop": Case(set_to({"episode/return_mean_100": -4.0}), 9),
    "telemetry/missing_metric": Case(set_to({"policy/kl": None}), 4),
    "telemetry/overhead": Case(set_to({"perf/telemetry_frac": 0.9}), 10),
    "telemetry/delivery": Case(errors, 4),
}


def case_records(kind: str) -> list[Any]:
    """Records of a case; what is to be lost must have been learned before."""
    case = CASES[kind]
    made = run(case.updates, case.spoil, since=SINCE)
    if kind == "task/return_drop":
        key = "episode/return_mean_100"
        for update in range(SINCE - 1):
            made[update] = replace(made[update], values={**made[update].values, key: 0.1 * update})
    return made


@pytest.mark.parametrize("kind", CASES)
def test_what_goes_wrong_is_told_in_time(kind: str) -> None:
    case = CASES[kind]

    found = raised(judged(case_records(kind), case.facts, case.thresholds))

    assert kind in found
    assert SINCE <= found[kind] <= SINCE + case.lag


@pytest.mark.parametrize("kind", CASES)
def test_it_is_told_with_numbers_evidence_and_what_to_try(kind: str) -> None:
    case = CASES[kind]
    (first, *_) = [
        alarm for alarm in alarms(judged(case_records(kind), case.facts, case.thresholds)) if alarm.type == kind
    ]

    assert first.event is AlarmEvent.RAISE
    assert first.text.startswith(f"Since update {first.since}, ") and "Try: " in first.text
    assert first.incident >= 1 and first.cause
    assert 0 < len(first.evidence["values"]) <= 24 or kind == "telemetry/missing_metric"
    assert first.level is AlarmLevel.of(first.severity)


def test_every_rule_has_a_case_and_every_type_a_rule() -> None:
    """Storms are no rule: they are what becomes of many alarms."""
    types = {rule.type for rule in RULES}

    assert types == set(CASES)
    assert {alarm.type for alarm in ALARMS} - types == {"telemetry/storm"}


def test_a_healthy_run_raises_nothing_and_leaves_no_question_open() -> None:
    verdicts = judged(run(200))

    assert alarms(verdicts) == []
    assert {name for verdict in verdicts for name, _ in verdict.events} <= {"task/plateau"}
    assert {verdict.values["alarm/active"] for verdict in verdicts} == {0.0}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.type)
def test_every_rule_says_who_says_so(rule: Any) -> None:
    assert rule.source and (rule.inputs or rule.type == "telemetry/missing_metric")


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
    shut = both(multiplied({"lstm/c/rms": 0.2}), set_to({"lstm/c/absmax": 0.98, "lstm/gate/f/sat_lo": None}))

    assert raised(judged(run(40, shut)))["lstm/forget_closed"] == SINCE


def test_a_learning_rate_that_was_raised_shows_before_weights_are_looked_at() -> None:
    sampled = set_to({"opt/update_to_weight": None, "opt/lr": 0.25})

    assert raised(judged(run(40, sampled)))["opt/update_too_large"] == SINCE


def test_returns_of_another_scale_tell_what_rewards_do_not() -> None:
    """A factor behind the place where rewards are measured."""
    behind = multiplied({"ret/mean": 1e4, "ret/std": 1e4})

    assert raised(judged(run(40, behind))) == {"value/scale_shift": SINCE}


def test_a_spread_of_returns_alone_is_no_change_of_scale() -> None:
    """A policy that fails again after long has returns that differ, with nearly the same mean."""
    assert "value/scale_shift" not in raised(judged(run(40, multiplied({"ret/std": 1e3}))))


def test_rewards_that_shrink_because_the_worst_are_avoided_are_no_change_of_scale() -> None:
    assert "value/scale_shift" not in raised(judged(run(40, multiplied({"reward/absmax": 0.2, "reward/mean": 0.1}))))


def test_a_normaliser_that_cuts_is_told_at_once() -> None:
    assert raised(judged(run(40, set_to({"norm/obs/clip_frac": 0.15})))) == {"norm/drift": SINCE}


def test_a_learning_rate_that_swings_is_an_oscillation() -> None:
    """Between a tenth and ten times its value, every six updates: at the third swing."""

    def swing(found: Values, ago: int) -> None:
        found["opt/lr"] *= (10, 10, 1, 0.1, 0.1, 1)[ago % 6]

    assert SINCE + 6 <= raised(judged(run(60, swing)))["grad/oscillation"] <= SINCE + 10


def test_a_learning_rate_that_restarts_is_a_schedule() -> None:
    """A cosine of twenty updates, again and again."""

    def restart(found: Values, ago: int) -> None:
        found["opt/lr"] *= 0.05 + 0.95 * (1 - ago % 20 / 20)

    assert alarms(judged(run(150, restart, since=1))) == []


def test_a_learning_rate_that_creeps_up_is_a_drift() -> None:
    """By 3 % per update, from the rate that was set: 1.16 times as much after five."""

    def creep(found: Values, ago: int) -> None:
        found["opt/lr"] *= 1.03 ** (ago + 1)

    verdicts = judged(run(60, creep), {**FACTS, "learning_rate": 2.5e-3})

    assert raised(verdicts) == {"grad/drift": SINCE + 8}
    assert raised(judged(run(60, creep), {**FACTS, "learning_rate": 2.5e-3, "desired_kl": 0.01})) == {}


def test_a_critic_that_learned_fast_is_judged_by_its_last_losses_when_rewards_grow() -> None:
    """Its losses span three decades, so that 40 is not unusual; but 0.1 is what they are lately, and rewards are four times as large."""

    def fast(found: Values, ago: int) -> None:
        found["loss/value"] = max(0.1, 100 * 0.7**ago)
        if ago >= 29:
            found.update({"loss/value": 40.0, "reward/absmax": 5.2})

    assert raised(judged(run(40, fast, since=1))) == {"value/loss_jump": 30}


def test_a_policy_that_a_dominant_critic_carries_along_goes_in_no_direction_of_its_own() -> None:
    carried = set_to({"policy/surrogate_gain": -0.02, "grad/interference/critic_share": 0.9999})

    assert "policy/wrong_direction" not in raised(judged(run(40, carried)))


def test_a_schedule_may_begin_at_nothing() -> None:
    """The first update of a linear warm-up; a rate that stays 0 is a mistake."""

    def warm(found: Values, ago: int) -> None:
        found["opt/lr"] *= min(1.0, ago / 10)

    assert alarms(judged(run(40, warm, since=1))) == []
    assert raised(judged(run(40, set_to({"opt/lr": 0.0}), since=1))) == {"opt/stalled_weights": 6}


def test_what_is_not_finite_is_named_where_it_came_from() -> None:
    spoiled = set_to({"numerics/nonfinite": 9.0, "grad/global/norm_preclip_nonfinite": 4.0, "reward/nonfinite": 1.0})

    (alarm,) = alarms(judged(run(30, spoiled)))

    assert alarm.text.startswith(
        "Since update 30, 9 numbers are NaN or infinite, among them in reward/nonfinite, grad/global"
    )


def test_unlikely_actions_round_more() -> None:
    """At a log-probability of -20, rounding of 4e-5 is to be expected."""
    unlikely = set_to({"integrity/ratio_init": 3e-5, "policy/logp/min": -20.0})

    assert alarms(judged(run(40, unlikely))) == []


def test_advantages_that_are_a_little_off_for_long_are_told() -> None:
    """As where rows are left out of the update: 0.03 for five updates, where rounding leaves 0.0005."""
    off = set_to({"integrity/adv_norm": 0.03})

    assert raised(judged(run(40, off), {**FACTS, "normalize_minibatches": False})) == {"integrity/adv_norm": SINCE + 1}
    assert raised(judged(run(40, off), {**FACTS, "normalize_minibatches": True})) == {}


def test_a_forget_gate_that_stays_open_shows_in_the_cell_state_before_gates_are_looked_at() -> None:
    """Twice as large within an update, and growing with age; the same growth reached slowly is learning."""
    opened = both(multiplied({"lstm/c/rms": 2}), set_to({"lstm/c_growth": 1.6, "lstm/gate/f/sat_hi": None}))

    def slowly(found: Values, ago: int) -> None:
        found["lstm/c/rms"] *= min(2.0, 1.05**ago)
        found["lstm/c_growth"] = 1.6
        found.pop("lstm/gate/f/sat_hi")

    assert raised(judged(run(40, opened)))["lstm/forget_open"] == SINCE
    assert "lstm/forget_open" not in raised(judged(run(60, slowly)))
