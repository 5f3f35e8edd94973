"""Alarms about the optimizer (step size, stalled weights, Adam's state) and about features (dormant units, rank, growth)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf

from esper_telemetry.alarms.alarm_bounds import Ramp, above, below, hard
from esper_telemetry.alarms.judges import RATE_GROWN, AboveBound, AnnealedRate, Recent, StateJudge, list_names, reading
from esper_telemetry.alarms.rule import Finding, View, alarm, segment_of
from esper_telemetry.core.messages import number

SIZE, RATE = "opt/update_to_weight", "opt/lr"
REWARD_UPDATES = 20  # updates in which gaps between rewards are searched
UPDATE_TO_WEIGHT = Ramp("update_to_weight", 0.03, 0.3, "size of one optimizer step relative to the weights")
RATE_JUMP = above("rate_jump", 4.0, "learning rate over the previous update's, if it exceeds the setting")


@dataclass(slots=True)
class StepSizes:
    """Step size over learning rate when last measured, and the learning rate before its latest jump."""

    per_rate: float | None = None
    rate_before_jump: float | None = None


def update_size(view: View, past: StepSizes) -> Iterator[Finding]:
    """Optimizer steps that are large relative to the weights.

    Between measurements the step size is extrapolated by the learning rate, to which steps of Adam are proportional. An adaptive learning
    rate is not used for this: RSL-RL changes it in every step, by up to a factor of a hundred within an update.
    """
    yield from jumping_rate(view, past)
    value, rate = view.get(SIZE), view.get(RATE)
    if value is not None and rate:
        past.per_rate = value / rate
    if rate is None or past.per_rate is None or (value is None and view.facts.rate_follows_kl):
        return
    size = past.per_rate * rate
    severity = view.limits.log_severity(UPDATE_TO_WEIGHT, size)
    yield Finding(severity, SIZE, size, view.limits.log_middle(UPDATE_TO_WEIGHT)).says(
        "optimizer steps have changed the weights by {:%} of their size (usually 0.01 % to 1 %), at a learning rate of {}", *(size, rate)
    )


def jumping_rate(view: View, past: StepSizes) -> Iterator[Finding]:
    """A learning rate that has jumped from one update to the next, beyond the setting, without following the KL."""
    rate, before, asked = view.get(RATE), view.previous.get(RATE), view.facts.learning_rate
    if rate is None or not before or not asked or view.facts.rate_follows_kl:
        return
    limit = view.limits[RATE_GROWN] * asked
    if rate > limit and rate >= view.limits[RATE_JUMP] * before:
        past.rate_before_jump = before
    elif not rate > limit:
        past.rate_before_jump = None
    origin = past.rate_before_jump
    yield Finding(hard(origin is not None), RATE, rate, limit, instance="rate").says(
        "the learning rate has jumped from {} to {}, {:x} the setting of {}", origin or rate, rate, rate / asked, asked
    )


MOVED_KL = 1e-5  # KL divergence of an update above which the policy moves for certain


@dataclass(slots=True)
class Learning:
    """Course of the learning rate, and whether gradients were recorded: a scripted controller has none, and a learning rate of 0."""

    rates: AnnealedRate = field(default_factory=AnnealedRate)
    begun: bool = False


def stalled_weights(view: View, past: Learning) -> Iterator[Finding]:
    """A tensor that has a gradient but does not move, or a learning rate that fell to 0 abruptly.

    A learning rate logged as 0 while the policy moves is not the optimizer's.
    """
    annealed, rate = past.rates.stopped(view), view.get(RATE)
    declared = {segment_of(name) for names in view.facts.groups.values() for name in names}
    measured = [row for row in view.labelled(f"{SIZE}/", "") if row[0] in declared]
    past.begun = past.begun or "grad/global/norm_preclip" in view.values
    if rate is None or (not measured and rate > 0) or not past.begun:
        return
    first = RATE not in view.previous  # the step that was measured may be a warm-up's, at a rate of 0
    stopped = rate == 0 and view.values.get("policy/kl_max", 0.0) < MOVED_KL
    norms = {layer: view.values.get(f"grad/layer/{layer}/norm", 0.0) for layer, _, value in measured if value == 0}
    still = [layer for layer, norm in norms.items() if norm > 0]
    key = f"{SIZE}/{still[0]}" if still else RATE
    finding = Finding(hard(not (annealed or first) and (stopped or bool(still))), key, 0.0, 0.0)
    if rate == 0:
        yield finding.says("the learning rate has been 0, so the weights do not change")
        return
    advice = "Check that these weights are in the optimizer, in a parameter group with a learning rate above 0."
    yield finding.with_advice(lambda: advice).says("weights have had a gradient but have not changed: {}", list_names(still))


REACH = below("memory_updates", 1.0, "updates covered by Adam's average of squared gradients, if rewards are rare")
STABLE_RMS = Ramp("stable_rms", 5.0, 20.0, "gradient over Adam's running average of it, root mean square")
STABLE_RMS_SUDDEN = Ramp("stable_rms_sudden", 10.0, 40.0, "the same for a single measurement after a smaller one")


STEP_OVER_RATE = above("step_over_rate", 1.0, "optimizer step over the learning rate, root mean square, in addition")


@dataclass(slots=True)
class AdamReach:
    """Previous ratio of the gradient to Adam's average of it, whether the latest updates had rewards, and the longest averaging time."""

    before: float = 0.0
    paid: list[bool] = field(default_factory=list)
    longest_reach: float = 0.0


def rms_spike(view: View, past: AdamReach) -> Iterator[Finding]:
    """Gradients far larger than Adam's average of them that cause large steps, or an averaging time too short for rare rewards.

    The gradients of a solved task are so small that any failure outgrows their average, with a step that is as small as others.
    """
    yield from short_memory(view, past)
    key, limits = "opt/stable_rms", view.limits
    value = view.get(key)
    if value is not None:
        before, past.before = past.before, value
        lasting = limits.log_severity(STABLE_RMS, min(value, before))
        large = view.values.get("opt/update_rms_over_lr", inf) > limits[STEP_OVER_RATE]
        severity = max(lasting, limits.log_severity(STABLE_RMS_SUDDEN, value)) if large else 0.0
        words = "gradients have been {} times as large as Adam's running average of them (settled: about 1), so steps are too large"
        yield Finding(severity, key, value, limits.log_middle(STABLE_RMS)).says(words, value)


def short_memory(view: View, past: AdamReach) -> Iterator[Finding]:
    """Adam's averaging time has become shorter than an update; or it is, and rewards occur only in some updates."""
    beta2, zeros, steps, paid = view.get("opt/beta2"), view.get("reward/zero_frac"), view.steps, past.paid
    if zeros is not None:
        paid.append(zeros < 1)
        del paid[:-REWARD_UPDATES]
    if beta2 is None or not steps or not 0 <= beta2 < 1:
        return
    reach, need = 1 / (1 - beta2), view.limits[REACH] * steps
    before = past.longest_reach = max(past.longest_reach, reach)
    rare = any(paid) and not all(paid)
    why = f"it was {number(before)} steps before"
    if rare:
        why = f"only {paid.count(True)} of the last {len(paid)} updates had rewards"
    wrong, bound = hard(reach < need and (rare or before >= need)), 1 - 1 / max(1.0, need)
    yield Finding(wrong, "opt/beta2", beta2, bound, instance="memory").says(
        "Adam averages squared gradients over {} steps, fewer than the {} of an update, and {}: the next large gradient causes a very "
        "large step",
        *(reach, str(steps), why),
    )


DORMANT, RANK, NORM = "repr/dormant_frac", "repr/effective_rank", "repr/feature_norm"
DORMANT_SHARE = Ramp("dormant", 0.35, 0.75, "share of dormant units")
RANK_FALL = below("rank_fall", 0.33, "effective rank relative to its median")
NORM_GROWTH = Ramp("norm_growth", 4.0, 16.0, "norm of the features relative to its median")


def dormant(view: View) -> Iterator[Finding]:
    """Dormant units, over all layers and in each."""
    whole = [("", DORMANT, view.values[DORMANT])] if DORMANT in view.values else []
    bound = view.limits.middle(DORMANT_SHARE)
    for layer, key, value in [*whole, *view.labelled(f"{DORMANT}/", "")]:
        finding = Finding(view.limits.severity(DORMANT_SHARE, value), key, value, bound, instance=layer)
        of_layer = f" of {layer}" if layer else ""
        yield finding.says(f"{{:%}} of the units{of_layer} have been dormant: they no longer respond to any input", value)


@reading(RANK)
def rank_collapse(view: View, value: float, ranks: Recent) -> Iterator[Finding]:
    """Features that use far fewer dimensions than before."""
    usual = ranks.earlier_median(value)
    if usual is not None:
        bound = view.limits[RANK_FALL] * usual
        finding = Finding(hard(value < bound), RANK, value, bound, adaptive=True)
        yield finding.says("the features have used {} dimensions instead of {}, so the network can tell fewer states apart", value, usual)


@reading(NORM)
def norm_growth(view: View, value: float, norms: Recent) -> Iterator[Finding]:
    """Features whose norm is far above its median."""
    usual = norms.earlier_median(value)
    if usual:
        low, high = view.limits.ends(NORM_GROWTH)
        severity = view.limits.severity(NORM_GROWTH, value / usual)
        finding = Finding(severity, NORM, value, usual * (low + high) / 2, adaptive=True)
        words = "the features have grown to {:x} their usual norm, to {}, which often precedes a collapse of their rank"
        yield finding.says(words, value / usual, value)


feature_alarm = partial(alarm, debug_updates=5, pieces=("layers",), sampled=True)
"""Declares an alarm about features, which are measured in sampled updates only."""

RULES = (
    alarm("opt/update_too_large", rank=180, warmup=3, n_off=2, debug_updates=5)
    .reads(SIZE, RATE, "opt/update_to_weight/{layer}")
    .needs(SIZE, RATE)
    .changes(learning_rate=1 / 3)
    .says(
        "An optimizer step changes the weights by a large share of their size.",
        "Lower the learning rate, or warm it up.",
        "per optimizer step; CS231n: 0.001 is usual. A schedule does not jump above the learning rate that was set",
    )
    .shows("opt/update_to_weight*", RATE, "policy/kl", pieces=("layers",))
    .judged(StateJudge(update_size, StepSizes()), UPDATE_TO_WEIGHT, RATE_JUMP, RATE_GROWN),
    alarm("opt/stalled_weights", rank=110, hard=True, claim=True, certain=True, n_off=1, debug_updates=5)
    .reads(RATE, "opt/update_to_weight/{layer}")
    .needs(RATE, "grad/global/norm_preclip", facts=("groups",))
    .says(
        "Weights that should be trained do not change.",
        "Set a learning rate above 0, or correct the schedule that lowered it to 0.",
        "A schedule that ends at 0 gets there in small steps; tensors without a gradient have another alarm.",
    )
    .shows(RATE, "opt/update_to_weight/*", "policy/kl_max", pieces=("layers",))
    .judged(StateJudge(stalled_weights, Learning())),
    alarm("opt/rms_spike", effect=True, relative=True, sampled=True, warmup=20, debug_updates=3)
    .reads("opt/stable_rms", "opt/beta2", "opt/update_rms_over_lr")
    .says(
        "Gradients are far larger than Adam's running average of them: the loss tends to jump a few steps later.",
        "Lower beta2 (0.95), warm up the learning rate, clip gradients.",
        "Wortsman 2023 reports 2.3 for language models. PPO's gradients jump with every new rollout, and to 6 for three updates when a "
        "nearly solved task fails again. So the bound is 10 in two measurements in a row, or 20, with steps above the learning rate, which "
        "Adam's steps usually do not exceed (Kingma 2015, section 2.1).",
    )
    .shows("opt/stable_rms", "grad/global/norm_preclip", RATE, pieces=("layers",))
    .judged(StateJudge(rms_spike, AdamReach()), REACH, STABLE_RMS, STABLE_RMS_SUDDEN, STEP_OVER_RATE),
    alarm("opt/state_lost", "opt/state_reset", rank=120, sampled=True, warmup=2, n_off=1, debug_updates=2)
    .says(
        "The optimizer was recreated during training and has lost its moments.",
        "Save and load the optimizer with the policy; do not recreate it when parameters are added.",
        "the first steps of a new Adam are large even if the gradient is small",
    )
    .shows("opt/state_reset", "opt/stable_rms", pieces=("layers",))
    .judged(AboveBound("opt/state_reset", 0.0, "the optimizer has been recreated without its moments, so its first steps are large")),
    feature_alarm("repr/dormant", DORMANT, "repr/dead_frac", "repr/dormant_frac/{layer}", rank=200)
    .says(
        "Many units no longer respond to any input.", "Lower the learning rate, use tanh or layer norm, reset dormant units.", "Sokar 2023"
    )
    .shows("repr/dormant_frac*", "repr/dead_frac", "grad/layer/*/zero_frac")
    .judged(dormant, DORMANT_SHARE),
    feature_alarm("repr/rank_collapse", RANK, "repr/feature_rank", "repr/srank", relative=True, warmup=10, n_on=2)
    .says(
        "The features use far fewer dimensions than before: the network can tell fewer states apart.",
        "Use fewer epochs or a lower learning rate, regularise features (Moalla 2024), normalise observations.",
        "Moalla 2024, Kumar 2021; a third instead of half, because solving a task also lowers the rank: its states become similar",
    )
    .shows("repr/*")
    .judged(StateJudge(rank_collapse, Recent(20)), RANK_FALL),
    feature_alarm("repr/norm_growth", effect=True, relative=True, warmup=20, n_on=3, n_off=5, debug_updates=3)
    .reads(NORM, "opt/weight_growth")
    .says(
        "The norm of the features grows, which often precedes a collapse of their rank.",
        "Use weight decay, layer norm or a lower learning rate.",
        "The norm doubles while a task is learned, but does not grow tenfold within twenty measurements. Moalla 2024",
    )
    .shows("repr/feature_norm", "opt/weight_growth", "repr/effective_rank")
    .judged(StateJudge(norm_growth, Recent(20)), NORM_GROWTH),
)
