"""Alarms about gradients: too large, too small, missing, or unevenly shared by actor and critic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import log10
from typing import Final

from esper_telemetry.alarms.alarm_bounds import Ramp, above, below, hard
from esper_telemetry.alarms.baselines import History, power
from esper_telemetry.alarms.judges import OUTLIER_BOUNDS, Outlier, Recent, StateJudge, list_names, reading
from esper_telemetry.alarms.rule import Finding, View, alarm, segment_of
from esper_telemetry.alarms.rules.trust_region_alarms import DECIDED_ENTROPY
from esper_telemetry.alarms.verdict.published_settings import PUBLISHED
from esper_telemetry.core.messages import number, percent, times

LAYER, HEAD, NORM = "grad/layer/", "grad/head/", "/norm"
GLOBAL, PEAK = "grad/global/norm_preclip", "grad/global/norm_preclip_max"
RATIO, SHARE, EFFECTIVE = (f"grad/interference/{name}" for name in ("log_ratio", "critic_share", "actor_effective"))
MIN_VANISH_UPDATES = 5  # updates in which a layer must have had a gradient before its absence counts
NORM_EVIDENCE = ("grad/layer/*/norm", "grad/*/norm_preclip", "grad/clip/coef")
STILL_LARGE = 0.1  # share of the previous norm above which a gradient that was too large still is


@dataclass(slots=True)
class Explosion:
    """Outliers of the norm, the severity in the previous update (the largest while the gradient stays large), and the previous norm."""

    outlier: Outlier = field(default_factory=Outlier)
    before: float = 0.0
    norm: float = 0.0


def explode(view: View, past: Explosion) -> Iterator[Finding]:
    """A gradient far larger than before; with clipping, in two updates in a row."""
    severity, value = past.outlier.severity(view, PEAK), view.get(PEAK)
    if severity is None or value is None:
        return
    median, clip = view.baselines.median(PEAK) or value, view.facts.max_grad_norm
    lasting = past.before if value > STILL_LARGE * past.norm else 0.0
    past.before, past.norm = max(severity, lasting), value
    left = f"; clipping to {number(clip)} leaves {percent(min(1.0, clip / value))} of it" if clip else ""
    yield Finding(lasting if clip else severity, PEAK, value, adaptive=True, z=view.z(PEAK)).with_text(
        lambda: f"the gradient has reached a norm of {number(value)}, {times(value / median)} its median{view.usual(PEAK)}{left}"
    )


VANISH = Ramp("vanish", 3.0, 7.0, "decades by which a layer's gradient falls below its median")
VANISH_SHARE = below("vanish_share", 1e-5, "gradient of a layer over the clip limit, in addition")


NO_ADVANTAGE: Final = 1e-7  # largest mean and standard deviation of advantages that differ from 0 by rounding only

SATURATING_KL: Final = 1.0  # KL divergence of an update, in nats, after which a policy may be saturated


def vanish(view: View) -> Iterator[Finding]:
    """A layer's gradient that is zero, or decades below its own median.

    An update in which no token counts, or whose advantages are all 0, is skipped, and a head that has decided nothing: their gradients
    are 0. The first update with a KL divergence that may saturate the policy is skipped, too: what vanishes then is its effect, and is
    raised one update later.
    """
    is_first = (view.get("policy/kl") or 0.0) > SATURATING_KL >= (view.previous.get("policy/kl") or 0.0)
    without_advantages = max(abs(view.values.get(f"adv/norm/{moment}", 1.0)) for moment in ("mean", "std")) < NO_ADVANTAGE
    if view.get("lm/tokens") == 0 or without_advantages or is_first:
        return
    limits = view.limits
    clip = view.facts.max_grad_norm or 1.0
    groups = view.facts.groups
    critics = {segment_of(name) for name in groups.get("critic", ())}
    loss, usual_loss = view.get("loss/value") or 0.0, view.baselines.median("loss/value") or 0.0
    below_median = log10(usual_loss / loss) if usual_loss > loss > 0 else 0.0  # known before the highest usual level
    solved = 0.5 * max(below_median, view.baselines.fallen("loss/value"))  # gradients of a squared error fall as its root
    # Heads that are rows of one layer count as layers; heads with separate parameters are layers already.
    heads = [item for item in view.labelled(HEAD, NORM) if f"head:{item[0]}" not in groups]
    unused = [head for head, _, share in view.labelled("policy/head/", "/decision_frac") if share == 0]
    still = {*unused, *(segment_of(name) for head in unused for name in groups.get(f"head:{head}", ()))}
    yield from _dead_groups(view)
    low, high = limits.ends(VANISH)
    share, middle = limits[VANISH_SHARE] * clip, 10 ** (-(low + high) / 2)
    for layer, key, value in [*view.labelled(LAYER, NORM), *heads]:
        median = view.baselines.median(key)
        if median is None or view.baselines.count(key) < MIN_VANISH_UPDATES or layer in still:
            continue
        fallen = 0.0
        if value <= share:
            fallen = 99.0 if value <= 0 else log10(median) - log10(value) if median > 0 else 0.0
            if layer in critics and value > 0:
                fallen -= solved
        severity = limits.severity(VANISH, fallen)
        finding = Finding(severity, key, value, median * middle, adaptive=True, z=view.z(key), instance=layer)
        if not severity:  # the usual case: nothing reads the text
            yield finding
            continue
        left = "of exactly 0" if value == 0 else f"of only {number(value)}"
        yield finding.says("{} has had a gradient {}{}, so it no longer learns", layer, left, partial(view.usual, key))


DEAD_PARAMETERS: Final = 4  # parameters with a norm that make a group
DEAD_UPDATE: Final = 3  # before it, layers below one that begins at 0 have a gradient of 0, with one step in each update
DEAD: Final = (
    "Their units do not react to the observations: all of a ReLU layer are below 0, or the weights after them are 0. Check the "
    "initialisation, and the scale of the observations."
)


def _dead_groups(view: View) -> Iterator[Finding]:
    """Groups of which half of the parameters, and not all, have a gradient of exactly 0."""
    if view.update < DEAD_UPDATE:
        return
    norms = {layer: value for layer, _, value in view.labelled(LAYER, NORM)}
    for group, names in view.facts.groups.items():
        known = {name: norms[segment_of(name)] for name in names if segment_of(name) in norms}
        if not known:
            continue
        zero = [name for name, value in known.items() if value == 0]
        dead = len(known) >= DEAD_PARAMETERS and len(known) <= 2 * len(zero) < 2 * len(known)
        finding = Finding(hard(dead), f"{LAYER}{segment_of(zero[0] if zero else names[0])}{NORM}", 0.0, 0.0, instance=f"group {group}")
        yield finding.with_advice(DEAD.__str__).says("{} have had a gradient of exactly 0, so they do not learn", list_names(zero))


def missing_group(view: View, segments: dict[str, frozenset[str]]) -> Iterator[Finding]:
    """Parameters that are declared as trained but do not receive a gradient: a whole group, or single tensors.

    `segments` caches the names of each group's parameters as segments of keys.
    """
    groups = view.facts.groups
    if not groups or not (GLOBAL in view.values or f"{GLOBAL}_nonfinite" in view.values):
        return
    layers = {label for label, _, _ in view.labelled(LAYER, NORM)}
    for group, names in groups.items():
        key = f"grad/{segment_of(group)}/norm_preclip"
        if group not in segments:
            segments[group] = frozenset(map(segment_of, names))
        nonfinite = f"{key}_nonfinite" in view.values  # whose layers have no norm
        missing = layers and not nonfinite and not layers.issuperset(segments[group])
        absent = [name for name in names if segment_of(name) not in layers] if missing else []
        whole = key not in view.values and not nonfinite and bool(names)
        finding = Finding(hard(whole or bool(absent)), key, view.get(key), instance=group)
        part, tensors = "the group" if whole else "part of the group", f": {list_names(absent)}" if absent else ""
        yield finding.says("{} {} has been without a gradient, so it is not trained{}", part, group, tensors)


STARVED_Z = above("starved_z", 6.0, "robust z of the critic's gradient over the actor's")
STARVED_SHARE = above("starved_share", 0.95, "critic's share of the squared gradient, in addition")
STARVED_EFFECTIVE_Z = above("starved_effective_z", 8.0, "robust z by which the actor's clipped gradient falls")
CLIPPED: Final = 0.5  # factor of clipping below which a larger gradient of the critic starves the actor
STARVED_FLOOR = below("starved_floor", 1e-5, "actor's clipped gradient that is negligible next to Adam's epsilon, with that share")


def actor_starved(view: View) -> Iterator[Finding]:
    """A critic whose gradient fills the clip limit, so that little is left of the actor's.

    If clipping leaves half of the gradients, a small gradient of the actor has another reason, such as a solved task.
    """
    limits = view.limits
    ratio, share, effective = view.get(RATIO), view.get(SHARE), view.get(EFFECTIVE)
    z, fall = view.z(RATIO), view.z(EFFECTIVE)
    swallowed = effective is not None and effective < limits[STARVED_FLOOR]
    if ratio is None or share is None or (z is None and not swallowed):
        return
    coef = view.get("grad/clip/coef")
    reduced = coef is None or coef < CLIPPED
    dominated = swallowed or (reduced and z is not None and z > limits[STARVED_Z])
    starved = reduced and fall is not None and fall < -limits[STARVED_EFFECTIVE_Z] and share > limits[STARVED_SHARE]
    left = f"; clipping leaves {percent(coef)} of the actor's gradient" if coef is not None and coef < 0.999 else ""

    def text() -> str:
        ends = view.baselines.usual(RATIO)
        usual = f" (usually {number(power(ends[0]))}-{number(power(ends[1]))}x)" if ends else ""
        rest = ", a norm of" if left else "; the actor's has a norm of"
        rest = "" if effective is None else f"{rest} {number(effective)}{view.usual(EFFECTIVE)}"
        return f"the critic's gradient has been {times(power(ratio))} the actor's{usual}{left}{rest}, so the actor hardly learns"

    wrong = (dominated and share > limits[STARVED_SHARE]) or starved
    own = effective / coef if effective is not None and coef else None
    nothing = own is not None and own < limits[STARVED_FLOOR]
    limit = view.facts.max_grad_norm
    tight = limit is not None and 0 < limit < PUBLISHED["max_grad_norm"].lowest
    decided = view.values.get("policy/entropy_norm", 1.0) < DECIDED_ENTROPY
    advice = (SATURATED if decided else NO_ACTOR_GRADIENT) if nothing else TIGHT_CLIP if tight else None
    finding = Finding(hard(wrong), RATIO, ratio, adaptive=True, z=z)
    yield finding.with_advice((lambda: advice) if advice else None).with_text(text)


NO_ACTOR_GRADIENT = (
    "The actor's gradient is close to 0 even before clipping, so rescaling returns cannot help. Check that advantages vary; check that "
    "they have the shape of the ratios ([N] and [N, 1] broadcast to [N, N]); check that the log-probabilities require gradients."
)
SATURATED = "The policy has become deterministic, so its gradient vanishes: restart with a lower learning rate."
TIGHT_CLIP = "Raise max_grad_norm: gradients below Adam's epsilon hardly change the weights."
"""Advice if the actor's gradient is small before clipping, and if the clip limit is below all published ones."""

INTERFERENCE = Ramp("interference", 0.2, 0.7, "negative average cosine of the two losses' gradients")


@reading("grad/interference/cos")
def interference(view: View, cosine: float, cosines: Recent) -> Iterator[Finding]:
    """Opposed gradients of actor and critic, averaged over ten measurements."""
    mean = cosines.mean(cosine)
    if mean is not None:
        severity, bound = view.limits.severity(INTERFERENCE, -mean), -view.limits.middle(INTERFERENCE)
        words = (
            "the gradients of actor and critic in the shared network have pointed in opposite directions, so each undoes the other's "
            "changes: their cosine averages {}"
        )
        yield Finding(severity, "grad/interference/cos", mean, bound).says(words, mean)


CLIP_COEF = below("clip_coef", 0.01, "share of the gradient that clipping leaves")
CLIP_FALL = above("clip_fall", 1.0, "decades by which that share fell below its median")


@reading("grad/clip/coef")
def clip_saturated(view: View, value: float) -> Iterator[Finding]:
    """Clipping that leaves very little of the gradient, and left more before."""
    key, bound = "grad/clip/coef", view.limits[CLIP_COEF]
    shift = view.baselines.shift.get(key)
    if shift is not None:
        wrong = value < bound and shift < -view.limits[CLIP_FALL]
        finding = Finding(hard(wrong), key, value, bound, z=view.z(key))
        words = "clipping has left only {:%} of the gradient{}, so it determines the step size more than the learning rate does"
        yield finding.says(words, value, partial(view.usual, key, percent))


gradient_alarm = partial(alarm, pieces=("layers", "transitions", "pairs"), histograms=("grad/decades",))
"""Declares an alarm with all gradients as evidence."""

RULES = (
    gradient_alarm("grad/explode", rank=280, relative=True, debug_updates=5)
    .reads("grad/global/norm_preclip_max", "grad/global/norm_preclip")
    .needs(PEAK)
    .follows(PEAK)
    .changes(learning_rate=1 / 3, max_grad_norm=1 / 2)
    .says(
        "Gradients are far larger than usual in this run.",
        "Clip by the global norm (max_grad_norm 0.5), lower the learning rate, look for outliers in returns; the layers in the "
        "alarm's evidence show where the gradient is large.",
        "Clipping absorbs the spike of one minibatch, so two updates in a row count; without clipping, one. Bounds relative to the clip "
        "limit are not used: with unscaled returns the critic's gradient is a thousand times the limit from the first update on.",
    )
    .shows(*NORM_EVIDENCE, "loss/*", "ret/std", "opt/lr")
    .judged(StateJudge(explode, Explosion()), *OUTLIER_BOUNDS),
    gradient_alarm("grad/vanish", rank=190, relative=True, debug_updates=5)
    .reads("grad/layer/{layer}/norm", "grad/head/{head}/norm", "grad/{group}/severity_vanish", "grad/zero_frac")
    .reads("grad/layer/{layer}/zero_frac")
    .needs(f"{LAYER}{{layer}}{NORM}")
    .follows("grad/layer/*/norm", "grad/head/*/norm", "loss/value")
    .says(
        "The gradient of a part of the network has vanished.",
        "Look for dead ReLUs (repr/dormant_frac), saturated tanhs, a detached branch; lower the learning rate, use another activation.",
        "A group with a head never falls to 0, so each layer is compared with its own median: exactly 0, or three decades below. The "
        "critic's gradient also falls when all returns become equal; the part of the fall that its error explains does not count.",
    )
    .shows(*NORM_EVIDENCE, "grad/zero_frac", "repr/dormant_frac*")
    .judged(vanish, VANISH, VANISH_SHARE),
    gradient_alarm("grad/missing_group", rank=90, hard=True, claim=True, certain=True, n_off=1, debug_updates=10)
    .reads("grad/{group}/norm_preclip")
    .needs(GLOBAL, facts=("groups",))
    .says(
        "A part of the network that should be trained gets no gradient.",
        "Look for detach(), no_grad or requires_grad=False between the loss and this part; check that the optimizer has its parameters; "
        "call zero_grad(), then backward(), then step().",
        "A tensor without a gradient is not trained, even if the rest of its group is.",
    )
    .shows("grad/*/norm_preclip", "opt/lr")
    .judged(StateJudge(missing_group, dict[str, frozenset[str]]())),
    gradient_alarm("grad/actor_starved", RATIO, SHARE, EFFECTIVE, rank=250, relative=True, n_on=2, debug_updates=5)
    .needs(RATIO, SHARE)
    .follows(History(RATIO, linear=True), EFFECTIVE)
    .changes("max_grad_norm", "learning_rate", value_coef=1 / 2)
    .says(
        "The critic's gradient fills the clip limit, so clipping leaves the actor too small a gradient to learn.",
        "Normalise returns, lower value_coef, use separate networks or clip their gradients separately.",
        "With unscaled returns the critic dominates from the start and the run can still learn. So a change counts; from the start, only "
        "an actor's gradient below Adam's epsilon (1e-5) does.",
    )
    .shows("grad/interference/*", "grad/clip/*", "ret/std", "loss/*")
    .judged(actor_starved, STARVED_Z, STARVED_SHARE, STARVED_EFFECTIVE_Z, STARVED_FLOOR),
    gradient_alarm("grad/interference", effect=True, sampled=True, warmup=20, n_on=3, debug_updates=3)
    .reads("grad/interference/cos", "grad/interference/cancel")
    .needs(applies=lambda facts: bool(facts.groups.get("shared")))
    .says(
        "Actor and critic pull the shared network in opposite directions.",
        "Use separate networks, or lower value_coef.",
        "single cosines vary by ±0.5 in healthy runs; PCGrad",
    )
    .shows("grad/interference/*")
    .judged(StateJudge(interference, Recent(10)), INTERFERENCE),
    gradient_alarm("grad/clip_saturated", effect=True, relative=True, n_on=2, debug_updates=3)
    .reads("grad/clip/coef", "grad/clip/coef_min", "grad/clip/excess_log10")
    .needs(applies=lambda facts: facts.max_grad_norm is not None)
    .follows("grad/clip/coef")
    .says(
        "Clipping leaves only a small part of the gradients, so it determines the step size more than the learning rate does.",
        "If the critic causes it (grad/interference/critic_share close to 1), normalise returns or lower value_coef; otherwise raise "
        "max_grad_norm.",
        "Healthy runs with unscaled returns always clip to 2 %, so the share must have fallen tenfold.",
    )
    .shows("grad/*/norm_preclip", "grad/interference/*", "grad/clip/*")
    .judged(clip_saturated, CLIP_COEF, CLIP_FALL),
)
