"""Journals of runs that are made up record by record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from healthy_run import FACTS, set_to

from esper_telemetry.core.record import Record, RunInfo, RunStatus
from esper_telemetry.journal import Journal, JournalEvent, encode_end, encode_event, encode_record, encode_run

KL_SPIKES = set_to({"policy/kl": 2.0, "policy/kl_max": 4.0})


def journal(path: Path, records: list[Record], status: RunStatus | None = RunStatus.FINISHED, **facts: Any) -> Path:
    book = Journal.create(path)
    facts = {**FACTS, **facts}
    book.write(encode_run(RunInfo("r1", "run", path, 1e9, {"learning_rate": facts.get("learning_rate")}, facts=facts)))
    for record in records:
        book.write(encode_record(record))
    if status is RunStatus.FAILED:
        data = {"exception": "ValueError", "message": "x" * 5000}
        book.write(encode_event(JournalEvent("failure", data, seq=len(records), axes=records[-1].axes)))
    if status is not None:
        book.write(encode_end(status, seq=len(records)))
    book.close()
    return path
