"""The groups observed since the last flush, on the device, and their way to the host in one copy."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.group import MetricGroup, Packed, Postponed, pack
from esper_telemetry.layout import Index, Layout, Values
from esper_telemetry.record import Level
from esper_telemetry.reduction import Array

MAX_RESTARTS: Final = 10
"""How often the epochs of one update may begin anew: once for each of several policies that are trained in turn."""

MAX_ROWS: Final = 10_000
"""Rows of one kind in one update, beyond which the end of the update has probably been forgotten."""

NOTHING = torch.empty(0, dtype=torch.float64)


@dataclass(slots=True)
class Rows:
    """Packed groups of one layout, with the optimizer step and the epoch of each row.

    Attributes:
        restarts: how often a smaller epoch has followed a larger one.
    """

    blocks: list[Packed] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    restarts: int = 0


@dataclass(slots=True)
class Waiting:
    """Measurements of one kind that wait for the end of the update, with the optimizer step and the epoch of each."""

    measured: list[Postponed] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    restarts: int = 0


class Window:
    """Observed groups by layout.

    Attributes:
        overdue: whether several updates have been observed since the window was sent, as far as rows and epochs tell.
    """

    def __init__(self) -> None:
        self._rows: dict[Layout, Rows] = {}
        self._waiting: dict[Hashable, Waiting] = {}
        self.overdue = False

    def __bool__(self) -> bool:
        return bool(self._rows or self._waiting)

    @property
    def gradient_steps(self) -> int:
        """Largest number of optimizer steps that any group has been observed for, where it was observed per step."""
        observed = [*(rows.steps for rows in self._rows.values()), *(item.steps for item in self._waiting.values())]
        return max((max(steps) + 1 for steps in observed if max(steps) > 0), default=0)

    def postpone(self, measured: Postponed, epoch: int | Sequence[int], step: int | None) -> None:
        """Keeps a measurement until the window is sent; it stands at `step`, or after those of its kind."""
        epochs = [epoch] if isinstance(epoch, int) else list(epoch)
        if len(epochs) != 1:
            raise ValueError(f"epoch must be a number or one per row (1), got {epoch!r}")
        waiting = self._waiting.setdefault(measured.kind, Waiting())
        self._judge(waiting, epochs[0])
        waiting.steps.append(step if step is not None else (waiting.steps[-1] + 1 if waiting.steps else 0))
        waiting.epochs.extend(epochs)
        waiting.measured.append(measured)

    def add(self, group: MetricGroup, epoch: int | Sequence[int], step: int | Sequence[int] | None) -> None:
        """Packs a group; its first row stands at `step`, or after the rows that its layout has already; or its rows at `step`.

        A group in which everything is undefined has no rows.
        """
        packed = pack(group)
        if not packed.layout.fields:
            return
        count = packed.rows
        if not isinstance(epoch, int) and len(epoch) != count:
            raise ValueError(f"epoch must be a number or one per row ({count}), got {epoch!r}")
        rows = self._rows.setdefault(packed.layout, Rows())
        self._judge(rows, epoch if isinstance(epoch, int) else epoch[0])
        rows.blocks.append(packed)
        rows.steps.extend(_steps(step, count, rows.steps))
        rows.epochs.extend([epoch] * count if isinstance(epoch, int) else epoch)

    def send(self) -> Transfer:
        """Starts the one copy to the host; the window is empty afterwards."""
        self._settle()
        rows, self._rows = self._rows, {}
        self.overdue = False
        blocks = [packed.tensors.view(-1) for item in rows.values() for packed in item.blocks]
        return Transfer(rows, _to_host(blocks))

    def _judge(self, kind: Rows | Waiting, epoch: int) -> None:
        """Sees whether what is added to a kind of rows belongs to a later update."""
        if kind.epochs and epoch < kind.epochs[-1]:
            kind.restarts += 1
        if kind.restarts >= MAX_RESTARTS or len(kind.epochs) >= MAX_ROWS:
            self.overdue = True

    def _settle(self) -> None:
        """Turns what waited into rows."""
        waiting, self._waiting = self._waiting, {}
        for item in waiting.values():
            for group in type(item.measured[0]).together(item.measured):
                self.add(group, item.epochs, item.steps)


def _steps(step: int | Sequence[int] | None, count: int, before: Sequence[int]) -> Sequence[int]:
    """Of `count` rows: as given, or counted from the given one, or from the one after those before."""
    if isinstance(step, Sequence):
        return step
    first = step if step is not None else (before[-1] + 1 if before else 0)
    return range(first, first + count)


def _to_host(blocks: list[Tensor]) -> tuple[Tensor, torch.cuda.Event | None]:
    """All numbers in one host vector, and the event after which it may be read (None: at once)."""
    if not blocks:
        return NOTHING, None
    device = next((block.device for block in blocks if block.is_cuda), blocks[0].device)
    packed = torch.cat([block.to(device, non_blocking=True) for block in blocks])
    if not packed.is_cuda:
        return packed.cpu(), None
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


@dataclass(slots=True)
class Transfer:
    """Rows on their way to the host."""

    rows: dict[Layout, Rows]
    packed: tuple[Tensor, torch.cuda.Event | None]

    @property
    def pending(self) -> bool:
        """Whether reading would have to wait for the device."""
        return self.packed[1] is not None

    def finish(self, level: Level) -> Values:
        """Waits for the copy and reads every value that belongs to `level`."""
        return finish(self.tables(), level, self.copies)

    @property
    def copies(self) -> int:
        """How many vectors are on their way from a device: one, or none where the numbers are on the host already."""
        return int(self.pending)

    def tables(self) -> Tables:
        """Waits for the copy; the rows of every layout."""
        if not self.rows:
            return {}
        host, event = self.packed
        if event is not None:
            event.synchronize()
        numbers = host.numpy()
        found: Tables = {}
        for layout, rows in self.rows.items():
            table, numbers = _tables(rows.blocks, numbers)
            found[layout] = Table(table, np.array(rows.steps), np.array(rows.epochs))
        return found


class Table(NamedTuple):
    """Rows of one layout on the host.

    Attributes:
        rows: [R, columns].
        steps, epochs: [R], the optimizer step and the epoch of each row.
    """

    rows: Array
    steps: Index
    epochs: Index


Tables = dict[Layout, Table]
"""An update as it was measured."""


def finish(tables: Tables, level: Level, copies: int = 0) -> Values:
    """Every value of an update that belongs to `level`; its numbers came to the host in `copies`."""
    merged = Values({}, {}, 0, {}, copies)
    for layout, table in tables.items():
        merged = merged.united(layout.finish(*table, level))
    return merged


def _tables(blocks: list[Packed], numbers: Array) -> tuple[Array, Array]:
    """The rows of all blocks, read off the front of `numbers`, and what remains of these."""
    tables = []
    for packed in blocks:
        size = packed.tensors.numel()
        tables.append(packed.layout.table(numbers[:size], packed.numbers, packed.rows))
        numbers = numbers[size:]
    return tables[0] if len(tables) == 1 else np.concatenate(tables), numbers
