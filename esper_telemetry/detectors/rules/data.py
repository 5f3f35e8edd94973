"""Rewards, normalisers and advantages: what the update is made of."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.detectors.rule import Finding, Rule, View, hard, number, percent, ramp, times

REWARD = ("reward/absmax", "reward/mean")
FALL = 2.5
"""Rewards shrink by themselves where a policy learns to avoid the worst of them: a fall must be so many times larger, in decades."""

GAP_FACTOR = 3.0
"""A reward that came and went before may stay away for so many times the longest time that it did."""


def scale_shift(view: View) -> Iterator[Finding]:
    """Rewards are on another scale from one update to the next: their largest and their mean have moved by decades, sign kept."""
    low, high = view.limits.scale_low, view.limits.scale_high
    shifts = [view.baselines.shift.get(key) for key in REWARD]
    scores = [view.z(key) for key in REWARD]
    mean, largest = view.get("reward/mean"), view.get("reward/absmax")
    if None in shifts or None in scores or mean is None or largest is None:
        return
    signs = view.memory.setdefault("signs", [0, 0])
    signs[mean > 0] += 1
    kept = signs[mean > 0] > signs[mean <= 0]
    peak, centre = (shift or 0.0 for shift in shifts)
    size = min(abs(peak), abs(centre)) if kept and peak * centre > 0 else 0.0
    outlier = min(ramp(abs(score or 0.0), view.limits.z_low, view.limits.z_high) for score in scores)
    if peak < 0:
        size /= FALL
    severity = min(ramp(size, low, high), outlier)
    if not view.memory.get("on"):
        severity = min(severity, ramp(abs(peak - view.memory.get("peak", 0.0)), low, high))
    view.memory.update(on=severity >= 0.5 or (severity > 0 and view.memory.get("on")), peak=peak)
    usual = view.baselines.median("reward/absmax") or 0.0
    yield Finding(
        severity,
        "reward/absmax",
        largest,
        usual * 10 ** ((low + high) / 2),
        adaptive=True,
        z=scores[0],
        text=lambda: (
            f"rewards have been {times(10 ** abs(peak))} as {'large' if peak > 0 else 'small'} as before: up to {number(largest)}"
            f"{view.usual('reward/absmax')}, returns spread by {number(view.get('ret/std') or 0.0)}{view.usual('ret/std')}"
        ),
    )


def constant_reward(view: View) -> Iterator[Finding]:
    """The reward is always the same, and was not before; or there has never been one.

    An equal reward for every step is no fault where the length of an episode is the task, and a rare one may stay away for long.
    """
    spread, largest = view.get("reward/std"), view.get("reward/absmax")
    if spread is None or largest is None:
        return
    memory = view.memory
    if spread > 0:
        if memory.get("varied"):
            memory["longest"] = max(memory.get("longest", 0), memory.get("updates", 0))
        memory.update(varied=True, updates=0, transitions=0)
    else:
        memory["updates"] = memory.get("updates", 0) + 1
        memory["transitions"] = memory.get("transitions", 0) + (view.transitions or 0)
    updates, transitions = memory["updates"], memory["transitions"]
    limits = view.limits
    gone = memory.get("varied") and updates >= 10 and updates > GAP_FACTOR * memory.get("longest", 0)
    never = not memory.get("varied") and largest == 0 and updates >= 10
    enough = limits.reward_constant_transitions if memory.get("varied") else limits.reward_never_transitions
    wrong = bool(gone or never) and transitions >= enough
    value = view.get("reward/mean") or 0.0
    yield Finding(
        hard(wrong),
        "reward/std",
        spread,
        0.0,
        text=lambda: f"every one of {transitions} steps has been paid the same reward, {number(value)}",
    )


def normalizer_drift(view: View) -> Iterator[Finding]:
    """A normaliser still moves late in the run."""
    limits = view.limits
    for label, key, value in view.labelled("norm/", "/drift"):
        low, high = limits.normalizer_drift_low, limits.normalizer_drift_high
        yield Finding(
            ramp(value, low, high),
            key,
            value,
            (low + high) / 2,
            instance=label,
            text=lambda label=label, value=value: (  # type: ignore[misc]  # the loop's values at this time
                f"the normaliser of {label} has moved by {number(value)} standard deviations within ten updates (settled: below 0.1)"
            ),
        )


def degenerate_advantages(view: View) -> Iterator[Finding]:
    """The learning signal is next to nothing, or a handful of steps."""
    limits = view.limits
    share, outlier = view.get("adv/participation"), view.get("adv/raw/absmax_over_std")
    floored = view.get("adv/std_floored")
    if share is None and floored is None:
        return
    few = share is not None and share < limits.participation and (outlier or 0.0) > limits.advantage_outlier
    text = (
        "all advantages are equal but for rounding, which normalisation blows up"
        if floored
        else f"{percent(share or 0.0)} of the steps carry the learning signal (usually 40 % or more); "
        f"the largest advantage is {number(outlier or 0.0)} standard deviations"
    )
    yield Finding(hard(bool(floored) or few), "adv/participation", share, limits.participation, text=lambda: text)


RULES = (
    Rule(
        type="value/scale_shift",
        judge=scale_shift,
        inputs=REWARD,
        watches=(*REWARD, "reward/std", "ret/std"),
        duration=5,
        evidence=("reward/*", "ret/mean", "ret/std", "norm/*/drift", "loss/value"),
        relative=True,
        source="The spread of returns changes by decades in healthy runs: a policy that survives to the time limit earns the "
        "same everywhere, "
        "a first success spreads them. Rewards themselves tell a change of scale from that: the largest and the mean move together. "
        "SB3#2240, cleanrl#441",
    ),
    Rule(
        type="reward/constant",
        judge=constant_reward,
        inputs=("reward/std",),
        n_off=1,
        duration=3,
        evidence=("reward/*", "norm/*/drift", "episode/count"),
        source="A constant reward per step is the rule in tasks that are about surviving or arriving, so it must have varied before.",
    ),
    Rule(
        type="norm/drift",
        judge=normalizer_drift,
        inputs=("norm/obs/drift",),
        applies=lambda facts: bool(facts.get("normalize_observations")),
        optional=True,
        warmup=40,
        n_on=10,
        n_off=5,
        duration=2,
        evidence=("norm/*/drift", "norm/*/clip_frac"),
        relative=True,
        source="A policy that learns to go elsewhere moves its normalisers too: only what lasts for ten updates counts.",
    ),
    Rule(
        type="adv/degenerate",
        judge=degenerate_advantages,
        inputs=("adv/participation",),
        warmup=3,
        n_on=5,
        duration=3,
        evidence=("adv/participation", "adv/raw/*", "reward/zero_frac"),
        source="A rare success is a large outlier for an update or two; five in a row are no rare success.",
    ),
)
