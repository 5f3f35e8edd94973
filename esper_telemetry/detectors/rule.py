"""What a rule is: a way of going wrong, told from the values of a record and their history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import log10
from typing import Any, NamedTuple

from esper_telemetry.detectors.history import Baselines
from esper_telemetry.detectors.thresholds import Thresholds
from esper_telemetry.metric import segment


class Finding(NamedTuple):
    """What a rule says of one update.

    Attributes:
        severity: 0 to 1; 0.5 speaks for an alarm.
        key: the metric that decided.
        value: of that metric.
        threshold: from which value on it speaks for an alarm, where a single number says so.
        adaptive: whether that follows the run's own history.
        z: robust standard scores from its history, where it was judged by one.
        instance: which head, group or layer, where a rule judges each.
        claim: it is a mistake in itself and no consequence, whatever else the type is raised for.
        text: what has happened, without the update since when: a clause that goes on behind "Since update 7".
    """

    severity: float
    key: str
    value: float | None = None
    threshold: float | None = None
    adaptive: bool = False
    z: float | None = None
    instance: str = ""
    claim: bool = False
    text: Callable[[], str] | None = None


class View:
    """One update as rules see it.

    Attributes:
        values: of the record.
        previous: of the record before it.
        facts: of the run.
        limits: all bounds.
        baselines: histories and robust scores of the keys that rules watch.
        update: records so far, this one included.
        progress: share of the run that is over, 0 to 1; None where nobody said how long it is.
        steps: optimizer steps of this update; None in the first.
        transitions: environment steps of this update; None in the first.
        memory: what the rule that is being asked keeps from update to update.
    """

    def __init__(self, facts: Mapping[str, Any], limits: Thresholds, baselines: Baselines) -> None:
        self.facts = facts
        self.limits = limits
        self.baselines = baselines
        self.values: Mapping[str, float] = {}
        self.previous: Mapping[str, float] = {}
        self.update = 0
        self.progress: float | None = None
        self.steps: int | None = None
        self.transitions: int | None = None
        self.memory: dict[Any, Any] = {}
        self._known: set[str] = set()
        self._cache: dict[tuple[str, str], list[str]] = {}

    def get(self, key: str) -> float | None:
        """A value of the record."""
        return self.values.get(key)

    def z(self, key: str) -> float | None:
        """How many robust standard scores a watched key is away from its history."""
        return self.baselines.z.get(key)

    def look(self, values: Mapping[str, float]) -> None:
        """Turns to the next record."""
        self.previous, self.values = self.values, values
        new = values.keys() - self._known
        if new:
            self._known |= new
            self._cache.clear()

    def matching(self, start: str, end: str) -> list[str]:
        """Keys of all records so far that begin and end so."""
        found = self._cache.get((start, end))
        if found is None:
            found = [key for key in self._known if key.startswith(start) and key.endswith(end)]
            self._cache[start, end] = found = sorted(found)
        return found

    def labelled(self, start: str, end: str) -> list[tuple[str, str, float]]:
        """(label, key, value) of all keys that begin and end so, with one segment between."""
        cut, stop, values = len(start), -len(end) or None, self.values
        found = [(key[cut:stop], key) for key in self.matching(start, end) if key in values]
        return [(label, key, values[key]) for label, key in found if label and "/" not in label]

    def usual(self, key: str) -> str:
        """(usually a-b) of a watched key, or nothing."""
        found = self.baselines.usual(key)
        return "" if found is None else f" (usually {span(*found)})"


segment_of = lru_cache(maxsize=4096)(segment)
"""Names of parameters as segments of keys, remembered: there are the same ones in every update."""

Judge = Callable[[View], Iterable[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One way of going wrong.

    Attributes:
        type: of the alarm, as in `alarms`.
        judge: yields the findings of an update; none where the values do not say, which holds what was said before.
        inputs: keys without which it cannot be answered.
        facts: of the run, likewise.
        watches: keys whose history it needs; a template ends in `*` and begins like its keys.
        applies: whether the question makes sense for a run with these facts.
        warmup, n_on, n_off: patience, see `series.hysteresis`.
        duration: updates at DEBUG after it was raised.
        evidence: keys whose values are attached; `*` stands for labels.
        relative: judges by history, which begins anew after an intervention.
        certain: what it finds is a mistake whatever was changed on purpose, so that it is not silent after an intervention.
        sampled: its inputs are measured in some updates only.
        optional: its inputs are there only where the run has what they measure, so that their absence says nothing.
        partial: it also judges the record of an update that did not end.
        source: who says so, and why it is as it is.
    """

    type: str
    judge: Judge
    inputs: tuple[str, ...]
    facts: tuple[str, ...] = ()
    watches: tuple[str, ...] = ()
    applies: Callable[[Mapping[str, Any]], bool] = lambda facts: True
    warmup: int = 0
    n_on: int = 1
    n_off: int = 3
    duration: int = 0
    evidence: tuple[str, ...] = field(default=())
    relative: bool = False
    certain: bool = False
    sampled: bool = False
    optional: bool = False
    partial: bool = False
    source: str = ""


def ramp(x: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high` on, linear between; downwards where `high` is the smaller."""
    if low == high:
        return float(x >= high)
    return min(max((x - low) / (high - low), 0.0), 1.0)


def decade_ramp(x: float, low: float, high: float) -> float:
    """The same over logarithms: half of it at the geometric mean."""
    return ramp(log10(max(x, 1e-300)), log10(low), log10(high)) if low > 0 and high > 0 else hard(x >= high)


def hard(wrong: bool) -> float:
    """1 if something is wrong."""
    return 1.0 if wrong else 0.0


def number(x: float) -> str:
    """A number as people write it: three digits, no exponent where it can be avoided."""
    size = abs(x)
    if size == 0:
        return "0"
    if size >= 1e5 or size < 1e-4:
        return f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    if size >= 100:
        return f"{x:.0f}"
    return f"{x:.2g}" if size < 1 else f"{x:.3g}"


def percent(x: float) -> str:
    """A share in percent."""
    size = abs(100 * x)
    return f"{100 * x:.0f} %" if size >= 10 or size == 0 else f"{number(100 * x)} %"


def span(low: float, high: float) -> str:
    """A range in words: one number where its ends read alike."""
    first, last = number(low), number(high)
    return first if first == last else f"{first} to {last}" if low < 0 else f"{first}-{last}"


def times(x: float) -> str:
    """How many times something is something else: 3.2x."""
    return f"{number(x)}x"
