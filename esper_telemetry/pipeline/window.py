"""The update under way before it is flushed: observed groups on the device, logged numbers.

Observed groups stay on their device until `flush`, which starts one copy of all their numbers to the host.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, SupportsFloat, TypeVar

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.core.arrays import as_integer, as_number, shown
from esper_telemetry.core.group import Index, MetricGroup, Packed, Postponed, SlotLayout, Values, pack
from esper_telemetry.core.record import Level, check_key
from esper_telemetry.core.reduction import Array

MAX_EPOCH_RESTARTS: Final = 10
"""How often the epochs of one update may restart: once for each of several policies that are trained in turn."""

MAX_ROWS: Final = 10_000
"""Rows of one kind in one update, beyond which the user has probably forgotten to call `flush`."""

MAX_CHECKED_KEYS: Final = 100_000
"""Keys that are remembered as checked; a loop that logs more of them invents new ones for every record."""

NO_NUMBERS = torch.empty(0, dtype=torch.float64)

Block = TypeVar("Block", Packed, Postponed)


@dataclass(slots=True)
class ObservedRows(Generic[Block]):
    """Observed groups of one kind, with the optimizer step and the epoch of each row.

    Attributes:
        epoch_restarts: how often a smaller epoch has followed a larger one.
    """

    blocks: list[Block] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    epoch_restarts: int = 0

    def add(self, block: Block, epochs: Sequence[int], step: int | Sequence[int] | None) -> bool:
        """Add a block with one row per epoch: from `step` on, or at the given steps, or after the rows so far.

        Returns whether the rows seem to belong to several updates.
        """
        if self.epochs and epochs[0] < self.epochs[-1]:
            self.epoch_restarts += 1
        overdue = self.epoch_restarts >= MAX_EPOCH_RESTARTS or len(self.epochs) >= MAX_ROWS
        if not isinstance(step, Sequence):
            first = step if step is not None else (self.steps[-1] + 1 if self.steps else 0)
            step = range(first, first + len(epochs))
        self.blocks.append(block)
        self.steps.extend(step)
        self.epochs.extend(epochs)
        return overdue


class Window:
    """Observed groups by layout.

    Attributes:
        overdue: whether rows and epochs suggest that several updates have been observed since the window was sent.
    """

    def __init__(self) -> None:
        self._rows: dict[SlotLayout, ObservedRows[Packed]] = {}
        self._postponed: dict[Hashable, ObservedRows[Postponed]] = {}
        self.overdue = False

    def __bool__(self) -> bool:
        return bool(self._rows or self._postponed)

    @property
    def gradient_steps(self) -> int:
        """Maximum number of optimizer steps for which any group was observed, among groups observed per step."""
        steps = [rows.steps for part in (self._rows, self._postponed) for rows in part.values()]
        return max((max(each) + 1 for each in steps if max(each) > 0), default=0)

    def add(self, group: MetricGroup | Postponed, epoch: int | Sequence[int], step: int | Sequence[int] | None) -> None:
        """Pack a group. Its first row belongs to `step`, or follows earlier rows of its layout; a sequence gives the step of each row.

        It is packed now and not when the window is sent, because the owner of its tensors may change them. A group in which everything is
        undefined adds no rows. A postponed measurement is kept until the window is sent; it belongs to `step`, or follows earlier ones of
        its kind.
        """
        if isinstance(group, Postponed):
            epochs = _epoch_of_each_row(epoch, 1)
            self.overdue |= self._postponed.setdefault(group.kind, ObservedRows()).add(group, epochs, step)
            return
        packed = pack(group)
        if packed.layout.fields and packed.rows:
            epochs = _epoch_of_each_row(epoch, packed.rows)
            self.overdue |= self._rows.setdefault(packed.layout, ObservedRows()).add(packed, epochs, step)

    def send(self) -> Transfer:
        """Start the one copy to the host; the window is empty afterwards."""
        postponed, self._postponed = self._postponed, {}
        for item in postponed.values():
            for group in type(item.blocks[0]).together(item.blocks):
                self.add(group, item.epochs, item.steps)
        rows, self._rows = self._rows, {}
        self.overdue = False
        return Transfer(rows, *_to_host([packed.tensors.view(-1) for item in rows.values() for packed in item.blocks]))


def _epoch_of_each_row(epoch: int | Sequence[int], rows: int) -> Sequence[int]:
    if isinstance(epoch, int):
        return [epoch] * rows
    if len(epoch) != rows:
        raise ValueError(f"epoch must be a number or one per row ({rows}), got {epoch!r}")
    return epoch


def _to_host(blocks: list[Tensor]) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return all numbers in one host vector, and the event after which it may be read (None: at once)."""
    if not blocks:
        return NO_NUMBERS, None
    device = next((block.device for block in blocks if block.is_cuda), blocks[0].device)
    packed = torch.cat([block.to(device, non_blocking=True) for block in blocks])
    if not packed.is_cuda:
        return packed.cpu(), None
    host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
    host.copy_(packed, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


class Table(NamedTuple):
    """Rows of one layout on the host.

    Attributes:
        rows: [R, columns].
        steps, epochs: [R], the optimizer step and the epoch of each row.
    """

    rows: Array
    steps: Index
    epochs: Index


Tables = dict[SlotLayout, Table]
"""The observed rows of an update, by layout."""


@dataclass(slots=True)
class Transfer:
    """Rows on their way to the host: their packed numbers, and the event after which these may be read."""

    rows: dict[SlotLayout, ObservedRows[Packed]]
    numbers: Tensor
    arrival: torch.cuda.Event | None

    @property
    def pending(self) -> bool:
        """True while reading would have to wait for the device."""
        return self.arrival is not None

    def finish(self, level: Level) -> Values:
        """Wait for the copy and read every value that belongs to `level`."""
        return finish(self.tables(), level, copies=int(self.pending))

    def tables(self) -> Tables:
        """Wait for the copy; return the rows of every layout."""
        if self.arrival is not None:
            self.arrival.synchronize()
        numbers, start = self.numbers.numpy(), 0
        tables: Tables = {}
        for layout, rows in self.rows.items():
            parts = []
            for packed in rows.blocks:
                end = start + packed.tensors.numel()
                parts.append(layout.table(numbers[start:end], packed.numbers, packed.rows))
                start = end
            table = parts[0] if len(parts) == 1 else np.concatenate(parts)
            tables[layout] = Table(table, np.array(rows.steps), np.array(rows.epochs))
        return tables


def finish(tables: Tables, level: Level, *, copies: int) -> Values:
    """Return every value of an update that belongs to `level`; its numbers came to the host in `copies`."""
    merged = Values({}, {}, 0, {}, copies)
    for layout, table in tables.items():
        merged = merged.united(layout.finish(*table, level))
    return merged


class LoggedValues:
    """Plain numbers by key since the last `take`."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._nonfinite: Counter[str] = Counter()
        self._checked: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._values or self._nonfinite)

    def add(self, values: Mapping[str, SupportsFloat]) -> None:
        """Add numbers; the last number of a key counts, and non-finite ones are counted under `<key>_nonfinite`.

        Raises:
            ValueError: for a key that some backend would not accept; then nothing is added.
            TypeError: if `values` is not a mapping, or a value is not a single number.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"log takes a mapping from keys to numbers, such as {{'my/key': 0.3}}, got {shown(values)}")
        numbers = {key: value if type(value) is float else as_number(value, str(key)) for key, value in values.items()}
        finite = {key: number for key, number in numbers.items() if math.isfinite(number)}
        nonfinite = [f"{key}_nonfinite" for key in numbers if key not in finite] if len(finite) < len(numbers) else []
        for key in (*finite, *nonfinite):
            if key not in self._checked:
                check_key(key)
                if len(self._checked) >= MAX_CHECKED_KEYS:
                    self._checked.clear()
                self._checked.add(key)
        self._values.update(finite)
        self._nonfinite.update(nonfinite)

    def take(self) -> dict[str, float]:
        """Return all numbers so far, and forget them."""
        values = {**self._values, **self._nonfinite}
        self._values, self._nonfinite = {}, Counter()
        return values


def flattened(groups: Iterable[object]) -> Iterable[MetricGroup | Postponed]:
    """Yield single groups, also from tuples, lists and generators; a postponed measurement is yielded as one."""
    for group in groups:
        if isinstance(group, MetricGroup | Postponed):
            yield group
        elif isinstance(group, Iterable) and not isinstance(group, Mapping | str | bytes | Tensor | np.ndarray):
            yield from flattened(group)
        else:
            raise TypeError(
                f"observe takes the results of metric functions, got {shown(group)}: plain numbers go to telemetry.log({{'my/key': 0.3}})"
            )


def as_epochs(epoch: object) -> int | list[int]:
    """Return the epoch, or one per row."""
    several = isinstance(epoch, Sequence) and not isinstance(epoch, str)
    if several or (isinstance(epoch, Tensor | np.ndarray) and epoch.ndim == 1):
        return [as_integer(one, "epoch") for one in epoch]  # type: ignore[attr-defined]  # mypy forgets the check above
    return as_integer(epoch, "epoch")
