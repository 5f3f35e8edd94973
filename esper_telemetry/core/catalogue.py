"""The catalogue: every metric and family that this package and installed plugins declare.

Modules are named here or registered by plugins, and are imported when the catalogue is first read:

    [project.entry-points."esper_telemetry.metrics"]
    curiosity = "my_package.metrics"        # a module, or a package whose modules declare metric groups
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from functools import lru_cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Final

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Derived, Metric, MetricFamily, declared
from esper_telemetry.core.redaction import error_line

DECLARING_PACKAGES = (
    "esper_telemetry.metrics",
    "esper_telemetry.equations",
    "esper_telemetry.history",
    "esper_telemetry.alarms",
)
ENTRY_POINT_GROUP = "esper_telemetry.metrics"

RELEASES: Final = {
    "0.1.0": (
        "101-128 131-140 151-157 161-164 171-175 181-183 191 196 201-217 225 301-315 321-322 341 401-413 421-423 431-438 441-446 500-518 "
        "520-525 530-535 541-553 560-563 570-575 590 600-610 701-705 711-715 721-724 731-735 741-745 751-759 761-766 801-807 900-914 "
        "918-919 921-938 941-946 950-963 970-980 990-991 1500-1508 1510-1515 1522-1525 1533-1534 1551 1557 1581-1586 1620-1621 1623 1626 "
        "1628 1632-1633 1635-1637 1641 1644 1649 1655 1687-1697"
    ),
    "0.2.0": "808-810 840-841 850 860-868 981-985 1587-1590",
    "0.3.0": (
        "176 184-186 526-527 536 611 986-987 1101-1107 1111-1112 1121-1127 1131-1132 1141-1145 1151-1157 1161-1169 1171-1173 1591 1698"
    ),
}
"""Numbers of the metrics that each release added; a number is never given to another metric."""

_logger = logging.getLogger("esper_telemetry")


@lru_cache(maxsize=1)
def catalogue() -> tuple[Metric, ...]:
    """Return all declared metrics by number; metrics of plugins without a number come last. If several share a key, the first counts."""
    metrics: dict[str, Metric] = {}
    for group in groups():
        for _, metric in declared(group):
            if metrics.setdefault(metric.key, metric) is not metric:
                _logger.warning("%s declares the metric %r again; it is ignored", group.__module__, metric.key)
    return tuple(sorted(metrics.values(), key=lambda metric: metric.number or float("inf")))


def groups() -> tuple[type, ...]:
    """Return the types that declare metrics, measured and derived, in the order of their modules."""
    bases = (MetricGroup, Derived)
    return tuple(
        value
        for module in declaring_modules()
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, bases)
        and value not in bases
        and value.__module__ == module.__name__
    )


@lru_cache(maxsize=1)
def families() -> dict[str, MetricFamily]:
    """Return the declared families by name, in the order of their places."""
    values = [
        value for module in declaring_modules() for value in vars(module).values() if isinstance(value, MetricFamily)
    ]
    return {family.name: family for family in sorted(values, key=lambda family: family.place)}


@lru_cache(maxsize=1)
def released() -> dict[int, str]:
    """Return the release that added each number."""
    ends = {release: [part.split("-") for part in numbers.split()] for release, numbers in RELEASES.items()}
    return {
        n: release for release, parts in ends.items() for part in parts for n in range(int(part[0]), int(part[-1]) + 1)
    }


def since(metric: Metric) -> str:
    """Return the release that added a metric, or `unreleased`; empty for metrics of user code."""
    return released().get(metric.number, "unreleased") if metric.number else ""


def family_name(key: str) -> str:
    """Return the family of a key: its first segment."""
    return key.partition("/")[0]


@lru_cache(maxsize=1)
def declaring_modules() -> tuple[ModuleType, ...]:
    """Return every module that may declare metrics."""
    modules = [module for name in DECLARING_PACKAGES for module in _with_submodules(importlib.import_module(name))]
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        try:
            modules += _with_submodules(entry.load())
        except (
            Exception,
            SystemExit,
        ) as error:  # a broken plugin loses the descriptions of its metrics, but the run continues
            _logger.warning(
                "the metrics of the plugin %r (%s) cannot be loaded: %s", entry.name, entry.value, error_line(error)
            )
    return tuple(modules)


def _with_submodules(package: ModuleType) -> list[ModuleType]:
    inner = pkgutil.walk_packages(getattr(package, "__path__", ()), package.__name__ + ".")
    return [package, *(importlib.import_module(info.name) for info in inner)]
