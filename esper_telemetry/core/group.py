"""Metric groups: the return values of metric functions, and their packing for the host.

    @dataclass(frozen=True, slots=True)
    class Curiosity(MetricGroup):
        bonus: Mean = reports(Metric(key="curiosity/bonus", unit="reward", question="How much does novelty pay?"))

A field's type is its reduction. Groups hold tensors on the device; `pack` stacks a group's slots, and the `SlotLayout` of its signature
turns them into values once they have reached the host. A field that was left out (None) is absent from the record.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, Self

import numpy as np

from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.metric import Metric, Rows, label, label_field, reports
from esper_telemetry.core.packing import Field, SlotLayout, Values
from esper_telemetry.core.reduction import (
    Absent,
    Array,
    Counts,
    Ess,
    Last,
    Max,
    Mean,
    Min,
    Moments,
    Reduction,
    Sum,
    as_reduction,
)

__all__ = [
    "Counts",
    "Ess",
    "Last",
    "Max",
    "Mean",
    "Metric",
    "MetricGroup",
    "Min",
    "Moments",
    "Postponed",
    "Rows",
    "SlotLayout",
    "Sum",
    "Values",
    "label",
    "pack",
    "reports",
]


class MetricGroup:
    """Base of all groups; subclasses are frozen, slotted dataclasses whose fields declare the metrics they report.

    Attributes:
        replicated: True where all ranks measure the same, such as norms of summed gradients: rank 0 reports. Otherwise ranks are merged.
    """

    __slots__ = ()
    replicated: ClassVar[bool] = False

    def values(self) -> dict[str, float]:
        """Return this group's values, for tests and notebooks; reads the device."""
        packed = pack(self)
        steps = np.arange(packed.rows)
        return packed.layout.finish(packed.table(), steps, np.zeros_like(steps)).values


class Postponed:
    """A measurement of one minibatch that is summarised with those of the other minibatches when the update ends.

    It holds copies and was validated when it was made: nothing later changes it or raises. The forty small operations of
    `gradient_health`, for one, run once per update instead of once per minibatch.
    """

    __slots__ = ()

    def __iter__(self) -> Iterator[MetricGroup]:
        """Iterate over the groups of this measurement alone."""
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
        layout: places of the slots.
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
        TypeError: for a group that is no dataclass or a field that is no number, tensor or reduction.
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
    constant = tuple([not isinstance(slot, Tensor) for slot in slots])
    label = label_field(kind)
    names = getattr(group, label) if label else ()
    layout = _layout(kind, (names,) if isinstance(names, str) else tuple(names), tuple(kinds), constant)
    tensors = [slot for slot in slots if isinstance(slot, Tensor)]
    stacked, rows = _stacked(tensors, layout.labels)
    return Packed(layout, stacked, tuple([float(slot) for slot in slots if not isinstance(slot, Tensor)]), rows)


@lru_cache(maxsize=1024)
def _layout(group: type, labels: tuple[str, ...], kinds: tuple[Kind, ...], constant: tuple[bool, ...]) -> SlotLayout:
    names = _field_names(group)
    present = [
        Field(name, reduction, width, edges)
        for name, (reduction, width, edges) in zip(names, kinds, strict=True)
        if reduction is not Absent
    ]
    return SlotLayout(group, labels, tuple(present), constant)


def _stacked(tensors: list[Tensor], labels: tuple[str, ...]) -> tuple[Tensor, int]:
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
