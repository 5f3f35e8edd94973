"""Declared metrics, joined with the alarms that read them and the histories that follow them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from esper_telemetry.alarms.rule import AlarmRule
from esper_telemetry.alarms.rules.integrity_alarms import NONFINITE, NONFINITE_KEY
from esper_telemetry.alarms.thresholds import alarm_rules
from esper_telemetry.core.metric import Derived, Metric, catalogue, declared, families, family_name, groups
from esper_telemetry.core.record import Level, MetricInfo
from esper_telemetry.history.derive import histories

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
    "float": "one value",
    "Tensor": "one value",
}
"""Reductions by the first type in a field's annotation; other types are means that ranks merge in different ways."""

PRIORITIES = ("critical", "high", "normal", "detail")


@dataclass(frozen=True, slots=True)
class MetricEntry:
    """One metric, its alarms and its histories.

    Attributes:
        metric: declaration of the metric.
        priority: `critical` decides whether a run is certainly wrong, `high` is a headline, `normal` has bounds or is an input of an
            alarm, `detail` is everything else.
        reduction: how the rows of an update become one number.
        alarms: alarms that read it.
        series: templates of the keys of its histories, such as `{key}/ema`.
    """

    metric: Metric
    priority: str
    reduction: str
    alarms: tuple[AlarmRule, ...]
    series: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Display name; by default the last segment of the key."""
        return self.metric.name or self.metric.key.rpartition("/")[2].replace("_", " ")

    @property
    def category(self) -> str:
        """Title of the metric's family."""
        family = family_name(self.metric.key)
        return families()[family].title if family in families() else family

    @property
    def action(self) -> str:
        """Advice for an abnormal value; empty for a metric without bounds."""
        return self.alarms[0].action if self.alarms else self.metric.advice

    def info(self) -> MetricInfo:
        """Return the description for the journal."""
        family = families().get(family_name(self.metric.key))
        first = family.first if family else ()
        return replace(
            self.metric.info(),
            name=self.name,
            category=self.category,
            priority=self.priority,
            headline=first.index(self.metric.key) + 1 if self.metric.key in first else 0,
            reduction=self.reduction,
            alarms=", ".join(alarm.type for alarm in self.alarms),
            action=self.action,
            series=", ".join(self.series),
        )


def alarms_reading(key: str) -> tuple[AlarmRule, ...]:
    """Return the alarms that read a key or template; alarms for which it is the deciding input come first."""
    rules = alarm_rules()
    if key.endswith(NONFINITE):
        return tuple(rule for rule in rules if rule.type == NONFINITE_KEY)
    deciding = [rule for rule in rules if rule.inputs[0] == key]
    return (*deciding, *(rule for rule in rules if key in rule.inputs[1:]))


@lru_cache(maxsize=1)
def metric_entries() -> tuple[MetricEntry, ...]:
    """Return the entry of every declared metric, by number."""
    reductions = {}
    for group in groups():
        for item, metric in declared(group):
            own = REDUCTIONS.get(str(item.type).partition(" ")[0], "mean")
            reductions[metric.key] = "from other values" if issubclass(group, Derived) else own
    entries = []
    for metric in catalogue():
        alarms, reduction = alarms_reading(metric.key), metric.info(reductions[metric.key]).reduction
        entries.append(MetricEntry(metric, _priority(metric, alarms), reduction, alarms, histories(metric.key)))
    return tuple(entries)


@lru_cache(maxsize=1)
def _descriptions() -> Mapping[str, MetricInfo]:
    return {entry.metric.key: entry.info() for entry in metric_entries()}


def descriptions() -> dict[str, MetricInfo]:
    """Return the description of every declared metric, by key."""
    return dict(_descriptions())


def _priority(metric: Metric, alarms: tuple[AlarmRule, ...]) -> str:
    if metric.key.endswith(NONFINITE):
        return "normal"
    deciding = [alarm for alarm in alarms if alarm.inputs[0] == metric.key]
    if any(alarm.hard for alarm in deciding):
        return "critical"
    if metric.level is Level.MINIMAL or deciding:
        return "high"
    return "normal" if alarms or metric.warn or metric.critical else "detail"
