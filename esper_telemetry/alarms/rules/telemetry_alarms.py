"""Alarms about telemetry: its overhead, missing metrics, failing backends, too many alarms."""

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
"""Keys that, once they have had a value, have one in every update of the run."""

SAMPLED = ("opt/update_to_weight", "repr/dormant_frac", "lstm/gate/f/mean")  # the same in some updates only
UNDEFINED = "telemetry/undefined"
UNMEASURED = "telemetry/unmeasured"
MISSING_UPDATES = 5  # updates without an expected value that raise the alarm
MIN_UPDATES = 5  # updates that must have a value before its absence counts


@dataclass(slots=True)
class Presence:
    """Largest distance between sampled updates; updates with a value, and updates without one since, by key."""

    every: float = 8.0
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)


def missing_metric(view: View, past: Presence) -> Iterator[Finding]:
    """A metric that had a value in every update and no longer has one."""
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
            words = f"{key} has been missing for {absent + 1} updates, although it was measured before"
            yield Finding(hard(wrong), UNDEFINED, view.get(UNDEFINED), instance=key).says(words)


OVERHEAD = above("overhead", 0.1, "telemetry's share of the training time")
OVERHEAD_UPDATES = 20  # updates over which the share is averaged

MIN_OVERHEAD_SECONDS = 60.0
"""Time that telemetry must have taken so far: in a small script an update takes about as long as reading its losses and arrays, which
does not matter in a short run."""


@dataclass(slots=True)
class Cost:
    """Shares of the latest updates, and seconds of all updates."""

    shares: Recent = field(default_factory=partial(Recent, OVERHEAD_UPDATES))
    seconds: float = 0.0


def overhead(view: View, cost: Cost) -> Iterator[Finding]:
    """Telemetry that takes much time, averaged over sampled and other updates; updates at DEBUG were requested and do not count."""
    value, bound = busy_share(view), view.limits[OVERHEAD]
    if value is None or view.get("telemetry/level") == Level.DEBUG:
        return
    shares = cost.shares.add(value)
    mean = sum(shares) / len(shares)
    cost.seconds += view.values.get("perf/telemetry_cpu_ms", view.values.get("perf/telemetry_ms", 0.0)) / 1000
    noticed = cost.seconds >= MIN_OVERHEAD_SECONDS
    severity = WARNING * hard(cost.shares.full and mean > bound and noticed)
    words = "telemetry has taken {:%} of the training time, {} s so far, which slows the run down"
    yield Finding(severity, "perf/telemetry_frac", mean, bound).says(words, mean, cost.seconds)


def busy_share(view: View) -> float | None:
    """Telemetry's share of the CPU time if measured, otherwise of wall time: on a busy machine, waiting for a core is not its cost."""
    own, collecting, learning = (view.get(f"perf/{part}_cpu_ms") for part in ("telemetry", "rollout", "update"))
    if own is None or collecting is None or learning is None:
        return view.get("perf/telemetry_frac")
    return own / (own + collecting + learning) if own > 0 else 0.0


OUTAGE_FAILURES = 3  # consecutive failures of backends that are an outage


@dataclass(slots=True)
class Failures:
    """Failures of backends.

    Attributes:
        errors_before: errors before the current failures; None if there are none.
        deepest: records that were waiting in the previous update; their number grows while no backend works.
    """

    errors_before: float | None = None
    deepest: float = 0.0

    def add(self, view: View, errors: float) -> float:
        """Number of failures since a record was last delivered."""
        depth = view.get("telemetry/queue_depth")
        more = errors - (view.previous.get("telemetry/errors") or 0.0)
        if depth is not None and depth < self.deepest:
            self.errors_before = None
        if more > 0 and self.errors_before is None:
            self.errors_before = errors - more
        self.deepest = depth or 0.0
        return 0.0 if self.errors_before is None else errors - self.errors_before


def delivery(view: View, failures: Failures) -> Iterator[Finding]:
    """Backends that keep failing while nothing is delivered, or records that are lost on the way to one."""
    errors, dropped = view.get("telemetry/errors"), view.get("telemetry/dropped")
    if errors is None and dropped is None:
        return
    lost = (dropped or 0.0) > (view.previous.get("telemetry/dropped") or 0.0)
    wrong = failures.add(view, errors or 0.0) >= OUTAGE_FAILURES or lost
    shown = ("telemetry/dropped", dropped) if lost else ("telemetry/errors", errors)
    words = "backends have failed {} times and lack records, of which {} were dropped; the journal has all records"
    yield Finding(hard(wrong), *shown).says(words, errors or 0.0, dropped or 0.0)


ALARM_LIMIT = count("storm", 20, "alarms in a hundred updates")
TOO_MANY: Final = "telemetry/storm"

RULES = (
    alarm("telemetry/overhead", rank=CAUSE_LAST_RANK, warmup=20, n_on=5, n_off=5)
    .reads("perf/telemetry_frac", "telemetry/sample_every")
    .needs("perf/telemetry_frac", "perf/telemetry_ms")
    .says(
        "Telemetry takes more of the training time than it should.",
        'Choose a lower level, such as `Telemetry(level="minimal")`, leave a second core free for telemetry, or log fewer values.',
        "averaged over 20 updates, some of them sampled, once telemetry has taken a minute of the run",
    )
    .shows("perf/*", "telemetry/sample_every")
    .judged(StateJudge(overhead, Cost()), OVERHEAD),
    alarm("telemetry/missing_metric", UNDEFINED, rank=CAUSE_LAST_RANK, n_off=1)
    .needs(required=(), applies=lambda facts: not facts.columns_by_name)  # a script does not report: what is not found is "not traced"
    .says(
        "A metric that was recorded before has been missing for several updates.",
        "`esper-telemetry metrics KEY` says when a metric is absent; check the code that reports it.",
        "only for keys that are always defined: other metrics are absent when they have no meaning",
    )
    .shows("telemetry/undefined")
    .judged(StateJudge(missing_metric, Presence())),
    alarm("telemetry/delivery", rank=CAUSE_LAST_RANK, n_off=5)
    .reads("telemetry/errors", "telemetry/dropped", "telemetry/queue_depth")
    .says(
        "A backend fails or falls behind; the journal has all records.",
        "Check the address and the key of the backend; `esper-telemetry replay` sends the missing records.",
        "a failed delivery is retried at growing intervals: three failures without a delivered record are an outage",
    )
    .shows("telemetry/*")
    .judged(StateJudge(delivery, Failures())),
    alarm(TOO_MANY, "alarm/active", "alarm/{key}", rank=CAUSE_LAST_RANK)
    .needs(required=())
    .says(
        "More alarms were raised than can be read.",
        "Look at the first alarms: the others are most likely their consequences.",
        "raised by the limit on alarms, not by a record",
    )
    .judged(None, ALARM_LIMIT),
)
