"""A journal sent into a backend after the fact, or alongside."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Final

from esper_telemetry.journal import JournalReader, journal_path
from esper_telemetry.record import Record, RunStatus
from esper_telemetry.relay.cursors import Cursors
from esper_telemetry.relay.delivery import Delivery
from esper_telemetry.relay.status import CloseReport, replay_command, sink_report
from esper_telemetry.sinks.protocol import Sink

PATIENCE: Final = 8
"""Failures in a row that end a replay: some fifteen seconds."""


def replay(run_dir: str | os.PathLike[str], sink: Sink, *, follow: bool = False) -> CloseReport:
    """Sends a journal into a sink: what is missing if the sink has taken some of it before, else all.

    What a sink has taken is kept under its name in `cursors.json`. With `follow` it waits for lines that are still to
    come, until the end line, however often the sink fails; otherwise it stops at the last line, or after 8 failures in
    a row. A run without an end line is then closed as killed; replayed again when it has one, it gets the rest and its
    true end. `sent` counts what this call has sent.

    Raises FileNotFoundError where there is no journal.
    """
    path = journal_path(run_dir)
    cursors = Cursors(path.parent.absolute())
    delivery = Delivery(sink, JournalReader(path.absolute()), cursors=cursors, patience=None if follow else PATIENCE)
    before = delivery.cursor
    if not follow:
        delivery.finish(RunStatus.KILLED)
    delivery.run()
    sent, refused = delivery.cursor.records - before.records, delivery.cursor.quarantined - before.quarantined
    status = replace(delivery.status, records=sent, quarantined=refused)
    pending = _records_after(JournalReader(path, delivery.cursor.offset))
    return CloseReport((sink_report(status, pending=pending, command=replay_command(path.parent, sink)),))


def _records_after(reader: JournalReader) -> int:
    count = 0
    while entries := reader.read(1000):
        count += sum(isinstance(entry, Record) for entry in entries)
    reader.close()
    return count
