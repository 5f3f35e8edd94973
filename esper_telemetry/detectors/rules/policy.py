"""The policy: steps too far, none at all, backwards."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.detectors.rule import Finding, Rule, View, decade_ramp, hard, number, percent, ramp, times
from esper_telemetry.detectors.rules.optimizer import stopped_on_purpose

CARRIED = 0.98
"""Critic's share of the squared gradient from which on a shared network follows the critic alone."""


SPARSE = 0.05
"""Share of the steps in which a head decides, below which its statistics are noise."""


RATIOS = ("policy/ratio/*", "policy/head/*/blame", "policy/head/*/ratio/*", "policy/logp/min", "policy/kl*", "opt/lr")


STEPS_SETTLE = 10
"""Updates after which their number of steps is known."""


def kl_spike(view: View) -> Iterator[Finding]:
    """One update moved the policy very far, or two in a row far; or two further than usual, with many more steps."""
    key, limits = "policy/kl", view.limits
    value = view.get(key)
    if value is None:
        return
    before = view.memory.get("kl", 0.0)
    view.memory["kl"] = value
    sudden = decade_ramp(value, limits.kl_sudden_low, limits.kl_sudden_high)
    lasting = decade_ramp(min(value, before), limits.kl_spike_low, limits.kl_spike_high)
    by_one = sudden >= lasting
    passes = many_steps(view)
    if passes is not None:
        yield further(view, min(value, before), passes)
    bounds = (limits.kl_sudden_low, limits.kl_sudden_high) if by_one else (limits.kl_spike_low, limits.kl_spike_high)
    yield Finding(
        max(sudden, lasting),
        key,
        value,
        (bounds[0] * bounds[1]) ** 0.5,
        z=view.z(key),
        text=lambda: f"updates have moved the policy by a KL divergence of {number(value)} nats{view.usual(key)}",
    )


def many_steps(view: View) -> float | None:
    """How many times the most optimizer steps of any update before this one has made; None before there are ten."""
    steps = view.steps
    if steps is None:
        return None
    most, updates = view.memory.get("most", 0), view.memory.get("updates", 0)
    times_most = steps / most if most > 0 and updates >= STEPS_SETTLE else None
    if times_most is None or times_most <= view.limits.passes:
        view.memory.update(most=max(most, steps), updates=updates + 1)
    return times_most


def further(view: View, kl: float, passes: float) -> Finding:
    """What more passes over a rollout than ever have made of the KL, the smaller one of two updates."""
    key, limits = "policy/kl", view.limits
    usual = view.baselines.median(key)
    times_usual = kl / usual if usual else 0.0
    low, high = limits.kl_passes_low, limits.kl_passes_high
    return Finding(
        decade_ramp(times_usual, low, high) if passes > limits.passes else 0.0,
        key,
        kl,
        usual and usual * (low * high) ** 0.5,
        adaptive=True,
        z=view.z(key),
        instance="passes",
        text=lambda: (
            f"updates have made {times(passes)} the steps of those before, and have moved the policy {times(times_usual)} as far as usual: "
            f"by a KL divergence of {number(kl)} nats{view.usual(key)}"
        ),
    )


def ratio_explosion(view: View) -> Iterator[Finding]:
    """A few samples decide the update: nearly all effective samples are lost at once, or many in two updates in a row."""
    limits = view.limits
    kept, largest = view.get("policy/ess_frac_min"), view.get("policy/ratio/max")
    if kept is None:
        return
    lost = 1 - kept
    before = view.memory.get("lost", 0.0)
    view.memory["lost"] = lost
    lasting = ramp(min(lost, before), limits.ess_low, limits.ess_high)
    sudden = ramp(lost, limits.ess_sudden_low, limits.ess_sudden_high)
    yield Finding(
        max(lasting, sudden),
        "policy/ess_frac_min",
        kept,
        1 - (limits.ess_low + limits.ess_high) / 2,
        text=lambda: (
            f"{percent(kept)} of a minibatch's samples carry its weight (usually 90 % or more); "
            f"the largest probability ratio is {number(largest or 0.0)}{_blamed(view)}"
        ),
    )


def _blamed(view: View) -> str:
    """The head that most of the change is owed to, where there are several."""
    shares = {head: value for head, _, value in view.labelled("policy/head/", "/blame")}
    if len(shares) < 2:
        return ""
    head = max(shares, key=lambda name: shares[name])
    return f", {percent(shares[head])} of it by the head {head}"


def ratio_collapse(view: View) -> Iterator[Finding]:
    """Actions became ten times less likely, in one step of a hundred."""
    key, limits = "policy/ratio/p01", view.limits
    value = view.get(key)
    if value is not None:
        yield Finding(
            ramp(value, limits.ratio_collapse_low, limits.ratio_collapse_high),
            key,
            value,
            (limits.ratio_collapse_low + limits.ratio_collapse_high) / 2,
            text=lambda: (
                f"one action in a hundred has become {times(1 / max(value, 1e-30))} less likely in a single update"
            ),
        )


def clip_saturation(view: View) -> Iterator[Finding]:
    """Much of the batch teaches nothing more."""
    key, low, high = "policy/clip_frac", view.limits.clip_frac_low, view.limits.clip_frac_high
    value = view.get(key)
    if value is not None:
        yield Finding(
            ramp(value, low, high),
            key,
            value,
            (low + high) / 2,
            text=lambda: f"{percent(value)} of the samples have left the trust region{view.usual(key)}",
        )


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


STILL = 2e-3
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
    Rule(
        type="policy/kl_spike",
        judge=kl_spike,
        inputs=("policy/kl",),
        watches=("policy/kl",),
        n_off=2,
        duration=5,
        evidence=("policy/kl*", "policy/head/*/kl", "policy/ratio/*", "opt/lr", "grad/global/*", "adv/norm/*"),
        relative=True,
        source="Stop rules in use lie at 0.015 to 0.03. Policies with memory have single updates of 0.1 and recover: two in a row, or 0.3. "
        "Less tells where there are suddenly more steps.",
    ),
    Rule(
        type="policy/ratio_explosion",
        judge=ratio_explosion,
        inputs=("policy/ess_frac_min",),
        n_off=2,
        duration=5,
        evidence=("policy/ess_frac*", *RATIOS),
        source="Kong's effective sample size; Moalla 2024, coach#87. A single minibatch with rare actions loses "
        "half of it in healthy runs.",
    ),
    Rule(
        type="policy/ratio_collapse",
        judge=ratio_collapse,
        inputs=("policy/ratio/p01",),
        n_on=3,
        duration=3,
        evidence=RATIOS,
        source="first percentile in place of the share of rows, which a record does not have",
    ),
    Rule(
        type="policy/clip_saturation",
        judge=clip_saturation,
        inputs=("policy/clip_frac",),
        watches=("policy/clip_frac",),
        warmup=15,
        n_on=2,
        duration=3,
        evidence=("policy/clip_frac*", "policy/head/*/clip_frac", "policy/kl*", "opt/lr"),
        source="common practice; healthy runs stay below 0.17, but for their first updates",
    ),
)
