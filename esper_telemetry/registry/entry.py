"""One metric with everything that is known of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from esper_telemetry.alarms import NONFINITE, AlarmType, alarms_reading
from esper_telemetry.catalogue import catalogue, groups
from esper_telemetry.derived import Derived
from esper_telemetry.metric import Metric, declared
from esper_telemetry.record import Level, MetricInfo
from esper_telemetry.registry.advice import ADVICE
from esper_telemetry.registry.families import chapter_of
from esper_telemetry.registry.names import name_of
from esper_telemetry.series.temporal import histories
from esper_telemetry.sinks.console import COLUMNS

REDUCTIONS = {
    "Mean": "mean",
    "Sum": "sum",
    "Min": "minimum",
    "Max": "maximum",
    "Moments": "merged moments",
    "Ess": "merged sums",
    "Counts": "histogram",
    "Quantiles": "quantile",
    "Last": "last value",
}
"""By the type of the field, whose name its annotation begins with."""

ON_CONSOLE = {key for column in COLUMNS for key in column.keys}
VERIFIED = Path(__file__).with_name("verified.json")
"""Tests by key, as `docs/glossary.py` finds them."""
PRIORITIES = ("critical", "high", "normal", "detail")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the registry.

    Attributes:
        metric: as it is declared.
        name: what people call it.
        category: its family's title.
        priority: `critical` decides whether a run is wrong for certain, `high` is a headline, `normal` has bounds or feeds an alarm,
            `detail` is read beside others.
        reduction: how the rows of an update become one number.
        alarms: those that read it.
        sinks: by sink, in which form it is carried.
        series: the endings under which it has a history, `{key}/ema` for one.
        verified: tests that check its value: cases of exact arithmetic, and files.
    """

    metric: Metric
    name: str
    category: str
    priority: str
    reduction: str
    alarms: tuple[AlarmType, ...]
    sinks: dict[str, str]
    series: tuple[str, ...] = ()
    verified: tuple[str, ...] = ()

    @property
    def action(self) -> str:
        """What to try when the value is not normal; empty where nobody knows what is."""
        return self.alarms[0].action if self.alarms else ADVICE.get(self.metric.key, "")

    def info(self) -> MetricInfo:
        """The description that travels in the journal."""
        return replace(
            self.metric.info(),
            name=self.name,
            category=self.category,
            priority=self.priority,
            headline=_headline(self.metric.key),
            reduction=self.reduction,
            alarms=", ".join(alarm.type for alarm in self.alarms),
            action=self.action,
            series=", ".join(self.series),
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain values for programs."""
        info = self.info()
        described = {item.name: getattr(info, item.name) for item in fields(info)}
        lists = {
            "alarms": [alarm.type for alarm in self.alarms],
            "series": list(self.series),
            "verified": list(self.verified),
        }
        return {"key": self.metric.key, **described, **lists, "sinks": self.sinks}


@lru_cache(maxsize=1)
def registry() -> tuple[Entry, ...]:
    """Every declared metric, by number."""
    reductions, tests = dict(_reductions()), json.loads(VERIFIED.read_text(encoding="utf-8"))
    return tuple(_entry(metric, reductions[metric.key], tests.get(metric.key, ())) for metric in catalogue())


def _entry(metric: Metric, reduction: str, tests: Iterable[str]) -> Entry:
    alarms = alarms_reading(metric.key)
    return Entry(
        metric=metric,
        name=name_of(metric.key),
        category=chapter_of(metric.key).title,
        priority=_priority(metric, alarms),
        reduction=metric.info(reduction).reduction,
        alarms=alarms,
        series=histories(metric.key),
        verified=tuple(tests),
        sinks=_sinks(metric, histogram=reduction == REDUCTIONS["Counts"] or metric.of == "histogram"),
    )


def _headline(key: str) -> int:
    """The key's place among the first of its family, from 1; 0 for none."""
    first = chapter_of(key).first
    return first.index(key) + 1 if key in first else 0


def _reductions() -> Iterator[tuple[str, str]]:
    """Each key with the reduction of the field that holds it."""
    for group in groups():
        for item, metric in declared(group):
            kind = str(item.type).partition(" ")[0]
            yield metric.key, _reduction(kind, derived=issubclass(group, Derived))


def _reduction(kind: str, *, derived: bool) -> str:
    """By the name of a type; other reductions than the basic ones are means of what ranks join in their own way."""
    if derived:
        return "from other values"
    return "one value" if kind in ("float", "Tensor") else REDUCTIONS.get(kind, "mean")


def _priority(metric: Metric, alarms: tuple[AlarmType, ...]) -> str:
    if metric.key.endswith(NONFINITE):
        return "normal"
    decides = [alarm for alarm in alarms if alarm.reads[0] == metric.key]
    if any(alarm.hard for alarm in decides):
        return "critical"
    if metric.level is Level.MINIMAL or decides:
        return "high"
    return "normal" if alarms or metric.warn or metric.critical else "detail"


def _sinks(metric: Metric, *, histogram: bool) -> dict[str, str]:
    """In which form each of our sinks carries a metric; the journal always has it."""
    scalar = "at level debug, or with details" if "{layer}" in metric.key else "scalar"
    carried = {"journal": "histogram" if histogram else "scalar"}
    for sink in ("tensorboard", "wandb", "mlflow"):
        carried[sink] = scalar
    if histogram:
        carried |= {"tensorboard": "histogram", "wandb": "histogram", "mlflow": "quantiles p05, p50 and p95"}
    return carried | ({"console": "column"} if metric.key in ON_CONSOLE else {})
