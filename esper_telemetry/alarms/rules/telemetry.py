"""Telemetry itself: its cost, its metrics, its backends, too many alarms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from esper_telemetry.alarms.rule import CAUSE_LAST_RANK, AlarmRule, Finding, View, above, count, hard, number, percent
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

UNDEFINED = "telemetry/undefined"
UNMEASURED = "telemetry/unmeasured"

MISSING_UPDATES = 5
"""Updates without a value that was due, which raise the alarm."""

MIN_UPDATES = 5
"""Updates with a value, before its absence means anything."""


@dataclass(slots=True)
class MissingMetricJudge:
    """A metric that was always there and is not any more.

    Attributes:
        every: updates between two sampled ones, at most.
        counts: updates with a value, and without one since, by key.
    """

    every: float = 8.0
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __call__(self, view: View) -> Iterator[Finding]:
        if view.get(UNMEASURED):
            return
        self.every = max(view.get("telemetry/sample_every") or 1.0, self.every)
        for key in (*ALWAYS, *SAMPLED):
            present, absent = self.counts.get(key, (0, 0))
            if key in view.values:
                self.counts[key] = present + 1, 0
                if present + 1 >= MIN_UPDATES:
                    yield Finding(0.0, UNDEFINED, instance=key)
            elif present >= MIN_UPDATES:
                self.counts[key] = present, absent + 1
                due = self.every if key in SAMPLED else 1
                undefined = view.get(UNDEFINED)
                yield Finding(hard(absent + 1 >= MISSING_UPDATES * due), UNDEFINED, undefined, instance=key).with_text(
                    lambda key=key, absent=absent: f"{key} has had no value for {absent + 1} updates"  # type: ignore[misc]
                )


OVERHEAD = above("overhead", 0.1, "telemetry's share of the training time")
OVERHEAD_UPDATES = 20
"""Updates over which the share is averaged."""

MIN_OVERHEAD_SECONDS = 60.0
"""Time that telemetry must have taken in the run so far, unless it takes most of it: updates of small scripts take about as long as reading
their losses and arrays does, and nobody waits for a short run of them."""

LARGE_SHARE = 2 / 3
"""Share from which on telemetry takes too long however short runs are."""

OVERHEAD_SEVERITY = 0.5
"""Severity of what costs time and harms nothing."""


@dataclass(slots=True)
class OverheadJudge:
    """Telemetry that takes its time, averaged over sampled and other updates; those at DEBUG were asked for, by someone or by an alarm.

    Attributes:
        shares: of the latest updates.
        seconds: of all updates.
    """

    shares: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __call__(self, view: View) -> Iterator[Finding]:
        key, bound = "perf/telemetry_frac", view.limits[OVERHEAD]
        value = busy_share(view)
        if value is None or view.get("telemetry/level") == Level.DEBUG:
            return
        shares = self.shares
        shares.append(value)
        del shares[:-OVERHEAD_UPDATES]
        mean = sum(shares) / len(shares)
        self.seconds += view.values.get("perf/telemetry_cpu_ms", view.values.get("perf/telemetry_ms", 0.0)) / 1000
        noticed = self.seconds >= MIN_OVERHEAD_SECONDS or mean > LARGE_SHARE
        yield Finding(
            OVERHEAD_SEVERITY * hard(len(shares) == OVERHEAD_UPDATES and mean > bound and noticed), key, mean, bound
        ).with_text(
            lambda: f"telemetry has taken {percent(mean)} of the training time, {number(self.seconds)} s so far"
        )


def busy_share(view: View) -> float | None:
    """Telemetry's share of the processor time where it is measured: on a crowded machine, to wait for a core is not its doing."""
    own, collecting, learning = (view.get(f"perf/{part}_cpu_ms") for part in ("telemetry", "rollout", "update"))
    if own is None or collecting is None or learning is None:
        return view.get("perf/telemetry_frac")
    return own / (own + collecting + learning) if own > 0 else 0.0


OUTAGE_FAILURES = 3
"""Failures of backends, one after the other, which are an outage."""


@dataclass(slots=True)
class DeliveryJudge:
    """Backends that fail again and again, while nothing gets through; or records that are lost on the way to one.

    Attributes:
        errors_before: errors before the failures under way; None where there are none.
        deepest: records that waited an update ago: while no backend works, more and more do.
    """

    errors_before: float | None = None
    deepest: float = 0.0

    def __call__(self, view: View) -> Iterator[Finding]:
        errors, dropped = view.get("telemetry/errors"), view.get("telemetry/dropped")
        if errors is None and dropped is None:
            return
        lost = (dropped or 0.0) > (view.previous.get("telemetry/dropped") or 0.0)
        yield Finding(
            hard(self.failures(view, errors or 0.0) >= OUTAGE_FAILURES or lost),
            "telemetry/dropped" if lost else "telemetry/errors",
            dropped if lost else errors,
        ).with_text(
            lambda: f"backends have failed {number(errors or 0.0)} times and lost {number(dropped or 0.0)} records"
        )

    def failures(self, view: View, errors: float) -> float:
        """Number of failures since anything got through."""
        depth = view.get("telemetry/queue_depth")
        more = errors - (view.previous.get("telemetry/errors") or 0.0)
        if depth is not None and depth < self.deepest:
            self.errors_before = None
        if more > 0 and self.errors_before is None:
            self.errors_before = errors - more
        self.deepest = depth or 0.0
        return 0.0 if self.errors_before is None else errors - self.errors_before


ALARM_LIMIT = count("storm", 20, "alarms in a hundred updates")
TOO_MANY: Final = "telemetry/storm"

RULES = (
    AlarmRule(
        type="telemetry/overhead",
        inputs=("perf/telemetry_frac", "telemetry/sample_every"),
        meaning="Telemetry takes more of the training time than it should.",
        action="Lower the level, leave a second core free, or log less of your own.",
        judge=OverheadJudge(),
        bounds=(OVERHEAD,),
        source="averaged over 20 updates, some of them sampled; at least a minute of the run so far, or two thirds of it",
        rank=CAUSE_LAST_RANK,
        warmup=20,
        n_on=5,
        n_off=5,
        evidence=("perf/*", "telemetry/sample_every"),
    ),
    AlarmRule(
        type="telemetry/missing_metric",
        inputs=(UNDEFINED,),
        meaning="A metric that was there has had no value for several updates.",
        action="Its description says when it is absent; check what feeds it.",
        judge=MissingMetricJudge(),
        source="only of keys that are defined whatever the data: others are absent where they have no meaning",
        rank=CAUSE_LAST_RANK,
        required=(),
        n_off=1,
        evidence=("telemetry/undefined",),
    ),
    AlarmRule(
        type="telemetry/delivery",
        inputs=("telemetry/errors", "telemetry/dropped", "telemetry/queue_depth"),
        meaning="A backend fails or falls behind; the journal has everything.",
        action="Check the address and the key of the backend; `esper-telemetry replay` sends what is missing.",
        judge=DeliveryJudge(),
        source="one failure is retried, ever later: three without a record that gets through are an outage",
        rank=CAUSE_LAST_RANK,
        required=("telemetry/errors",),
        n_off=5,
        evidence=("telemetry/*",),
    ),
    AlarmRule(
        type=TOO_MANY,
        inputs=("alarm/active", "alarm/{key}"),
        meaning="More alarms were raised than anybody can read.",
        action="Look at the first ones: the rest are most likely their consequences.",
        bounds=(ALARM_LIMIT,),
        source="raised by the limit on alarms, not by a record",
        rank=CAUSE_LAST_RANK,
        required=(),
    ),
)
