"""One table from metric keys, or the beginnings of formulas for cases without a key, to adapters from inputs to values."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vector_adapters import alarms, data, gradients, lstm, policy, representation, series, values

Adapter = Callable[[Mapping[str, Any]], dict[str, Any]]

BY_KEY: dict[str, Adapter] = {
    **policy.ADAPTERS,
    **data.ADAPTERS,
    **values.ADAPTERS,
    **gradients.ADAPTERS,
    **series.ADAPTERS,
    **lstm.ADAPTERS,
    **representation.ADAPTERS,
    **alarms.ADAPTERS,
}
BY_FORMULA: dict[str, Adapter] = {**data.FORMULA_ADAPTERS, **series.FORMULA_ADAPTERS, **lstm.FORMULA_ADAPTERS, **alarms.FORMULA_ADAPTERS}


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
