"""Groups of plain numbers, computed on the host from history or by telemetry itself.

They are frozen dataclasses declared like metric groups, but hold `float | None`, or under a label one array per field:

    @dataclass(frozen=True, slots=True)
    class Drift(Derived):
        key: tuple[str, ...] = label()
        drift: Array | None = reports(Metric(key="{key}/drift", unit="ln", question="How far off its average?"))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from esper_telemetry.core.metric import Metric, declared, label_field
from esper_telemetry.core.record import Level

Array = npt.NDArray[np.float64]


class Derived:
    """Base of all groups of plain numbers."""

    __slots__ = ()

    def values(self, level: Level = Level.DEBUG) -> dict[str, float]:
        """Return the defined numbers of `level` by key; None, NaN and infinities are absent."""
        kind: type = type(self)
        return dict(_items(self, _declaration(kind), level))


class _Declaration(NamedTuple):
    """A type's label and its fields with their metrics."""

    label: str | None
    fields: tuple[tuple[str, Metric], ...]


@lru_cache(maxsize=256)
def _declaration(group: type) -> _Declaration:
    return _Declaration(label_field(group), tuple((item.name, metric) for item, metric in declared(group)))


def _items(group: Derived, declaration: _Declaration, level: Level) -> Iterator[tuple[str, float]]:
    for name, metric in declaration.fields:
        value = getattr(group, name)
        if value is None or metric.level > level:
            continue
        for key, number in _labelled(group, declaration.label, metric.key, value):
            if math.isfinite(number) and (number > 0 or not metric.when_positive):
                yield key, number


def _labelled(
    group: Derived, name: str | None, key: str, value: float | Sequence[float] | Array
) -> Iterator[tuple[str, float]]:
    """Yield the keys of one field with their numbers: one for a plain number, one per label otherwise."""
    if name is None:
        yield key, float(value)  # type: ignore[arg-type]  # fields of groups without a label are plain numbers
        return
    labels = getattr(group, name)
    names = (labels,) if isinstance(labels, str) else labels
    for text, number in zip(names, np.atleast_1d(np.asarray(value, dtype=np.float64)).tolist(), strict=True):
        yield key.replace(f"{{{name}}}", text), number
