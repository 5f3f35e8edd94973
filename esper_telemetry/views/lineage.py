"""Where the values of a metric come from, and who reads them.

Both are read from the code, so they stay true. The source of a package shows which function makes a group of metrics, and who calls it. The
declarations of alarms, views and sinks name the keys that they read.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from inspect import getsource
from pathlib import Path
from typing import Final, NamedTuple

from esper_telemetry.alarms.metric_entries import MetricEntry, metric_entries
from esper_telemetry.alarms.verdict import remarks, return_course, run_outcome
from esper_telemetry.core.catalogue import families, family_name, groups
from esper_telemetry.core.metric import Derived, Metric, declared
from esper_telemetry.core.record import Level, RunInfo
from esper_telemetry.history import recent_return
from esper_telemetry.history.derive import TEST_EVERY_UPDATES, TEST_SUFFIXES
from esper_telemetry.history.gradient_history import LAYER
from esper_telemetry.sinks.console import COLUMNS
from esper_telemetry.sinks.layout import overview_keys
from esper_telemetry.views.equation_table import EQUATION_TEMPLATE
from esper_telemetry.views.panels import view_declarations
from esper_telemetry.views.progress import TIME_PARTS
from esper_telemetry.views.verdict_text import SUMMARY_LINES

KEY_LABEL: Final = "{key}"
REPORTED: Final[Mapping[str, tuple[str, ...]]] = {
    "{layer}".join(LAYER): ("picture of the gradients in report",),
    EQUATION_TEMPLATE: ("table of equations in report, diagnose and watch",),
}
"""Parts of views beyond the declared ones."""
LR_RESPONSE: Final = "opt/update_to_weight/lr_response"
IMPORT: Final = re.compile(r"^(?:    )?from ([\w.]+) import (\([^)]*\)|.*)$", re.MULTILINE)


class Emitter(NamedTuple):
    """The code that makes the values of a metric.

    Attributes:
        group: class that holds them, with its module.
        field: of the group.
        functions: public functions and methods that make the group, with their modules.
        called_in: other modules that call these functions.
        inputs: keys of the record that they are computed from; if they are measured, the arguments of the functions.
    """

    group: str
    field: str
    functions: tuple[str, ...]
    called_in: tuple[str, ...]
    inputs: tuple[str, ...]


@lru_cache(maxsize=1)
def _fields() -> Mapping[str, tuple[type, str]]:
    """Return the group and the field of every declared key; the first of several declarations counts, as in the catalogue."""
    return {metric.key: (group, item.name) for group in reversed(groups()) for item, metric in declared(group)}


class Definition(NamedTuple):
    """A function or method: its arguments, and the names that its body uses."""

    arguments: tuple[str, ...]
    names: frozenset[str]


def emitter(key: str) -> Emitter:
    """Return the emitter of a declared key."""
    group, field = _fields()[key]
    functions = _makers(group)
    if issubclass(group, Derived):
        inputs = (*((KEY_LABEL,) if key.startswith(f"{KEY_LABEL}/") else ()), *group.sources)
    else:
        arguments = [_definitions(module)[name].arguments for module, name in functions]
        inputs = tuple(dict.fromkeys(argument for names in arguments for argument in names))
    makers = tuple(f"{module}.{name}" for module, name in functions)
    callers = tuple(dict.fromkeys(caller for module, name in functions for caller in _callers(module, name)))
    return Emitter(f"{group.__module__}.{group.__qualname__}", field, makers, callers, inputs)


@cache
def _makers(group: type) -> tuple[tuple[str, str], ...]:
    """Return module and name of the public functions that make a group, directly or by private functions of their module."""
    makers = []
    for module in (group.__module__, *_users(group.__module__, group.__name__)):
        definitions = _definitions(module)
        direct = [name for name, definition in definitions.items() if group.__name__ in definition.names]
        makers += [
            (module, name) for name in dict.fromkeys(one for name in direct for one in _public(definitions, name))
        ]
    return tuple(makers)


@cache
def _callers(module: str, name: str) -> tuple[str, ...]:
    """Return the other modules that use a function; none for a method, whose name does not say whose it is."""
    users = () if "." in name else _users(module, name)
    return tuple(user for user in users if any(name in definition.names for definition in _definitions(user).values()))


def _public(definitions: Mapping[str, Definition], name: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield a function if it is public, else the public ones of its module that lead to it."""
    short = name.rpartition(".")[2]
    if not short.startswith("_"):
        yield name
        return
    for caller, definition in definitions.items():
        if short in definition.names and caller not in seen | {name}:
            yield from _public(definitions, caller, seen | {name})


@cache
def _texts(package: str) -> Mapping[str, str]:
    """Return the source of a package by module; nothing for one without files."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return {}
    first = Path(file)
    paths = sorted(first.parent.rglob("*.py") if first.name == "__init__.py" else [first])
    root = first.parent.parent if first.name == "__init__.py" else first.parent
    names = [".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return {name: path.read_text(encoding="utf-8") for name, path in zip(names, paths, strict=True)}


def _users(module: str, name: str) -> Iterator[str]:
    """Yield the modules that import a name from a module, or from a package above it."""
    for user, text in _texts(module.partition(".")[0]).items():
        if name in text and user != module:
            for source, names in IMPORT.findall(text):
                if f"{module}.".startswith(f"{source}.") and name in re.findall(r"\w+", names):
                    yield user
                    break


@cache
def _definitions(module: str) -> Mapping[str, Definition]:
    """Return the functions and methods of a module by qualified name."""
    definitions = {}
    for node in ast.parse(_texts(module.partition(".")[0]).get(module, "")).body:
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for part in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(part, ast.FunctionDef):
                every = (*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs)
                inner = [leaf for statement in part.body for leaf in ast.walk(statement)]
                names = {leaf.id for leaf in inner if isinstance(leaf, ast.Name)}
                names |= {leaf.attr for leaf in inner if isinstance(leaf, ast.Attribute)}
                arguments = tuple(one.arg for one in every if one.arg not in ("self", "cls"))
                definitions[prefix + part.name] = Definition(arguments, frozenset(names))
    return definitions


class Readers(NamedTuple):
    """The parts of telemetry that read a metric.

    Attributes:
        alarms: types of the alarms.
        metrics: keys that are computed from it.
        live: places where people see it during the run.
        verdicts: other parts of the verdict.
    """

    alarms: tuple[str, ...]
    metrics: tuple[str, ...]
    live: tuple[str, ...]
    verdicts: tuple[str, ...]


def readers(entry: MetricEntry) -> Readers:
    """Return what reads a metric."""
    key = entry.metric.key
    return Readers(
        alarms=tuple(alarm.type for alarm in entry.alarms),
        metrics=(*(f"{key}/{ending}" for ending in entry.series), *_computed_from().get(key, ())),
        live=tuple(_live(key)),
        verdicts=tuple(name for name, text in _verdicts().items() if f'"{key}"' in text),
    )


@lru_cache(maxsize=1)
def _computed_from() -> Mapping[str, Sequence[str]]:
    """Return, by source, the keys of derived metrics other than histories."""
    computed: dict[str, list[str]] = {}
    for group in groups():
        for source in group.sources if issubclass(group, Derived) else ():
            computed.setdefault(source, []).extend(metric.key for _, metric in declared(group))
    return computed


@lru_cache(maxsize=1)
def _verdicts() -> Mapping[str, str]:
    """Return the source of the parts that judge a run by keys which no declaration names; they spell them as strings."""
    parts = {"outcome of the run": (run_outcome, return_course, recent_return), "remarks of `diagnose`": (remarks,)}
    return {name: "".join(map(getsource, modules)) for name, modules in parts.items()}


def _live(key: str) -> Iterator[str]:
    views = view_declarations()
    yield from (f"panel {panel.name!r}" for panel in views.panels if any(key in chart.keys for chart in panel.charts))
    yield from (f"table {table.name!r}" for table in views.tables if key in table.keys)
    yield from (f"first line of watch ({part.name})" for part in views.strip if key in part.keys)
    if key in TIME_PARTS.values():
        yield "header of watch"
    yield from (f"console ({column.label})" for column in COLUMNS if key in column.keys)
    yield from REPORTED.get(key, ())
    if key in SUMMARY_LINES:
        yield "summary of train"
    if key in _overview():
        yield "first page of TensorBoard, W&B and MLflow"


@lru_cache(maxsize=1)
def _overview() -> frozenset[str]:
    infos = {entry.metric.key: entry.info() for entry in metric_entries()}
    return frozenset(overview_keys(RunInfo("every", "every", None, 0.0, metrics=infos)))


def audience(entry: MetricEntry) -> tuple[str, ...]:
    """Return who needs a metric: operator, automation, developer or researcher."""
    metric, read = entry.metric, readers(entry)
    family = families().get(family_name(metric.key))
    needs = {
        "operator": read.live or entry.priority in ("critical", "high"),
        "automation": read.alarms or read.verdicts,
        "developer": read.alarms or metric.healthy or metric.warn or metric.critical or metric.level is Level.DEBUG,
        "researcher": family is None or family.reproducible,
    }
    return tuple(name for name, is_needed in needs.items() if is_needed)


def moment(metric: Metric) -> str:
    """Return when a metric is measured."""
    if metric.level is Level.DEBUG or metric.cost == "debug":
        return "on demand, in updates at level debug"
    if metric.cost == "sampled":
        return "in sampled updates"
    is_test = metric.key.removeprefix(f"{KEY_LABEL}/") in TEST_SUFFIXES or metric.key == LR_RESPONSE
    return f"every {TEST_EVERY_UPDATES} updates" if is_test else "every update"
