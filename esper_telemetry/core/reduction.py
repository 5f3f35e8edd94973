"""Reductions: the field types of metric groups, each with fixed slots, an associative merge and named statistics.

A reduction holds tensors (or plain numbers) on the device, one per slot; a leading axis, if any, runs over optimizer steps. On the host
its slots are the last axis of a float64 array: `merge` combines the rows of `[rows, fields, slots]`, `statistics` read numbers from
merged slots. A statistic that is undefined is NaN; NaN never reaches a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from esper_telemetry.core.arrays import as_tensor
from esper_telemetry.core.lazy import Tensor

Slot = Tensor | float
Array = npt.NDArray[np.float64]
Statistic = Callable[[Sequence[float]], float]

NAN = math.nan


class Reduction:
    """Base of the field types: `statistics` by name, the first being the default; `merge` over rows."""

    __slots__ = ()
    statistics: ClassVar[Mapping[str, Statistic]]

    def slots(self) -> tuple[Slot, ...]:
        """Return the slot values in the order in which the statistics read them."""
        kind: type = type(self)
        return tuple([getattr(self, name) for name in _slot_names(kind)])

    @staticmethod
    def merge(rows: Array) -> Array:
        """Merge [rows, fields, slots] into [fields, slots]."""
        raise NotImplementedError

    @classmethod
    def join(cls, ranks: Array) -> Array:
        """Merge the measurements of one optimizer step by several ranks, [ranks, fields, slots]."""
        return cls.merge(ranks)


class AdditiveReduction(Reduction):
    """Base of the reductions whose slots add up over rows and ranks."""

    __slots__ = ()

    @staticmethod
    def merge(rows: Array) -> Array:
        """Add the slots."""
        merged: Array = rows.sum(axis=0)
        return merged


@cache
def _slot_names(reduction: type) -> tuple[str, ...]:
    return tuple(item.name for item in fields(reduction))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else NAN


@dataclass(frozen=True, slots=True)
class Mean(AdditiveReduction):
    """A mean weighted by count: `total` is the sum of `count` values."""

    total: Slot
    count: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"mean": lambda s: _ratio(s[0], s[1])}


@dataclass(frozen=True, slots=True)
class PooledMean(Mean):
    """A mean over steps of quantities that add up over ranks."""

    @classmethod
    def join(cls, ranks: Array) -> Array:
        """Add the totals of the ranks, which have counted the same steps."""
        return np.stack([ranks[..., 0].sum(0), ranks[..., 1].max(0)], -1)


@dataclass(frozen=True, slots=True)
class Sum(AdditiveReduction):
    """A sum or a count."""

    value: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"sum": lambda s: s[0]}


@dataclass(frozen=True, slots=True)
class Min(Reduction):
    """A smallest value; +inf without values."""

    value: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"min": lambda s: s[0]}

    @staticmethod
    def merge(rows: Array) -> Array:
        """Return the smallest."""
        merged: Array = np.fmin.reduce(rows, axis=0)
        return merged


@dataclass(frozen=True, slots=True)
class Max(Reduction):
    """A largest value; -inf without values."""

    value: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"max": lambda s: s[0]}

    @staticmethod
    def merge(rows: Array) -> Array:
        """Return the largest."""
        merged: Array = np.fmax.reduce(rows, axis=0)
        return merged


@dataclass(frozen=True, slots=True)
class Last(Reduction):
    """The latest value."""

    value: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"last": lambda s: s[0]}

    @staticmethod
    def merge(rows: Array) -> Array:
        """Return the last row."""
        last: Array = rows[-1]
        return last


@dataclass(frozen=True, slots=True)
class OfLargest(Reduction):
    """A property of the item with the largest `size`, the first of several; `size` is -inf without items."""

    value: Slot
    size: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"of_largest": lambda s: s[0] if s[1] > -math.inf else NAN}

    @staticmethod
    def merge(rows: Array) -> Array:
        """Return the row with the largest size of each field."""
        best = rows[..., 1].argmax(0)
        merged: Array = np.take_along_axis(rows, best[None, :, None], 0)[0]
        return merged


def _std(s: Sequence[float]) -> float:
    n, mean, m2 = s[0], s[1], s[2]
    if not n:
        return NAN
    variance = m2 / n
    rounding = float((8 * np.finfo(np.float64).eps * mean) ** 2)  # seven times 0.1 has a std of 1.4e-17
    return math.sqrt(variance) if variance > rounding else 0.0


def _skew(s: Sequence[float]) -> float:
    std = _std(s)
    return s[3] / s[0] / std**3 if std > 0 else NAN


def _kurtosis(s: Sequence[float]) -> float:
    std = _std(s)
    return s[4] / s[0] / std**4 - 3 if std > 0 else NAN


@dataclass(frozen=True, slots=True)
class Moments(Reduction):
    """Count, mean and centred power sums Σ(x-mean)^k, k = 2, 3, 4; population moments, excess kurtosis.

    Merged around the common mean (Pébay 2008): raw power sums fail in float64 already at mean/std = 1e4.
    """

    n: Slot
    mean: Slot
    m2: Slot
    m3: Slot
    m4: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {
        "mean": lambda s: s[1] if s[0] else NAN,
        "std": _std,
        "skew": _skew,
        "kurtosis": _kurtosis,
    }

    @staticmethod
    def merge(rows: Array) -> Array:
        """Merge all rows around their common mean; empty rows are ignored."""
        n, m2, m3, m4 = rows[..., 0], rows[..., 2], rows[..., 3], rows[..., 4]
        mean = np.where(n > 0, rows[..., 1], 0.0)
        total = n.sum(axis=0)
        centre = (n * mean).sum(axis=0) / np.maximum(total, 1)
        d = np.where(n > 0, mean - centre, 0.0)
        terms = (m2 + n * d**2, m3 + 3 * d * m2 + n * d**3, m4 + 4 * d * m3 + 6 * d**2 * m2 + n * d**4)
        return np.stack([total, centre, *(term.sum(axis=0) for term in terms)], axis=-1)


@dataclass(frozen=True, slots=True)
class Ess(Reduction):
    """Effective sample size of importance weights e^l: count, largest l, Σe^(l-top), Σe^(2(l-top)); Kong 1992.

    An empty part is (0, -inf, 0, 0).
    """

    n: Slot
    top: Slot
    s1: Slot
    s2: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"frac": lambda s: _ratio(s[2] ** 2, s[0] * s[3])}

    @staticmethod
    def merge(rows: Array) -> Array:
        """Rescale the sums to the common maximum and add them."""
        n, top, s1, s2 = np.moveaxis(rows, -1, 0)
        peak = top.max(axis=0)
        shift = np.subtract(top, peak, out=np.zeros_like(top), where=n > 0)
        scale = np.where(n > 0, np.exp(shift), 0.0)
        return np.stack([n.sum(axis=0), peak, (s1 * scale).sum(axis=0), (s2 * scale**2).sum(axis=0)], axis=-1)


@dataclass(frozen=True, slots=True)
class Counts(AdditiveReduction):
    """A histogram over fixed edges; the first and last bin also count values outside.

    Attributes:
        counts: [..., bins].
        edges: bins + 1 increasing edges.
    """

    counts: Tensor
    edges: tuple[float, ...]

    statistics: ClassVar[Mapping[str, Statistic]] = {}

    def slots(self) -> tuple[Slot, ...]:
        """One slot per bin."""
        return tuple(self.counts.unbind(-1))


@dataclass(frozen=True, slots=True)
class Absent(Reduction):
    """A field that was left out."""

    statistics: ClassVar[Mapping[str, Statistic]] = {}


ABSENT = Absent()


def as_reduction(value: Any, *, where: str) -> Reduction:
    """Return a field's reduction: itself, a `Mean` of count 1 for a tensor or number, `Absent` for None."""
    if value is None:
        return ABSENT
    if isinstance(value, Reduction):
        return value
    if isinstance(value, np.generic | np.ndarray):
        value = as_tensor(value)
    if isinstance(value, Tensor | float | int):
        if isinstance(value, Tensor) and value.ndim > 1:
            raise ValueError(f"{where} must be a 0-d tensor or a reduction, got shape {list(value.shape)}")
        return Mean(value, 1.0)
    raise TypeError(f"{where} must be a tensor, a number or a reduction, got {type(value).__name__}")
