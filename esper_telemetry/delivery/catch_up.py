"""A journal sent into a backend after the fact, or alongside."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from esper_telemetry.core.record import RunStatus
from esper_telemetry.delivery.audit import audit, wanted_by
from esper_telemetry.delivery.cursors import Cursors, records_after
from esper_telemetry.delivery.delivery import Delivery
from esper_telemetry.delivery.status import CloseReport, deliveries_under_way, replay_command, sink_name, sink_report
from esper_telemetry.journal.file import JournalReader, journal_path
from esper_telemetry.journal.lock import Role, is_held
from esper_telemetry.journal.read import run_info
from esper_telemetry.sinks.protocol import Sink

CATCH_UP_POLL_SECONDS: Final = 0.2
PATIENCE: Final = 8
"""Failures in a row that end a replay: some fifteen seconds."""

_logger = logging.getLogger("esper_telemetry")


def replay(run_dir: str | os.PathLike[str], sink: Sink, *, follow: bool = False, missing: bool = False) -> CloseReport:
    """Sends a journal into a sink: what is missing if the sink has taken some of it before, else all.

    What a sink has taken is kept under its name in `cursors.json`. With `follow` it waits for lines that are still to
    come, until the end line, however often the sink fails; otherwise it stops at the last line, or after 8 failures in
    a row. A run without an end line is then closed as killed; replayed again when it has one, it gets the rest and its
    true end. `sent` counts what this call has sent.

    With `missing` the backend is read first, and gets what it lacks, whatever it has taken: someone has deleted it, a
    disk was full, a record was refused. A backend that draws nothing behind a later point gets everything from the first
    gap on, and takes what it had from there as void. Sinks without `stored` get everything again.

    A process that goes on delivering to this sink after the end of the run is waited for.

    Raises FileNotFoundError where there is no journal, BlockingIOError where the trainer delivers to this sink itself, without `follow`
    ValueError where the journal does not say which run it is; with `missing`, what reading the backend raises.
    """
    path = journal_path(run_dir)
    if not follow:
        run_info(run_dir)
    _await_others(path.parent.absolute(), sink_name(sink))
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
    pending = records_after(path.parent, delivery.cursor)
    return CloseReport((sink_report(status, pending=pending, command=replay_command(path.parent, sink)),))


def _await_others(run_dir: Path, name: str) -> None:
    """Waits for a process that goes on after the end of the run: two writers on one cursor would send records twice.

    Raises BlockingIOError where the trainer itself has not ended: that may take for ever, and may be this process.
    """
    told = False
    while name in deliveries_under_way(run_dir):
        if is_held(run_dir, Role.TRAINER):
            raise BlockingIOError(f"{run_dir} is still being trained, and delivers to {name} itself: wait for its end")
        if not told:
            _logger.warning("esper-telemetry: waiting for the background process that delivers %s to %s", run_dir, name)
            told = True
        time.sleep(CATCH_UP_POLL_SECONDS)


def _lacking(run_dir: Path, sink: Sink) -> Callable[[int], bool]:
    found = audit(run_dir, sink)
    return wanted_by(sink, found) if found is not None else lambda update: True
