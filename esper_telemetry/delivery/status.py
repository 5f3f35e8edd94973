"""The state of deliveries: the cursor of each sink in `cursors.json`, and `status.json` during a run and at its end.

Several processes change these files, so `run_dir_lock` locks them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

from esper_telemetry.core.files import open_own, open_regular, read_json, replace_file
from esper_telemetry.core.record import Record, RunStatus, SinkLag
from esper_telemetry.core.redaction import redacted
from esper_telemetry.core.supervisor import HAS_HELPERS
from esper_telemetry.journal.file import JOURNAL_NAME, journal_path
from esper_telemetry.journal.lock import Role, holder_pid, is_held, lock_file
from esper_telemetry.journal.read import entries
from esper_telemetry.journal.schema import COUNT, FLAG, check
from esper_telemetry.sinks.sink_protocol import Sink, sink_name, sink_uri
from esper_telemetry.sinks.sink_registry import BUNDLED, known_sinks

CURSORS_NAME: Final = "cursors.json"
MIN_HUNG_SECONDS: Final = 330.0
"""Longer than a sink process without a trainer lives; it writes its files when it loses the trainer."""
CURSOR: Final = {**dict.fromkeys(("offset", "seq", "records", "quarantined"), COUNT), "closed": FLAG}

_logger = logging.getLogger("esper_telemetry")


@contextmanager
def run_dir_lock(run_dir: Path) -> Iterator[None]:
    """Admit one process and thread at a time, if the file system has locks; raises OSError without a journal."""
    journal = open_regular(journal_path(run_dir), os.O_RDONLY, follow_links=True)  # it exists as long as the run does
    locked = journal if HAS_HELPERS else open_own(run_dir / Role.FILES, os.O_RDWR)  # others read the journal
    try:
        with suppress(OSError):
            lock_file(locked, wait=True)
        yield
    finally:
        for descriptor in {journal, locked}:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Progress of a sink; the names of the fields are the names in `cursors.json`.

    Attributes:
        offset: position in the journal, in bytes, after the last line that the sink took.
        seq: number of the last record that it took.
        records: number of records that it took since the run began.
        end: how the run ended, once the end line was read.
        closed: whether the sink was closed with that status.
        quarantined: number of records that it refused, which `dead_letter.jsonl` holds.
    """

    offset: int = 0
    seq: int = 0
    records: int = 0
    end: RunStatus | None = None
    closed: bool = False
    quarantined: int = 0


def count_records_after(run_dir: Path, cursor: Cursor) -> int:
    """Return how many records of the journal the cursor has not passed."""
    return sum(isinstance(entry, Record) for entry in entries(run_dir, cursor.offset))


class Cursors:
    """The cursors of a run. Threads and processes share them: each changes its own entry under a lock on the journal.

    If a network file system refuses locks or writing, delivery continues, and some records are sent again after a restart.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CURSORS_NAME
        self._journal = run_dir / JOURNAL_NAME
        self._warned = False

    def load(self, name: str) -> Cursor:
        """Return the cursor of a sink; a new sink gets one at the beginning."""
        try:
            saved = self._read()[name]
            end = saved.get("end")
            try:  # if the machine crashed, the last lines may be lost
                size: float = self._journal.stat().st_size
            except FileNotFoundError:  # a compressed journal is complete
                size = math.inf
            check(saved, CURSOR, "a cursor", required=("offset", "seq", "records", "closed"))
            offset = min(saved["offset"], size)
            refused = saved.get("quarantined", 0)
            return Cursor(int(offset), saved["seq"], saved["records"], end and RunStatus(end), saved["closed"], refused)
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return Cursor()

    def names(self) -> list[str]:
        """Return the names of the sinks that have a cursor."""
        with suppress(OSError):
            return list(self._read())
        return []

    def save(self, name: str, cursor: Cursor) -> None:
        """Replace the cursor of a sink and leave all others unchanged."""
        try:
            with run_dir_lock(self.path.parent):
                replace_file(self.path, json.dumps({**self._read(), name: asdict(cursor)}, indent=1) + "\n")
        except OSError as error:
            if not self._warned:
                self._warned = True
                message = "esper-telemetry: cannot save %s (%s): after a restart some records would be sent twice"
                _logger.warning(message, self.path, error.strerror)

    def _read(self) -> dict[str, Any]:
        try:
            cursors = read_json(self.path)
        except (FileNotFoundError, ValueError):
            return {}
        return cursors if isinstance(cursors, dict) else {}


STATUS_NAME: Final = "status.json"
NOT_IN_KEYS: Final = re.compile("[^a-z0-9]+")


class SinkState(StrEnum):
    """State of the delivery to a sink."""

    OPENING = "opening"
    DELIVERING = "delivering"
    RETRYING = "retrying"
    CLOSED = "closed"
    DISABLED = "disabled"
    DEAD_CLIENT = "dead client"
    HUNG = "hung"


SETTLED: Final = frozenset({SinkState.CLOSED, SinkState.DISABLED})
"""States that do not change any more."""
FRESH_PROCESS_STATES: Final = frozenset({SinkState.DEAD_CLIENT, SinkState.HUNG})
"""States that a delivery does not leave in its process; a new process may start it again."""
FINAL: Final = SETTLED | FRESH_PROCESS_STATES
"""States that a delivery does not leave."""


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """A delivery at one moment.

    Attributes:
        name: name of the sink, unique within its run.
        state: state of the delivery.
        records: number of records that the sink has taken since the run began.
        seq: number of the last record that it took.
        errors: exceptions of the sink so far.
        last_error: the latest exception in one line.
        quarantined: number of records that it refused permanently.
        wall_time: when the last record that it took here was made, in seconds since the epoch; None before the first.
    """

    name: str
    state: SinkState = SinkState.OPENING
    records: int = 0
    seq: int = 0
    errors: int = 0
    last_error: str = ""
    quarantined: int = 0
    wall_time: float | None = None

    def lag(self, records: int) -> int:
        """Return how many of `records` records the sink has not taken yet."""
        return max(0, records - self.records - self.quarantined)

    def as_lag(self, records: int, *, now: float, begun: float) -> SinkLag:
        """Return the lag as numbers of a record; all times in seconds since the epoch.

        Args:
            records: number of records in the journal.
            now: the time, which may jump back.
            begun: when the delivery began, for a sink that has taken nothing.
        """
        behind = self.lag(records)
        since = begun if self.wall_time is None else self.wall_time
        return SinkLag(key_segment(self.name), behind, max(0.0, now - since) if behind else 0.0, self.errors)


@cache
def key_segment(name: str) -> str:
    """Return a sink's name as a segment of a key: `wandb_walker`."""
    return NOT_IN_KEYS.sub("_", name.lower()).strip("_") or "sink"


@dataclass(frozen=True, slots=True)
class DeliveryStats:
    """All deliveries of a run at one moment.

    Attributes:
        queue_depth: number of records that the slowest active sink has not taken yet.
        errors: exceptions of all sinks so far.
        sinks: each delivery by name.
        lags: lag of each backend, as numbers of a record.
    """

    queue_depth: int
    errors: int
    sinks: Mapping[str, SinkStatus]
    lags: tuple[SinkLag, ...] = ()


@dataclass(frozen=True, slots=True)
class SinkReport:
    """Result of one delivery.

    Attributes:
        name: name of the sink.
        state: final state of its delivery; only `CLOSED` is complete.
        sent: number of records that it took.
        pending: number of records that it did not take.
        errors: exceptions of the sink.
        last_error: the latest exception in one line.
        command: command that sends the rest; empty if nothing is left, or without a journal.
        quarantined: number of records that it refused, which `dead_letter.jsonl` holds.
        goes_on: whether a background process continues the delivery.
    """

    name: str
    state: SinkState
    sent: int
    pending: int
    errors: int = 0
    last_error: str = ""
    command: str = ""
    quarantined: int = 0
    goes_on: bool = False

    @property
    def complete(self) -> bool:
        """True if it took every record and was closed."""
        return self.state is SinkState.CLOSED and not self.pending and not self.quarantined

    def __str__(self) -> str:
        because = f" ({self.last_error})" if self.last_error and self.state is not SinkState.CLOSED else ""
        rest = f"; send the rest with: {self.command}" if self.command else ""
        rest = "; a background process continues" if self.goes_on else rest
        left = f", {self.pending} pending" if self.pending else ""
        refused = f", {self.quarantined} refused (dead_letter.jsonl)" if self.quarantined else ""
        return f"{self.name}: {self.state}, {self.sent} records sent{left}{refused}{because}{rest}"


@dataclass(frozen=True, slots=True)
class CloseReport:
    """Results of all deliveries of a run."""

    sinks: tuple[SinkReport, ...] = ()

    @property
    def complete(self) -> bool:
        """True if every sink took every record and was closed."""
        return all(sink.complete for sink in self.sinks)

    def __str__(self) -> str:
        return "\n".join(map(str, self.sinks))


def sink_report(status: SinkStatus, *, pending: int, command: str = "", goes_on: bool = False) -> SinkReport:
    """Return the result of a delivery that has ended or was abandoned; a complete delivery does not need a command."""
    complete = status.state is SinkState.CLOSED and not pending
    return SinkReport(
        *(status.name, status.state, status.records, pending, status.errors, status.last_error),
        command="" if complete else command,
        quarantined=status.quarantined,
        goes_on=goes_on,
    )


def replay_command(run_dir: Path | None, sink: Sink) -> str:
    """Return the command that sends the rest: a Python call for a sink without a URI, nothing without a run directory."""
    if run_dir is None:
        return ""
    uri = sink_uri(sink)
    name = uri.partition("?")[0].partition(":")[0]
    if name not in BUNDLED and name not in known_sinks():  # `known_sinks` searches all installed packages
        return f"esper_telemetry.replay({str(run_dir)!r}, SINK)"
    return shlex.join(["esper-telemetry", "replay", str(run_dir), "--to", uri])


def sinks_by_name(sinks: Sequence[Sink]) -> dict[str, Sink]:
    """Return sinks by name; further sinks with the same name are numbered."""
    named: dict[str, Sink] = {}
    for sink in sinks:
        name, count = sink_name(sink), 1
        while name in named:
            count += 1
            name = f"{sink_name(sink)}-{count}"
        named[name] = sink
    return named


def write_uris(run_dir: Path, uris: Mapping[str, str]) -> None:
    """Write that deliveries begin, and the URI of each sink, so that `doctor` finds it; keep other entries of `status.json`."""
    opening = {"state": str(SinkState.OPENING), "under_way": True}
    _update(run_dir, {name: {"uri": uri, **opening} for name, uri in uris.items()})


def write_statuses(run_dir: Path, statuses: Iterable[SinkStatus]) -> None:
    """Write the present state of deliveries."""
    _update(run_dir, {status.name: _entry(status, status.records) for status in statuses})


def write_reports(run_dir: Path, reports: Iterable[SinkReport], *, under_way: bool) -> None:
    """Write the results of deliveries, and whether the sink process continues the unfinished ones."""
    _update(
        run_dir,
        {
            report.name: {
                **_entry(report, report.sent),
                "pending": report.pending,
                "command": report.command,
                "under_way": under_way and report.state not in SETTLED,
            }
            for report in reports
        },
    )


def clear_under_way(run_dir: Path) -> None:
    """Write that no delivery is under way, if the processes that fed the sinks were killed."""
    entries = {name: {"under_way": False} for name, entry in read_status(run_dir).items() if entry.get("under_way")}
    if entries:
        _update(run_dir, entries)


def read_status(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the entry of each sink in `status.json`, by name; empty without a file."""
    try:
        sinks = read_json(run_dir / STATUS_NAME)["sinks"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    entries = sinks.items() if isinstance(sinks, dict) else ()
    return {name: entry for name, entry in entries if isinstance(entry, dict)}


def deliveries_under_way(run_dir: Path) -> dict[str, SinkState]:
    """Return the state of each sink that a process of the run feeds at this moment, by name; needs a file system with locks."""
    if not any(is_held(run_dir, role) for role in (Role.TRAINER, Role.SINKS)):
        return {}
    under_way = {name: entry for name, entry in read_status(run_dir).items() if entry.get("under_way")}
    states = {name: str(entry.get("state")) for name, entry in under_way.items()}
    return {name: SinkState(state) for name, state in states.items() if state in {*SinkState} - SETTLED}


def hung_process(run_dir: Path) -> str:
    """Return the sentence on a sink process that should have ended by itself, because its trainer is gone; empty without one."""
    if is_held(run_dir, Role.TRAINER):
        return ""
    written = [path.stat().st_mtime for name in (STATUS_NAME, CURSORS_NAME) if (path := run_dir / name).is_file()]
    seconds = time.time() - max(written, default=time.time())
    if seconds < MIN_HUNG_SECONDS:
        return ""
    pid = holder_pid(run_dir, Role.SINKS)
    return f"the background process {pid} hangs: it has delivered nothing for {seconds / 60:.0f} minutes. End it with `kill -9 {pid}`"


def _entry(delivery: SinkStatus | SinkReport, sent: int) -> dict[str, Any]:
    return {
        "state": str(delivery.state),
        "sent": sent,
        "quarantined": delivery.quarantined,
        "errors": delivery.errors,
        "last_error": delivery.last_error,
    }


def _update(run_dir: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Change entries of `status.json`. A full or read-only disk loses only these: the journal and the cursors have everything."""
    with suppress(OSError), run_dir_lock(run_dir):
        sinks = read_status(run_dir)
        for name, entry in entries.items():
            sinks[name] = {**sinks.get(name, {}), **redacted(entry)}
        content = json.dumps({"written": time.time(), "sinks": sinks}, indent=1, ensure_ascii=False)
        replace_file(run_dir / STATUS_NAME, content + "\n")
