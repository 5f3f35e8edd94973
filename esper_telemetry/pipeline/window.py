"""The update under way, observed groups on the device and logged numbers, and the flushed update on its way to the pipeline.

Observed groups stay on their device until `flush`, which starts one copy of all their numbers to the host. If a worker measures the whole
updates of a trainer, `ship` copies their tensors from a GPU; the training thread does not wait for these copies either.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, SupportsFloat, TypeVar

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.core.arrays import as_integer, as_number, shown
from esper_telemetry.core.group import NO_VALUES, Index, MetricGroup, Packed, Postponed, SlotLayout, Values, pack
from esper_telemetry.core.process_memory import DeviceUsage
from esper_telemetry.core.record import Axes, Level, SinkBacklog, check_key
from esper_telemetry.core.reduction import Array
from esper_telemetry.updates.update import Update, copied, mapped

MAX_EPOCH_RESTARTS: Final = 10
"""How often the epochs of one update may restart: once for each of several policies that are trained in turn."""

MAX_ROWS: Final = 10_000
"""Rows of one kind in one update, beyond which the user has probably forgotten to call `flush`."""

MAX_CHECKED_KEYS: Final = 100_000
"""Keys that are remembered as checked; a loop that logs more of them invents new ones for every record."""

MAX_MINIBATCH_ROWS: Final = 1 << 16
"""Rows of minibatches copied from one update on a GPU: a core measures about 500,000 a second, and an update takes a fifth of that."""

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


class FlushCost(NamedTuple):
    """Time that telemetry took since the last record.

    Attributes:
        seconds, cpu_seconds: wall and processor time on the training thread; the latter is None if it was not measured.
        elapsed: wall time since the last record.
        metric_errors: metric functions that raised on the training thread.
    """

    seconds: float = 0.0
    cpu_seconds: float | None = None
    elapsed: float = 0.0
    metric_errors: int = 0


class FlushedUpdate(NamedTuple):
    """One update on its way through the pipeline.

    Attributes:
        axes, partial: fields of the record.
        level: level at which this update is measured.
        logged: plain numbers; they override a measured value with the same key.
        updates: data that are still to be measured.
        evidence_updates: updates that are measured already and provide evidence; rank 0's if there are several ranks.
        seq: number of the journal line.
        measured: values of the groups that were observed.
        cost: cost of telemetry on the training thread.
        backlog: backlog of the sinks.
        unmeasured: whether measurements were skipped because the worker was too far behind.
        minibatch_stride: one in this many minibatches was shipped; 1 if all were.
        copies: number of copies of its tensors from a device to the host.
        devices: memory of the devices that the trainer uses, which only its own process can see.
    """

    axes: Axes
    level: Level
    partial: bool = False
    logged: Mapping[str, float] = {}
    updates: tuple[Update, ...] = ()
    evidence_updates: tuple[Update, ...] = ()
    seq: int = 0
    measured: Values = NO_VALUES
    cost: FlushCost = FlushCost()
    backlog: SinkBacklog = SinkBacklog()
    unmeasured: bool = False
    minibatch_stride: int = 1
    copies: int = 0
    devices: DeviceUsage = DeviceUsage()

    def without_summary(self) -> FlushedUpdate:
        """Return this update without the data that are still to be measured."""
        return self._replace(updates=(), unmeasured=bool(self.updates))

    def with_copies(self) -> FlushedUpdate:
        """Return this update with copies of the tensors that the trainer will overwrite."""
        return self._replace(updates=copied(self.updates), evidence_updates=copied(self.evidence_updates))


class OpenUpdate:
    """The update under way.

    Attributes:
        window: groups that were observed.
        logged: plain numbers.
        updates: whole updates of a trainer, still to be measured.
        evidence_updates: whole updates that are measured already.
    """

    def __init__(self) -> None:
        self.window = Window()
        self.logged = LoggedValues()
        self.updates: list[Update] = []
        self.evidence_updates: list[Update] = []

    def __bool__(self) -> bool:
        return bool(self.window or self.logged or any(self.updates))

    @property
    def gradient_steps(self) -> int:
        """Number of optimizer steps in this update so far."""
        return self.window.gradient_steps + sum(update.gradient_steps for update in self.updates)

    def flush(self, axes: Axes, level: Level, *, partial: bool) -> FlushedUpdate:
        """Return everything except the observed groups, which `window.send` returns; the next update begins empty."""
        updates, evidence_updates = tuple(self.updates), tuple(self.evidence_updates)
        self.updates.clear()
        self.evidence_updates.clear()
        return FlushedUpdate(axes, level, partial, self.logged.take(), updates, evidence_updates)


class Shipment(NamedTuple):
    """An update whose tensors are on the host, or on their way there.

    Attributes:
        update: update with tensors on the host.
        arrival: event after which they may be read; None if they may be read at once.
    """

    update: FlushedUpdate
    arrival: torch.cuda.Event | None = None


def ship(update: FlushedUpdate) -> Shipment:
    """Begin to copy the tensors of an update that are on a GPU into pinned memory of the host.

    Measuring an update on a GPU takes a thousand small kernels, and copying its columns about thirty copies; the worker then measures on
    the CPU. The copies are enqueued on the trainer's stream, so the trainer cannot overwrite a tensor before it has been copied.
    """
    copier = _Copier()
    stride = max((_stride(part.minibatches.counts) for part in update.updates if part.minibatches), default=1)
    updates = tuple([copier.copy(thinned(part, stride)) for part in update.updates])
    evidence_updates = tuple(map(copier.copy, update.evidence_updates))
    shipped = update._replace(updates=updates, evidence_updates=evidence_updates, minibatch_stride=stride, copies=copier.copies)
    if not copier.copies:
        return Shipment(update)
    arrival = torch.cuda.Event()
    arrival.record()
    return Shipment(shipped, arrival)


class _Copier:
    """Copies tensors, each one once, and counts the copies."""

    def __init__(self) -> None:
        self.copies = 0
        self._copied: dict[int, tuple[Tensor, Tensor]] = {}

    def copy(self, update: Update) -> Update:
        return mapped(update, self._to_host)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        known = self._copied.get(id(tensor))
        if known is None:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            host.copy_(tensor.detach(), non_blocking=True)
            self._copied[id(tensor)] = known = tensor, host  # keeps the tensor alive, so that its id stays unique
            self.copies += 1
        return known[1]


def _stride(counts: Sequence[int]) -> int:
    return -(-sum(counts) // MAX_MINIBATCH_ROWS)


def thinned(update: Update, stride: int) -> Update:
    """Return the update with the first minibatch, every `stride`-th after it, and the last one, without their row numbers.

    Minibatches stay whole for the sake of their ratios, losses and normalisation. Repeated rows can no longer be identified.
    """
    minibatches = update.minibatches
    if stride <= 1 or minibatches is None:
        return update
    last = len(minibatches.counts) - 1
    kept = sorted({*range(0, last + 1, stride), last})

    def picked(column: Any, counts: Sequence[int]) -> Any:
        if isinstance(column, Mapping):
            return {name: picked(part, counts) for name, part in column.items()}
        if not isinstance(column, Tensor):
            return column
        parts = column.split(list(counts))
        return torch.cat([parts[index] for index in kept])

    each: dict[str, Any] = {name: tuple([getattr(minibatches, name)[index] for index in kept]) for name in ("epochs", "counts")}
    each["losses"], each["rows"] = picked(minibatches.losses, [1] * (last + 1)), None
    rows = {name: picked(column, minibatches.counts) for name, column in minibatches._asdict().items() if name not in each}
    return update._replace(minibatches=minibatches._replace(**each, **rows))
