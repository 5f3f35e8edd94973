"""The optimizer: steps too large, none at all, a memory that no longer fits; and the features: dead units, lost dimensions, growth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from esper_telemetry.alarms.judges import RATE_GROWN, AboveBound, AnnealedRate, RollingMedian, list_names
from esper_telemetry.alarms.rule import (
    AlarmRule,
    Finding,
    Ramp,
    View,
    above,
    below,
    hard,
    number,
    percent,
    segment_of,
    times,
)

SIZE, RATE = "opt/update_to_weight", "opt/lr"

REWARD_UPDATES = 20
"""Updates in which gaps between rewards are looked for."""

UPDATE_TO_WEIGHT = Ramp("update_to_weight", 0.03, 0.3, "size of one optimizer step relative to the weights")
RATE_JUMP = above("rate_jump", 4.0, "learning rate over that of the update before, where it exceeds what was set")


@dataclass(slots=True)
class UpdateSizeJudge:
    """Optimizer steps that change the weights by a large share of themselves.

    Between the updates in which this is measured, the learning rate says how it has changed: steps of Adam are proportional to it. A rate
    that follows the KL divergence says nothing: RSL-RL changes it with every step, by a factor of a hundred within an update.
    """

    size_per_rate: float | None = None
    rate_before_jump: float | None = None

    def __call__(self, view: View) -> Iterator[Finding]:
        yield from self.jumping_rate(view)
        value, rate = view.get(SIZE), view.get(RATE)
        if value is not None and rate:
            self.size_per_rate = value / rate
        if rate is None or self.size_per_rate is None or (value is None and view.facts.desired_kl):
            return
        size = self.size_per_rate * rate
        yield Finding(
            view.limits.log_severity(UPDATE_TO_WEIGHT, size), SIZE, size, view.limits.log_middle(UPDATE_TO_WEIGHT)
        ).with_text(
            lambda: (
                f"every optimizer step changes the weights by {percent(size)} of themselves (usual are 0.01 % to 1 %), "
                f"at a learning rate of {number(rate)}"
            )
        )

    def jumping_rate(self, view: View) -> Iterator[Finding]:
        """A learning rate that has jumped from one update to the next, above what was set; where it follows the KL it may."""
        rate, before, asked = view.get(RATE), view.previous.get(RATE), view.facts.learning_rate
        if rate is None or not before or not asked or view.facts.desired_kl:
            return
        limit = view.limits[RATE_GROWN] * asked
        if rate > limit and rate >= view.limits[RATE_JUMP] * before:
            self.rate_before_jump = before
        elif not rate > limit:
            self.rate_before_jump = None
        origin = self.rate_before_jump
        yield Finding(hard(origin is not None), RATE, rate, limit, instance="rate").with_text(
            lambda: (
                f"the learning rate has jumped from {number(origin or rate)} to {number(rate)}, "
                f"{times(rate / asked)} the {number(asked)} that was set"
            )
        )


MOVED_KL = 1e-5
"""KL divergence within an update from which on the policy moves for certain."""


@dataclass(slots=True)
class StalledWeightsJudge(AnnealedRate):
    """A tensor that has a gradient and does not move, or a learning rate that fell to 0 at once.

    Attributes:
        learns: gradients have been seen: a scripted controller has a learning rate of 0 and none of them.

    A learning rate that is logged as 0 while the policy moves is not the one of the optimizer.
    """

    learns: bool = False

    def __call__(self, view: View) -> Iterator[Finding]:
        annealed = self.stopped(view)
        rate = view.get(RATE)
        declared = {segment_of(name) for names in view.facts.groups.values() for name in names}
        measured = [row for row in view.labelled(f"{SIZE}/", "") if row[0] in declared]
        self.learns = self.learns or "grad/global/norm_preclip" in view.values
        if rate is None or (not measured and rate > 0) or not self.learns:
            return
        stopped = rate == 0 and view.values.get("policy/kl_max", 0.0) < MOVED_KL
        still = [
            layer for layer, _, value in measured if value == 0 and view.values.get(f"grad/layer/{layer}/norm", 0.0) > 0
        ]
        yield (
            Finding(hard(not annealed and (stopped or bool(still))), f"{SIZE}/{still[0]}" if still else RATE, 0.0, 0.0)
            .with_advice(
                None
                if rate == 0
                else lambda: "Check that the optimizer has these weights, and a learning rate for them."
            )
            .with_text(
                lambda: (
                    "the learning rate has been 0: no weight moves"
                    if rate == 0
                    else f"weights have a gradient and do not move: {list_names(still)}"
                )
            )
        )


MEMORY_UPDATES = below(
    "memory_updates", 1.0, "updates that Adam's memory of squared gradients lasts, where rewards are rare"
)
STABLE_RMS = Ramp("stable_rms", 5.0, 20.0, "gradient over Adam's memory of it, root mean square")
STABLE_RMS_SUDDEN = Ramp("stable_rms_sudden", 10.0, 40.0, "the same at a single look, the one before it being smaller")


@dataclass(slots=True)
class RmsSpikeJudge:
    """Gradients that have outgrown Adam's memory of them, or a memory that is too short for rewards that are rare."""

    before: float = 0.0
    paid: list[bool] = field(default_factory=list)
    longest_reach: float = 0.0

    def __call__(self, view: View) -> Iterator[Finding]:
        yield from self.short_memory(view)
        key, limits = "opt/stable_rms", view.limits
        value = view.get(key)
        if value is not None:
            before, self.before = self.before, value
            yield Finding(
                max(limits.log_severity(STABLE_RMS, min(value, before)), limits.log_severity(STABLE_RMS_SUDDEN, value)),
                key,
                value,
                limits.log_middle(STABLE_RMS),
            ).with_text(
                lambda: f"gradients have been {number(value)} times what Adam remembers of them (settled: about 1)"
            )

    def short_memory(self, view: View) -> Iterator[Finding]:
        """Adam forgets within one update, and did not before; or rewards come in some updates only, and are forgotten in between."""
        beta2, zeros, steps, paid = view.get("opt/beta2"), view.get("reward/zero_frac"), view.steps, self.paid
        if zeros is not None:
            paid.append(zeros < 1)
            del paid[:-REWARD_UPDATES]
        if beta2 is None or not steps or not 0 <= beta2 < 1:
            return
        reach, need = 1 / (1 - beta2), view.limits[MEMORY_UPDATES] * steps
        before = self.longest_reach = max(self.longest_reach, reach)
        rare = any(paid) and not all(paid)
        why = (
            f"rewards came in {paid.count(True)} of the last {len(paid)} updates"
            if rare
            else f"it reached back {number(before)} before"
        )
        yield Finding(
            hard(reach < need and (rare or before >= need)),
            "opt/beta2",
            beta2,
            1 - 1 / max(1.0, need),
            instance="memory",
        ).with_text(
            lambda: (
                f"Adam's memory of squared gradients reaches back {number(reach)} steps, less than the {steps} of an update, and {why}: a "
                "gradient that is larger than usual meets a memory that has forgotten the like"
            )
        )


DORMANT, RANK, NORM = "repr/dormant_frac", "repr/effective_rank", "repr/feature_norm"
DORMANT_SHARE = Ramp("dormant", 0.35, 0.75, "share of units that respond to nothing")
RANK_FALL = below("rank_fall", 0.33, "effective rank relative to its median")
NORM_GROWTH = Ramp("norm_growth", 4.0, 16.0, "norm of the features relative to what it was")


def dormant(view: View) -> Iterator[Finding]:
    """Units that respond to nothing, over all layers and in each."""
    whole = [("", DORMANT, view.values[DORMANT])] if DORMANT in view.values else []
    for layer, key, value in [*whole, *view.labelled(f"{DORMANT}/", "")]:
        yield Finding(
            view.limits.severity(DORMANT_SHARE, value), key, value, view.limits.middle(DORMANT_SHARE), instance=layer
        ).with_text(
            lambda layer=layer, value=value: (  # type: ignore[misc]  # the loop's values at this time
                f"{percent(value)} of the units{' of ' + layer if layer else ''} respond to nothing any more"
            )
        )


@dataclass(slots=True)
class RankCollapseJudge:
    """Features that use far fewer dimensions than they did."""

    ranks: RollingMedian = field(default_factory=RollingMedian)

    def __call__(self, view: View) -> Iterator[Finding]:
        value = view.get(RANK)
        usual = self.ranks.add(value)
        if value is None or usual is None:
            return
        bound = view.limits[RANK_FALL] * usual
        yield Finding(hard(value < bound), RANK, value, bound, adaptive=True).with_text(
            lambda: f"the features use {number(value)} dimensions instead of {number(usual)}"
        )


@dataclass(slots=True)
class NormGrowthJudge:
    """Features that grow away from what they were."""

    norms: RollingMedian = field(default_factory=RollingMedian)

    def __call__(self, view: View) -> Iterator[Finding]:
        value = view.get(NORM)
        usual = self.norms.add(value)
        if value is None or not usual:
            return
        low, high = view.limits.ends(NORM_GROWTH)
        yield Finding(
            view.limits.severity(NORM_GROWTH, value / usual), NORM, value, usual * (low + high) / 2, adaptive=True
        ).with_text(
            lambda: f"the features have grown to {times(value / usual)} what they were, a norm of {number(value)}"
        )


feature_alarm = partial(AlarmRule, debug_updates=5, pieces=("layers",), sampled=True)
"""Declare an alarm of features, which are measured in some updates only."""

RULES = (
    AlarmRule(
        type="opt/update_too_large",
        inputs=(SIZE, RATE, "opt/update_to_weight/{layer}"),
        meaning="A step changes the weights by a large share of themselves.",
        action="Lower the learning rate, or warm it up.",
        judge=UpdateSizeJudge(),
        bounds=(UPDATE_TO_WEIGHT, RATE_JUMP, RATE_GROWN),
        source="per optimizer step; CS231n: 0.001 is usual. A learning rate that jumps above what was set is no schedule",
        rank=180,
        required=(SIZE, RATE),
        warmup=3,
        n_off=2,
        settings=("learning_rate",),
        debug_updates=5,
        evidence=("opt/update_to_weight*", RATE, "policy/kl"),
        pieces=("layers",),
    ),
    AlarmRule(
        type="opt/stalled_weights",
        inputs=(RATE, "opt/update_to_weight/{layer}"),
        meaning="Weights that are meant to be trained do not move.",
        action="Set a learning rate that is not 0, or correct the schedule that leads there.",
        judge=StalledWeightsJudge(),
        source="A schedule that ends at 0 comes there in small steps; a tensor without gradient is another question.",
        rank=110,
        hard=True,
        claim=True,
        required=(RATE, "grad/global/norm_preclip"),
        facts=("groups",),
        n_off=1,
        debug_updates=5,
        evidence=(RATE, "opt/update_to_weight/*", "policy/kl_max"),
        pieces=("layers",),
        certain=True,
    ),
    AlarmRule(
        type="opt/rms_spike",
        effect=True,
        inputs=("opt/stable_rms", "opt/beta2"),
        meaning="Gradients have outgrown Adam's memory of them: the loss tends to jump some steps later.",
        action="Lower beta2 (0.95), warm up the learning rate, clip gradients.",
        judge=RmsSpikeJudge(),
        bounds=(MEMORY_UPDATES, STABLE_RMS, STABLE_RMS_SUDDEN),
        source="Wortsman 2023 has 2.3 for language models; PPO's gradients jump at every new rollout, and to 6 for three updates where "
        "a task that is nearly solved fails once more: 10 at two looks in a row, or 20.",
        warmup=20,
        debug_updates=3,
        evidence=("opt/stable_rms", "grad/global/norm_preclip", RATE),
        pieces=("layers",),
        relative=True,
        sampled=True,
    ),
    AlarmRule(
        type="opt/state_lost",
        inputs=("opt/state_reset",),
        meaning="The optimizer was created again in the middle of training, and its moments are gone.",
        action="Save and load the optimizer with the policy; do not build it again when parameters are added.",
        judge=AboveBound("opt/state_reset", 0.0, "the optimizer has lost its moments: it was created again"),
        source="steps of a fresh Adam are large whatever the gradient",
        rank=120,
        warmup=2,
        n_off=1,
        debug_updates=2,
        evidence=("opt/state_reset", "opt/stable_rms"),
        pieces=("layers",),
        sampled=True,
    ),
    feature_alarm(
        type="repr/dormant",
        inputs=(DORMANT, "repr/dead_frac", "repr/dormant_frac/{layer}"),
        meaning="Many units no longer respond to anything.",
        action="Lower the learning rate, use tanh or layer norm, reset dormant units.",
        judge=dormant,
        bounds=(DORMANT_SHARE,),
        source="Sokar 2023",
        rank=200,
        evidence=("repr/dormant_frac*", "repr/dead_frac", "grad/layer/*/zero_frac"),
    ),
    feature_alarm(
        type="repr/rank_collapse",
        inputs=(RANK, "repr/feature_rank", "repr/srank"),
        meaning="The features use far fewer dimensions than before: the network loses the ability to tell states apart.",
        action="Fewer epochs, a lower learning rate, regularise features (Moalla 2024), normalise observations.",
        judge=RankCollapseJudge(),
        bounds=(RANK_FALL,),
        source="Moalla 2024, Kumar 2021; a third instead of half, which a task that is solved takes: its states become alike",
        warmup=10,
        n_on=2,
        evidence=("repr/*",),
        relative=True,
    ),
    feature_alarm(
        type="repr/norm_growth",
        effect=True,
        inputs=(NORM, "opt/weight_growth"),
        meaning="Features grow, which precedes a collapse of their rank.",
        action="Weight decay, layer norm, a lower learning rate.",
        judge=NormGrowthJudge(),
        bounds=(NORM_GROWTH,),
        source="Features double while a task is learned; tenfold within twenty looks is another matter. Moalla 2024",
        warmup=20,
        n_on=3,
        n_off=5,
        debug_updates=3,
        evidence=("repr/feature_norm", "opt/weight_growth", "repr/effective_rank"),
        relative=True,
    ),
)
