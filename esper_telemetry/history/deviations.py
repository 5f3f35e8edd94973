"""Exponential averages of series, corrected for their start (T1), distances from them (T2), and changes of their level.

The distance is measured by medians, because one spike must not move the scale (T6, G11). Changes are sums that grow with every value away
from the old level (T5; Page 1954) and do not reset automatically.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from esper_telemetry.core.metric import Array, Derived, Metric, MetricFamily, label, reports
from esper_telemetry.history.trend import prewhiten

FAST = 0.9
SLOW = 0.99


HISTORIES_FAMILY = MetricFamily(
    "{key}",
    "Histories",
    "The headline metrics, gradient norms and the inputs of alarms also exist with these endings, which compare a value "
    "with earlier updates: `policy/kl/ema` is the running average of `policy/kl`. Positive quantities are "
    "compared as logarithms, so that a fall to a tenth counts as much as a tenfold rise.",
    place=900,
)


@dataclass(frozen=True, slots=True)
class Smoothed(Derived, absent="before the first value"):
    """Levels of series, [keys] each; NaN where undefined."""

    key: tuple[str, ...] = label()
    ema: Array | None = reports(
        Metric.quantity("{key}/ema", 900, "running average", unit="as key").asks(
            "What is the level of this metric, with noise averaged out?"
        )
    )
    ew_std: Array | None = reports(
        Metric.magnitude("{key}/ew_std", 901, "spread around the running average", unit="as key").asks(
            "How much does this metric vary around its average?"
        )
    )


def n_eff(t: Array, beta: float) -> Array:
    """Effective number of samples after `t` values: 1 at t = 1, (1+β)/(1-β) in the end."""
    decay = np.power(beta, t)
    effective: Array = (1.0 + beta) * (1.0 - decay) / ((1.0 - beta) * (1.0 + decay))
    return effective


class Ema:
    """Mean and population std of K series. The weights decay by β per value and sum to 1 from the first value on.

    A missing value (NaN) is ignored.

    Attributes:
        t: [K] number of values so far.
        mean: [K], NaN before the first value.
    """

    def __init__(self, keys: int, beta: float = FAST) -> None:
        if not 0.0 < beta < 1.0:
            raise ValueError(f"beta must be between 0 and 1, got {beta}")
        self.beta = beta
        self._state = np.zeros((4, keys))

    @property
    def t(self) -> Array:
        """Number of values so far, [K]."""
        t: Array = self._state[0]
        return t

    @property
    def mean(self) -> Array:
        """The average, [K]; NaN before the first value."""
        return np.where(self.t > 0, self._state[2], np.nan)

    @property
    def std(self) -> Array:
        """The spread, [K]; NaN before the first value."""
        _, weight, _, squares = self._state
        std: Array = np.sqrt(squares / np.where(self.t > 0, weight, np.nan))
        return std

    def step(self, x: Array) -> None:
        """Add one value of each series, [K]."""
        finite = np.isfinite(x)
        t, weight, mean, squares = self._state
        new_weight = np.where(finite, self.beta * weight + 1.0 - self.beta, weight)
        distance = np.where(finite, x - mean, 0.0)
        new_mean = mean + (1.0 - self.beta) / np.where(new_weight > 0, new_weight, 1.0) * distance
        off = (1.0 - self.beta) * distance * np.where(finite, x - new_mean, 0.0)
        self._state = np.stack([t + finite, new_weight, new_mean, np.where(finite, self.beta * squares, squares) + off])


@dataclass(frozen=True, slots=True)
class Drifts(Derived):
    """Distance of series from their levels, [keys] each; NaN where undefined."""

    key: tuple[str, ...] = label()
    drift: Array | None = reports(
        Metric.quantity("{key}/drift", 902, "distance from the running average", unit="ln")
        .asks("How far is this metric from its average so far? 0.7 is double, -0.7 half.")
        .bounds(
            warn="4 times its spread",
            critical="8 times its spread, and more than 0.4",
            source="measured false alarms of the relative form: 4.6 per 100 updates",
        )
        .absent("the first value, or one that is not positive")
        .advises("See the key without this ending for what to try.")
    )
    macd: Array | None = reports(
        Metric.quantity("{key}/macd", 903, "short against long average", unit="ln")
        .asks("Is this metric above (+) or below (-) its long-term average, with noise averaged out?")
        .bounds(source="difference of a fast and a slow average")
        .absent("before the first positive value")
    )


class LogDrift:
    """Drift of K positive series.

    Attributes:
        fast: average of the logarithms for the drift and as the fast part of macd.
        slow: the slow part.
    """

    def __init__(self, keys: int) -> None:
        self.fast, self.slow = Ema(keys, FAST), Ema(keys, SLOW)

    def step(self, x: Array, keys: tuple[str, ...] = ()) -> Drifts:
        """Add one value of each series, [K]; returns its distance from the previous level. Values that are not positive are ignored."""
        log = logarithm(x)
        drift = log - self.fast.mean
        self.fast.step(log)
        self.slow.step(log)
        macd = np.where(np.isnan(log), np.nan, self.fast.mean - self.slow.mean)
        return Drifts(keys, drift=drift, macd=macd)


def logarithm(x: Array) -> Array:
    """Natural logarithm; NaN for values that are not positive and finite."""
    positive = np.isfinite(x) & (x > 0)
    return np.log(np.where(positive, x, np.nan))


MAD_TO_STD = 1.4826  # median absolute deviation of a Gaussian, to its standard deviation
SCALE_MIN = 0.15  # decades: norms that vary less are not judged more strictly
N_MIN = 20
OUTLIER_WINDOW = 200
REBASELINE_AFTER = 50  # unhealthy values in a row after which a history restarts


@dataclass(frozen=True, slots=True)
class RobustZ(Derived):
    """Distance of values from the median of their histories, [keys]; NaN where undefined."""

    key: tuple[str, ...] = label()
    robust_z: Array | None = reports(
        Metric.quantity("{key}/robust_z", 904, "unusualness", unit="σ (robust)")
        .asks("How unusual is this value for this run, in powers of ten relative to its usual spread?")
        .bounds(healthy="-4 to 4", warn="> 4", critical="> 8", source="measured: beyond 6 in 0 to 0.1 % of healthy points")
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


class HealthyHistory(RobustHistory):
    """A history without unhealthy values: anomalies must not become the baseline. After `REBASELINE_AFTER` in a row it restarts.

    Attributes:
        rejected: [K] unhealthy values in a row.
    """

    def __init__(self, keys: int, window: int = OUTLIER_WINDOW) -> None:
        super().__init__(keys, window)
        self.rejected = np.zeros(keys, dtype=np.int64)

    def extend(self, keys: int) -> None:
        """Add series without values."""
        super().extend(keys)
        self.rejected = np.append(self.rejected, np.zeros(keys, dtype=np.int64))

    def learn(self, x: Array, *, present: npt.NDArray[np.bool_], healthy: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Add one value per series, [K], of those that are `present` the healthy ones; returns the series that restart with it, [K]."""
        healthy = present & healthy
        self.rejected = np.where(healthy, 0, self.rejected + (present & ~healthy))
        restarted = self.rejected >= REBASELINE_AFTER
        self.clear(restarted)
        self.rejected[restarted] = 0
        self.push(x, where=healthy | restarted)
        return restarted


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


def robust_z(x: Array, history: Array, *, scale_min: float | Array = SCALE_MIN, keys: tuple[str, ...] = ()) -> RobustZ:
    """Return the distance of values from the medians of their histories, in robust standard deviations.

    Args:
        x: [K], log10 of the values to judge.
        history: [K, W], log10 of the values *before* them.
        scale_min: smallest scale, in decades, one for all or [K].
        keys: names of the series.
    """
    median, scale = spread(history, scale_min=scale_min)
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

    def __init__(self, keys: int) -> None:
        self._first = np.full((keys, BASELINE), np.nan)
        self._count = np.zeros(keys, dtype=np.int64)
        self._before = np.full(keys, np.nan)
        self._models = np.full((3, keys), np.nan)
        self._cusum = Cusum(keys)

    def step(self, x: Array) -> Array:
        """Add one value per series, [K], ignoring NaN; returns the sums, NaN if they do not exist yet."""
        finite = np.isfinite(x)
        sums = np.asarray(self._cusum.step(LevelModel(*self._models).score(x, self._before)).cusum)
        for row in np.flatnonzero(finite & (self._count < BASELINE)):
            self._first[row, self._count[row]] = x[row]
            self._count[row] += 1
            if self._count[row] == BASELINE:
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
