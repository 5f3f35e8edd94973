"""The optimizer: steps too large, none at all, a memory that no longer fits; and the features: dead units, lost dimensions, growth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from esper_telemetry.alarms.alarm_bounds import Ramp, above, below, hard
from esper_telemetry.alarms.judges import RATE_GROWN, AboveBound, AnnealedRate, Recent, StateJudge, list_names, reading
from esper_telemetry.alarms.rule import Finding, View, alarm, segment_of
from esper_telemetry.core.messages import number

SIZE, RATE = "opt/update_to_weight", "opt/lr"
REWARD_UPDATES = 20  # updates in which gaps between rewards are looked for
UPDATE_TO_WEIGHT = Ramp("update_to_weight", 0.03, 0.3, "size of one optimizer step relative to the weights")
RATE_JUMP = above("rate_jump", 4.0, "learning rate over that of the update before, where it exceeds what was set")


@dataclass(slots=True)
class StepSizes:
    """Size of a step over the learning rate when it was measured, and the learning rate before its latest jump."""

    per_rate: float | None = None
    rate_before_jump: float | None = None


def update_size(view: View, past: StepSizes) -> Iterator[Finding]:
    """Optimizer steps that change the weights by a large share of themselves.

    Between the updates in which this is measured, the learning rate says how it has changed: steps of Adam are proportional to it. A rate
    that follows the KL divergence says nothing: RSL-RL changes it with every step, by a factor of a hundred within an update.
    """
    yield from jumping_rate(view, past)
    value, rate = view.get(SIZE), view.get(RATE)
    if value is not None and rate:
        past.per_rate = value / rate
    if rate is None or past.per_rate is None or (value is None and view.facts.desired_kl):
        return
    size = past.per_rate * rate
    severity = view.limits.log_severity(UPDATE_TO_WEIGHT, size)
    yield Finding(severity, SIZE, size, view.limits.log_middle(UPDATE_TO_WEIGHT)).says(
        "every optimizer step changes the weights by {:%} of themselves (usual are 0.01 % to 1 %), at a learning rate of {}",
        *(size, rate),
    )


def jumping_rate(view: View, past: StepSizes) -> Iterator[Finding]:
    """A learning rate that has jumped from one update to the next, above what was set; where it follows the KL it may."""
    rate, before, asked = view.get(RATE), view.previous.get(RATE), view.facts.learning_rate
    if rate is None or not before or not asked or view.facts.desired_kl:
        return
    limit = view.limits[RATE_GROWN] * asked
    if rate > limit and rate >= view.limits[RATE_JUMP] * before:
        past.rate_before_jump = before
    elif not rate > limit:
        past.rate_before_jump = None
    origin = past.rate_before_jump
    yield Finding(hard(origin is not None), RATE, rate, limit, instance="rate").says(
        "the learning rate has jumped from {} to {}, {:x} the {} that was set",
        origin or rate,
        rate,
        rate / asked,
        asked,
    )


MOVED_KL = 1e-5  # KL divergence within an update from which on the policy moves for certain


@dataclass(slots=True)
class Learning:
    """Course of the learning rate, and whether gradients have been seen: a scripted controller has none, and a rate of 0."""

    rates: AnnealedRate = field(default_factory=AnnealedRate)
    begun: bool = False


def stalled_weights(view: View, past: Learning) -> Iterator[Finding]:
    """A tensor that has a gradient and does not move, or a learning rate that fell to 0 at once.

    A learning rate that is logged as 0 while the policy moves is not the one of the optimizer.
    """
    annealed, rate = past.rates.stopped(view), view.get(RATE)
    declared = {segment_of(name) for names in view.facts.groups.values() for name in names}
    measured = [row for row in view.labelled(f"{SIZE}/", "") if row[0] in declared]
    past.begun = past.begun or "grad/global/norm_preclip" in view.values
    if rate is None or (not measured and rate > 0) or not past.begun:
        return
    stopped = rate == 0 and view.values.get("policy/kl_max", 0.0) < MOVED_KL
    norms = {layer: view.values.get(f"grad/layer/{layer}/norm", 0.0) for layer, _, value in measured if value == 0}
    still = [layer for layer, norm in norms.items() if norm > 0]
    key = f"{SIZE}/{still[0]}" if still else RATE
    finding = Finding(hard(not annealed and (stopped or bool(still))), key, 0.0, 0.0)
    if rate == 0:
        yield finding.says("the learning rate has been 0: no weight moves")
        return
    advice = "Check that the optimizer has these weights, and a learning rate for them."
    yield finding.with_advice(lambda: advice).says("weights have a gradient and do not move: {}", list_names(still))


REACH = below("memory_updates", 1.0, "updates that Adam's memory of squared gradients lasts, where rewards are rare")
STABLE_RMS = Ramp("stable_rms", 5.0, 20.0, "gradient over Adam's memory of it, root mean square")
STABLE_RMS_SUDDEN = Ramp("stable_rms_sudden", 10.0, 40.0, "the same at a single look, the one before it being smaller")


@dataclass(slots=True)
class AdamReach:
    """Gradient over Adam's memory of it at the look before, whether the latest updates had rewards, and the longest reach of the memory."""

    before: float = 0.0
    paid: list[bool] = field(default_factory=list)
    longest_reach: float = 0.0


def rms_spike(view: View, past: AdamReach) -> Iterator[Finding]:
    """Gradients that have outgrown Adam's memory of them, or a memory that is too short for rewards that are rare."""
    yield from short_memory(view, past)
    key, limits = "opt/stable_rms", view.limits
    value = view.get(key)
    if value is not None:
        before, past.before = past.before, value
        lasting = limits.log_severity(STABLE_RMS, min(value, before))
        severity = max(lasting, limits.log_severity(STABLE_RMS_SUDDEN, value))
        words = "gradients have been {} times what Adam remembers of them (settled: about 1)"
        yield Finding(severity, key, value, limits.log_middle(STABLE_RMS)).says(words, value)


def short_memory(view: View, past: AdamReach) -> Iterator[Finding]:
    """Adam forgets within one update, and did not before; or rewards come in some updates only, and are forgotten in between."""
    beta2, zeros, steps, paid = view.get("opt/beta2"), view.get("reward/zero_frac"), view.steps, past.paid
    if zeros is not None:
        paid.append(zeros < 1)
        del paid[:-REWARD_UPDATES]
    if beta2 is None or not steps or not 0 <= beta2 < 1:
        return
    reach, need = 1 / (1 - beta2), view.limits[REACH] * steps
    before = past.longest_reach = max(past.longest_reach, reach)
    rare = any(paid) and not all(paid)
    why = f"it reached back {number(before)} before"
    if rare:
        why = f"rewards came in {paid.count(True)} of the last {len(paid)} updates"
    wrong, bound = hard(reach < need and (rare or before >= need)), 1 - 1 / max(1.0, need)
    yield Finding(wrong, "opt/beta2", beta2, bound, instance="memory").says(
        "Adam's memory of squared gradients reaches back {} steps, less than the {} of an update, and {}: a gradient that is larger than "
        "usual meets a memory that has forgotten the like",
        *(reach, str(steps), why),
    )


DORMANT, RANK, NORM = "repr/dormant_frac", "repr/effective_rank", "repr/feature_norm"
DORMANT_SHARE = Ramp("dormant", 0.35, 0.75, "share of units that respond to nothing")
RANK_FALL = below("rank_fall", 0.33, "effective rank relative to its median")
NORM_GROWTH = Ramp("norm_growth", 4.0, 16.0, "norm of the features relative to what it was")


def dormant(view: View) -> Iterator[Finding]:
    """Units that respond to nothing, over all layers and in each."""
    whole = [("", DORMANT, view.values[DORMANT])] if DORMANT in view.values else []
    bound = view.limits.middle(DORMANT_SHARE)
    for layer, key, value in [*whole, *view.labelled(f"{DORMANT}/", "")]:
        finding = Finding(view.limits.severity(DORMANT_SHARE, value), key, value, bound, instance=layer)
        of_layer = f" of {layer}" if layer else ""
        yield finding.says(f"{{:%}} of the units{of_layer} respond to nothing any more", value)


@reading(RANK)
def rank_collapse(view: View, value: float, ranks: Recent) -> Iterator[Finding]:
    """Features that use far fewer dimensions than they did."""
    usual = ranks.earlier_median(value)
    if usual is not None:
        bound = view.limits[RANK_FALL] * usual
        finding = Finding(hard(value < bound), RANK, value, bound, adaptive=True)
        yield finding.says("the features use {} dimensions instead of {}", value, usual)


@reading(NORM)
def norm_growth(view: View, value: float, norms: Recent) -> Iterator[Finding]:
    """Features that grow away from what they were."""
    usual = norms.earlier_median(value)
    if usual:
        low, high = view.limits.ends(NORM_GROWTH)
        severity = view.limits.severity(NORM_GROWTH, value / usual)
        finding = Finding(severity, NORM, value, usual * (low + high) / 2, adaptive=True)
        yield finding.says("the features have grown to {:x} what they were, a norm of {}", value / usual, value)


feature_alarm = partial(alarm, debug_updates=5, pieces=("layers",), sampled=True)
"""Declare an alarm of features, which are measured in some updates only."""

RULES = (
    alarm("opt/update_too_large", rank=180, warmup=3, n_off=2, debug_updates=5)
    .reads(SIZE, RATE, "opt/update_to_weight/{layer}")
    .needs(SIZE, RATE)
    .changes("learning_rate")
    .says(
        "A step changes the weights by a large share of themselves.",
        "Lower the learning rate, or warm it up.",
        "per optimizer step; CS231n: 0.001 is usual. A learning rate that jumps above what was set is no schedule",
    )
    .shows("opt/update_to_weight*", RATE, "policy/kl", pieces=("layers",))
    .judged(StateJudge(update_size, StepSizes()), UPDATE_TO_WEIGHT, RATE_JUMP, RATE_GROWN),
    alarm("opt/stalled_weights", rank=110, hard=True, claim=True, certain=True, n_off=1, debug_updates=5)
    .reads(RATE, "opt/update_to_weight/{layer}")
    .needs(RATE, "grad/global/norm_preclip", facts=("groups",))
    .says(
        "Weights that are meant to be trained do not move.",
        "Set a learning rate that is not 0, or correct the schedule that leads there.",
        "A schedule that ends at 0 comes there in small steps; a tensor without gradient is another question.",
    )
    .shows(RATE, "opt/update_to_weight/*", "policy/kl_max", pieces=("layers",))
    .judged(StateJudge(stalled_weights, Learning())),
    alarm("opt/rms_spike", effect=True, relative=True, sampled=True, warmup=20, debug_updates=3)
    .reads("opt/stable_rms", "opt/beta2")
    .says(
        "Gradients have outgrown Adam's memory of them: the loss tends to jump some steps later.",
        "Lower beta2 (0.95), warm up the learning rate, clip gradients.",
        "Wortsman 2023 has 2.3 for language models; PPO's gradients jump at every new rollout, and to 6 for three updates where "
        "a task that is nearly solved fails once more: 10 at two looks in a row, or 20.",
    )
    .shows("opt/stable_rms", "grad/global/norm_preclip", RATE, pieces=("layers",))
    .judged(StateJudge(rms_spike, AdamReach()), REACH, STABLE_RMS, STABLE_RMS_SUDDEN),
    alarm("opt/state_lost", "opt/state_reset", rank=120, sampled=True, warmup=2, n_off=1, debug_updates=2)
    .says(
        "The optimizer was created again in the middle of training, and its moments are gone.",
        "Save and load the optimizer with the policy; do not build it again when parameters are added.",
        "steps of a fresh Adam are large whatever the gradient",
    )
    .shows("opt/state_reset", "opt/stable_rms", pieces=("layers",))
    .judged(AboveBound("opt/state_reset", 0.0, "the optimizer has lost its moments: it was created again")),
    feature_alarm("repr/dormant", DORMANT, "repr/dead_frac", "repr/dormant_frac/{layer}", rank=200)
    .says(
        "Many units no longer respond to anything.",
        "Lower the learning rate, use tanh or layer norm, reset dormant units.",
        "Sokar 2023",
    )
    .shows("repr/dormant_frac*", "repr/dead_frac", "grad/layer/*/zero_frac")
    .judged(dormant, DORMANT_SHARE),
    feature_alarm("repr/rank_collapse", RANK, "repr/feature_rank", "repr/srank", relative=True, warmup=10, n_on=2)
    .says(
        "The features use far fewer dimensions than before: the network loses the ability to tell states apart.",
        "Fewer epochs, a lower learning rate, regularise features (Moalla 2024), normalise observations.",
        "Moalla 2024, Kumar 2021; a third instead of half, which a task that is solved takes: its states become alike",
    )
    .shows("repr/*")
    .judged(StateJudge(rank_collapse, Recent(20)), RANK_FALL),
    feature_alarm("repr/norm_growth", effect=True, relative=True, warmup=20, n_on=3, n_off=5, debug_updates=3)
    .reads(NORM, "opt/weight_growth")
    .says(
        "Features grow, which precedes a collapse of their rank.",
        "Weight decay, layer norm, a lower learning rate.",
        "Features double while a task is learned; tenfold within twenty looks is another matter. Moalla 2024",
    )
    .shows("repr/feature_norm", "opt/weight_growth", "repr/effective_rank")
    .judged(StateJudge(norm_growth, Recent(20)), NORM_GROWTH),
)
