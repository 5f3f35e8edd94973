"""`status.json` in the run directory: how the delivery to each sink stands, for people and for `doctor`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from esper_telemetry.relay.files import locked, replaced
from esper_telemetry.relay.status import SinkReport, SinkStatus

STATUS_NAME: Final = "status.json"
_logger = logging.getLogger("esper_telemetry")


def note_uris(run_dir: Path, uris: Mapping[str, str]) -> None:
    """Says how each sink is spelled, so that it can be found again; leaves what is known of earlier parts of the run."""
    _update(run_dir, {name: {"uri": uri} for name, uri in uris.items()})


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


def note_reports(run_dir: Path, reports: Iterable[SinkReport]) -> None:
    """Says what has become of deliveries that are over."""
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
        }
    _update(run_dir, entries)


def read_status(run_dir: Path) -> dict[str, dict[str, Any]]:
    """What is known of each sink, by name; empty where nothing is."""
    try:
        sinks = json.loads((run_dir / STATUS_NAME).read_bytes())["sinks"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return dict(sinks) if isinstance(sinks, dict) else {}


def _update(run_dir: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """A disk that is full or read-only costs the note: the journal and the cursors have everything."""
    with suppress(OSError), locked(run_dir):
        sinks = read_status(run_dir)
        for name, entry in entries.items():
            sinks[name] = {**sinks.get(name, {}), **entry}
        content = json.dumps({"written": time.time(), "sinks": sinks}, indent=1, ensure_ascii=False)
        replaced(run_dir / STATUS_NAME, content + "\n")
