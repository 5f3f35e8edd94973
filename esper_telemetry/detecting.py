"""From what a user says of detection to what watches the records."""

from __future__ import annotations

from functools import partial

from esper_telemetry.detectors import Detectors, Thresholds
from esper_telemetry.watch import Watches

Detect = bool | Thresholds | Watches
"""Whether alarms are raised, or by which thresholds; or something else that watches, made from a run's facts."""


def watches(detect: Detect) -> Watches | None:
    """What makes the watch of a run; None where nobody watches.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(detect, bool):
        return partial(Detectors, thresholds=Thresholds()) if detect else None
    if isinstance(detect, Thresholds):
        return partial(Detectors, thresholds=detect)
    if not callable(detect):
        raise TypeError(f"detect takes True, False or Thresholds, got {detect!r}")
    return detect
