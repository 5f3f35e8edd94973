"""Gradients: too large, too small, missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import log10

from esper_telemetry.alarms.rule import Finding, Rule, View, hard, number, percent, ramp, segment_of, times
from esper_telemetry.alarms.rules.numerics import outlier

LAYER, HEAD, NORM = "grad/layer/", "grad/head/", "/norm"


PEAK = "grad/global/norm_preclip_max"


MIN_VANISH = 5
"""Updates in which a layer had a gradient, before its absence means anything."""


NORMS = ("grad/layer/*/norm", "grad/*/norm_preclip", "grad/clip/coef")


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
    critics = {segment_of(name) for name in dict(view.facts.get("groups") or {}).get("critic", ())}
    solved = 0.5 * view.baselines.fallen("loss/value")  # gradients of a squared error fall as its root
    for layer, key, value in [*view.labelled(LAYER, NORM), *sharing_heads(view)]:
        median = view.baselines.median(key)
        if median is None or view.baselines.count(key) < MIN_VANISH:
            continue
        fallen = log10(median / value) if value > 0 else 99.0
        if layer in critics and value > 0:
            fallen -= solved
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


def sharing_heads(view: View) -> Iterator[tuple[str, str, float]]:
    """Heads that have rows of one layer, which is as if each had a layer; those with parameters of their own are layers already."""
    groups = dict(view.facts.get("groups") or {})
    return ((head, key, value) for head, key, value in view.labelled(HEAD, NORM) if f"head:{head}" not in groups)


def missing_group(view: View) -> Iterator[Finding]:
    """Parameters that are declared to be trained have no gradient: a whole group, or single tensors of one."""
    groups = view.facts.get("groups")
    if not groups or (
        "grad/global/norm_preclip" not in view.values and not any(key.startswith("grad/") for key in view.values)
    ):
        return
    layers = {label for label, _, _ in view.labelled(LAYER, NORM)}
    for group, names in groups.items():
        key = f"grad/{segment_of(group)}/norm_preclip"
        missing = layers and not layers.issuperset(_segments(view, group, names))
        absent = [name for name in names if segment_of(name) not in layers] if missing else []
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


def _segments(view: View, group: str, names: Iterable[str]) -> frozenset[str]:
    """Names of a group's parameters as segments of keys: the same ones in every update."""
    known: dict[str, frozenset[str]] = view.memory.setdefault("segments", {})
    if group not in known:
        known[group] = frozenset(map(segment_of, names))
    return known[group]


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
        watches=("grad/layer/*/norm", "grad/head/*/norm", "loss/value"),
        duration=5,
        evidence=(*NORMS, "grad/zero_frac", "repr/dormant_frac*"),
        relative=True,
        source="Groups with a head never fall to 0, so layers are judged, each by its own median: exactly 0, or three decades below. "
        "The critic's fall that far where all returns become equal: as far as its error has fallen too, that is no fault.",
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
)
