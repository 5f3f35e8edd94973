"""Bounds of alarms: named numbers, ramps of severity, and their values in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, log10
from typing import Final

from esper_telemetry.core.requirements import require_choice, require_number, require_text

SMALLEST_DIVISOR: Final = 1e-12  # smallest value of a bound that is used as a divisor


@dataclass(frozen=True, slots=True)
class Bound:
    """A number that a judge compares values with.

    Attributes:
        name: name with which users change it.
        default: default value.
        meaning: the quantity and its unit, in words.
        direction: 1 if larger values are evidence for the alarm, -1 if smaller ones are, 0 for a count that multipliers do not change.
        lowest: smallest value that users can set.
    """

    name: str
    default: float
    meaning: str
    direction: int = 1
    lowest: float = -inf

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a wrong field."""
        require_text("the name of a bound", self.name)
        require_number(f"bound {self.name}", self.default)
        require_text(f"the meaning of bound {self.name}", self.meaning)
        require_choice(f"the direction of bound {self.name}", self.direction, (1, -1, 0))


def above(name: str, default: float, meaning: str, *, lowest: float = -inf) -> Bound:
    """Return a bound that values must exceed."""
    return Bound(name, default, meaning, lowest=lowest)


def below(name: str, default: float, meaning: str) -> Bound:
    """Return a bound that values must fall below."""
    return Bound(name, default, meaning, -1)


def count(name: str, default: float, meaning: str) -> Bound:
    """Return a count, such as a number of updates, that multipliers do not change."""
    return Bound(name, default, meaning, 0, lowest=0.0)


@dataclass(frozen=True, slots=True, eq=False)  # looked up by identity, hundreds of times per update
class Ramp:
    """The range over which a severity rises from 0 to 1; a severity of 0.5 raises an alarm.

    Users change its ends as `<name>_low` and `<name>_high`. If `high` is the smaller end, smaller values are more severe.
    """

    name: str
    low: float
    high: float
    meaning: str

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a wrong field."""
        require_text("the name of a ramp", self.name)
        require_number(f"the low end of ramp {self.name}", self.low)
        require_number(f"the high end of ramp {self.name}", self.high)
        require_text(f"the meaning of ramp {self.name}", self.meaning)

    @property
    def bounds(self) -> tuple[Bound, Bound]:
        """Both ends as bounds."""
        direction = 1 if self.high > self.low else -1
        lowest = 0.0 if min(self.low, self.high) >= 0 else -inf
        return (
            Bound(f"{self.name}_low", self.low, self.meaning, direction, lowest),
            Bound(f"{self.name}_high", self.high, "end of that ramp", direction, lowest),
        )


class Limits:
    """Values of bounds: the defaults, except for changes by name."""

    def __init__(self, changes: Mapping[str, float]) -> None:
        self._changes = dict(changes)
        self._ends: dict[Ramp, tuple[float, float]] = {}

    def __getitem__(self, bound: Bound) -> float:
        return self._changes.get(bound.name, bound.default)

    def ends(self, span: Ramp) -> tuple[float, float]:
        """Return both ends of a ramp."""
        ends = self._ends.get(span)
        if ends is None:
            low, high = span.bounds
            ends = self._ends[span] = self[low], self[high]
        return ends

    def low(self, span: Ramp) -> float:
        """Return the value at which the severity begins to rise."""
        return self.ends(span)[0]

    def high(self, span: Ramp) -> float:
        """Return the value at which the severity reaches 1."""
        return self.ends(span)[1]

    def middle(self, span: Ramp) -> float:
        """Return the value that raises an alarm on a linear ramp."""
        low, high = self.ends(span)
        return (low + high) / 2

    def log_middle(self, span: Ramp) -> float:
        """Return the value that raises an alarm on a logarithmic ramp."""
        low, high = self.ends(span)
        return float((low * high) ** 0.5)

    def severity(self, span: Ramp, x: float) -> float:
        """Return the severity of a value on a linear ramp."""
        return ramp(x, *self.ends(span))

    def log_severity(self, span: Ramp, x: float) -> float:
        """Return the severity of a value on a logarithmic ramp, 0.5 at the geometric mean of its ends."""
        return decade_ramp(x, *self.ends(span))


def ramp(x: float, low: float, high: float) -> float:
    """Return 0 up to `low`, 1 from `high`, linear between; reversed if `high` is smaller."""
    if low == high:
        return float(x >= high)
    return min(max((x - low) / (high - low), 0.0), 1.0)


def decade_ramp(x: float, low: float, high: float) -> float:
    """Return the same for logarithms: 0.5 at the geometric mean."""
    return ramp(log10(max(x, 1e-300)), log10(low), log10(high)) if low > 0 and high > 0 else hard(x >= high)


def hard(wrong: bool) -> float:
    """Return severity 1 or 0."""
    return 1.0 if wrong else 0.0
