"""The lines of a journal: values encoded as JSON objects, and decoded."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from esper_telemetry.core.messages import shown
from esper_telemetry.core.record import (
    Alarm,
    AlarmEvent,
    AlarmLevel,
    Axes,
    Histogram,
    MetricInfo,
    Record,
    RunInfo,
    RunStatus,
)

MAX_INTEGER: Final = 1 << 63
MAX_ARRAY_ENTRIES: Final = 1 << 16
"""Of arrays in settings and events that are written entry by entry."""


def plain(value: Any, *, depth: int = 16) -> Any:
    """Return the value as JSON that a person can read: enums by name, paths as text, dataclasses and mappings as objects, arrays as lists.

    Functions and classes become their names; integers beyond 64 bits, non-finite floats, large arrays and everything else become text.
    Nesting beyond `depth` is text too, so a structure that contains itself ends.
    """
    if isinstance(value, Enum):
        return value.value if isinstance(value, str) else value.name
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()  # without half of a surrogate pair
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < MAX_INTEGER):
        return value
    if isinstance(value, float):
        return float(value) if value - value == 0 else repr(float(value))
    if depth == 0 or isinstance(value, int):
        return shown(value)
    try:
        return _plain_structure(value, depth - 1)
    except Exception:  # whatever an object of the user's does when it is looked at
        return shown(value)


def _plain_structure(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item, depth=depth) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), depth=depth) for field in fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, depth=depth) for item in value), key=repr)
    if isinstance(value, (list, tuple, deque)):
        return [plain(item, depth=depth) for item in value]
    return _plain_leaf(value, depth)


def _plain_leaf(value: Any, depth: int) -> Any:
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if not isinstance(value, type) and callable(getattr(value, "tolist", None)):
        return plain(value.tolist(), depth=depth) if math.prod(value.shape) <= MAX_ARRAY_ENTRIES else shown(value)
    name = getattr(value, "__qualname__", None)
    return repr(value) if name is None else f"{value.__module__}.{name}"


SCHEMA: Final = 1
RECORD_HEAD: Final = b'{"kind":"record"'
ALARM_HEAD: Final = b'{"kind":"alarm"'
EVENT_HEAD: Final = b'{"kind":"event"'
"""First bytes of the line of a record, an alarm or an event: a reader of certain lines need not parse the others."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """An event that is no record, such as an intervention or a checkpoint."""

    type: str
    data: Mapping[str, Any]
    seq: int = 0
    axes: Axes | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The end of a run; nothing follows, unless it is resumed."""

    status: RunStatus
    seq: int = 0


Entry = RunInfo | Record | Alarm | JournalEvent | End


def encode_run(info: RunInfo) -> dict[str, Any]:
    """Encode the first line of a journal, and of every part of a resumed run; without the run directory, as a journal may be moved."""
    resumed = {} if info.resumed_from is None else {"resumed_from": plain(info.resumed_from)}
    return {
        "kind": "run",
        "schema": SCHEMA,
        "run_id": info.run_id,
        "name": info.name,
        "started": info.started,
        "config": plain(info.config),
        "tags": list(info.tags),
        "notes": info.notes,
        "versions": dict(info.versions),
        "facts": plain(info.facts),
        "metrics": _encode_descriptions(info.metrics),
        **resumed,
    }


def encode_record(record: Record) -> dict[str, Any]:
    """Encode a record; its values are shared, not copied."""
    line: dict[str, Any] = {
        "kind": "record",
        "seq": record.seq,
        "axes": encode_axes(record.axes),
        "values": record.values if isinstance(record.values, dict) else dict(record.values),
    }
    if record.histograms:
        line["histograms"] = {k: {"edges": h.edges, "counts": h.counts} for k, h in record.histograms.items()}
    if record.partial:
        line["partial"] = True
    return line


def encode_alarm(alarm: Alarm) -> dict[str, Any]:
    """Encode an alarm, with its evidence as `plain` JSON."""
    rest = {item.name: getattr(alarm, item.name) for item in fields(Alarm) if item.name not in ("axes", "evidence")}
    return {"kind": "alarm", **rest, "axes": encode_axes(alarm.axes), "evidence": plain(alarm.evidence)}


def encode_event(event: JournalEvent) -> dict[str, Any]:
    """Encode an event, with its data as `plain` JSON."""
    axes = {} if event.axes is None else {"axes": encode_axes(event.axes)}
    return {"kind": "event", "seq": event.seq, **axes, "type": event.type, "data": plain(event.data)}


def encode_metrics(metrics: Mapping[str, MetricInfo], *, seq: int = 0) -> dict[str, Any]:
    """Encode descriptions of keys that the `run` line does not have."""
    return {"kind": "event", "seq": seq, "type": "metrics", "data": _encode_descriptions(metrics)}


def encode_end(status: RunStatus, *, seq: int = 0) -> dict[str, Any]:
    """Encode the last line of a run."""
    return {"kind": "end", "seq": seq, "status": str(status)}


def encode_axes(axes: Axes) -> dict[str, Any]:
    """Return every axis by name."""
    return {
        "update": axes.update,
        "env_step": axes.env_step,
        "gradient_step": axes.gradient_step,
        "wall_time": axes.wall_time,
    }


_encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def to_json(line: Line) -> bytes:
    """Return the bytes of a line, newline included; raises ValueError where it is not strict JSON."""
    try:
        return _encode_json(line).encode("utf-8", "backslashreplace") + b"\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"a journal holds strict JSON, and this {line.get('kind')} line is not: {error}") from error


def decode(line: Line, run_dir: Path | None = None) -> Entry | None:
    """Return the value of a line; None for a kind of line that this version does not know.

    In an event of type "metrics" the data are `MetricInfo` by key. Raises ValueError for a line that breaks the schema.
    """
    try:
        decoder = _DECODERS.get(line["kind"])
        return None if decoder is None else decoder(line, run_dir)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a line of a journal ({error!r}): {str(line)[:80]}") from error


def _decode_run(line: Line, run_dir: Path | None) -> RunInfo:
    return RunInfo(
        run_id=line["run_id"],
        name=line.get("name", ""),
        run_dir=run_dir,
        started=line["started"],
        config=line.get("config", {}),
        tags=tuple(line.get("tags", ())),
        notes=line.get("notes", ""),
        versions=line.get("versions", {}),
        facts=line.get("facts", {}),
        metrics=_decode_descriptions(line.get("metrics", {})),
        resumed_from=line.get("resumed_from"),
    )


def _decode_record(line: Line, _: Path | None) -> Record:
    histograms = {k: Histogram(tuple(h["edges"]), tuple(h["counts"])) for k, h in line.get("histograms", {}).items()}
    return Record(line["seq"], _decode_axes(line["axes"]), line["values"], histograms, line.get("partial", False))


def _decode_alarm(line: Line, _: Path | None) -> Alarm:
    present = {item.name: line[item.name] for item in fields(Alarm) if item.name in line}
    enums = {"event": AlarmEvent(line["event"]), "level": AlarmLevel(line["level"])}
    return Alarm(**{**present, **enums, "axes": _decode_axes(line["axes"])})


def _decode_event(line: Line, _: Path | None) -> JournalEvent:
    data = _decode_descriptions(line["data"]) if line["type"] == "metrics" else line["data"]
    axes = _decode_axes(line["axes"]) if "axes" in line else None
    return JournalEvent(line["type"], data, line.get("seq", 0), axes)


def _decode_end(line: Line, _: Path | None) -> End:
    return End(RunStatus(line["status"]), line.get("seq", 0))


def _decode_axes(line: Line) -> Axes:
    return Axes(line["update"], line["env_step"], line["gradient_step"], line["wall_time"])


_DECODERS: dict[str, Callable[[Line, Path | None], Entry]] = {
    "run": _decode_run,
    "record": _decode_record,
    "alarm": _decode_alarm,
    "event": _decode_event,
    "end": _decode_end,
}

_DESCRIPTION = {field.name: field.default for field in fields(MetricInfo)}


def _encode_descriptions(metrics: Mapping[str, MetricInfo]) -> dict[str, dict[str, Any]]:
    """Encode only what differs from the defaults: a catalogue has hundreds of keys."""
    return {
        key: {name: getattr(info, name) for name, default in _DESCRIPTION.items() if getattr(info, name) != default}
        for key, info in metrics.items()
    }


def _decode_descriptions(line: Line) -> dict[str, MetricInfo]:
    """Decode descriptions; fields that a later version added are ignored."""
    return {
        key: MetricInfo(**{name: value for name, value in described.items() if name in _DESCRIPTION})
        for key, described in line.items()
    }


def merge_head(info: RunInfo | None, entries: Iterable[Entry]) -> RunInfo | None:
    """Return the run as entries describe it, on top of `info`: the last `run` line and the descriptions after it."""
    for entry in entries:
        if isinstance(entry, RunInfo):
            info = entry
        elif isinstance(entry, JournalEvent) and entry.type == "metrics" and info is not None:
            info.metrics.update(entry.data)
    return info


def end_status(entries: Iterable[Entry]) -> RunStatus | None:
    """Return how the run ended; None if the last entry is not its end."""
    status = None
    for entry in entries:
        status = entry.status if isinstance(entry, End) else None
    return status
