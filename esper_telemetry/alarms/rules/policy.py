"""The policy: no steps at all, and steps backwards."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.alarms.rule import Finding, Rule, View, hard, number, percent
from esper_telemetry.alarms.rules.optimizer import stopped_on_purpose

CARRIED = 0.98
"""Critic's share of the squared gradient from which on a shared network follows the critic alone."""


SPARSE = 0.05
"""Share of the steps in which a head decides, below which its statistics are noise."""


def kl_stall(view: View) -> Iterator[Finding]:
    """The policy does not move, although it is told to."""
    key, bound = "policy/kl_max", view.limits.kl_stall
    annealed = stopped_on_purpose(view)
    value, rate = view.get(key), view.get("opt/lr")
    if value is None:
        return
    yield Finding(
        hard(value < bound and not annealed),
        key,
        value,
        bound,
        text=lambda: (
            f"the policy has not moved: its KL divergence is {number(value)} nats at most"
            + ("" if rate is None else f", at a learning rate of {number(rate)}")
        ),
    )


STILL = 0.01
"""Spread of the ratios below which an update has hardly moved the policy, and the signs of what it moved are chance."""

TRANSITIONS = 512
"""Of an update, where nobody counts them: correlations of as many differ from 0 by the inverse of their root, by chance."""


BY_CHANCE = 4.0
"""Times that by which two correlations together must differ from 0."""


def wrong_direction(view: View) -> Iterator[Finding]:
    """Updates make good actions rarer: at once where advantages and ratios clearly point against each other, else at the second."""
    key, limits = "policy/surrogate_gain", view.limits
    value, spread, kl = view.get(key), view.get("policy/ratio/std"), view.get("policy/kl_max")
    if value is None:
        return
    before, view.memory["against"] = view.memory.get("against", 0.0), 0.0
    if (kl is not None and kl < limits.kl_stall) or (spread or 0.0) < STILL or carried_along(view):
        yield Finding(0.0, key, value)
        return
    against = max(0.0, (limits.wrong_direction - value) / spread) if spread else 0.0
    view.memory["against"] = against
    chance = (view.transitions or TRANSITIONS) ** -0.5
    small = (view.get("policy/kl") or 0.0) < limits.kl_spike_low
    once = small and against > max(limits.wrong_direction_correlation, 6 * chance)
    twice = min(against, before) > 0 and against + before > max(2 * limits.wrong_direction_least, BY_CHANCE * chance)
    yield Finding(
        hard(once or twice),
        key,
        value,
        limits.wrong_direction,
        z=view.z(key),
        text=lambda: (
            f"updates have made good actions rarer and bad ones likelier: they lower their own "
            f"objective by {number(-value)}{view.usual(key)}"
        ),
    )


def carried_along(view: View) -> bool:
    """Whether the policy goes wherever the critic leads a network that they share, or anywhere, since it has filled the clip limit."""
    if (view.get("grad/interference/critic_share") or 0.0) <= CARRIED:
        return False
    shared = bool(dict(view.facts.get("groups") or {}).get("shared"))
    return shared or view.baselines.shift.get("grad/clip/coef", 0.0) < -view.limits.clip_fall


def dead_head(view: View) -> Iterator[Finding]:
    """A head with choices to make gets no gradient."""
    for head, key, value in view.labelled("grad/head/", "/norm"):
        decides = view.get(f"policy/head/{head}/decision_frac")
        if decides is None or decides < SPARSE:
            continue
        yield Finding(
            hard(value == 0),
            key,
            value,
            0.0,
            instance=head,
            text=lambda head=head, decides=decides: (  # type: ignore[misc]  # the loop's values at this time
                f"the head {head} has got no gradient at all, though it decides in {percent(decides)} of the steps"
            ),
        )


RULES = (
    Rule(
        type="policy/dead_head",
        judge=dead_head,
        inputs=("grad/global/norm_preclip",),
        n_on=3,
        certain=True,
        n_off=1,
        duration=5,
        evidence=("grad/head/*/norm", "policy/head/*/decision_frac"),
        source="exactly zero in three updates",
    ),
    Rule(
        type="policy/kl_stall",
        judge=kl_stall,
        inputs=("policy/kl_max",),
        n_on=3,
        n_off=1,
        duration=3,
        evidence=("policy/kl*", "opt/lr", "grad/*/norm_preclip", "opt/update_to_weight*"),
        source="KL goes with the square of the learning rate: what a schedule has led to 5 % of its peak may stop.",
    ),
    Rule(
        type="policy/wrong_direction",
        judge=wrong_direction,
        inputs=("policy/surrogate_gain",),
        watches=("policy/surrogate_gain", "grad/clip/coef"),
        duration=5,
        evidence=("policy/surrogate_gain", "adv/norm/*", "loss/*", "opt/lr", "policy/kl*"),
        source="Single updates of healthy runs do so by chance, with correlations of up to 0.1: one in six of those that learn slowly.",
    ),
)
