"""Histories of selected keys in one run: windows of healthy values, medians and robust scores, vectorised over keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, log10, nan, pow
from sys import float_info
from typing import Any

import numpy as np

from esper_telemetry.core.requirements import require_flag, require_number, require_text
from esper_telemetry.history.deviations import N_MIN, SCALE_MIN, HealthyHistory, spread

WINDOW = 100  # stored healthy values per key
OUTLIER = 8.0  # robust score above which a value is left out: anomalies must not become the baseline
MIN_MEDIAN_VALUES = 5  # values needed for a median; robust scores need twenty

USUAL_LEVEL_DECADES = 0.5
"""Distance in decades from the highest or lowest earlier level of a key within which a value is not an outlier. After a long time with
errors and gradients near 0, as in a solved task, a normal failure would otherwise look like an explosion."""


@dataclass(frozen=True, slots=True)
class History:
    """A key whose history a rule needs.

    Attributes:
        key: the key; `*` matches part of a segment.
        scale_min: smallest spread in decades; below the default for keys that hardly vary.
        linear: whether its values are already logarithms.
    """

    key: str
    scale_min: float = SCALE_MIN
    linear: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a wrong field."""
        require_text("the key of a history", self.key)
        require_number("scale_min", self.scale_min, above=0.0)
        require_flag("linear", self.linear)


def power(decades: float) -> float:
    """Return 10 to that power, at most 1e308."""
    return pow(10.0, min(decades, float(float_info.max_10_exp)))


@lru_cache(maxsize=512)
def matcher(pattern: str) -> Callable[[str], Any]:
    """Return a test for keys that match a pattern, in which `*` matches part of a segment."""
    return re.compile(re.escape(pattern).replace(r"\*", "[a-z0-9_]*")).fullmatch


class Baselines:
    """Windows of log10 values by key, and distances of the latest values from their medians.

    Args:
        histories: keys and patterns of the rules; the first declaration of a key counts.

    Attributes:
        z: robust standard scores of the latest update's values, by key; keys with a short history are left out.
        shift: decades between the latest values and their medians, by key.
        beyond: decades by which the latest values exceed all earlier ones, by key; negative if smaller than the largest.
        below: decades by which they are smaller than all earlier ones; negative if larger than the smallest.
    """

    def __init__(self, histories: Iterable[str | History]) -> None:
        declared: dict[str, History] = {}
        for item in histories:
            history = History(item) if isinstance(item, str) else item
            declared.setdefault(history.key, history)
        self._declared = {key: history for key, history in sorted(declared.items()) if "*" not in key}
        self._patterns = [(matcher(key), history) for key, history in sorted(declared.items()) if "*" in key]
        self._unmatched: set[str] = set()
        self._linear: set[str] = set()
        self.z: dict[str, float] = {}
        self.shift: dict[str, float] = {}
        self.beyond: dict[str, float] = {}
        self.below: dict[str, float] = {}
        self._rows: dict[str, int] = {}
        self._outlier = np.zeros(0, dtype=bool)
        self._history = HealthyHistory(0, WINDOW)
        self._floor = np.zeros(0)
        self._x = np.zeros(0)
        self._medians: list[float] = []
        self._counts: list[int] = []
        self._marks = np.zeros((4, 0))  # highest and lowest median, largest and smallest value

    def look(self, values: Mapping[str, float]) -> None:
        """Compare the values of an update with earlier updates; `learn` adds them."""
        for key in values.keys() - self._rows.keys() - self._unmatched:
            self._add(key)
        scaled = [nan] * len(self._rows)
        for key, row in self._rows.items():
            if key in values:
                value, size = values[key], abs(values[key])
                scaled[row] = value if key in self._linear else log10(size) if size > 0 else nan
        self._x = np.array(scaled)
        count = self._history.count
        filled = self._history.values[:, : max(1, int(count.max(initial=0)))]  # the other columns are empty: most runs are short
        median, scale = spread(filled, scale_min=self._floor, n_min=MIN_MEDIAN_VALUES)
        self._medians, self._counts = median.tolist(), count.tolist()
        enough = count >= N_MIN
        highest, lowest, peak, trough = self._marks
        low = np.fmin(median, lowest + USUAL_LEVEL_DECADES)  # earlier levels are not outliers
        high = np.fmax(median, highest - USUAL_LEVEL_DECADES)
        shift = np.where(enough, self._x - np.clip(self._x, low, high), np.nan)
        levels = np.where(enough, median, np.nan)
        self._marks[:2] = np.fmax(highest, levels), np.fmin(lowest, levels)
        with np.errstate(over="ignore"):  # infinite scores are left out below
            z = shift / scale
        scored = np.flatnonzero(np.isfinite(z))
        self._outlier = np.zeros(len(z), dtype=bool)
        self._outlier[scored] = np.abs(z[scored]) >= OUTLIER
        keys = [*self._rows]
        names = [keys[row] for row in scored.tolist()]
        self.z = dict(zip(names, z[scored].tolist(), strict=True))
        self.shift = dict(zip(names, shift[scored].tolist(), strict=True))
        self.beyond = dict(zip(names, (self._x[scored] - peak[scored]).tolist(), strict=True))
        self.below = dict(zip(names, (trough[scored] - self._x[scored]).tolist(), strict=True))

    def learn(self) -> None:
        """Add the values of the latest update, without outliers."""
        finite = np.isfinite(self._x)
        restarted = self._history.learn(self._x, present=finite, healthy=~self._outlier)
        rows = np.flatnonzero(finite & (~self._outlier | restarted))
        peak, trough = self._marks[2:]
        peak[rows], trough[rows] = np.fmax(peak[rows], self._x[rows]), np.fmin(trough[rows], self._x[rows])

    def forget(self) -> None:
        """Clear all histories."""
        self._history = HealthyHistory(len(self._rows), WINDOW)
        self._marks[:] = np.nan
        self._medians, self._counts = [nan] * len(self._rows), [0] * len(self._rows)
        self.z, self.shift, self.beyond, self.below = {}, {}, {}, {}

    def count(self, key: str) -> int:
        """Return the number of values in the history of a key."""
        return min(self._counts[self._rows[key]], WINDOW) if key in self._rows else 0

    def usual(self, key: str) -> tuple[float, float] | None:
        """Return the range of a key's usual values, 10th to 90th percentile; None for fewer than five values."""
        if self.count(key) < MIN_MEDIAN_VALUES:
            return None
        window = self._history.values[self._rows[key]]
        low, high = np.quantile(window[np.isfinite(window)], (0.1, 0.9)).tolist()
        return (low, high) if key in self._linear else (power(low), power(high))

    def median(self, key: str) -> float | None:
        """Return the median of a key's history; None for fewer than five values."""
        row = self._rows.get(key)
        if row is None or self._counts[row] < MIN_MEDIAN_VALUES or not isfinite(self._medians[row]):
            return None
        middle = self._medians[row]
        return middle if key in self._linear else power(middle)

    def off_median(self, key: str) -> float:
        """Return the decades from the median of a key's history to its latest value; 0 without a median."""
        row = self._rows.get(key)
        off = float(self._x[row]) - self._medians[row] if row is not None else nan
        return off if isfinite(off) else 0.0

    def fallen(self, key: str) -> float:
        """Return the decades by which the latest value is below the highest usual level of this run; 0 above it or without one."""
        row = self._rows.get(key)
        off = float(self._marks[0, row] - self._x[row]) if row is not None else nan
        return max(0.0, off) if isfinite(off) else 0.0

    def _add(self, key: str) -> None:
        history = self._declared.get(key) or next((item for matches, item in self._patterns if matches(key)), None)
        if history is None:
            self._unmatched.add(key)
            return
        if history.linear:
            self._linear.add(key)
        self._rows[key] = len(self._rows)
        self._history.extend(1)
        self._floor = np.append(self._floor, history.scale_min)
        self._marks = np.hstack([self._marks, np.full((4, 1), np.nan)])
