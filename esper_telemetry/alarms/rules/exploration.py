"""Exploration: entropy lost too early, everywhere, or never; actions that change abruptly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import exp, log
from typing import Any

from esper_telemetry.alarms.rule import Finding, Rule, View, hard, number, percent, ramp

EARLY = 0.25
"""Share of the run in which entropy should not crash, and after which it should have fallen."""


LATEST = 3
"""Updates over which a sudden loss of entropy is told."""

UNSIGNED, SIGNS_APART = 0.01, 0.2
"""Nats of entropy whose sign is told from rounding, and relative distance between a loss and its entropy that says they have one sign."""

ENTROPIES = ("policy/entropy*", "policy/head/*/entropy_norm", "policy/action_mi", "loss/entropy")


def categorical(facts: Mapping[str, Any]) -> bool:
    """Whether any head chooses among actions."""
    heads = facts.get("heads")
    return not isinstance(heads, Mapping) or any(kind == "categorical" for kind in heads.values())


def entropy_collapse(view: View) -> Iterator[Finding]:
    """The policy does the same everywhere: little entropy, and little in the mix of its actions over all states."""
    limits = view.limits
    entropy, mix = view.get("policy/entropy_norm"), view.get("policy/entropy_marginal_norm")
    if entropy is not None and mix is not None:
        yield Finding(
            _collapsed(view, entropy, mix),
            "policy/entropy_norm",
            entropy,
            limits.entropy_collapse,
            text=lambda: (
                f"the policy does nearly the same everywhere: its entropy is {percent(entropy)} of the largest, "
                f"that of its actions over all states {percent(mix)}"
            ),
        )


def _collapsed(view: View, entropy: float, mix: float) -> float:
    """1 below both bounds, which would be the ramp's upper half; 0.3, which holds an alarm, until it has recovered."""
    limits = view.limits
    if entropy < limits.entropy_collapse and mix < limits.entropy_marginal:
        return 1.0
    return 0.3 if entropy < limits.entropy_clear and mix < limits.entropy_marginal else 0.0


def entropy_crash(view: View) -> Iterator[Finding]:
    """The policy makes up its mind abnormally early, over many updates or within three; or it is paid for doing so."""
    yield from punished_entropy(view)
    key, limits = "policy/entropy_rate", view.limits
    value, entropy, kl = view.get(key), view.get("policy/entropy_norm"), view.get("policy/kl")
    if value is None or entropy is None or view.progress is None:
        return
    latest = latest_fall(view)
    early = view.progress < EARLY and entropy < 0.5 and (kl or 0.0) > 0
    slow = ramp(-value, limits.entropy_crash_low, limits.entropy_crash_high)
    fast = ramp(latest, limits.entropy_plunge_low, limits.entropy_plunge_high)
    fall = latest if fast > slow else -value
    yield Finding(
        max(slow, fast) if early else 0.0,
        key,
        value,
        -(limits.entropy_crash_low + limits.entropy_crash_high) / 2,
        text=lambda: (
            f"the policy's entropy has been falling by {percent(1 - exp(-fall))} per update, to {percent(entropy)} of the largest, "
            f"after {percent(view.progress or 0.0)} of the run"
        ),
    )


def latest_fall(view: View) -> float:
    """By how much the logarithm of the entropy has fallen per update, over the last three; 0 before there are as many."""
    entropy = view.get("policy/entropy_norm")
    if entropy is None or entropy <= 0:
        return 0.0
    seen = view.memory.setdefault("entropies", [])
    seen.append(log(entropy))
    del seen[: -LATEST - 1]
    return float(seen[0] - seen[-1]) / LATEST if len(seen) > LATEST else 0.0


def punished_entropy(view: View) -> Iterator[Finding]:
    """The entropy enters the loss with the wrong sign, or with a weight that has become negative."""
    loss, entropy, weight = view.get("loss/entropy"), view.get("policy/entropy"), view.get("loss/entropy_coef")
    if loss is None or entropy is None or weight == 0:
        return
    known = abs(entropy) > UNSIGNED
    flipped = known and abs(loss - entropy) < SIGNS_APART * abs(entropy)
    negative = weight is not None and weight < 0 <= float(view.facts.get("entropy_coef") or 0.0)
    yield Finding(
        hard(flipped or negative),
        "loss/entropy",
        loss,
        -entropy,
        instance="sign",
        claim=True,
        text=lambda: (
            f"exploring has been punished instead of rewarded: the entropy is {number(entropy)}, and in the loss stands "
            + (
                f"{number(loss)} instead of {number(-entropy)}"
                if flipped
                else f"{number(weight or 0.0)} times its bonus"
            )
        ),
    )


def entropy_explosion(view: View) -> Iterator[Finding]:
    """The policy has become random again, or stays so because clipping leaves the actor nothing."""
    limits = view.limits
    entropy, kl, coef = view.get("policy/entropy_norm"), view.get("policy/kl"), view.get("grad/clip/coef")
    if entropy is None or kl is None or view.progress is None:
        return
    lowest = view.memory["lowest"] = min(view.memory.get("lowest", 1.0), entropy)
    share = view.get("grad/interference/critic_share") or 0.0
    rose = lowest < limits.entropy_was
    starved = coef is not None and coef < limits.entropy_starved and share > limits.starved_share
    wrong = view.progress > EARLY and 1 - entropy < limits.entropy_explosion and (rose or starved)
    told = f"from {percent(lowest)} before" if rose else f"and clipping leaves {percent(coef or 0.0)} of the gradient"
    yield Finding(
        hard(wrong),
        "policy/entropy_norm",
        entropy,
        1 - limits.entropy_explosion,
        text=lambda: (
            f"the policy is random: its entropy is {percent(entropy)} of the largest, {told}, and updates move it by {number(kl)} nats"
        ),
    )


def action_shift(view: View) -> Iterator[Finding]:
    """The mix of actions changed abruptly."""
    key, low, high = "policy/action_shift_js", view.limits.action_shift_low, view.limits.action_shift_high
    value = view.get(key)
    if value is not None:
        by_chance = 1 / view.transitions if view.transitions else 0.0  # of the samples of two rollouts
        yield Finding(
            ramp(value - by_chance, low, high),
            key,
            value,
            (low + high) / 2 + by_chance,
            text=lambda: (
                f"the mix of actions has changed abruptly, by a Jensen-Shannon divergence of {number(value)} (usually below 0.02)"
            ),
        )


RULES = (
    Rule(
        type="policy/entropy_collapse",
        judge=entropy_collapse,
        inputs=("policy/entropy_norm", "policy/entropy_marginal_norm"),
        applies=categorical,
        warmup=10,
        n_on=3,
        duration=5,
        evidence=ENTROPIES,
        source="Solved tasks end with 0.05 too, but with all of their actions in use: both entropies count.",
    ),
    Rule(
        type="policy/entropy_crash",
        judge=entropy_crash,
        inputs=("policy/entropy_rate", "policy/entropy_norm"),
        facts=("total_steps",),
        warmup=5,
        n_on=2,
        duration=5,
        evidence=ENTROPIES,
        relative=True,
        source="only where half of the entropy is gone: short runs learn simple tasks within a quarter of their time. "
        "A loss of entropy is minus the entropy, in every trainer: where it is the entropy, the sign is wrong.",
    ),
    Rule(
        type="policy/entropy_explosion",
        judge=entropy_explosion,
        inputs=("policy/entropy_norm", "policy/kl"),
        facts=("total_steps",),
        applies=categorical,
        n_on=10,
        n_off=5,
        duration=3,
        evidence=ENTROPIES,
        source="SB3#2240. Sparse tasks and low learning rates stay random for long: it must have been lower, or the "
        "critic must fill the clip limit.",
    ),
    Rule(
        type="policy/action_shift",
        judge=action_shift,
        inputs=("policy/action_shift_js",),
        applies=categorical,
        warmup=5,
        n_off=2,
        duration=3,
        evidence=("policy/action_shift_js", "policy/head/*/action_shift_js", "policy/kl*", "policy/entropy_norm"),
        source="healthy runs stay below 0.03",
    ),
)
