"""From what a user says of detection to what watches the records."""

from __future__ import annotations

from typing import Any

from esper_telemetry.alarms.detectors import Detectors
from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.pipeline.watch import Watches

Detect = bool | Thresholds | Watches
"""Whether alarms are raised, or by which thresholds; or something else that watches, made from a run's facts."""


def watches(detect: Detect) -> Watches | None:
    """What makes the watch of a run; None where nobody watches.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(detect, bool):
        return Detectors if detect else None
    if isinstance(detect, Thresholds):
        return Detectors
    given: object = detect
    if not callable(detect) or given is Thresholds:
        raise TypeError(f"detect takes True, False or Thresholds, got {detect!r}")
    return detect


def facts_of(detect: Detect) -> dict[str, Any]:
    """What the run tells of its thresholds: those that differ from the usual ones, so that whoever reads it judges as it was judged."""
    return {"thresholds": detect.changes()} if isinstance(detect, Thresholds) else {}
