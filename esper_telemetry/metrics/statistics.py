"""Statistics shared by the metric functions: masked samples, moments, quantiles and histograms.

They take tensors on any device, compute in float64 and never read the device. Histograms have fixed edges, so that they add up over
minibatches, calls and ranks; quantiles of several samples are merged to the precision of one bin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, Final, NamedTuple

import numpy as np

from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.core.reduction import NAN, Array, Counts, Mean, Moments, Reduction, Slot, Statistic


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


def bin_counts(s: Sample, edges: tuple[float, ...]) -> Tensor:
    """How many of the values that count lie between each two edges, [.., bins]; the outermost bins hold what lies outside."""
    places = torch.bucketize(s.values, constant(edges[1:-1], s.values.device))
    empty = s.values.new_zeros(*s.values.shape[:-1], len(edges) - 1)
    return empty.scatter_add_(-1, places, s.weight)


def histogram(s: Sample, edges: tuple[float, ...]) -> Counts:
    """The values that count between fixed edges."""
    return Counts(bin_counts(s, edges), edges)


def defined_together(*values: Tensor) -> tuple[Mean, ...]:
    """`defined` of several tensors of one shape, in one go."""
    stacked = torch.stack(values)
    finite = torch.isfinite(stacked)
    totals = torch.where(finite, stacked, stacked.new_zeros(()))
    return tuple(map(Mean, totals.unbind(), finite.unbind()))


def defined(values: Tensor) -> Mean:
    """The mean over the finite values, each of which counts once; absent where there are none."""
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
"""On an accelerator, where each number is a tensor of its own."""
FINE: Final = tuple(sorted({*COARSE, *(step / 64 for step in range(65))}))
"""On the host, where numbers cost nothing."""
LEVELS: Final = {len(COARSE): COARSE, len(FINE): FINE}


def _read(level: float, slots: Sequence[float]) -> float:
    return slots[1 + LEVELS[len(slots) - 1].index(level)] if slots[0] else NAN


@dataclass(frozen=True, slots=True)
class Quantiles(Reduction):
    """Quantiles of `count` values.

    Attributes:
        count: how many values there are.
        values: at the levels of `COARSE` or `FINE`, the smallest and the largest included; undefined where there are none.
    """

    count: Slot
    values: tuple[Slot, ...]

    statistics: ClassVar[Mapping[str, Statistic]] = {name: partial(_read, level) for name, level in NAMED.items()}

    def slots(self) -> tuple[Slot, ...]:
        """The count, then the values."""
        return (self.count, *self.values)

    @staticmethod
    def merge(rows: Array) -> Array:
        """Those of all samples together; samples that are the same leave theirs unchanged."""
        levels = LEVELS[rows.shape[-1] - 1]
        fields = [rows[:, field] for field in range(rows.shape[1])]
        found = {field.tobytes(): field for field in fields}  # minibatches of one rollout carry the same quantiles
        merged = {key: _merged(field, levels) for key, field in found.items()}
        return np.stack([merged[field.tobytes()] for field in fields])


def levels_for(x: Tensor) -> tuple[float, ...]:
    """At which levels quantiles of `x` are to be found."""
    return FINE if x.is_cpu else COARSE


def as_quantiles(found: Tensor, count: Tensor) -> Quantiles:
    """A reduction of the quantiles `found` [levels] of all rows together; `count` [..] values of each row."""
    return Quantiles(
        count, tuple(found.tolist() if found.is_cpu else found.unbind())
    )  # on the host nothing is waited for


def _merged(rows: Array, levels: tuple[float, ...]) -> Array:
    """[1 + levels] of several samples [rows, 1 + levels]: each value stands for the rows around its level."""
    counts = rows[:, 0]
    present = rows[counts > 0]
    if not len(present) or (present[:, 1:] == present[0, 1:]).all():
        return np.concatenate([[counts.sum()], (present if len(present) else rows)[0, 1:]])
    masses = np.outer(present[:, 0] / counts.sum(), np.gradient(np.array(levels)) * _ends(len(levels)))
    order = np.argsort(present[:, 1:], axis=None, kind="stable")
    mass = masses.reshape(-1)[order]
    values = np.interp(levels, np.cumsum(mass) - mass / 2, present[:, 1:].reshape(-1)[order])
    return np.concatenate([[counts.sum()], values])


def _ends(count: int) -> Array:
    """Half for the two outermost levels, which have neighbours on one side only."""
    halves = np.ones(count)
    halves[[0, -1]] = 0.5
    return halves
