"""A journal sent into a backend after the fact, or alongside."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from esper_telemetry.journal import JournalReader, journal_path, run_info
from esper_telemetry.record import Record, RunStatus
from esper_telemetry.relay.audit import audit, wanted_by
from esper_telemetry.relay.cursors import Cursors
from esper_telemetry.relay.delivery import Delivery
from esper_telemetry.relay.status import CloseReport, replay_command, sink_report
from esper_telemetry.sinks.protocol import Sink

PATIENCE: Final = 8
"""Failures in a row that end a replay: some fifteen seconds."""


def replay(run_dir: str | os.PathLike[str], sink: Sink, *, follow: bool = False, missing: bool = False) -> CloseReport:
    """Sends a journal into a sink: what is missing if the sink has taken some of it before, else all.

    What a sink has taken is kept under its name in `cursors.json`. With `follow` it waits for lines that are still to
    come, until the end line, however often the sink fails; otherwise it stops at the last line, or after 8 failures in
    a row. A run without an end line is then closed as killed; replayed again when it has one, it gets the rest and its
    true end. `sent` counts what this call has sent.

    With `missing` the backend is read first, and gets what it lacks, whatever it has taken: someone has deleted it, a
    disk was full, a record was refused. A backend that draws nothing behind a later point gets everything from the first
    gap on, and takes what it had from there as void. Sinks without `stored` get everything again.

    Raises FileNotFoundError where there is no journal, without `follow` ValueError where it does not say which run it is; with `missing`,
    what reading the backend raises.
    """
    path = journal_path(run_dir)
    if not follow:
        run_info(run_dir)
    cursors = Cursors(path.parent.absolute())
    reader, patience = JournalReader(path.absolute()), None if follow else PATIENCE
    wanted = _lacking(path.parent, sink) if missing else None
    delivery = Delivery(sink, reader, cursors=cursors, patience=patience, wanted=wanted)
    before = delivery.cursor.quarantined
    if not follow:
        delivery.finish(RunStatus.KILLED)
    delivery.run()
    refused = delivery.cursor.quarantined - before
    status = replace(delivery.status, records=delivery.sent, quarantined=refused)
    pending = _records_after(JournalReader(path, delivery.cursor.offset))
    return CloseReport((sink_report(status, pending=pending, command=replay_command(path.parent, sink)),))


def _lacking(run_dir: Path, sink: Sink) -> Callable[[int], bool]:
    found = audit(run_dir, sink)
    return wanted_by(sink, found) if found is not None else lambda update: True


def _records_after(reader: JournalReader) -> int:
    count = 0
    while entries := reader.read(1000):
        count += sum(isinstance(entry, Record) for entry in entries)
    reader.close()
    return count
