"""The most unusual values of a run, and how to supply the inputs that it lacks.

Values are compared with the metrics' bounds and with `healthy_values.json`, which `benchmarks/healthy_values.py` writes: five quantiles of
healthy runs for each kind of task and each key whose unit does not depend on the task.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import statistics
import sys
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Final, NamedTuple

from esper_telemetry.alarms.verdict.bounds import HEAD, RANGE, HealthyRange, Other, distance_beyond, values_of
from esper_telemetry.alarms.verdict.run_outcome import GOOD, OutcomeKind
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.messages import number
from esper_telemetry.core.metric import Metric, catalogue, declared, family_name, groups
from esper_telemetry.core.record import Level, Record, template_of
from esper_telemetry.equations.equation import EQUATION_KEY, equations

MAX_UNUSUAL: Final = 10
MIN_SCORE: Final = 1.0
"""Score above which a value is unusual: it is outside the middle 80 % of the values of healthy runs."""
MAX_SAMPLES: Final = 400  # values per key that are kept; longer runs keep every second value, every fourth and so on
QUANTILES: Final = (0.01, 0.1, 0.5, 0.9, 0.99)
WARN_SCORE, CRITICAL_SCORE = 2.0, 4.0  # scores of values beyond a metric's bounds, plus the distance in decades

UNITS: Final = re.compile(
    r"fraction.*|share|nats.*|ratio|1( .*)?|cosine|σ|σ_R|decades|relative error|severity|Pearson|Spearman ρ|accuracy|dimensions|flag"
    r"|normalised advantage|1/update"
)
"""Units that do not depend on the size of rewards, gradients or weights."""
FAMILIES_ASIDE: Final = frozenset({"perf", "telemetry", "alarm", "episode", "eval", "task", "train", "seed", "env", "norm"})
KEYS_ASIDE: Final = frozenset({"policy/entropy", "policy/entropy_marginal", "loss/entropy", "policy/logp/min"})
"""Families and keys that depend on the machine, the task or the number of actions."""
NORMALIZED_MEAN: Final = "adv/norm/mean"
NORMALIZED_KEYS: Final = (NORMALIZED_MEAN, "adv/norm/std", "integrity/adv_norm")
NOT_OF_TRAINING: Final = frozenset({"perf", "telemetry", "alarm"})
"""Families that explain no outcome, not even beyond their critical bounds."""
MIN_SPREADS: Final = {"ratio": 0.1, "dimensions": 0.5, "1 (excess)": 2.0, "relative error": 1e-3, "nats": 0.002}
MIN_SPREAD: Final = 0.03
"""Smallest distance between a quantile and the median, by unit: two healthy runs differ by as much."""


class Unusual(NamedTuple):
    """An unusual value.

    Attributes:
        key: key of the metric.
        value: median over the run.
        score: larger is more unusual.
        is_far: whether the value is beyond the range of healthy runs, or beyond the metric's bounds.
        text: the value with its healthy range.
        is_critical: whether the value is beyond the metric's critical bound.
    """

    key: str
    value: float
    score: float
    is_far: bool
    text: str
    is_critical: bool = False


def keys_without_bounds(facts: Facts, records: Iterable[Mapping[str, float]]) -> Collection[str]:
    """Return the keys whose bounds do not apply to a run: of normalised advantages if it does not normalise them (their mean if that is
    not known), and of returns that are a published variant by the latest of these records that has the check. Columns that were found by
    name may be others, so there the bound applies only if a mistake explains the returns.
    """
    normalizes, returns = facts.normalize_advantages, equations()["returns"]
    keys = set[str]() if normalizes else {NORMALIZED_MEAN} if normalizes is None else set(NORMALIZED_KEYS)
    checked = [values for values in records if EQUATION_KEY + returns.label() in values]
    explanations = returns.explanations(checked[-1]) if checked else ()
    if any(one.variant for one in explanations) or (facts.columns_by_name and not explanations):
        keys.add("integrity/gae_identity")
    return keys


class RunValues:
    """Values of a run by key, thinned out in a long run."""

    def __init__(self) -> None:
        self._values: dict[str, array[float]] = {}
        self._every, self._place = 1, 0

    def add(self, record: Record) -> None:
        """Add a record, unless thinning leaves it out."""
        if self._place % self._every == 0:
            for key, value in record.values.items():
                if judged_metric(key) is not None and math.isfinite(value):
                    self._values.setdefault(key, array("d")).append(value)
            if self._place // self._every >= MAX_SAMPLES:
                self._values = {key: values[::2] for key, values in self._values.items()}
                self._every *= 2
        self._place += 1

    def unusual(self, facts: Facts, aside: Collection[str] = ()) -> tuple[Unusual, ...]:
        """Return the most unusual values: first those beyond their critical bounds, then those far from healthy runs, worst first. Keys
        `aside` are left out.
        """
        table = healthy_values().get(kind_of_task(facts), {})
        found, medians = [], {key: statistics.median(self._values[key]) for key in self._values.keys() - aside}
        for key, value in medians.items():
            if (judged := judged_metric(key)) is not None:
                metric, head = judged
                entry = judge_value(metric, value, table.get(key), values_of(medians, head))
                found += [] if entry is None else [entry._replace(key=key)]
        return tuple(sorted(found, key=lambda one: (not one.is_critical, not one.is_far, -one.score, one.key))[:MAX_UNUSUAL])

    @property
    def samples(self) -> Mapping[str, array[float]]:
        """The kept values by key."""
        return self._values


@lru_cache(maxsize=1)
def scale_free() -> Mapping[str, Metric]:
    """Return the metrics whose values can be compared between runs, by key."""
    return {
        metric.key: metric
        for metric in catalogue()
        if "{" not in metric.key
        and UNITS.fullmatch(metric.unit)
        and family_name(metric.key) not in FAMILIES_ASIDE
        and metric.key not in KEYS_ASIDE
    }


@lru_cache(maxsize=4096)
def judged_metric(key: str) -> tuple[Metric, str] | None:
    """Return the metric of a key whose median over a run can be judged, and its head; None for other keys.

    Its values can be compared between runs, or it has bounds in plain numbers. Keys of groups and layers are not judged.
    """
    if (metric := scale_free().get(key)) is not None:
        return metric, ""
    for template, metric in bounded().items():
        if template == key:
            return metric, ""
        before, _, after = template.partition(HEAD)
        if after and key.startswith(before) and key.endswith(after) and "/" not in (head := key[len(before) : -len(after)]):
            return metric, head
    return None


@lru_cache(maxsize=1)
def bounded() -> Mapping[str, Metric]:
    """Return the metrics with a bound in plain numbers, by key or by the template of all heads."""
    return {
        metric.key: metric
        for metric in catalogue()
        if "{" not in metric.key.replace(HEAD, "")
        and family_name(metric.key) not in NOT_OF_TRAINING
        and any(distance_beyond(text, 1.0) is not None for text in (metric.critical, metric.warn))
    }


@lru_cache(maxsize=1)
def healthy_values() -> Mapping[str, Mapping[str, list[float]]]:
    """Return the quantiles of healthy runs by kind of task and key."""
    text = files("esper_telemetry.alarms").joinpath("healthy_values.json").read_text(encoding="utf-8")
    kinds: dict[str, dict[str, list[float]]] = json.loads(text)["kinds"]
    return kinds


def notable(critical: Mapping[str, float], facts: Facts, outcome: OutcomeKind) -> dict[str, float]:
    """Return values beyond their critical bounds without those that healthy runs have too, if the run does well."""
    table = healthy_values().get(kind_of_task(facts), {}) if outcome in GOOD else {}
    return {key: value for key, value in critical.items() if key not in table or not table[key][0] <= value <= table[key][-1]}


def kind_of_task(facts: Facts) -> str:
    """Return the kind of task by the run's facts: `discrete`, `continuous`, `memory` with an LSTM, or `any` if unknown."""
    if facts.policy == "lstm":
        return "memory"
    if not facts.heads:
        return "any"
    return "discrete" if set(facts.heads.values()) == {"categorical"} else "continuous"


def judge_value(metric: Metric, value: float, quantiles: list[float] | None, other: Other = lambda key: None) -> Unusual | None:
    """Return how unusual the median of a metric over a run is; None if it is not unusual, or better than in healthy runs.

    With quantiles, the score depends on the distance from the median of healthy runs, relative to their 10 % or 90 % quantile's.
    The warning bound counts only beyond the 1 % and 99 % quantiles, so that values of healthy runs pass; the critical one always counts.
    """
    is_critical = bool(distance_beyond(metric.critical, value, other))
    score, is_far = bound_score(metric, value, other), True
    if quantiles is not None:
        lowest, low, middle, high, highest = quantiles
        if is_better(metric, value, middle):
            return None
        least = max(MIN_SPREADS.get(metric.unit, MIN_SPREAD), 0.02 * abs(middle))
        distance = max((value - middle) / max(high - middle, least), (middle - value) / max(middle - low, least))
        beyond = max((value - highest) / max(highest - middle, least), (lowest - value) / max(middle - lowest, least))
        is_far = beyond > 0.1
        score = max(math.log2(1 + max(distance, 0.0)), score if is_far or is_critical else 0.0)
    if score <= MIN_SCORE:
        return None
    healthy = "" if quantiles is None else f"healthy runs {number(quantiles[1])} to {number(quantiles[3])}"
    bounds = {"healthy": metric.healthy, "warning": metric.warn, "critical": metric.critical}
    parts = [healthy, *(f"{name}: {text}" for name, text in bounds.items() if text)]
    text = f"{number(value)} ({'; '.join(filter(None, parts))})"
    return Unusual(metric.key, value, score, is_far, text, is_critical)


def is_better(metric: Metric, value: float, middle: float) -> bool:
    """Return whether a value is on the good side of a healthy one: bounds on one side only say which side is bad."""
    ranges = [HealthyRange.parse(text.partition(" with ")[0].partition(" unless ")[0]) for text in (metric.critical, metric.warn)]
    bad = {"high" if one.low is not None else "low" for one in ranges if one and (one.low is None) is not (one.high is None)}
    return (bad == {"high"} and value < middle) or (bad == {"low"} and value > middle)


def bound_score(metric: Metric, value: float, other: Other = lambda key: None) -> float:
    """Return the score of a value by the metric's bounds if they are plain numbers; 0 within the bounds."""
    for text, score in ((metric.critical, CRITICAL_SCORE), (metric.warn, WARN_SCORE)):
        distance = distance_beyond(text, value, other)
        if distance is not None and distance > 0:
            return score + min(distance, 2.0)
    match = RANGE.fullmatch(metric.healthy)
    if match:
        low, high = float(match[1]), float(match[2])
        return MIN_SCORE if value < low - (high - low) or value > high + (high - low) else 0.0
    return 0.0


def quantiles_of(runs: Iterable[Mapping[str, Iterable[float]]]) -> Iterator[tuple[str, list[float]]]:
    """Yield each key with the quantiles of its values over several runs of equal weight."""
    by_key: dict[str, list[list[float]]] = {}
    for run in runs:
        for key, values in run.items():
            by_key.setdefault(key, []).append(sorted(values))
    for key, samples in sorted(by_key.items()):
        count = max(map(len, samples))
        pooled = sorted(values[len(values) * place // count] for values in samples for place in range(count))
        yield key, [pooled[min(len(pooled) - 1, int(share * len(pooled)))] for share in QUANTILES]


WATCHED: Final = ("grad/global/", "grad/clip/", "opt/lr")  # prefixes of the keys that `telemetry.watch` measures
DERIVED_FROM: Final = {
    "value/r2": "value_fit",
    "value/loss_norm": "value_fit",
    "value/bias_over_std": "value_fit",
    "policy/entropy_rate": "policy_entropy",
    "policy/action_shift_js": "action_shift",
}
"""Functions that return the inputs of keys derived in `history`."""
OBSERVE: Final = "telemetry.observe"
PART_FAMILIES: Final = frozenset({"lstm"})
"""Families of optional parts of a network: they are not requested from a run that neither names the part nor reports any of its keys."""


@lru_cache(maxsize=1)
def suppliers() -> Mapping[str, tuple[Metric, tuple[str, ...]]]:
    """Return the metric of each declared key, and the functions in its group's module whose return annotation names the group."""
    found: dict[str, tuple[Metric, tuple[str, ...]]] = {}
    for group in groups():
        functions = []
        for name, value in vars(sys.modules[group.__module__]).items():
            function = inspect.unwrap(value) if callable(value) else None
            if inspect.isfunction(function) and not name.startswith("_"):
                annotation = str(function.__annotations__.get("return", ""))
                if re.search(rf"\b{group.__name__}\b", annotation):
                    functions.append(name)
        for _, metric in declared(group):
            found.setdefault(metric.key, (metric, tuple(functions)))
    return found


def key_remedy(key: str, facts: Facts) -> str:
    """Return the call or option with which a run with these facts measures a key."""
    metric, functions = suppliers().get(template_of(key, suppliers()), (None, ()))
    level = facts.level or "normal"
    if metric is not None and level.upper() in Level.__members__ and metric.level > Level.parse(level):
        return f'level="{metric.level.name.lower()}"'
    if not facts.own_loop:
        if metric is not None and metric.cost in ("sampled", "debug"):
            return 'a larger budget=, or level="debug": it is measured in sampled updates'
        return "not available: this trainer's adapter does not report it"
    if key.startswith(WATCHED):
        return "telemetry.watch(agent, optimizer)"
    function = DERIVED_FROM.get(key) or next(iter(functions), "")
    return f"{OBSERVE}({dotted_name(function)}(...))" if function else f'telemetry.log({{"{key}": ...}})'


def dotted_name(function: str) -> str:
    """Return the name by which a program imports a metric function, preferably from `esper_telemetry.metrics`."""
    modules = ("esper_telemetry.metrics", *(group.__module__ for group in groups()))
    return f"{next(module for module in modules if function in dir(sys.modules[module]))}.{function}"


def fact_remedy(names: tuple[str, ...]) -> str:
    """Return the call that declares facts of a run."""
    if names == ("groups",):
        return "telemetry.watch(agent, optimizer, actor=..., critic=...)"
    return f"Telemetry(facts={{{', '.join(f'{name!r}: ...' for name in names)}}})".replace("'", '"')
