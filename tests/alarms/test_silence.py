"""Healthy courses that look wrong, next to the faults that they resemble, and second signs of faults whose first sign is missing."""

from collections.abc import Mapping
from functools import partial

import pytest
from courses import SINCE, Course, check, parameters, whole
from healthy_run import FACTS, Spoil, Values, alarms, both, judged, later, multiplied, raised, run, set_to

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


def rarely_missed(metrics: Values, ago: int, *, widens: bool = True) -> None:
    """Every third rollout of a solved task is even; failures make the others vary, and in the last ones they vary as ever."""
    if ago % 3 == 0 and ago < 60:
        metrics.update(
            {"value/target/std": 0.1 if widens else 10.0, "value/r2": 0.95, "value/explained_variance": 0.95, "loss/value": 0.004}
        )
    else:
        fit = -0.1 if ago >= 60 else 0.1
        metrics.update({"value/target/std": 10.0, "value/r2": fit, "value/explained_variance": min(fit, 0.0), "loss/value": 1.0})
    metrics["loss/value"] *= 40 if ago >= 60 else 1


def rare(metrics: Values, ago: int) -> None:
    if ago % 8:
        metrics.update({"reward/std": 0.0, "reward/mean": 0.0, "reward/absmax": 0.0})


def fades(metrics: Values, ago: int) -> None:
    metrics["lstm/c/rms"] *= 0.95**ago
    metrics["lstm/c/absmax"] = max(0.7, 6.0 * 0.95**ago)
    del metrics["lstm/gate/f/sat_lo"], metrics["lstm/timescale/median"]


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
    return multiplied({"opt/lr": lambda ago: factors[ago % len(factors)]})


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


def unmeasured(metrics: Values, ago: int) -> None:
    if ago % 10:
        del metrics["lstm/gate/f/sat_hi"]


def bursting(spread: float) -> Spoil:
    size = later(30, set_to({"lstm/c/rms": 2.1 * 10**spread * 1.6, "lstm/c_growth": 1.6}))
    return both(set_to({"lstm/c/rms": lambda ago: 2.0 * 10 ** (spread * ((ago % 5) / 2 - 1)), "lstm/gate/f/sat_hi": None}), size)


def groups_solved(metrics: Values, ago: int) -> None:
    metrics.update({"adv/participation": 0.05} if ago < 5 else {"adv/norm/std": 0.0, "grad/global/norm_preclip": 1e-4})
    if ago >= 5:
        metrics.pop("adv/participation", None)


SUCCESS = both(set_to({"reward/absmax": 0.1, "reward/mean": -0.03}), later(50, set_to({"reward/absmax": 100.0, "reward/mean": 0.3})))
SOLVED = multiplied(
    {"loss/value": lambda ago: 10 ** (-0.2 * min(ago, 60)), "grad/layer/value_weight/norm": lambda ago: 10 ** (-0.13 * min(ago, 60))}
)
CREEPING = multiplied({"opt/lr": lambda ago: 1.03 ** (ago + 1)})
EQUAL_RETURNS = {"value/r2": -2.0, "value/explained_variance": -1.0}
SURVIVAL = {"reward/std": 0.0, "reward/mean": 1.0, "reward/absmax": 1.0}
LENGTHS = {"episode/terminated_length_min": 4.0, "episode/terminated_length_max": 25.0}
SHUT = {"lstm/c/absmax": 0.98, "lstm/c_growth": -0.4, "lstm/gate/f/sat_lo": None}
STARVED = {"grad/interference/actor_effective": 1e-6, "grad/interference/critic_share": 0.9999}
WRONG_CRITIC = {"value/bias_over_std": 3.0, "value/bias": 30.0, "ret/mean": 10.0, "ret/std": 10.0}
NO_LAYERS = dict.fromkeys(("grad/layer/heads_op_weight/norm", "grad/layer/core_weight/norm"), 0.0)
NO_TOKENS = {**NO_LAYERS, "lm/tokens": 0.0, "lm/truncated_frac": 1.0}
SEEN_OPEN = {"lstm/c/absmax": 0.9, "lstm/c/rms": 0.8, "lstm/gate/f/sat_lo": 0.0, "lstm/timescale/median": 4.0}
UNSEEN = {**SEEN_OPEN, "lstm/gate/f/sat_lo": None, "lstm/timescale/median": None}
STD = ("policy/head/op/std/mean", "policy/head/op/std_of_range")
UNIT = {"ret/mean": 0.0, "ret/std": 1.0}
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
        Course("value/scale_shift", False, SUCCESS, 100, since=1)
    ],
    "An explained variance that falls because returns became equal is not a fault": [
        Course("value/fit_collapse", False, both(set_to(EQUAL_RETURNS), multiplied({"ret/std": 0.1, "loss/value": 0.05})), 100)
    ],
    "A critic's fit to returns that hardly vary does not count in rollouts in which they vary": [
        Course("value/fit_collapse", False, rarely_missed, 70, since=1),
        Course("value/fit_collapse", True, partial(rarely_missed, widens=False), 70, since=1),
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
        Course("grad/vanish", False, SOLVED, 160),
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
    "A critic's gradient reduces an actor's only if the sum is clipped": [
        Course(
            "grad/actor_starved",
            told,
            {"grad/interference/log_ratio": 2.5, "grad/interference/critic_share": 0.9999, "grad/clip/coef": left},
        )
        for left, told in ((1.0, False), (0.3, True))
    ],
    "An update whose advantages are all 0, as in a solved task with groups, has no gradient": [
        Course("grad/vanish", told, {**NO_LAYERS, "adv/norm/mean": 0.0, "adv/norm/std": std}) for std, told in ((0.0, False), (0.1, True))
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
    "A period of five updates of 32 steps is the rhythm of episodes of 160 and 500 steps, and not of 10": [
        Course(
            "grad/oscillation",
            told,
            {"policy/kl/period/p": 1e-12, "policy/kl/period/length": 5.0, "episode/length_mean": length},
            60,
            facts={**FACTS, "horizon": 1000},
        )
        for length, told in ((10.0, True), (160.0, False), (500.0, False))
    ],
    "A learning rate that swings is an oscillation unless it follows the KL": [
        Course("grad/oscillation", True, rate(5, 5, 1, 1), 60),
        Course("grad/oscillation", False, rate(5, 5, 1, 1), 60, facts={**FACTS, "desired_kl": 0.01}),
    ],
    "A cosine of twenty updates that restarts is a schedule": [
        Course(None, False, rate(*(0.05 + 0.95 * (1 - place / 20) for place in range(20))), 150, since=1)
    ],
    "A linear warm-up begins at 0; a rate that stays 0 is a mistake": [
        Course(None, False, multiplied({"opt/lr": lambda ago: min(1.0, ago / 10)}), since=1),
        Course("opt/stalled_weights", 6, {"opt/lr": 0.0, "policy/kl_max": 1e-6}, 20, since=1, alone=True),
    ],
    "A rate that grows by 3 % per update is a drift, 1.16 times as large after five updates, unless it follows the KL": [
        Course("grad/drift", SINCE + 8, CREEPING, 60, facts={**FACTS, "learning_rate": 2.5e-3}, alone=True),
        Course(None, False, CREEPING, 60, facts={**FACTS, "learning_rate": 2.5e-3, "desired_kl": 0.01}),
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
    "A critic that was right before is biased; one that was never right learns slowly": [
        Course("value/bias", True, WRONG_CRITIC, 60),
        whole("value/bias", False, WRONG_CRITIC),
    ],
    "A normaliser that cuts is reported at once": [Course("norm/drift", SINCE, {"norm/obs/clip_frac": 0.15}, alone=True)],
    "An actor that Adam's epsilon swallows is starved from the start, so no history differs": [
        Course("grad/actor_starved", 2, STARVED, 5, since=1),
        Course(None, False, {**STARVED, "grad/interference/actor_effective": 1e-4}, 5, since=1),
    ],
    "Advantages that are off by 0.03 for five updates, as if rows were left out; rounding leaves 0.0005": [
        Course("integrity/adv_norm", SINCE + 1, {"integrity/adv_norm": 0.03}, facts=ROLLOUT, alone=True),
        Course(None, False, {"integrity/adv_norm": 0.03}, facts=MINIBATCHES),
    ],
    "A mismatch between the bounds warns": [Course(RATIO, True, {RATIO: 1e-4}, level=AlarmLevel.WARN)],
    "A learning rate swings between a tenth and ten times its value, which is an oscillation at the third swing": [
        Course("grad/oscillation", range(SINCE + 6, SINCE + 11), rate(10, 10, 1, 0.1, 0.1, 1), 60)
    ],
    "Cell states that double from one update to the next are unusual for a steady state, but not for one that varies as much": [
        whole("lstm/forget_open", told, bursting(spread), 40) for spread, told in ((0.02, True), (0.3, False))
    ],
    "Division by the unbiased standard deviation leaves eight rows with one of 0.935": [
        whole("integrity/adv_norm", told, {"integrity/adv_norm": 0.0323, "adv/norm/std": 0.935}, 40, facts=ROLLOUT, env_steps=rows)
        for rows, told in ((8, False), (512, True))
    ],
    "A KL that a tiny standard deviation makes large is put down to it": [
        whole("policy/kl_spike", True, {"policy/kl": 1000.0, "policy/clip_frac": 0.99, **dict.fromkeys(STD, std)}, 3, text=texts)
        for std, texts in (
            (0.0009, ("Raise the standard deviation", "!Lower the learning rate")),
            (0.13, ("!Raise the standard deviation", "Lower the learning rate")),
        )
    ],
    "What is not finite is named where it came from": [
        Course(
            "numerics/nonfinite",
            SINCE,
            {"numerics/nonfinite": 9.0, "grad/global/norm_preclip_nonfinite": 4.0, "reward/nonfinite": 1.0},
            alone=True,
            text=("Since update 30, 9 numbers have been NaN or infinite, for example in reward, grad/global",),
        )
    ],
    "A small cell state shows a shut gate where gates were not measured": [
        whole("lstm/forget_closed", SINCE + 1, both(set_to({"lstm/gate/f/sat_lo": None}), later(SINCE - 1, set_to(UNSEEN))), 40)
    ],
    "Ever fewer groups have rewards that differ, until none has; a trainer that suddenly loses them all has a fault": [
        Course("adv/degenerate", False, groups_solved),
        Course("grad/drift", False, groups_solved),
        Course("adv/degenerate", True, {"adv/norm/std": 0.0, "adv/participation": None}),
    ],
    "The critic's loss jumps with the rewards, which are all equal in the other rollouts; or alone, which is a fault": [
        whole("value/loss_jump", told, both(set_to({"reward/std": 0.0}), later(SINCE - 1, jump), later(SINCE - 1, spread)), SINCE + 2)
        for jump in [multiplied({"loss/value": 60.0})]
        for spread, told in ((set_to({"reward/std": 0.9}), False), (jump, True))
    ],
    "A critic needs optimizer steps before its bias counts; A2C takes one step in each update": [
        Course("value/bias", told, {"value/bias": 2.0, "value/bias_over_std": 2.0, **UNIT}, 60, since=12, gradient_steps=steps)
        for steps, told in ((32, range(12, 30)), (1, False))
    ],
}


@pytest.mark.parametrize("course", parameters(COURSES))
def test_alarms_of(course: Course) -> None:
    check(course)


def test_records_that_are_missing_make_no_further_passes() -> None:
    """From update 40 on the journal holds only every sixteenth update, so records are sixteen times as many steps apart."""
    sparse = [entry for entry in run(200, multiplied({"policy/kl": 4}), since=40) if entry.seq < 40 or entry.seq % 16 == 0]

    assert "policy/kl_spike" not in raised(judged(sparse))


def test_gates_that_were_open_count_as_open_until_they_are_measured_again() -> None:
    """Gates are measured in every tenth update: open in the first measurement, as usual in the second."""
    sometimes = set_to({"lstm/gate/f/sat_hi": 0.99}), later(10, set_to({"lstm/gate/f/sat_hi": 0.2})), unmeasured

    changes = [(alarm.event, alarm.axes.update) for alarm in alarms(judged(run(60, both(*sometimes))))]

    assert changes == [(AlarmEvent.RAISE, SINCE), (AlarmEvent.CLEAR, SINCE + 12)]


def test_what_a_look_at_the_gates_has_refuted_is_not_inferred_again() -> None:
    """Cell states double occasionally over long episodes, while every tenth update measures gates that are in use."""

    def bursts(metrics: Values, ago: int) -> None:
        if ago % 10 in (5, 6):
            metrics["lstm/c/rms"] *= 2 + ago / 10
            metrics["lstm/c_growth"] = 1.6

    reported = alarms(judged(run(90, both(bursts, unmeasured))), AlarmEvent.RAISE)

    assert [alarm.axes.update for alarm in reported if alarm.type == "lstm/forget_open"] == [SINCE + 5]


def test_a_cell_state_about_its_bound_is_one_alarm() -> None:
    """It varies between 40 and 60 around the bound of 50: the alarm stays active until the state is much smaller."""
    reported = alarms(judged(run(60, set_to({"lstm/c/absmax": lambda ago: 40.0 + 20.0 * (ago % 2)}))))

    assert [(alarm.type, alarm.event) for alarm in reported] == [("lstm/cell_drift", AlarmEvent.RAISE)]


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
