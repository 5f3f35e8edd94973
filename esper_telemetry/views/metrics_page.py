"""An entry of the registry as text for people, in `docs/metrics.md` and `esper-telemetry metrics`, and as plain values for programs.

Where values come from, and who reads them, is read from the code, so it stays true. The source of a package shows which function makes a
group of metrics, and who calls it. The declarations of alarms, views and sinks name the keys that they read.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, lru_cache
from inspect import getsource
from pathlib import Path
from typing import Any, Final, NamedTuple

from esper_telemetry.alarms.metric_entries import MetricEntry, descriptions
from esper_telemetry.alarms.verdict import remarks, run_outcome
from esper_telemetry.core.messages import capitalized
from esper_telemetry.core.metric import Derived, Metric, declared, families, family_name, groups, since
from esper_telemetry.core.record import Level, RunInfo
from esper_telemetry.history import recent_return
from esper_telemetry.history.derive import ALL_SUFFIXES, TEST_EVERY_UPDATES, TEST_SUFFIXES
from esper_telemetry.history.gradient_history import LAYER
from esper_telemetry.sinks.console import COLUMNS
from esper_telemetry.sinks.layout import overview_keys
from esper_telemetry.views.equation_table import EQUATION_TEMPLATE
from esper_telemetry.views.panels import view_declarations
from esper_telemetry.views.run_parts import TIME_PARTS
from esper_telemetry.views.verdict_text import SUMMARY_LINES

UNBOUNDED = "no fixed bounds: compare with its own history"
PREFIX = f"{__name__.partition('.')[0]}."
"""Beginning of the names of modules, which the text leaves out."""
CONSOLE_KEYS = frozenset(key for column in COLUMNS for key in column.keys)


def entry_text(entry: MetricEntry) -> str:
    """Return one entry, Markdown."""
    metric = entry.metric
    lines = [f"### `{metric.key}`", "", f"**{capitalized(entry.name)}.** {metric.question}", ""]
    return "\n".join([*lines, *(f"- {line}" for line in _facts(entry))]) + "\n"


def entry_values(entry: MetricEntry) -> dict[str, Any]:
    """Return everything that an entry says, as plain values."""
    info = entry.info()
    described = {item.name: getattr(info, item.name) for item in fields(info)}
    key, is_histogram = entry.metric.key, entry.reduction.startswith("histogram")
    lists = {"alarms": [alarm.type for alarm in entry.alarms], "series": list(entry.series)}
    return {
        "key": key,
        **described,
        **lists,
        "sinks": _sink_forms(entry),
        "type": "histogram" if is_histogram else "float",
        "precision": "float64; float32 in TensorBoard",
        "default": "absent",
        "emitter": emitter(key)._asdict(),
        "readers": readers(entry)._asdict(),
        "audience": list(audience(entry)),
        "when": moment(entry.metric),
        "since": since(entry.metric),
        "changes": list(entry.metric.changes),
    }


def _sink_forms(entry: MetricEntry) -> dict[str, str]:
    """Return the form in which the journal and each bundled sink carry a metric."""
    if entry.reduction.startswith("histogram"):
        forms = {"journal": "histogram", "tensorboard": "histogram", "wandb": "histogram"}
        forms["mlflow"] = "quantiles p05, p50 and p95"
    else:
        form = "at level debug, or with details" if "{layer}" in entry.metric.key else "scalar"
        forms = {"journal": "scalar", **dict.fromkeys(("tensorboard", "wandb", "mlflow"), form)}
    return forms | ({"console": "column"} if entry.metric.key in CONSOLE_KEYS else {})


def _facts(entry: MetricEntry) -> Iterator[str]:
    metric = entry.metric
    bounds = {"normal": metric.healthy, "warning": metric.warn, "critical": metric.critical}
    text = "; ".join(f"**{name}** {bound}" for name, bound in bounds.items() if bound) or UNBOUNDED
    yield text + (f" ({metric.source})" if metric.source else "")
    yield from _when_not_normal(entry)
    if metric.undefined:
        yield f"absent when: {metric.undefined}"
    if entry.series:
        names = (
            f"`/{entry.series[0]}` and all other endings"
            if len(entry.series) >= len(ALL_SUFFIXES)
            else ", ".join(f"`/{name}`" for name in entry.series)
        )
        yield f"compared with earlier updates under this key and an ending ([histories](#histories)): {names}"
    yield from _lineage(entry)
    yield from metric.changes
    parts = [metric.id, f"unit: {metric.unit}", _range(entry), entry.reduction, f"level {metric.level.name.lower()}"]
    added = since(metric)
    parts += [moment(metric), f"priority {entry.priority}", f"since {added}" if added[:1].isdigit() else added]
    forms = {form for sink, form in _sink_forms(entry).items() if sink not in ("journal", "console")}
    if forms != {"scalar"}:
        parts.append("in dashboards: " + ", ".join(sorted(forms)))
    yield " · ".join(part for part in parts if part)


def _lineage(entry: MetricEntry) -> Iterator[str]:
    """Yield the source of the value, and its readers."""
    made, read = emitter(entry.metric.key), readers(entry)
    field = f"{made.group.rpartition('.')[2]}.{made.field}"
    text = f"made by {_listed(made.functions)} as `{field}`" if made.functions else f"made as `{field}`"
    text += f" from {_listed(made.inputs)}" if made.inputs else ""
    yield text + (f"; called in {_listed(made.called_in)}" if made.called_in else "")
    places = [*read.live, *read.verdicts]
    computed = read.metrics[len(entry.series) :]
    places += [f"computes {_listed(computed)}"] if computed else []
    yield f"for {', '.join(audience(entry))}" + (f": {'; '.join(places)}" if places else "")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name.removeprefix(PREFIX)}`" for name in names)


def _when_not_normal(entry: MetricEntry) -> Iterator[str]:
    """Yield what the metric shows outside its bounds and what to try; only the names of alarms that other metrics decide."""
    deciding = [alarm for alarm in entry.alarms if alarm.inputs[0] == entry.metric.key] or list(entry.alarms[:1])
    for alarm in deciding:
        yield f"when it is not (`{alarm.type}`): {alarm.meaning} **What to try:** {alarm.action}"
    if not entry.alarms and entry.action:
        yield f"when it is not: **what to try:** {entry.action}"
    others = [alarm for alarm in entry.alarms if alarm not in deciding]
    if others:
        yield "also a sign of: " + "; ".join(f"`{alarm.type}` ({alarm.meaning.rstrip('.')})" for alarm in others)


def _range(entry: MetricEntry) -> str:
    low, high = entry.metric.low, entry.metric.high
    if low is None and high is None:
        return ""
    if high is None:
        return f"at least {low:g}"
    return f"{low:g} to {high:g}" if low is not None else f"at most {high:g}"


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
        makers += [(module, name) for name in dict.fromkeys(one for name in direct for one in _public(definitions, name))]
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
    parts = {"outcome of the run": (run_outcome, recent_return), "remarks of `diagnose`": (remarks,)}
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
    infos = descriptions()
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
