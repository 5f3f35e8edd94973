"""Quantiles that merge: exact where one call saw everything, known to one bin of a histogram where several calls did.

Several `observe` calls per update, or several ranks, each know the quantiles of their own rows; no mean of these is a
quantile of all rows. The histogram beside them adds up, so how the rows were split makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.metrics.masking import Sample, constant
from esper_telemetry.record import Histogram
from esper_telemetry.reduction import NAN, Array, Counts, Reduction, Slot, Statistic

PER_DECADE = 5
"""Bins per power of ten: a bin's ends differ by a factor of 1.6."""


def symmetric_edges(lowest: int, highest: int) -> tuple[float, ...]:
    """Edges from -10^highest to 10^highest, five per decade down to ±10^lowest, between which one bin holds zero."""
    steps = range(lowest * PER_DECADE, highest * PER_DECADE + 1)
    positive = [float(f"{10 ** (step / PER_DECADE):.3g}") for step in steps]
    return (*(-edge for edge in reversed(positive)), *positive)


LOG_RATIOS = symmetric_edges(-4, 1)
"""For log-ratios: from a change of 0.01 % to a factor of e^10."""

REWARDS = symmetric_edges(-3, 4)
"""For advantages, returns and errors in units of reward, whatever their scale."""

SHARES = tuple(index / 20 for index in range(21))
"""For what lies between 0 and 1."""


@dataclass(frozen=True, slots=True)
class Quantiles(Reduction):
    """Quantiles and the histogram of the same values; subclasses say which quantiles, in percent, and between which edges.

    Attributes:
        values: [K] or [.., K] quantiles of everything that the call saw, NaN without any.
        counts: [.., bins], from `bin_counts`.
    """

    values: Tensor
    counts: Tensor

    levels: ClassVar[tuple[int, ...]] = ()
    edges: ClassVar[tuple[float, ...]] = ()
    statistics: ClassVar[Mapping[str, Statistic]] = {}

    def __init_subclass__(cls) -> None:
        cls.statistics = {f"p{level:02d}": cls._quantile(index) for index, level in enumerate(cls.levels)}

    def slots(self) -> tuple[Slot, ...]:
        """All quantiles, then all counts."""
        return (*self.values.unbind(-1), *self.counts.unbind(-1))

    @classmethod
    def merge(cls, rows: Array) -> Array:
        """Counts add; quantiles stay where all rows that hold anything agree on them, and are forgotten elsewhere."""
        values, counts = np.split(rows, [len(cls.levels)], axis=-1)
        known = np.where(counts.sum(axis=-1, keepdims=True) > 0, values, NAN)
        low, high = np.fmin.reduce(known, axis=0), np.fmax.reduce(known, axis=0)
        return np.concatenate([np.where(low == high, low, NAN), counts.sum(axis=0)], axis=-1)

    @classmethod
    def _quantile(cls, index: int) -> Statistic:
        """Reads one quantile from merged slots."""
        share, first = cls.levels[index] / 100, len(cls.levels)

        def read(slots: list[float]) -> float:
            if not math.isnan(slots[index]):
                return slots[index]
            found = Histogram(cls.edges, tuple(slots[first:])).quantile(share)
            return NAN if found is None else cls.value_of(found)

        return read  # type: ignore[return-value]  # slots come as lists

    @classmethod
    def value_of(cls, x: float) -> float:
        """The value at a place between the edges: that place itself, unless a subclass counts something else."""
        return x


def bin_counts(s: Sample, edges: tuple[float, ...]) -> Tensor:
    """How many of the values that count lie between each two edges, [.., bins]; the outermost bins hold what lies outside."""
    places = torch.bucketize(s.values, constant(edges[1:-1], s.values.device))
    empty = s.values.new_zeros(*s.values.shape[:-1], len(edges) - 1)
    return empty.scatter_add_(-1, places, s.weight)


def histogram(s: Sample, edges: tuple[float, ...]) -> Counts:
    """The values that count between fixed edges."""
    return Counts(bin_counts(s, edges), edges)
