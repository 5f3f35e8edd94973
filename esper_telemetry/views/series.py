"""Values of one key over the updates of a run, in bounded memory."""

from __future__ import annotations

import math
from array import array
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from esper_telemetry.alarms.verdict.bounds import HealthyRange as HealthyRange
from esper_telemetry.alarms.verdict.bounds import Judgement as Judgement
from esper_telemetry.alarms.verdict.bounds import judge as judge

Array = npt.NDArray[np.float64]

DEFAULT_POINTS: Final = 600
"""Points of a series: about one for each pixel of a narrow chart."""
MIN_POINTS: Final = 6
MAX_PENDING: Final = 32
MAX_DRAWN: Final = 1e150
"""Size of a value in a chart: the ends of an axis, and their distance, are finite."""
VALUE: Final = itemgetter(2)

Point = tuple[float, float, float]
"""Update, environment steps, value."""


class Series(NamedTuple):
    """Finite values of one key, in the order of updates.

    Attributes:
        updates: index of the update of each value.
        env_steps: environment steps at which its data was collected.
        values: as recorded.
    """

    updates: tuple[int, ...] = ()
    env_steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


def drawable(value: float) -> float:
    """Return the value as a chart shows it: at most `MAX_DRAWN` in size."""
    return min(max(value, -MAX_DRAWN), MAX_DRAWN)


class SeriesBuffer:
    """Collects the values of one key, and keeps the smallest and the largest of each group of updates.

    Groups are equally long and grow with the run, so that memory is bounded and no extreme is lost. The latest value is always kept.

    Args:
        max_points: most values that `series` returns, at least `MIN_POINTS`; 0 for all of them.
    """

    __slots__ = ("_columns", "_count", "_first", "_group", "_last", "_max_groups", "_pending", "_room")

    def __init__(self, max_points: int = DEFAULT_POINTS) -> None:
        if max_points != 0 and max_points < MIN_POINTS:
            raise ValueError(f"max_points must be 0 or at least {MIN_POINTS}, got {max_points}")
        self._max_groups = (max_points - 2) // 4 * 2  # even, so that groups merge in pairs
        self._group, self._count = 1, 0
        # (update, step, value) of the smallest and of the largest value of each group
        self._columns = array("d")
        self._first = self._last = (0.0, 0.0, 0.0)
        # values that are not in a group yet, at most as many as the last group has room for: one by one takes three times as long
        self._pending: list[tuple[float, float, float]] = []
        self._room = 1

    def add(self, update: int, env_step: int, value: float) -> None:
        """Add a value; values that are not finite are ignored."""
        if math.isfinite(value):
            self._pending.append((update, env_step, value))
            if len(self._pending) >= self._room:
                self._settle()

    def extend(self, updates: npt.NDArray[np.int64], env_steps: npt.NDArray[np.int64], values: Array) -> None:
        """Add arrays of values; those that are not finite are ignored."""
        if self._pending:
            self._settle()
        finite = np.isfinite(values)
        rows, done = np.stack([updates[finite], env_steps[finite], values[finite]], axis=1), 0
        while done < len(rows):
            begun = self._count % self._group
            groups = (
                0 if begun else min((len(rows) - done) // self._group, self._max_groups - self._count // self._group)
            )
            if groups <= 1:
                part = rows[done : done + self._group - begun]
                low, high, first, last = (
                    tuple(part[place].tolist()) for place in (part[:, 2].argmin(), part[:, 2].argmax(), 0, -1)
                )
                self._join(low, high, first, last, len(part))
                done += len(part)
                continue
            whole = rows[done : done + groups * self._group].reshape(groups, self._group, 3)
            each = np.arange(groups)
            lowest, highest = (
                whole[each, places] for places in (whole[:, :, 2].argmin(axis=1), whole[:, :, 2].argmax(axis=1))
            )
            self._first = self._first if self._count else tuple(whole[0, 0].tolist())
            self._last = tuple(whole[-1, -1].tolist())
            self._columns.frombytes(np.concatenate([lowest, highest], axis=1).tobytes())
            done += groups * self._group
            self._advance(groups * self._group)

    def _settle(self) -> None:
        """Put the pending values into the last group."""
        pending = self._pending
        self._join(min(pending, key=VALUE), max(pending, key=VALUE), pending[0], pending[-1], len(pending))
        pending.clear()

    def _join(self, low: Point, high: Point, first: Point, last: Point, count: int) -> None:
        """Put so many values into the last group, or a new one, of which these are the smallest, the largest, the first and the last."""
        columns = self._columns
        if not self._count:
            self._first = first
        self._last = last
        if self._count % self._group == 0:
            columns.extend(low + high)
        else:
            if low[2] < columns[-4]:
                columns[-6:-3] = array("d", low)
            if high[2] > columns[-1]:
                columns[-3:] = array("d", high)
        self._advance(count)

    def _advance(self, count: int) -> None:
        self._count += count
        if self._max_groups and self._count == self._group * self._max_groups:
            self._merge()
        self._room = min(MAX_PENDING, self._group - self._count % self._group)

    def _merge(self) -> None:
        """Merge each group with the next one; their number is even."""
        low, high, next_low, next_high = np.array(self._columns).reshape(-1, 4, 3).swapaxes(0, 1)
        lowest = np.where(next_low[:, 2:] < low[:, 2:], next_low, low)
        highest = np.where(next_high[:, 2:] > high[:, 2:], next_high, high)
        self._columns = array("d", np.concatenate([lowest, highest], axis=1).tobytes())
        self._group *= 2

    @property
    def series(self) -> Series:
        """The values that are kept, in order."""
        if self._pending:
            self._settle()
        columns = self._columns
        points = set(zip(columns[::3], columns[1::3], columns[2::3], strict=True))
        points |= {self._first, self._last} if self._count else set()
        ordered = sorted(points)
        return Series(
            tuple(int(point[0]) for point in ordered),
            tuple(int(point[1]) for point in ordered),
            tuple(point[2] for point in ordered),
        )
