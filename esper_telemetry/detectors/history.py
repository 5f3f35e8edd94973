"""What chosen keys usually are in this run: windows of healthy values, medians and robust scores, all keys in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, log10, nan, pow
from sys import float_info

import numpy as np

from esper_telemetry.derived import Array
from esper_telemetry.series.robust import N_MIN, SCALE_MIN, spread

WINDOW = 100
"""Healthy values that are kept of each key."""

OUTLIER = 8.0
"""Robust scores from which on a value does not enter: anomalies must not train their own baseline."""

REBASELINE_AFTER = 50
"""Values in a row that did not enter, after which the history begins anew."""

FEW = 5
"""Values from which on a key has a median; robust scores wait for twenty."""

WITHIN = 0.5
"""Decades: back that close to the highest or lowest level that a key has had in this run, a value is no news. A solved task leaves errors
and gradients of next to nothing for long, beside which the next failure would look like an explosion."""

LINEAR = ("grad/interference/log_ratio",)
"""Keys that are logarithms already."""

TIGHT = {
    "lstm/c/rms": 0.05,
    "reward/absmax": 0.05,
    "reward/mean": 0.05,
    "reward/std": 0.05,
    "repr/effective_rank": 0.05,
}
"""Smallest spread, in decades, of keys that hardly vary; 0.15 for all others."""


def power(decades: float) -> float:
    """10 to that power, and 1e308 where no number is that large."""
    return pow(10.0, min(decades, float(float_info.max_10_exp)))


class Baselines:
    """Windows of log10 values of keys that come and go, and how far the latest values lie from their medians.

    Attributes:
        z: robust standard scores of the latest update's values, by key; without keys whose history is short.
        shift: decades between the latest values and their medians, by key.
        beyond: decades by which the latest values exceed all before them, by key; negative below the largest.
        below: decades by which they are smaller than all before them; negative above the smallest.
    """

    def __init__(self) -> None:
        self.z: dict[str, float] = {}
        self.shift: dict[str, float] = {}
        self.beyond: dict[str, float] = {}
        self.below: dict[str, float] = {}
        self._rows: dict[str, int] = {}
        self._names: list[str] = []
        self._outlier = np.zeros(0, dtype=bool)
        self._values = np.full((0, WINDOW), np.nan)
        self._count = np.zeros(0, dtype=np.int64)
        self._rejected = np.zeros(0, dtype=np.int64)
        self._floor = np.zeros(0)
        self._x = np.zeros(0)
        self._medians: list[float] = []
        self._counts: list[int] = []
        self._highest = np.zeros(0)
        self._lowest = np.zeros(0)
        self._peak = np.zeros(0)
        self._trough = np.zeros(0)

    def look(self, found: Mapping[str, float]) -> None:
        """Judges one update by the updates before it; `learn` takes it in."""
        for key in found.keys() - self._rows.keys():
            self._add(key)
        self._x = np.full(len(self._rows), np.nan)
        rows = [self._rows[key] for key in found]
        self._x[rows] = [_scaled(key, value) for key, value in found.items()]
        median, scale = spread(self._values, scale_min=self._floor, n_min=FEW)
        self._medians, self._counts = median.tolist(), self._count.tolist()
        enough = self._count >= N_MIN
        shift = np.where(enough, self._beyond(median), np.nan)
        self._highest = np.fmax(self._highest, np.where(enough, median, np.nan))
        self._lowest = np.fmin(self._lowest, np.where(enough, median, np.nan))
        with np.errstate(over="ignore"):  # what is infinitely far off is left out below
            z = shift / scale
        known = np.flatnonzero(np.isfinite(z))
        self._outlier = np.zeros(len(z), dtype=bool)
        self._outlier[known] = np.abs(z[known]) >= OUTLIER
        names = [self._names[row] for row in known.tolist()]
        self.z = dict(zip(names, z[known].tolist(), strict=True))
        self.shift = dict(zip(names, shift[known].tolist(), strict=True))
        self.beyond = dict(zip(names, (self._x[known] - self._peak[known]).tolist(), strict=True))
        self.below = dict(zip(names, (self._trough[known] - self._x[known]).tolist(), strict=True))

    def _beyond(self, median: Array) -> Array:
        """How far values lie from their medians, and beyond the levels that have been usual earlier."""
        low = np.fmin(median, self._lowest + WITHIN)
        high = np.fmax(median, self._highest - WITHIN)
        return self._x - np.clip(self._x, low, high)

    def learn(self) -> None:
        """Takes in the values that were looked at last, outliers excepted."""
        finite, outlier = np.isfinite(self._x), self._outlier
        self._rejected = np.where(finite & ~outlier, 0, self._rejected + (finite & outlier))
        anew = self._rejected >= REBASELINE_AFTER
        self._values[anew] = np.nan
        self._count[anew] = 0
        self._rejected[anew] = 0
        rows = np.flatnonzero(finite & (~outlier | anew))
        self._peak[rows] = np.fmax(self._peak[rows], self._x[rows])
        self._trough[rows] = np.fmin(self._trough[rows], self._x[rows])
        self._values[rows, self._count[rows] % WINDOW] = self._x[rows]
        self._count[rows] += 1

    def forget(self) -> None:
        """Begins all histories anew."""
        self._values[:] = np.nan
        self._count[:] = 0
        self._rejected[:] = 0
        for levels in (self._highest, self._lowest, self._peak, self._trough):
            levels[:] = np.nan
        self._medians, self._counts = [nan] * len(self._rows), [0] * len(self._rows)
        self.z, self.shift, self.beyond, self.below = {}, {}, {}, {}

    def count(self, key: str) -> int:
        """Values that the history of a key holds."""
        return min(self._counts[self._rows[key]], WINDOW) if key in self._rows else 0

    def usual(self, key: str) -> tuple[float, float] | None:
        """Range of a key's usual values, 10th to 90th percentile; None of fewer than five."""
        if self.count(key) < FEW:
            return None
        window = self._values[self._rows[key]]
        low, high = np.quantile(window[np.isfinite(window)], (0.1, 0.9)).tolist()
        return (low, high) if key in LINEAR else (power(low), power(high))

    def median(self, key: str) -> float | None:
        """Median of a key's history; None of fewer than five values."""
        row = self._rows.get(key)
        if row is None or self._counts[row] < FEW or not isfinite(self._medians[row]):
            return None
        middle = self._medians[row]
        return middle if key in LINEAR else power(middle)

    def off_median(self, key: str) -> float:
        """Decades by which the latest value lies above the median of its history, negative below it; 0 without one."""
        row = self._rows.get(key)
        off = float(self._x[row]) - self._medians[row] if row is not None else nan
        return off if isfinite(off) else 0.0

    def fallen(self, key: str) -> float:
        """Decades by which the latest value lies below the highest level that has been usual in this run; 0 above it, or without one."""
        row = self._rows.get(key)
        off = float(self._highest[row] - self._x[row]) if row is not None else nan
        return max(0.0, off) if isfinite(off) else 0.0

    def _add(self, key: str) -> None:
        self._rows[key] = len(self._rows)
        self._names.append(key)
        self._values = np.vstack([self._values, np.full((1, WINDOW), np.nan)])
        self._count = np.append(self._count, 0)
        self._rejected = np.append(self._rejected, 0)
        self._floor = np.append(self._floor, TIGHT.get(key, SCALE_MIN))
        self._medians.append(nan)
        self._counts.append(0)
        self._highest = np.append(self._highest, np.nan)
        self._lowest = np.append(self._lowest, np.nan)
        self._peak = np.append(self._peak, np.nan)
        self._trough = np.append(self._trough, np.nan)


def _scaled(key: str, value: float) -> float:
    """A value as its history holds it."""
    if key in LINEAR:
        return value
    size = abs(value)
    return log10(size) if size > 0 else nan
