"""Adapters from inputs of reference cases to values, by metric keys, or by the beginnings of formulas for cases without a key."""

from collections.abc import Iterator, Mapping
from typing import Any

from vector_adapters import alarms, data, gradients, lstm, policy, representation, series, values  # noqa: F401  # they declare adapters
from vector_adapters.inputs import BY_FORMULA, BY_KEY, Adapter


def adapters_of(case: Mapping[str, Any]) -> list[Adapter]:
    """Return the adapters of a case, by its formula if it is listed, otherwise by its metric keys."""
    by_formula = [adapter for start, adapter in BY_FORMULA.items() if case["formula"].startswith(start)]
    result = by_formula or [BY_KEY[key] for key in case["metric_keys"] if key in BY_KEY]
    return list(dict.fromkeys(result))


def uncovered(case: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a case that no adapter computes, or its formula if it lacks keys."""
    if adapters_of(case) and all(key in BY_KEY for key in case["metric_keys"]):
        return
    if any(case["formula"].startswith(start) for start in BY_FORMULA):
        return
    yield from [key for key in case["metric_keys"] if key not in BY_KEY] or [case["formula"]]
