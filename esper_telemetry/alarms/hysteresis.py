"""When a severity becomes an alarm and when the alarm is over (E1): late enough not to flicker, never on missing data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Change = Literal["RAISE", "CLEAR"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How much it takes to change.

    Attributes:
        on: severity from which on (inclusive) an update speaks for the alarm.
        off: severity below which (exclusive) an update speaks for its end.
        n_on, n_off: how many such updates it takes in a row; missing ones are passed over.
        warmup: updates at the beginning that raise nothing.

    Raises ValueError for bounds in the wrong order or counts below 1.
    """

    on: float = 0.5
    off: float = 0.25
    n_on: int = 1
    n_off: int = 3
    warmup: int = 0

    def __post_init__(self) -> None:
        if not self.off <= self.on:
            raise ValueError(f"off must not exceed on, got off {self.off} and on {self.on}")
        if min(self.n_on, self.n_off) < 1:
            raise ValueError(f"n_on and n_off must be at least 1, got {self.n_on} and {self.n_off}")


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """Where one detector stands; `step` returns where it stands next.

    Attributes:
        patience: how much it takes to change.
        updates: updates so far, those without a severity included.
        streak: updates in a row that speak for a change.
        active: whether the alarm is on.
    """

    patience: Patience = Patience()  # frozen
    updates: int = 0
    streak: int = 0
    active: bool = False

    def step(self, severity: float | None) -> HysteresisStep:
        """Judges one update by its severity, 0 to 1; None and NaN hold everything but the count of updates."""
        updates = self.updates + 1
        if severity is None or math.isnan(severity):
            return HysteresisStep(replace(self, updates=updates), None)
        streak = self.streak + 1 if self._speaks(severity, updates) else 0
        if streak < (self.patience.n_off if self.active else self.patience.n_on):
            return HysteresisStep(replace(self, updates=updates, streak=streak), None)
        active = not self.active
        return HysteresisStep(replace(self, updates=updates, streak=0, active=active), "RAISE" if active else "CLEAR")

    def _speaks(self, severity: float, updates: int) -> bool:
        """Whether a severity speaks for a change."""
        if self.active:
            return severity < self.patience.off
        return severity >= self.patience.on and updates > self.patience.warmup


class HysteresisStep(NamedTuple):
    """What one update does: the state after it, and the change, if any."""

    state: Hysteresis
    change: Change | None
