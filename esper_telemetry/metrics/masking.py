"""Masked statistics, shared by the metric functions: torch only, float64, never a read of the device.

A `Sample` holds the last axis of a tensor with what does not count set to zero; every statistic reduces that axis. Axes before it stay:
they are optimizer steps, or steps and heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.group import Mean, Moments


class Sample(NamedTuple):
    """Values of which some count.

    Attributes:
        values: [.., N] float64, zero where a value does not count.
        weight: [.., N] float64, 1 where a value counts, else 0.
        kept: [.., N] bool, the same.
        count: [..] number of values that count.
        nonfinite: [..] number of valid values left out because they are NaN or infinite.
    """

    values: Tensor
    weight: Tensor
    kept: Tensor
    count: Tensor  # type: ignore[assignment]  # nobody counts the entries of this tuple
    nonfinite: Tensor

    def where(self, other: float) -> Tensor:
        """The values, with `other` in place of those that do not count."""
        return torch.where(self.kept, self.values, constant((other,), self.values.device)[0])

    def mean(self, x: Tensor) -> Mean:
        """Mean of `x` [.., N], which must be zero where values do not count."""
        return Mean(x.sum(-1), self.count)

    def share(self, condition: Tensor) -> Mean:
        """Share of the values that count for which `condition` [.., N] holds."""
        return Mean((condition & self.kept).sum(-1), self.count)


def rows_of(x: Tensor, dim: int | None) -> Tensor:
    """`x` with the axis to reduce last: all of it as one row [N], or axis `dim` moved to the end; a zero where that is empty."""
    x = x.detach()
    rows = x.reshape(-1) if dim is None else x.movedim(dim, -1)
    return rows if rows.shape[-1] else rows.new_zeros(*rows.shape[:-1], 1)


def same_shape(**tensors: Tensor | None) -> None:
    """Raises ValueError, naming them, unless all given tensors have one shape."""
    shapes = {name: list(x.shape) for name, x in tensors.items() if x is not None}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ValueError("shapes must agree, got " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))


def sample(x: Tensor, valid: Tensor | None = None, *, dim: int | None = None) -> Sample:
    """What counts of `x`: valid and finite entries along `dim`; all axes make one row where it is None.

    Raises:
        ValueError: where `valid` has another shape than `x`.
    """
    same_shape(x=x, valid=valid)
    rows = rows_of(x, dim).double()
    if x.numel() == 0:
        return keep(rows, torch.zeros_like(rows, dtype=torch.bool))
    return keep(rows, None if valid is None else rows_of(valid, dim).bool())


def keep(rows: Tensor, allowed: Tensor | None) -> Sample:
    """The sample of float64 `rows` [.., N]: finite entries where `allowed`, bool of the same shape or None for all."""
    values = rows.nan_to_num(0.0, 0.0, 0.0)
    kept = values == rows
    if allowed is None:
        weight = kept.double()
        count = weight.sum(-1)
        return Sample(values, weight, kept, count, rows.shape[-1] - count)
    kept = kept & allowed
    weight = kept.double()
    count = weight.sum(-1)
    return Sample(values * weight, weight, kept, count, allowed.sum(-1) - count)


def deviations(s: Sample) -> tuple[Tensor, Tensor]:
    """Mean [..] of the values and their distances from it [.., N], zero where they do not count."""
    mean = s.values.sum(-1) / s.count.clamp(min=1)
    return mean, (s.values - mean.unsqueeze(-1)) * s.weight


def moments(s: Sample) -> Moments:
    """Count, mean and centred power sums up to the fourth."""
    return moments_around(s.count, *deviations(s))


def moments_around(count: Tensor, mean: Tensor, d: Tensor) -> Moments:
    """Moments from the mean [..] and the distances from it [.., N]."""
    d2 = d * d
    return Moments(count, mean, d2.sum(-1), torch.linalg.vecdot(d2, d), torch.linalg.vecdot(d2, d2))


def spread(s: Sample) -> Moments:
    """Mean and std only: the third and fourth power sums are not measured (NaN), so skew and kurtosis are absent."""
    mean, d = deviations(s)
    return Moments(s.count, mean, torch.linalg.vecdot(d, d), math.nan, math.nan)


def where_any(x: Tensor, count: Tensor) -> Tensor:
    """`x` [..] where anything counts, NaN elsewhere."""
    return x / (count > 0)


def ascending(s: Sample) -> Tensor:
    """Values of all rows in ascending order, [rows * N]; NaN stands for those that do not count, at the end."""
    x = s.where(math.nan).reshape(-1)
    if x.is_cpu:
        return torch.from_numpy(np.sort(x.numpy()))  # 4x faster than torch.sort; reading costs no synchronisation here
    return x.sort().values


class Neighbours(NamedTuple):
    """The ordered values [2, levels] between which quantiles lie, and how far they lie from the first to the second."""

    ends: Tensor
    fraction: Tensor


def neighbours(ordered: Tensor, count: Tensor, levels: Sequence[float]) -> Neighbours:
    """What the quantiles of the first `count` [] of the `ordered` values lie between; NaN where there are none."""
    position = (count - 1).clamp(min=0) * constant(tuple(levels), ordered.device)
    low = position.floor()
    ends = torch.stack([low, position.ceil()]).long()
    return Neighbours(ordered.take(ends), position - low)


def quantiles(ordered: Tensor, count: Tensor, levels: Sequence[float]) -> Tensor:
    """Quantiles [levels] of the first `count` [] of the `ordered` values, interpolated linearly; NaN where there are none."""
    ends, fraction = neighbours(ordered, count, levels)
    return torch.lerp(ends[0], ends[1], fraction)


def per_row(values: Tensor, count: Tensor) -> tuple[Tensor, ...]:
    """Each of `values` [K], found over all rows together, as [..]: the same number in every row."""
    return values.unsqueeze(-1).expand(-1, len(count)).contiguous().unbind() if count.ndim else values.unbind()


@lru_cache(maxsize=64)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """These numbers as a float64 tensor that nobody writes to, made once per device."""
    return torch.tensor(values, dtype=torch.float64, device=device)
