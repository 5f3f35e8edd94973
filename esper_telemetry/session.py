"""From what a user says of detection to what watches the records."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from functools import partial
from typing import Any

from esper_telemetry.alarms.detectors import Detectors
from esper_telemetry.alarms.registry import alarm_rules, as_rules, with_alarms
from esper_telemetry.alarms.rule import AlarmRule
from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.pipeline.watch import Watches

Detect = bool | Thresholds | Watches
"""Whether alarms are raised, or by which thresholds; or something else that watches, made from a run's facts."""


def watches(detect: Detect, alarms: AlarmRule | Iterable[AlarmRule] = (), *, offload: bool = False) -> Watches | None:
    """Return the factory of a run's detectors; None where alarms are off.

    Args:
        detect: see `Telemetry`.
        alarms: rules besides the installed ones.
        offload: they may have to travel to a worker process.

    Raises:
        TypeError: for anything else, and for rules that cannot be sent to a worker process.
        ValueError: for a rule whose type another one has, and for rules where alarms are off.
    """
    added = tuple(as_rules(alarms))
    if added and not isinstance(detect, Thresholds) and detect is not True:
        raise ValueError("alarms are for detect=True or detect=Thresholds(...): nothing else judges by them")
    with_alarms(alarm_rules(), added)
    for rule in added if offload else ():
        _check_portable(rule)
    if isinstance(detect, bool | Thresholds):
        return None if detect is False else partial(Detectors, alarms=added) if added else Detectors
    given: object = detect
    if not callable(detect) or given is Thresholds:
        raise TypeError(f"detect takes True, False or Thresholds, got {detect!r}")
    return detect


def _check_portable(rule: AlarmRule) -> None:
    """Raise TypeError for a rule that a worker process could not load; what a script defines itself is unknown there."""
    try:
        reason = "it is defined in the script that runs" if b"__main__" in pickle.dumps(rule) else ""
    except Exception as error:  # pickling runs code of the rule
        reason = str(error)
    if reason:
        raise TypeError(
            f"alarm {rule.type!r} cannot be sent to the worker process ({reason}); define its judge in a module that can be imported, "
            "name it by an entry point of the group esper_telemetry.alarms, or use offload=False"
        )


def facts_of(detect: Detect) -> dict[str, Any]:
    """What the run tells of its thresholds: those that differ from the usual ones, so that whoever reads it judges as it was judged."""
    return {"thresholds": detect.changes()} if isinstance(detect, Thresholds) else {}
