"""Plain values that leave the training thread: records, alarms, and the descriptions of runs and metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

from esper_telemetry.core.messages import shown

RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
KEY_PATTERN = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)*")
RUN_FAILED = "run/failed"
"""Type of the alarm for an exception that ends the run; views show it before all others."""


MAX_SHOWN_VALUES = 8
"""Values in the `repr` of a record."""


class Level(IntEnum):
    """Amount of measurement; each level includes the ones below it."""

    OFF = 0
    MINIMAL = 1
    NORMAL = 2
    DEBUG = 3

    @classmethod
    def parse(cls, text: str | Level) -> Level:
        """Return the level of a name in any case; raise ValueError for an unknown one."""
        if isinstance(text, Level):
            return text
        try:
            return cls[text.upper()]
        except (KeyError, AttributeError):
            names = ", ".join(level.name.lower() for level in cls)
            raise ValueError(f"level must be one of {names}, got {shown(text)}") from None


class RunStatus(StrEnum):
    """Ending of a run; the value of the journal's `end` line."""

    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    PREEMPTED = "preempted"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class Axes:
    """Position of a record; sinks choose their x-axis from these numbers, which are never inferred.

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
        """Return True if these axes are not beyond `last`, by updates or by environment steps."""
        return self.update <= last.update or self.env_step <= last.env_step


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values between fixed edges; the first and last bin also count values outside.

    Attributes:
        edges: n+1 increasing bin edges.
        counts: n counts.
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]

    def quantile(self, share: float) -> float | None:
        """Return the value below which that share of the counts is, linear within a bin; None without counts."""
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
    """Values of one update: finite floats by key; undefined values are absent."""

    seq: int
    axes: Axes
    values: Mapping[str, float]
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    partial: bool = False

    def __repr__(self) -> str:
        """Return one line with the axes, some values and their number."""
        axes = f"update={self.axes.update}, env_step={self.axes.env_step}, gradient_step={self.axes.gradient_step}"
        some = ", ".join(f"{key!r}: {value:.6g}" for key, value in islice(self.values.items(), MAX_SHOWN_VALUES))
        more = f", ... {len(self.values) - MAX_SHOWN_VALUES} more" if len(self.values) > MAX_SHOWN_VALUES else ""
        partial = ", partial" if self.partial else ""
        return f"Record({axes}, values={{{some}{more}}}, {len(self.histograms)} histograms{partial})"


MAX_JUDGED = 1e100
"""Maximum size of a value for histories and detectors, so that its powers, and sums of these, are finite."""


def judgeable(values: Mapping[str, float]) -> Mapping[str, float]:
    """Return values that histories and detectors can calculate with: at most `MAX_JUDGED` in size, without NaN and infinities."""
    if math.hypot(*values.values()) <= MAX_JUDGED:
        return values
    return {key: min(max(value, -MAX_JUDGED), MAX_JUDGED) for key, value in values.items() if math.isfinite(value)}


class AlarmLevel(StrEnum):
    """Level of an alarm by its severity: below 0.25, below 0.75, or from there on."""

    INFO = "info"
    WARN = "warn"
    CRITICAL = "critical"

    @classmethod
    def of(cls, severity: float) -> AlarmLevel:
        """Return the level of a severity, 0 to 1."""
        return cls.CRITICAL if severity >= CRITICAL_FROM else cls.WARN if severity >= WARN_FROM else cls.INFO


WARN_FROM, CRITICAL_FROM = 0.25, 0.75
"""Smallest severities of a warning and of a critical alarm."""


class AlarmEvent(StrEnum):
    """Change of an alarm."""

    RAISE = "raise"
    UPDATE = "update"
    CLEAR = "clear"


@dataclass(frozen=True, slots=True)
class Alarm:
    """A problem of the run: written when it begins, gets worse or ends.

    Attributes:
        seq, axes: number and axes of the record that shows it.
        type: its name, `family/what`, as in `alarms`.
        event: it begins, gets worse or ends.
        severity: 0 to 1.
        level: level of that severity.
        key: the metric that decided.
        value: value of that metric; None at an end without one.
        threshold: value of that metric at which the alarm is raised; None if it is not a single number.
        adaptive: True if the threshold follows the run's own history.
        z: distance of the value from its history in robust standard scores, if the rule has one.
        since: update in which it was raised.
        streak: consecutive updates with evidence for this event.
        incident: number of the incident that it belongs to, from 1.
        cause: type of the alarm that is the cause of this incident, according to the records so far.
        text: what happened, since when, and what to try, in plain words.
        evidence: plain values that show it, bounded in size.
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
    """Description of a key, in words that a dashboard can show.

    Attributes:
        unit, question: unit of the value, and the question that its chart answers.
        id: stable name of the catalogue entry, `TELE-<number>`.
        low, high: range; None if it is unbounded.
        healthy, warn, critical, source: bounds and their source.
        undefined: condition under which the key is absent.
        reduction, level, cost: reduction of an update's rows, lowest level, class of cost.
        name, category, priority: display name, title of the family, importance.
        headline: its position among the first metrics of its family, from 1; 0 if it is not one of them.
        alarms, action: alarms that read it, and what to try when it is not normal.
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
    """Head of a journal: facts about the run before its first record.

    Attributes:
        run_id: unique and constant over resumes; letters, digits, `.`, `_` and `-`, so that it can be part of file names.
        name: display name.
        run_dir: directory of the journal and of local backends; None for a run without journal.
        started: seconds since the epoch.
        config: settings of the run, as given.
        facts: inputs of detectors: precision, max_grad_norm, normalisation, declared groups, total steps.
        metrics: description by key; keys of labelled families also appear as templates such as `grad/{group}/rms`.
        resumed_from: position at which a resumed run continues; None in its first part. `update`, `env_step` and `gradient_step`
            come from the checkpoint, `recorded` is the last update in the journal: updates up to it are not recorded again.

    Raises:
        ValueError: the run id contains other characters.
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
            raise ValueError(f"a run id must consist of up to 128 letters, digits, '.', '_' and '-', got {self.run_id!r}")

    def describe(self, key: str) -> MetricInfo | None:
        """Return the description of a key or of its template; None for an unknown key."""
        return self.metrics.get(key) or self.metrics.get(template_of(key, self.metrics))


class SinkLag(NamedTuple):
    """State of the delivery to one sink.

    Attributes:
        sink: its name as a segment of a key.
        records: number of records that are still to be delivered.
        seconds: age of the last delivered record while others wait; else 0.
        errors: number of failures so far.
    """

    sink: str
    records: int
    seconds: float
    errors: int


class SinkBacklog(NamedTuple):
    """State of the delivery to all sinks.

    Attributes:
        queue_depth: records that the slowest sink has not taken yet.
        errors: failures of all sinks so far.
        sinks: each delivery.
    """

    queue_depth: int = 0
    errors: int = 0
    sinks: tuple[SinkLag, ...] = ()


MAX_COUNT = 2**63 - 1
"""Largest update, step or other count."""

MAX_SEGMENTS = 32
"""Maximum number of segments of a key that is compared with templates, which takes time quadratic in that number."""


def template_of(key: str, templates: Mapping[str, object]) -> str:
    """Return the template in `templates` of which `key` is an instance, or the key itself."""
    segments = key.split("/")
    if key in templates or len(segments) > MAX_SEGMENTS:
        return key
    # A label is one segment anywhere, or a whole key at either end. The history of a declared key comes first: the layers of
    # `opt/update_to_weight/{layer}` do not include `opt/update_to_weight/drift`.
    whole = [(start, n) for n in range(len(segments) - 1, 1, -1) for start in (0, len(segments) - n)]
    histories = [(0, n) for start, n in whole if start == 0 and "/".join(segments[:n]) in templates]
    for start, length in [*histories, *((start, 1) for start in range(len(segments))), *whole]:
        for name in LABELS if length == 1 else WHOLE_KEYS:
            candidate = "/".join([*segments[:start], f"{{{name}}}", *segments[start + length :]])
            if candidate in templates:
                return candidate
    return key


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
    "equation",
    "test",
    "function",
)
"""Labels that represent one segment of a key."""

WHOLE_KEYS = ("key",)
"""Labels that represent another key, with all its segments: `{key}/ema` is `policy/kl/ema`, `alarm/{key}` is `alarm/policy/kl_spike`."""


MAX_KEY_CHARACTERS = 250
"""Maximum length of a key in MLflow, which has the lowest limit."""


def check_key(key: str) -> str:
    """Return the key; raise ValueError unless every backend accepts it."""
    if isinstance(key, str) and len(key) > MAX_KEY_CHARACTERS:
        raise ValueError(f"a metric key may have at most {MAX_KEY_CHARACTERS} characters, got {len(key):,}, which begin with {key[:40]!r}")
    if not isinstance(key, str) or not KEY_PATTERN.fullmatch(key):
        likely = "/".join(part.strip("_") for part in re.sub("[^a-z0-9_/]+", "_", str(key).lower()).split("/"))
        instead = f": write {likely!r}" if KEY_PATTERN.fullmatch(likely) else ""
        raise ValueError(f"a metric key may contain only a-z, 0-9 and _ in segments joined by '/', got {key!r}{instead}")
    return key
