"""The policy: steps too far."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.alarms.rule import Finding, Rule, View, decade_ramp, number, percent, ramp, times

RATIOS = ("policy/ratio/*", "policy/head/*/blame", "policy/head/*/ratio/*", "policy/logp/min", "policy/kl*", "opt/lr")


STEPS_SETTLE = 10
"""Updates after which their number of steps is known."""


def kl_spike(view: View) -> Iterator[Finding]:
    """One update moved the policy very far, or two in a row far; or two further than usual, with many more steps.

    What a few samples make of the KL divergence counts a third: the others have stayed where they were.
    """
    key, limits = "policy/kl", view.limits
    value = view.get(key)
    if value is None:
        return
    counts = value if moved_many(view) else value * limits.kl_few
    before = view.memory.get("kl", 0.0)
    view.memory["kl"] = counts
    sudden = decade_ramp(counts, limits.kl_sudden_low, limits.kl_sudden_high)
    lasting = decade_ramp(min(counts, before), limits.kl_spike_low, limits.kl_spike_high)
    by_one = sudden >= lasting
    passes = many_steps(view)
    earlier = view.previous.get(key)
    if passes is not None and earlier is not None:
        yield further(view, min(value, earlier), passes)
    bounds = (limits.kl_sudden_low, limits.kl_sudden_high) if by_one else (limits.kl_spike_low, limits.kl_spike_high)
    yield Finding(
        max(sudden, lasting),
        key,
        value,
        (bounds[0] * bounds[1]) ** 0.5 * value / max(counts, 1e-300),
        z=view.z(key),
        text=lambda: f"updates have moved the policy by a KL divergence of {number(value)} nats{view.usual(key)}",
    )


def moved_many(view: View) -> bool:
    """Whether an update has moved many samples far, and not a few of them very far; what is not known is taken for it."""
    share = view.get("policy/clip_frac")
    return share is None or share > view.limits.kl_moved


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
    """A few samples decide the update: nearly all effective samples are lost at once, or many in two updates in a row.

    One sample in a minibatch suffices for either, so one in a hundred of the whole update must have become far likelier, too.
    """
    limits = view.limits
    kept, largest = view.get("policy/ess_frac_min"), view.get("policy/ratio/max")
    if kept is None:
        return
    wide = view.get("policy/ratio/p99")
    spread = 1.0 if wide is None else decade_ramp(wide, limits.ratio_spread_low, limits.ratio_spread_high)
    lost, now = 1 - kept, (1 - kept, spread)
    before = view.memory.get("lost", (0.0, 0.0))
    view.memory["lost"] = now
    lasting = min(ramp(min(lost, before[0]), limits.ess_low, limits.ess_high), spread, before[1])
    sudden = min(ramp(lost, limits.ess_sudden_low, limits.ess_sudden_high), spread)
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


RULES = (
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
        "Less tells where there are suddenly more steps. Sure policies lose much KL on a few rare actions, and go on learning: the "
        "threefold is asked for where no quarter of the samples has left the trust region.",
    ),
    Rule(
        type="policy/ratio_explosion",
        judge=ratio_explosion,
        inputs=("policy/ess_frac_min",),
        n_off=2,
        duration=5,
        evidence=("policy/ess_frac*", *RATIOS),
        source="Kong's effective sample size; Moalla 2024, coach#87. A single sample of a rare action takes 90 % of it from a minibatch "
        "in healthy runs, which clipping bears: the 99th percentile of the ratios is 1.2 to 2.7 there.",
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
