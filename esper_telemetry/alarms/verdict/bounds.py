"""State of a value by the bounds of its metric, and of a run: its tone. A bound is a text with plain numbers:

> 0.1                                             a bound
|.| > 0.5                                         a bound on the absolute value
0.002 to 0.02                                     a range
outside 0.15 to 0.85                              a bound at both ends
< 0.1 with policy/entropy_marginal_norm < 0.5     holds if the other metric is known to be beyond that bound
< 0 unless value/loss_norm < 0.1                  holds unless the other metric is known to be beyond that bound
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from esper_telemetry.alarms.verdict.run_outcome import BAD, GOOD, OutcomeKind
from esper_telemetry.core.record import AlarmLevel, MetricInfo

Judgement = Literal["", "outside", "warn", "critical"]  # empty within the bounds, or if they are not plain numbers
Other = Callable[[str], float | None]  # returns the value of another metric at the same time, by its key or template
NUMBER: Final = r"[+-]?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?"
BOUND: Final = re.compile(rf"(\|[^|]+\|\s*)?(<=|>=|<|>|≤|≥)\s*({NUMBER})\s*(?:[;:(].*)?")
RANGE: Final = re.compile(rf"({NUMBER}) to ({NUMBER})\s*(?:[;:(].*)?")
OUTSIDE: Final = re.compile(rf"outside ({NUMBER}) to ({NUMBER})")
LEADING_BOUND: Final = re.compile(rf"(\|[^|]+\|\s*)?(<=|>=|<|>|≤|≥)\s*({NUMBER})(?=$|[\s;:,(])")
LEADING_RANGE: Final = re.compile(rf"({NUMBER}) to ({NUMBER})(?=$|[\s;:,(])")
CONDITIONAL: Final = re.compile(rf"(.+) (with|unless) (\S+) ([<>]=? {NUMBER})")
RELATIVE: Final = re.compile(r"\s*(of|%|times|x|std|batch sizes?|σ)\b")
"""Units after a number that is relative to another value, and so does not bound the value itself."""

HEAD: Final = "{head}"
LATEST_RECORDS: Final = 10  # records over which the median must be critical
MIN_LATEST_VALUES: Final = 3  # smallest number of values in them: metrics of sampled updates have fewer


@dataclass(frozen=True, slots=True)
class HealthyRange:
    """Healthy values of a metric, if its declaration has plain numbers.

    Attributes:
        low, high: ends of the range; None for an open end.
        condition: words after the numbers, such as "late in training"; with a condition, a value outside need not be unhealthy.
    """

    low: float | None
    high: float | None
    condition: str = ""

    def contains(self, value: float) -> bool:
        """Return whether a value is within the range, ends included."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    @classmethod
    def parse(cls, text: str) -> HealthyRange | None:
        """Return the range of a declaration such as `0.002 to 0.02` or `> 0.9; lower late in training`; None for other texts."""
        low: float | None
        high: float | None
        if match := LEADING_RANGE.match(text):
            low, high, size = _float(match[1]), _float(match[2]), None
        elif match := LEADING_BOUND.match(text):
            size, limit = match[1], _float(match[3])
            low, high = (limit, None) if match[2] in (">", ">=", "≥") else (None, limit)
            if size:
                low, high = (None, None) if high is None else (-high, high)
        else:
            return None
        rest = text[match.end() :]
        if RELATIVE.match(rest) or (low is None and high is None):
            return None
        return cls(low, high, rest.strip(" ;,:()"))


def _float(text: str) -> float:
    return float(text.replace(",", ""))


def judge(info: MetricInfo | None, value: float, other: Other = lambda key: None) -> Judgement:
    """Return the state of a value by the bounds that its metric declares in plain numbers."""
    if info is None or not math.isfinite(value):
        return ""
    if distance_beyond(info.critical, value, other):
        return "critical"
    if distance_beyond(info.warn, value, other):
        return "warn"
    healthy = HealthyRange.parse(info.healthy)
    is_plain = RANGE.fullmatch(info.healthy) or BOUND.fullmatch(info.healthy)
    return "outside" if healthy is not None and is_plain and not healthy.condition and not healthy.contains(value) else ""


def distance_beyond(text: str, value: float, other: Other = lambda key: None) -> float | None:
    """Return `beyond_bound`, or 0 if the condition of the bound does not hold."""
    condition = CONDITIONAL.fullmatch(text)
    if condition is None:
        return beyond_bound(text, value)
    bound, word, key, limit = condition.groups()
    second = other(key)
    holds = second is not None and bool(beyond_bound(limit, second))
    return beyond_bound(bound, value) if holds is (word == "with") else 0.0


def values_of(values: Mapping[str, float], head: str) -> Other:
    """Return a function from a key, or the template of all heads, to the value of this head."""
    return lambda key: values.get(key.replace(HEAD, head))


def beyond_bound(text: str, value: float) -> float | None:
    """Return the decades by which a value exceeds a bound such as `> 0.03`, at least 0.01; 0 within the bound; None for other texts."""
    if ends := OUTSIDE.fullmatch(text):
        return max(beyond_bound(f"< {ends[1]}", value) or 0.0, beyond_bound(f"> {ends[2]}", value) or 0.0)
    match = BOUND.fullmatch(text)
    if not match:
        return None
    size, sign, limit = match[1], match[2], _float(match[3])
    judged = abs(value) if size else value
    over = {">": judged > limit, ">=": judged >= limit, "≥": judged >= limit, "<": judged < limit}.get(sign, judged <= limit)
    if not over:
        return 0.0
    if judged > 0 and limit > 0:
        return max(0.01, abs(math.log10(judged / limit)))
    return 0.01 + abs(judged - limit) / (abs(limit) or 1.0)


def critical_values(
    records: Iterable[Mapping[str, float]], metrics: Mapping[str, MetricInfo], aside: Collection[str] = ()
) -> dict[str, float]:
    """Return the medians over the latest records that are beyond the critical bound of their metric, by key, farthest first.

    Args:
        records: values of the latest records; the last `LATEST_RECORDS` count.
        metrics: descriptions by key or template; keys of heads are included, keys of groups and layers are not.
        aside: keys whose bounds do not apply.
    """
    latest = [*records][-LATEST_RECORDS:]
    least = min(MIN_LATEST_VALUES, len(latest))
    columns: dict[str, list[float]] = {}
    for values in latest:
        for key in values.keys() - aside:
            columns.setdefault(key, []).append(values[key])
    medians = {key: statistics.median(column) for key, column in columns.items() if len(column) >= least}
    heads = {
        re.compile(re.escape(template).replace(re.escape(HEAD), "([^/]+)")): info
        for template, info in metrics.items()
        if HEAD in template and info.critical
    }
    distances = {}
    for key, value in medians.items():
        matches = ((info, match[1]) for pattern, info in heads.items() if (match := pattern.fullmatch(key)))
        info, head = (metrics[key], "") if key in metrics else next(matches, (None, ""))
        bound = info.critical if info else ""
        distance = distance_beyond(bound, value, values_of(medians, head))
        if distance and math.isfinite(value):
            distances[key] = distance
    return {key: medians[key] for key in sorted(distances, key=lambda key: -distances[key])}


class Tone(StrEnum):
    """State of a run in one word, for the header, the colour and the summary of all views and backends: none calls a run healthy that does
    not learn.

    `good`: has learned something without active alarms or critical values. `open`: not known to be good or bad. `warn`: is flat or
    declines, has an active warning, or has critical values before it has learned. `bad`: failed or has an active critical alarm.
    """

    GOOD = "good"
    OPEN = "open"
    WARN = "warn"
    BAD = "bad"


COLOURS: Final = {Tone.GOOD: "green", Tone.OPEN: "cyan", Tone.WARN: "yellow", Tone.BAD: "red"}  # colours of a terminal


def tone_of(outcome: OutcomeKind | str, lasting: Iterable[AlarmLevel] = (), critical: Collection[str] = ()) -> Tone:
    """Return the tone of a run.

    Args:
        outcome: kind of the outcome; an unknown kind counts as neither good nor bad.
        lasting: levels of the active alarms.
        critical: keys of values beyond their critical bounds.
    """
    levels = set(lasting)
    if outcome == OutcomeKind.FAILED or AlarmLevel.CRITICAL in levels:
        return Tone.BAD
    if outcome in BAD or AlarmLevel.WARN in levels or (critical and outcome not in GOOD):
        return Tone.WARN
    return Tone.GOOD if outcome in GOOD and not critical else Tone.OPEN
