"""Quantiles that can be merged: exact of one sample, to one bin of several.

A sample's quantiles travel with those at a fixed grid of levels. Between two neighbours lies a known share of the sample, so the
quantiles of several samples together are found to one such bin, 1/64 of the rows, whatever the scale and the shape of the values. A
histogram over edges that are the same for all ranks and all runs could not promise that: nobody knows the scale of rewards beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import numpy as np
from torch import Tensor

from esper_telemetry.reduction import NAN, Array, Reduction, Slot, Statistic

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
