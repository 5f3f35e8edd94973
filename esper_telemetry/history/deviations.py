"""Distance of values from their own history, and changes of its level.

The distance is measured by medians, because one spike must not move the scale (T6, G11). Changes are sums that grow with every value away
from the old level (T5; Page 1954) and do not reset automatically.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from esper_telemetry.core.metric import Array, Derived, Metric, label, reports
from esper_telemetry.history.trend import prewhiten

MAD_TO_STD = 1.4826  # median absolute deviation of a Gaussian, to its standard deviation
SCALE_MIN = 0.15  # decades: norms that vary less are not judged more strictly
N_MIN = 20
OUTLIER_WINDOW = 200


@dataclass(frozen=True, slots=True)
class RobustZ(Derived):
    """Distance of values from the median of their histories, [keys]; NaN where undefined."""

    key: tuple[str, ...] = label()
    robust_z: Array | None = reports(
        Metric.quantity("{key}/robust_z", 904, "unusualness", unit="σ (robust)")
        .asks("How unusual is this value for this run, in powers of ten relative to its usual spread?")
        .bounds(
            healthy="-4 to 4", warn="> 4", critical="> 8", source="measured: beyond 6 in 0 to 0.1 % of healthy points"
        )
        .absent("fewer than 20 values before it, or one that is not positive")
        .advises("See the key without this ending for what to try.")
    )


class Spread(NamedTuple):
    """Median and scale of histories, [K]; NaN with too few values."""

    median: Array
    scale: Array


class RobustHistory:
    """The last W defined values of each of K series, as one array.

    Attributes:
        values: [K, W], in no particular order, NaN for missing values.
        count: [K] number of values so far, including replaced ones.
    """

    def __init__(self, keys: int, window: int = OUTLIER_WINDOW) -> None:
        self.values = np.full((keys, window), np.nan)
        self.count = np.zeros(keys, dtype=np.int64)

    def extend(self, keys: int) -> None:
        """Add series without values."""
        self.values = np.vstack((self.values, np.full((keys, self.values.shape[1]), np.nan)))
        self.count = np.append(self.count, np.zeros(keys, dtype=np.int64))

    def push(self, x: Array, where: npt.NDArray[np.bool_] | None = None) -> None:
        """Add one value per series, [K]; NaN, and values outside `where`, are ignored."""
        chosen = np.isfinite(x) if where is None else np.isfinite(x) & where
        rows = np.flatnonzero(chosen)
        self.values[rows, self.count[rows] % self.values.shape[1]] = x[rows]
        self.count[rows] += 1

    def clear(self, where: npt.NDArray[np.bool_]) -> None:
        """Forget the series in `where`, [K]."""
        self.values[where] = np.nan
        self.count[where] = 0

    def ordered(self, row: int) -> Array:
        """One series, oldest value first."""
        window = self.values.shape[1]
        count = int(self.count[row])
        return self.values[row, :count].copy() if count < window else np.roll(self.values[row], -(count % window))


def medians(values: Array) -> Array:
    """Median [K] of the values in each row of [K, W] that are not NaN; NaN for empty rows."""
    ordered = np.sort(values, axis=1)
    count = (~np.isnan(values)).sum(axis=1)
    rows = np.arange(len(values))
    low, high = ordered[rows, np.maximum(count - 1, 0) // 2], ordered[rows, np.minimum(count // 2, values.shape[1] - 1)]
    return np.where(count > 0, (low + high) / 2.0, np.nan)


def spread(history: Array, *, scale_min: float | Array = SCALE_MIN, n_min: int = N_MIN) -> Spread:
    """Return median and scale 1.4826·MAD of each row of [K, W].

    Args:
        history: NaN if a row has fewer values than W.
        scale_min: smallest scale, one for all or [K].
        n_min: minimum number of values in a row; 0 or 1 requires one.
    """
    enough = (~np.isnan(history)).sum(axis=1) >= max(n_min, 1)
    median = np.where(enough, medians(history), np.nan)
    scale = MAD_TO_STD * medians(np.abs(history - median[:, None]))
    return Spread(median, np.where(enough, np.maximum(scale, scale_min), np.nan))


def robust_z(
    x: Array, history: Array, *, scale_min: float | Array = SCALE_MIN, n_min: int = N_MIN, keys: tuple[str, ...] = ()
) -> RobustZ:
    """Return the distance of values from the medians of their histories, in robust standard deviations.

    Args:
        x: [K], log10 of the values to judge.
        history: [K, W], log10 of the values *before* them.
        scale_min: smallest scale, in decades, one for all or [K].
        n_min: minimum number of values in a history.
        keys: names of the series.
    """
    median, scale = spread(history, scale_min=scale_min, n_min=n_min)
    return RobustZ(keys, (x - median) / scale)


def decades(x: Array) -> Array:
    """Logarithm to base 10; NaN for values that are not positive and finite."""
    positive = np.isfinite(x) & (x > 0)
    return np.log10(np.where(positive, x, np.nan))


CUSUM_SLACK = 1.0
CUSUM_LEVEL = 8.0
BASELINE = 50
"""Values of a series with which later ones are compared."""
TOLERATED_SHARE = 0.1
"""Deviation that `PageHinkley` tolerates per value, as a share of the series' spread."""


@dataclass(frozen=True, slots=True)
class Changes(Derived):
    """Evidence for a change of level, [keys]; NaN where undefined."""

    key: tuple[str, ...] = label()
    cusum: Array | None = reports(
        Metric.magnitude("{key}/cusum", 912, "change of level", unit="σ (robust)")
        .asks("Has this metric moved to another level? It sums deviations of more than 1 σ from the old one.")
        .bounds(warn="> 8, as a hint only", source="Page 1954; measured null rate 2 to 17 % per 100 updates")
        .absent("the robust z is")
        .advises("See the key without this ending for what to try.")
    )


@dataclass(frozen=True, slots=True)
class SlowChanges(Derived):
    """Evidence for a change of the mean in one direction, [keys]; NaN where undefined."""

    key: tuple[str, ...] = label()
    page_hinkley: Array | None = reports(
        Metric.magnitude("{key}/page_hinkley", 913, "lasting rise", unit="as key")
        .asks("Has this metric permanently left its mean, upwards or downwards? It sums deviations of more than 0.1 σ.")
        .bounds(warn="8 times its spread", source="Page 1954")
        .absent("no value")
        .advises("See the key without this ending for what to try.")
    )


class Cusum:
    """Two-sided cumulative sums of K standardised series.

    Attributes:
        slack: distance up to which a value does not count.
    """

    def __init__(self, keys: int, slack: float = CUSUM_SLACK) -> None:
        self.slack = slack
        self._sums = np.zeros((2, keys))

    @property
    def up(self) -> Array:
        """Sum of the distances upwards, [K]."""
        up: Array = self._sums[0]
        return up

    @property
    def down(self) -> Array:
        """Sum of the distances downwards, [K]."""
        down: Array = self._sums[1]
        return down

    def step(self, z: Array, keys: tuple[str, ...] = ()) -> Changes:
        """Add one standardised value per series, [K]; NaN is ignored."""
        finite = np.isfinite(z)
        grown = np.maximum(self._sums + np.where(finite, np.stack([z, -z]) - self.slack, 0.0), 0.0)
        self._sums = np.where(finite, grown, self._sums)
        return Changes(keys, np.where(finite, self._sums.max(axis=0), np.nan))

    def reset(self, where: npt.NDArray[np.bool_]) -> None:
        """Clear the series in `where`, [K]."""
        self._sums[:, where] = 0.0


class LevelModel(NamedTuple):
    """Expectation of the values of a series, or of K series, from their first values.

    Attributes:
        memory: lag-1 coefficient.
        median, scale: statistics of the part of a value that the memory does not explain; NaN if that part does not vary.
    """

    memory: Array | float
    median: Array | float
    scale: Array | float

    def score(self, x: Array, before: Array) -> Array:
        """Return the robust z of values, corrected for the memory of the values `before` them."""
        z: Array = (x - self.memory * before - self.median) / self.scale
        return z


def level_model(baseline: Array) -> LevelModel:
    """Return the expectation after these values [n], oldest first, at least 5."""
    memory = prewhiten(baseline).a
    residual = spread((baseline[1:] - memory * baseline[:-1])[None], scale_min=0.0, n_min=0)
    median, scale = float(residual.median[0]), float(residual.scale[0])
    return LevelModel(memory, median, scale if scale > 0 else np.nan)


class ChangeState:
    """`Cusum` of K series value by value; the first 50 values of a series are its permanent baseline."""

    def __init__(self, keys: int, baseline: int = BASELINE) -> None:
        self._first = np.full((keys, baseline), np.nan)
        self._count = np.zeros(keys, dtype=np.int64)
        self._before = np.full(keys, np.nan)
        self._models = np.full((3, keys), np.nan)
        self._cusum = Cusum(keys)

    def step(self, x: Array) -> Array:
        """Add one value per series, [K], ignoring NaN; returns the sums, NaN if they do not exist yet."""
        finite = np.isfinite(x)
        sums = np.asarray(self._cusum.step(LevelModel(*self._models).score(x, self._before)).cusum)
        for row in np.flatnonzero(finite & (self._count < self._first.shape[1])):
            self._first[row, self._count[row]] = x[row]
            self._count[row] += 1
            if self._count[row] == self._first.shape[1]:
                self._models[:, row] = level_model(self._first[row])
        self._before = np.where(finite, x, self._before)
        return sums


class PageHinkley:
    """Rise of K series above their running means; add -x for falls.

    Attributes:
        delta: rise that is tolerated per value.
    """

    def __init__(self, keys: int, delta: float | Array) -> None:
        self.delta = delta
        self._state = np.stack([np.zeros(keys), np.zeros(keys), np.zeros(keys), np.full(keys, np.inf)])

    def step(self, x: Array, keys: tuple[str, ...] = ()) -> SlowChanges:
        """Add one value per series, [K]; the running mean includes it. NaN is ignored."""
        finite = np.isfinite(x)
        count, mean, total, lowest = self._state
        count = count + finite
        mean = mean + np.where(finite, x - mean, 0.0) / np.maximum(count, 1)
        total = total + np.where(finite, x - mean - self.delta, 0.0)
        lowest = np.where(finite, np.minimum(lowest, total), lowest)
        self._state = np.stack([count, mean, total, lowest])
        return SlowChanges(keys, np.where(finite, total - np.where(finite, lowest, 0.0), np.nan))


class TwoSided:
    """`PageHinkley` of K series in both directions; it tolerates a tenth of their spread per value."""

    def __init__(self, keys: int) -> None:
        self._up, self._down = PageHinkley(keys, 0.0), PageHinkley(keys, 0.0)

    def step(self, x: Array, std: Array, keys: tuple[str, ...] = ()) -> SlowChanges:
        """Add one value per series, [K], and its spread so far; returns the larger of rise and fall."""
        self._up.delta = self._down.delta = TOLERATED_SHARE * np.nan_to_num(std)
        rise, fall = (np.asarray(part.page_hinkley) for part in (self._up.step(x), self._down.step(-x)))
        return SlowChanges(keys, np.fmax(rise, fall))
