"""A dashboard made from the keys of a run, and the limit on how many keys it shows.

A section answers the question of one family of metrics. A chart holds numbers that share an axis: a single headline, several keys about
the same subject in one unit, or leftover keys with one bounded scale. Every key is in exactly one chart. A backend with a browser
interface gets at most a few hundred keys: TensorBoard needs minutes to list thousands of tags.

This module also converts histograms and settings to the forms that backends accept.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from esper_telemetry.alarms.rules.integrity_alarms import NONFINITE
from esper_telemetry.core.messages import capitalized
from esper_telemetry.core.metric import MetricFamily, families, family_name
from esper_telemetry.core.record import Histogram, Level, MetricInfo, Record, RunInfo, template_of
from esper_telemetry.journal.lines import plain
from esper_telemetry.sinks.sink_protocol import OVERVIEW_FAMILY, logger

STATISTICS: Final = frozenset(
    ["mean", "std", "min", "max", "first", "last", "absmax", "absmean", "median", "rms", "skew", "kurtosis"]
    + [f"p{percent:02d}" for percent in range(1, 100)]
)
"""Last segments of keys that name a statistic of the segment before them."""

PRIORITIES: Final = ("critical", "high", "normal", "", "detail")
"""Priorities of metrics, most important first; a metric without one precedes details."""
UNDESCRIBED: Final = MetricInfo(unit="", question="")

OVERVIEW: Final[Mapping[str, str]] = {
    "episode/return_mean_100": "return",
    "alarm/active": "alarms",
    "episode/length_mean": "length",
    "policy/kl": "KL",
    "policy/clip_frac": "clipped",
    "policy/entropy_norm": "entropy",
    "value/explained_variance": "value fit",
    "grad/global/norm_preclip": "gradient",
    "opt/lr": "learning rate",
    "train/env_steps_per_second": "speed",
}
"""Keys that people look at first, in that order, with titles that are short enough for the cards of W&B."""
MAX_OVERVIEW: Final = 15
UPDATE: Final = "axis/update"
TASK_AXIS: Final = "axis/env_step"
"""Axis of the families whose numbers describe the task, not the update."""

ALARM_FAMILY: Final = "alarm"
LAYER_LABEL: Final = "{layer}"
HISTORY_LABEL: Final = "{key}/"
LABEL: Final = re.compile(r"\{\w+\}")
DEBUG_LEVELS: Final = {Level.DEBUG.name.lower(), str(Level.DEBUG.value)}
RESERVED_SHARE: Final = 5
"""At most one key in this many is reserved for expected keys that have not appeared yet."""


def family_of(key: str) -> MetricFamily:
    """Return the family of a key; for a key without a declared family, one that is named after it and comes first."""
    name = family_name(key)
    return families().get(name) or MetricFamily(name, name, "", place=0, question=f"Your own: {name}")


def overview_keys(run: RunInfo) -> list[str]:
    """Return the most informative keys of any run, the return first: `OVERVIEW`, then the first headline of each task family."""
    declared = families()
    first = {
        family_name(key): key
        for key, info in sorted(run.metrics.items(), key=lambda item: -item[1].headline)
        if info.headline and "{" not in key and family_name(key) in declared
    }
    about_task = sorted(name for name in first if declared[name].axis == TASK_AXIS)
    keys = [*OVERVIEW, *(first[name] for name in sorted(about_task, key=lambda name: declared[name].place))]
    return list(dict.fromkeys(keys))[:MAX_OVERVIEW]


def overview_names(run: RunInfo) -> dict[str, str]:
    """Return the name that repeats each overview key. It has one slash, because charts are titled with the part after the last slash."""
    return {
        key: f"{OVERVIEW_FAMILY}/{place:02} {OVERVIEW.get(key) or key.replace('/', ' ')}"
        for place, key in enumerate(overview_keys(run), start=1)
    }


class Chart(NamedTuple):
    """A chart's title and the keys drawn in it, all in one unit."""

    title: str
    keys: tuple[str, ...]


class Section(NamedTuple):
    """The charts that answer one question, headlines first."""

    family: str
    question: str
    charts: tuple[Chart, ...]


class ChartGroup(NamedTuple):
    """Keys with equal groups share a chart.

    Attributes:
        headline: template of the key if it is a headline, which has its own chart.
        subject: subject of the numbers; empty for a chart of leftovers.
        unit, low, high: the scale that the keys share.
    """

    headline: str
    subject: str
    unit: str
    low: float | None
    high: float | None


def sections(keys: Iterable[str], run: RunInfo, *, apart: Collection[str] = ()) -> list[Section]:
    """Return the dashboard: one section per family, declared families by place and then the user's.

    Args:
        keys: keys of the run.
        run: its descriptions of the keys.
        apart: families whose keys each have a separate chart.
    """
    keys_by_family: dict[str, list[str]] = defaultdict(list)
    for key in sorted(keys):
        keys_by_family[family_name(key)].append(key)
    declared = families()
    ordered = sorted(keys_by_family, key=lambda name: (name not in declared, family_of(name).place, name))
    return [Section(name, family_of(name).question, tuple(_charts(keys_by_family[name], run, apart=name in apart))) for name in ordered]


def described(key: str, run: RunInfo) -> MetricInfo:
    """Return the run's description of a key, or an empty one."""
    return run.describe(key) or UNDESCRIBED


def _charts(keys: Sequence[str], run: RunInfo, *, apart: bool) -> list[Chart]:
    groups: dict[ChartGroup, list[str]] = defaultdict(list)
    for key in keys:
        info, template = described(key, run), template_of(key, run.metrics)
        headline = key if apart else template if info.headline else ""
        groups[ChartGroup(headline, headline or _subject(key, template), info.unit, info.low, info.high)].append(key)
    declared = {key: place for place, key in enumerate(run.metrics)}

    def rank(key: str) -> tuple[int, int, int]:
        """Return the precedence of a key: headlines in their order, then by priority, then in the order of declarations."""
        info = described(key, run)
        priority = PRIORITIES.index(info.priority) if info.priority in PRIORITIES else PRIORITIES.index("")
        place = declared.get(template_of(key, run.metrics), len(declared))
        return info.headline or len(declared) + 1, priority, place

    merged = list(_with_leftovers_merged(groups))
    merged.sort(key=lambda item: (min(map(rank, item[1])), item[1]))
    return [Chart(_title(group, members, run), tuple(members)) for group, members in merged]


def _subject(key: str, template: str) -> str:
    """Return the subject of a key: `policy/kl` of `policy/kl_max`, `ret` of `ret/std`, the template of a labelled key."""
    if template != key:
        return template
    path, _, last = key.rpartition("/")
    stem = last.split("_")[0]
    return path if path and (stem in STATISTICS or path.count("/")) else f"{path}/{stem}".lstrip("/")


def _with_leftovers_merged(groups: Mapping[ChartGroup, list[str]]) -> Iterator[tuple[ChartGroup, list[str]]]:
    """Yield the groups. Groups of a single key are merged if both bounds of their scale are equal; headlines stay separate."""
    leftovers: dict[ChartGroup, list[str]] = defaultdict(list)
    for group, members in groups.items():
        if len(members) == 1 and not group.headline and None not in (group.low, group.high):
            leftovers[group._replace(subject="")].extend(members)
        else:
            yield group, members
    yield from leftovers.items()


def _title(group: ChartGroup, keys: Sequence[str], run: RunInfo) -> str:
    """Return a title: the metric's name and key for one metric, the subject for several, all keys for leftovers; then the unit.

    A chart of one alarm has the alarm's name: all have the same metric's. A chart of all keys of one template has the metric's name; a
    label without one, such as `{layer}`, is a star.
    """
    names = {described(key, run).name for key in keys}
    name = next(iter(names)) if len(names) == 1 else ""
    name = capitalized(name)
    subject = LABEL.sub("*", group.subject)
    if len(keys) == 1 and family_name(keys[0]) == ALARM_FAMILY and keys[0] not in run.metrics:
        words = keys[0].partition("/")[2]
    elif len(keys) == 1:
        words = f"{name} ({keys[0]})" if name else keys[0]
    elif group.subject in run.metrics and name:
        words = f"{name} ({subject})"
    elif subject:
        has_own_chart = group.subject in run.metrics and subject not in keys and "*" not in subject
        words = f"More of {subject}" if has_own_chart else subject
    else:
        words = f"{family_name(keys[0])}: {', '.join(key.partition('/')[2] for key in keys)}"
    return f"{words} [{group.unit}]" if group.unit.strip("1") else words


JUDGED: Final = ("integrity/equation", "integrity/actions")
"""Beginnings of keys that alarms and `check` read: about 26, which would leave no room for others in runs with an LSTM."""


class KeyBudget:
    """Admit keys up to a limit, most important families first, for the rest of the run; other keys stay in the journal only.

    Numbers of single layers and equations, and histories of other keys, are details: shown in runs at DEBUG or with `details`, and never
    counted as refused. Some room is reserved for keys that are measured at the minimal level but appear late, as returns do. Alarms, one
    number for each type that is raised, and counts of non-finite numbers come late, too, or never: they are always shown.
    """

    def __init__(self, run: RunInfo, sink: str, *, max_keys: int, details: bool, quiet: bool = False) -> None:
        if max_keys < 1:
            raise ValueError(f"max_keys must be positive, got {max_keys}")
        self.run = run
        self._sink = sink
        self._quiet = quiet
        self._max_keys = max_keys
        self._with_details = details or str(run.facts.get("level")).lower() in DEBUG_LEVELS
        self._admitted: set[str] = set()
        self._refused: set[str] = set()
        self._details: set[str] = set()
        self._expected = {
            key for key, info in run.metrics.items() if info.level == "minimal" and "{" not in key and not key.endswith(NONFINITE)
        }

    def select(self, record: Record) -> Record:
        """Return the record with the admitted keys only."""
        new = {*record.values, *record.histograms} - self._admitted - self._refused - self._details
        if new:
            self._decide(new)
        values = {key: value for key, value in record.values.items() if key in self._admitted}
        histograms = {key: value for key, value in record.histograms.items() if key in self._admitted}
        return Record(record.seq, record.axes, values, histograms, record.partial)

    def _decide(self, new: set[str]) -> None:
        if not self._with_details:
            templates = {key: template_of(key, self.run.metrics) for key in new}
            self._details |= {
                key
                for key, template in templates.items()
                if "/layer/" in key or LAYER_LABEL in template or template.startswith((HISTORY_LABEL, *JUDGED))
            }
        refused = []
        for key in sorted(new - self._details, key=self._rank):
            missing = self._expected - self._admitted
            reserved = 0 if key in self._expected else min(len(missing), self._max_keys // RESERVED_SHARE)
            is_always_shown = family_name(key) == ALARM_FAMILY or key.endswith(NONFINITE)
            if is_always_shown or len(self._admitted) + reserved < self._max_keys:
                self._admitted.add(key)
            else:
                refused.append(key)
        if refused and not self._quiet and not self._refused:
            families = ", ".join(sorted({family_name(key) for key in refused}))
            message = "%s shows %d keys and leaves %d others (of %s) to the journal; max_keys= raises that limit"
            logger.warning(message, self._sink, len(self._admitted), len(refused), families)
        self._refused.update(refused)

    def _rank(self, key: str) -> tuple[bool, bool, int, str]:
        """Return the precedence of a key: keys of every level first, histories of other keys last."""
        info = self.run.describe(key)
        is_history = template_of(key, self.run.metrics).startswith(HISTORY_LABEL)
        return (info is not None and info.level != "minimal", is_history, family_of(key).place, key)


def with_at_most(bins: int, histogram: Histogram) -> Histogram:
    """Return the same counts in at most that many bins, neighbours joined."""
    width = -(-len(histogram.counts) // bins)
    if width <= 1:
        return histogram
    starts = range(0, len(histogram.counts), width)
    counts = tuple(sum(histogram.counts[start : start + width]) for start in starts)
    return Histogram((*(histogram.edges[start] for start in starts), histogram.edges[-1]), counts)


def midpoints(histogram: Histogram) -> list[float]:
    """Return the middle of each bin."""
    return [(low + high) / 2 for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)]


def trimmed(histogram: Histogram) -> Histogram:
    """Return the histogram without the empty bins at both ends, which would fill most of a chart; unchanged if all are empty."""
    filled = [index for index, count in enumerate(histogram.counts) if count > 0]
    if not filled:
        return histogram
    first, last = filled[0], filled[-1] + 1
    return Histogram(histogram.edges[first : last + 1], histogram.counts[first:last])


def by_tag(record: Record) -> Mapping[str, Histogram]:
    """Return the record's histograms, trimmed, under names that no scalar of the record has."""
    return {f"{key}_hist" if key in record.values else key: trimmed(histogram) for key, histogram in record.histograms.items()}


def counts_by_tag(record: Record) -> dict[str, float]:
    """Return the sum of each histogram's counts under its name of `by_tag`."""
    return {f"{key}_hist" if key in record.values else key: sum(histogram.counts) for key, histogram in record.histograms.items()}


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of nested settings by dotted path; lists become text."""
    return dict(_leaves("", plain(config)))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, item)
    elif path:
        yield path, str(value) if isinstance(value, list | dict) else value
