"""Histograms with fixed edges: they add up over minibatches, calls and ranks.

Means over the values that are defined: what is not finite is left out instead of poisoning the rest.

Quantiles that can be merged: exact of one sample, to one bin of several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import numpy as np

from esper_telemetry.core.lazy_torch import Tensor, torch
from esper_telemetry.core.reduction import NAN, Array, Counts, Mean, Reduction, Slot, Statistic
from esper_telemetry.metrics.actions import Sample, constant

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
