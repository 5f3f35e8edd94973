"""Records that a backend refuses for good: `dead_letter.jsonl` in the run directory, so that one of them does not hold up the rest."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from esper_telemetry.journal import encode_record, to_json
from esper_telemetry.record import Record

DEAD_LETTER_NAME: Final = "dead_letter.jsonl"


def quarantine(run_dir: Path | None, sink: str, record: Record, error: str) -> None:
    """Notes the record, the sink that refuses it and what it says; a full disk costs the note, the journal has the record."""
    if run_dir is None:
        return
    line = {"kind": "dead_letter", "sink": sink, "time": time.time(), "error": error, "record": encode_record(record)}
    with suppress(OSError), (run_dir / DEAD_LETTER_NAME).open("ab", buffering=0) as file:
        file.write(to_json(line))
        os.fsync(file.fileno())
