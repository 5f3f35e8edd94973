"""What leaves the process: plain Python values that every sink, detector and view can read without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
KEY_PATTERN = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)*")
RUN_FAILED = "run/failed"
"""Type of the alarm that an exception raises which ends the run; views show it before all others."""


SHOWN_VALUES = 8
"""How many values a record shows of itself."""


class Level(IntEnum):
    """How much is measured; each level includes the ones below it."""

    OFF = 0
    MINIMAL = 1
    NORMAL = 2
    DEBUG = 3

    @classmethod
    def parse(cls, text: str | Level) -> Level:
        """The level of that name, in any case; raises ValueError for an unknown one."""
        if isinstance(text, Level):
            return text
        try:
            return cls[text.upper()]
        except (KeyError, AttributeError):
            names = ", ".join(level.name.lower() for level in cls)
            raise ValueError(f"level must be one of {names}, got {text!r}") from None


class RunStatus(StrEnum):
    """How a run ended; the value of the journal's `end` line."""

    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    PREEMPTED = "preempted"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class Axes:
    """Where a record stands: sinks choose their x-axis from these, none is ever inferred.

    Attributes:
        update: index of the policy update, from 1.
        env_step: environment steps when the data was *collected*, over all environments and ranks.
        gradient_step: optimizer steps taken so far.
        wall_time: seconds since the epoch when the record was made.
    """

    update: int
    env_step: int
    gradient_step: int
    wall_time: float

    def within(self, last: Axes) -> bool:
        """Whether a run whose last record stands there has got as far, by updates or by environment steps."""
        return self.update <= last.update or self.env_step <= last.env_step


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values between fixed edges; the first and last bin also hold what lies outside.

    Attributes:
        edges: n+1 increasing bin edges.
        counts: n counts.
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]

    def quantile(self, share: float) -> float | None:
        """The value below which that share of the counts lies, linear within a bin; None without counts."""
        total = sum(self.counts)
        if total <= 0:
            return None
        target = share * total
        for index, reached in enumerate(accumulate(self.counts)):
            count = self.counts[index]
            if count > 0 and reached >= target:
                low, high = self.edges[index], self.edges[index + 1]
                return low + (high - low) * (1 - (reached - target) / count)
        return self.edges[-1]


@dataclass(frozen=True, slots=True)
class Record:
    """Everything measured in one update: finite floats by key; what is undefined is absent."""

    seq: int
    axes: Axes
    values: Mapping[str, float]
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    partial: bool = False

    def __repr__(self) -> str:
        """One line: where it stands, some of its values, and how many there are."""
        axes = f"update={self.axes.update}, env_step={self.axes.env_step}, gradient_step={self.axes.gradient_step}"
        some = ", ".join(f"{key!r}: {value:.6g}" for key, value in islice(self.values.items(), SHOWN_VALUES))
        more = f", ... {len(self.values) - SHOWN_VALUES} more" if len(self.values) > SHOWN_VALUES else ""
        partial = ", partial" if self.partial else ""
        return f"Record({axes}, values={{{some}{more}}}, {len(self.histograms)} histograms{partial})"


class AlarmLevel(StrEnum):
    """How serious an alarm is, by its severity: below 0.25, below 0.75, or from there on."""

    INFO = "info"
    WARN = "warn"
    CRITICAL = "critical"

    @classmethod
    def of(cls, severity: float) -> AlarmLevel:
        """The level of a severity, 0 to 1."""
        return cls.CRITICAL if severity >= CRITICAL_FROM else cls.WARN if severity >= WARN_FROM else cls.INFO


WARN_FROM, CRITICAL_FROM = 0.25, 0.75
"""Severities from which on an alarm is a warning, and critical."""


class AlarmEvent(StrEnum):
    """What has become of an alarm."""

    RAISE = "raise"
    UPDATE = "update"
    CLEAR = "clear"


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something goes wrong in the run: written when it begins, when it gets worse and when it is over.

    Attributes:
        seq, axes: of the record that shows it.
        type: its name, `family/what`, as in `alarms`.
        event: whether it begins, gets worse or ends.
        severity: 0 to 1.
        level: how serious that is.
        key: the metric that decided.
        value: of that metric; None where the end has none.
        threshold: value of that metric from which on the alarm is raised; None where no single number says so.
        adaptive: whether the threshold follows the run's own history.
        z: robust standard scores that the value is away from its history, where the rule has one.
        since: update in which it was raised.
        streak: updates in a row that spoke for this event.
        incident: number of the incident that it belongs to, from 1.
        cause: type of the alarm that this incident is put down to, as far as is known yet.
        text: what has happened, since when, and what to try, in plain words.
        evidence: what shows it, as plain values, bounded in size.
    """

    seq: int
    axes: Axes
    type: str
    event: AlarmEvent
    severity: float
    level: AlarmLevel
    key: str
    value: float | None = None
    threshold: float | None = None
    adaptive: bool = False
    z: float | None = None
    since: int = 0
    streak: int = 0
    incident: int = 0
    cause: str = ""
    text: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """What a key means, in words that a dashboard can show.

    Attributes:
        unit, question: what is counted, and what a reader learns from it.
        id: stable name of the catalogue entry, `TELE-<number>`.
        low, high: range; None where it has no bound.
        healthy, warn, critical, source: what is normal and what is not, and who says so.
        undefined: when the key is absent.
        reduction, level, cost: how it is made of an update's rows, from which level on, at what cost.
        name, category, priority: what people call it, its family, and how much it matters.
        headline: its place among the first that one looks at in its family, from 1; 0 where it is none of them.
        alarms, action: which ways of going wrong read it, and what to try then.
        series: endings of the keys that follow its history.
    """

    unit: str
    question: str
    id: str = ""
    low: float | None = None
    high: float | None = None
    healthy: str = ""
    warn: str = ""
    critical: str = ""
    source: str = ""
    undefined: str = ""
    reduction: str = ""
    level: str = "normal"
    cost: str = "free"
    name: str = ""
    category: str = ""
    priority: str = ""
    headline: int = 0
    alarms: str = ""
    action: str = ""
    series: str = ""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The head of a journal: what a sink knows of the run before its first record.

    Attributes:
        run_id: unique and constant over resumes; letters, digits, `.`, `_` and `-`, so that it can stand in names of files.
        name: what people call the run.
        run_dir: where the journal and the local backends live; None for a run without journal.
        started: seconds since the epoch.
        config: settings of the run, as given.
        facts: what detectors need: precision, max_grad_norm, normalisation, declared groups, total steps.
        metrics: description by key; keys of labelled families also appear as templates such as `grad/{group}/rms`.
        resumed_from: where training goes on, in a part of a run that was resumed; None in its first part. `update`, `env_step` and
            `gradient_step` are those of the checkpoint, `recorded` is the last update that the journal held already: what is
            trained again up to there is not recorded again.

    Raises ValueError for a run id that is not made of these.
    """

    run_id: str
    name: str
    run_dir: Path | None
    started: float
    config: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    notes: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    metrics: dict[str, MetricInfo] = field(default_factory=dict, repr=False)
    resumed_from: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not RUN_ID_PATTERN.fullmatch(self.run_id):
            raise ValueError(f"a run id is made of up to 128 letters, digits, '.', '_' and '-', got {self.run_id!r}")

    def describe(self, key: str) -> MetricInfo | None:
        """The description of a key, directly or through the template it was made from."""
        return self.metrics.get(key) or self.metrics.get(template_of(key, self.metrics))


class SinkLag(NamedTuple):
    """How the delivery to one sink stands.

    Attributes:
        sink: its name as a segment of a key.
        records: how many it has still to take.
        seconds: age of the last one that it took, while there are others; else 0.
        errors: how often it has failed.
    """

    sink: str
    records: int
    seconds: float
    errors: int


def template_of(key: str, templates: Mapping[str, object]) -> str:
    """The template in `templates` that `key` is an instance of, or the key itself."""
    if key in templates:
        return key
    segments = key.split("/")
    for start, length in _places(len(segments)):
        for name in LABELS if length == 1 else WHOLE_KEYS:
            candidate = "/".join([*segments[:start], f"{{{name}}}", *segments[start + length :]])
            if candidate in templates:
                return candidate
    return key


def _places(segments: int) -> Iterator[tuple[int, int]]:
    """Where a label may stand, (first segment, number of segments): one segment anywhere, or several at either end."""
    yield from ((start, 1) for start in range(segments))
    for length in range(segments - 1, 1, -1):
        yield from ((start, length) for start in (0, segments - length))


LABELS = (
    "head",
    "group",
    "layer",
    "pair",
    "normalizer",
    "sink",
    "part",
    "gate",
    "stage",
    "op",
    "cause",
    "env",
    "place",
    "component",
    "reason",
)
"""Labels that stand for one segment of a key."""

WHOLE_KEYS = ("key",)
"""Labels that stand for another key, whatever its segments: `{key}/ema` is `policy/kl/ema`, `alarm/{key}` is `alarm/policy/kl_spike`."""


def check_key(key: str) -> str:
    """The key itself; raises ValueError unless every backend accepts it."""
    if not isinstance(key, str) or not KEY_PATTERN.fullmatch(key):
        likely = "/".join(part.strip("_") for part in re.sub("[^a-z0-9_/]+", "_", str(key).lower()).split("/"))
        instead = f": write {likely!r}" if KEY_PATTERN.fullmatch(likely) else ""
        raise ValueError(f"a metric key is made of a-z, 0-9 and _ in segments joined by '/', got {key!r}{instead}")
    return key
