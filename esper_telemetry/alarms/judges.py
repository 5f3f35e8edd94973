"""Judges that several alarms share, and building blocks for the state of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from statistics import median
from typing import Any, Generic, TypeVar

from esper_telemetry.alarms.alarm_bounds import Bound, Ramp, above, hard
from esper_telemetry.alarms.rule import Finding, View, require_template
from esper_telemetry.core.messages import number, percent, times
from esper_telemetry.core.requirements import require_number, require_text

S = TypeVar("S")
Z = Ramp("z", 4.0, 12.0, "robust standard score of an outlier")
Z_SUDDEN = Ramp("z_sudden", 6.0, 18.0, "the same for a single update after usual ones")
BEYOND = Ramp("beyond", 0.5, 2.5, "decades by which an outlier exceeds all earlier values")
RATE_GROWN = above("rate_grown", 1.15, "learning rate over the setting, after a long rise or a jump")


@dataclass(frozen=True, slots=True)
class AboveBound:
    """Severity 1 if a key exceeds a bound.

    Attributes:
        key: key to compare.
        bound: bound that the value must exceed; users cannot change a plain number.
        words: clause with the fields `{number}`, `{percent}` and `{inverse}` for the value and `{usual}` for its usual range.
    """

    key: str
    bound: Bound | float
    words: str

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a wrong argument."""
        require_template("key", self.key)
        if not isinstance(self.bound, Bound):
            require_number("bound", self.bound)
        _require_words(self.words)

    def __call__(self, view: View) -> Iterator[Finding]:
        value = view.get(self.key)
        if value is not None:
            bound = view.limits[self.bound] if isinstance(self.bound, Bound) else self.bound
            finding = Finding(hard(value > bound), self.key, value, bound)
            yield finding.with_text(lambda: clause(self.words, view, self.key, value))


@dataclass(frozen=True, slots=True)
class OnRamp:
    """Severity of a key on a linear ramp; takes the arguments of `AboveBound` with a ramp."""

    key: str
    ramp: Ramp
    words: str

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a wrong argument."""
        require_template("key", self.key)
        if not isinstance(self.ramp, Ramp):
            raise TypeError(f"ramp must be a Ramp, got {self.ramp!r}")
        _require_words(self.words)

    def __call__(self, view: View) -> Iterator[Finding]:
        value = view.get(self.key)
        if value is not None:
            severity, bound = view.limits.severity(self.ramp, value), view.limits.middle(self.ramp)
            finding = Finding(severity, self.key, value, bound)
            yield finding.with_text(lambda: clause(self.words, view, self.key, value))


def _require_words(words: str) -> None:
    try:
        require_text("words", words).format(number="", percent="", inverse="", usual="")
    except (LookupError, ValueError):
        fields = "{number}, {percent}, {inverse} or {usual}"
        raise ValueError(f"words must be a text with the fields {fields}, got {words!r}") from None


def clause(words: str, view: View, key: str, value: float) -> str:
    """Return the words with the value and its usual range."""
    return words.format(number=number(value), percent=percent(value), inverse=times(1 / max(value, 1e-30)), usual=view.usual(key))


@dataclass(slots=True)
class Outlier:
    """Upward outliers of one key: extreme in one update, or unusual in two updates in a row.

    If the history is so wide that standard scores stay small, the decades above all earlier values count.
    """

    before: float = 0.0

    def severity(self, view: View, key: str) -> float | None:
        """Return the severity of the update; None without a history."""
        z = view.z(key)
        if z is None:
            return None
        limits, before = view.limits, self.before
        self.before = z
        return max(
            limits.severity(Z_SUDDEN, z), limits.severity(Z, min(z, before)), limits.severity(BEYOND, view.baselines.beyond.get(key, 0.0))
        )


OUTLIER_BOUNDS = (Z, Z_SUDDEN, BEYOND)


@dataclass(slots=True)
class Recent:
    """The latest values of a series that may skip updates."""

    size: int
    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> list[float]:
        """Add a value; returns the latest values, including it."""
        self.values.append(value)
        del self.values[: -self.size]
        return self.values

    @property
    def full(self) -> bool:
        """True if `size` values have been added."""
        return len(self.values) == self.size

    def mean(self, value: float) -> float | None:
        """Add a value; returns the mean, or None before there are `size` values."""
        self.add(value)
        return sum(self.values) / self.size if self.full else None

    def earlier_median(self, value: float) -> float | None:
        """Add a value; returns the median of the values before it, or None if there were fewer than three."""
        middle = median(self.values) if len(self.values) >= 3 else None
        self.add(value)
        return middle


@dataclass(slots=True)
class Before:
    """A value of the previous update."""

    value: float = 0.0

    def swap(self, value: float) -> float:
        """Return the previous value and store this one."""
        before, self.value = self.value, value
        return before


@dataclass(slots=True)
class Streaks:
    """Number of consecutive updates for which something has held, by name."""

    updates: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, holds: bool) -> int:
        """Add an update."""
        streak = self.updates[name] = self.updates.get(name, 0) + 1 if holds else 0
        return streak


@dataclass(slots=True)
class StateJudge(Generic[S]):
    """A judge that is a function of the update and of a state; every run has a copy of the state."""

    function: Callable[[View, S], Iterable[Finding]]
    state: S

    def __call__(self, view: View) -> Iterable[Finding]:
        return self.function(view, self.state)


def reading(*keys: str) -> Callable[[Callable[..., Iterator[Finding]]], Callable[..., Iterable[Finding]]]:
    """Decorate a judge that takes the values of these keys after the view; it is called only if an update has all of them."""

    def decorate(function: Callable[..., Iterator[Finding]]) -> Callable[..., Iterable[Finding]]:
        @wraps(function)
        def judge(view: View, *state: Any) -> Iterable[Finding]:
            values = [view.values.get(key) for key in keys]
            return () if None in values else function(view, *values, *state)

        return judge

    return decorate


ANNEALED_SHARE = 0.05  # share of the largest learning rate below which a schedule may end at 0
WARMUP_UPDATES = 5  # updates at the start in which the learning rate may be 0 before its warm-up


@dataclass(slots=True)
class AnnealedRate:
    """Distinguishes a learning rate that a schedule lowered to about 0 from one that fell abruptly."""

    highest: float = 0.0
    abrupt: bool = False

    def stopped(self, view: View) -> bool:
        """Return True if a schedule has lowered the learning rate to about 0."""
        rate = view.get("opt/lr")
        if rate is None:
            return False
        highest = self.highest = max(self.highest, rate)
        if highest == 0:
            return view.update <= WARMUP_UPDATES
        before = view.previous.get("opt/lr", rate)
        if rate > ANNEALED_SHARE * highest:
            self.abrupt = False
            return False
        if before > ANNEALED_SHARE * highest and rate < before / 4:
            self.abrupt = True
        return not self.abrupt


def list_names(names: list[str]) -> str:
    """Return the first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
