"""Metric groups: the return values of metric functions, and their packing for the host.

    @dataclass(frozen=True, slots=True)
    class Curiosity(MetricGroup):
        bonus: Mean = reports(Metric(key="curiosity/bonus", unit="reward", question="How much does novelty pay?"))

A field's type is its reduction. Groups hold tensors on the device; `pack` stacks a group's slots, and the `SlotLayout` of its signature
turns them into values once they have reached the host. A field that was left out (None) is absent from the record.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, lru_cache
from itertools import compress
from typing import Any, ClassVar, Final, NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt

from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.metric import Declaring, Metric, Rows, declared, label_field
from esper_telemetry.core.record import Histogram, Level
from esper_telemetry.core.reduction import Absent, Array, Counts, Reduction, Statistic, as_reduction

Index = npt.NDArray[np.intp]


class Values(NamedTuple):
    """Values of the rows of one update.

    Attributes:
        values: finite floats by key.
        histograms: histograms by key.
        undefined: number of declared keys without a value.
        unreported: values of NORMAL keys above the level of the run, which derived values of that level may need: `grad/health`
            belongs to MINIMAL, and the norms of layers that it is derived from to NORMAL.
        copies: number of vectors copied from the device.
    """

    values: dict[str, float]
    histograms: dict[str, Histogram]
    undefined: int
    unreported: dict[str, float]
    copies: int = 0

    def united(self, other: Values) -> Values:
        """Return both; the other's value overrides a value with the same key."""
        return Values(
            self.values | other.values,
            self.histograms | other.histograms,
            self.undefined + other.undefined,
            self.unreported | other.unreported,
            self.copies + other.copies,
        )


NO_VALUES: Final = Values({}, {}, 0, {})


class Field(NamedTuple):
    """One field that is present in a group: its reduction, its number of slots, and the edges of a histogram."""

    name: str
    reduction: type[Reduction]
    width: int
    edges: tuple[float, ...] = ()


class RowReader(NamedTuple):
    """One key of a layout: the metric, the columns that hold its slots, and the function from slots to the value."""

    key: str
    metric: Metric
    field: Field
    columns: slice
    statistic: Statistic


@dataclass(frozen=True)
class SlotLayout:
    """The signature of a packed group: rows of the same layout can be merged.

    Attributes:
        group: the group's type.
        labels: the labels of a labelled group, () otherwise.
        fields: the fields that are present, in order.
        constant: per slot, whether it is a plain number.
    """

    group: type
    labels: tuple[str, ...]
    fields: tuple[Field, ...]
    constant: tuple[bool, ...]

    def finish(self, rows: Array, steps: Index, epochs: Index, level: Level = Level.DEBUG) -> Values:
        """Return the values of `level` of a `table` whose rows were measured at optimizer `steps` of `epochs`."""
        window = PackedWindow(self, rows, steps, epochs)
        result: dict[str, float] = {}
        unreported: dict[str, float] = {}
        undefined = 0
        for reader in self.readers:
            reported = reader.metric.level <= level
            if not reported and reader.metric.level > Level.NORMAL:
                continue
            value = window.read(reader)
            if math.isfinite(value) and (value > 0 or not reader.metric.when_positive):
                (result if reported else unreported)[reader.key] = value
            else:
                undefined += reported and not reader.metric.when_positive
        histograms = {
            reader.key: Histogram(reader.field.edges, tuple(counts))
            for reader in self.histograms
            if reader.metric.level <= level and any(counts := window.slots(reader))
        }
        return Values(result, histograms, undefined, unreported)

    def table(self, tensors: Array, numbers: Sequence[float], rows: int) -> Array:
        """Return [rows, labels * slots], every slot in its column, from [tensor slots, rows * labels] and the plain numbers."""
        labels = max(1, len(self.labels))
        table = np.empty((rows, labels, len(self.constant)))
        table[..., self._places[0]] = tensors.reshape(-1, rows, labels).transpose(1, 2, 0)
        table[..., self._places[1]] = numbers
        return table.reshape(rows, -1)

    @property
    def replicated(self) -> bool:
        """True if all ranks measure the same."""
        return bool(self.group.replicated)  # type: ignore[attr-defined]  # every group is a `MetricGroup`

    @property
    def name(self) -> str:
        """Module and name of the group's type."""
        return f"{self.group.__module__}.{self.group.__qualname__}"

    @cached_property
    def fields_text(self) -> str:
        """Text of the fields that is the same in every process."""
        return repr([(name, reduction.__qualname__, width, edges) for name, reduction, width, edges in self.fields])

    @cached_property
    def readers(self) -> tuple[RowReader, ...]:
        """Every scalar key of the layout."""
        return tuple(reader for reader in self._all_readers() if reader.field.reduction is not Counts)

    @cached_property
    def histograms(self) -> tuple[RowReader, ...]:
        """Every histogram key of the layout."""
        return tuple(reader for reader in self._all_readers() if reader.field.reduction is Counts)

    @cached_property
    def blocks(self) -> tuple[tuple[type[Reduction], Index], ...]:
        """Columns of the fields by reduction, [fields, slots]: each block is merged in one call."""
        columns_of: dict[tuple[type[Reduction], int], list[range]] = {}
        for field, start in self._starts():
            for offset in self._label_offsets:
                columns = range(offset + start, offset + start + field.width)
                columns_of.setdefault((field.reduction, field.width), []).append(columns)
        return tuple((reduction, np.array(columns)) for (reduction, _), columns in columns_of.items())

    def _all_readers(self) -> Iterator[RowReader]:
        present = {field.name: (field, start) for field, start in self._starts()}
        name = label_field(self.group)
        for item, metric in declared(self.group):
            if item.name in present:
                field, start = present[item.name]
                for offset, text in zip(self._label_offsets, self.labels or ("",), strict=True):
                    columns = slice(offset + start, offset + start + field.width)
                    key = metric.key.replace(f"{{{name}}}", text)
                    statistics = field.reduction.statistics
                    # a histogram lacks statistics: it is read as a whole
                    first = next(iter(statistics.values()), lambda _: math.nan)
                    statistic = statistics[metric.of] if metric.of else first
                    yield RowReader(key, metric, field, columns, statistic)

    def _starts(self) -> Iterator[tuple[Field, int]]:
        start = 0
        for field in self.fields:
            yield field, start
            start += field.width

    @cached_property
    def _label_offsets(self) -> range:
        width = len(self.constant)
        return range(0, width * max(1, len(self.labels)), width) if width else range(0)

    @cached_property
    def _places(self) -> tuple[Index, Index]:
        """Positions of the slots that are tensors, and of the plain numbers."""
        constant = np.array(self.constant, dtype=bool)
        return np.flatnonzero(~constant), np.flatnonzero(constant)


class PackedWindow:
    """Rows of one layout within one update."""

    def __init__(self, layout: SlotLayout, rows: Array, steps: Index, epochs: Index) -> None:
        self._rows = rows
        self._steps = steps
        self._epochs = epochs
        self._all = merge(layout, rows)
        self._selected: dict[Rows, Array] = {Rows.ALL: rows}

    def read(self, reader: RowReader) -> float:
        """Return the value of one key; NaN if it is undefined."""
        metric, columns = reader.metric, reader.columns
        if metric.over == "merge" and metric.rows is Rows.ALL:
            return reader.statistic(self._all[columns])
        if metric.rows not in self._selected:
            self._selected[metric.rows] = self._rows[_select(metric.rows, self._steps, self._epochs)]
        slots = self._selected[metric.rows][:, columns]
        if metric.over == "merge":
            return reader.statistic(_merge_key(reader, slots)) if len(slots) else math.nan
        if metric.over == "slope":
            epochs = self._epochs[_select(metric.rows, self._steps, self._epochs)]
            y = np.array([reader.statistic(_merge_key(reader, slots[epochs == epoch])) for epoch in np.unique(epochs)])
            x = np.arange(len(y)) - (len(y) - 1) / 2
            return float(x @ y / (x @ x)) if len(y) > 1 else math.nan
        defined = [value for row in slots.tolist() if not math.isnan(value := reader.statistic(row))]
        return (max if metric.over == "max" else min)(defined, default=math.nan)

    def slots(self, reader: RowReader) -> list[float]:
        """Return the slots of one key, merged over all rows."""
        return self._all[reader.columns]


def merge(layout: SlotLayout, rows: Array) -> list[float]:
    """Merge [rows, columns] into one row."""
    if len(rows) == 1:
        return list(rows[0].tolist())
    merged = np.empty(rows.shape[1])
    for reduction, columns in layout.blocks:
        merged[columns] = reduction.merge(rows[:, columns])
    return list(merged.tolist())


def _merge_key(reader: RowReader, slots: Array) -> list[float]:
    """Merge one key's [rows, slots]; a single row is returned as it is."""
    merged = slots[0] if len(slots) == 1 else reader.field.reduction.merge(slots[:, None])[0]
    return list(merged.tolist())


def _select(rows: Rows, steps: Index, epochs: Index) -> Any:
    """Return the mask of the rows of an update from which a metric is read."""
    if rows is Rows.ALL:
        return np.ones(len(steps), dtype=bool)
    if rows is Rows.FIRST:
        return steps == 0
    if rows is Rows.AFTER_STEP:
        return steps > 0
    last = epochs == epochs.max()
    return last if rows is Rows.LAST_EPOCH else last & (steps > 0)


class MetricGroup(Declaring):
    """Base of all groups; subclasses are frozen, slotted dataclasses whose fields declare the metrics they report.

    Attributes:
        replicated: True if all ranks measure the same, such as norms of summed gradients: rank 0 reports. Otherwise ranks are merged.
    """

    __slots__ = ()
    replicated: ClassVar[bool] = False

    def values(self) -> dict[str, float]:
        """Return this group's values, for tests and notebooks; reads the device."""
        packed = pack(self)
        steps = np.arange(packed.rows)
        return packed.layout.finish(packed.table(), steps, np.zeros_like(steps)).values


class Postponed:
    """A measurement of one minibatch that is summarised together with the other minibatches when the update ends.

    It holds copies and is validated when it is made, so later changes do not affect it. The forty small operations of
    `gradient_health`, for example, then run once per update instead of once per minibatch.
    """

    __slots__ = ()

    def __iter__(self) -> Iterator[MetricGroup]:
        """Iterate over the groups of only this measurement."""
        return iter(self.together([self]))

    @property
    def kind(self) -> Hashable:
        """Key of the measurements that are summarised together."""
        raise NotImplementedError

    @classmethod
    def together(cls, measurements: Sequence[Self]) -> Iterable[MetricGroup]:
        """Return the groups of measurements of one kind, with a row for each measurement."""
        raise NotImplementedError


@lru_cache(maxsize=1024)
def _field_names(group: type) -> tuple[str, ...]:
    if not is_dataclass(group):
        raise TypeError(f"{group.__name__} must be a dataclass: decorate it with @dataclass(frozen=True, slots=True)")
    return tuple(item.name for item in fields(group) if "metrics" in item.metadata)


Kind = tuple[type[Reduction], int, tuple[float, ...]]
"""A field's reduction, its number of slots and the edges of its histogram."""


class Packed(NamedTuple):
    """One group in a form that is copied to the host in one piece.

    Attributes:
        layout: positions of the slots.
        tensors: [tensor slots, rows * labels] float64, on the device; a copy.
        numbers: the slots that are plain numbers.
        rows: number of optimizer steps at which the group was measured.
    """

    layout: SlotLayout
    tensors: Tensor
    numbers: tuple[float, ...]
    rows: int

    def table(self) -> Array:
        """Return the slots as [rows, labels * slots] on the host; waits for the device."""
        return self.layout.table(self.tensors.cpu().numpy(), self.numbers, self.rows)


@no_grad
def pack(group: MetricGroup) -> Packed:
    """Return the group's slots in one tensor on their device; copies, never synchronises.

    Groups are packed when they are observed: their owner may change a tensor before the update ends.

    Raises:
        TypeError: for a group that is not a dataclass, or a field that is not a number, tensor or reduction.
        ValueError: for tensors whose shapes do not fit together.
    """
    kind: type = type(group)
    kinds: list[Kind] = []
    slots: list[Tensor | float] = []
    for name in _field_names(kind):
        value = getattr(group, name)
        reduction = value if isinstance(value, Reduction) else as_reduction(value, where=f"{kind.__name__}.{name}")
        columns = reduction.slots()
        kinds.append((type(reduction), len(columns), getattr(reduction, "edges", ())))
        slots.extend(columns)
    # once, with torch's own type: a policy with 50 heads has hundreds of slots
    constant = tuple([not isinstance(slot, torch.Tensor) for slot in slots])
    label = label_field(kind)
    names = getattr(group, label) if label else ()
    layout = _layout(kind, (names,) if isinstance(names, str) else tuple(names), tuple(kinds), constant)
    tensors = [cast(Tensor, slot) for slot, is_number in zip(slots, constant, strict=True) if not is_number]
    stacked, rows = _stack_slots(tensors, layout.labels)
    return Packed(layout, stacked, tuple(map(float, compress(slots, constant))), rows)


@lru_cache(maxsize=1024)
def _layout(group: type, labels: tuple[str, ...], kinds: tuple[Kind, ...], constant: tuple[bool, ...]) -> SlotLayout:
    names = _field_names(group)
    present = [
        Field(name, reduction, width, edges)
        for name, (reduction, width, edges) in zip(names, kinds, strict=True)
        if reduction is not Absent
    ]
    return SlotLayout(group, labels, tuple(present), constant)


def _stack_slots(tensors: list[Tensor], labels: tuple[str, ...]) -> tuple[Tensor, int]:
    """Return tensors of [], [rows] or, under labels, [labels] and [rows, labels] as [tensors, rows * labels], and the number of rows."""
    if not tensors:
        return torch.empty(0, 1, dtype=torch.float64), 1
    shape = _shape([tensor.shape for tensor in tensors], labels)
    same = [tensor if tensor.shape == shape else tensor.expand(shape) for tensor in tensors]
    stacked = torch.stack(same).to(torch.float64).view(len(same), -1)
    return stacked, stacked.shape[1] // max(1, len(labels))


def _shape(shapes: list[torch.Size], labels: tuple[str, ...]) -> torch.Size:
    """Return the common shape, with the labels as last axis. torch.broadcast_shapes would import SymPy, which takes 0.5 s."""
    distinct = set(shapes) | ({torch.Size([len(labels)])} if labels else set())
    try:
        shape = distinct.pop() if len(distinct) == 1 else torch.Size(np.broadcast_shapes(*distinct))
    except ValueError:
        raise ValueError(f"the slots of a group must have one shape, got {sorted(map(list, distinct))}") from None
    if len(shape) > (2 if labels else 1) or (labels and shape[-1] != len(labels)):
        raise ValueError(f"slots must be 0-d or [rows]{' of [labels]' if labels else ''}, got shape {list(shape)}")
    return shape
