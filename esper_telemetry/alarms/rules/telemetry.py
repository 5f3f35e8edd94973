"""Telemetry itself."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.alarms.rule import Finding, Rule, View, hard, number, percent
from esper_telemetry.core.record import Level

ALWAYS = (
    "policy/kl",
    "policy/entropy",
    "loss/value",
    "grad/global/norm_preclip",
    "ret/std",
    "adv/raw/std",
    "reward/std",
    "integrity/ratio_init",
    "integrity/gae_identity",
    "numerics/nonfinite",
    "opt/lr",
    "lstm/c/rms",
    "episode/count",
)
"""Keys that have a value in every update of a run in which they ever had one."""

SAMPLED = ("opt/update_to_weight", "repr/dormant_frac", "lstm/gate/f/mean")
"""The same of keys that are due in some updates only."""

MISSING = 5
WARM = 5


def missing_metric(view: View) -> Iterator[Finding]:
    """A metric that was always there is not any more."""
    every = max(view.get("telemetry/sample_every") or 1.0, view.memory.get("every", 8.0))
    view.memory["every"] = every
    for key in (*ALWAYS, *SAMPLED):
        if key in view.values:
            view.memory[key] = (view.memory.get(key, (0, 0))[0] + 1, 0)
            if view.memory[key][0] >= WARM:
                yield Finding(0.0, key, instance=key)
            continue
        seen, absent = view.memory.get(key, (0, 0))
        due = every if key in SAMPLED else 1
        if seen >= WARM:
            view.memory[key] = (seen, absent + 1)
            told = f"{key} has had no value for {absent + 1} updates"
            yield Finding(hard(absent + 1 >= MISSING * due), key, instance=key, text=lambda told=told: told)  # type: ignore[misc]


def overhead(view: View) -> Iterator[Finding]:
    """Telemetry takes its time, averaged over sampled and other updates; those at DEBUG were asked for, by someone or by an alarm."""
    key, bound = "perf/telemetry_frac", view.limits.overhead
    value = busy_share(view)
    if value is None or view.get("telemetry/level") == Level.DEBUG:
        return
    seen = view.memory.setdefault("seen", [])
    seen.append(value)
    del seen[:-20]
    mean = sum(seen) / len(seen)
    yield Finding(
        WARNING * hard(len(seen) == 20 and mean > bound),
        key,
        mean,
        bound,
        text=lambda: f"telemetry has taken {percent(mean)} of the training time",
    )


FAILURES = 3
"""Of backends, one after the other, which are an outage."""

WARNING = 0.5
"""Severity of what costs time and harms nothing."""


def busy_share(view: View) -> float | None:
    """Telemetry's share of the processor time where that is known: on a crowded machine, to wait for a core is not its doing."""
    own, collecting, learning = (view.get(f"perf/{part}_cpu_ms") for part in ("telemetry", "rollout", "update"))
    if own is None or collecting is None or learning is None:
        return view.get("perf/telemetry_frac")
    return own / (own + collecting + learning) if own > 0 else 0.0


def delivery(view: View) -> Iterator[Finding]:
    """Backends fail again and again, while nothing gets through; or records are lost on the way to one."""
    errors, dropped = view.get("telemetry/errors"), view.get("telemetry/dropped")
    if errors is None and dropped is None:
        return
    lost = (dropped or 0.0) > (view.previous.get("telemetry/dropped") or 0.0)
    outage = failures(view, errors or 0.0) >= FAILURES
    yield Finding(
        hard(outage or lost),
        "telemetry/dropped" if lost else "telemetry/errors",
        dropped if lost else errors,
        text=lambda: f"backends have failed {number(errors or 0.0)} times and lost {number(dropped or 0.0)} records",
    )


def failures(view: View, errors: float) -> float:
    """How often backends have failed since anything got through: while none does, more and more records wait."""
    memory, depth = view.memory, view.get("telemetry/queue_depth")
    more = errors - (view.previous.get("telemetry/errors") or 0.0)
    if "since" in memory and depth is not None and depth < memory["deepest"]:
        del memory["since"]
    if more > 0 and "since" not in memory:
        memory["since"] = errors - more
    memory["deepest"] = depth or 0.0
    return float(errors - memory["since"]) if "since" in memory else 0.0


RULES = (
    Rule(
        type="telemetry/missing_metric",
        judge=missing_metric,
        inputs=(),
        n_off=1,
        evidence=("telemetry/undefined",),
        source="only of keys that are defined whatever the data: others are absent where they have no meaning",
    ),
    Rule(
        type="telemetry/overhead",
        judge=overhead,
        inputs=("perf/telemetry_frac",),
        warmup=20,
        n_on=5,
        n_off=5,
        evidence=("perf/*", "telemetry/sample_every"),
        source="averaged over 20 updates, of which some are looked at closely",
    ),
    Rule(
        type="telemetry/delivery",
        judge=delivery,
        inputs=("telemetry/errors",),
        n_off=5,
        evidence=("telemetry/*",),
        source="one failure is retried, ever later: three without a record that gets through are an outage",
    ),
)
