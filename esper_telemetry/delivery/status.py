"""How deliveries are going, and what is left of them at the end.

`status.json` in the run directory: how the delivery to each sink stands, for people and for `doctor`.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

from esper_telemetry.core.record import SinkLag
from esper_telemetry.core.redaction import masked
from esper_telemetry.delivery.cursors import replace_file, run_dir_lock
from esper_telemetry.journal.lock import Role, is_held
from esper_telemetry.sinks.protocol import Sink, sink_name, sink_uri, unreachable
from esper_telemetry.sinks.registry import BUNDLED, known_sinks

NOT_IN_SEGMENTS = re.compile("[^a-z0-9]+")


class SinkState(StrEnum):
    """Where the delivery to a sink stands."""

    OPENING = "opening"
    DELIVERING = "delivering"
    RETRYING = "retrying"
    CLOSED = "closed"
    DISABLED = "disabled"
    DEAD_CLIENT = "dead client"
    HUNG = "hung"


FINAL = frozenset({SinkState.CLOSED, SinkState.DISABLED, SinkState.DEAD_CLIENT, SinkState.HUNG})
"""States that a delivery does not leave; of the last two, a fresh process may begin anew."""


SETTLED = frozenset({SinkState.CLOSED, SinkState.DISABLED})
"""States that a fresh process does not change either."""


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """A delivery at one moment.

    Attributes:
        name: of the sink, unique within its run.
        state: what the delivery is doing.
        records: records that the sink has taken since the run began.
        seq: of the last of them.
        errors: exceptions of the sink so far.
        last_error: the latest of them in one line.
        quarantined: records that it refused for good.
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
        """Of so many records, how many it has still to take."""
        return max(0, records - self.records - self.quarantined)

    def as_lag(self, records: int, *, now: float, begun: float) -> SinkLag:
        """How it stands, of so many records, at a time; `begun` is when the relay was. A clock may jump back."""
        behind = self.lag(records)
        since = begun if self.wall_time is None else self.wall_time
        return SinkLag(key_segment(self.name), behind, max(0.0, now - since) if behind else 0.0, self.errors)


@cache
def key_segment(name: str) -> str:
    """A sink's name as a segment of a key: `wandb_walker`."""
    return NOT_IN_SEGMENTS.sub("_", name.lower()).strip("_") or "sink"


@dataclass(frozen=True, slots=True)
class DeliveryStats:
    """All deliveries of a run at one moment.

    Attributes:
        queue_depth: records that the slowest working sink has still to take.
        errors: exceptions of all sinks so far.
        sinks: each delivery by name.
        lags: the same as numbers.
    """

    queue_depth: int
    errors: int
    sinks: Mapping[str, SinkStatus]
    lags: tuple[SinkLag, ...] = ()


@dataclass(frozen=True, slots=True)
class SinkReport:
    """What became of one sink.

    Attributes:
        name: of the sink.
        state: where its delivery ended; only `CLOSED` is complete.
        sent: records that it took.
        pending: records that it did not take.
        errors: how often it raised.
        last_error: the latest exception in one line.
        command: what sends the rest; empty if there is none, or no journal to send it from.
        quarantined: records that it refused, which stand in `dead_letter.jsonl`.
        goes_on: whether a process goes on delivering by itself.
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
        """Whether it took every record and was closed."""
        return self.state is SinkState.CLOSED and not self.pending and not self.quarantined

    def __str__(self) -> str:
        because = f" ({self.last_error})" if self.last_error and self.state is not SinkState.CLOSED else ""
        rest = f"; send the rest with: {self.command}" if self.command else ""
        rest = "; a background process goes on" if self.goes_on else rest
        left = f", {self.pending} pending" if self.pending else ""
        refused = f", {self.quarantined} refused (dead_letter.jsonl)" if self.quarantined else ""
        return f"{self.name}: {self.state}, {self.sent} records sent{left}{refused}{because}{rest}"


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What became of each sink of a run."""

    sinks: tuple[SinkReport, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every sink took every record and was closed."""
        return all(sink.complete for sink in self.sinks)

    def __str__(self) -> str:
        return "\n".join(map(str, self.sinks))


def sink_report(status: SinkStatus, *, pending: int, command: str = "", goes_on: bool = False) -> SinkReport:
    """The report on a delivery that is over or given up; a complete one needs no command."""
    complete = status.state is SinkState.CLOSED and not pending
    return SinkReport(
        status.name,
        status.state,
        status.records,
        pending,
        status.errors,
        status.last_error,
        "" if complete else command,
        status.quarantined,
        goes_on,
    )


def one_line(error: BaseException) -> str:
    """Return an exception as one line of at most 300 characters, with passwords in addresses masked."""
    if dead := unreachable(error):
        return dead
    text = masked(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def replay_command(run_dir: Path | None, sink: Sink) -> str:
    """What a person types to send the rest; a sink says how it is spelled in `uri`, else in its name. Others are replayed from Python."""
    if run_dir is None:
        return ""
    uri = sink_uri(sink)
    name = uri.partition("?")[0].partition(":")[0]
    if name not in BUNDLED and name not in known_sinks():  # the second looks through all that is installed
        return f"esper_telemetry.replay({str(run_dir)!r}, SINK)"
    return shlex.join(["esper-telemetry", "replay", str(run_dir), "--to", uri])


def sinks_by_name(sinks: Sequence[Sink]) -> dict[str, Sink]:
    """Sinks by name; the second and third of a name are numbered."""
    named: dict[str, Sink] = {}
    for sink in sinks:
        name, count = sink_name(sink), 1
        while name in named:
            count += 1
            name = f"{sink_name(sink)}-{count}"
        named[name] = sink
    return named


STATUS_NAME: Final = "status.json"
_logger = logging.getLogger("esper_telemetry")


def write_uris(run_dir: Path, uris: Mapping[str, str]) -> None:
    """Says that deliveries begin, and how each sink is spelled, so that it can be found again; leaves what else is known of the run."""
    begun = {"state": str(SinkState.OPENING), "under_way": True}
    _update(run_dir, {name: {"uri": uri, **begun} for name, uri in uris.items()})


def write_statuses(run_dir: Path, statuses: Iterable[SinkStatus]) -> None:
    """Says how deliveries stand at this moment."""
    entries: dict[str, dict[str, Any]] = {}
    for status in statuses:
        entries[status.name] = {
            "state": str(status.state),
            "sent": status.records,
            "quarantined": status.quarantined,
            "errors": status.errors,
            "last_error": status.last_error,
        }
    _update(run_dir, entries)


def write_reports(run_dir: Path, reports: Iterable[SinkReport], *, under_way: bool) -> None:
    """Says what has become of deliveries, and whether the process that feeds these sinks goes on."""
    entries: dict[str, dict[str, Any]] = {}
    for report in reports:
        entries[report.name] = {
            "state": str(report.state),
            "sent": report.sent,
            "pending": report.pending,
            "quarantined": report.quarantined,
            "errors": report.errors,
            "last_error": report.last_error,
            "command": report.command,
            "under_way": under_way,
        }
    _update(run_dir, entries)


def read_status(run_dir: Path) -> dict[str, dict[str, Any]]:
    """What is known of each sink, by name; empty where nothing is."""
    try:
        sinks = json.loads((run_dir / STATUS_NAME).read_bytes())["sinks"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return dict(sinks) if isinstance(sinks, dict) else {}


def deliveries_under_way(run_dir: Path) -> dict[str, SinkState]:
    """The sinks that a process of the run feeds at this moment, by name, and how that stands; needs a file system with locks."""
    if not any(is_held(run_dir, role) for role in (Role.TRAINER, Role.SINKS)):
        return {}
    under_way = {name: entry for name, entry in read_status(run_dir).items() if entry.get("under_way")}
    states = {name: SinkState(entry["state"]) for name, entry in under_way.items()}
    return {name: state for name, state in states.items() if state not in SETTLED}


def _update(run_dir: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """A disk that is full or read-only costs the note: the journal and the cursors have everything."""
    with suppress(OSError), run_dir_lock(run_dir):
        sinks = read_status(run_dir)
        for name, entry in entries.items():
            sinks[name] = {**sinks.get(name, {}), **entry}
        content = json.dumps({"written": time.time(), "sinks": sinks}, indent=1, ensure_ascii=False)
        replace_file(run_dir / STATUS_NAME, content + "\n")
