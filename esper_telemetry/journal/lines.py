"""The lines of a journal: values encoded as JSON objects, and decoded.

Secrets are masked when values are encoded, because sinks and views read the journal. Only records, which hold
numbers, and descriptions of metrics, which are part of the code, are not masked.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import islice
from math import hypot, isfinite
from pathlib import Path
from typing import Any, Final

from esper_telemetry.core.files import TOO_DEEP, check_nesting
from esper_telemetry.core.interrupts import is_interrupt
from esper_telemetry.core.messages import printable, printable_values
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Axes, Histogram, MetricInfo, Record, RunInfo, RunStatus
from esper_telemetry.core.redaction import error_line, redacted
from esper_telemetry.journal import schema

try:
    import orjson  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    _fast_loads: Callable[[bytes], Any] | None = None
else:  # decodes a record in a quarter of the time of json
    _fast_loads = orjson.loads

MAX_ITEMS: Final = 100_000
"""Items of one value in a line, on all levels together; further items are only counted."""
MAX_LIST_ITEMS: Final = 10_000
"""Items of one list or mapping in it."""
MAX_TEXT_CHARACTERS: Final = 50_000
"""Length of a text in a line; further characters are only counted. Masks may lengthen it by a quarter: readers accept
`schema.MAX_TEXT_CHARACTERS`."""
MORE: Final = " characters more"
MAX_INTEGER_BITS: Final = 1024
"""Size of an integer that readers accept; a larger one is stored as text."""


def plain(value: Any, *, depth: int = 16) -> Any:
    """Return the value as readable JSON: enums by name, paths as text, dataclasses, named tuples and mappings as objects, arrays as lists.

    Functions and classes become their names; non-finite floats and everything else become text. Nesting beyond `depth`
    also becomes text, so recursive structures end. Any value is accepted: if its code raises, it becomes the name of its class.
    `MAX_ITEMS` and `MAX_TEXT_CHARACTERS` bound the result.
    """
    return _PlainConverter().convert(value, depth)


class _PlainConverter:
    """Converts one value; counts its items."""

    def __init__(self) -> None:
        self._items_left = MAX_ITEMS

    def convert(self, value: Any, depth: int) -> Any:
        try:
            return self._convert(value, depth)
        except BaseException as error:  # raised by a user's class
            if is_interrupt(error):
                raise
            return f"<{type(value).__name__}>"

    def _convert(self, value: Any, depth: int) -> Any:
        if isinstance(value, Enum):
            return value.value if isinstance(value, str) else value.name
        if isinstance(value, str):
            return _shortened(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if value.bit_length() <= MAX_INTEGER_BITS else hex(value)
        if isinstance(value, float):
            return float(value) if value - value == 0 else repr(float(value))
        if depth == 0:
            return _shortened(repr(value))
        return self._structure(value, depth - 1)

    def _structure(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping):
            rows = {str(self.convert(key, depth)): self.convert(value[key], depth) for key in self._some(value)}
            return rows if len(rows) >= len(value) else {**rows, "...": f"{len(value) - len(rows):,} more"}
        if is_dataclass(value) and not isinstance(value, type):
            return {field.name: self.convert(getattr(value, field.name), depth) for field in fields(value)}
        if isinstance(value, tuple) and hasattr(value, "_fields"):  # a NamedTuple: names say which values are secrets
            return {name: self.convert(item, depth) for name, item in zip(value._fields, value, strict=True)}
        if isinstance(value, (list, tuple, deque, set, frozenset)):
            items = [self.convert(item, depth) for item in self._some(value)]
            ordered = sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items
            return ordered if len(items) == len(value) else [*ordered, f"... {len(value) - len(items):,} more"]
        return self._leaf(value, depth)

    def _leaf(self, value: Any, depth: int) -> Any:
        if isinstance(value, os.PathLike):
            return str(os.fspath(value))
        if not isinstance(value, type) and callable(getattr(value, "tolist", None)):
            size = value.numel() if hasattr(value, "numel") else getattr(value, "size", 0)
            is_large = isinstance(size, int) and size > min(MAX_LIST_ITEMS, self._items_left)
            return f"<{type(value).__name__} of {size:,} items>" if is_large else self.convert(value.tolist(), depth)
        name = getattr(value, "__qualname__", None)
        return _shortened(repr(value)) if name is None else f"{value.__module__}.{name}"

    def _some(self, items: Collection[Any]) -> Iterator[Any]:
        """Yield the items for which there is room; a result of `plain` has one more, and is not changed again."""
        for item in islice(items, MAX_LIST_ITEMS if len(items) > MAX_LIST_ITEMS + 1 else None):
            if self._items_left <= 0:
                return
            self._items_left -= 1
            yield item


def _shortened(text: str) -> str:
    """Return a text of at most `MAX_TEXT_CHARACTERS`, and the number of further characters; a result is not changed again."""
    more = len(text) - MAX_TEXT_CHARACTERS
    return text if more <= len(MORE) + 15 else f"{text[:MAX_TEXT_CHARACTERS]}... {more:,}{MORE}"


_logger = logging.getLogger("esper_telemetry")

SCHEMA: Final = 1
RECORD_HEAD: Final = b'{"kind":"record"'
ALARM_HEAD: Final = b'{"kind":"alarm"'
"""First bytes of the line of a record or an alarm: a reader of certain lines need not parse the others."""

MAX_FAULT_CHARACTERS: Final = 200
"""Characters of the reason why a line is damaged."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """An event other than a record, such as an intervention or a checkpoint."""

    type: str
    data: Mapping[str, Any]
    seq: int = 0
    axes: Axes | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The end of a run, and of the journal unless the run is resumed."""

    status: RunStatus
    seq: int = 0


Entry = RunInfo | Record | Alarm | JournalEvent | End


def encode_run(info: RunInfo) -> dict[str, Any]:
    """Encode the first line of a journal, and of every part of a resumed run; without the run directory, because a journal may be moved.

    Descriptions of keys may follow in other lines.
    """
    resumed = {} if info.resumed_from is None else {"resumed_from": plain(info.resumed_from)}
    shown = redacted({name: plain(getattr(info, name)) for name in ("config", "facts", "tags", "notes", "name")})
    return {
        "kind": "run",
        "schema": SCHEMA,
        "run_id": info.run_id,
        "name": shown["name"],
        "started": info.started,
        "config": shown["config"],
        "tags": shown["tags"],
        "notes": shown["notes"],
        "versions": dict(info.versions),
        "facts": shown["facts"],
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
    """Encode an alarm as `plain` JSON without secrets, except its axes; a number that is not finite is left out."""
    content = {item.name: plain(getattr(alarm, item.name)) for item in fields(Alarm) if item.name != "axes"}
    numbers = {name: x if isinstance(x := content[name], int | float) else None for name in ("value", "threshold", "z")}
    severity = 1.0 if isinstance(content["severity"], str) else content["severity"]
    return {"kind": "alarm", **redacted(content), **numbers, "severity": severity, "axes": encode_axes(alarm.axes)}


def encode_event(event: JournalEvent) -> dict[str, Any]:
    """Encode an event, with its data as `plain` JSON."""
    axes = {} if event.axes is None else {"axes": encode_axes(event.axes)}
    return {"kind": "event", "seq": event.seq, **axes, "type": _shortened(event.type), "data": redacted(plain(event.data))}


def encode_metrics(metrics: Mapping[str, MetricInfo], *, seq: int = 0) -> dict[str, Any]:
    """Encode descriptions of keys that the `run` line does not have."""
    return {"kind": "event", "seq": seq, "type": "metrics", "data": _encode_descriptions(metrics)}


def encode_end(status: RunStatus, *, seq: int = 0) -> dict[str, Any]:
    """Encode the last line of a run."""
    return {"kind": "end", "seq": seq, "status": str(status)}


def encode_axes(axes: Axes) -> dict[str, Any]:
    """Return every axis by name."""
    return {"update": axes.update, "env_step": axes.env_step, "gradient_step": axes.gradient_step, "wall_time": axes.wall_time}


_encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def to_json(line: Line) -> bytes:
    """Return the bytes of a line, newline included; raises ValueError if it is not strict JSON."""
    try:
        return _encode_json(line).encode("utf-8", "backslashreplace") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a journal holds strict JSON, and this {line.get('kind')} line is not: {error}") from error


class LineEncoder:
    """Encodes lines; one that is not strict JSON, or that readers would refuse, is left out, with one warning for each kind of line."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def encode(self, lines: Iterable[Line]) -> tuple[list[tuple[Line, bytes]], list[Line]]:
        """Return the lines with their bytes, and the lines that cannot be written."""
        encoded: list[tuple[Line, bytes]] = []
        refused: list[Line] = []
        for line in lines:
            try:
                if line.get("kind") != "record":
                    decode(line)
                encoded.append((line, to_json(line)))
            except ValueError as error:
                refused.append(line)
                name = f"{line.get('kind')} {line.get('type', '')}".strip()
                if name not in self._warned:
                    self._warned.add(name)
                    _logger.warning("esper-telemetry: the line of %s is left out of the journal: %s", name, error_line(error))
        return encoded, refused


def decode_line(data: bytes, run_dir: Path | None = None) -> tuple[Entry | None, str]:
    """Return the value of the bytes of a line, its texts `printable`, and why the line, or facts in it, are left out.

    The value is None for a damaged line, which never raises, and for a kind of line that this version does not know. The reason is empty
    for a valid line.
    """
    try:
        line = _parse(data)
        entry = decode(line, run_dir)
    except ValueError as error:
        return None, printable(str(error))[:MAX_FAULT_CHARACTERS]
    if isinstance(entry, RunInfo) and (faults := schema.wrong_facts(line.get("facts", {}))):
        return entry, printable("; ".join(faults.values()))[:MAX_FAULT_CHARACTERS]
    return entry, ""


CONTROLS: Final = re.compile(
    rb'\x7f|\xc2[\x80-\x9f]|\xe2(?:\x80[\x8b\x8e\x8f\xa8-\xae]|\x81[\xa0-\xaf])|\xed|\xef\xbb|\xf3\xa0|\\[^"\\/nt]'
)
"""DEL, bytes of all other characters that are not printable, and escapes other than those of printable characters."""


def _parse(data: bytes) -> Line:
    """Return the JSON of a line, strict except for repeated names, of which the last counts; raises ValueError with the reason."""
    try:
        line = None if _fast_loads is None else _fast_loads(data)
    except ValueError:  # the slower decoder accepts more, and has the reasons
        line = None
    if line is None:
        line = _parse_slowly(data)
    # In strict JSON a control character is an escape, DEL, or not ASCII. The fields of a record are not nested.
    is_plain = b"\\" not in data and b"\x7f" not in data and data.isascii()
    may_have_controls = not is_plain and CONTROLS.search(data) is not None
    if may_have_controls or not data.startswith(RECORD_HEAD):
        check_nesting(line)
    if may_have_controls:
        line = printable_values(line)
    if not isinstance(line, dict):
        raise ValueError("it is not an object")
    return line


def _parse_slowly(data: bytes) -> Any:
    """Return the JSON of a line, decoded by the standard library; raises ValueError with the reason."""
    try:
        return _decode_json(data.decode())
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg}") from None
    except ValueError:  # the limit of Python's integers, unless a constant was refused
        raise ValueError("it is not JSON: NaN, Infinity, or a number with thousands of digits") from None


def _refuse_constant(word: str) -> None:
    raise ValueError(word)


_decode_json = json.JSONDecoder(parse_constant=_refuse_constant).decode


def decode(line: Line, run_dir: Path | None = None) -> Entry | None:
    """Return the value of a line; None for a kind of line that this version does not know.

    The data of an event of type "metrics" are `MetricInfo` by key. Facts in an unknown form are left out.

    Raises ValueError, with the reason, for a line that breaks the schema.
    """
    kind = line.get("kind")
    if not isinstance(kind, str):
        raise ValueError("it lacks a kind")
    decoder = _DECODERS.get(kind)
    return None if decoder is None else decoder(line, run_dir)


RECORD_AXES: Final = re.compile(
    rb'\{"kind":"record","seq":(\d+),"axes":\{"update":(\d+),"env_step":(\d+),"gradient_step":(\d+),"wall_time":([\d.e+-]+)\}'
)


def record_without_values(line: bytes) -> Record | None:
    """Return the record of a line without its values, from its beginning; None for any other line and for an incomplete one."""
    match = RECORD_AXES.match(line)
    if match is None or not line.endswith(b"}"):
        return None
    seq, update, env_step, gradient_step = map(int, match.groups()[:4])
    return Record(seq, Axes(update, env_step, gradient_step, float(match[5])), {})


def _decode_run(line: Line, run_dir: Path | None) -> RunInfo:
    version = line.get("schema", SCHEMA)
    if schema.COUNT.accepts(version) and version > SCHEMA:
        raise ValueError(f"its schema {version} is newer than {SCHEMA}: update esper-telemetry")
    schema.check(line, schema.RUN, "a run line", required=("run_id", "started"))
    facts = line.get("facts", {})
    left_out = schema.wrong_facts(facts)
    return RunInfo(
        run_id=line["run_id"],
        name=line.get("name", ""),
        run_dir=run_dir,
        started=line["started"],
        config=line.get("config", {}),
        tags=tuple(line.get("tags", ())),
        notes=line.get("notes", ""),
        versions=line.get("versions", {}),
        facts={name: schema.fact(name, value) for name, value in facts.items() if name not in left_out},
        metrics=_decode_descriptions(line.get("metrics", {})),
        resumed_from=line.get("resumed_from"),
    )


def _decode_record(line: Line, _: Path | None) -> Record:
    schema.check(line, schema.RECORD, "a record", required=("seq", "axes", "values"))
    values = line["values"]
    if not schema.are_finite(values.values()):
        schema.check(values, dict.fromkeys(values, schema.NUMBER), "values")
    histograms = {key: _decode_histogram(key, value) for key, value in line.get("histograms", {}).items()}
    return Record(line["seq"], _decode_axes(line["axes"]), values, histograms, line.get("partial", False))


def _decode_histogram(key: str, value: Any) -> Histogram:
    try:
        edges, counts = tuple(value["edges"]), tuple(value["counts"])
        if len(edges) == len(counts) + 1 and isfinite(hypot(*edges)) and isfinite(hypot(*counts)):
            return Histogram(edges, counts)
    except (TypeError, KeyError, OverflowError):
        pass
    raise ValueError(f"histogram {key} needs finite counts, and one edge more")


def _decode_alarm(line: Line, _: Path | None) -> Alarm:
    schema.check(line, schema.ALARM, "an alarm", required=("seq", "axes", "type", "event", "severity", "level", "key"))
    present = {item.name: line[item.name] for item in fields(Alarm) if item.name in line}
    enums = {"event": AlarmEvent(line["event"]), "level": AlarmLevel(line["level"])}
    return Alarm(**{**present, **enums, "axes": _decode_axes(line["axes"])})


def _decode_event(line: Line, _: Path | None) -> JournalEvent:
    schema.check(line, schema.EVENT, "an event", required=("type", "data"))
    kind, data = line["type"], line["data"]
    schema.check_event(kind, data)
    axes = _decode_axes(line["axes"]) if "axes" in line else None
    return JournalEvent(kind, _decode_descriptions(data) if kind == "metrics" else data, line.get("seq", 0), axes)


def _decode_end(line: Line, _: Path | None) -> End:
    schema.check(line, schema.END, "an end", required=("status",))
    return End(RunStatus(line["status"]), line.get("seq", 0))


def _decode_axes(line: Any) -> Axes:
    try:
        axes = Axes(line["update"], line["env_step"], line["gradient_step"], line["wall_time"])
        if schema.are_usual(axes):
            return axes
    except (TypeError, KeyError):
        pass
    schema.check(line, schema.AXES, "axes", required=schema.AXES)
    return axes


_DECODERS: dict[str, Callable[[Line, Path | None], Entry]] = {
    "run": _decode_run,
    "record": _decode_record,
    "alarm": _decode_alarm,
    "event": _decode_event,
    "end": _decode_end,
}

_DESCRIPTION = {field.name: field.default for field in fields(MetricInfo)}


def _encode_descriptions(metrics: Mapping[str, MetricInfo]) -> dict[str, dict[str, Any]]:
    """Encode only fields that differ from the defaults, because a catalogue has hundreds of keys."""
    return {
        key: {name: getattr(info, name) for name, default in _DESCRIPTION.items() if getattr(info, name) != default}
        for key, info in metrics.items()
    }


def _decode_descriptions(line: Any) -> dict[str, MetricInfo]:
    """Decode descriptions; fields that a later version added are ignored."""
    schema.check(line, {}, "metrics")
    for key, described in line.items():
        schema.check(described, schema.DESCRIPTION, f"the description of {key}", required=("unit", "question"))
    return {
        key: MetricInfo(**{name: value for name, value in described.items() if name in _DESCRIPTION}) for key, described in line.items()
    }


def merge_head(info: RunInfo | None, entries: Iterable[Entry]) -> RunInfo | None:
    """Return the run as entries describe it, based on `info`: the last `run` line and all descriptions so far."""
    for entry in entries:
        if isinstance(entry, RunInfo):
            if info is not None:
                entry.metrics.update({**info.metrics, **entry.metrics})
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
