"""Correct programs and published settings that look wrong, and slow faults next to healthy courses that resemble them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from healthy_run import FACTS, Values, alarms, both, judged, multiplied, raised, run, set_to

from esper_telemetry.alarms.diagnosis import described_keys
from esper_telemetry.alarms.rule import patience_factor
from esper_telemetry.alarms.verdict.bounds import critical_values
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.record import AlarmLevel, Record

SINCE = 30


def returns(first: float, last: float, updates: int = 30) -> Any:
    """The return moves from one level to another within that many updates."""

    def spoil(metrics: Values, ago: int) -> None:
        metrics["episode/return_mean"] = first + (last - first) * min(1.0, ago / updates)

    return spoil


def small(records: list[Record], steps: int) -> list[Record]:
    """The same records with that many environment steps per update."""
    return [replace(entry, axes=replace(entry.axes, env_step=entry.seq * steps)) for entry in records]


TINY: Mapping[str, Any] = {**FACTS, "num_envs": 1, "num_steps": 8, "total_steps": None}


def test_a_gradient_that_falls_as_the_task_is_solved_is_no_drift() -> None:
    """It falls to a thirtieth at update 50, in a run whose return has risen to 400 by then and in one without a rise."""

    def falls(metrics: Values, update: int) -> None:
        metrics["grad/global/norm_preclip"] *= 1 / 30 if update >= 50 else 1.0

    assert "grad/drift" not in raised(judged(run(90, both(falls, returns(5.0, 400.0)), since=1)))
    assert "grad/drift" in raised(judged(run(90, falls, since=1)))


@pytest.mark.parametrize(("share", "milliseconds", "told"), [(0.45, 75.0, False), (0.28, 2000.0, True), (0.8, 5.0, False)])
def test_a_small_script_may_spend_its_time_on_telemetry(share: float, milliseconds: float, told: bool) -> None:
    cost = set_to({"perf/telemetry_frac": share, "perf/telemetry_ms": milliseconds})

    assert ("telemetry/overhead" in raised(judged(run(60, cost, since=1)))) is told


@pytest.mark.system
def test_a_share_of_eight_samples_is_judged_over_sixty_four_updates() -> None:
    """Half of 8 samples in every second update is a quarter on average; 0.6 in all updates stays 0.6."""

    def half(metrics: Values, ago: int) -> None:
        metrics.update({"policy/clip_frac": 0.5 * (ago % 2), "policy/kl": 0.04})

    tiny = small(run(200, half, since=1), 8)
    full = small(run(200, set_to({"policy/clip_frac": 0.6, "policy/kl": 0.04}), since=1), 8)

    assert "policy/clip_saturation" not in raised(judged(tiny, TINY))
    assert "policy/clip_saturation" in raised(judged(full, TINY))


def test_a_narrow_trust_region_may_be_left_by_a_small_step() -> None:
    """HalfCheetah's published clip of 0.1: half of the samples are outside of it at a KL of 0.009."""
    assert "policy/clip_saturation" not in raised(judged(run(60, set_to({"policy/clip_frac": 0.5, "policy/kl": 0.009}))))


def test_a_return_that_rises_with_a_share_outside_the_trust_region_excuses_that_share() -> None:
    """Walker2d's published 20 passes: 0.6 throughout, at a KL of 0.04. A fraction that doubles, or a constant return, is not excused."""
    always = set_to({"policy/clip_frac": 0.6, "policy/kl": 0.04})
    rises = returns(5.0, 400.0)

    def doubles(metrics: Values, ago: int) -> None:
        metrics.update({"policy/clip_frac": 0.3 if ago < 40 else 0.6, "policy/kl": 0.04})

    assert "policy/clip_saturation" not in raised(judged(run(60, both(always, rises), since=1)))
    assert raised(judged(run(60, both(doubles, rises), since=1)))["policy/clip_saturation"] > 40
    assert "policy/clip_saturation" in raised(judged(run(60, always, since=1)))


@pytest.mark.parametrize(("course", "level"), [(returns(5.0, 400.0), AlarmLevel.WARN), (returns(5.0, 5.0), AlarmLevel.CRITICAL)])
def test_a_share_outside_the_trust_region_is_critical_if_the_return_has_not_risen(course: Any, level: AlarmLevel) -> None:
    def doubles(metrics: Values, ago: int) -> None:
        metrics.update({"policy/clip_frac": 0.3 if ago < 40 else 0.6, "policy/kl": 0.04})

    told = alarms(judged(run(60, both(doubles, course), since=1)))

    assert {alarm.level for alarm in told if alarm.type == "policy/clip_saturation"} == {level}


def test_rules_wait_longer_where_updates_are_small() -> None:
    """Eight updates of 8 steps are 64 steps; an identity does not wait."""
    critic = both(set_to({"value/r2": -1.0, "value/explained_variance": -0.9}), multiplied({"loss/value": 5}))

    assert patience_factor(Facts.of(TINY)) == 8 and patience_factor(Facts.of(FACTS)) == patience_factor(Facts()) == 1
    assert raised(judged(run(70, critic)))["value/fit_collapse"] == SINCE + 1
    assert raised(judged(small(run(70, critic), 8), TINY)).get("value/fit_collapse", 99) >= SINCE + 15
    broken = small(run(40, set_to({"integrity/gae_identity": 0.1})), 8)
    assert raised(judged(broken, TINY))["integrity/gae_identity"] == SINCE


@pytest.mark.parametrize(("shift", "told"), [(0.22, False), (0.5, True)])
def test_rollouts_of_a_few_steps_hold_other_parts_of_episodes(shift: float, told: bool) -> None:
    """Acrobot, solved, in rollouts of 16 steps in four environments: 0.22 once in 312 updates."""

    def once(metrics: Values, ago: int) -> None:
        metrics["policy/action_shift_js"] = shift if ago == 40 else 0.01

    records = small(run(60, once, since=1), 64)

    assert ("policy/action_shift" in raised(judged(records, {**FACTS, "num_envs": 4, "num_steps": 16}))) is told


@pytest.mark.system
def test_a_normaliser_of_few_steps_has_not_settled_yet() -> None:
    """Two hundred updates of 8 steps are only 1,600 steps."""
    moving = set_to({"norm/obs/drift": 2.0})

    assert "norm/drift" not in raised(judged(small(run(200, moving, since=1), 8), TINY))
    assert "norm/drift" in raised(judged(run(80, moving)))


def test_a_memory_that_learns_grows() -> None:
    """From 0.1 to 2.5 within fifty updates, by a fifteenth in each."""

    def learns(metrics: Values, ago: int) -> None:
        metrics["lstm/c/rms"] = min(2.5, 0.1 * 1.068**ago)

    assert "lstm/cell_drift" not in raised(judged(run(90, learns, since=1)))
    assert "lstm/cell_drift" in raised(judged(run(40, multiplied({"lstm/c/rms": 10}))))


def test_advantages_that_are_not_normalised_have_a_mean_and_a_size_of_their_own() -> None:
    """Advantages of -50 ± 100 and a mean ratio of 1.001: a gain of -0.05 is noise, -8 is a wrong direction."""
    raw = {**FACTS, "normalize_advantages": False}
    used = {"adv/norm/mean": -50.0, "adv/norm/std": 100.0, "policy/ratio/mean": 1.001}

    assert "policy/wrong_direction" not in raised(judged(run(40, set_to({**used, "policy/surrogate_gain": -0.05})), raw))
    assert "policy/wrong_direction" in raised(judged(run(40, set_to({**used, "policy/surrogate_gain": -8.0})), raw))


def test_the_first_steps_of_a_schedule_that_restarts_have_no_direction() -> None:
    """Every twentieth update the learning rate is ten times as large, and its steps lower the objective."""

    def restart(metrics: Values, ago: int) -> None:
        metrics["opt/lr"] *= 1.0 if ago % 20 == 19 else 0.1
        if ago % 20 == 19:
            metrics["policy/surrogate_gain"] = -0.03

    assert "policy/wrong_direction" not in raised(judged(run(80, restart)))


def test_entropy_that_wanders_while_nothing_is_rewarded_is_no_explosion() -> None:
    """It varies between 0.8 and 1 from update to update, then stays close to 1."""

    def wanders(metrics: Values, update: int) -> None:
        metrics["policy/entropy_norm"] = 0.8 + 0.05 * (update % 4) if update < 40 else 0.99

    assert "policy/entropy_explosion" not in raised(judged(run(90, wanders, since=1)))


@pytest.mark.parametrize(("weight", "told"), [(10.0, True), (0.01, False)])
def test_a_bonus_that_outweighs_the_task_is_named_and_no_wrong_direction(weight: float, told: bool) -> None:
    """A dominant bonus keeps actions random, and then advantages do not determine where the policy moves."""
    random = set_to({"policy/entropy_norm": 0.995, "loss/entropy_coef": weight, "policy/surrogate_gain": -0.03})
    said = raised(judged(run(60, random, since=1), {**FACTS, "total_steps": 60 * 512}))

    assert ("policy/entropy_explosion" in said) is told
    assert ("policy/wrong_direction" in said) is not told


def heat(factor: float) -> Any:
    """Every gradient norm grows by a factor per update, with severities far above the threshold."""

    def spoil(metrics: Values, ago: int) -> None:
        metrics["grad/actor/norm_preclip"] *= factor**ago
        metrics["grad/actor/severity_explode"] = min(1.0, ago / 200)

    return spoil


@pytest.mark.system
def test_gradients_that_grow_by_4_per_cent_are_named_before_they_are_a_thousand_times_as_large() -> None:
    """They grow by 2.5 decades in 147 updates; a gradient may grow with the returns."""

    def with_returns(metrics: Values, ago: int) -> None:
        metrics["ret/std"] *= 1.04**ago
        metrics["ret/mean"] *= 1.04**ago

    facts = {**FACTS, "total_steps": None}
    told = raised(judged(run(260, heat(1.04), since=1), facts))

    assert 147 <= told["grad/slow_growth"] <= 190
    assert "grad/slow_growth" not in raised(judged(run(260, both(heat(1.04), with_returns), since=1), facts))


@pytest.mark.parametrize(("std", "end", "told"), [(0.0025, 5.0, True), (0.1, 5.0, False), (0.1, 400.0, False)])
def test_a_standard_deviation_that_is_lost(std: float, end: float, told: bool) -> None:
    """From 0.8 to 0.0025 while the return stays at 5; a run that learns ends at 0.1."""

    def shrinks(metrics: Values, ago: int) -> None:
        metrics["policy/head/op/std/mean"] = max(std, 0.8 * 0.9**ago)

    verdicts = judged(run(90, both(shrinks, returns(5.0, end)), since=1))

    assert ("policy/std_collapse" in raised(verdicts)) is told


@pytest.mark.parametrize(("end", "told"), [(5.0, True), (50.0, False)])
def test_one_head_of_several_may_collapse(end: float, told: bool) -> None:
    """The head chooses one action in 98 % of all states, which may be right in a learned task."""
    same = {"policy/head/arg/entropy_norm": 0.02, "policy/head/arg/entropy_marginal_norm": 0.1}
    varied = {"policy/head/arg/entropy_norm": 0.9, "policy/head/arg/entropy_marginal_norm": 0.95}

    def head(metrics: Values, update: int) -> None:
        metrics.update(same if update >= SINCE else varied)

    found = [a for a in alarms(judged(run(60, both(head, returns(5.0, end)), since=1))) if a.type == "policy/entropy_collapse"]

    assert bool(found) is told
    assert all("the head arg takes almost the same action in every state" in alarm.text for alarm in found)


@pytest.mark.parametrize(("end", "told"), [(5.0, True), (50.0, False)])
def test_an_entropy_below_30_per_cent_warns_where_nothing_is_learned(end: float, told: bool) -> None:
    low = {"policy/entropy_norm": 0.25, "policy/entropy_marginal_norm": 0.4}

    def one_sided(metrics: Values, update: int) -> None:
        if update >= SINCE:
            metrics.update(low)

    found = alarms(judged(run(60, both(one_sided, returns(5.0, end)), since=1)))

    assert [(alarm.type, alarm.level) for alarm in found] == [("policy/entropy_collapse", AlarmLevel.WARN)] * told


@pytest.mark.parametrize(
    ("course", "end", "told"), [("far", 5.0, True), ("climbs", 5.0, False), ("near", 5.0, True), ("far", 50.0, True), ("near", 50.0, False)]
)
def test_a_critic_that_never_fits(course: str, end: float, told: bool) -> None:
    """R² is -5 or -1 throughout, or rises from -50 to -1 as with large returns. A run may learn with an R² of -1."""

    def critic(metrics: Values, ago: int) -> None:
        metrics["value/r2"] = {"far": -5.0, "near": -1.0, "climbs": -50.0 * 0.93**ago - 1.0}[course]
        metrics["value/explained_variance"] = 0.5

    verdicts = judged(run(60, both(critic, returns(5.0, end)), since=1))
    reported = [alarm for alarm in alarms(verdicts) if alarm.type == "value/never_fits"]

    assert [(alarm.axes.update, alarm.since) for alarm in reported] == [(30, 1)] * told


def test_a_critic_is_not_said_to_fit_never_after_few_optimizer_steps() -> None:
    """Loops such as A2C have one step per update. The critic gives 0, or is off by ten times the returns."""

    def told(bias: float, steps: int) -> bool:
        critic = set_to({"value/r2": -5.0, "value/bias": bias, "value/err/std": 1.0, "ret/mean": 2.0, "ret/std": 1.0})
        records = run(60, both(critic, returns(5.0, 5.0)), since=1)
        stepped = [replace(entry, axes=replace(entry.axes, gradient_step=steps * entry.seq)) for entry in records]
        return "value/never_fits" in raised(judged(stepped))

    assert [told(-2.0, 1), told(-2.0, 16), told(-20.0, 1)] == [False, True, True]


def test_a_critic_that_was_never_better_than_a_constant_has_no_fit_to_lose() -> None:
    """Episodes of other lengths have other variances."""

    def critic(metrics: Values, update: int) -> None:
        loss = 0.6 if update < SINCE else 12.0
        metrics.update({"value/explained_variance": 0.3, "value/r2": -0.1, "value/loss_norm": loss, "loss/value": loss})

    assert "value/fit_collapse" not in raised(judged(run(60, critic, since=1)))


@pytest.mark.parametrize(("after", "first"), [(50.0, None), (45.0, 45), (55.0, None)])
def test_a_head_that_collapses_after_the_return_has_risen(after: float, first: int | None) -> None:
    """The head collapses in update 41, after a rise from 5 to 50. The return is `after` from update 43; three updates raise the alarm."""
    same = {"policy/head/arg/entropy_norm": 0.0, "policy/head/arg/entropy_marginal_norm": 0.0}
    varied = {"policy/head/arg/entropy_norm": 0.9, "policy/head/arg/entropy_marginal_norm": 0.95}

    def head(metrics: Values, update: int) -> None:
        metrics.update(same if update >= 40 else varied)
        metrics["episode/return_mean"] = 5.0 + 45 * min(1.0, update / 30) if update < 42 else after

    verdicts = judged(run(80, head, since=1))
    told = [alarm.axes.update for alarm in alarms(verdicts) if alarm.type == "policy/entropy_collapse"]

    assert told[:1] == ([first] if first else [])
    records = [record.values for record in run(80, head, since=1)]
    assert critical_values(records, described_keys()) == {"policy/head/arg/entropy_norm": 0.0}


UNKNOWN_LENGTH = {name: value for name, value in FACTS.items() if name != "total_steps"}


@pytest.mark.parametrize(
    ("explained", "facts", "update"),
    [(-0.23, FACTS, 37), (0.0, FACTS, 52), (-0.23, UNKNOWN_LENGTH, 30), (0.0, UNKNOWN_LENGTH, 53), (0.3, FACTS, None)],
)
def test_a_critic_that_explains_less_than_its_phase_lets_expect(explained: float, facts: Mapping[str, Any], update: int | None) -> None:
    """In a run of 100 updates, -0.23 is enough for the first 9 and 0 for the first 24; two of 30 updates may be worse."""
    critic = set_to({"value/explained_variance": explained, "value/r2": explained, "value/loss_norm": 0.5})

    found = alarms(judged(run(100, critic, since=1), facts))

    assert [(alarm.type, alarm.axes.update, alarm.level) for alarm in found] == (
        [("value/never_fits", update, AlarmLevel.WARN)] if update else []
    )


@pytest.mark.parametrize(
    ("fit", "loss"),
    [(0.0, 0.05), (0.0, 0.97), (0.99, 0.5), (1.01, 0.5)],
    ids=["returns hardly vary", "the error falls", "fits now and then", "the fit rises"],
)
def test_a_critic_that_explains_little_for_a_reason_is_left_alone(fit: float, loss: float) -> None:
    def critic(metrics: Values, ago: int) -> None:
        explained = 0.0 if fit < 1 else 0.003 * ago
        metrics["value/explained_variance"] = metrics["value/r2"] = 0.5 if fit == 0.99 and ago % 7 == 0 else explained
        metrics["value/loss_norm"] = 2 * loss**ago if loss > 0.9 else loss

    assert raised(judged(run(100, critic, since=1))) == {}


@pytest.mark.parametrize("facts", [FACTS, UNKNOWN_LENGTH], ids=["known length", "own loop"])
def test_a_loop_that_reports_no_losses_is_told_that_its_critic_has_lost_its_fit(facts: Mapping[str, Any]) -> None:
    """Explained variance falls from 0.97 to 0, and the error rises from 0.015 to 0.5 of the variance of returns."""

    def critic(metrics: Values, update: int) -> None:
        del metrics["loss/value"]
        fit, loss = (0.97, 0.015) if update < SINCE else (0.001, 0.5)
        metrics.update({"value/explained_variance": fit, "value/r2": fit, "value/loss_norm": loss})

    assert raised(judged(run(60, critic, since=1), facts))["value/fit_collapse"] == SINCE + 2


def test_a_critic_of_equal_returns_is_not_far_off() -> None:
    """All returns are 5 ± 0.01 and the critic is off by 0.1: R² is -100, but the error is 2 % of the returns."""
    equal = {"value/r2": -100.0, "value/explained_variance": -1.0, "value/bias": 0.1, "value/err/std": 0.01}

    assert "value/never_fits" not in raised(judged(run(60, set_to({**equal, "ret/std": 0.01}), since=1)))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lstm/h/rms": 1e-6}, True),
        ({"lstm/reset_rate": 1.0, "episode/length_mean": 50.0}, True),
        ({"lstm/reset_rate": 1.0, "episode/length_mean": 1.0}, False),
        ({"lstm/h/rms": 0.02}, False),
    ],
)
def test_a_memory_that_stays_empty(changes: Mapping[str, float], told: bool) -> None:
    assert ("lstm/empty" in raised(judged(run(20, set_to(changes), since=1)))) is told


@pytest.mark.parametrize(("ends", "bias", "told"), [(80.0, 0.05, True), (0.6, 0.05, False), (-80.0, -60.0, False)])
def test_a_critic_that_is_right_but_for_time_limits(ends: float, bias: float, told: bool) -> None:
    """Returns of 5 ± 2. The critic is off by 80 at limits, by 0.6 at limits, or everywhere because it has learned nothing yet."""
    off = {"value/bias_truncated": ends, "value/bias": bias}

    assert ("value/limit_bias" in raised(judged(run(15, set_to(off), since=1)))) is told


def test_an_actor_without_a_gradient_is_not_told_to_scale_returns() -> None:
    """Clipping leaves 60 % of the actor's gradient, which is a millionth already."""
    broadcast = {"grad/interference/actor_effective": 1e-6, "grad/interference/critic_share": 0.9999}
    (alarm, *_) = alarms(judged(run(5, set_to(broadcast), since=1)))

    assert alarm.type == "grad/actor_starved" and "[N] and [N, 1]" in alarm.text
    assert "Normalise returns" not in alarm.text


def test_a_limit_of_the_gradient_below_all_published_ones_is_to_be_raised() -> None:
    """Clipping to 1e-5 leaves a hundred-thousandth of the actor's gradient of 1e-3."""
    clipped = {"grad/interference/actor_effective": 1e-8, "grad/interference/critic_share": 0.9999, "grad/clip/coef": 1e-5}
    facts = {**FACTS, "max_grad_norm": 1e-5}
    (alarm, *_) = alarms(judged(run(5, set_to(clipped), since=1), facts))

    assert alarm.type == "grad/actor_starved" and "Try: Raise max_grad_norm" in alarm.text
    assert "max_grad_norm is 1.0e-5; published settings range from" in alarm.text


def test_a_memory_that_fades_away() -> None:
    def fades(metrics: Values, ago: int) -> None:
        metrics["lstm/h/rms"] = 0.2 if ago < 30 else 0.0015

    assert raised(judged(run(50, fades, since=1)))["lstm/empty"] == 35


@pytest.mark.parametrize(("kl", "end", "told"), [(1e-6, 5.0, True), (1e-6, 50.0, False), (1e-3, 5.0, False)])
def test_a_policy_that_hardly_moves_for_long(kl: float, end: float, told: bool) -> None:
    slow = set_to({"policy/kl_max": kl, "policy/kl": kl / 2})
    found = [a for a in alarms(judged(run(60, both(slow, returns(5.0, end)), since=1))) if a.type == "policy/kl_stall"]

    assert bool(found) is told
    assert all("20 updates have hardly moved the policy" in alarm.text for alarm in found)


@pytest.mark.parametrize(("kl", "told"), [(3e-6, False), (3e-7, True)])
def test_few_optimizer_steps_move_a_policy_less(kl: float, told: bool) -> None:
    """CartPole with 4 steps on 32 rows in each update learns at a KL of 3e-6: a quarter of 16 steps gives a sixteenth of their KL."""
    slow = run(60, both(set_to({"policy/kl_max": kl, "policy/kl": kl / 2}), returns(5.0, 5.0)), since=1)
    few = [replace(entry, axes=replace(entry.axes, gradient_step=4 * entry.seq)) for entry in slow]

    assert ("policy/kl_stall" in raised(judged(few))) is told


@pytest.mark.parametrize(("moved", "raises"), [(0.003, False), (0.0, True), (None, False)])
def test_a_single_step_moves_the_policy_after_its_only_minibatch(moved: float | None, raises: bool) -> None:
    """A2C: the ratios of the only minibatch are 1, and only sampled updates measure the effect of its step."""
    standing = {"policy/kl_max": 1e-15, "policy/kl": 1e-15, "policy/kl_exact": 0.0}
    entries = run(40, set_to(standing if moved is None else {**standing, "policy/kl_post": moved}), since=1)
    single = [replace(entry, axes=replace(entry.axes, gradient_step=entry.seq)) for entry in entries]
    if moved is None:
        unsampled = [{key: value for key, value in one.values.items() if key != "policy/kl_post"} for one in single]
        single = [replace(one, values=values) for one, values in zip(single, unsampled, strict=True)]

    assert ("policy/kl_stall" in raised(judged(single))) is raises


def test_a_schedule_lowers_what_a_policy_may_be_expected_to_move() -> None:
    """A KL of 4e-8 at a third of the learning rate equals 4e-7 at the full rate; a KL of 4e-8 at the full rate is almost no movement."""

    def third(metrics: Values, ago: int) -> None:
        metrics["policy/kl_max"] = 4e-8
        metrics["opt/lr"] *= 0.3

    assert "policy/kl_stall" not in raised(judged(run(40, third)))
    assert "policy/kl_stall" in raised(judged(run(40, set_to({"policy/kl_max": 4e-8}))))


def test_a_policy_that_does_not_move_is_explained_by_small_observations() -> None:
    verdicts = judged(run(40, set_to({"policy/kl_max": 4e-8, "obs/rms_max": 0.02})))
    alarm = next(alarm for alarm in alarms(verdicts) if alarm.type == "policy/kl_stall")

    assert "the largest entry of the observations is about 0.02" in alarm.text and "Scale observations to about 1" in alarm.text


@pytest.mark.parametrize(("end", "entropy", "told"), [(50.0, 0.01, False), (50.0, 0.6, True), (5.0, 0.01, True)])
def test_a_policy_that_has_decided_stands_still(end: float, entropy: float, told: bool) -> None:
    """FrozenLake, solved: entropy is almost 0, and only the best action is sampled."""

    def stands_still(metrics: Values, ago: int) -> None:
        if ago > 40:
            metrics.update({"policy/kl_max": 0.0, "policy/kl": 0.0, "policy/entropy_norm": entropy})

    assert ("policy/kl_stall" in raised(judged(run(80, both(stands_still, returns(5.0, end)), since=1)))) is told


@pytest.mark.parametrize(("cut", "paid", "told"), [(1.0, 1.0, False), (0.0, 1.0, True), (1.0, 0.5, True)])
def test_a_survivor_is_paid_the_same_in_every_step(cut: float, paid: float, told: bool) -> None:
    """InvertedPendulum, solved: 1 per step and 0 for a fall, until all episodes reach the time limit."""

    def survives(metrics: Values, ago: int) -> None:
        metrics["episode/length_mean"] = 10.0 if ago < 40 else 1000.0
        metrics["reward/absmax"] = 1.0
        if ago >= 40:
            metrics.update({"reward/std": 0.0, "reward/mean": paid, "reward/absmax": paid, "episode/truncated_frac": cut})

    verdicts = judged(run(80, both(survives, returns(5.0, 50.0)), since=1))

    assert ("reward/constant" in raised(verdicts)) is told


def test_ratios_of_one_are_no_standstill_where_the_policy_moves() -> None:
    """KL is exactly 0 while the distributions move by 0.0045 nats: old log-probabilities are recomputed."""
    recomputed = set_to({"policy/kl_max": 0.0, "policy/kl": 0.0, "policy/kl_exact": 0.0045})
    found = next(a for a in alarms(judged(run(40, recomputed))) if a.type == "policy/kl_stall")

    assert "although the policy has moved by 0.0045 nats" in found.text and "cannot learn" not in found.text


def test_a_policy_that_moved_before_its_learning_rate_fell_stands_still() -> None:
    """The distributions were only measured in the last update at the old rate, which moved them."""

    def falls(metrics: Values, ago: int) -> None:
        if ago == 0:
            metrics["policy/kl_exact"] = 0.0045
        else:
            metrics.update({"policy/kl_max": 1e-9, "policy/kl": 1e-9, "opt/lr": 1e-6})

    found = next(a for a in alarms(judged(run(40, falls))) if a.type == "policy/kl_stall")

    assert "cannot learn" in found.text and "although the policy has moved" not in found.text


@pytest.mark.parametrize("entropy", [True, False])
def test_densities_whose_entropy_is_unknown_round_more(entropy: bool) -> None:
    def rounds(metrics: Values, _: int) -> None:
        metrics["integrity/ratio_init"] = 1e-4
        if not entropy:
            del metrics["policy/entropy"]

    verdicts = judged(run(40, rounds, since=1), facts={**FACTS, "columns_by_name": True})

    assert ("integrity/ratio_init" in raised(verdicts)) is entropy


@pytest.mark.parametrize("reported", [True, False])
def test_returns_that_a_script_reports_now_and_then_are_no_ends_of_episodes(reported: bool) -> None:
    def ends(metrics: Values, ago: int) -> None:
        metrics["episode/count"] = float(ago == 0)

    assert ("task/no_episodes" in raised(judged(run(60, ends, since=1), facts={**FACTS, "reported_returns": reported}))) is not reported


def test_a_policy_that_a_growing_penalty_holds_still_is_told_so() -> None:
    def held(metrics: Values, ago: int) -> None:
        metrics["loss/penalty_coef"] = min(1000.0, 2.0**ago)
        metrics["policy/kl_max"] = 0.01 / 4**ago

    found = next(a for a in alarms(judged(run(40, held, since=1))) if a.type == "policy/kl_stall")

    assert "the weight of the penalty on it has grown from" in found.text and "it must fall" in found.text


def test_a_controller_without_gradients_has_no_learning_rate() -> None:
    """A scripted controller reports a learning rate of 0 and no gradient."""
    gradients = {key: None for key in run(1)[0].values if key.startswith(("grad/", "opt/update"))}

    scripted = judged(run(20, set_to({**gradients, "opt/lr": 0.0}), since=1))

    assert "opt/stalled_weights" not in raised(scripted)
    still = {"opt/lr": 0.0, "policy/kl_max": 1e-6}
    assert "opt/stalled_weights" in raised(judged(run(20, set_to(still), since=1)))
    assert "opt/stalled_weights" not in raised(judged(run(20, set_to({"opt/lr": 0.0}), since=1)))  # with a KL of 0.02


def test_the_largest_of_thousands_of_seeds_is_chance() -> None:
    """By chance one minibatch of a seed exceeds sixty clip limits and one in a hundred ten, but not in three epochs in a row."""
    one = {"seed/exploding": 0.9, "seed/largest/environment": 3.0, "seed/largest/slot": 1.0, "seed/exploding_frac": 0.01}

    assert "seed/explode" not in raised(judged(run(20, set_to(one), since=1)))
    (alarm, *_) = alarms(judged(run(40, set_to({**one, "seed/exploding_sustained": 0.8}))))
    assert "in environment 3, slot 1" in alarm.text
    assert alarm.evidence["values"]["seed/largest/environment"] == 3.0


def test_seeds_of_a_journal_without_sustained_gradients_are_judged_by_their_largest() -> None:
    """Earlier versions did not write `seed/exploding_sustained`; then five in a thousand seeds beyond ten clip limits decide."""
    one = {"seed/exploding_sustained": None, "seed/exploding": 0.9}

    assert "seed/explode" not in raised(judged(run(20, set_to({**one, "seed/exploding_frac": 0.001}), since=1)))
    assert "seed/explode" in raised(judged(run(40, set_to({**one, "seed/exploding_frac": 0.01}))))


@pytest.mark.parametrize(
    ("environments", "names"),
    [
        ([3], "in environment 3."),
        ([12, 0, 5], "in environments 0, 5 and 12."),
        (range(10), "in environments 0, 1, 2, 3, 4, 5, 6, 7 and 2 more."),
    ],
)
def test_hosts_that_were_rolled_back_are_named(environments: Iterable[int], names: str) -> None:
    hosts = {f"host/each/{env}/rollbacks": 1.0 for env in environments}
    count = float(len(hosts))
    values = {"env/rollbacks": count, "env/rollback/nonfinite": count, **hosts}

    (alarm, *_) = alarms(judged(run(31, set_to(values))))

    assert alarm.type == "env/rollback" and names in alarm.text


def test_two_rows_are_normalised_as_well_as_they_can_be() -> None:
    """An unbiased standard deviation of two rows leaves 0.71 in each minibatch: the cause is the number of rows."""
    pair = set_to({"integrity/adv_norm": 0.146, "adv/norm/std": 0.707, "adv/minibatch_rows": 2.0})

    assert set(raised(judged(run(20, pair, since=1), {**FACTS, "normalize_minibatches": True}))) == {"adv/signs"}


@pytest.mark.parametrize(("end", "told"), [(50.0, False), (5.0, True)])
def test_a_task_that_one_action_solves_is_no_collapse(end: float, told: bool) -> None:
    """The whole policy takes one action from update 21 on, while the return goes from 5 to `end`, and stays there."""
    one_action = {"policy/entropy_norm": 0.02, "policy/entropy_marginal_norm": 0.02}

    def decides(metrics: Values, update: int) -> None:
        metrics.update(one_action if update >= 20 else {})

    assert ("policy/entropy_collapse" in raised(judged(run(60, both(decides, returns(5.0, end)), since=1)))) is told


@pytest.mark.parametrize(("off", "rate", "told"), [(-12.0, 1.0, False), (12.0, 1.0, True), (-12.0, 0.1, True)])
def test_a_critic_that_follows_rising_returns_is_behind_them(off: float, rate: float, told: bool) -> None:
    """Its error is 12, while the returns rise by `rate` per update: within ten updates by 9, or by 0.9."""

    def behind(metrics: Values, update: int) -> None:
        metrics["ret/mean"] = 2.0 + rate * update
        if update >= 20:
            metrics.update({"value/bias": off, "value/bias_over_std": off / 4})

    assert ("value/bias" in raised(judged(run(60, behind, since=1)))) is told


def test_a_policy_that_equals_its_old_one_exactly_shares_its_weights_with_it() -> None:
    found = next(a for a in alarms(judged(run(40, set_to({"policy/kl_max": 0.0})))) if a.type == "policy/kl_stall")

    assert "`copy.deepcopy`" in found.text
