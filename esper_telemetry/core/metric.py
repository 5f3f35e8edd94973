"""What a metric is: its key, its meaning and how it is read off the field that holds it. Plain Python, no torch.

A field of a group declares what it reports, so that a key is spelled in one place:

    kl: Mean = reports(
        Metric("policy/kl", 101, "nats", "How far did the policy move?", low=0.0),
        Metric("policy/kl_max", 102, "nats", "... at its worst?", over="max", rows=Rows.AFTER_STEP),
    )
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from esper_telemetry.core.record import Level, MetricInfo, check_key

Cost = Literal["free", "update", "sampled", "debug"]
Over = Literal["merge", "max", "min", "slope"]


class Rows(Enum):
    """Which optimizer steps of an update a metric is read from."""

    ALL = "all"
    FIRST = "before the first step"
    AFTER_STEP = "after at least one step"
    LAST_EPOCH = "last epoch"
    LAST_EPOCH_AFTER_STEP = "last epoch, after at least one step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One declared key.

    Attributes:
        key: canonical name; one segment may be a label in braces, such as `policy/head/{head}/kl`.
        number: stable, unique number of the catalogue entry `TELE-<number>`; 0 for metrics of user code.
        unit: unit of the value.
        question: what a reader of the chart learns from it.
        of: which statistic of the field's reduction; empty for its first one.
        over: `merge` reduces the merged rows; `max` and `min` take the extreme of the rows' own statistics; `slope` is the least-squares
            slope of the epochs' statistics against the epoch index.
        rows: the optimizer steps that count.
        low, high: range of the value; None where it has no bound.
        level: lowest level at which it is reported.
        cost: class of its cost.
        healthy, warn, critical: bounds in words and numbers, as a dashboard shows them.
        source: paper, code or measurement behind the bounds.
        undefined: when the key is absent.
        when_positive: report the value only if it is above zero (counters of rare things).
    """

    key: str
    number: int = 0
    unit: str
    question: str
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
    undefined: str = ""
    when_positive: bool = False

    def __post_init__(self) -> None:
        check_key(re.sub(r"\{[a-z_]+\}", "x", self.key))

    @property
    def id(self) -> str:
        """`TELE-<number>`, or nothing for metrics of user code."""
        return f"TELE-{self.number:03d}" if self.number else ""

    def info(self, reduction: str = "") -> MetricInfo:
        """The description that travels in the journal."""
        rows = "" if self.rows is Rows.ALL else f", {self.rows.value}"
        over = "" if self.over == "merge" else f", {self.over} over minibatches"
        return MetricInfo(
            unit=self.unit,
            question=self.question,
            id=self.id,
            low=self.low,
            high=self.high,
            healthy=self.healthy,
            warn=self.warn,
            critical=self.critical,
            source=self.source,
            undefined=self.undefined,
            reduction=f"{self.of or reduction}{over}{rows}",
            level=self.level.name.lower(),
            cost=self.cost,
        )


def reports(*metrics: Metric) -> Any:
    """A dataclass field whose value is reported under the keys of `metrics`; it may be left out (None)."""
    return dataclasses.field(default=None, metadata={"metrics": metrics})


def label() -> Any:
    """A dataclass field holding the label, or the tuple of labels, that fills `{field name}` in the group's keys."""
    return dataclasses.field(metadata={"label": True})


def declared(group: type) -> Iterator[tuple[dataclasses.Field[Any], Metric]]:
    """Every metric that a group type declares, with the field that holds it, in order."""
    for item in dataclasses.fields(group):
        for metric in item.metadata.get("metrics", ()):
            yield item, metric


def label_field(group: type) -> str | None:
    """Name of the field that labels a group type, if it has one."""
    names = [item.name for item in dataclasses.fields(group) if item.metadata.get("label")]
    return names[0] if names else None


def segment(name: str) -> str:
    """`name` as a legal segment of a key: `trunk.0.weight` becomes `trunk_0_weight`."""
    return re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_") or "_"
