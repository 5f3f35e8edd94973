"""The task itself: what comes last."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.alarms.rule import Finding, Rule, View, hard, number, percent

COUNT, RETURN = "episode/count", "episode/return_mean_100"
SETTLED = 10
"""Updates with episodes, after which the average return means something."""


def no_episodes(view: View) -> Iterator[Finding]:
    """No episode finishes, for much longer than they take."""
    count = view.get(COUNT)
    if count is None:
        return
    memory, limits = view.memory, view.limits
    if count > 0:
        if memory.get("seen"):
            memory["longest"] = max(memory.get("longest", 0), memory.get("gap", 0))
        memory.update(seen=True, gap=0)
    else:
        memory["gap"] = memory.get("gap", 0) + 1
    expected = expected_gap(view) or memory.get("longest", 0)
    known = bool(memory.get("seen")) or expected_gap(view) is not None
    bound = max(limits.episodes_updates, limits.episodes_factor * expected)
    gap = memory["gap"]
    yield Finding(
        hard(known and gap > bound),
        COUNT,
        count,
        0.0,
        text=lambda: f"no episode has ended for {gap} updates (usually at most {number(max(expected, 1))})",
    )


def expected_gap(view: View) -> float | None:
    """Updates per episode where the environment has a time limit."""
    horizon, steps = view.facts.get("horizon"), view.facts.get("num_steps")
    return horizon / steps if isinstance(horizon, int | float) and steps else None


def return_drop(view: View) -> Iterator[Finding]:
    """Much of what was learned is lost again."""
    value = view.get(RETURN)
    if value is None:
        return
    memory, limits = view.memory, view.limits
    count = memory["count"] = memory.get("count", 0) + 1
    level = memory["level"] = memory.get("level", value) + max(0.1, 1 / count) * (value - memory.get("level", value))
    if count == SETTLED:
        memory["first"] = memory["best"] = level
    if count < SETTLED:
        return
    best = memory["best"] = max(memory["best"], level)
    learned = best - memory["first"]
    lost = best - value
    wrong = learned > 0 and lost > limits.return_drop * learned and lost > 0.3 * abs(best)
    yield Finding(
        hard(wrong),
        RETURN,
        value,
        best - limits.return_drop * learned,
        adaptive=True,
        text=lambda: (
            f"the return has been {number(value)}, down from {number(best)}: "
            f"{percent(min(1.0, lost / learned))} of what was learned is lost"
        ),
    )


RULES = (
    Rule(
        type="task/no_episodes",
        judge=no_episodes,
        inputs=(COUNT,),
        n_off=1,
        duration=2,
        evidence=(COUNT, "lstm/reset_rate", "lstm/age/max"),
        source="20 updates, and five times the time that an episode takes",
    ),
    Rule(
        type="task/return_drop",
        judge=return_drop,
        inputs=(RETURN,),
        warmup=10,
        n_on=10,
        duration=5,
        evidence=("episode/*", "policy/kl", "policy/entropy_norm", "value/r2"),
        relative=True,
        source="Returns differ in sign and size, so what counts is the share of what was learned; unstable runs lose a third and recover.",
    ),
)
