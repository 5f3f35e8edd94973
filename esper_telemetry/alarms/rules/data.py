"""Rewards, normalisers and advantages: what the update is made of."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.alarms.rule import Finding, Rule, View, hard, number, percent, ramp, times

JUMP = 0.5
"""Decades from which on a move is kept in mind."""

DRIFTS, SETTLES = 10, 40
"""Updates in a row that a normaliser has to drift, and updates that it is given to settle, from the start or from an intervention."""

RETURNS = ("ret/std", "ret/mean")
REWARD = ("reward/absmax", "reward/mean")
FALL = 2.5
"""Rewards shrink by themselves where a policy learns to avoid the worst of them: a fall must be so many times larger, in decades."""

VARIED = 10
"""Updates in which a reward must have varied, before its absence means anything: chance gives an untrained policy one now and then."""

GAP_FACTOR = 3.0
"""A reward that came and went before may stay away for so many times the longest time that it did."""


def scale_shift(view: View) -> Iterator[Finding]:
    """Rewards are on another scale from one update to the next, or returns are, by much."""
    yield from rewards_shift(view)
    yield from returns_shift(view)


def rewards_shift(view: View) -> Iterator[Finding]:
    """The largest reward and the mean one have moved by decades, sign kept."""
    limits = view.limits
    found = jump(view, REWARD)
    largest, usual = view.get("reward/absmax"), view.baselines.median("reward/absmax")
    if found is None or largest is None or usual is None:
        return
    size, risen, z = found
    size = size if risen else size / FALL
    outlier = min(ramp(size, limits.scale_low, limits.scale_high), ramp(z, limits.z_low, limits.z_high))
    fallen, view.memory["fallen"] = view.memory.get("fallen", 0.0), 0.0 if risen else outlier
    yield Finding(
        outlier if risen else min(outlier, fallen),
        "reward/absmax",
        largest,
        usual * 10 ** ((limits.scale_low + limits.scale_high) / 2),
        adaptive=True,
        z=z,
        instance="rewards",
        text=lambda: (
            f"rewards have been {times(max(largest / usual, usual / max(largest, 1e-300)))} as {'large' if risen else 'small'} as before: "
            f"up to {number(largest)}{view.usual('reward/absmax')}, returns spread by {number(view.get('ret/std') or 0.0)}"
            f"{view.usual('ret/std')}"
        ),
    )


def returns_shift(view: View) -> Iterator[Finding]:
    """Mean and spread of returns have grown by decades at once: what scales rewards may stand behind where they are measured."""
    limits = view.limits
    found = jump(view, RETURNS)
    mean, usual = view.get("ret/mean"), view.baselines.median("ret/mean")
    if found is None or mean is None or usual is None:
        return
    size, risen, z = found
    yield Finding(
        ramp(size if risen else 0.0, limits.return_scale_low, limits.return_scale_high),
        "ret/mean",
        mean,
        usual * 10 ** ((limits.return_scale_low + limits.return_scale_high) / 2),
        adaptive=True,
        z=z,
        instance="returns",
        text=lambda: (
            f"returns have been {times(abs(mean) / usual)} as large as before: {number(mean)} on average{view.usual('ret/mean')}, "
            f"spread by {number(view.get('ret/std') or 0.0)}{view.usual('ret/std')}"
        ),
    )


def jump(view: View, keys: tuple[str, str]) -> tuple[float, bool, float] | None:
    """How many decades two keys have moved together, whether up, and the smaller robust score; the last is the one with a sign.

    A move begins between two updates, and lasts as long as they are away from their medians. None without a history.
    """
    shifts = [view.baselines.shift.get(key) for key in keys]
    scores = [view.z(key) for key in keys]
    signed = view.get("reward/mean" if keys == REWARD else "ret/mean")
    if None in shifts or None in scores or signed is None:
        return None
    first, second = (shift or 0.0 for shift in shifts)
    signs = view.memory.setdefault((keys, "signs"), [0, 0])
    signs[signed > 0] += 1
    kept = signs[signed > 0] > signs[signed <= 0]
    size = min(abs(first), abs(second)) if kept and first * second > 0 else 0.0
    before = view.memory.get((keys, "before"), 0.0)
    begun = view.memory.get((keys, "on")) or abs(first - before) > 0.5 * abs(first)
    view.memory[keys, "before"] = first
    view.memory[keys, "on"] = bool(begun) and size > JUMP
    return (size if begun else 0.0), first > 0, min(abs(score or 0.0) for score in scores)


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
        memory.update(varied=memory.get("varied", 0) + 1, updates=0, transitions=0)
    else:
        memory["updates"] = memory.get("updates", 0) + 1
        memory["transitions"] = memory.get("transitions", 0) + (view.transitions or 0)
    updates, transitions = memory["updates"], memory["transitions"]
    limits = view.limits
    gone = memory.get("varied", 0) >= VARIED and updates >= 10 and updates > GAP_FACTOR * memory.get("longest", 0)
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
    """A normaliser still moves late in the run, or what it is given lies far outside of what it knows."""
    limits = view.limits
    age = view.memory["age"] = view.memory.get("age", 0) + 1
    for label, key, value in view.labelled("norm/", "/drift"):
        cut_key = f"norm/{label}/clip_frac"
        cut = view.get(cut_key) or 0.0
        drifting = ramp(value, limits.normalizer_drift_low, limits.normalizer_drift_high)
        lasts = view.memory[label] = view.memory.get(label, 0) + 1 if drifting >= 0.5 else 0
        moved = drifting if lasts >= DRIFTS and age > SETTLES else 0.0
        cuts = ramp(cut, limits.normalizer_clip_low, limits.normalizer_clip_high)
        yield Finding(
            max(moved, cuts),
            cut_key if cuts > moved else key,
            cut if cuts > moved else value,
            (limits.normalizer_clip_low + limits.normalizer_clip_high) / 2
            if cuts > moved
            else (limits.normalizer_drift_low + limits.normalizer_drift_high) / 2,
            instance=label,
            text=lambda label=label, value=value, cut=cut: (  # type: ignore[misc]  # the loop's values at this time
                f"the normaliser of {label} is off: it has moved by {number(value)} standard deviations within ten updates (settled: below "
                f"0.1), and cuts off {percent(cut)} of what it is given (usually nothing)"
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
        watches=(*REWARD, *RETURNS, "reward/std"),
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
        warmup=20,
        n_off=5,
        duration=2,
        evidence=("norm/*/drift", "norm/*/clip_frac"),
        relative=True,
        source="A policy that learns to go elsewhere moves its normalisers too: drift must last for ten updates. Entries "
        "that are cut off tell at once: healthy runs have none.",
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
