"""Telemetry itself: its cost, its metrics, its backends, too many alarms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from esper_telemetry.alarms.alarm_bounds import above, count, hard
from esper_telemetry.alarms.judges import Recent, StateJudge
from esper_telemetry.alarms.rule import CAUSE_LAST_RANK, WARNING, Finding, View, alarm
from esper_telemetry.core.record import Level

ALWAYS = (
    *("policy/kl", "policy/entropy", "loss/value", "grad/global/norm_preclip", "ret/std", "adv/raw/std", "reward/std"),
    *("integrity/ratio_init", "integrity/gae_identity", "numerics/nonfinite", "opt/lr", "lstm/c/rms", "episode/count"),
)
"""Keys that have a value in every update of a run in which they ever had one."""

SAMPLED = ("opt/update_to_weight", "repr/dormant_frac", "lstm/gate/f/mean")  # the same in some updates only
UNDEFINED = "telemetry/undefined"
UNMEASURED = "telemetry/unmeasured"
MISSING_UPDATES = 5  # updates without a value that was due, which raise the alarm
MIN_UPDATES = 5  # updates with a value, before its absence means anything


@dataclass(slots=True)
class Presence:
    """Updates between two sampled ones, at most; updates with a value, and without one since, by key."""

    every: float = 8.0
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)


def missing_metric(view: View, past: Presence) -> Iterator[Finding]:
    """A metric that was always there and is not any more."""
    if view.get(UNMEASURED):
        return
    past.every = max(view.get("telemetry/sample_every") or 1.0, past.every)
    for key in (*ALWAYS, *SAMPLED):
        present, absent = past.counts.get(key, (0, 0))
        if key in view.values:
            past.counts[key] = present + 1, 0
            if present + 1 >= MIN_UPDATES:
                yield Finding(0.0, UNDEFINED, instance=key)
        elif present >= MIN_UPDATES:
            past.counts[key] = present, absent + 1
            wrong = absent + 1 >= MISSING_UPDATES * (past.every if key in SAMPLED else 1)
            words = f"{key} has had no value for {absent + 1} updates"
            yield Finding(hard(wrong), UNDEFINED, view.get(UNDEFINED), instance=key).says(words)


OVERHEAD = above("overhead", 0.1, "telemetry's share of the training time")
OVERHEAD_UPDATES = 20  # updates over which the share is averaged

MIN_OVERHEAD_SECONDS = 60.0
"""Time that telemetry must have taken in the run so far, unless it takes most of it: updates of small scripts take about as long as reading
their losses and arrays does, and nobody waits for a short run of them."""

LARGE_SHARE = 2 / 3  # share from which on telemetry takes too long however short runs are


@dataclass(slots=True)
class Cost:
    """Shares of the latest updates, and seconds of all updates."""

    shares: Recent = field(default_factory=partial(Recent, OVERHEAD_UPDATES))
    seconds: float = 0.0


def overhead(view: View, cost: Cost) -> Iterator[Finding]:
    """Telemetry that takes its time, averaged over sampled and other updates; those at DEBUG were asked for, by someone or by an alarm."""
    value, bound = busy_share(view), view.limits[OVERHEAD]
    if value is None or view.get("telemetry/level") == Level.DEBUG:
        return
    shares = cost.shares.add(value)
    mean = sum(shares) / len(shares)
    cost.seconds += view.values.get("perf/telemetry_cpu_ms", view.values.get("perf/telemetry_ms", 0.0)) / 1000
    noticed = cost.seconds >= MIN_OVERHEAD_SECONDS or mean > LARGE_SHARE
    severity = WARNING * hard(cost.shares.full and mean > bound and noticed)
    words = "telemetry has taken {:%} of the training time, {} s so far"
    yield Finding(severity, "perf/telemetry_frac", mean, bound).says(words, mean, cost.seconds)


def busy_share(view: View) -> float | None:
    """Telemetry's share of the processor time where it is measured: on a crowded machine, to wait for a core is not its doing."""
    own, collecting, learning = (view.get(f"perf/{part}_cpu_ms") for part in ("telemetry", "rollout", "update"))
    if own is None or collecting is None or learning is None:
        return view.get("perf/telemetry_frac")
    return own / (own + collecting + learning) if own > 0 else 0.0


OUTAGE_FAILURES = 3  # failures of backends, one after the other, which are an outage


@dataclass(slots=True)
class Failures:
    """Failures of backends.

    Attributes:
        errors_before: errors before the failures under way; None where there are none.
        deepest: records that waited an update ago: while no backend works, more and more do.
    """

    errors_before: float | None = None
    deepest: float = 0.0

    def add(self, view: View, errors: float) -> float:
        """Number of failures since anything got through."""
        depth = view.get("telemetry/queue_depth")
        more = errors - (view.previous.get("telemetry/errors") or 0.0)
        if depth is not None and depth < self.deepest:
            self.errors_before = None
        if more > 0 and self.errors_before is None:
            self.errors_before = errors - more
        self.deepest = depth or 0.0
        return 0.0 if self.errors_before is None else errors - self.errors_before


def delivery(view: View, failures: Failures) -> Iterator[Finding]:
    """Backends that fail again and again, while nothing gets through; or records that are lost on the way to one."""
    errors, dropped = view.get("telemetry/errors"), view.get("telemetry/dropped")
    if errors is None and dropped is None:
        return
    lost = (dropped or 0.0) > (view.previous.get("telemetry/dropped") or 0.0)
    wrong = failures.add(view, errors or 0.0) >= OUTAGE_FAILURES or lost
    shown = ("telemetry/dropped", dropped) if lost else ("telemetry/errors", errors)
    words = "backends have failed {} times and lost {} records"
    yield Finding(hard(wrong), *shown).says(words, errors or 0.0, dropped or 0.0)


ALARM_LIMIT = count("storm", 20, "alarms in a hundred updates")
TOO_MANY: Final = "telemetry/storm"

RULES = (
    alarm("telemetry/overhead", rank=CAUSE_LAST_RANK, warmup=20, n_on=5, n_off=5)
    .reads("perf/telemetry_frac", "telemetry/sample_every")
    .says(
        "Telemetry takes more of the training time than it should.",
        "Lower the level, leave a second core free, or log less of your own.",
        "averaged over 20 updates, some of them sampled; at least a minute of the run so far, or two thirds of it",
    )
    .shows("perf/*", "telemetry/sample_every")
    .judged(StateJudge(overhead, Cost()), OVERHEAD),
    alarm("telemetry/missing_metric", UNDEFINED, rank=CAUSE_LAST_RANK, n_off=1)
    .needs(required=())
    .says(
        "A metric that was there has had no value for several updates.",
        "Its description says when it is absent; check what feeds it.",
        "only of keys that are defined whatever the data: others are absent where they have no meaning",
    )
    .shows("telemetry/undefined")
    .judged(StateJudge(missing_metric, Presence())),
    alarm("telemetry/delivery", rank=CAUSE_LAST_RANK, n_off=5)
    .reads("telemetry/errors", "telemetry/dropped", "telemetry/queue_depth")
    .says(
        "A backend fails or falls behind; the journal has everything.",
        "Check the address and the key of the backend; `esper-telemetry replay` sends what is missing.",
        "one failure is retried, ever later: three without a record that gets through are an outage",
    )
    .shows("telemetry/*")
    .judged(StateJudge(delivery, Failures())),
    alarm(TOO_MANY, "alarm/active", "alarm/{key}", rank=CAUSE_LAST_RANK)
    .needs(required=())
    .says(
        "More alarms were raised than anybody can read.",
        "Look at the first ones: the rest are most likely their consequences.",
        "raised by the limit on alarms, not by a record",
    )
    .judged(None, ALARM_LIMIT),
)
