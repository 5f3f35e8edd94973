"""Gradients: too large, too small, missing, in each other's way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log10

from esper_telemetry.detectors.rule import Finding, Rule, View, hard, number, percent, ramp, times
from esper_telemetry.metric import segment

LAYER, NORM = "grad/layer/", "/norm"
PEAK = "grad/global/norm_preclip_max"
RATIO, SHARE, EFFECTIVE = (f"grad/interference/{name}" for name in ("log_ratio", "critic_share", "actor_effective"))


def outlier(view: View, key: str) -> tuple[float, float] | None:
    """Severity and z of an upward outlier: far out at once, or out of line for two updates in a row."""
    z = view.z(key)
    if z is None:
        return None
    limits = view.limits
    before = view.memory.get(key, 0.0)
    view.memory[key] = z
    sudden = ramp(z, limits.z_sudden_low, limits.z_sudden_high)
    lasting = ramp(min(z, before), limits.z_low, limits.z_high)
    return max(sudden, lasting), z


def explode(view: View) -> Iterator[Finding]:
    """The gradient is far larger than it was."""
    found, value = outlier(view, PEAK), view.get(PEAK)
    if found is None or value is None:
        return
    median = view.baselines.median(PEAK) or value
    clip = view.facts.get("max_grad_norm")
    left = f"; clipping at {number(clip)} leaves {percent(min(1.0, clip / value))} of it" if clip else ""
    severity, z = found
    yield Finding(
        severity,
        PEAK,
        value,
        adaptive=True,
        z=z,
        text=lambda: (
            f"the gradient has reached a norm of {number(value)}, {times(value / median)} its usual one{view.usual(PEAK)}{left}"
        ),
    )


def vanish(view: View) -> Iterator[Finding]:
    """A layer's gradient is zero, or decades below what it was; every layer is judged by its own history."""
    limits = view.limits
    clip = view.facts.get("max_grad_norm") or 1.0
    for layer, key, value in view.labelled(LAYER, NORM):
        median = view.baselines.median(key)
        if median is None or view.baselines.count(key) < MIN_VANISH:
            continue
        fallen = log10(median / value) if value > 0 else 99.0
        if value > limits.vanish_share * clip:
            fallen = 0.0
        yield Finding(
            ramp(fallen, limits.vanish_low, limits.vanish_high),
            key,
            value,
            median * 10 ** (-(limits.vanish_low + limits.vanish_high) / 2),
            adaptive=True,
            z=view.z(key),
            instance=layer,
            text=lambda layer=layer, value=value, key=key: (  # type: ignore[misc]  # the loop's values at this time
                f"{layer} has {'no gradient: exactly 0' if value == 0 else f'next to no gradient: {number(value)}'}{view.usual(key)}"
            ),
        )


MIN_VANISH = 5
"""Updates in which a layer had a gradient, before its absence means anything."""


def missing_group(view: View) -> Iterator[Finding]:
    """Parameters that are declared to be trained have no gradient: a whole group, or single tensors of one."""
    groups = view.facts.get("groups")
    if not groups or (
        "grad/global/norm_preclip" not in view.values and not any(key.startswith("grad/") for key in view.values)
    ):
        return
    layers = {label for label, _, _ in view.labelled(LAYER, NORM)}
    for group, names in groups.items():
        key = f"grad/{segment(group)}/norm_preclip"
        absent = [name for name in names if layers and segment(name) not in layers]
        whole = key not in view.values and f"{key}_nonfinite" not in view.values and bool(names)
        told = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        yield Finding(
            hard(whole or bool(absent)),
            key,
            view.get(key),
            instance=group,
            text=lambda group=group, whole=whole, told=told: (  # type: ignore[misc]  # the loop's values at this time
                f"{'the group' if whole else 'a part of the group'} {group} has no gradient, though it is declared to be trained"
                + (f": {told}" if told else "")
            ),
        )


def actor_starved(view: View) -> Iterator[Finding]:
    """The critic fills the clip limit."""
    limits = view.limits
    ratio, share, effective = view.get(RATIO), view.get(SHARE), view.get(EFFECTIVE)
    z, fall = view.z(RATIO), view.z(EFFECTIVE)
    if ratio is None or share is None or z is None:
        return
    dominated = z > limits.starved_z and share > limits.starved_share
    starved = fall is not None and fall < -limits.starved_effective_z and share > limits.starved_share
    coef = view.get("grad/clip/coef")
    left = f"; clipping leaves the actor {percent(coef)} of its step" if coef is not None and coef < 0.999 else ""
    yield Finding(
        hard(dominated or starved),
        RATIO,
        ratio,
        adaptive=True,
        z=z,
        text=lambda: (
            f"the critic's gradient has been {times(10**ratio)} the actor's{_usually(view)}{left}"
            + (f", {number(effective)}{view.usual(EFFECTIVE)}" if effective is not None else "")
        ),
    )


def _usually(view: View) -> str:
    """The usual ratio of the critic's gradient to the actor's."""
    usual = view.baselines.usual(RATIO)
    return f" (usually {number(10 ** usual[0])}-{number(10 ** usual[1])}x)" if usual else ""


def interference(view: View) -> Iterator[Finding]:
    """Actor and critic disagree, on average over ten looks."""
    mean = average(view, "grad/interference/cos")
    low, high = view.limits.interference_low, view.limits.interference_high
    if mean is not None:
        yield Finding(
            ramp(-mean, low, high),
            "grad/interference/cos",
            mean,
            -(low + high) / 2,
            text=lambda: (
                f"the gradients of actor and critic point in opposite directions: their cosine averages {number(mean)}"
            ),
        )


def average(view: View, key: str, looks: int = 10) -> float | None:
    """Mean of the last ten values of a sampled key; None before there are as many, and where there is no new one."""
    value = view.get(key)
    if value is None:
        return None
    seen = view.memory.setdefault("seen", [])
    seen.append(value)
    del seen[:-looks]
    return sum(seen) / looks if len(seen) == looks else None


def clip_saturated(view: View) -> Iterator[Finding]:
    """Clipping leaves next to nothing of the gradient, and used to leave more."""
    key, limits = "grad/clip/coef", view.limits
    value, shift = view.get(key), view.baselines.shift.get(key)
    if value is None or shift is None:
        return
    wrong = value < limits.clip_coef and shift < -limits.clip_fall
    yield Finding(
        hard(wrong),
        key,
        value,
        limits.clip_coef,
        z=view.z(key),
        text=lambda: f"clipping leaves {percent(value)} of the gradient{view.usual(key)}",
    )


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


LONGEST = 20
"""Updates of the longest period that is told: longer ones are trends in the hundred updates that are tested."""

SWINGS = 3
"""Swings of the learning rate that are no schedule any more: warm restarts are rarer."""

LATELY = 16
"""Updates in which they are counted."""


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
        wrong = abs(off) > limits.drift_sigmas * sigma and abs(off) > limits.drift_min / 2.302585
        usual = 10 ** memory["mean"]
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


REJECTED = 50
"""Outliers in a row that do not enter the average; then it begins to follow them."""


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


RISES = 5
"""Updates in a row in which a learning rate that creeps rises."""


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


def concentration(view: View) -> Iterator[Finding]:
    """A few parameters own the gradient, and did not before."""
    key, limits = "grad/concentration/entropy", view.limits
    value, median = view.get(key), view.baselines.median(key)
    if value is None or median is None:
        return
    lost = 1 - value / median
    yield Finding(
        hard(value < limits.concentration and lost > limits.concentration_fall),
        key,
        value,
        limits.concentration,
        z=view.z(key),
        text=lambda: f"a few parameters own the gradient: its spread is {number(value)}{view.usual(key)}",
    )


NORMS = ("grad/layer/*/norm", "grad/*/norm_preclip", "grad/clip/coef")

RULES = (
    Rule(
        type="grad/missing_group",
        judge=missing_group,
        inputs=("grad/global/norm_preclip",),
        facts=("groups",),
        certain=True,
        n_off=1,
        duration=10,
        evidence=("grad/*/norm_preclip", "opt/lr"),
        source="A tensor without a gradient is a tensor that is not trained, though its group may be.",
    ),
    Rule(
        type="grad/vanish",
        judge=vanish,
        inputs=("grad/global/norm_preclip",),
        watches=("grad/layer/*/norm",),
        duration=5,
        evidence=(*NORMS, "grad/zero_frac", "repr/dormant_frac*"),
        relative=True,
        source="Groups with a head never fall to 0, so layers are judged, each by its own median: exactly 0, or three decades below. "
        "The critic's fall that far where all returns become equal, but not below a ten-thousandth of the clip limit.",
    ),
    Rule(
        type="grad/actor_starved",
        judge=actor_starved,
        inputs=(RATIO, SHARE),
        watches=(RATIO, EFFECTIVE),
        n_on=2,
        duration=5,
        evidence=("grad/interference/*", "grad/clip/*", "ret/std", "loss/*"),
        relative=True,
        source="Critics of unscaled returns dominate from the start, legitimately: only a change counts.",
    ),
    Rule(
        type="grad/explode",
        judge=explode,
        inputs=(PEAK,),
        watches=(PEAK,),
        duration=5,
        evidence=(*NORMS, "loss/*", "ret/std", "opt/lr"),
        relative=True,
        source="One spike of a minibatch is absorbed by clipping: far out, or out of line twice. Absolute bounds in "
        "clip limits are left out: "
        "the critic of unscaled returns has gradients of a thousand limits from the first update on.",
    ),
    Rule(
        type="grad/interference",
        judge=interference,
        inputs=("grad/interference/cos",),
        applies=lambda facts: bool(dict(facts.get("groups") or {}).get("shared")),
        warmup=20,
        n_on=3,
        duration=3,
        evidence=("grad/interference/*",),
        sampled=True,
        source="single cosines swing by ±0.5 in healthy runs; PCGrad",
    ),
    Rule(
        type="grad/clip_saturated",
        judge=clip_saturated,
        inputs=("grad/clip/coef",),
        watches=("grad/clip/coef",),
        applies=lambda facts: facts.get("max_grad_norm") is not None,
        n_on=2,
        duration=3,
        evidence=("grad/*/norm_preclip", "grad/interference/*", "grad/clip/*"),
        relative=True,
        source="Healthy runs with unscaled returns clip to 2 % for good: it must have become worse, tenfold.",
    ),
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
        warmup=20,
        n_on=5,
        duration=2,
        evidence=("grad/*/norm_preclip", "opt/lr", "opt/weight_growth", "ret/std"),
        relative=True,
        source="A fifth of the norm and less is usual in runs that come to their end; five updates beyond a factor of five are not.",
    ),
    Rule(
        type="grad/concentration",
        judge=concentration,
        inputs=("grad/concentration/entropy",),
        watches=("grad/concentration/entropy",),
        warmup=10,
        n_on=3,
        duration=2,
        evidence=("grad/concentration/*", "grad/layer/*/norm"),
        relative=True,
        sampled=True,
        source="Entropies over layers of 0.1 are usual where one head dominates: judged is the loss of half of it.",
    ),
)
