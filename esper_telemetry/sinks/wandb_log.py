"""What a W&B run holds on disk already: a client that is killed loses rows that it has accepted, up to a second of them.

An offline run is a file of protocol buffers in the frames of LevelDB's log: blocks of 32 KiB, and before each piece of a record its
checksum (4 bytes), its length (2) and its kind (1): whole, first, middle or last.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from esper_telemetry.sinks.stored import Stored

BLOCK: Final = 32768
FILE_HEADER: Final = 7
PIECE: Final = struct.Struct("<IHB")
WHOLE, FIRST, LAST = 1, 2, 4
UPDATE: Final = "axis/update"
SETTLE_SECONDS: Final = 2.0
"""How long a file without an end must stay as it is: a client that has been told to finish may still be writing."""


class Held(NamedTuple):
    """What a file holds: the project, the last update (0 for none), and whether the run was ended."""

    project: str
    update: int
    ended: bool


def last_update(folder: Path, run_id: str, project: str, *, besides: Path) -> int | None:
    """The last update that any part of the run holds, 0 for none; None where there is no part `besides` this one."""
    files = [file for file in folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb") if file.parent.name != besides.name]
    found = [held for held in map(_settled, files) if held.project == project]
    return max((held.update for held in found), default=None)


def stored_in(folder: Path, run_id: str, project: str) -> Stored:
    """What all parts of an offline run hold on disk."""
    stored = Stored()
    for file in sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")):
        if _settled(file).project == project:
            _add(stored, file)
    return stored


def _add(stored: Stored, file: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    stored.ended = False
    for data in records(file.read_bytes()):
        record = Record.FromString(data)
        match record.WhichOneof("record_type"):
            case "history":
                update = _update(record.history)
                for key, value in _numbers(record.history):
                    stored.add(update, key, value)
            case "exit":
                stored.ended = True


def _numbers(history: Any) -> Iterator[tuple[str, float]]:
    """The row's numbers, without those that W&B adds; a histogram as the sum of its counts."""
    for item in history.item:
        key, *part = item.nested_key or [item.key]
        if key.startswith("_") or (part and part != ["values"]):
            continue
        value = json.loads(item.value_json)
        yield key, float(sum(value) if part else value)


def _settled(file: Path) -> Held:
    """What the file holds once nobody writes it any more."""
    size = -1
    while not (held := _read(file)).ended and size != (size := file.stat().st_size):
        time.sleep(SETTLE_SECONDS)
    return held


def _read(file: Path) -> Held:
    from wandb.proto.wandb_internal_pb2 import Record

    held = Held("", 0, False)
    for data in records(file.read_bytes()):
        record = Record.FromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                held = held._replace(project=record.run.project)
            case "history":
                held = held._replace(update=max(held.update, _update(record.history)))
            case "exit":
                held = held._replace(ended=True)
    return held


def _update(history: Any) -> int:
    keys = (("/".join(item.nested_key) or item.key, item.value_json) for item in history.item)
    return int(next((json.loads(value) for key, value in keys if key == UPDATE), 0))


def records(data: bytes) -> Iterator[bytes]:
    """The whole records of a file; what comes after a piece that is cut off or no piece is left out."""
    position, parts = FILE_HEADER, b""
    while position + PIECE.size <= len(data):
        if BLOCK - position % BLOCK < PIECE.size:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = PIECE.unpack_from(data, position)
        position += PIECE.size + length
        if not kind or position > len(data):
            return
        parts = (
            data[position - length : position] if kind in (WHOLE, FIRST) else parts + data[position - length : position]
        )
        if kind in (WHOLE, LAST):
            yield parts
