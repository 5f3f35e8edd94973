"""Whole sequences for recurrent policies: split where memory restarts, padded, and put back without the padding.

The rows of a batch stay rows: only inside the recurrent core do they stand in a padded grid, one column per run of
steps that share a memory. No padded entry leaves the core, so no loss and no statistic needs to know of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Grid:
    """Where N rows stand in a padded grid of `length` x `runs`.

    Attributes:
        cells: [N], int64: index of each row in the flattened grid.
        length, runs: the grid's height (longest run) and width (number of runs).
        states: per trunk [layers, parts, runs, H]: the state in which each run begins.
    """

    cells: Tensor
    length: int
    runs: int
    states: Mapping[str, Tensor]

    def pad(self, rows: Tensor) -> Tensor:
        """Rows [N, F] in the grid [length, runs, F], zero elsewhere."""
        empty = rows.new_zeros(self.length * self.runs, rows.shape[-1])
        return empty.index_copy(0, self.cells, rows).view(self.length, self.runs, -1)

    def gather(self, grid: Tensor) -> Tensor:
        """The rows [N, F] of a grid [length, runs, F]."""
        return grid.flatten(0, 1).index_select(0, self.cells)


@dataclass(frozen=True, slots=True)
class Sequences:
    """How the N rows of a batch follow one another; they are ordered by environment, then by time.

    The flags live on the host, so that the size of a grid is known without waiting for the device.

    Attributes:
        begins: [N], bool: memory begins anew at this row, or the rollout does.
        carried: [N], bool: the row is its environment's first and goes on with the stored state.
        envs: [N], int: environment of the row, as an index into `states`.
        states: per trunk [layers, parts, B, H], stored when the rollout began.
    """

    begins: Array
    carried: Array
    envs: Array
    states: Mapping[str, Tensor]

    def take(self, rows: Array) -> Sequences:
        """The rows with these indices, which make whole sequences."""
        return replace(self, begins=self.begins[rows], carried=self.carried[rows], envs=self.envs[rows])

    def environments(self) -> list[Array]:
        """Per environment the indices of its rows."""
        cuts = np.flatnonzero(np.diff(self.envs)) + 1
        return np.split(np.arange(len(self.envs)), cuts)

    def grid(self) -> Grid:
        """The rows, one column per run."""
        starts = np.flatnonzero(self.begins)
        run = np.cumsum(self.begins) - 1
        position = np.arange(len(run)) - starts[run]
        length, runs = int(position.max()) + 1, len(starts)
        device = next(iter(self.states.values())).device
        goes_on = self.carried[starts]
        columns = on(np.flatnonzero(goes_on), device)
        sources = on(self.envs[starts[goes_on]], device)
        states = {name: begin(state, runs, columns, sources) for name, state in self.states.items()}
        return Grid(on(position * runs + run, device), length, runs, states)


def begin(state: Tensor, runs: int, columns: Tensor, sources: Tensor) -> Tensor:
    """States [layers, parts, runs, H]: those of environments `sources` in `columns`, zero in the others."""
    empty = state.new_zeros(*state.shape[:2], runs, state.shape[-1])
    return empty.index_copy(2, columns, state.index_select(2, sources))


def on(indices: Array, device: torch.device) -> Tensor:
    """Indices on a device, without waiting for it."""
    return torch.from_numpy(indices.astype(np.int64)).to(device, non_blocking=True)
