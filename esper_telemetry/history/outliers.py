"""Distance of values from their own history: medians, because one spike must not move the scale (T6, G11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from esper_telemetry.core.derived import Array, Derived
from esper_telemetry.core.metric import Metric, label, reports

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
        .advises("Look up the key without this ending: what to try stands there.")
    )


class Spread(NamedTuple):
    """Median and scale of histories, [K]; NaN where there are too few values."""

    median: Array
    scale: Array


class RobustHistory:
    """The last W defined values of each of K series, as one array.

    Attributes:
        values: [K, W], in no particular order, NaN where there is none yet.
        count: [K] values taken so far, also those that have been replaced.
    """

    def __init__(self, keys: int, window: int = OUTLIER_WINDOW) -> None:
        self.values = np.full((keys, window), np.nan)
        self.count = np.zeros(keys, dtype=np.int64)

    def push(self, x: Array, where: npt.NDArray[np.bool_] | None = None) -> None:
        """Add one value per series, [K]; NaN, and values outside `where`, are passed over."""
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
    """Median [K] of the values in each row of [K, W] that are not NaN; NaN where there are none."""
    ordered = np.sort(values, axis=1)
    count = (~np.isnan(values)).sum(axis=1)
    rows = np.arange(len(values))
    low, high = ordered[rows, np.maximum(count - 1, 0) // 2], ordered[rows, np.minimum(count // 2, values.shape[1] - 1)]
    return np.where(count > 0, (low + high) / 2.0, np.nan)


def spread(history: Array, *, scale_min: float | Array = SCALE_MIN, n_min: int = N_MIN) -> Spread:
    """Median and scale 1.4826·MAD of each row of [K, W].

    Args:
        history: NaN where a row has fewer values than W.
        scale_min: smallest scale, one for all or [K].
        n_min: fewest values of a row; 0 or 1 asks for one.
    """
    enough = (~np.isnan(history)).sum(axis=1) >= max(n_min, 1)
    median = np.where(enough, medians(history), np.nan)
    scale = MAD_TO_STD * medians(np.abs(history - median[:, None]))
    return Spread(median, np.where(enough, np.maximum(scale, scale_min), np.nan))


def robust_z(
    x: Array, history: Array, *, scale_min: float | Array = SCALE_MIN, n_min: int = N_MIN, keys: tuple[str, ...] = ()
) -> RobustZ:
    """Distance of values from the medians of their histories, in robust standard deviations.

    Args:
        x: [K], log10 of the values to judge.
        history: [K, W], log10 of the values *before* them.
        scale_min: smallest scale, in decades, one for all or [K].
        n_min: fewest values of a history.
        keys: names of the series.
    """
    median, scale = spread(history, scale_min=scale_min, n_min=n_min)
    return RobustZ(keys, (x - median) / scale)


def decades(x: Array) -> Array:
    """Logarithm to base 10; NaN of what is not positive and finite."""
    positive = np.isfinite(x) & (x > 0)
    return np.log10(np.where(positive, x, np.nan))
