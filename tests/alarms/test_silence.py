"""Healthy runs that look wrong: each rule with a run that it must not misjudge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from healthy_run import FACTS, Values, alarms, both, judged, multiplied, raised, run, set_to

from esper_telemetry.core.record import AlarmLevel

SINCE = 30


def test_a_learning_rate_that_is_annealed_to_nothing_is_no_stall() -> None:
    """KL falls with the square of the rate, to 1e-8 in the last updates."""

    def anneal(metrics: Values, ago: int) -> None:
        share = max(0.0, 1 - ago / 69)
        metrics["opt/lr"] *= share
        metrics["opt/update_to_weight"] *= share
        metrics["opt/update_to_weight/encoder_weight"] *= share
        metrics["policy/kl"] *= share**2
        metrics["policy/kl_max"] *= share**2

    assert alarms(judged(run(100, anneal))) == []


def test_a_solved_task_with_little_entropy_is_no_collapse() -> None:
    """The policy is certain in every state, and acts differently in different states."""
    solved = set_to({"policy/entropy_norm": 0.04, "policy/entropy_marginal_norm": 0.97})

    assert alarms(judged(run(100, solved))) == []


def test_a_constant_reward_per_step_is_no_fault() -> None:
    """As in survival tasks: 1 per step from the first step on."""
    constant = {"reward/std": 0.0, "reward/mean": 1.0, "reward/absmax": 1.0}
    # the task is to make episodes longer
    lengths = {"episode/terminated_length_min": 4.0, "episode/terminated_length_max": 25.0}

    assert alarms(judged(run(100, set_to({**constant, **lengths}), since=1))) == []


def test_a_rare_reward_may_stay_away_for_as_long_as_it_did_before() -> None:
    def rare(metrics: Values, ago: int) -> None:
        if ago % 8:
            metrics.update({"reward/std": 0.0, "reward/mean": 0.0, "reward/absmax": 0.0})

    assert "reward/constant" not in raised(judged(run(100, rare, since=1)))


def test_a_first_success_is_no_change_of_scale() -> None:
    """A reward of 100 flips the sign of the mean after costs of 0.1 per step."""

    def success(metrics: Values, ago: int) -> None:
        paid = ago >= 50
        metrics.update({"reward/absmax": 100.0 if paid else 0.1, "reward/mean": 0.3 if paid else -0.03})

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


def test_the_inverse_of_a_squash_loses_digits() -> None:
    """1e-4 nats in single precision are rounding if actions are inverted through a tanh; 1e-2 are still a mismatch."""
    inverted = {**FACTS, "inverts_squash": True}
    rounding, mismatch = (run(40, set_to({"integrity/ratio_init": value})) for value in (1e-4, 1e-2))

    assert "integrity/ratio_init" not in raised(judged(rounding, inverted))
    assert "integrity/ratio_init" in raised(judged(mismatch, inverted))


def test_narrow_gaussians_round_more() -> None:
    narrow = set_to({"integrity/ratio_init": 5e-4, "policy/head/op/std/min": 0.01})

    assert alarms(judged(run(40, narrow))) == []


def test_an_episode_that_ends_with_the_rollout_is_reset_in_the_next() -> None:
    """In every second rollout all episodes end at the last step, so the following rollout starts with zeros."""

    def together(metrics: Values, ago: int) -> None:
        metrics.update({"episode/count": 16.0 * (ago % 2), "lstm/reset_rate": 0.5 - 0.5 * (ago % 2)})

    assert alarms(judged(run(60, together, since=1))) == []


def test_resets_that_are_missing_for_two_rollouts_are_a_fault() -> None:
    few = set_to({"episode/count": 2.0, "lstm/reset_rate": 0.0})

    assert raised(judged(run(60, few)))["lstm/reset_missing"] == SINCE + 1


def test_a_forget_gate_that_shuts_shows_in_the_cell_state_before_gates_are_looked_at() -> None:
    """A cell that forgets everything holds only what one step writes, at most 1."""
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
    """Small networks tolerate a raised rate for a while; a schedule's restarts return to the configured rate."""
    jump = set_to({"opt/update_to_weight": None, "opt/lr": rate})
    verdicts = judged(run(40, jump), {**FACTS, "learning_rate": 0.0025})

    assert ("opt/update_too_large" in raised(verdicts)) == told


def test_a_critic_that_was_never_right_learns_slowly_and_is_not_biased() -> None:
    wrong = set_to({"value/bias_over_std": 3.0, "value/bias": 30.0, "ret/mean": 10.0, "ret/std": 10.0})

    assert "value/bias" not in raised(judged(run(90, wrong)[SINCE:]))
    assert "value/bias" in raised(judged(run(60, wrong)))


@pytest.mark.parametrize(("moved", "told"), [(0.3, True), (0.1, False)])
def test_a_kl_that_a_few_rare_actions_make_up_is_no_spike(moved: float, told: bool) -> None:
    """0.15 nats twice: with a third of the samples outside of the trust region, or with a tenth."""
    far = set_to({"policy/kl": 0.15, "policy/clip_frac": moved})

    assert ("policy/kl_spike" in raised(judged(run(40, far)))) is told


def test_a_kl_that_is_large_enough_is_a_spike_whoever_makes_it_up() -> None:
    assert raised(judged(run(40, set_to({"policy/kl": 1.5}))))["policy/kl_spike"] == SINCE


@pytest.mark.parametrize(("spread", "told"), [(4.0, True), (1.7, False)])
def test_one_sample_that_owns_a_minibatch_is_no_explosion(spread: float, told: bool) -> None:
    """The effective sample size falls to 5 %: a single ratio of 40 causes that, and the 99th percentile does not show it."""
    owned = set_to({"policy/ess_frac_min": 0.05, "policy/ratio/max": 40.0, "policy/ratio/p99": spread})

    assert ("policy/ratio_explosion" in raised(judged(run(40, owned)))) is told


@pytest.mark.parametrize(("age", "told"), [(499.0, False), (99.0, True)])
def test_a_unit_that_counts_the_steps_of_long_episodes_is_no_drift(age: float, told: bool) -> None:
    """A cell state of 60 in episodes of 500 steps, or of 100 steps, which can hardly produce a larger one."""
    counting = set_to({"lstm/c/absmax": 60.0, "lstm/age/max": age})

    assert ("lstm/cell_drift" in raised(judged(run(40, counting)))) is told


def test_a_memory_that_is_used_less_and_less_is_no_shut_gate() -> None:
    """Cell states shrink by a twentieth per update, to less than one step can write; the gates are not measured."""

    def fade(metrics: Values, ago: int) -> None:
        metrics["lstm/c/rms"] *= 0.95**ago
        metrics["lstm/c/absmax"] = max(0.7, 6.0 * 0.95**ago)
        del metrics["lstm/gate/f/sat_lo"], metrics["lstm/timescale/median"]

    assert "lstm/forget_closed" not in raised(judged(run(100, fade, since=1)))


@pytest.mark.parametrize(("spread", "told"), [(0.02, True), (0.3, False)])
def test_a_cell_state_that_comes_and_goes_in_bursts_does_not_add_up(spread: float, told: bool) -> None:
    """It doubles from one update to the next and grows with age: unusual for a steady state, but not for one that varies as much."""

    def vary(metrics: Values, update: int) -> None:
        metrics["lstm/c/rms"] = 2.0 * 10 ** (spread * ((update % 5) / 2 - 1))
        del metrics["lstm/gate/f/sat_hi"]

    def opened(metrics: Values, ago: int) -> None:
        vary(metrics, ago)
        metrics.update({"lstm/c/rms": 2.1 * 10**spread * 1.6, "lstm/c_growth": 1.6})

    records = [*run(SINCE, vary, since=1), *run(40, opened, since=SINCE + 1)[SINCE:]]
    assert ("lstm/forget_open" in raised(judged(records))) is told


@pytest.mark.parametrize(("looks", "step", "told"), [(1, 2.0, False), (2, 2.0, True), (2, 0.3, False)])
def test_gradients_that_outgrow_their_memory_once_are_no_spike(looks: int, step: float, told: bool) -> None:
    """Gradients of a solved task are not a spike either: their steps stay below the learning rate."""

    def outgrow(metrics: Values, ago: int) -> None:
        metrics.update({"opt/stable_rms": 12.0 if ago < looks else 1.2, "opt/update_rms_over_lr": step})

    assert ("opt/rms_spike" in raised(judged(run(40, outgrow)))) is told


def test_a_critic_that_has_nothing_left_to_learn_may_lose_its_gradient() -> None:
    """Its error falls by a fifth of a decade per update, to 1e-12 of its value, and its gradient by slightly more than the square root."""

    def solved(metrics: Values, ago: int) -> None:
        metrics["loss/value"] *= 10 ** (-0.2 * min(ago, 60))
        metrics["grad/layer/value_weight/norm"] *= 10 ** (-0.13 * min(ago, 60))

    assert "grad/vanish" not in raised(judged(run(160, solved)))


def test_records_that_are_missing_make_no_further_passes() -> None:
    """From update 40 on the journal holds only every sixteenth update, so records are sixteen times as many steps apart."""
    sparse = [
        entry for entry in run(200, multiplied({"policy/kl": 4}), since=40) if entry.seq < 40 or entry.seq % 16 == 0
    ]

    assert "policy/kl_spike" not in raised(judged(sparse))


@pytest.mark.parametrize(("rows", "told"), [(8, False), (512, True)])
def test_few_rows_are_normalised_as_well_as_they_can_be(rows: int, told: bool) -> None:
    """Division by the unbiased standard deviation leaves eight rows with one of 0.935."""
    few = [
        replace(entry, axes=replace(entry.axes, env_step=entry.seq * rows))
        for entry in run(40, set_to({"integrity/adv_norm": 0.0323, "adv/norm/std": 0.935}), since=1)
    ]

    assert ("integrity/adv_norm" in raised(judged(few, {**FACTS, "normalize_minibatches": False}))) is told


@pytest.mark.parametrize(("steps", "told"), [(1, False), (2, True)])
def test_a_rollout_of_one_step_shows_a_reset_one_rollout_later(steps: int, told: bool) -> None:
    """An episode ends in update 30; its environment is reset in the step of update 31, and its memory in update 32."""

    def one(metrics: Values, ago: int) -> None:
        metrics.update({"episode/count": float(ago == 0), "lstm/reset_rate": 0.125 * (ago == 2)})

    assert ("lstm/reset_missing" in raised(judged(run(40, one), {**FACTS, "num_steps": steps}))) is told


def test_updates_that_hardly_move_the_policy_have_no_direction() -> None:
    """Ratios spread by 0.005: with either sign of the gain, no action becomes much rarer."""
    still = set_to({"policy/surrogate_gain": -0.0015, "policy/ratio/std": 0.005})

    assert "policy/wrong_direction" not in raised(judged(run(40, still)))


def steps_of_gaussians(**values: float) -> Callable[[Values, int], None]:
    """Steps of a policy with continuous actions."""
    return set_to({f"policy/{key}": value for key, value in values.items()})


@pytest.mark.parametrize(("dimensions", "told"), [(17.0, False), (1.0, True)])
def test_the_kl_of_a_gaussian_action_adds_up_over_its_dimensions(dimensions: float, told: bool) -> None:
    """0.32 nats in 17 dimensions are 0.019 in each, as with published settings of HumanoidStandup."""
    far = both(steps_of_gaussians(kl=0.32, clip_frac=0.7), set_to({"policy/head/op/dimensions": dimensions}))

    assert ("policy/kl_spike" in raised(judged(run(40, far)))) is told


@pytest.mark.parametrize(("dimensions", "told"), [(6.0, False), (1.0, True)])
def test_ratios_of_a_gaussian_action_multiply_over_its_dimensions(dimensions: float, told: bool) -> None:
    """Independent logarithms add in squares: a first percentile of 0.005 is 0.005^(1/√6) = 0.11 in each of six dimensions."""
    far = set_to({"policy/ratio/p01": 0.005, "policy/head/op/dimensions": dimensions})

    assert ("policy/ratio_collapse" in raised(judged(run(40, far)))) is told


@pytest.mark.parametrize(("dimensions", "told"), [(7.0, False), (1.0, True)])
def test_a_trust_region_that_many_dimensions_leave_together_is_not_saturated(dimensions: float, told: bool) -> None:
    far = set_to({"policy/clip_frac": 0.42, "policy/kl": 0.045, "policy/head/op/dimensions": dimensions})

    assert ("policy/clip_saturation" in raised(judged(run(60, far)))) is told


@pytest.mark.parametrize(("outside", "told"), [(0.25, False), (0.4, True)])
def test_a_single_large_kl_counts_in_full_where_typical_samples_account_for_it(outside: float, told: bool) -> None:
    """A KL of 0.36 nats, once.

    A quarter of the samples outside of 1 ± 0.2 means a KL of (0.2 / 1.15)² / 2 = 0.015, and twelve times that is 0.18. For 40 % of the
    samples, they are 0.028 and 0.34.
    """

    def once(metrics: Values, ago: int) -> None:
        if ago == 0:
            metrics.update({"policy/kl": 0.36, "policy/clip_frac": outside})

    assert ("policy/kl_spike" in raised(judged(run(40, once)))) is told


@pytest.mark.parametrize(("scatter", "told"), [(0.1, True), (0.6, False)])
def test_gradients_whose_cosines_scatter_do_not_oppose_each_other(scatter: float, told: bool) -> None:
    """A mean of -0.4 over ten updates: 12 standard errors from 0, or 2."""

    def opposed(metrics: Values, ago: int) -> None:
        metrics["grad/align/successive_cos"] = -0.4 + scatter * (-1) ** ago

    assert ("grad/oscillation" in raised(judged(run(60, opposed)))) is told


@pytest.mark.parametrize(("length", "told"), [(10.0, True), (500.0, False)])
def test_what_swings_within_an_episode_is_the_rhythm_of_the_task(length: float, told: bool) -> None:
    """A period of five updates of 32 steps, with episodes of 10 or 500 steps."""
    swing = set_to({"policy/kl/period/p": 1e-12, "policy/kl/period/length": 5.0, "episode/length_mean": length})

    assert ("grad/oscillation" in raised(judged(run(60, swing), {**FACTS, "horizon": 1000}))) is told


@pytest.mark.parametrize(("std", "blamed"), [(0.0009, True), (0.13, False)])
def test_a_kl_that_a_tiny_standard_deviation_makes_large_is_put_down_to_it(std: float, blamed: bool) -> None:
    spread = {"policy/head/op/std/mean": std, "policy/head/op/std_of_range": std}
    records = run(3, set_to({"policy/kl": 1000.0, "policy/clip_frac": 0.99, **spread}), since=1)

    (alarm,) = [alarm for alarm in alarms(judged(records)) if alarm.type == "policy/kl_spike"]

    assert ("Raise the standard deviation" in alarm.text) is blamed
    assert ("Lower the learning rate" in alarm.text) is not blamed


def for_updates(count: int, **changes: float) -> Callable[[Values, int], None]:
    """Set these values in the first `count` updates; the others stay healthy."""
    return lambda metrics, ago: metrics.update(changes) if 0 <= ago < count else None


GAIN, NORM, RATIO = "policy/surrogate_gain", "grad/global/norm_preclip_max", "integrity/ratio_init"


@pytest.mark.parametrize(
    ("alarm", "key", "value", "updates", "told"),
    [
        ("policy/wrong_direction", GAIN, -0.02, 2, False),
        ("policy/wrong_direction", GAIN, -0.02, 3, True),
        ("policy/wrong_direction", GAIN, -0.2, 1, False),
        ("policy/wrong_direction", GAIN, -0.2, 2, True),
        ("grad/explode", NORM, 600.0, 1, False),
        ("grad/explode", NORM, 600.0, 2, True),
        ("integrity/ratio_init", RATIO, 1e-4, 1, False),
        ("integrity/ratio_init", RATIO, 1e-4, 2, True),
        ("integrity/ratio_init", RATIO, 0.1, 1, True),
    ],
)
def test_what_a_single_update_may_show_needs_another(
    alarm: str, key: str, value: float, updates: int, told: bool
) -> None:
    """Healthy updates lower their own objective by chance, clipping absorbs a spike, and a saturated memory rounds more once."""
    unusual = for_updates(updates, **{key: value})

    assert (alarm in raised(judged(run(40, unusual)))) is told


def test_a_policy_without_memory_has_no_rounding_that_comes_once() -> None:
    def feed_forward(metrics: Values, ago: int) -> None:
        for key in [key for key in metrics if key.startswith("lstm/")]:
            del metrics[key]
        if ago == SINCE:
            metrics[RATIO] = 1e-4

    verdicts = judged(run(40, feed_forward, since=0), {**FACTS, "policy": "mlp"})

    assert raised(verdicts)["integrity/ratio_init"] == SINCE


def test_a_gradient_that_nothing_clips_is_told_at_once() -> None:
    facts = {key: value for key, value in FACTS.items() if key != "max_grad_norm"}

    assert raised(judged(run(40, for_updates(1, **{NORM: 600.0})), facts))["grad/explode"] == SINCE


@pytest.mark.parametrize(("half_square", "told"), [(0.05, False), (3.0, True)])
def test_a_single_sample_makes_no_large_kl(half_square: float, told: bool) -> None:
    """One of 1,920 samples is 6,000 times as likely: the mean of r - 1 - log r is 3, the mean of half log² r is 0.05."""
    once = for_updates(1, **{"policy/kl": 3.0, "policy/kl_k2": half_square, "policy/clip_frac": 0.4})

    assert ("policy/kl_spike" in raised(judged(run(40, once)))) is told


@pytest.mark.parametrize(("climbs", "told"), [(True, False), (False, True)])
def test_a_critic_that_climbs_slowly_over_the_whole_run_is_left_alone(climbs: bool, told: bool) -> None:
    """A setback of thirty updates does not undo the rise: R² was -6 at first."""

    def slowly(metrics: Values, ago: int) -> None:
        setback = 0.5 * max(0, ago - 60) / 30
        metrics["value/r2"] = (1 - 7 * 0.975 ** min(ago, 60) if climbs else -2.0) - setback
        metrics["value/bias"] = 3.0 * metrics["ret/std"]

    assert ("value/never_fits" in raised(judged(run(89, slowly, since=1)))) is told


def cell(*sizes: float) -> Callable[[Values, int], None]:
    """Set the size of the cell state after thirty updates; its largest entry is seven times as large, and the last size stays."""

    def spoil(metrics: Values, ago: int) -> None:
        size = 1.0 if ago < SINCE else sizes[min(ago - SINCE, len(sizes) - 1)]
        metrics.update({"lstm/c/rms": size, "lstm/c/absmax": 7 * size})
        metrics.pop("lstm/gate/f/sat_lo", None)

    return spoil


@pytest.mark.parametrize(
    ("sizes", "told"),
    [((0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.16, 0.13, 0.1), False), ((0.12, 0.1), True)],
    ids=["gradually", "at once"],
)
def test_a_memory_that_is_used_less_and_less_has_no_shut_gates(sizes: tuple[float, ...], told: bool) -> None:
    assert ("lstm/forget_closed" in raised(judged(run(60, cell(*sizes), since=1)))) is told


@pytest.mark.parametrize(("other", "told"), [(0.1, True), (0.0, False)])
def test_a_head_without_a_gradient_is_dead_where_another_has_one(other: float, told: bool) -> None:
    """If every gradient of an update is zero, the update did not have a signal."""
    unusual = for_updates(1, **{"grad/head/op/norm": 0.0, "grad/head/place/norm": other})

    assert ("policy/dead_head" in raised(judged(run(40, unusual)))) is told


@pytest.mark.parametrize(("decided", "told"), [(1.0, True), (0.005, False)])
def test_the_mix_of_a_few_actions_differs_by_chance(decided: float, told: bool) -> None:
    """A head that decides in a few steps of 512 may choose another action in each."""

    def shifted(metrics: Values, ago: int) -> None:
        shift = 0.9 if ago == 20 else 0.001
        metrics.update({"policy/action_shift_js": shift, "policy/head/op/action_shift_js": shift})
        metrics["policy/head/op/decision_frac"] = decided

    assert ("policy/action_shift" in raised(judged(run(40, shifted, since=1)))) is told


@pytest.mark.parametrize(("decided", "told"), [(0.2, True), (0.0, False)])
def test_a_head_that_decides_nothing_has_no_gradient(decided: float, told: bool) -> None:
    def unused(metrics: Values, ago: int) -> None:
        metrics["grad/layer/heads_op_weight/norm"] = 0.0
        metrics["policy/head/op/decision_frac"] = decided

    facts = {**FACTS, "groups": {**FACTS["groups"], "head:op": ["heads_op_weight"]}}
    assert ("grad/vanish" in raised(judged(run(40, unused), facts))) is told
