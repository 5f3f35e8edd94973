"""Statistics shared by the metric functions: masked samples, moments, quantiles and histograms.

They accept tensors on any device, compute in float64 and never read the device. Histograms have fixed edges, so that they add up over
minibatches, calls and ranks; quantiles of several samples are merged to the precision of one bin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.core.reduction import NAN, AdditiveReduction, Array, Counts, Mean, Moments, Reduction, Slot, Statistic


class Sample(NamedTuple):
    """Values with a mask of the values that count.

    Attributes:
        values: [.., N] float64, zero for values that do not count.
        weight: [.., N] float64, 1 for values that count, else 0.
        mask: [.., N] bool, the same.
        count: [..] number of values that count.
        nonfinite: [..] number of valid values left out because they are NaN or infinite.
    """

    values: Tensor
    weight: Tensor
    mask: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which is not used
    nonfinite: Tensor

    def where(self, other: float) -> Tensor:
        """Return the values, with `other` for values that do not count."""
        return torch.where(self.mask, self.values, constant((other,), self.values.device)[0])

    def mean(self, x: Tensor) -> Mean:
        """Return the mean of `x` [.., N], which must be zero for values that do not count."""
        return Mean(x.sum(-1), self.count)

    def share(self, condition: Tensor) -> Mean:
        """Return the share of the counted values for which `condition` [.., N] holds."""
        return Mean((condition & self.mask).sum(-1), self.count)


def rows_of(x: Tensor, dim: int | None) -> Tensor:
    """Return `x` as one row [N], or with axis `dim` moved to the end; an empty axis becomes one zero."""
    x = x.detach()
    rows = x.reshape(-1) if dim is None else x.movedim(dim, -1)
    return rows if rows.shape[-1] else rows.new_zeros(*rows.shape[:-1], 1)


def same_shape(**tensors: Tensor | None) -> None:
    """Raise ValueError, naming them, unless all given tensors have one shape."""
    shapes = {name: list(x.shape) for name, x in tensors.items() if x is not None}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ValueError("shapes must agree, got " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))


def sample(x: Tensor, valid: Tensor | None = None, *, dim: int | None = None) -> Sample:
    """Return the sample of the valid and finite entries of `x` along `dim`; with None all axes make one row.

    Raises:
        ValueError: `valid` and `x` have different shapes.
    """
    same_shape(x=x, valid=valid)
    rows = rows_of(x, dim).double()
    if x.numel() == 0:
        return keep(rows, torch.zeros_like(rows, dtype=torch.bool))
    return keep(rows, None if valid is None else rows_of(valid, dim).bool())


def keep(rows: Tensor, allowed: Tensor | None) -> Sample:
    """Return the sample of the finite entries of float64 `rows` [.., N] that are `allowed`, bool of the same shape or None for all."""
    values = rows.nan_to_num(0.0, 0.0, 0.0)
    mask = values == rows
    if allowed is None:
        weight = mask.double()
        count = weight.sum(-1)
        return Sample(values, weight, mask, count, rows.shape[-1] - count)
    mask = mask & allowed
    weight = mask.double()
    count = weight.sum(-1)
    return Sample(values * weight, weight, mask, count, allowed.sum(-1) - count)


def deviations(s: Sample) -> tuple[Tensor, Tensor]:
    """Return the mean [..] of the values and their distances from it [.., N], zero for values that do not count."""
    mean = s.values.sum(-1) / s.count.clamp(min=1)
    return mean, (s.values - mean.unsqueeze(-1)) * s.weight


def moments(s: Sample) -> Moments:
    """Return count, mean and centred power sums up to the fourth."""
    return moments_around(s.count, *deviations(s))


def moments_around(count: Tensor, mean: Tensor, d: Tensor) -> Moments:
    """Return the moments from the mean [..] and the distances from it [.., N]."""
    d2 = d * d
    return Moments(count, mean, d2.sum(-1), torch.linalg.vecdot(d2, d), torch.linalg.vecdot(d2, d2))


def spread(s: Sample) -> Moments:
    """Return only mean and std: the third and fourth power sums are NaN, so skew and kurtosis are absent."""
    mean, d = deviations(s)
    return Moments(s.count, mean, torch.linalg.vecdot(d, d), math.nan, math.nan)


def discounted_sums(x: Tensor, factors: Tensor) -> Tensor:
    """Return y_t = x_t + factors_t y_{t+1}, [T, ...] as `factors`, with zero after the last step.

    It takes log2 T passes over all steps at once: a loop over 2048 steps takes forty times as long.
    """
    sums: Any = x.clone()
    if x.is_cpu:  # numpy takes a third of the time that torch takes for these small operations
        sums, factors = sums.detach().numpy(), factors.detach().numpy()  # type: ignore[assignment]  # an array has the same operators
    factors, distance = factors[:-1], 1
    with np.errstate(all="ignore"):  # as torch
        while distance < len(x):
            sums[:-distance] += factors * sums[distance:]
            factors = factors[:-distance] * factors[distance:]
            distance *= 2
    return torch.from_numpy(sums) if x.is_cpu else sums


def where_any(x: Tensor, count: Tensor) -> Tensor:
    """Return `x` [..], or NaN if the count is 0."""
    return x / (count > 0)


def ascending(s: Sample) -> Tensor:
    """Return the values of all rows in ascending order, [rows * N], with NaN at the end for values that do not count."""
    x = s.where(math.nan).reshape(-1)
    if x.is_cpu:
        return torch.from_numpy(np.sort(x.numpy()))  # 4x faster than torch.sort; reading does not synchronise here
    return x.sort().values


def neighbours(ordered: Tensor, count: Tensor, levels: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the values [2, levels] around the quantiles of the first `count` [] of the `ordered` values, NaN without any, and the
    quantiles' relative distance [levels] from the first to the second.
    """
    position = (count - 1).clamp(min=0) * constant(tuple(levels), ordered.device)
    low = position.floor()
    ends = torch.stack([low, position.ceil()]).long()
    return ordered.take(ends), position - low


def quantiles(ordered: Tensor, count: Tensor, levels: Sequence[float]) -> Tensor:
    """Return the quantiles [levels] of the first `count` [] of the `ordered` values, interpolated linearly; NaN without any."""
    ends, fraction = neighbours(ordered, count, levels)
    return torch.lerp(ends[0], ends[1], fraction)


def per_row(values: Tensor, count: Tensor) -> tuple[Tensor, ...]:
    """Return each of `values` [K], statistics of all rows together, as [..]: the same number in every row."""
    return values.unsqueeze(-1).expand(-1, len(count)).contiguous().unbind() if count.ndim else values.unbind()


@lru_cache(maxsize=64)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the numbers as a read-only float64 tensor, made once per device."""
    return torch.tensor(values, dtype=torch.float64, device=device)


PER_DECADE = 5
"""Bins per power of ten: a bin's ends differ by a factor of 1.6."""


def symmetric_edges(lowest: int, highest: int) -> tuple[float, ...]:
    """Return edges from -10^highest to 10^highest, five per decade down to ±10^lowest, with one bin around zero between these."""
    steps = range(lowest * PER_DECADE, highest * PER_DECADE + 1)
    positive = [float(f"{10 ** (step / PER_DECADE):.3g}") for step in steps]
    return (*(-edge for edge in reversed(positive)), *positive)


LOG_RATIOS = symmetric_edges(-4, 1)
"""For log-ratios: from a change of 0.01 % to a factor of e^10."""

REWARDS = symmetric_edges(-3, 4)
"""For advantages, returns and errors in units of reward, on any scale."""

SHARES = tuple(index / 20 for index in range(21))
"""For values between 0 and 1."""


def bin_counts(s: Sample, edges: tuple[float, ...]) -> Tensor:
    """Return the number of values between each two edges, [.., bins]; the outermost bins hold the values outside."""
    places = torch.bucketize(s.values, constant(edges[1:-1], s.values.device))
    empty = s.values.new_zeros(*s.values.shape[:-1], len(edges) - 1)
    return empty.scatter_add_(-1, places, s.weight)


def histogram(s: Sample, edges: tuple[float, ...]) -> Counts:
    """Return the histogram of the values that count."""
    return Counts(bin_counts(s, edges), edges)


def defined_together(*values: Tensor) -> tuple[Mean, ...]:
    """Return `defined` of several tensors of one shape, in one operation."""
    stacked = torch.stack(values)
    finite = torch.isfinite(stacked)
    totals = torch.where(finite, stacked, stacked.new_zeros(()))
    return tuple(map(Mean, totals.unbind(), finite.unbind()))


def defined(values: Tensor) -> Mean:
    """Return the mean over the finite values; absent without any."""
    finite = torch.isfinite(values)
    return Mean(torch.where(finite, values, values.new_zeros(())), finite)


NAMED: Final = {
    "p01": 0.01,
    "p05": 0.05,
    "p10": 0.1,
    "p25": 0.25,
    "p50": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
}
"""Levels that can be reported."""
COARSE: Final = (0.0, *NAMED.values(), 1.0)
"""On an accelerator, where each number is a separate tensor."""
FINE: Final = tuple(sorted({*COARSE, *(step / 64 for step in range(65))}))
"""On the host, where numbers are cheap."""
LEVELS: Final = {len(COARSE): COARSE, len(FINE): FINE}


@dataclass(frozen=True, slots=True)
class Share(AdditiveReduction):
    """A part of a whole, if `count` is above zero."""

    part: Slot
    whole: Slot
    count: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"share": lambda s: s[0] / s[1] if s[1] and s[2] else NAN}


def _read(level: float, slots: Sequence[float]) -> float:
    return slots[1 + LEVELS[len(slots) - 1].index(level)] if slots[0] else NAN


@dataclass(frozen=True, slots=True)
class Quantiles(Reduction):
    """Quantiles of `count` values.

    Ranks are merged from quantiles at a fixed grid of levels, not from histograms: the scale of rewards is unknown before the run, and
    equally spaced levels resolve dense and sparse values alike.

    Attributes:
        count: number of values.
        values: values at the levels of `COARSE` or `FINE`, including the smallest and the largest; undefined without any.
    """

    count: Slot
    values: tuple[Slot, ...]

    statistics: ClassVar[Mapping[str, Statistic]] = {name: partial(_read, level) for name, level in NAMED.items()}

    def slots(self) -> tuple[Slot, ...]:
        """Return the count, then the values."""
        return (self.count, *self.values)

    @staticmethod
    def merge(rows: Array) -> Array:
        """Return the quantiles of all samples together; equal samples leave them unchanged."""
        levels = LEVELS[rows.shape[-1] - 1]
        fields = [rows[:, field] for field in range(rows.shape[1])]
        distinct = {field.tobytes(): field for field in fields}  # minibatches of one rollout carry the same quantiles
        merged = {key: _merged(field, levels) for key, field in distinct.items()}
        return np.stack([merged[field.tobytes()] for field in fields])


def levels_for(x: Tensor) -> tuple[float, ...]:
    """Return the levels of the quantiles of `x`."""
    return FINE if x.is_cpu else COARSE


def as_quantiles(at_levels: Tensor, count: Tensor) -> Quantiles:
    """Return the reduction of quantiles [levels] of all rows together, with `count` [..] values of each row."""
    return Quantiles(count, tuple(at_levels.tolist() if at_levels.is_cpu else at_levels.unbind()))  # on the host this does not wait


def _merged(rows: Array, levels: tuple[float, ...]) -> Array:
    """Merge the quantiles of several samples [rows, 1 + levels] into [1 + levels]: each value represents the rows around its level."""
    counts = rows[:, 0]
    present = rows[counts > 0]
    if not len(present) or (present[:, 1:] == present[0, 1:]).all():
        return np.concatenate([[counts.sum()], (present if len(present) else rows)[0, 1:]])
    ends = np.ones(len(levels))
    ends[[0, -1]] = 0.5  # the outermost levels have neighbours on one side only
    masses = np.outer(present[:, 0] / counts.sum(), np.gradient(np.array(levels)) * ends)
    order = np.argsort(present[:, 1:], axis=None, kind="stable")
    mass = masses.reshape(-1)[order]
    values = np.interp(levels, np.cumsum(mass) - mass / 2, present[:, 1:].reshape(-1)[order])
    return np.concatenate([[counts.sum()], values])


def are_among(numbers: Tensor, tables: Tensor, rounding: float) -> Tensor:
    """Return which numbers [N] equal one in each of the sorted tables [K, R], up to this share of its largest number: [K, N], bool."""
    rows, last = numbers.expand(len(tables), -1).contiguous(), tables.shape[1] - 1
    right = torch.searchsorted(tables, rows).clamp(max=last)
    near = torch.stack([tables.gather(1, right), tables.gather(1, (right - 1).clamp(min=0))])
    return (near - rows).abs().amin(0) <= rounding * tables[:, [0, -1]].abs().amax(1, keepdim=True)
