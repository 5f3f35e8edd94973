"""Requirements on arguments: each function returns the value, or raises TypeError or ValueError, one sentence with the value in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from numbers import Integral, Real
from typing import Any, TypeVar

from esper_telemetry.core.arrays import shown

Value = TypeVar("Value")


def require_text(name: str, value: Any, *, may_be_empty: bool = False) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, got {shown(value)}")
    if not (may_be_empty or value.strip()):
        raise ValueError(f"{name} must not be empty, got {shown(value)}")
    return value


def require_flag(name: str, value: Any) -> bool:
    """Return True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return value


def require_number(
    name: str, value: Any, *, low: float = -math.inf, high: float = math.inf, above: float = -math.inf
) -> float:
    """Return a finite number from `low` to `high`, and larger than `above`."""
    if type(value) not in (int, float) and (isinstance(value, bool) or not isinstance(value, Real)):
        raise TypeError(f"{name} must be one number, got {shown(value)}")
    if not (math.isfinite(value) and low <= value <= high and value > above):
        raise ValueError(f"{name} must be {_range(low, high, above)}, got {shown(value)}")
    return float(value)


def require_count(name: str, value: Any, *, low: int = 0, high: float = math.inf) -> int:
    """Return a whole number from `low` to `high`."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise TypeError(f"{name} must be a whole number, got {shown(value)}")
    if not low <= value <= high:
        ends = f"at least {low:,}" if high == math.inf else f"from {low:,} to {high:,}"
        raise ValueError(f"{name} must be {ends}, got {shown(value)}")
    return int(value)


def require_each(
    name: str, values: Any, require: Callable[[str, Any], Value], *, may_be_empty: bool = True
) -> tuple[Value, ...]:
    """Return the items of a tuple or list, each of which meets a requirement."""
    if not isinstance(values, tuple | list):
        raise TypeError(f"{name} must be a tuple, got {shown(values)}")
    if not (values or may_be_empty):
        raise ValueError(f"{name} must not be empty, got {shown(values)}")
    each = f"each of {name}" if values else ""
    return tuple([require(each, value) for value in values])


def require_choice(name: str, value: Any, choices: Collection[Value]) -> Value:
    """Return one of some values."""
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    raise ValueError(f"{name} must be {_alternatives(choices)}, got {shown(value)}")


def _range(low: float, high: float, above: float) -> str:
    ends = [f"at least {low:g}"] if low > -math.inf else [f"larger than {above:g}"] if above > -math.inf else []
    return " and ".join([*ends, f"at most {high:g}" if high < math.inf else "finite"])


def _alternatives(choices: Iterable[object]) -> str:
    *others, last = map(repr, choices)
    return f"{', '.join(others)} or {last}" if others else last
