"""Correct programs and published settings that look wrong, and slow faults next to healthy courses that resemble them."""

from collections.abc import Mapping

import pytest
from courses import Course, check, parameters, whole
from healthy_run import FACTS, Number, Spoil, Values, both, judged, later, multiplied, raised, returns, run, set_to, with_steps

from esper_telemetry.alarms.diagnosis import described_keys
from esper_telemetry.alarms.rule import patience_factor
from esper_telemetry.alarms.verdict.bounds import critical_values
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.record import AlarmLevel

SINCE = 30
RISES, LEVEL = returns(5.0, 400.0), returns(5.0, 5.0)
TINY = {**FACTS, "num_envs": 1, "num_steps": 8, "total_steps": None}
UNKNOWN_LENGTH = {name: value for name, value in FACTS.items() if name != "total_steps"}
FIT = ("value/explained_variance", "value/r2")
ARG = ("policy/head/arg/entropy_norm", "policy/head/arg/entropy_marginal_norm")
VARIED_HEAD = set_to(dict(zip(ARG, (0.9, 0.95), strict=True)))
ONE_HEAD = both(VARIED_HEAD, later(SINCE, set_to(dict(zip(ARG, (0.02, 0.1), strict=True)))))
LOST_HEAD = both(VARIED_HEAD, later(40, set_to(dict.fromkeys(ARG, 0.0))))
LOW_ENTROPY = later(SINCE, set_to({"policy/entropy_norm": 0.25, "policy/entropy_marginal_norm": 0.4}))
ONE_ACTION = later(20, set_to({"policy/entropy_norm": 0.02, "policy/entropy_marginal_norm": 0.02}))
OUTSIDE = {"policy/clip_frac": 0.6, "policy/kl": 0.04}
DOUBLES: Mapping[str, Number] = {"policy/clip_frac": lambda ago: 0.3 if ago < 40 else 0.6, "policy/kl": 0.04}
RANDOM = {"policy/entropy_norm": 0.995, "policy/surrogate_gain": -0.03}
WIDE = {"adv/norm/mean": -50.0, "adv/norm/std": 100.0, "policy/ratio/mean": 1.001}
STILL = {"policy/kl_max": 1e-15, "policy/kl": 1e-15, "policy/kl_exact": 0.0}
STARVED = {"grad/interference/actor_effective": 1e-6, "grad/interference/critic_share": 0.9999}
ONE_SEED = {"seed/exploding": 0.9, "seed/largest/environment": 3.0, "seed/largest/slot": 1.0, "seed/exploding_frac": 0.01}
OLD_SEED = {"seed/exploding_sustained": None, "seed/exploding": 0.9}
EQUAL_RETURNS = {"value/r2": -100.0, "value/explained_variance": -1.0, "value/bias": 0.1, "value/err/std": 0.01}


def falls(key: str, start: float, factor: float, least: float) -> Spoil:
    return set_to({key: lambda ago: max(least, start * factor**ago)})


FAR_OFF = {"value/r2": -5.0, "value/err/std": 1.0, "ret/mean": 2.0, "ret/std": 1.0}
TWO_ROWS = {"integrity/adv_norm": 0.146, "adv/norm/std": 0.707, "adv/minibatch_rows": 2.0}
GRADIENTS = [key for key in run(1)[0].values if key.startswith(("grad/", "opt/update"))]
SMALL = "the largest entry of the observations is about 0.02"


def restart(metrics: Values, ago: int) -> None:
    metrics["opt/lr"] *= 1.0 if ago % 20 == 19 else 0.1
    if ago % 20 == 19:
        metrics["policy/surrogate_gain"] = -0.03


def explains(fit: Number, loss: Number) -> Spoil:
    return set_to({**dict.fromkeys(FIT, fit), "value/loss_norm": loss})


def slow(kl: float) -> Spoil:
    return set_to({"policy/kl_max": kl, "policy/kl": kl / 2})


def decided(entropy: float) -> Spoil:
    return later(41, set_to({"policy/kl_max": 0.0, "policy/kl": 0.0, "policy/entropy_norm": entropy}))


def survives(cut: float, paid: float) -> Spoil:
    """From update 41 on, all episodes last a thousand steps."""
    ends = {"reward/std": 0.0, "reward/mean": paid, "reward/absmax": paid, "episode/truncated_frac": cut, "episode/length_mean": 1000.0}
    return both(set_to({"episode/length_mean": 10.0, "reward/absmax": 1.0}), later(40, set_to(ends)))


def shifted(shift: float) -> Spoil:
    return set_to({"policy/action_shift_js": lambda ago: shift if ago == 40 else 0.01})


def behind(off: float, rate: float) -> Spoil:
    error = later(20, set_to({"value/bias": off, "value/bias_over_std": off / 4}))
    return both(set_to({"ret/mean": lambda update: 2.0 + rate * update}), error)


def rolled_back(*environments: int) -> dict[str, float]:
    hosts = {f"host/each/{env}/rollbacks": 1.0 for env in environments}
    return {"env/rollbacks": float(len(hosts)), "env/rollback/nonfinite": float(len(hosts)), **hosts}


def penalised(metrics: Values, ago: int) -> None:
    metrics.update({"loss/penalty_coef": min(1000.0, 2.0**ago), "policy/kl_max": 0.01 / 4**ago})


def moved_before(metrics: Values, ago: int) -> None:
    """The distributions were only measured in the last update at the old rate, which moved them."""
    metrics.update({"policy/kl_exact": 0.0045} if ago == 0 else {"policy/kl_max": 1e-9, "policy/kl": 1e-9, "opt/lr": 1e-6})


def unreported(metrics: Values, update: int) -> None:
    """Explained variance falls from 0.97 to 0, and the error rises from 0.015 to 0.5 of the variance of returns; no loss is known."""
    del metrics["loss/value"]
    fit, loss = (0.97, 0.015) if update < SINCE else (0.001, 0.5)
    metrics.update({**dict.fromkeys(FIT, fit), "value/loss_norm": loss})


COURSES: Mapping[str, list[Course]] = {
    "A gradient falls to a thirtieth as the task is solved, and without a rise of the return": [
        whole("grad/drift", told, both(later(50, multiplied({"grad/global/norm_preclip": 1 / 30})), course), 90)
        for course, told in ((RISES, False), (LEVEL, True))
    ],
    "A small script may spend its time on telemetry": [
        whole("telemetry/overhead", told, {"perf/telemetry_frac": share, "perf/telemetry_ms": milliseconds})
        for share, milliseconds, told in ((0.45, 75.0, False), (0.28, 2000.0, True), (0.8, 5.0, False))
    ],
    "HalfCheetah's published clip of 0.1: half of the samples are outside of it at a KL of 0.009": [
        Course("policy/clip_saturation", False, {"policy/clip_frac": 0.5, "policy/kl": 0.009}, 60)
    ],
    "Walker2d's published 20 passes leave 0.6 outside throughout, which a rising return excuses": [
        whole("policy/clip_saturation", told, both(set_to(OUTSIDE), course)) for course, told in ((RISES, False), (LEVEL, True))
    ],
    "A share outside the trust region that doubles is critical if the return has not risen": [
        whole("policy/clip_saturation", range(41, 61), both(set_to(DOUBLES), course), level=level)
        for course, level in ((RISES, AlarmLevel.WARN), (LEVEL, AlarmLevel.CRITICAL))
    ],
    "Acrobot, solved, in rollouts of 16 steps in four environments: actions shift by 0.22 once in 312 updates": [
        whole("policy/action_shift", told, shifted(shift), env_steps=64, facts={**FACTS, "num_envs": 4, "num_steps": 16})
        for shift, told in ((0.22, False), (0.5, True))
    ],
    "A memory that learns grows from 0.1 to 2.5 within fifty updates, by a fifteenth in each": [
        whole("lstm/cell_drift", False, {"lstm/c/rms": lambda ago: min(2.5, 0.1 * 1.068**ago)}, 90)
    ],
    "Advantages of -50 ± 100 that are not normalised: a gain of -0.05 is noise, -8 is a wrong direction": [
        Course("policy/wrong_direction", told, {**WIDE, "policy/surrogate_gain": gain}, facts={**FACTS, "normalize_advantages": False})
        for gain, told in ((-0.05, False), (-8.0, True))
    ],
    "The first steps of a schedule that restarts in every twentieth update lower the objective": [
        Course("policy/wrong_direction", False, restart, 80)
    ],
    "Entropy varies between 0.8 and 1 from update to update, then stays close to 1, while nothing is rewarded": [
        whole("policy/entropy_explosion", False, {"policy/entropy_norm": lambda ago: 0.8 + 0.05 * (ago % 4) if ago < 40 else 0.99}, 90)
    ],
    "A dominant bonus keeps actions random, and then advantages do not determine where the policy moves": [
        whole(alarm, told, {**RANDOM, "loss/entropy_coef": weight}, facts={**FACTS, "total_steps": 60 * 512})
        for alarm, weight, told in (
            ("policy/entropy_explosion", 10.0, True),
            ("policy/wrong_direction", 10.0, False),
            ("policy/entropy_explosion", 0.01, False),
            ("policy/wrong_direction", 0.01, True),
        )
    ],
    "A standard deviation falls to 0.0025 while the return stays at 5; a run that learns ends at 0.1": [
        whole("policy/std_collapse", told, both(falls("policy/head/op/std/mean", 0.8, 0.9, std), returns(5.0, end)), 90)
        for std, end, told in ((0.0025, 5.0, True), (0.1, 5.0, False), (0.1, 400.0, False))
    ],
    "One head of several chooses one action in 98 % of all states, which may be right in a learned task": [
        whole("policy/entropy_collapse", told, both(ONE_HEAD, returns(5.0, end)), text=("the head arg takes almost the same action",))
        for end, told in ((5.0, True), (50.0, False))
    ],
    "A head collapses in update 41, after a rise from 5 to 50; the return falls to 45 or rises to 55 from update 43 on": [
        whole("policy/entropy_collapse", told, both(LOST_HEAD, returns(5.0, 50.0), later(42, returns(after, after))), 80)
        for after, told in ((50.0, False), (45.0, 45), (55.0, False))
    ],
    "An entropy below 30 per cent warns where nothing is learned": [
        whole("policy/entropy_collapse", 33, both(LOW_ENTROPY, LEVEL), alone=True, level=AlarmLevel.WARN),
        whole(None, False, both(LOW_ENTROPY, returns(5.0, 50.0))),
    ],
    "A run may learn with an R² of -1, and R² may rise from -50 to -1 with large returns": [
        whole("value/never_fits", told, both(set_to({"value/r2": r2, "value/explained_variance": 0.5}), returns(5.0, end)))
        for r2, end, told in (
            (lambda ago: -5.0, 5.0, 30),
            (lambda ago: -50.0 * 0.93**ago - 1.0, 5.0, False),
            (lambda ago: -1.0, 5.0, 30),
            (lambda ago: -5.0, 50.0, 30),
            (lambda ago: -1.0, 50.0, False),
        )
    ],
    "A loop such as A2C has one step per update: its critic gives 0, or is off by ten times the returns": [
        whole("value/never_fits", told, both(set_to({**FAR_OFF, "value/bias": bias}), LEVEL), gradient_steps=steps)
        for bias, steps, told in ((-2.0, 1, False), (-2.0, 16, True), (-20.0, 1, True))
    ],
    "A critic that was never better than a constant has no fit to lose: episodes of other lengths have other variances": [
        whole(
            "value/fit_collapse",
            False,
            both(
                set_to({"value/explained_variance": 0.3, "value/r2": -0.1, "value/loss_norm": 0.6, "loss/value": 0.6}),
                later(SINCE, set_to({"value/loss_norm": 12.0, "loss/value": 12.0})),
            ),
        )
    ],
    "In a run of 100 updates, -0.23 is enough for the first 9 and 0 for the first 24; two of 30 updates may be worse": [
        whole("value/never_fits", update, explains(fit, 0.5), 100, facts=facts, alone=True, level=AlarmLevel.WARN)
        for fit, facts, update in ((-0.23, FACTS, 37), (0.0, FACTS, 52), (-0.23, UNKNOWN_LENGTH, 30), (0.0, UNKNOWN_LENGTH, 53))
    ],
    "Returns hardly vary; the error falls; the critic fits now and then; the fit rises; it explains 0.3": [
        whole(None, False, explains(fit, loss), 100)
        for fit, loss in (
            (0.0, 0.05),
            (0.0, lambda ago: 2 * 0.97**ago),
            (lambda ago: 0.0 if ago % 7 else 0.5, 0.5),
            (lambda ago: 0.003 * ago, 0.5),
            (0.3, 0.5),
        )
    ],
    "A loop that reports no losses learns that its critic has lost its fit, with a known length or in its own loop": [
        whole("value/fit_collapse", SINCE + 2, unreported, facts=facts) for facts in (FACTS, UNKNOWN_LENGTH)
    ],
    "All returns are 5 ± 0.01 and the critic is off by 0.1: R² is -100, but the error is 2 % of the returns": [
        whole("value/never_fits", False, {**EQUAL_RETURNS, "ret/std": 0.01})
    ],
    "A memory stays empty, fades away, or has nothing to remember": [
        *(
            whole("lstm/empty", told, changes, 20)
            for changes, told in (
                ({"lstm/h/rms": 1e-6}, True),
                ({"lstm/reset_rate": 1.0, "episode/length_mean": 50.0}, True),
                ({"lstm/reset_rate": 1.0, "episode/length_mean": 1.0}, False),
                ({"lstm/reset_rate": 0.86, "episode/length_mean": 7.0}, True),
                ({"lstm/reset_rate": 0.6, "episode/length_mean": 2.0}, False),
                ({"lstm/h/rms": 0.02}, False),
            )
        ),
        whole("lstm/empty", 35, {"lstm/h/rms": lambda ago: 0.2 if ago < 30 else 0.0015}, 50),
    ],
    "With returns of 5 ± 2, a critic is off by 80 at time limits, by 0.6 there, or everywhere because it has learned nothing yet": [
        whole("value/limit_bias", told, {"value/bias_truncated": ends, "value/bias": bias}, 15)
        for ends, bias, told in ((80.0, 0.05, True), (0.6, 0.05, False), (-80.0, -60.0, False))
    ],
    "Clipping leaves 60 % of the actor's gradient, which is a millionth already": [
        whole("grad/actor_starved", True, STARVED, 5, text=("[N] and [N, 1]", "!Normalise returns"))
    ],
    "A limit of 1e-5 leaves a hundred-thousandth of the actor's gradient of 1e-3": [
        whole(
            "grad/actor_starved",
            True,
            {**STARVED, "grad/interference/actor_effective": 1e-8, "grad/clip/coef": 1e-5},
            5,
            facts={**FACTS, "max_grad_norm": 1e-5},
            text=("Try: Raise max_grad_norm", "max_grad_norm is 1.0e-5; published settings range from"),
        )
    ],
    "A policy hardly moves for long": [
        whole("policy/kl_stall", told, both(slow(kl), returns(5.0, end)), text=("20 updates have hardly moved the policy",))
        for kl, end, told in ((1e-6, 5.0, True), (1e-6, 50.0, False), (1e-3, 5.0, False))
    ],
    "CartPole with 4 steps on 32 rows learns at a KL of 3e-6: a quarter of 16 steps gives a sixteenth of their KL": [
        whole("policy/kl_stall", told, both(slow(kl), LEVEL), gradient_steps=4) for kl, told in ((3e-6, False), (3e-7, True))
    ],
    "A2C: the ratios of the only minibatch are 1, and only sampled updates measure the effect of its step": [
        whole("policy/kl_stall", told, {**STILL, **moved}, 40, gradient_steps=1)
        for moved, told in (({"policy/kl_post": 0.003}, False), ({"policy/kl_post": 0.0}, True), ({}, False))
    ],
    "A KL of 4e-8 at a third of the learning rate equals 4e-7 at the full rate, where it is almost no movement": [
        Course("policy/kl_stall", told, both(set_to({"policy/kl_max": 4e-8}), multiplied({"opt/lr": factor})))
        for factor, told in ((0.3, False), (1.0, True))
    ],
    "Small observations explain a policy that does not move": [
        Course("policy/kl_stall", True, {"policy/kl_max": 4e-8, "obs/rms_max": 0.02}, text=(SMALL, "Scale observations to about 1"))
    ],
    "FrozenLake, solved: entropy is almost 0, and only the best action is sampled": [
        whole("policy/kl_stall", told, both(decided(entropy), returns(5.0, end)), 80)
        for end, entropy, told in ((50.0, 0.01, False), (50.0, 0.6, True), (5.0, 0.01, True))
    ],
    "InvertedPendulum, solved: 1 per step and 0 for a fall, until all episodes reach the time limit": [
        whole("reward/constant", told, both(survives(cut, paid), returns(5.0, 50.0)), 80)
        for cut, paid, told in ((1.0, 1.0, False), (0.0, 1.0, True), (1.0, 0.5, True))
    ],
    "KL is exactly 0 while the distributions move by 0.0045 nats: old log-probabilities are recomputed": [
        Course(
            "policy/kl_stall",
            True,
            {"policy/kl_max": 0.0, "policy/kl": 0.0, "policy/kl_exact": 0.0045},
            text=("although the policy has moved by 0.0045 nats", "!cannot learn"),
        )
    ],
    "A policy that moved before its learning rate fell stands still": [
        Course("policy/kl_stall", True, moved_before, text=("cannot learn", "!although the policy has moved"))
    ],
    "A policy that equals its old one exactly shares its weights with it": [
        Course("policy/kl_stall", True, {"policy/kl_max": 0.0}, text=("`copy.deepcopy`",))
    ],
    "A growing penalty holds a policy still": [
        whole("policy/kl_stall", True, penalised, 40, text=("the weight of the penalty on it has grown from", "it must fall"))
    ],
    "Densities whose entropy is unknown round more": [
        whole("integrity/ratio_init", told, {"integrity/ratio_init": 3e-4, **entropy}, 40, facts={**FACTS, "columns_by_name": True})
        for entropy, told in (({}, True), ({"policy/entropy": None}, False))
    ],
    "Returns that a script reports now and then are no ends of episodes": [
        whole("task/no_episodes", not told, {"episode/count": lambda ago: float(ago == 0)}, facts={**FACTS, "reported_returns": told})
        for told in (True, False)
    ],
    "A scripted controller reports a learning rate of 0 and no gradient, and a KL of 0.02 shows that weights move": [
        whole("opt/stalled_weights", False, {**dict.fromkeys(GRADIENTS), "opt/lr": 0.0}, 20),
        whole("opt/stalled_weights", True, {"opt/lr": 0.0, "policy/kl_max": 1e-6}, 20),
        whole("opt/stalled_weights", False, {"opt/lr": 0.0}, 20),
    ],
    "A schedule with a warm-up takes its first step at a rate of 0": [
        whole("opt/stalled_weights", told, {"opt/update_to_weight/encoder_weight": moved}, 20)
        for moved, told in ((lambda ago: 4e-3 * (ago > 0), False), (lambda ago: 4e-3 * (ago > 1), True))
    ],
    "By chance one minibatch of a seed exceeds sixty clip limits and one in a hundred ten, but not in three epochs in a row": [
        whole("seed/explode", False, ONE_SEED, 20),
        Course("seed/explode", True, {**ONE_SEED, "seed/exploding_sustained": 0.8}, text=("in environment 3, slot 1",)),
    ],
    "Earlier versions did not write `seed/exploding_sustained`; then five in a thousand seeds beyond ten clip limits decide": [
        whole("seed/explode", False, {**OLD_SEED, "seed/exploding_frac": 0.001}, 20),
        Course("seed/explode", True, {**OLD_SEED, "seed/exploding_frac": 0.01}),
    ],
    "Hosts that were rolled back are named": [
        Course("env/rollback", True, rolled_back(*environments), 31, text=(names,))
        for environments, names in (
            ([3], "in environment 3."),
            ([12, 0, 5], "in environments 0, 5 and 12."),
            (range(10), "in environments 0, 1, 2, 3, 4, 5, 6, 7 and 2 more."),
        )
    ],
    "An unbiased standard deviation of two rows leaves 0.71 in each minibatch: the cause is the number of rows": [
        whole("adv/signs", 2, TWO_ROWS, 20, alone=True, facts={**FACTS, "normalize_minibatches": True})
    ],
    "The whole policy takes one action from update 21 on, while the return goes from 5 to 50, or stays there": [
        whole("policy/entropy_collapse", told, both(ONE_ACTION, returns(5.0, end))) for end, told in ((50.0, False), (5.0, True))
    ],
    "A critic's error is 12, while the returns rise within ten updates by 9, or by 0.9": [
        whole("value/bias", told, behind(off, rate)) for off, rate, told in ((-12.0, 1.0, False), (12.0, 1.0, True), (-12.0, 0.1, True))
    ],
}


@pytest.mark.parametrize("course", parameters(COURSES))
def test_alarms_of(course: Course) -> None:
    check(course)


HOT = both(
    multiplied({"grad/actor/norm_preclip": lambda ago: 1.04**ago}), set_to({"grad/actor/severity_explode": lambda ago: min(1.0, ago / 200)})
)
LONG_COURSES: Mapping[str, list[Course]] = {
    "Half of 8 samples in every second update is a quarter on average; 0.6 in all updates stays 0.6": [
        whole("policy/clip_saturation", told, {"policy/clip_frac": share, "policy/kl": 0.04}, 200, facts=TINY, env_steps=8)
        for share, told in ((lambda ago: 0.5 * (ago % 2), False), (0.6, True))
    ],
    "A normaliser of two hundred updates of 8 steps, which are only 1,600 steps, has not settled yet": [
        whole("norm/drift", False, {"norm/obs/drift": 2.0}, 200, facts=TINY, env_steps=8),
        Course("norm/drift", True, {"norm/obs/drift": 2.0}, 80),
    ],
    "Gradients grow by 4 per cent, or 2.5 decades in 147 updates, and may grow with the returns": [
        whole("grad/slow_growth", range(147, 191), HOT, 260, facts={**FACTS, "total_steps": None}),
        whole(
            "grad/slow_growth",
            False,
            both(HOT, multiplied(dict.fromkeys(("ret/std", "ret/mean"), lambda ago: 1.04**ago))),
            260,
            facts={**FACTS, "total_steps": None},
        ),
    ],
}


@pytest.mark.system
@pytest.mark.parametrize("course", parameters(LONG_COURSES))
def test_alarms_of_long(course: Course) -> None:
    check(course)


def test_values_of_a_head_are_critical_by_the_bounds_of_their_metric() -> None:
    assert critical_values([record.values for record in run(80, LOST_HEAD, since=1)], described_keys()) == {ARG[0]: 0.0}


def test_rules_wait_longer_where_updates_are_small() -> None:
    """Eight updates of 8 steps are 64 steps; an identity does not wait."""
    critic = both(set_to({"value/r2": -1.0, "value/explained_variance": -0.9}), multiplied({"loss/value": 5}))

    assert patience_factor(Facts.of(TINY)) == 8 and patience_factor(Facts.of(FACTS)) == patience_factor(Facts()) == 1
    assert raised(judged(run(70, critic)))["value/fit_collapse"] == SINCE + 1
    assert raised(judged(with_steps(run(70, critic), env=8), TINY)).get("value/fit_collapse", 99) >= SINCE + 15
    broken = with_steps(run(40, set_to({"integrity/gae_identity": 0.1})), env=8)
    assert raised(judged(broken, TINY))["integrity/gae_identity"] == SINCE
