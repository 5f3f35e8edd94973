"""All installed alarms: built-in ones and plugins."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Final

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
from esper_telemetry.alarms.rules.integrity_alarms import NONFINITE, NONFINITE_KEY
from esper_telemetry.core.messages import shown
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


def alarms_reading(key: str) -> tuple[AlarmRule, ...]:
    """Return the alarms that read a key or template; alarms for which it is the deciding input come first."""
    rules = alarm_rules()
    if key.endswith(NONFINITE):
        return tuple(rule for rule in rules if rule.type == NONFINITE_KEY)
    deciding = [rule for rule in rules if rule.inputs[0] == key]
    return (*deciding, *(rule for rule in rules if key in rule.inputs[1:]))


__all__ = ["NONFINITE", "alarm_rules", "alarms_reading", "as_rules", "with_alarms"]
