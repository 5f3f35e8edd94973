"""All installed alarms, built-in ones and plugins, and the values of their bounds.

Bounds can be changed one by one by name, or together by a multiplier. They are declared next to the rules that read them. There are three
kinds: bounds for values above them, bounds for values below them, and counts, which multipliers do not change.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, Final, Self

from esper_telemetry.alarms.alarm_bounds import Bound, Limits, Ramp
from esper_telemetry.alarms.rule import AlarmRule
from esper_telemetry.alarms.rules import (
    data_alarms,
    equation_alarms,
    exploration_alarms,
    gradient_alarms,
    gradient_course_alarms,
    integrity_alarms,
    language_alarms,
    memory_alarms,
    optimizer_alarms,
    stagnation_alarms,
    startup_alarms,
    task_alarms,
    telemetry_alarms,
    trust_region_alarms,
    value_alarms,
)
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.messages import did_you_mean, shown
from esper_telemetry.core.redaction import error_line

ENTRY_POINT_GROUP: Final = "esper_telemetry.alarms"
"""Entry points of plugins: each is an `AlarmRule` or an iterable of them."""

FAMILIES = (
    *(integrity_alarms, equation_alarms, trust_region_alarms, exploration_alarms, value_alarms, data_alarms),
    *(startup_alarms, gradient_alarms, gradient_course_alarms, optimizer_alarms, memory_alarms, language_alarms),
    *(stagnation_alarms, task_alarms, telemetry_alarms),
)
BUILT_IN: tuple[AlarmRule, ...] = tuple(rule for family in FAMILIES for rule in family.RULES)

_logger = logging.getLogger("esper_telemetry")


@lru_cache(maxsize=1)
def alarm_rules() -> tuple[AlarmRule, ...]:
    """Return all installed alarms: built-in ones by family, then plugins.

    A plugin that cannot be loaded or repeats a type is skipped with a warning.
    """
    rules = list(BUILT_IN)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            rules = [*with_alarms(rules, as_rules(entry.load()))]
        except (Exception, SystemExit) as error:  # a plugin's own code
            _logger.warning("The alarms of %s cannot be used: %s", entry.name, error_line(error))
    return tuple(rules)


def as_rules(value: AlarmRule | Iterable[AlarmRule]) -> Iterator[AlarmRule]:
    """Yield one rule or several; raises TypeError for anything else."""
    if not isinstance(value, AlarmRule | Iterable) or getattr(value, "ndim", None) is not None:
        raise TypeError(f"alarms must be instances of AlarmRule, got {shown(value)}")
    for rule in (value,) if isinstance(value, AlarmRule) else value:
        if not isinstance(rule, AlarmRule):
            raise TypeError(f"alarms must be instances of AlarmRule, got {shown(rule)}")
        yield rule


def with_alarms(rules: Iterable[AlarmRule], added: Iterable[AlarmRule]) -> tuple[AlarmRule, ...]:
    """Return the rules and the added ones; raises ValueError for two rules with the same type."""
    by_type = {rule.type: rule for rule in rules}
    for rule in added:
        if rule.type in by_type:
            raise ValueError(f"an alarm {rule.type!r} already exists; give the new alarm a different type")
        by_type[rule.type] = rule
    return tuple(by_type.values())


def is_foreign(rule: AlarmRule) -> bool:
    """Return whether an alarm's judge is defined outside this package."""
    module = getattr(rule.judge, "__module__", None) or type(rule.judge).__module__
    return rule.judge is not None and module.partition(".")[0] != __name__.partition(".")[0]


ON, OFF = "on", "off"


def bounds(alarms: Iterable[AlarmRule] = ()) -> dict[str, Bound]:
    """Return the bounds of all installed alarms and of these ones, by name."""
    return {bound.name: bound for rule in (*alarm_rules(), *alarms) for bound in rule.single_bounds}


class Thresholds(Limits):
    """Bounds of all alarms, readable as attributes; `low` and `high` are the ends of ramps of severity.

    Args:
        off: types of alarm that are switched off; by default the rules with `default_off`.
        alarms: your own alarms, as for `Telemetry(alarms=...)`, whose bounds can then be changed too.
        values: bounds by name.

    Attributes:
        off: types of alarm that are switched off.

    Raises:
        TypeError: for an unknown bound.
        ValueError: for a value that is not a finite number, and for alarms of one type.
    """

    def __init__(self, *, off: Iterable[str] | None = None, alarms: AlarmRule | Iterable[AlarmRule] = (), **values: float) -> None:
        self._alarms = tuple(as_rules(alarms))
        self._rules = with_alarms(alarm_rules(), self._alarms)
        declared = bounds(self._alarms) if values else {}
        for name in values:
            if name not in declared:
                raise TypeError(f"unknown threshold {name!r}{did_you_mean(name, list(declared))}")
        changed = {name: _number(declared[name], value) for name, value in values.items()}
        super().__init__({name: value for name, value in changed.items() if value != declared[name].default})
        self._check_ramps(changed)
        self.off = self._default_off() if off is None else frozenset(off)

    def _default_off(self) -> frozenset[str]:
        return frozenset(rule.type for rule in self._rules if rule.default_off)

    def _check_ramps(self, changed: Mapping[str, float]) -> None:
        """Raise ValueError if the ends of a changed ramp are in the wrong order."""
        items = {item for rule in self._rules for item in rule.bounds} if changed else set()
        for span in (item for item in items if isinstance(item, Ramp)):
            low, high = span.bounds
            if not {low.name, high.name}.isdisjoint(changed) and (self[high] - self[low]) * low.direction <= 0:
                larger, smaller = (high, low) if low.direction > 0 else (low, high)
                raise ValueError(f"threshold {larger.name} must be larger than {smaller.name}, got {self[larger]:g} and {self[smaller]:g}")

    def __getattr__(self, name: str) -> float:
        bound = None if name.startswith("_") else bounds(self._alarms).get(name)
        if bound is None:
            raise AttributeError(f"unknown threshold {name!r}")
        return self[bound]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thresholds) and (self.off, self._alarms, self._changes) == (other.off, other._alarms, other._changes)

    def __hash__(self) -> int:
        return hash((self.off, frozenset(self._changes.items())))

    def __repr__(self) -> str:
        return f"Thresholds({', '.join(f'{name}={value!r}' for name, value in self.changes().items())})"

    @classmethod
    def parse(cls, assignments: Iterable[str], before: Self | None = None, *, alarms: AlarmRule | Iterable[AlarmRule] = ()) -> Self:
        """Return `before`, or the defaults, with the changes of `NAME=VALUE` texts; for a type of alarm the value is `on` or `off`.

        The texts may name your own `alarms`, too. Raises ValueError with the offending text.
        """
        changes: dict[str, str] = {}
        for text in assignments:
            name, separator, value = text.partition("=")
            if not separator:
                raise ValueError(f"a threshold must have the form NAME=VALUE, got {text!r}")
            changes[name.strip()] = value.strip()
        return (before or cls(alarms=alarms)).with_changes(changes)

    @classmethod
    def of(cls, facts: Mapping[str, Any], alarms: Iterable[AlarmRule] = ()) -> Self:
        """Return the bounds of a run: the defaults, with the changes in its facts that are valid here."""
        changes, thresholds = Facts.of(facts).thresholds, cls(alarms=alarms)
        with suppress(ValueError):
            return thresholds.with_changes(changes)
        for name, value in changes.items():  # alarms that are not installed here, another version, or an edited journal
            with suppress(ValueError):
                thresholds = thresholds.with_changes({name: value})
        return thresholds

    def changes(self) -> dict[str, float | str]:
        """Return the differences from the defaults, as plain data for `with_changes`."""
        switched = {name: OFF if name in self.off else ON for name in sorted(self.off ^ self._default_off())}
        return {**self._changes, **switched}

    def with_changes(self, changes: Mapping[str, float | str | bool]) -> Self:
        """Return the bounds with other values by name; raises ValueError for an unknown name or an invalid value."""
        off, values = set(self.off), dict(self._changes)
        declared, types = bounds(self._alarms), {rule.type for rule in self._rules}
        for name, value in changes.items():
            if name in types:
                switch = (ON if value else OFF) if isinstance(value, bool) else value
                if switch not in (ON, OFF):
                    raise ValueError(f"alarm {name} must be on or off, got {value!r}")
                (off.discard if switch == ON else off.add)(name)
            elif name in declared:
                values[name] = _number(declared[name], value)
            else:
                raise ValueError(f"unknown threshold {name!r}{did_you_mean(name, [*declared, *types])}")
        return type(self)(off=off, alarms=self._alarms, **values)

    def without(self, types: Iterable[str]) -> Self:
        """Return the bounds with these types of alarm switched off."""
        return type(self)(off=self.off.union(types), alarms=self._alarms, **self._changes)

    def scaled(self, kappa: float) -> Self:
        """Return all bounds `kappa` times as lenient, to plot recall against false alarms; raises ValueError unless it is positive."""
        if not 0 < kappa < math.inf:
            raise ValueError(f"kappa must be positive and finite, got {kappa}")
        declared = bounds(self._alarms).items()
        values = {name: self[bound] * kappa**bound.direction for name, bound in declared if bound.direction}
        return type(self)(off=self.off, alarms=self._alarms, **{**self._changes, **values})


def _number(bound: Bound, value: float | str | bool) -> float:
    """Return a valid value of a bound as a number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"threshold {bound.name} must be a finite number, got {value!r}")
    if number < bound.lowest:
        raise ValueError(f"threshold {bound.name} must be at least {bound.lowest:g}, got {value!r}")
    return number
