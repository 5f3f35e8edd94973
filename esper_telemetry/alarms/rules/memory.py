"""Memory of recurrent policies: gates, cell state, resets, stored states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from esper_telemetry.alarms.rule import Finding, Rule, View, decade_ramp, hard, number, percent, ramp

CELL, LARGEST = "lstm/c/rms", "lstm/c/absmax"
CLOSED, OPEN, TIMESCALE = "lstm/gate/f/sat_lo", "lstm/gate/f/sat_hi", "lstm/timescale/median"
WRITTEN = 1.0
"""What a cell state cannot exceed if nothing is kept: it is then a gate times a tanh."""

JUMP_HOLDS = 2
"""Updates for which a jump of the cell state is kept in mind: its growth shows fully in the rollout after it."""

STATES_SETTLE = 20
"""Updates after which states have a size to compare with: at first they are next to nothing."""


def remembers(facts: Mapping[str, Any]) -> bool:
    """Whether the policy has an LSTM."""
    return bool(facts.get("policy", "lstm") == "lstm")


def recurrent(facts: Mapping[str, Any]) -> bool:
    """Whether the policy has a memory of any kind."""
    return bool(facts.get("policy", "lstm") != "mlp")


def forget_closed(view: View) -> Iterator[Finding]:
    """Nothing is kept from one step to the next: by the gates, or because every cell state is what one step writes."""
    limits = view.limits
    shut, timescale, largest = view.get(CLOSED), view.get(TIMESCALE), view.get(LARGEST)
    if shut is not None:
        severity = ramp(shut, limits.forget_closed_low, limits.forget_closed_high)
        view.memory["gates"] = max(
            severity, hard(timescale is not None and timescale < limits.timescale and shut > 0.3)
        )
        view.memory["shut"] = shut
        view.memory["open_at"] = view.get(CELL) if severity == 0 else None
    usual = view.baselines.median(LARGEST)
    if largest is not None and usual is not None and view.z(LARGEST) is not None:
        small = largest <= WRITTEN and view.previous.get(LARGEST, largest) <= WRITTEN
        gone = fell(view) and small and usual > 1.5 * WRITTEN
        dropped = usual > 1.5 * WRITTEN and drops(view)
        view.memory["written"] = hard((gone or dropped) and not seen_open(view))
    if shut is None and largest is None:
        return
    gates, written = view.memory.get("gates", 0.0), view.memory.get("written", 0.0)
    by_gates = gates >= written and "shut" in view.memory
    shares: dict[str, float] = view.memory
    yield Finding(
        max(gates, written),
        CLOSED if by_gates else LARGEST,
        view.memory.get("shut") if by_gates else largest,
        (limits.forget_closed_low + limits.forget_closed_high) / 2 if by_gates else WRITTEN,
        text=lambda: (
            f"{percent(shares['shut'])} of the forget gates are shut: memory lasts {number(timescale or 1.0)} steps"
            if by_gates
            else f"cell states hold no more than a single step can write: {number(view.get(CELL) or 0.0)}{view.usual(CELL)}, "
            f"at most {number(largest or 0.0)}{view.usual(LARGEST)}: the forget gates are shut"
        ),
    )


def seen_open(view: View) -> bool:
    """Whether the gates were found open when they were last looked at, and the cell state has not become much smaller since."""
    size, then = view.get(CELL), view.memory.get("open_at")
    return size is not None and then is not None and size > then / view.limits.adds_up_jump


def fell(view: View) -> bool:
    """Whether the cell state has become much smaller within two updates, and stayed so: a memory that is used less and less is no fault."""
    size, sizes = view.get(CELL), view.memory.setdefault("sizes", [])
    if size is None:
        return False
    sizes.append(size)
    del sizes[:-3]
    before = view.memory.get("fell_from", max(sizes[:-1], default=size))
    if size < before / view.limits.adds_up_jump:
        view.memory["fell_from"] = before
    else:
        view.memory.pop("fell_from", None)
    return "fell_from" in view.memory


def drops(view: View) -> bool:
    """Whether the cell state has become much smaller within one update, than ever before, and smaller with its age instead of larger."""
    size, before, growth = view.get(CELL), view.previous.get(CELL), view.get("lstm/c_growth")
    if size is None or before is None or growth is None:
        return False
    held = (view.baselines.median(CELL) or 0.0) > WRITTEN
    lowest = view.baselines.below.get(CELL, 0.0) > 0
    return held and lowest and size < WRITTEN and size < before / view.limits.adds_up_jump and growth < 0


def forget_open(view: View) -> Iterator[Finding]:
    """Nothing is ever forgotten: by the gates, or because cell states have begun, all at once, to grow with every step.

    What the gates said holds until they are looked at again.
    """
    limits, memory = view.limits, view.memory
    low, high = limits.forget_open_low, limits.forget_open_high
    value, growth = view.get(OPEN), view.get("lstm/c_growth")
    if value is not None:
        refuted = memory.get("refuted", False) or (memory.get("inferred", False) and value <= low)
        memory.update(gates=ramp(value, low, high), open=value, refuted=refuted, inferred=False)
        memory["on"] = memory.get("on", False) and value > low
    grows = adds_up(view, growth) if value is None and growth is not None and view.z(CELL) is not None else False
    if value is None and growth is None:
        return
    gates, last = memory.get("gates", 0.0), memory.get("open")
    by_gates = last is not None and (gates > 0 or not grows)
    yield Finding(
        max(gates, hard(grows)),
        OPEN if by_gates else "lstm/c_growth",
        last if by_gates else growth,
        (low + high) / 2 if by_gates else limits.adds_up_growth,
        text=lambda: (
            f"{percent(last or 0.0)} of the forget gates never close: the memory only adds up"
            if by_gates
            else f"the cell state has begun to grow with every step, to {number(view.values.get(CELL, 0.0))}{view.usual(CELL)} in one "
            "update: the forget gates no longer close"
        ),
    )


def adds_up(view: View, growth: float) -> bool:
    """Whether the cell state grows with its age, and has become larger from one update to the next by more than an update explains,
    and than its history does.

    Kept in mind while it grows, because it becomes larger once only. What a look at the gates has refuted is not inferred again.
    """
    limits = view.limits
    size, before = view.values.get(CELL, 0.0), view.previous.get(CELL, 0.0)
    small = (view.get("policy/kl") or 0.0) < limits.kl_spike_low and (view.get("lstm/reset_rate") or 0.0) > 0
    jumped = (
        small
        and size > max(WRITTEN, limits.adds_up_jump * before)
        and before > 0
        and view.baselines.beyond.get(CELL, 0.0) > 0
        and (view.z(CELL) or 0.0) > limits.z_low
        and not view.memory.get("refuted", False)
    )
    view.memory["jumped"] = JUMP_HOLDS if jumped else max(0, view.memory.get("jumped", 0) - 1)
    on = growth > limits.adds_up_growth and (view.memory["jumped"] > 0 or view.memory.get("on", False))
    view.memory["on"] = on
    view.memory["inferred"] = on or view.memory.get("inferred", False)
    return bool(on)


def cell_drift(view: View) -> Iterator[Finding]:
    """The cell state grows: against its history, beyond any use, or with its age.

    A step adds 1 at most, so a unit that counts the steps of long episodes is large and of use: one that adds up nearly all it can is none.
    """
    limits = view.limits
    value, largest, growth = view.get(CELL), view.get(LARGEST), view.get("lstm/c_growth")
    if value is None:
        return
    z, age = view.z(CELL), view.get("lstm/age/max")
    counts = largest is not None and age is not None and largest <= limits.cell_of_age * (age + 1)
    useless = 0.0 if largest is None or counts else decade_ramp(largest, limits.cell_absmax / 2, limits.cell_absmax * 2)
    parts = {
        CELL: 0.0 if z is None else ramp(z, limits.z_low, limits.z_high),
        LARGEST: useless,
        "lstm/c_growth": 0.0 if growth is None else ramp(growth, limits.cell_growth_low, limits.cell_growth_high),
    }
    key = max(parts, key=lambda name: parts[name])
    yield Finding(
        parts[key],
        key,
        view.values[key],
        adaptive=key == CELL,
        z=z if key == CELL else None,
        text=lambda: (
            f"the cell state has grown to {number(value)}{view.usual(CELL)}, at most {number(largest or value)}"
        ),
    )


def stale_state(view: View) -> Iterator[Finding]:
    """Stored states are not those that the weights reach."""
    limits = view.limits
    first, last = view.get("lstm/staleness_first"), view.get("lstm/staleness")
    if first is None and last is None:
        return
    wrong = first is not None and first > limits.stale_first
    key, value = ("lstm/staleness_first", first) if wrong else ("lstm/staleness", last)
    settled = view.update > STATES_SETTLE
    severity = 1.0 if wrong else ramp(last or 0.0, limits.stale_low, limits.stale_high) if settled else 0.0
    when = "before the first step" if wrong else "after the update"
    yield Finding(
        severity,
        key,
        value,
        limits.stale_first if wrong else (limits.stale_low + limits.stale_high) / 2,
        text=lambda: f"stored states differ by {percent(value or 0.0)} from those that the weights reach {when}",
    )


def reset_missing(view: View) -> Iterator[Finding]:
    """Episodes ended and no memory began anew.

    A state after the last step of a rollout is reset in the next rollout, so one episode per environment proves nothing yet: what
    ended in the rollout before does, and so do more episodes than environments. Where a rollout is a single step, that may be the row in
    which an environment begins anew, which no policy sees: then it takes one rollout more.
    """
    rate, ended = view.get("lstm/reset_rate"), view.get("episode/count")
    if rate is None or ended is None:
        return
    environments = float(view.facts.get("num_envs") or ended)
    late = 2 if view.facts.get("num_steps") == 1 else 1
    before: list[float] = view.memory.setdefault("before", [])
    waiting = before[-late] if len(before) >= late else 0.0
    wrong = rate == 0 and (waiting > 0 or ended > environments)
    view.memory["before"] = [*before, ended][-late:] if rate == 0 else []
    yield Finding(
        hard(wrong),
        "lstm/reset_rate",
        rate,
        0.0,
        text=lambda: f"memory has not been reset once, though {number(waiting + ended)} episodes have ended",
    )


RULES = (
    Rule(
        type="lstm/reset_missing",
        judge=reset_missing,
        inputs=("lstm/reset_rate", "episode/count"),
        facts=("num_envs",),
        applies=recurrent,
        certain=True,
        n_off=1,
        duration=10,
        evidence=("lstm/reset_rate", "lstm/age/*", "episode/count", "lstm/c/rms"),
        source="identity",
    ),
    Rule(
        type="lstm/forget_closed",
        judge=forget_closed,
        inputs=(CLOSED,),
        applies=remembers,
        watches=(LARGEST, CELL),
        duration=5,
        evidence=("lstm/gate/f/*", "lstm/timescale/*", "lstm/c/*"),
        source="gates are sampled; |c| ≤ 1 without memory tells it in every update. A short timescale alone is healthy in short tasks.",
    ),
    Rule(
        type="lstm/forget_open",
        judge=forget_open,
        inputs=(OPEN,),
        applies=remembers,
        watches=(CELL,),
        duration=3,
        evidence=("lstm/gate/f/*", "lstm/timescale/*", "lstm/c/*", "lstm/c_growth"),
        sampled=True,
        source="Healthy runs stay below 0.66. Gates are sampled; a cell state that becomes half as large again in one update, and grows "
        "with its age, tells it in between.",
    ),
    Rule(
        type="lstm/cell_drift",
        judge=cell_drift,
        inputs=(CELL,),
        applies=remembers,
        watches=(CELL,),
        warmup=10,
        duration=5,
        evidence=("lstm/c/*", "lstm/c_growth", "lstm/age/*", "lstm/reset_rate"),
        relative=True,
        source="Scale at least 0.05 decades. States of 50 and more are usual in episodes of hundreds of steps.",
    ),
    Rule(
        type="lstm/stale_state",
        judge=stale_state,
        inputs=("lstm/staleness",),
        applies=recurrent,
        duration=5,
        evidence=("lstm/staleness", "lstm/staleness_first", "integrity/ratio_init"),
        sampled=True,
        source="Any update makes stored states stale, by 0.05-0.3 in healthy runs: 1 is as wrong as no memory. sb3-contrib#265",
    ),
)
