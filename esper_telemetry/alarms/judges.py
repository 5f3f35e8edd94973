"""Judges that several alarms share, and the pieces of state of the others."""

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
Z = Ramp("z", 4.0, 12.0, "robust standard scores where the severity of an outlier begins")
Z_SUDDEN = Ramp("z_sudden", 6.0, 18.0, "the same for a single update, nothing before it being unusual")
BEYOND = Ramp("beyond", 0.5, 2.5, "decades above all values before, where the severity of an outlier begins")
RATE_GROWN = above("rate_grown", 1.15, "learning rate over the one that was set, after rising for long")


@dataclass(frozen=True, slots=True)
class AboveBound:
    """Severity 1 where a key exceeds a bound.

    Attributes:
        key: that is read.
        bound: that it must exceed; a plain number cannot be changed by users.
        words: the clause, in which `{number}`, `{percent}` and `{usual}` stand for the value and its usual range.
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
    """Severity of a key on a linear ramp; arguments as for `AboveBound`."""

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
        raise ValueError(f"words must be a text with {fields} in it, got {words!r}") from None


def clause(words: str, view: View, key: str, value: float) -> str:
    """The words with the value in them, and what it usually is."""
    return words.format(
        number=number(value), percent=percent(value), inverse=times(1 / max(value, 1e-30)), usual=view.usual(key)
    )


@dataclass(slots=True)
class Outlier:
    """Upward outliers of one key: far out at once, or out of line for two updates in a row.

    Where a history is so wide that nothing is far out by its standard scores, the decades above all earlier values count.
    """

    before: float = 0.0

    def severity(self, view: View, key: str) -> float | None:
        """Severity of the update; None without a history."""
        z = view.z(key)
        if z is None:
            return None
        limits, before = view.limits, self.before
        self.before = z
        return max(
            limits.severity(Z_SUDDEN, z),
            limits.severity(Z, min(z, before)),
            limits.severity(BEYOND, view.baselines.beyond.get(key, 0.0)),
        )


OUTLIER_BOUNDS = (Z, Z_SUDDEN, BEYOND)


@dataclass(slots=True)
class Recent:
    """The latest values of a series that not every update has."""

    size: int
    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> list[float]:
        """Add a value; returns the latest ones with it."""
        self.values.append(value)
        del self.values[: -self.size]
        return self.values

    @property
    def full(self) -> bool:
        """True where there are as many as it holds."""
        return len(self.values) == self.size

    def mean(self, value: float) -> float | None:
        """The mean with this value; None before there are enough."""
        self.add(value)
        return sum(self.values) / self.size if self.full else None

    def earlier_median(self, value: float) -> float | None:
        """The median without this value, which is added; None of fewer than three."""
        middle = median(self.values) if len(self.values) >= 3 else None
        self.add(value)
        return middle


@dataclass(slots=True)
class Before:
    """A value of the update before."""

    value: float = 0.0

    def swap(self, value: float) -> float:
        """Return it, and keep this one."""
        before, self.value = self.value, value
        return before


@dataclass(slots=True)
class Total:
    """A sum over updates in a row."""

    total: float = 0.0

    def add(self, value: float, goes_on: bool) -> float:
        """The sum with this value; 0 where the row ends."""
        self.total = self.total + value if goes_on else 0.0
        return self.total


@dataclass(slots=True)
class Streaks:
    """Updates in a row for which something has held, by name."""

    updates: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, holds: bool) -> int:
        """Add an update."""
        streak = self.updates[name] = self.updates.get(name, 0) + 1 if holds else 0
        return streak


@dataclass(slots=True)
class StateJudge(Generic[S]):
    """A judge that is a function of the update and of a state, of which every run has its own."""

    function: Callable[[View, S], Iterable[Finding]]
    state: S

    def __call__(self, view: View) -> Iterable[Finding]:
        return self.function(view, self.state)


def reading(*keys: str) -> Callable[[Callable[..., Iterator[Finding]]], Callable[..., Iterable[Finding]]]:
    """Decorate a judge that takes the values of these keys behind the view: it is called where an update has all of them."""

    def decorate(function: Callable[..., Iterator[Finding]]) -> Callable[..., Iterable[Finding]]:
        @wraps(function)
        def judge(view: View, *state: Any) -> Iterable[Finding]:
            values = [view.values.get(key) for key in keys]
            return () if None in values else function(view, *values, *state)

        return judge

    return decorate


ANNEALED_SHARE = 0.05  # share of the largest learning rate below which a schedule may well end at nothing
WARMUP_UPDATES = 5  # updates at the beginning in which a schedule may not have begun to warm up


@dataclass(slots=True)
class AnnealedRate:
    """Tells a learning rate near 0 that a schedule led to from one that fell at once."""

    highest: float = 0.0
    abrupt: bool = False

    def stopped(self, view: View) -> bool:
        """True where the learning rate is near 0 on purpose."""
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
    """The first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
