"""Ways to have measured what a run lacks: the function, the fact or the option that supplies the input of an alarm."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from esper_telemetry.core.catalogue import groups
from esper_telemetry.core.metric import Metric, declared
from esper_telemetry.core.record import Level, template_of

WATCHED: Final = ("grad/global/", "grad/clip/", "opt/lr")
"""Beginnings of keys that `telemetry.watch` measures."""
DERIVED_FROM: Final = {
    "value/r2": "value_fit",
    "value/loss_norm": "value_fit",
    "value/bias_over_std": "value_fit",
    "policy/entropy_rate": "policy_entropy",
    "policy/action_shift_js": "action_shift",
}
"""Functions of the values from which keys of `history` are derived."""
PART_FAMILIES: Final = frozenset({"lstm"})
"""Families of parts that a network may lack: a run that names no such part, and reports none of the keys, is not asked about them."""


class Supplier(NamedTuple):
    """The declaration of a key, and the functions that return its group."""

    metric: Metric
    functions: tuple[str, ...]


@lru_cache(maxsize=1)
def suppliers() -> Mapping[str, Supplier]:
    """Return the suppliers of all declared keys: the functions beside a group whose return annotation names it."""
    found: dict[str, Supplier] = {}
    for group in groups():
        functions = []
        for name, value in vars(sys.modules[group.__module__]).items():
            function = inspect.unwrap(value) if callable(value) else None
            if inspect.isfunction(function) and not name.startswith("_"):
                annotation = str(function.__annotations__.get("return", ""))
                if re.search(rf"\b{group.__name__}\b", annotation):
                    functions.append(name)
        for _, metric in declared(group):
            found.setdefault(metric.key, Supplier(metric, tuple(functions)))
    return found


def key_remedy(key: str, facts: Mapping[str, Any]) -> str:
    """Return what has a key measured in a run of these facts."""
    supplier = suppliers().get(template_of(key, suppliers()))
    level = str(facts.get("level", "normal"))
    if supplier is not None and level.upper() in Level.__members__ and supplier.metric.level > Level.parse(level):
        return f'level="{supplier.metric.level.name.lower()}"'
    if facts.get("trainer") or facts.get("optimizer"):  # of an adapter, or of the bundled trainer
        if supplier is not None and supplier.metric.cost in ("sampled", "debug"):
            return 'a larger budget=, or level="debug": it is measured in sampled updates'
        return "nothing yet: this trainer's adapter does not report it"
    if key.startswith(WATCHED):
        return "telemetry.watch(agent, optimizer)"
    function = DERIVED_FROM.get(key) or next(iter(supplier.functions if supplier else ()), "")
    return f"telemetry.observe({function}(...))" if function else f'telemetry.log({{"{key}": ...}})'


def fact_remedy(names: tuple[str, ...]) -> str:
    """Return what has a run say facts."""
    return f"Telemetry(facts={{{', '.join(f'{name!r}: ...' for name in names)}}})".replace("'", '"')
