"""Alarms as numbers, so that a dashboard can draw them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from esper_telemetry.derived import Array, Derived
from esper_telemetry.metric import Metric, label, reports
from esper_telemetry.record import Level


@dataclass(frozen=True, slots=True)
class AlarmCount(Derived):
    """How many alarms are on."""

    active: float | None = reports(
        Metric(
            key="alarm/active",
            number=990,
            unit="count",
            question="How many kinds of alarm are raised at the moment?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="0",
            warn="> 0",
            source="the rules in esper_telemetry.detectors",
            undefined="nobody raises alarms",
        )
    )


@dataclass(frozen=True, slots=True)
class AlarmSeverity(Derived):
    """How serious each of them is."""

    key: tuple[str, ...] = label()
    severity: Array | None = reports(
        Metric(
            key="alarm/{key}",
            number=991,
            unit="severity",
            question="How serious is this alarm while it is raised? 0 where it ends.",
            low=0.0,
            high=1.0,
            level=Level.MINIMAL,
            warn=">= 0.25",
            critical=">= 0.75",
            source="severity of its rule",
            undefined="it is not raised",
        )
    )


def alarm_values(severities: Mapping[str, float], active: int) -> dict[str, float]:
    """Values of a record by key.

    Args:
        severities: of the alarms that are raised, and 0 of those that have just ended, by type.
        active: kinds of alarm that are raised.
    """
    values = AlarmCount(float(active)).values()
    if severities:
        values.update(AlarmSeverity(tuple(severities), np.array([*severities.values()])).values())
    return values
