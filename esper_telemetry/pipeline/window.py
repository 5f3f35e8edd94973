"""The groups observed since the last flush, on the device, and their way to the host in one copy.

Plain numbers that join the next record, checked and handed on at next to no cost.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, SupportsFloat

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.core.arrays import as_number, shown
from esper_telemetry.core.group import MetricGroup, Packed, Postponed, pack
from esper_telemetry.core.packing import Index, SlotLayout, Values
from esper_telemetry.core.record import Level, check_key
from esper_telemetry.core.reduction import Array

MAX_RESTARTS: Final = 10
"""How often the epochs of one update may begin anew: once for each of several policies that are trained in turn."""

MAX_ROWS: Final = 10_000
"""Rows of one kind in one update, beyond which the end of the update has probably been forgotten."""

NOTHING = torch.empty(0, dtype=torch.float64)


@dataclass(slots=True)
class WindowRows:
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
        self._rows: dict[SlotLayout, WindowRows] = {}
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
        rows = self._rows.setdefault(packed.layout, WindowRows())
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

    def _judge(self, kind: WindowRows | Waiting, epoch: int) -> None:
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

    rows: dict[SlotLayout, WindowRows]
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


Tables = dict[SlotLayout, Table]
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


MOST_KEYS: Final = 100_000
"""How many keys are remembered as checked; who logs more of them has made them up anew for every record."""


PLAIN: Final = (float, int, np.number)
"""What the sum of numbers is that can be packed as they are; that of tensors is one."""


class Keys:
    """Keys that come together, in their order; equal to nothing but itself.

    Attributes:
        names: [K].
        row: how their numbers are written as bytes.
    """

    __slots__ = ("names", "row")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.row = struct.Struct(f"{len(names)}d")

    def __reduce__(self) -> tuple[type[Keys], tuple[tuple[str, ...]]]:
        return Keys, (self.names,)


class Numbers(NamedTuple):
    """Finite numbers of one update: their keys, [K], and 8 bytes for each."""

    keys: Keys
    row: bytes

    def by_key(self) -> dict[str, float]:
        """As they were logged."""
        return dict(zip(self.keys.names, self.keys.row.unpack(self.row), strict=True))


NO_NUMBERS: Final = Numbers(Keys(()), b"")


class Logged:
    """Numbers by key since the last `take`.

    A call with the keys of its like before the last `take`, and finite numbers, takes no Python per number.
    """

    def __init__(self) -> None:
        self._calls: list[Numbers] = []
        self._before: list[Numbers] = []
        self._nonfinite: Counter[str] = Counter()
        self._known: dict[tuple[str, ...], Keys] = {}
        self._checked: set[str] = set()
        self._remembered = 0

    def __bool__(self) -> bool:
        return bool(self._calls or self._nonfinite)

    def add(self, values: Mapping[str, SupportsFloat]) -> None:
        """Adds numbers; non-finite ones are counted under `<key>_nonfinite`.

        Raises:
            ValueError: for a key that not every backend accepts; then nothing is added.
            TypeError: for what is no mapping, and for a value that is not one number.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"log takes a mapping from keys to numbers, such as {{'my/key': 0.3}}, got {shown(values)}")
        names, numbers, keys = tuple(values), values.values(), self._expected
        try:
            total: object = sum(numbers)  # type: ignore[arg-type]  # where they cannot be added, they come one by one
            if keys is not None and keys.names == names and isinstance(total, PLAIN) and math.isfinite(total):
                self._calls.append(Numbers(keys, keys.row.pack(*numbers)))
                return
        except (TypeError, struct.error):
            pass  # something that is no number, or can be made one
        self._add_one_by_one(
            {key: number if type(number) is float else as_number(number, str(key)) for key, number in values.items()}
        )

    def take(self) -> Numbers:
        """All numbers so far, which are forgotten here; of a key that came twice the last."""
        calls, self._calls = self._calls, []
        self._before = calls
        if len(calls) == 1 and not self._nonfinite:
            return calls[0]
        values: dict[str, float] = {}
        for numbers in calls:
            values.update(numbers.by_key())
        values.update(self._nonfinite)
        self._nonfinite.clear()
        return self._numbers(values) if values else NO_NUMBERS

    @property
    def _expected(self) -> Keys | None:
        """Keys that the call in the place of the next one has brought before the last `take`."""
        place = len(self._calls)
        return self._before[place].keys if place < len(self._before) else None

    def _add_one_by_one(self, values: Mapping[str, float]) -> None:
        finite = {key: number for key, number in values.items() if math.isfinite(number)}
        nonfinite = [f"{key}_nonfinite" for key in values if key not in finite]
        self._check((*finite, *nonfinite))
        self._nonfinite.update(nonfinite)
        if finite:
            self._calls.append(self._numbers(finite))

    def _numbers(self, values: Mapping[str, float]) -> Numbers:
        names = tuple(values)
        keys = self._known.get(names) or self._learn(names)
        return Numbers(keys, keys.row.pack(*values.values()))

    def _learn(self, names: tuple[str, ...]) -> Keys:
        """Keys that have not come together before."""
        self._check(names)
        if self._remembered + len(names) > MOST_KEYS:
            self._known.clear()
            self._remembered = 0
        self._known[names] = keys = Keys(names)
        self._remembered += len(names)
        return keys

    def _check(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self._checked:
                check_key(name)
                if len(self._checked) >= MOST_KEYS:
                    self._checked.clear()
                self._checked.add(name)
