"""Declarations of metrics: key, name, meaning, bounds, and how the value is read from its field.

A field of a group declares what it reports, so that a key is spelled in one place:

    kl: Mean = reports(
        Metric.nats("policy/kl", 101, "KL divergence")
        .asks("How far did the policy move?")
        .bounds(healthy="0.002 to 0.02", warn="> 0.03", source="Schulman 2020"),
        Metric.nats("policy/kl_max", 102, "largest KL divergence", over="max").asks("How far at its worst?"),
    )

Groups of tensors (`core.group`) have reductions as their fields. Groups of plain numbers are `Derived`, computed on the host from history
or by telemetry itself: they hold `float | None`, or under a label one array per field:

    @dataclass(frozen=True, slots=True)
    class Drift(Derived):
        key: tuple[str, ...] = label()
        drift: Array | None = reports(Metric(key="{key}/drift", unit="ln", question="How far off its average?"))

The catalogue has every metric and family that this package and installed plugins declare. Modules are named here or registered by plugins,
and are imported when the catalogue is first read:

    [project.entry-points."esper_telemetry.metrics"]
    curiosity = "my_package.metrics"        # a module, or a package whose modules declare metric groups
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import pkgutil
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, ClassVar, Final, Literal, Protocol, Self, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from esper_telemetry.core.record import Level, MetricInfo, check_key
from esper_telemetry.core.redaction import error_line

Cost = Literal["free", "update", "sampled", "debug"]
Over = Literal["merge", "max", "min", "slope"]


class Rows(Enum):
    """Optimizer steps of an update from which a metric is read."""

    ALL = "all"
    FIRST = "before the first step"
    AFTER_STEP = "after at least one step"
    LAST_EPOCH = "last epoch"
    LAST_EPOCH_AFTER_STEP = "last epoch, after at least one step"


class Reading(TypedDict, total=False):
    """Attributes of `Metric` that its constructors take by keyword."""

    unit: str
    of: str
    over: Over
    rows: Rows
    low: float | None
    high: float | None
    level: Level
    cost: Cost
    when_positive: bool


class _Factory(Protocol):
    def __call__(self, key: str, number: int, name: str, **reading: Unpack[Reading]) -> Metric: ...


def _factory(kind: str, **fixed: Unpack[Reading]) -> _Factory:
    """Return a function that returns metrics with these attributes, unless its caller gives others."""

    def factory(key: str, number: int, name: str, **reading: Unpack[Reading]) -> Metric:
        return Metric(key=key, number=number, name=name, **(fixed | reading))

    factory.__doc__ = f"Return {kind}."
    return staticmethod(factory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One declared key.

    Its kinds, such as `Metric.fraction(key, number, name)` and `Metric.std(...)`, set unit and range; they take the attributes of `Reading`
    by keyword.

    Attributes:
        key: canonical name; one segment may be a label in braces, such as `policy/head/{head}/kl`.
        number: stable, unique number of the catalogue entry `TELE-<number>`; 0 for metrics of user code.
        name: display name, unique in the catalogue.
        unit: unit of the value.
        question: the question that a chart of the metric answers.
        of: statistic of the field's reduction; empty for its first one.
        over: `merge` reduces the merged rows; `max` and `min` take the extreme of the rows' own statistics; `slope` is the least-squares
            slope of the epochs' statistics against the epoch index.
        rows: the optimizer steps that count.
        low, high: range of the value; None if it is unbounded.
        level: lowest level at which it is reported.
        cost: class of its cost.
        healthy, warn, critical: bounds in words and numbers, as a dashboard shows them.
        source: paper, code or measurement behind the bounds.
        undefined: condition under which the key is absent, "" if it never is; None stands for the condition of its group.
        when_positive: report the value only if it is above zero (for counts of rare events).
        advice: what to try when the value leaves its bounds and is not covered by an alarm.
        changes: changes of its meaning or bounds, each with the release.
    """

    key: str
    number: int = 0
    name: str = ""
    unit: str
    question: str = ""
    of: str = ""
    over: Over = "merge"
    rows: Rows = Rows.ALL
    low: float | None = None
    high: float | None = None
    level: Level = Level.NORMAL
    cost: Cost = "free"
    healthy: str = ""
    warn: str = ""
    critical: str = ""
    source: str = ""
    undefined: str | None = None
    when_positive: bool = False
    advice: str = ""
    changes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_key(re.sub(r"\{[a-z_]+\}", "x", self.key))

    quantity = _factory("a metric of the unit that `reading` names")
    magnitude = _factory("a metric from 0, of the unit that `reading` names", low=0.0)
    std = _factory("the standard deviation of the values of a field", low=0.0, of="std")
    correlation = _factory("a correlation, from -1 to 1", low=-1.0, high=1.0)
    fraction = _factory("a fraction, from 0 to 1", unit="fraction", low=0.0, high=1.0)
    count = _factory("a count, from 0", unit="count", low=0.0)
    ratio = _factory("a ratio of magnitudes, from 0", unit="ratio", low=0.0)
    nats = _factory("an entropy or a divergence in nats, from 0", unit="nats", low=0.0)
    steps = _factory("a number of environment steps, from 0", unit="steps", low=0.0)
    milliseconds = _factory("a duration in milliseconds", unit="ms", low=0.0)
    gradient_norm = _factory("a norm of gradients, from 0", unit="gradient norm", low=0.0)
    cosine = _factory("a cosine, from -1 to 1", unit="cosine", low=-1.0, high=1.0)
    severity = _factory("a severity, from 0 to 1", unit="severity", low=0.0, high=1.0)
    accuracy = _factory("an accuracy, from 0 to 1", unit="accuracy", low=0.0, high=1.0)

    @staticmethod
    def nonfinite(key: str, number: int, name: str) -> Metric:
        """Return the number of inputs of `<key>` that were NaN or infinite and left out, for a key `<key>_nonfinite`."""
        metric = Metric.count(key, number, name, level=Level.MINIMAL, when_positive=True)
        return metric.bounds(healthy="absent", critical="> 0").absent("none was")

    def asks(self, question: str) -> Self:
        """Return the metric with the question that its chart answers."""
        return replace(self, question=question)

    def bounds(self, *, healthy: str = "", warn: str = "", critical: str = "", source: str = "") -> Self:
        """Return the metric with its bounds and their source."""
        return replace(self, healthy=healthy, warn=warn, critical=critical, source=source)

    def absent(self, undefined: str) -> Self:
        """Return the metric with the condition under which it is absent."""
        return replace(self, undefined=undefined)

    def advises(self, advice: str) -> Self:
        """Return the metric with the advice for values outside its bounds."""
        return replace(self, advice=advice)

    def changed(self, *changes: str) -> Self:
        """Return the metric with the changes of its meaning or bounds, such as `0.3.0: bounds hold under a condition`."""
        return replace(self, changes=changes)

    @property
    def id(self) -> str:
        """`TELE-<number>`; empty for metrics of user code."""
        return f"TELE-{self.number:03d}" if self.number else ""

    def info(self, reduction: str = "") -> MetricInfo:
        """Return the description for the journal."""
        rows = "" if self.rows is Rows.ALL else f", {self.rows.value}"
        over = "" if self.over == "merge" else f", {self.over} over minibatches"
        return MetricInfo(
            name=self.name,
            action=self.advice,
            unit=self.unit,
            question=self.question,
            id=self.id,
            low=self.low,
            high=self.high,
            healthy=self.healthy,
            warn=self.warn,
            critical=self.critical,
            source=self.source,
            undefined=self.undefined or "",
            reduction=f"{self.of or reduction}{over}{rows}",
            level=self.level.name.lower(),
            cost=self.cost,
        )


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """The metrics whose keys begin with the same segment, declared as a module constant next to them.

    Attributes:
        name: that segment.
        title: heading in documentation and dashboards.
        about: explanation for readers who are new to the family.
        place: order among the families, smallest first.
        question: the question that its section of a dashboard answers.
        axis: x-axis of its charts.
        first: keys to look at first.
        reproducible: False if its values depend on the machine and on telemetry, so that they differ between two equal runs.
    """

    name: str
    title: str
    about: str
    place: int
    question: str = ""
    axis: str = "axis/update"
    first: tuple[str, ...] = ()
    reproducible: bool = True


def reports(*metrics: Metric) -> Any:
    """Return a dataclass field whose value is reported under the keys of `metrics`; its default is None, which reports nothing."""
    return dataclasses.field(default=None, metadata={"metrics": metrics})


def label() -> Any:
    """Return a dataclass field for the label, or the tuple of labels, that replaces `{field name}` in the group's keys."""
    return dataclasses.field(metadata={"label": True})


class Declaring:
    """Base of the types that declare metrics.

    Keywords of the class hold for each of its metrics that does not say otherwise: `class Curiosity(MetricGroup, absent="no novelty")`.
    """

    __slots__ = ()
    _common: ClassVar[tuple[str, Cost, Level]] = ("", "free", Level.NORMAL)

    def __init_subclass__(cls, *, absent: str = "", cost: Cost = "free", level: Level = Level.NORMAL) -> None:
        if (absent, cost, level) != Declaring._common:
            cls._common = (absent, cost, level)


def declared(group: type) -> Iterator[tuple[dataclasses.Field[Any], Metric]]:
    """Yield every metric that a group type declares, with what it leaves to the group, and the field that holds it, in order."""
    absent, cost, level = group._common  # type: ignore[attr-defined]  # every group is `Declaring`
    for item in dataclasses.fields(group):
        for metric in item.metadata.get("metrics", ()):
            completed = replace(
                metric,
                undefined=absent if metric.undefined is None else metric.undefined,
                cost=cost if metric.cost == "free" else metric.cost,
                level=level if metric.level is Level.NORMAL else metric.level,
            )
            yield item, completed


def label_field(group: type) -> str | None:
    """Return the name of the field that labels a group type; None without one."""
    names = [item.name for item in dataclasses.fields(group) if item.metadata.get("label")]
    return names[0] if names else None


def segment(name: str) -> str:
    """Return `name` as a legal segment of a key: `trunk.0.weight` becomes `trunk_0_weight`."""
    return re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_") or "_"


Array = npt.NDArray[np.float64]


class Derived(Declaring):
    """Base of all groups of plain numbers.

    Attributes:
        sources: keys of records that the numbers are computed from.
    """

    __slots__ = ()
    sources: ClassVar[tuple[str, ...]] = ()

    def values(self, level: Level = Level.DEBUG) -> dict[str, float]:
        """Return the defined numbers of `level` by key; None, NaN and infinities are absent."""
        kind: type = type(self)
        name, metrics = _declaration(kind)
        numbers: dict[str, float] = {}
        for field, metric in metrics:
            value = getattr(self, field)
            if value is not None and metric.level <= level:
                numbers |= {
                    key: number
                    for key, number in _labelled(self, name, metric.key, value)
                    if math.isfinite(number) and (number > 0 or not metric.when_positive)
                }
        return numbers


@lru_cache(maxsize=256)
def _declaration(group: type) -> tuple[str | None, tuple[tuple[str, Metric], ...]]:
    """Return the name of a type's label, and its metrics with the names of their fields."""
    return label_field(group), tuple((item.name, metric) for item, metric in declared(group))


def _labelled(group: Derived, name: str | None, key: str, value: float | Sequence[float] | Array) -> Iterator[tuple[str, float]]:
    """Yield the keys of one field with their numbers: one for a plain number, one per label otherwise."""
    if name is None:
        yield key, float(value)  # type: ignore[arg-type]  # fields of groups without a label are plain numbers
        return
    labels = getattr(group, name)
    names = (labels,) if isinstance(labels, str) else labels
    for text, number in zip(names, np.atleast_1d(np.asarray(value, dtype=np.float64)).tolist(), strict=True):
        yield key.replace(f"{{{name}}}", text), number


DECLARING_PACKAGES = ("esper_telemetry.metrics", "esper_telemetry.equations", "esper_telemetry.history", "esper_telemetry.alarms")
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
    return tuple(
        value
        for module in declaring_modules()
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Declaring) and value.__module__ == module.__name__
    )


@lru_cache(maxsize=1)
def families() -> dict[str, MetricFamily]:
    """Return the declared families by name, in the order of their places."""
    values = [value for module in declaring_modules() for value in vars(module).values() if isinstance(value, MetricFamily)]
    return {family.name: family for family in sorted(values, key=lambda family: family.place)}


@lru_cache(maxsize=1)
def released() -> dict[int, str]:
    """Return the release that added each number."""
    ends = {release: [part.split("-") for part in numbers.split()] for release, numbers in RELEASES.items()}
    return {n: release for release, parts in ends.items() for part in parts for n in range(int(part[0]), int(part[-1]) + 1)}


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
        except (Exception, SystemExit) as error:  # a broken plugin loses the descriptions of its metrics, but the run continues
            _logger.warning("the metrics of the plugin %r (%s) cannot be loaded: %s", entry.name, entry.value, error_line(error))
    return tuple(modules)


def _with_submodules(package: ModuleType) -> list[ModuleType]:
    inner = pkgutil.walk_packages(getattr(package, "__path__", ()), package.__name__ + ".")
    return [package, *(importlib.import_module(info.name) for info in inner)]
