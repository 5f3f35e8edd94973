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

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Derived, Metric, MetricFamily, declared

DECLARING_PACKAGES = ("esper_telemetry.metrics", "esper_telemetry.history", "esper_telemetry.alarms")
ENTRY_POINT_GROUP = "esper_telemetry.metrics"

_logger = logging.getLogger("esper_telemetry")


@lru_cache(maxsize=1)
def catalogue() -> tuple[Metric, ...]:
    """Return all declared metrics by number, those of plugins without a number last; of several with one key the first."""
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


def family_name(key: str) -> str:
    """Return the family of a key: its first segment."""
    return key.partition("/")[0]


@lru_cache(maxsize=1)
def declaring_modules() -> tuple[ModuleType, ...]:
    """Return every module that may declare metrics."""
    packages = [importlib.import_module(name) for name in DECLARING_PACKAGES]
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        try:
            packages.append(entry.load())
        except Exception as error:  # a broken plugin costs its metrics their descriptions, never the run
            _logger.warning("the metrics of the plugin %r (%s) cannot be loaded: %s", entry.name, entry.value, error)
    modules: list[ModuleType] = []
    for package in packages:
        inner = pkgutil.walk_packages(getattr(package, "__path__", ()), package.__name__ + ".")
        modules += [package, *(importlib.import_module(info.name) for info in inner)]
    return tuple(modules)
