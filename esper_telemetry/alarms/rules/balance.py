"""Who owns the gradient: actor or critic, what clipping leaves, few parameters or all."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.alarms.rule import Finding, Rule, View, hard, number, percent, power, ramp, times

RATIO, SHARE, EFFECTIVE = (f"grad/interference/{name}" for name in ("log_ratio", "critic_share", "actor_effective"))


def actor_starved(view: View) -> Iterator[Finding]:
    """The critic fills the clip limit."""
    limits = view.limits
    ratio, share, effective = view.get(RATIO), view.get(SHARE), view.get(EFFECTIVE)
    z, fall = view.z(RATIO), view.z(EFFECTIVE)
    swallowed = effective is not None and effective < limits.starved_floor
    if ratio is None or share is None or (z is None and not swallowed):
        return
    dominated = swallowed or (z is not None and z > limits.starved_z)
    starved = fall is not None and fall < -limits.starved_effective_z and share > limits.starved_share
    coef = view.get("grad/clip/coef")
    left = f"; clipping leaves the actor {percent(coef)} of its step" if coef is not None and coef < 0.999 else ""
    yield Finding(
        hard((dominated and share > limits.starved_share) or starved),
        RATIO,
        ratio,
        adaptive=True,
        z=z,
        text=lambda: (
            f"the critic's gradient has been {times(power(ratio))} the actor's{_usually(view)}{left}"
            + (f", {number(effective)}{view.usual(EFFECTIVE)}" if effective is not None else "")
        ),
    )


def _usually(view: View) -> str:
    """The usual ratio of the critic's gradient to the actor's."""
    usual = view.baselines.usual(RATIO)
    return f" (usually {number(power(usual[0]))}-{number(power(usual[1]))}x)" if usual else ""


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


RULES = (
    Rule(
        type="grad/actor_starved",
        judge=actor_starved,
        inputs=(RATIO, SHARE),
        watches=(RATIO, EFFECTIVE),
        n_on=2,
        duration=5,
        evidence=("grad/interference/*", "grad/clip/*", "ret/std", "loss/*"),
        relative=True,
        source="Critics of unscaled returns dominate from the start, legitimately: a change counts, and, from the start too, an "
        "actor whose gradient Adam's epsilon (1e-5) swallows.",
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
