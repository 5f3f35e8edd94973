"""What event files hold of a run, as TensorBoard itself reads them: what a later part has begun anew is void."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from esper_telemetry.sinks.protocol import StoredMetrics

UPDATE = "axis/update"


def stored_in(directory: Path, suffix: str) -> StoredMetrics:
    """The numbers in all event files of that ending, in the order of their names."""
    from tensorboard.compat.proto.event_pb2 import SessionLog

    rows: dict[int, list[tuple[int, dict[str, float]]]] = {}
    for event in _events(directory, suffix):
        if event.HasField("session_log") and event.session_log.status == SessionLog.START:
            rows = {update: [row for row in found if row[0] < event.step] for update, found in rows.items()}
        numbers = dict(_numbers(event.summary))
        if UPDATE in numbers:
            rows.setdefault(int(numbers[UPDATE]), []).append((event.step, numbers))
    stored = StoredMetrics()
    for update, found in rows.items():
        for _, numbers in found:
            for key, value in numbers.items():
                stored.add(update, key, value)
    return stored


def _events(directory: Path, suffix: str) -> Iterator[Any]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for path in sorted(directory.glob(f"*tfevents*{suffix}")):
        yield from LegacyEventFileLoader(str(path)).Load()


def _numbers(summary: Any) -> Iterator[tuple[str, float]]:
    for value in summary.value:
        match value.WhichOneof("value"):
            case "simple_value":
                yield value.tag, value.simple_value
            case "histo":
                yield value.tag, value.histo.num


def single(value: float) -> float:
    """The number in single precision, which is what TensorBoard stores."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)
