"""Healthy courses that look wrong, next to the faults that they resemble, and second signs of faults whose first sign is missing."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from courses import SINCE, Course, check, parameters
from healthy_run import FACTS, Spoil, Values, alarms, both, judged, multiplied, raised, run, set_to

from esper_telemetry.alarms import Detectors
from esper_telemetry.core.record import AlarmEvent, AlarmLevel

GAIN, NORM, RATIO = "policy/surrogate_gain", "grad/global/norm_preclip_max", "integrity/ratio_init"
MINIBATCHES, ROLLOUT = ({**FACTS, "normalize_minibatches": whether} for whether in (True, False))


def first(count: int, **changes: float) -> Spoil:
    """Set these values in the first `count` updates; the others stay healthy."""
    return lambda metrics, ago: metrics.update(changes) if 0 <= ago < count else None


def annealed(metrics: Values, ago: int) -> None:
    share = max(0.0, 1 - ago / 69)
    for key in ("opt/lr", "opt/update_to_weight", "opt/update_to_weight/encoder_weight"):
        metrics[key] *= share
    for key in ("policy/kl", "policy/kl_max"):
        metrics[key] *= share**2


def rare(metrics: Values, ago: int) -> None:
    if ago % 8:
        metrics.update({"reward/std": 0.0, "reward/mean": 0.0, "reward/absmax": 0.0})


def success(metrics: Values, ago: int) -> None:
    paid = ago >= 50
    metrics.update({"reward/absmax": 100.0 if paid else 0.1, "reward/mean": 0.3 if paid else -0.03})


def fades(metrics: Values, ago: int) -> None:
    metrics["lstm/c/rms"] *= 0.95**ago
    metrics["lstm/c/absmax"] = max(0.7, 6.0 * 0.95**ago)
    del metrics["lstm/gate/f/sat_lo"], metrics["lstm/timescale/median"]


def solved(metrics: Values, ago: int) -> None:
    metrics["loss/value"] *= 10 ** (-0.2 * min(ago, 60))
    metrics["grad/layer/value_weight/norm"] *= 10 ** (-0.13 * min(ago, 60))


def in_phase(small: int) -> Spoil:
    """Episodes of eight updates end together, and from update 25 on the last ones cost almost no reward."""

    def spoil(metrics: Values, ago: int) -> None:
        metrics["episode/count"] = 50.0 if ago % 8 == 7 else 0.0
        if ago % 8 >= 8 - small and ago >= 24:
            metrics.update({"reward/absmax": 1.3e-3, "reward/mean": 5e-4, "reward/std": 4e-4})

    return spoil


def fallen(metrics: Values, ago: int) -> None:
    metrics["episode/count"] = 50.0 if ago % 8 == 7 else 0.0
    if ago >= 50:
        metrics.update({"reward/absmax": 1.3e-3, "reward/mean": 5e-4, "reward/std": 4e-4})


def rate(*factors: float) -> Spoil:
    """Multiply the learning rate by these factors in turn."""

    def spoil(metrics: Values, ago: int) -> None:
        metrics["opt/lr"] *= factors[ago % len(factors)]

    return spoil


def creeping(metrics: Values, ago: int) -> None:
    metrics["opt/lr"] *= 1.03 ** (ago + 1)


def warmed_up(metrics: Values, ago: int) -> None:
    metrics["opt/lr"] *= min(1.0, ago / 10)


def learned_fast(metrics: Values, ago: int) -> None:
    metrics["loss/value"] = max(0.1, 100 * 0.7**ago)
    if ago >= 29:
        metrics.update({"loss/value": 40.0, "reward/absmax": 5.2})


def slow_critic(*, climbs: bool) -> Spoil:
    """R² rises from -6 with a setback of thirty updates at the end, or begins at -2."""

    def spoil(metrics: Values, ago: int) -> None:
        setback = 0.5 * max(0, ago - 60) / 30
        metrics["value/r2"] = (1 - 7 * 0.975 ** min(ago, 60) if climbs else -2.0) - setback
        metrics["value/bias"] = 3.0 * metrics["ret/std"]

    return spoil


def cell(*sizes: float) -> Spoil:
    """Set the size of the cell state after thirty updates; its largest entry is seven times as large, and the last size stays."""

    def spoil(metrics: Values, ago: int) -> None:
        size = 1.0 if ago < SINCE else sizes[min(ago - SINCE, len(sizes) - 1)]
        metrics.update({"lstm/c/rms": size, "lstm/c/absmax": 7 * size})
        metrics.pop("lstm/gate/f/sat_lo", None)

    return spoil


def slowly_opened(metrics: Values, ago: int) -> None:
    metrics["lstm/c/rms"] *= min(2.0, 1.05**ago)
    metrics["lstm/c_growth"] = 1.6
    metrics.pop("lstm/gate/f/sat_hi")


def shifted(decided: float) -> Spoil:
    def spoil(metrics: Values, ago: int) -> None:
        shift = 0.9 if ago == 20 else 0.001
        metrics.update({"policy/action_shift_js": shift, "policy/head/op/action_shift_js": shift})
        metrics["policy/head/op/decision_frac"] = decided

    return spoil


def feed_forward(metrics: Values, ago: int) -> None:
    for key in [key for key in metrics if key.startswith("lstm/")]:
        del metrics[key]
    if ago == SINCE:
        metrics[RATIO] = 1e-4


def outgrown(updates: int, step: float) -> Spoil:
    return lambda metrics, ago: metrics.update({"opt/stable_rms": 12.0 if ago < updates else 1.2, "opt/update_rms_over_lr": step})


def opposed(scatter: float) -> Spoil:
    return lambda metrics, ago: metrics.update({"grad/align/successive_cos": -0.4 + scatter * (-1) ** ago})


EQUAL_RETURNS = {"value/r2": -2.0, "value/explained_variance": -1.0}
SURVIVAL = {"reward/std": 0.0, "reward/mean": 1.0, "reward/absmax": 1.0}
LENGTHS = {"episode/terminated_length_min": 4.0, "episode/terminated_length_max": 25.0}
SHUT = {"lstm/c/absmax": 0.98, "lstm/c_growth": -0.4, "lstm/gate/f/sat_lo": None}
STARVED = {"grad/interference/actor_effective": 1e-6, "grad/interference/critic_share": 0.9999}
WRONG_CRITIC = {"value/bias_over_std": 3.0, "value/bias": 30.0, "ret/mean": 10.0, "ret/std": 10.0}
NO_LAYERS = dict.fromkeys(("grad/layer/heads_op_weight/norm", "grad/layer/core_weight/norm"), 0.0)
NO_TOKENS = {**NO_LAYERS, "lm/tokens": 0.0, "lm/truncated_frac": 1.0}
SEEN_OPEN = {"lstm/c/absmax": 0.9, "lstm/c/rms": 0.8, "lstm/gate/f/sat_lo": 0.0, "lstm/timescale/median": 4.0}
OPENED = {"lstm/c_growth": 1.6, "lstm/gate/f/sat_hi": None}
HEADS = {**FACTS, "groups": {**FACTS["groups"], "head:op": ["heads_op_weight"]}}
UNCLIPPED = {key: value for key, value in FACTS.items() if key != "max_grad_norm"}
SHRINKING = (0.6, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.16, 0.13, 0.1)
DIMENSIONS = "policy/head/op/dimensions"

COURSES: Mapping[str, list[Course]] = {
    "A learning rate that is annealed to nothing, and KL with its square, to 1e-8 in the last updates, is not a stall": [
        Course(None, False, annealed, 100)
    ],
    "A policy that is certain in every state, but acts differently in different states, has not collapsed": [
        Course(None, False, {"policy/entropy_norm": 0.04, "policy/entropy_marginal_norm": 0.97}, 100)
    ],
    "A survival task pays 1 per step from the first step on": [Course(None, False, {**SURVIVAL, **LENGTHS}, 100, since=1)],
    "A rare reward may stay away for as long as it did before": [Course("reward/constant", False, rare, 100, since=1)],
    "A first success of 100, after costs of 0.1 per step, is not a change of scale": [
        Course("value/scale_shift", False, success, 100, since=1)
    ],
    "An explained variance that falls because returns became equal is not a fault": [
        Course("value/fit_collapse", False, both(set_to(EQUAL_RETURNS), multiplied({"ret/std": 0.1, "loss/value": 0.05})), 100)
    ],
    "The precision decides what is rounding": [
        Course(RATIO, told, {RATIO: 5e-3}, facts={**FACTS, "precision": precision}) for precision, told in (("fp32", True), ("bf16", False))
    ],
    "The inverse of a tanh in single precision rounds by 1e-4 nats; 1e-2 are a mismatch": [
        Course(RATIO, told, {RATIO: value}, facts={**FACTS, "inverts_squash": True}) for value, told in ((1e-4, False), (1e-2, True))
    ],
    "Narrow Gaussians round more": [Course(None, False, {RATIO: 5e-4, "policy/head/op/std/min": 0.01})],
    "At a log-probability of -20, a rounding error of 4e-5 is to be expected": [
        Course(None, False, {RATIO: 3e-5, "policy/logp/min": -20.0})
    ],
    "If episodes end with every second rollout, the next rollout starts with zeros": [
        Course(
            None,
            False,
            lambda metrics, ago: metrics.update({"episode/count": 16.0 * (ago % 2), "lstm/reset_rate": 0.5 - 0.5 * (ago % 2)}),
            60,
            since=1,
        )
    ],
    "Resets that are missing for two rollouts are a fault": [
        Course("lstm/reset_missing", SINCE + 1, {"episode/count": 2.0, "lstm/reset_rate": 0.0}, 60)
    ],
    "A rollout of one step shows the reset of an episode that ended in update 30 in update 32": [
        Course(
            "lstm/reset_missing",
            told,
            lambda metrics, ago: metrics.update({"episode/count": float(ago == 0), "lstm/reset_rate": 0.125 * (ago == 2)}),
            facts={**FACTS, "num_steps": steps},
        )
        for steps, told in ((1, False), (2, True))
    ],
    "A cell that forgets everything holds only what one step writes, at most 1, before gates are measured": [
        Course("lstm/forget_closed", SINCE, both(multiplied({"lstm/c/rms": 0.2}), set_to(SHUT)))
    ],
    "A learning rate that was raised shows before weights are measured": [
        Course("opt/update_too_large", SINCE, {"opt/update_to_weight": None, "opt/lr": 0.25})
    ],
    "A rate that jumps above what was set is not a schedule, whose restarts return to it": [
        Course("opt/update_too_large", told, {"opt/update_to_weight": None, "opt/lr": value}, facts={**FACTS, "learning_rate": 0.0025})
        for value, told in ((0.025, True), (0.0025, False))
    ],
    "A KL of 0.15 nats with a third of the samples outside of the trust region is a spike, with a tenth it is not": [
        Course("policy/kl_spike", told, {"policy/kl": 0.15, "policy/clip_frac": moved}) for moved, told in ((0.3, True), (0.1, False))
    ],
    "A KL that is large enough is a spike, whatever makes it up": [Course("policy/kl_spike", SINCE, {"policy/kl": 1.5})],
    "0.32 nats in 17 dimensions are 0.019 in each, as with published settings of HumanoidStandup": [
        Course("policy/kl_spike", told, {"policy/kl": 0.32, "policy/clip_frac": 0.7, DIMENSIONS: dimensions})
        for dimensions, told in ((17.0, False), (1.0, True))
    ],
    "A single KL of 0.36 nats counts in full where typical samples account for it: a quarter of them outside of 1 ± 0.2 means "
    "(0.2 / 1.15)² / 2 = 0.015, and twelve times that is 0.18; 40 % mean 0.028 and 0.34": [
        Course("policy/kl_spike", told, first(1, **{"policy/kl": 0.36, "policy/clip_frac": outside}))
        for outside, told in ((0.25, False), (0.4, True))
    ],
    "One sample of 1,920 that is 6,000 times as likely: the mean of r - 1 - log r is 3, the mean of half log² r is 0.05": [
        Course("policy/kl_spike", told, first(1, **{"policy/kl": 3.0, "policy/kl_k2": half_square, "policy/clip_frac": 0.4}))
        for half_square, told in ((0.05, False), (3.0, True))
    ],
    "A single ratio of 40 lowers the effective sample size to 5 %, and the 99th percentile does not show it": [
        Course("policy/ratio_explosion", told, {"policy/ess_frac_min": 0.05, "policy/ratio/max": 40.0, "policy/ratio/p99": spread})
        for spread, told in ((4.0, True), (1.7, False))
    ],
    "Independent logarithms add in squares: a first percentile of 0.005 is 0.005^(1/√6) = 0.11 in each of six dimensions": [
        Course("policy/ratio_collapse", told, {"policy/ratio/p01": 0.005, DIMENSIONS: dimensions})
        for dimensions, told in ((6.0, False), (1.0, True))
    ],
    "A trust region that many dimensions leave together is not saturated": [
        Course("policy/clip_saturation", told, {"policy/clip_frac": 0.42, "policy/kl": 0.045, DIMENSIONS: dimensions}, 60)
        for dimensions, told in ((7.0, False), (1.0, True))
    ],
    "A cell state of 60 is possible in episodes of 500 steps, and hardly in 100": [
        Course("lstm/cell_drift", told, {"lstm/c/absmax": 60.0, "lstm/age/max": age}) for age, told in ((499.0, False), (99.0, True))
    ],
    "If environments reset together, one update in eight holds only the first and the last ages; growth shows in two updates": [
        Course("lstm/cell_drift", False, lambda metrics, ago: metrics.update({"lstm/c_growth": 13.0 if ago % 8 == 0 else 0.5}), 80),
        Course("lstm/cell_drift", SINCE + 1, {"lstm/c_growth": 13.0}),
    ],
    "A cell that is as small as what a step can write adds up nothing": [
        Course("lstm/cell_drift", False, {"lstm/c_growth": 13.0, "lstm/c/rms": 0.6})
    ],
    "Cell states that shrink by a twentieth per update are not a shut gate; gates are not measured": [
        Course("lstm/forget_closed", False, fades, 100, since=1)
    ],
    "A memory that is used less and less does not shut its gates, unless that happens at once": [
        Course("lstm/forget_closed", told, cell(*sizes), 60, since=1) for sizes, told in ((SHRINKING, False), ((0.12, 0.1), True))
    ],
    "A small cell state is not a shut gate where gates were just seen open": [Course("lstm/forget_closed", False, SEEN_OPEN)],
    "A cell state that doubles within an update and grows with age shows an open gate; growing slowly is learning": [
        Course("lstm/forget_open", SINCE, both(multiplied({"lstm/c/rms": 2}), set_to(OPENED))),
        Course("lstm/forget_open", False, slowly_opened, 60),
    ],
    "Gradients that outgrow their memory once are not a spike; in a solved task, steps stay below the learning rate": [
        Course("opt/rms_spike", told, outgrown(updates, step)) for updates, step, told in ((1, 2.0, False), (2, 2.0, True), (2, 0.3, False))
    ],
    "The gradient of a critic may vanish with its error, here to 1e-12 of its value": [
        Course("grad/vanish", False, solved, 160),
        Course("grad/vanish", False, multiplied({"loss/value": 1e-12, "grad/layer/value_weight/norm": 1e-7}), 14, since=10),
        Course("grad/vanish", True, multiplied({"grad/layer/value_weight/norm": 1e-7}), 14, since=10),
    ],
    "An update whose completions are all truncated has no gradient, and is named as truncation from the third on": [
        Course("grad/vanish", True, NO_LAYERS),
        *(
            Course(
                alarm, False, lambda metrics, ago: metrics.update(NO_TOKENS if ago == 0 else {"lm/tokens": 80.0, "lm/truncated_frac": 0.9})
            )
            for alarm in ("grad/vanish", "lm/truncation")
        ),
        Course("lm/truncation", SINCE + 2, NO_TOKENS),
        Course("grad/vanish", False, NO_TOKENS),
    ],
    "A head that decides nothing has no gradient": [
        Course("grad/vanish", told, {"grad/layer/heads_op_weight/norm": 0.0, "policy/head/op/decision_frac": decided}, facts=HEADS)
        for decided, told in ((0.2, True), (0.0, False))
    ],
    "A head without a gradient is dead where another one has a gradient": [
        Course("policy/dead_head", told, first(1, **{"grad/head/op/norm": 0.0, "grad/head/place/norm": other}))
        for other, told in ((0.1, True), (0.0, False))
    ],
    "A head that decides in a few steps of 512 may choose another action in each": [
        Course("policy/action_shift", told, shifted(decided), since=1) for decided, told in ((1.0, True), (0.005, False))
    ],
    "Ratios that spread by 0.005 have no direction: with either sign of the gain, no action becomes much rarer": [
        Course("policy/wrong_direction", False, {GAIN: -0.0015, "policy/ratio/std": 0.005})
    ],
    "A policy that a dominant critic carries along goes in no direction of its own": [
        Course("policy/wrong_direction", False, {GAIN: -0.02, "grad/interference/critic_share": 0.9999})
    ],
    "Healthy updates lower their own objective by chance": [
        Course("policy/wrong_direction", told, first(updates, **{GAIN: gain}))
        for gain, updates, told in ((-0.02, 2, False), (-0.02, 3, True), (-0.2, 1, False), (-0.2, 2, True))
    ],
    "Clipping absorbs a spike, unless nothing clips": [
        Course("grad/explode", False, first(1, **{NORM: 600.0})),
        Course("grad/explode", True, first(2, **{NORM: 600.0})),
        Course("grad/explode", SINCE, first(1, **{NORM: 600.0}), facts=UNCLIPPED),
    ],
    "A saturated memory rounds more once; a policy without memory does not": [
        *(
            Course(RATIO, told, first(updates, **{RATIO: value}))
            for value, updates, told in ((1e-4, 1, False), (1e-4, 2, True), (0.1, 1, True))
        ),
        Course(RATIO, SINCE, feed_forward, since=0, facts={**FACTS, "policy": "mlp"}),
    ],
    "Cosines with a mean of -0.4 oppose each other at 12 standard errors from 0, and not at 2": [
        Course("grad/oscillation", told, opposed(scatter), 60) for scatter, told in ((0.1, True), (0.6, False))
    ],
    "A period of five updates of 32 steps is the rhythm of episodes of 500 steps, and not of 10": [
        Course(
            "grad/oscillation",
            told,
            {"policy/kl/period/p": 1e-12, "policy/kl/period/length": 5.0, "episode/length_mean": length},
            60,
            facts={**FACTS, "horizon": 1000},
        )
        for length, told in ((10.0, True), (500.0, False))
    ],
    "A learning rate that swings is an oscillation unless it follows the KL": [
        Course("grad/oscillation", True, rate(5, 5, 1, 1), 60),
        Course("grad/oscillation", False, rate(5, 5, 1, 1), 60, facts={**FACTS, "desired_kl": 0.01}),
    ],
    "A cosine of twenty updates that restarts is a schedule": [
        Course(None, False, rate(*(0.05 + 0.95 * (1 - place / 20) for place in range(20))), 150, since=1)
    ],
    "A linear warm-up begins at 0; a rate that stays 0 is a mistake": [
        Course(None, False, warmed_up, since=1),
        Course("opt/stalled_weights", 6, {"opt/lr": 0.0, "policy/kl_max": 1e-6}, 20, since=1, alone=True),
    ],
    "A rate that grows by 3 % per update is a drift, 1.16 times as large after five updates, unless it follows the KL": [
        Course("grad/drift", SINCE + 8, creeping, 60, facts={**FACTS, "learning_rate": 2.5e-3}, alone=True),
        Course(None, False, creeping, 60, facts={**FACTS, "learning_rate": 2.5e-3, "desired_kl": 0.01}),
    ],
    "A factor that is applied after rewards are measured shows in returns": [
        Course("value/scale_shift", SINCE, multiplied({"ret/mean": 1e4, "ret/std": 1e4}), alone=True)
    ],
    "If a policy that rarely fails fails again, returns spread at almost the same mean": [
        Course("value/scale_shift", False, multiplied({"ret/std": 1e3}))
    ],
    "Rewards shrink because the worst are avoided": [
        Course("value/scale_shift", False, multiplied({"reward/absmax": 0.2, "reward/mean": 0.1}))
    ],
    "Environments start together, and a balanced pole costs almost nothing in the last 3 or 6 updates of eight": [
        Course("value/scale_shift", False, in_phase(small), 200, since=1) for small in (3, 6)
    ],
    "Rewards that stay small when the next episode begins have changed their scale": [Course("value/scale_shift", 57, fallen, 80, since=1)],
    "A loss of 40 is usual in a history of three decades, but recent losses are 0.1 and rewards are four times as large": [
        Course("value/loss_jump", 30, learned_fast, since=1, alone=True)
    ],
    "A critic that climbs slowly over the whole run is left alone": [
        Course("value/never_fits", told, slow_critic(climbs=climbs), 89, since=1) for climbs, told in ((True, False), (False, True))
    ],
    "A critic that was right before is biased": [Course("value/bias", True, WRONG_CRITIC, 60)],
    "A normaliser that cuts is reported at once": [Course("norm/drift", SINCE, {"norm/obs/clip_frac": 0.15}, alone=True)],
    "An actor that Adam's epsilon swallows is starved from the start, so no history differs": [
        Course("grad/actor_starved", 2, STARVED, 5, since=1),
        Course(None, False, {**STARVED, "grad/interference/actor_effective": 1e-4}, 5, since=1),
    ],
    "Advantages that are off by 0.03 for five updates, as if rows were left out; rounding leaves 0.0005": [
        Course("integrity/adv_norm", SINCE + 1, {"integrity/adv_norm": 0.03}, facts=ROLLOUT, alone=True),
        Course(None, False, {"integrity/adv_norm": 0.03}, facts=MINIBATCHES),
    ],
}


@pytest.mark.parametrize("course", parameters(COURSES))
def test_alarms_of(course: Course) -> None:
    check(course)


def test_a_mismatch_between_the_bounds_warns_and_raises_no_level() -> None:
    verdicts = judged(run(40, set_to({RATIO: 1e-4})))

    (alarm,) = alarms(verdicts)
    assert alarm.level is AlarmLevel.WARN
    assert {verdict.remaining for verdict in verdicts} == {0}


def test_a_critic_that_was_never_right_learns_slowly_and_is_not_biased() -> None:
    assert "value/bias" not in raised(judged(run(90, set_to(WRONG_CRITIC))[SINCE:]))


def test_a_learning_rate_that_swings_between_a_tenth_and_ten_times_its_value_is_an_oscillation_at_the_third_swing() -> None:
    assert SINCE + 6 <= raised(judged(run(60, rate(10, 10, 1, 0.1, 0.1, 1))))["grad/oscillation"] <= SINCE + 10


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


def test_records_that_are_missing_make_no_further_passes() -> None:
    """From update 40 on the journal holds only every sixteenth update, so records are sixteen times as many steps apart."""
    sparse = [entry for entry in run(200, multiplied({"policy/kl": 4}), since=40) if entry.seq < 40 or entry.seq % 16 == 0]

    assert "policy/kl_spike" not in raised(judged(sparse))


@pytest.mark.parametrize(("rows", "told"), [(8, False), (512, True)])
def test_few_rows_are_normalised_as_well_as_they_can_be(rows: int, told: bool) -> None:
    """Division by the unbiased standard deviation leaves eight rows with one of 0.935."""
    few = [
        replace(entry, axes=replace(entry.axes, env_step=entry.seq * rows))
        for entry in run(40, set_to({"integrity/adv_norm": 0.0323, "adv/norm/std": 0.935}), since=1)
    ]

    assert ("integrity/adv_norm" in raised(judged(few, ROLLOUT))) is told


@pytest.mark.parametrize(("std", "blamed"), [(0.0009, True), (0.13, False)])
def test_a_kl_that_a_tiny_standard_deviation_makes_large_is_put_down_to_it(std: float, blamed: bool) -> None:
    spread = {"policy/head/op/std/mean": std, "policy/head/op/std_of_range": std}
    records = run(3, set_to({"policy/kl": 1000.0, "policy/clip_frac": 0.99, **spread}), since=1)

    (alarm,) = [alarm for alarm in alarms(judged(records)) if alarm.type == "policy/kl_spike"]

    assert ("Raise the standard deviation" in alarm.text) is blamed
    assert ("Lower the learning rate" in alarm.text) is not blamed


def test_what_is_not_finite_is_named_where_it_came_from() -> None:
    spoiled = set_to({"numerics/nonfinite": 9.0, "grad/global/norm_preclip_nonfinite": 4.0, "reward/nonfinite": 1.0})

    (alarm,) = alarms(judged(run(30, spoiled)))

    assert alarm.text.startswith("Since update 30, 9 numbers have been NaN or infinite, for example in reward, grad/global")


def test_gates_that_were_open_count_as_open_until_they_are_measured_again() -> None:
    """Gates are measured in every tenth update: open in the first measurement, as usual in the second."""

    def sometimes(metrics: Values, ago: int) -> None:
        metrics["lstm/gate/f/sat_hi"] = 0.99 if ago < 10 else 0.2
        if ago % 10:
            del metrics["lstm/gate/f/sat_hi"]

    changes = [(alarm.event, alarm.axes.update) for alarm in alarms(judged(run(60, sometimes)))]

    assert changes == [(AlarmEvent.RAISE, SINCE), (AlarmEvent.CLEAR, SINCE + 12)]


def test_a_small_cell_state_shows_a_shut_gate_where_gates_were_not_measured() -> None:
    def never(metrics: Values, _: int) -> None:
        metrics.pop("lstm/gate/f/sat_lo", None)

    unseen = set_to({**SEEN_OPEN, "lstm/gate/f/sat_lo": None, "lstm/timescale/median": None})
    blind = [*run(SINCE - 1, never, since=1), *run(40, unseen)[SINCE - 1 :]]
    assert raised(judged(blind))["lstm/forget_closed"] == SINCE + 1


def test_what_a_look_at_the_gates_has_refuted_is_not_inferred_again() -> None:
    """Cell states double occasionally over long episodes, while every tenth update measures gates that are in use."""

    def bursts(metrics: Values, ago: int) -> None:
        if ago % 10:
            del metrics["lstm/gate/f/sat_hi"]
        if ago % 10 in (5, 6):
            metrics["lstm/c/rms"] *= 2 + ago / 10
            metrics["lstm/c_growth"] = 1.6

    told = [alarm for alarm in alarms(judged(run(90, bursts)), AlarmEvent.RAISE) if alarm.type == "lstm/forget_open"]

    assert [alarm.axes.update for alarm in told] == [SINCE + 5]


def test_a_cell_state_about_its_bound_is_one_alarm() -> None:
    """It varies between 40 and 60 around the bound of 50: the alarm stays active until the state is much smaller."""

    def swing(metrics: Values, ago: int) -> None:
        metrics["lstm/c/absmax"] = 40.0 + 20.0 * (ago % 2)

    told = [alarm for alarm in alarms(judged(run(60, swing))) if alarm.type == "lstm/cell_drift"]

    assert [alarm.event for alarm in told] == [AlarmEvent.RAISE]


def test_a_normaliser_settles_again_after_what_was_changed_on_purpose() -> None:
    """Rewards rescaled at update 50 move their normaliser for thirty more updates."""
    detectors = Detectors({**FACTS, "total_steps": None})
    verdicts = []
    for record in run(85, set_to({"norm/ret/drift": 1.0}), since=51):
        if record.seq == 51:
            detectors.intervention()
        verdicts.append(detectors.step(record))

    assert "norm/drift" not in raised(verdicts)
    assert raised(judged(run(85, set_to({"norm/ret/drift": 1.0}), since=51)))["norm/drift"] == 60


def test_groups_of_a_solved_task_have_no_advantages() -> None:
    """Ever fewer groups have rewards that differ, until none has; a trainer that suddenly loses them all has a fault."""

    def solved(metrics: Values, ago: int) -> None:
        metrics.update({"adv/participation": 0.05} if ago < 5 else {"adv/norm/std": 0.0, "grad/global/norm_preclip": 1e-4})
        if ago >= 5:
            metrics.pop("adv/participation", None)

    def lost(metrics: Values, ago: int) -> None:
        metrics["adv/norm/std"] = 0.0
        metrics.pop("adv/participation", None)

    assert not {"adv/degenerate", "grad/drift"} & {alarm.type for alarm in alarms(judged(run(45, solved)))}
    assert "adv/degenerate" in {alarm.type for alarm in alarms(judged(run(45, lost)))}


def test_a_rare_reward_is_no_jump_of_the_critics_loss() -> None:
    """The critic's loss jumps with the rewards, which are all equal in the other rollouts; or alone, which is a fault."""

    def jumps(spread: float) -> set[str]:
        def rare(metrics: Values, ago: int) -> None:
            metrics.update({"loss/value": 60.0 * metrics["loss/value"], "reward/std": spread})

        records = [
            replace(one, values={**one.values, "reward/std": 0.0}) if one.axes.update < SINCE else one for one in run(SINCE + 2, rare)
        ]
        return {alarm.type for alarm in alarms(judged(records))}

    assert "value/loss_jump" not in jumps(spread=0.9)
    assert "value/loss_jump" in jumps(spread=0.0)


def test_a_critic_needs_optimizer_steps_before_its_bias_counts() -> None:
    """A2C takes one step in each update."""
    far = {"value/bias": 2.0, "value/bias_over_std": 2.0, "ret/mean": 0.0, "ret/std": 1.0}

    def first_update(steps: int) -> int:
        records = [replace(one, axes=replace(one.axes, gradient_step=steps * one.axes.update)) for one in run(60, set_to(far), since=12)]
        return raised(judged(records)).get("value/bias", 0)

    assert 12 <= first_update(steps=32) < 30
    assert first_update(steps=1) == 0
