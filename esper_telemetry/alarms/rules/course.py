"""The course of the updates: they swing, they creep, they wander, they are noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log10

from esper_telemetry.alarms.rule import Finding, Rule, View, hard, number, percent, power, times
from esper_telemetry.alarms.rules.balance import average

LONGEST = 20
"""Updates of the longest period that is told: longer ones are trends in the hundred updates that are tested."""


SWINGS = 3
"""Swings of the learning rate that are no schedule any more: warm restarts are rarer."""


LATELY = 16
"""Updates in which they are counted."""


REJECTED = 50
"""Outliers in a row that do not enter the average; then it begins to follow them."""


RISES = 5
"""Updates in a row in which a learning rate that creeps rises."""


def oscillation(view: View) -> Iterator[Finding]:
    """Successive gradients point against each other, or the KL swings with a period."""
    mean = average(view, "grad/align/successive_cos")
    if mean is not None:
        view.memory["swing"] = hard(mean < -view.limits.oscillation)
        view.memory["mean"] = mean
    chance, length = view.get("policy/kl/period/p"), view.get("policy/kl/period/length")
    if chance is not None and length is not None:
        before = view.memory.get("length")
        clear = chance < view.limits.period_p and length <= LONGEST
        again = clear and before is not None and abs(before - length) <= 0.1 * length
        view.memory["period"] = hard(again)
        view.memory["length"] = length if clear else None
    yield from swinging_rate(view)
    if mean is None and chance is None:
        return
    period = view.memory.get("period", 0.0)
    averaged = view.memory.get("mean", 0.0)
    yield Finding(
        max(view.memory.get("swing", 0.0), period),
        "grad/align/successive_cos" if mean is not None else "policy/kl/period/p",
        mean if mean is not None else chance,
        text=lambda: (
            f"the KL divergence swings with a period of {number(length or 0.0)} updates"
            if period
            else f"successive gradients point against each other: their cosine averages {number(averaged)}"
        ),
    )


def swinging_rate(view: View) -> Iterator[Finding]:
    """The learning rate itself goes up and down."""
    rate = view.get("opt/lr")
    if not rate:
        return
    rates = view.memory.setdefault("rates", [])
    rates.append(rate)
    del rates[:-LATELY]
    factor = view.limits.rate_swing
    swings = rate_swings(rates, factor)
    yield Finding(
        hard(swings >= SWINGS),
        "opt/lr",
        rate,
        instance="rate",
        claim=True,
        text=lambda: (
            f"the learning rate swings: {swings} times by a factor of {number(factor)} or more within {len(rates)} updates"
        ),
    )


def rate_swings(rates: Sequence[float], factor: float) -> int:
    """How often a series goes up or down by that factor, counted from turning point to turning point."""
    swings, turn, way = 0, rates[0], 0
    for rate in rates:
        if (rate - turn) * way > 0:
            turn = rate
        elif max(rate / turn, turn / rate) >= factor:
            swings, way, turn = swings + 1, 1 if rate > turn else -1, rate
    return swings


def noise_dominated(view: View) -> Iterator[Finding]:
    """No signal is left in the gradient."""
    key = "opt/snr_share"
    value = view.get(key)
    if value is not None:
        yield Finding(
            hard(value <= 0), key, value, 0.0, text=lambda: f"the gradient is noise: {percent(value)} of it is signal"
        )


def drift(view: View) -> Iterator[Finding]:
    """Gradient norms wander away from their average, up or down; or the learning rate creeps up beyond what was set."""
    yield from creeping_rate(view)
    key = "grad/global/norm_preclip"
    value = view.get(key)
    if value is None or value <= 0:
        return
    memory, limits = view.memory, view.limits
    x = log10(value)
    if "mean" in memory and memory["count"] >= 20:
        off = x - memory["mean"]
        sigma = max(memory["var"] ** 0.5, 0.05)
        new = abs(view.z(key) or 0.0) > limits.z_low
        wrong = new and abs(off) > limits.drift_sigmas * sigma and abs(off) > limits.drift_min / 2.302585
        usual = power(memory["mean"])
        yield Finding(
            hard(wrong),
            key,
            value,
            adaptive=True,
            text=lambda: f"the gradient's norm has been {number(value)}, away from its average of {number(usual)}",
        )
        if wrong and memory.get("rejected", 0) < REJECTED:
            memory["rejected"] = memory.get("rejected", 0) + 1
            return
    memory["rejected"] = 0
    _average_on(memory, x)


def creeping_rate(view: View) -> Iterator[Finding]:
    """The learning rate has risen for long, and above what was set; where it follows the KL it may."""
    rate, was = view.get("opt/lr"), view.previous.get("opt/lr")
    asked = view.facts.get("learning_rate")
    if rate is None or was is None or not asked or view.facts.get("desired_kl"):
        return
    rises = view.memory["rises"] = view.memory.get("rises", 0) + 1 if rate > was else 0
    yield Finding(
        hard(rises >= RISES and rate > view.limits.rate_grown * asked),
        "opt/lr",
        rate,
        view.limits.rate_grown * asked,
        instance="rate",
        text=lambda: (
            f"the learning rate has crept up to {number(rate)}, {times(rate / asked)} the {number(asked)} that was set"
        ),
    )


def _average_on(memory: dict[str, float], x: float) -> None:
    """Exponential mean and variance at β = 0.95, plain ones at first."""
    count = memory.get("count", 0) + 1
    weight = max(0.05, 1.0 / count)
    off = x - memory.get("mean", x)
    memory.update(
        count=count,
        mean=memory.get("mean", x) + weight * off,
        var=(1 - weight) * (memory.get("var", 0.0) + weight * off * off),
    )


RULES = (
    Rule(
        type="grad/oscillation",
        judge=oscillation,
        inputs=("grad/align/successive_cos",),
        warmup=20,
        n_on=2,
        n_off=2,
        duration=3,
        evidence=("grad/align/*", "policy/kl/period/*", "opt/lr"),
        sampled=True,
        source="the same period in two tests ten updates apart; a common test at p < 0.001 fires on autocorrelated series",
    ),
    Rule(
        type="grad/noise_dominated",
        judge=noise_dominated,
        inputs=("opt/snr_share",),
        warmup=50,
        n_on=20,
        n_off=10,
        duration=2,
        evidence=("grad/gns/*", "opt/snr_share"),
        sampled=True,
        source="biased under several epochs over one rollout, therefore off; McCandlish 2018",
    ),
    Rule(
        type="grad/drift",
        judge=drift,
        inputs=("grad/global/norm_preclip",),
        watches=("grad/global/norm_preclip",),
        warmup=20,
        n_on=5,
        duration=2,
        evidence=("grad/*/norm_preclip", "opt/lr", "opt/weight_growth", "ret/std"),
        relative=True,
        source="A fifth of the norm and less is usual in runs that come to their end; five updates beyond a factor of five are not.",
    ),
)
