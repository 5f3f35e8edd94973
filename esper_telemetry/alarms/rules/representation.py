"""Features: dead units, lost dimensions, growth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from esper_telemetry.alarms.judges import RollingMedian
from esper_telemetry.alarms.rule import AlarmRule, Finding, Ramp, View, below, hard, number, percent, times

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
