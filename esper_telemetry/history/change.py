"""Did the level of a series change? Sums that grow with every value off the old level (T5; Page 1954).

The sums do not reset by themselves: a detector resets them after it has raised its alarm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from esper_telemetry.core.derived import Array, Derived
from esper_telemetry.core.metric import Metric, label, reports
from esper_telemetry.history.outliers import spread
from esper_telemetry.history.trend import prewhiten

CUSUM_SLACK = 1.0
CUSUM_LEVEL = 8.0
BASELINE = 50
"""Values of a series that tell what is usual."""
TOLERATED = 0.1
"""Of a series' spread, what `PageHinkley` tolerates per value."""


@dataclass(frozen=True, slots=True)
class Changes(Derived):
    """Evidence for a change of level, [keys]; NaN where undefined."""

    key: tuple[str, ...] = label()
    cusum: Array | None = reports(
        Metric.quantity("{key}/cusum", 912, "change of level", unit="σ (robust)", low=0.0)
        .asks("Has this metric moved to another level? It adds up what is more than 1 σ off the old one.")
        .bounds(warn="> 8, as a hint only", source="Page 1954; measured null rate 2 to 17 % per 100 updates")
        .absent("the robust z is")
        .advises("Look up the key without this ending: what to try stands there.")
    )


@dataclass(frozen=True, slots=True)
class SlowChanges(Derived):
    """Evidence for a change of the mean in one direction, [keys]; NaN where undefined."""

    key: tuple[str, ...] = label()
    page_hinkley: Array | None = reports(
        Metric.quantity("{key}/page_hinkley", 913, "lasting rise", unit="as key", low=0.0)
        .asks(
            "Has this metric left its mean so far for good, upwards or downwards? It adds up what is more than 0.1 σ off."
        )
        .bounds(warn="8 times its spread", source="Page 1954")
        .absent("no value")
        .advises("Look up the key without this ending: what to try stands there.")
    )


class Cusum:
    """Two-sided cumulative sums of K standardised series.

    Attributes:
        slack: what a value may be off without counting.
    """

    def __init__(self, keys: int, slack: float = CUSUM_SLACK) -> None:
        self.slack = slack
        self._sums = np.zeros((2, keys))

    @property
    def up(self) -> Array:
        """Sum of what was above, [K]."""
        up: Array = self._sums[0]
        return up

    @property
    def down(self) -> Array:
        """Sum of what was below, [K]."""
        down: Array = self._sums[1]
        return down

    def step(self, z: Array, keys: tuple[str, ...] = ()) -> Changes:
        """Takes one standardised value per series, [K]; NaN waits."""
        known = np.isfinite(z)
        grown = np.maximum(self._sums + np.where(known, np.stack([z, -z]) - self.slack, 0.0), 0.0)
        self._sums = np.where(known, grown, self._sums)
        return Changes(keys, np.where(known, self._sums.max(axis=0), np.nan))

    def reset(self, where: npt.NDArray[np.bool_]) -> None:
        """Starts the series in `where`, [K], anew."""
        self._sums[:, where] = 0.0

    def state(self) -> Array:
        """All of the state, [2, K], to go into a checkpoint."""
        return self._sums.copy()

    def restore(self, state: Array) -> None:
        """Continues from `state()`."""
        self._sums = np.array(state, dtype=np.float64)


class Usual(NamedTuple):
    """What the first values of a series, or of K series, tell of those to come.

    Attributes:
        memory: lag-1 coefficient.
        median, scale: of what a value adds to its memory; NaN where that does not vary.
    """

    memory: Array | float
    median: Array | float
    scale: Array | float

    def score(self, x: Array, before: Array) -> Array:
        """Robust z of values, freed from the memory of those `before` them."""
        z: Array = (x - self.memory * before - self.median) / self.scale
        return z


def usual(baseline: Array) -> Usual:
    """What is usual after these values [n], oldest first, at least 5."""
    memory = prewhiten(baseline).a
    found = spread((baseline[1:] - memory * baseline[:-1])[None], scale_min=0.0, n_min=0)
    median, scale = float(found.median[0]), float(found.scale[0])
    return Usual(memory, median, scale if scale > 0 else np.nan)


def prewhitened_z(x: Array, *, baseline: int) -> Array:
    """The values after the baseline, freed from their memory and standardised: what `Cusum` is meant to be fed.

    Args:
        x: [n], oldest value first.
        baseline: how many of them tell what is usual, at least 5.

    Returns:
        [n - baseline] robust z; NaN where the baseline does not vary.
    """
    return usual(x[:baseline]).score(x[baseline:], x[baseline - 1 : -1])


class ChangeState:
    """`Cusum` of K series as their values come: the first 50 of a series are its baseline for good."""

    def __init__(self, keys: int, baseline: int = BASELINE) -> None:
        self._first = np.full((keys, baseline), np.nan)
        self._count = np.zeros(keys, dtype=np.int64)
        self._before = np.full(keys, np.nan)
        self._usual = np.full((3, keys), np.nan)
        self._cusum = Cusum(keys)

    def step(self, x: Array) -> Array:
        """Takes one value per series, [K], NaN waits; returns the sums, NaN where there are none yet."""
        known = np.isfinite(x)
        sums = np.asarray(self._cusum.step(Usual(*self._usual).score(x, self._before)).cusum)
        for row in np.flatnonzero(known & (self._count < self._first.shape[1])):
            self._learn(int(row), float(x[row]))
        self._before = np.where(known, x, self._before)
        return sums

    def state(self) -> dict[str, Array]:
        """All of the state, to go into a checkpoint."""
        known = {"first": self._first, "count": self._count.astype(np.float64), "before": self._before}
        return {name: part.copy() for name, part in known.items()} | {
            "usual": self._usual.copy(),
            "sums": self._cusum.state(),
        }

    def restore(self, state: dict[str, Array]) -> None:
        """Continues from `state()`."""
        self._first, self._before, self._usual = (np.array(state[name]) for name in ("first", "before", "usual"))
        self._count = np.array(state["count"], dtype=np.int64)
        self._cusum.restore(state["sums"])

    def _learn(self, row: int, value: float) -> None:
        self._first[row, self._count[row]] = value
        self._count[row] += 1
        if self._count[row] == self._first.shape[1]:
            self._usual[:, row] = usual(self._first[row])


class PageHinkley:
    """How far K series have risen above their running means; feed -x to see falls.

    Attributes:
        delta: rise that is tolerated per value.
    """

    def __init__(self, keys: int, delta: float | Array) -> None:
        self.delta = delta
        self._state = np.stack([np.zeros(keys), np.zeros(keys), np.zeros(keys), np.full(keys, np.inf)])

    def step(self, x: Array, keys: tuple[str, ...] = ()) -> SlowChanges:
        """Takes one value per series, [K]; the running mean includes it. NaN waits."""
        known = np.isfinite(x)
        count, mean, total, lowest = self._state
        count = count + known
        mean = mean + np.where(known, x - mean, 0.0) / np.maximum(count, 1)
        total = total + np.where(known, x - mean - self.delta, 0.0)
        lowest = np.where(known, np.minimum(lowest, total), lowest)
        self._state = np.stack([count, mean, total, lowest])
        return SlowChanges(keys, np.where(known, total - np.where(known, lowest, 0.0), np.nan))

    def state(self) -> Array:
        """All of the state, [4, K], to go into a checkpoint."""
        return self._state.copy()

    def restore(self, state: Array) -> None:
        """Continues from `state()`."""
        self._state = np.array(state, dtype=np.float64)


class TwoSided:
    """`PageHinkley` of K series in both directions; what is tolerated per value is a tenth of their spread."""

    def __init__(self, keys: int) -> None:
        self._up, self._down = PageHinkley(keys, 0.0), PageHinkley(keys, 0.0)

    def step(self, x: Array, std: Array, keys: tuple[str, ...] = ()) -> SlowChanges:
        """Takes one value per series, [K], and its spread so far; the larger of rise and fall."""
        self._up.delta = self._down.delta = TOLERATED * np.nan_to_num(std)
        rise, fall = (np.asarray(part.page_hinkley) for part in (self._up.step(x), self._down.step(-x)))
        return SlowChanges(keys, np.fmax(rise, fall))

    def state(self) -> Array:
        """All of the state, [2, 4, K], to go into a checkpoint."""
        return np.stack([self._up.state(), self._down.state()])

    def restore(self, state: Array) -> None:
        """Continues from `state()`."""
        self._up.restore(state[0])
        self._down.restore(state[1])
