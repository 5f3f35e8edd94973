"""`status.json` in the run directory: how the delivery to each sink stands, for people and for `doctor`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from esper_telemetry.journal import Role, is_held
from esper_telemetry.relay.files import locked, replaced
from esper_telemetry.relay.status import SETTLED, SinkReport, SinkState, SinkStatus

STATUS_NAME: Final = "status.json"
_logger = logging.getLogger("esper_telemetry")


def note_uris(run_dir: Path, uris: Mapping[str, str]) -> None:
    """Says that deliveries begin, and how each sink is spelled, so that it can be found again; leaves what else is known of the run."""
    begun = {"state": str(SinkState.OPENING), "under_way": True}
    _update(run_dir, {name: {"uri": uri, **begun} for name, uri in uris.items()})


def note_statuses(run_dir: Path, statuses: Iterable[SinkStatus]) -> None:
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


def note_reports(run_dir: Path, reports: Iterable[SinkReport], *, under_way: bool) -> None:
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
    if not any(is_held(run_dir, role) for role in (Role.TRAINER, Role.RELAY)):
        return {}
    under_way = {name: entry for name, entry in read_status(run_dir).items() if entry.get("under_way")}
    states = {name: SinkState(entry["state"]) for name, entry in under_way.items()}
    return {name: state for name, state in states.items() if state not in SETTLED}


def _update(run_dir: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """A disk that is full or read-only costs the note: the journal and the cursors have everything."""
    with suppress(OSError), locked(run_dir):
        sinks = read_status(run_dir)
        for name, entry in entries.items():
            sinks[name] = {**sinks.get(name, {}), **entry}
        content = json.dumps({"written": time.time(), "sinks": sinks}, indent=1, ensure_ascii=False)
        replaced(run_dir / STATUS_NAME, content + "\n")
