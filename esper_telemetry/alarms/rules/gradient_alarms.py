"""Gradients: too large, too small, missing, and divided between actor and critic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import log10

from esper_telemetry.alarms.alarm_bounds import Ramp, above, below, hard
from esper_telemetry.alarms.baselines import History, power
from esper_telemetry.alarms.judges import OUTLIER_BOUNDS, Outlier, Recent, StateJudge, list_names, reading
from esper_telemetry.alarms.rule import Finding, View, alarm, segment_of
from esper_telemetry.alarms.verdict.published_settings import PUBLISHED
from esper_telemetry.core.messages import number, percent, times

LAYER, HEAD, NORM = "grad/layer/", "grad/head/", "/norm"
GLOBAL, PEAK = "grad/global/norm_preclip", "grad/global/norm_preclip_max"
RATIO, SHARE, EFFECTIVE = (f"grad/interference/{name}" for name in ("log_ratio", "critic_share", "actor_effective"))
MIN_VANISH_UPDATES = 5  # updates in which a layer had a gradient, before its absence means anything
NORM_EVIDENCE = ("grad/layer/*/norm", "grad/*/norm_preclip", "grad/clip/coef")
STILL_LARGE = 0.1  # share of the norm in the update before, above which a gradient that was too large still is


@dataclass(slots=True)
class Explosion:
    """Outliers of the norm, the severity of the update before (of earlier ones while the gradient has stayed large), and its norm."""

    outlier: Outlier = field(default_factory=Outlier)
    before: float = 0.0
    norm: float = 0.0


def explode(view: View, past: Explosion) -> Iterator[Finding]:
    """A gradient far larger than it was; where it is clipped, in two updates in a row."""
    severity, value = past.outlier.severity(view, PEAK), view.get(PEAK)
    if severity is None or value is None:
        return
    median, clip = view.baselines.median(PEAK) or value, view.facts.max_grad_norm
    lasting = past.before if value > STILL_LARGE * past.norm else 0.0
    past.before, past.norm = max(severity, lasting), value
    left = f"; clipping at {number(clip)} leaves {percent(min(1.0, clip / value))} of it" if clip else ""
    yield Finding(lasting if clip else severity, PEAK, value, adaptive=True, z=view.z(PEAK)).with_text(
        lambda: (
            f"the gradient has reached a norm of {number(value)}, {times(value / median)} its usual one{view.usual(PEAK)}{left}"
        )
    )


VANISH = Ramp("vanish", 3.0, 7.0, "decades by which a layer's gradient falls below its median")
VANISH_SHARE = below("vanish_share", 1e-5, "gradient of a layer in clip limits, with that")


def vanish(view: View) -> Iterator[Finding]:
    """A layer's gradient that is zero, or decades below what it was; every layer is judged by its own history.

    An update in which no token counts has no gradient anywhere.
    """
    if view.get("lm/tokens") == 0:
        return
    limits = view.limits
    clip = view.facts.max_grad_norm or 1.0
    groups = view.facts.groups
    critics = {segment_of(name) for name in groups.get("critic", ())}
    solved = 0.5 * view.baselines.fallen("loss/value")  # gradients of a squared error fall as its root
    # Heads that are rows of one layer count as layers; those with parameters of their own are layers already.
    heads = [item for item in view.labelled(HEAD, NORM) if f"head:{item[0]}" not in groups]
    low, high = limits.ends(VANISH)
    share, middle = limits[VANISH_SHARE] * clip, 10 ** (-(low + high) / 2)
    for layer, key, value in [*view.labelled(LAYER, NORM), *heads]:
        median = view.baselines.median(key)
        if median is None or view.baselines.count(key) < MIN_VANISH_UPDATES:
            continue
        fallen = 0.0
        if value <= share:
            fallen = 99.0 if value <= 0 else log10(median) - log10(value) if median > 0 else 0.0
            if layer in critics and value > 0:
                fallen -= solved
        severity = limits.severity(VANISH, fallen)
        finding = Finding(severity, key, value, median * middle, adaptive=True, z=view.z(key), instance=layer)
        if not severity:  # the usual case of every layer: its text is not read
            yield finding
            continue
        left = "no gradient: exactly 0" if value == 0 else f"next to no gradient: {number(value)}"
        yield finding.says("{} has {}{}", layer, left, partial(view.usual, key))


def missing_group(view: View, segments: dict[str, frozenset[str]]) -> Iterator[Finding]:
    """Parameters that are declared to be trained and have no gradient: a whole group, or single tensors of one.

    Names of each group's parameters as segments of keys are the same in every update.
    """
    groups = view.facts.groups
    if not groups or not (GLOBAL in view.values or f"{GLOBAL}_nonfinite" in view.values):
        return
    layers = {label for label, _, _ in view.labelled(LAYER, NORM)}
    for group, names in groups.items():
        key = f"grad/{segment_of(group)}/norm_preclip"
        if group not in segments:
            segments[group] = frozenset(map(segment_of, names))
        missing = layers and not layers.issuperset(segments[group])
        absent = [name for name in names if segment_of(name) not in layers] if missing else []
        whole = key not in view.values and f"{key}_nonfinite" not in view.values and bool(names)
        finding = Finding(hard(whole or bool(absent)), key, view.get(key), instance=group)
        part, tensors = "the group" if whole else "a part of the group", f": {list_names(absent)}" if absent else ""
        yield finding.says("{} {} has no gradient, though it is declared to be trained{}", part, group, tensors)


STARVED_Z = above("starved_z", 6.0, "robust z of the critic's gradient over the actor's")
STARVED_SHARE = above("starved_share", 0.95, "critic's share of the squared gradient, with that")
STARVED_EFFECTIVE_Z = above("starved_effective_z", 8.0, "robust z by which the actor's clipped gradient falls")
STARVED_FLOOR = below("starved_floor", 1e-5, "actor's clipped gradient, which Adam's epsilon swallows, with that share")


def actor_starved(view: View) -> Iterator[Finding]:
    """A critic that fills the clip limit."""
    limits = view.limits
    ratio, share, effective = view.get(RATIO), view.get(SHARE), view.get(EFFECTIVE)
    z, fall = view.z(RATIO), view.z(EFFECTIVE)
    swallowed = effective is not None and effective < limits[STARVED_FLOOR]
    if ratio is None or share is None or (z is None and not swallowed):
        return
    dominated = swallowed or (z is not None and z > limits[STARVED_Z])
    starved = fall is not None and fall < -limits[STARVED_EFFECTIVE_Z] and share > limits[STARVED_SHARE]
    coef = view.get("grad/clip/coef")
    left = f"; clipping leaves the actor {percent(coef)} of its step" if coef is not None and coef < 0.999 else ""

    def text() -> str:
        ends = view.baselines.usual(RATIO)
        usual = f" (usually {number(power(ends[0]))}-{number(power(ends[1]))}x)" if ends else ""
        rest = f"; the actor's clipped gradient is {number(effective or 0.0)}{view.usual(EFFECTIVE)}"
        rest = "" if effective is None else rest
        return f"the critic's gradient has been {times(power(ratio))} the actor's{usual}{left}{rest}"

    wrong = (dominated and share > limits[STARVED_SHARE]) or starved
    own = effective / coef if effective is not None and coef else None
    nothing = own is not None and own < limits[STARVED_FLOOR]
    limit = view.facts.max_grad_norm
    tight = limit is not None and 0 < limit < PUBLISHED["max_grad_norm"].lowest
    advice = NO_ACTOR_GRADIENT if nothing else TIGHT_CLIP if tight else None
    finding = Finding(hard(wrong), RATIO, ratio, adaptive=True, z=z)
    yield finding.with_advice((lambda: advice) if advice else None).with_text(text)


NO_ACTOR_GRADIENT = (
    "The actor's gradient is next to nothing before it is clipped, so that no scale of returns helps: check that advantages vary, have the "
    "shape of the ratios ([N] beside [N, 1] is a table of all pairs), and that the log-probabilities carry gradients."
)
TIGHT_CLIP = "Raise max_grad_norm: gradients below Adam's epsilon move nothing."
"""What to try where clipping is not what starves the actor, and where the limit is below all that are published."""

INTERFERENCE = Ramp("interference", 0.2, 0.7, "negative average cosine of the two losses' gradients")


@reading("grad/interference/cos")
def interference(view: View, cosine: float, cosines: Recent) -> Iterator[Finding]:
    """Actor and critic that disagree, on average over ten measurements."""
    mean = cosines.mean(cosine)
    if mean is not None:
        severity, bound = view.limits.severity(INTERFERENCE, -mean), -view.limits.middle(INTERFERENCE)
        words = "the gradients of actor and critic point in opposite directions: their cosine averages {}"
        yield Finding(severity, "grad/interference/cos", mean, bound).says(words, mean)


CLIP_COEF = below("clip_coef", 0.01, "what clipping leaves of the gradient")
CLIP_FALL = above("clip_fall", 1.0, "decades by which that fell below its median")


@reading("grad/clip/coef")
def clip_saturated(view: View, value: float) -> Iterator[Finding]:
    """Clipping that leaves next to nothing of the gradient, and used to leave more."""
    key, bound = "grad/clip/coef", view.limits[CLIP_COEF]
    shift = view.baselines.shift.get(key)
    if shift is not None:
        wrong = value < bound and shift < -view.limits[CLIP_FALL]
        finding = Finding(hard(wrong), key, value, bound, z=view.z(key))
        yield finding.says("clipping leaves {:%} of the gradient{}", value, partial(view.usual, key))


gradient_alarm = partial(alarm, pieces=("layers", "transitions", "pairs"), histograms=("grad/decades",))
"""Declare an alarm with the evidence of all gradients."""

RULES = (
    gradient_alarm("grad/explode", rank=280, relative=True, debug_updates=5)
    .reads("grad/global/norm_preclip_max", "grad/global/norm_preclip")
    .needs(PEAK)
    .follows(PEAK)
    .changes("learning_rate", "max_grad_norm")
    .says(
        "Gradients are far larger than this run's usual ones.",
        "Clip by the global norm (max_grad_norm 0.5), lower the learning rate, look for outliers in returns; the table of "
        "layers says where.",
        "One spike of a minibatch is absorbed by clipping: two updates in a row, and one that is far out where nothing is clipped. "
        "Absolute bounds in clip limits are left out: "
        "the critic of unscaled returns has gradients of a thousand limits from the first update on.",
    )
    .shows(*NORM_EVIDENCE, "loss/*", "ret/std", "opt/lr")
    .judged(StateJudge(explode, Explosion()), *OUTLIER_BOUNDS),
    gradient_alarm("grad/vanish", rank=190, relative=True, debug_updates=5)
    .reads("grad/layer/{layer}/norm", "grad/head/{head}/norm", "grad/{group}/severity_vanish", "grad/zero_frac")
    .reads("grad/layer/{layer}/zero_frac")
    .needs(f"{LAYER}{{layer}}{NORM}")
    .follows("grad/layer/*/norm", "grad/head/*/norm", "loss/value")
    .says(
        "A part of the network gets next to no gradient.",
        "Look for dead ReLUs (repr/dormant_frac), saturated tanhs, a detached branch; lower the learning rate, use another activation.",
        "Groups with a head never fall to 0, so layers are judged, each by its own median: exactly 0, or three decades below. "
        "The critic's fall that far where all returns become equal: as far as its error has fallen too, that is no fault.",
    )
    .shows(*NORM_EVIDENCE, "grad/zero_frac", "repr/dormant_frac*")
    .judged(vanish, VANISH, VANISH_SHARE),
    gradient_alarm("grad/missing_group", rank=90, hard=True, claim=True, certain=True, n_off=1, debug_updates=10)
    .reads("grad/{group}/norm_preclip")
    .needs(GLOBAL, facts=("groups",))
    .says(
        "A part of the network that is meant to be trained has no gradient at all.",
        "Look for detach(), no_grad or requires_grad=False on the way from the loss to it; check that the optimizer has its "
        "parameters; call backward() before step(), and zero_grad() before both.",
        "A tensor without a gradient is a tensor that is not trained, though its group may be.",
    )
    .shows("grad/*/norm_preclip", "opt/lr")
    .judged(StateJudge(missing_group, dict[str, frozenset[str]]())),
    gradient_alarm("grad/actor_starved", RATIO, SHARE, EFFECTIVE, rank=250, relative=True, n_on=2, debug_updates=5)
    .needs(RATIO, SHARE)
    .follows(History(RATIO, linear=True), EFFECTIVE)
    .changes("value_coef", "max_grad_norm")
    .says(
        "The critic's gradient fills the clip limit and the actor learns from what is left.",
        "Normalise returns, lower value_coef, use separate networks or clip them apart.",
        "Critics of unscaled returns dominate from the start, legitimately: a change counts, and, from the start too, an "
        "actor whose gradient Adam's epsilon (1e-5) swallows.",
    )
    .shows("grad/interference/*", "grad/clip/*", "ret/std", "loss/*")
    .judged(actor_starved, STARVED_Z, STARVED_SHARE, STARVED_EFFECTIVE_Z, STARVED_FLOOR),
    gradient_alarm("grad/interference", effect=True, sampled=True, warmup=20, n_on=3, debug_updates=3)
    .reads("grad/interference/cos", "grad/interference/cancel")
    .needs(applies=lambda facts: bool(facts.groups.get("shared")))
    .says(
        "Actor and critic pull the shared network in opposite directions.",
        "Use separate networks, or lower value_coef.",
        "single cosines swing by ±0.5 in healthy runs; PCGrad",
    )
    .shows("grad/interference/*")
    .judged(StateJudge(interference, Recent(10)), INTERFERENCE),
    gradient_alarm("grad/clip_saturated", effect=True, relative=True, n_on=2, debug_updates=3)
    .reads("grad/clip/coef", "grad/clip/coef_min", "grad/clip/excess_log10")
    .needs(applies=lambda facts: facts.max_grad_norm is not None)
    .follows("grad/clip/coef")
    .says(
        "Clipping shrinks gradients to a small part of themselves, so the learning rate means little.",
        "Find what is large (grad/interference/critic_share); normalise returns or lower value_coef before raising the limit.",
        "Healthy runs with unscaled returns clip to 2 % for good: it must have become worse, tenfold.",
    )
    .shows("grad/*/norm_preclip", "grad/interference/*", "grad/clip/*")
    .judged(clip_saturated, CLIP_COEF, CLIP_FALL),
)
