"""Stable interfaces: public names and their parameters, options of commands, and the journal's schema.

`public_api.json` holds the interfaces of the last release; `python tests/test_public_api.py` updates it. Additions may be missing there.
"""

import enum
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import esper_telemetry
from esper_telemetry.alarms.metric_entries import MetricEntry, metric_entries
from esper_telemetry.cli.check import CheckOptions
from esper_telemetry.cli.main import COMMANDS
from esper_telemetry.cli.run import ScriptRun
from esper_telemetry.core.metric import released
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Axes, Histogram, MetricInfo, Record, RunInfo, RunStatus
from esper_telemetry.journal.lines import SCHEMA, JournalEvent, encode_alarm, encode_end, encode_event, encode_record, encode_run

SNAPSHOT = Path(__file__).with_name("public_api.json")
FORMS = {**COMMANDS, "run": ScriptRun, "check": CheckOptions}
AXES = Axes(1, 2, 3, 4.0)


def public_api() -> dict[str, Any]:
    """Return the current interface as plain values."""
    return {
        "names": {name: dict(members(getattr(esper_telemetry, name))) for name in sorted(esper_telemetry.__all__)},
        "commands": {name: sorted(options(form)) for name, form in sorted(FORMS.items())},
        "journal": journal_schema(),
        "metrics": {"released": [definition(entry) for entry in metric_entries() if entry.metric.number in released()]},
    }


def definition(entry: MetricEntry) -> str:
    """Return what dashboards rely on: number, key, unit and reduction."""
    return f"{entry.metric.id} {entry.metric.key}: {entry.metric.unit}, {entry.reduction}"


def members(value: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the parameters of a function, of a class and its public methods; the values of an enum."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        yield "members", [f"{member.name}={member.value}" for member in value]
        return
    if callable(value):
        yield "()", parameters(value)
    if not isinstance(value, type):
        return
    for name, member in inspect.getmembers(value):
        if name.startswith("_"):
            continue
        if inspect.isroutine(member):
            # members inherited from the standard library belong to it
            if getattr(member, "__module__", "").startswith("esper_telemetry"):
                yield name, parameters(member)
        else:
            yield name, []


def parameters(function: Any) -> list[str]:
    """Return the parameters: `name`, or `name=` if there is a default; keyword-only parameters follow `*`."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return []
    names, kinds = [], inspect.Parameter
    marks: dict[object, str] = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**", kinds.KEYWORD_ONLY: "*, "}
    for parameter in signature.parameters.values():
        default = "" if parameter.default is parameter.empty else "="
        names.append(f"{marks.get(parameter.kind, '')}{parameter.name}{default}")
    return names


def options(form: type) -> Iterator[str]:
    """Yield the options of a command, including the options of nested forms."""
    hints = get_type_hints(form)
    for item in fields(form):
        if is_dataclass(hints[item.name]):
            yield from options(hints[item.name])
        else:
            required = item.default is MISSING and item.default_factory is MISSING
            yield f"{item.name}{'' if required else '='}"


def journal_schema() -> dict[str, Any]:
    """Return the fields of every kind of line, and the words allowed in them."""
    run = RunInfo("id", "name", None, 1.0, metrics={"a/b": MetricInfo("1", "?")}, resumed_from={"update": 1})
    shape = {"a/hist": Histogram((0.0, 1.0), (1.0,))}
    lines = (
        encode_run(run),
        encode_record(Record(1, AXES, {"a/b": 1.0}, shape, partial=True)),
        encode_alarm(Alarm(1, AXES, "a/b", AlarmEvent.RAISE, 1.0, AlarmLevel.CRITICAL, "a/b")),
        encode_event(JournalEvent("remark", {}, 1, AXES)),
        encode_end(RunStatus.FINISHED),
    )
    words = (RunStatus, AlarmEvent, AlarmLevel)
    return {
        "schema": [str(SCHEMA)],
        **{line["kind"]: sorted(line) for line in lines},
        "axes": sorted(encode_record(Record(1, AXES, {}))["axes"]),
        "metric": sorted(item.name for item in fields(MetricInfo)),
        **{kind.__name__: sorted(str(word) for word in kind) for kind in words},
    }


def breaks(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """Yield the previous entries that are missing now, and parameters that have become required."""
    if isinstance(before, Mapping):
        for name, value in before.items():
            if name not in now:
                yield f"{place}{name} is gone"
            else:
                yield from breaks(value, now[name], f"{place}{name} ")
        return
    yield from (f"{place}{name} is gone" for name in before if name not in now and f"{name}=" not in now)
    if before and place.endswith("() "):
        positional = [name.rstrip("=") for name in before if not name.startswith("*")]
        if [name.rstrip("=") for name in now if not name.startswith("*")][: len(positional)] != positional:
            yield f"{place}takes its arguments in another order"
        added = [name for name in now if name not in before and f"{name}=" not in before]
        yield from (f"{place}needs {name}" for name in added if not name.endswith("=") and "**" not in name)


@pytest.mark.parametrize("part", ["names", "commands", "journal", "metrics"])
def test_nothing_that_users_build_on_is_gone(part: str) -> None:
    before = json.loads(SNAPSHOT.read_text(encoding="utf-8"))

    assert before[part]
    assert list(breaks(before[part], public_api()[part])) == []


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({"f": {"()": ["a", "b=", "*, c="]}}, []),
        ({"f": {"()": ["a", "b=", "d=", "*, c="]}, "g": {}}, []),
        ({}, ["f is gone"]),
        ({"f": {"()": ["a", "b="]}}, ["f () *, c= is gone"]),
        ({"f": {"()": ["b=", "a", "*, c="]}}, ["f () takes its arguments in another order"]),
        ({"f": {"()": ["a", "b=", "*, c=", "*, d"]}}, ["f () needs *, d"]),
    ],
)
def test_breaks_are_told_from_additions(now: Mapping[str, Any], expected: list[str]) -> None:
    assert list(breaks({"f": {"()": ["a", "b=", "*, c="]}}, now)) == expected


def layout(value: Any, indent: str = "\n") -> str:
    """Return JSON with short lists and mappings on one line, so that a change shows as the lines that it concerns."""
    text = json.dumps(value, sort_keys=True)
    if len(text) <= 100 or isinstance(value, str):
        return text
    inner = indent + " "
    if isinstance(value, list):
        return "[" + ",".join(inner + layout(item, inner) for item in value) + indent + "]"
    return "{" + ",".join(f"{inner}{json.dumps(name)}: {layout(item, inner)}" for name, item in sorted(value.items())) + indent + "}"


if __name__ == "__main__":
    SNAPSHOT.write_text(layout(public_api()) + "\n", encoding="utf-8")
