"""Updates at DEBUG that alarms ask for (E2): each type for its own number, none of them for ever."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from esper_telemetry.core.derived import Derived
from esper_telemetry.core.metric import Metric, reports
from esper_telemetry.core.record import Level

CAP: Final = 20
"""Updates at DEBUG in a row, at most; the next one is NORMAL by force."""

COOLDOWN_FACTOR: Final = 2
"""After a window, its type opens no other for so many times its duration."""


@dataclass(frozen=True, slots=True)
class EscalationRemaining(Derived):
    """Updates for which the level stays raised."""

    remaining: float | None = reports(
        Metric.quantity(
            "telemetry/escalation_remaining", 979, "escalation remaining", unit="updates", low=0.0, level=Level.MINIMAL
        )
        .asks("For how many more updates do alarms keep the level at DEBUG, this one included?")
        .absent("nobody raises alarms")
    )


@dataclass(frozen=True, slots=True)
class Escalation:
    """State of the level; `step` returns the next one.

    Attributes:
        durations: per type of alarm, the updates at DEBUG that it asks for.
        cap, cooldown_factor: limits, see the constants.
        updates: updates so far.
        remaining: updates at DEBUG that are still to come.
        streak: updates at DEBUG in a row so far.
        ends: per type, the last update of its latest window.
    """

    durations: Mapping[str, int]
    cap: int = CAP
    cooldown_factor: int = COOLDOWN_FACTOR
    updates: int = 0
    remaining: int = 0
    streak: int = 0
    ends: Mapping[str, int] = field(default_factory=dict)

    def step(self, raised: Collection[str] = ()) -> EscalationStep:
        """Add one update with the types of alarm raised in it; a type without a duration raises no level."""
        now = self.updates + 1
        if self.streak >= self.cap:
            ends = {kind: min(end, now - 1) for kind, end in self.ends.items()}
            return EscalationStep(replace(self, updates=now, remaining=0, streak=0, ends=ends), 0)
        cooled = {kind: end + self.cooldown_factor * self.durations[kind] for kind, end in self.ends.items()}
        opened = [kind for kind in raised if self.durations.get(kind, 0) > 0 and now > cooled.get(kind, 0)]
        ends = {**self.ends, **{kind: now + self.durations[kind] - 1 for kind in opened}}
        remaining = max([self.remaining, *(self.durations[kind] for kind in opened)])
        state = replace(
            self, updates=now, remaining=max(0, remaining - 1), streak=self.streak + 1 if remaining else 0, ends=ends
        )
        return EscalationStep(state, remaining)


class EscalationStep(NamedTuple):
    """The state after an update, and the updates at DEBUG left, this one included; 0 is NORMAL."""

    state: Escalation
    remaining: int

    def values(self) -> EscalationRemaining:
        """As a record has it."""
        return EscalationRemaining(float(self.remaining))
