"""Whether memory keeps growing while an episode lasts: a cell that only adds ends in saturation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.group import MetricGroup, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.masking import keep, rows_of, same_shape
from esper_telemetry.reduction import NAN, Array, Reduction, Slot, Statistic

BUCKETS = 64
"""Ages are told apart in so many steps; older states count in the last one."""


@dataclass(frozen=True, slots=True)
class AgeProfile(Reduction):
    """Size of the cell state by age.

    Attributes:
        count: [K] states of each bucket of ages.
        age: [K] sum of their ages.
        size: [K] sum of their sizes.
    """

    count: Tensor
    age: Tensor
    size: Tensor

    statistics: ClassVar[Mapping[str, Statistic]] = {"growth": lambda s: _growth(np.array(s).reshape(3, -1))}

    def slots(self) -> tuple[Slot, ...]:
        """All counts, then all ages, then all sizes."""
        return (*self.count.unbind(-1), *self.age.unbind(-1), *self.size.unbind(-1))

    @staticmethod
    def merge(rows: Array) -> Array:
        """Counts and sums add."""
        merged: Array = rows.sum(axis=0)
        return merged


def _growth(profile: Array) -> float:
    count, *sums = profile[:, profile[0] > 0]
    if len(count) < 2:
        return NAN
    age, size = sums[0] / count, sums[1] / count
    typical = float(np.median(size))
    return theil_sen_slope(age, size) * float(age.max()) / typical if typical else NAN


def theil_sen_slope(x: Array, y: Array) -> float:
    """Median slope over all pairs of points (Sen 1968); all x differ, and there are at least two."""
    i, j = np.triu_indices(len(x), 1)
    return float(np.median((y[j] - y[i]) / (x[j] - x[i])))


@dataclass(frozen=True, slots=True)
class CellGrowth(MetricGroup):
    """How the cell state depends on its age."""

    growth: AgeProfile = reports(
        Metric(
            key="lstm/c_growth",
            number=745,
            unit="ratio",
            question="By how many times its median does the cell state grow from a fresh memory to the oldest?",
            healthy="< 2",
            warn="> 2",
            critical="> 5",
            source="Theil-Sen slope of mean |c| against age, times the largest age, over the median; heuristic",
            undefined="memory of fewer than two ages, or a cell state of zero",
        )
    )


@torch.inference_mode()
def cell_growth(sizes: Tensor, ages: Tensor, *, width: int = 1, valid: Tensor | None = None) -> CellGrowth:
    """Profile of the cell state's size over its age.

    Args:
        sizes: mean |c| of each state, [T, B] or [N].
        ages: steps since memory began anew, same shape.
        width: how many neighbouring ages count as one.
        valid: bool, same shape; None where every state counts.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    same_shape(sizes=sizes, ages=ages, valid=valid)
    s = keep(rows_of(sizes, None).double(), None if valid is None else rows_of(valid, None).bool())
    age = rows_of(ages, None)
    bucket = (age.long() // width).clamp(0, BUCKETS - 1)
    columns = torch.stack([s.weight, age * s.weight, s.values])
    profile = columns.new_zeros(3, BUCKETS).index_add_(1, bucket, columns)
    return CellGrowth(AgeProfile(*profile))


def bucket_width(steps: int) -> int:
    """Ages that count as one, so that the buckets reach four rollouts of `steps` back."""
    return max(1, -(-4 * steps // BUCKETS))
