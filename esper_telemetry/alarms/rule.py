"""What a rule is: a way of going wrong, told from the values of a record and their history.

What chosen keys usually are in this run: windows of healthy values, medians and robust scores, all keys in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite, log10, nan, pow
from sys import float_info
from typing import Any, NamedTuple

import numpy as np

from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.core.derived import Array
from esper_telemetry.core.metric import segment
from esper_telemetry.history.outliers import N_MIN, SCALE_MIN, spread

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


class Finding(NamedTuple):
    """What a rule says of one update.

    Attributes:
        severity: 0 to 1; 0.5 speaks for an alarm.
        key: the metric that decided.
        value: of that metric.
        threshold: from which value on it speaks for an alarm, where a single number says so.
        adaptive: whether that follows the run's own history.
        z: robust standard scores from its history, where it was judged by one.
        instance: which head, group or layer, where a rule judges each.
        claim: it is a mistake in itself and no consequence, whatever else the type is raised for.
        text: what has happened, without the update since when: a clause that goes on behind "Since update 7".
    """

    severity: float
    key: str
    value: float | None = None
    threshold: float | None = None
    adaptive: bool = False
    z: float | None = None
    instance: str = ""
    claim: bool = False
    text: Callable[[], str] | None = None


class View:
    """One update as rules see it.

    Attributes:
        values: of the record.
        previous: of the record before it.
        facts: of the run.
        limits: all bounds.
        baselines: histories and robust scores of the keys that rules watch.
        update: records so far, this one included.
        progress: share of the run that is over, 0 to 1; None where nobody said how long it is.
        steps: optimizer steps of this update; None in the first.
        transitions: environment steps of this update; None in the first.
        memory: what the rule that is being asked keeps from update to update.
    """

    def __init__(self, facts: Mapping[str, Any], limits: Thresholds, baselines: Baselines) -> None:
        self.facts = facts
        self.limits = limits
        self.baselines = baselines
        self.values: Mapping[str, float] = {}
        self.previous: Mapping[str, float] = {}
        self.update = 0
        self.progress: float | None = None
        self.steps: int | None = None
        self.transitions: int | None = None
        self.memory: dict[Any, Any] = {}
        self._known: set[str] = set()
        self._cache: dict[tuple[str, str], list[str]] = {}

    def get(self, key: str) -> float | None:
        """A value of the record."""
        return self.values.get(key)

    def z(self, key: str) -> float | None:
        """How many robust standard scores a watched key is away from its history."""
        return self.baselines.z.get(key)

    def look(self, values: Mapping[str, float]) -> None:
        """Turns to the next record."""
        self.previous, self.values = self.values, values
        new = values.keys() - self._known
        if new:
            self._known |= new
            self._cache.clear()

    def matching(self, start: str, end: str) -> list[str]:
        """Keys of all records so far that begin and end so."""
        found = self._cache.get((start, end))
        if found is None:
            found = [key for key in self._known if key.startswith(start) and key.endswith(end)]
            self._cache[start, end] = found = sorted(found)
        return found

    def labelled(self, start: str, end: str) -> list[tuple[str, str, float]]:
        """(label, key, value) of all keys that begin and end so, with one segment between."""
        cut, stop, values = len(start), -len(end) or None, self.values
        found = [(key[cut:stop], key) for key in self.matching(start, end) if key in values]
        return [(label, key, values[key]) for label, key in found if label and "/" not in label]

    def usual(self, key: str) -> str:
        """(usually a-b) of a watched key, or nothing."""
        found = self.baselines.usual(key)
        return "" if found is None else f" (usually {span(*found)})"


segment_of = lru_cache(maxsize=4096)(segment)
"""Names of parameters as segments of keys, remembered: there are the same ones in every update."""

Judge = Callable[[View], Iterable[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One way of going wrong.

    Attributes:
        type: of the alarm, as in `alarms`.
        judge: yields the findings of an update; none where the values do not say, which holds what was said before.
        inputs: keys without which it cannot be answered.
        facts: of the run, likewise.
        watches: keys whose history it needs; a template ends in `*` and begins like its keys.
        applies: whether the question makes sense for a run with these facts.
        warmup, n_on, n_off: patience, see `series.hysteresis`.
        duration: updates at DEBUG after it was raised.
        evidence: keys whose values are attached; `*` stands for labels.
        relative: judges by history, which begins anew after an intervention.
        certain: what it finds is a mistake whatever was changed on purpose, so that it is not silent after an intervention.
        sampled: its inputs are measured in some updates only.
        optional: its inputs are there only where the run has what they measure, so that their absence says nothing.
        partial: it also judges the record of an update that did not end.
        source: who says so, and why it is as it is.
    """

    type: str
    judge: Judge
    inputs: tuple[str, ...]
    facts: tuple[str, ...] = ()
    watches: tuple[str, ...] = ()
    applies: Callable[[Mapping[str, Any]], bool] = lambda facts: True
    warmup: int = 0
    n_on: int = 1
    n_off: int = 3
    duration: int = 0
    evidence: tuple[str, ...] = field(default=())
    relative: bool = False
    certain: bool = False
    sampled: bool = False
    optional: bool = False
    partial: bool = False
    source: str = ""


def ramp(x: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high` on, linear between; downwards where `high` is the smaller."""
    if low == high:
        return float(x >= high)
    return min(max((x - low) / (high - low), 0.0), 1.0)


def decade_ramp(x: float, low: float, high: float) -> float:
    """The same over logarithms: half of it at the geometric mean."""
    return ramp(log10(max(x, 1e-300)), log10(low), log10(high)) if low > 0 and high > 0 else hard(x >= high)


def hard(wrong: bool) -> float:
    """1 if something is wrong."""
    return 1.0 if wrong else 0.0


def number(x: float) -> str:
    """A number as people write it: three digits, no exponent where it can be avoided."""
    size = abs(x)
    if size == 0:
        return "0"
    if size >= 1e5 or size < 1e-4:
        return f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    if size >= 100:
        return f"{x:.0f}"
    return f"{x:.2g}" if size < 1 else f"{x:.3g}"


def percent(x: float) -> str:
    """A share in percent."""
    size = abs(100 * x)
    return f"{100 * x:.0f} %" if size >= 10 or size == 0 else f"{number(100 * x)} %"


def span(low: float, high: float) -> str:
    """A range in words: one number where its ends read alike."""
    first, last = number(low), number(high)
    return first if first == last else f"{first} to {last}" if low < 0 else f"{first}-{last}"


def times(x: float) -> str:
    """How many times something is something else: 3.2x."""
    return f"{number(x)}x"
