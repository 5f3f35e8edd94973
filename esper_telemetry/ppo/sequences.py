"""Whole sequences for recurrent policies: split where memory restarts, packed into columns, and put back as rows.

The rows of a batch stay rows: only inside the recurrent core do they stand in a grid, whose columns are runs of steps
that share a memory. Several runs may share a column, each behind a separator, a cell at which the core forgets all.
No cell but theirs leaves the core, so no loss and no statistic needs to know of padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

PARTS = {"lstm": 2, "gru": 1}
"""Parts of a state: hidden and cell state of an LSTM, the hidden state of a GRU."""

STRIDE = 8
"""Heights of grids are multiples of this: oneDNN prepares itself anew, for as long as a pass takes, for each new shape."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Where N rows stand in a grid of `length` x `columns`.

    Attributes:
        cells: [N], int64: index of each row in the flattened grid.
        separators: [M], int64: indices of the cells at which the core forgets all; None where there are none.
        length, columns: the grid's size.
        states: per trunk [layers, parts, columns, H]: the state in which each column begins.
    """

    cells: Tensor
    separators: Tensor | None
    length: int
    columns: int
    states: Mapping[str, Tensor]

    def pad(self, rows: Tensor) -> Tensor:
        """Rows [N, F] in the grid [length, columns, F], zero elsewhere."""
        empty = rows.new_zeros(self.length * self.columns, rows.shape[-1])
        return empty.index_copy(0, self.cells, rows).view(self.length, self.columns, -1)

    def gather(self, grid: Tensor) -> Tensor:
        """The rows [N, F] of a grid [length, columns, F]."""
        return grid.flatten(0, 1).index_select(0, self.cells)

    def marks(self) -> Tensor | None:
        """[length, columns, 1]: 1 at separators, 0 elsewhere; None where there are none."""
        if self.separators is None:
            return None
        state = next(iter(self.states.values()))
        empty = state.new_zeros(self.length * self.columns)
        return empty.index_fill(0, self.separators, 1.0).view(self.length, self.columns, 1)


class Whole(NamedTuple):
    """One environment's part of a batch: indices of its rows and of its runs."""

    rows: Array
    runs: Array


@dataclass(frozen=True, slots=True)
class Sequences:
    """How the N rows of a batch make up R runs, steps that share a memory; ordered by environment, then by time.

    The arrays live on the host, so that the size of a grid is known without waiting for the device.

    Attributes:
        lengths: [R], int: rows of each run.
        carried: [R], bool: the run goes on with the state stored when the rollout began.
        envs: [R], int: its environment, as an index into `states`.
        states: per trunk [layers, parts, B, H], stored when the rollout began.
    """

    lengths: Array
    carried: Array
    envs: Array
    states: Mapping[str, Tensor]

    def take(self, runs: Array) -> Sequences:
        """The runs with these indices."""
        return replace(self, lengths=self.lengths[runs], carried=self.carried[runs], envs=self.envs[runs])

    def environments(self) -> list[Whole]:
        """The parts of the batch, one per environment that has rows."""
        cuts = np.flatnonzero(np.diff(self.envs)) + 1
        ends = np.cumsum(self.lengths)
        rows = np.split(np.arange(ends[-1]), ends[cuts - 1])
        runs = np.split(np.arange(len(self.envs)), cuts)
        return [Whole(*part) for part in zip(rows, runs, strict=True)]

    @property
    def separable(self) -> bool:
        """Whether the core can forget within a column: an LSTM on the CPU; cuDNN wants its weights in one piece."""
        state = next(iter(self.states.values()))
        return state.is_cpu and state.shape[1] == PARTS["lstm"]

    def grid(self, *, shared: bool = False) -> Grid:
        """The rows in columns.

        Args:
            shared: runs share columns behind separators, where they fit; otherwise each has its own.
        """
        lengths = self.lengths
        height = -(-int(lengths.max()) // STRIDE) * STRIDE
        alone = (np.arange(len(lengths)), np.zeros_like(lengths))
        column, top = pack(lengths, self.carried, height) if shared else alone
        columns = int(column.max()) + 1
        starts = np.cumsum(lengths) - lengths
        rows = np.arange(starts[-1] + lengths[-1])
        cells = rows * columns + np.repeat((top - starts) * columns + column, lengths)
        device = next(iter(self.states.values())).device
        behind = np.flatnonzero(top)
        return Grid(
            on(cells, device),
            on((top[behind] - 1) * columns + column[behind], device) if len(behind) else None,
            height,
            columns,
            self._begin(columns, column[self.carried]),
        )

    def _begin(self, columns: int, carried: Array) -> dict[str, Tensor]:
        """Per trunk the states in which the columns begin: stored ones in the columns `carried`, zero in the others."""
        device = next(iter(self.states.values())).device
        targets, sources = on(carried, device), on(self.envs[self.carried], device)
        return {
            name: state.new_zeros(*state.shape[:2], columns, state.shape[-1]).index_copy_(
                2, targets, state.index_select(2, sources)
            )
            for name, state in self.states.items()
        }


def pack(lengths: Array, carried: Array, room: int) -> tuple[Array, Array]:
    """Column and first position of each run: the longest first, each behind the first that leaves room for it.

    A run that goes on with a stored state stands at the top of a column; the others need a separator before them.
    """
    columns, offsets = np.zeros_like(lengths), np.zeros_like(lengths)
    ends: list[int] = []
    order = np.lexsort((-lengths, ~carried)).tolist()
    sizes, tops = lengths.tolist(), carried.tolist()
    for run in order:
        size = sizes[run]
        column = len(ends) if tops[run] else next((c for c, end in enumerate(ends) if end + size <= room), len(ends))
        if column == len(ends):
            ends.append(0)
        columns[run], offsets[run] = column, ends[column]
        ends[column] += size + 1
    return columns, offsets


def on(indices: Array, device: torch.device) -> Tensor:
    """Indices on a device, without waiting for it."""
    return torch.from_numpy(indices.astype(np.int64, copy=False)).to(device, non_blocking=True)
