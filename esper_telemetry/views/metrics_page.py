"""An entry of the registry as text for people, in `docs/metrics.md` and `esper-telemetry metrics`, and as plain values for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from esper_telemetry.alarms.metric_entries import MetricEntry
from esper_telemetry.core.catalogue import since
from esper_telemetry.core.messages import capitalized
from esper_telemetry.history.derive import ALL_SUFFIXES
from esper_telemetry.sinks.console import COLUMNS
from esper_telemetry.views.lineage import audience, emitter, moment, readers

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
