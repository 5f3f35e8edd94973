"""Features: dead units, lost dimensions, growth."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from esper_telemetry.alarms.rule import Finding, Rule, View, hard, number, percent, ramp, times

DORMANT, RANK, NORM = "repr/dormant_frac", "repr/effective_rank", "repr/feature_norm"
LOOKS = 20


def dormant(view: View) -> Iterator[Finding]:
    """Units that respond to nothing, over all layers and in each."""
    low, high = view.limits.dormant_low, view.limits.dormant_high
    found = [("", DORMANT, view.values[DORMANT])] if DORMANT in view.values else []
    for layer, key, value in [*found, *view.labelled(f"{DORMANT}/", "")]:
        yield Finding(
            ramp(value, low, high),
            key,
            value,
            (low + high) / 2,
            instance=layer,
            text=lambda layer=layer, value=value: (  # type: ignore[misc]  # the loop's values at this time
                f"{percent(value)} of the units{' of ' + layer if layer else ''} respond to nothing any more"
            ),
        )


def past(view: View, key: str, least: int = 3) -> float | None:
    """Median of the looks before this one, at most twenty; None of fewer than `least`. Takes this look in."""
    seen = view.memory.setdefault(key, [])
    value = view.get(key)
    middle = median(seen) if len(seen) >= least else None
    if value is not None:
        seen.append(value)
        del seen[:-LOOKS]
    return middle


def rank_collapse(view: View) -> Iterator[Finding]:
    """Features use far fewer dimensions than they did."""
    value, usual = view.get(RANK), past(view, RANK)
    if value is None or usual is None:
        return
    bound = view.limits.rank_fall * usual
    yield Finding(
        hard(value < bound),
        RANK,
        value,
        bound,
        adaptive=True,
        text=lambda: f"the features use {number(value)} dimensions instead of {number(usual)}",
    )


def norm_growth(view: View) -> Iterator[Finding]:
    """Features grow away from what they were."""
    value, usual = view.get(NORM), past(view, NORM)
    if value is None or not usual:
        return
    low, high = view.limits.norm_growth_low, view.limits.norm_growth_high
    yield Finding(
        ramp(value / usual, low, high),
        NORM,
        value,
        usual * (low + high) / 2,
        adaptive=True,
        text=lambda: f"the features have grown to {times(value / usual)} what they were, a norm of {number(value)}",
    )


RULES = (
    Rule(
        type="repr/dormant",
        judge=dormant,
        inputs=(DORMANT,),
        duration=5,
        evidence=("repr/dormant_frac*", "repr/dead_frac", "grad/layer/*/zero_frac"),
        sampled=True,
        source="Sokar 2023",
    ),
    Rule(
        type="repr/rank_collapse",
        judge=rank_collapse,
        inputs=(RANK,),
        warmup=10,
        n_on=2,
        duration=5,
        evidence=("repr/*",),
        relative=True,
        sampled=True,
        source="Moalla 2024, Kumar 2021; a third instead of half, which a task that is solved takes: its states become alike",
    ),
    Rule(
        type="repr/norm_growth",
        judge=norm_growth,
        inputs=(NORM,),
        warmup=20,
        n_on=3,
        n_off=5,
        duration=3,
        evidence=("repr/feature_norm", "opt/weight_growth", "repr/effective_rank"),
        relative=True,
        sampled=True,
        source="Features double while a task is learned; tenfold within twenty looks is another matter. Moalla 2024",
    ),
)
