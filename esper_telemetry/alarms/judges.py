"""Judges that several alarms share, and the pieces of state of the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from esper_telemetry.alarms.rule import (
    Bound,
    Finding,
    Ramp,
    View,
    above,
    hard,
    number,
    percent,
    require_template,
    times,
)
from esper_telemetry.core.requirements import require_number, require_text

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
            yield Finding(hard(value > bound), self.key, value, bound).with_text(
                lambda: clause(self.words, view, self.key, value)
            )


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
            yield Finding(
                view.limits.severity(self.ramp, value), self.key, value, view.limits.middle(self.ramp)
            ).with_text(lambda: clause(self.words, view, self.key, value))


def _require_words(words: str) -> None:
    try:
        require_text("words", words).format(number="", percent="", inverse="", usual="")
    except (LookupError, ValueError):
        raise ValueError(
            f"words must be a text with {{number}}, {{percent}}, {{inverse}} or {{usual}} in it, got {words!r}"
        ) from None


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
class RollingMean:
    """Mean of the last values of a key that not every update has."""

    size: int = 10
    values: list[float] = field(default_factory=list)

    def add(self, value: float | None) -> float | None:
        """The mean with this value; None before there are enough, and where there is no new one."""
        if value is None:
            return None
        self.values.append(value)
        del self.values[: -self.size]
        return sum(self.values) / self.size if len(self.values) == self.size else None


@dataclass(slots=True)
class RollingMedian:
    """Median of the values before the latest one, at most twenty."""

    values: list[float] = field(default_factory=list)

    def add(self, value: float | None) -> float | None:
        """The median without this value; None of fewer than three."""
        middle = median(self.values) if len(self.values) >= 3 else None
        if value is not None:
            self.values.append(value)
            del self.values[:-20]
        return middle


ANNEALED_SHARE = 0.05
"""Share of the largest learning rate below which a schedule may well end at nothing."""

WARMUP_UPDATES = 5
"""Updates at the beginning in which a schedule may not have begun to warm up."""


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
