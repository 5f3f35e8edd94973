"""Every declared metric as data: what documentation, dashboards and the wiring test are made from."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import ModuleType

from esper_telemetry import detectors, metrics, series
from esper_telemetry.derived import Derived
from esper_telemetry.group import MetricGroup
from esper_telemetry.metric import Metric, declared


@lru_cache(maxsize=1)
def catalogue() -> tuple[Metric, ...]:
    """All metrics that the package declares, by number.

    Raises:
        ValueError: where two metrics share a key or a number, or one has no number.
    """
    found = tuple(sorted(_declared_in((metrics, series, detectors)), key=lambda metric: metric.number))
    _check_unique("key", [metric.key for metric in found])
    _check_unique("number", [metric.number for metric in found])
    _check_numbered(found)
    return found


def groups() -> tuple[type, ...]:
    """The types that declare metrics, measured and derived, in the order of their modules."""
    return tuple(_groups((metrics, series, detectors)))


def _declared_in(packages: Iterable[ModuleType]) -> Iterator[Metric]:
    for group in _groups(packages):
        for _, metric in declared(group):
            yield metric


def _groups(packages: Iterable[ModuleType]) -> Iterator[type]:
    for package in packages:
        for module in _modules(package):
            for item in vars(module).values():
                if _is_group(item) and item.__module__ == module.__name__:
                    yield item


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    yield package
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        yield importlib.import_module(info.name)


def _is_group(item: object) -> bool:
    return isinstance(item, type) and issubclass(item, MetricGroup | Derived) and item not in (MetricGroup, Derived)


def _check_unique(what: str, values: Iterable[object]) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"two metrics have the {what} {value!r}")
        seen.add(value)


def _check_numbered(found: Iterable[Metric]) -> None:
    for metric in found:
        if not metric.number:
            raise ValueError(f"{metric.key} has no number")
