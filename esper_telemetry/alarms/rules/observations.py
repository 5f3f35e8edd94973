"""Observations: environments that hang."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.alarms.rule import Finding, Rule, View, hard, number, percent

KEY = "obs/constant_frac"

CHANGING = 10
"""Updates in which all environments changed, after which standing still is news."""

LASTS = 3
"""Updates in a row that an environment must stand still, after it has changed before."""

NEVER = 10
"""The same where some have never changed, while others do."""

STEPS = 100
"""Steps that these updates must have together: short rollouts may catch an agent that waits."""


def constant_observations(view: View) -> Iterator[Finding]:
    """Some environments give one and the same observation all the time, and did not before or others do not."""
    share = view.get(KEY)
    if share is None:
        return
    memory = view.memory
    if share == 0:
        memory.update(changing=memory.get("changing", 0) + 1, still=0, steps=0)
    else:
        environments = float(view.facts.get("num_envs") or 1)
        memory["still"] = memory.get("still", 0) + 1
        memory["steps"] = memory.get("steps", 0) + (view.transitions or 0) / environments
    still, changed = memory["still"], memory.get("changing", 0) >= CHANGING
    lasts = LASTS if changed else NEVER
    wrong = share > 0 and still >= lasts and memory["steps"] >= STEPS and (changed or share < 1)
    yield Finding(
        hard(wrong),
        KEY,
        share,
        0.0,
        text=lambda: (
            f"{percent(share)} of the environments have given one and the same observation in every step, for {number(memory['steps'])} "
            "steps"
        ),
    )


RULES = (
    Rule(
        type="obs/constant",
        judge=constant_observations,
        inputs=(KEY,),
        optional=True,
        n_off=1,
        duration=3,
        evidence=(KEY, "norm/obs/*", "lstm/c/env_rms/max", "episode/length_mean"),
        source="exact comparison; tasks with one state for all time are no fault, and some agents wait for a whole short rollout",
    ),
)
