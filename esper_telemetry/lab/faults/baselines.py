"""What people do instead of detectors, scored by the same rules: NaN checks, fixed thresholds, a falling return, a relative average."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from esper_telemetry.alarms.registry import NONFINITE
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Record

Finds = Callable[[Record], Iterable[str]]


class PlainBaseline:
    """Raises an alarm when a finding begins, or has lasted for `streak` updates, and again after it has ended."""

    def __init__(self, find: Finds, streak: int = 1) -> None:
        self._find, self._streak = find, streak
        self._lasting: dict[str, int] = {}

    def step(self, record: Record) -> Iterable[Alarm]:
        """Alarms that this record raises."""
        found = set(self._find(record))
        self._lasting = {kind: self._lasting.get(kind, 0) + 1 for kind in found}
        raised = sorted(kind for kind, lasted in self._lasting.items() if lasted == self._streak)
        return [alarm(kind, record) for kind in raised]

    def intervention(self) -> None:
        """Means nothing to it."""


def alarm(kind: str, record: Record) -> Alarm:
    """A raised alarm of that type, which is its own cause."""
    incident = record.axes.update
    blank = Alarm(record.seq, record.axes, kind, AlarmEvent.RAISE, 1.0, AlarmLevel.CRITICAL, "")
    return replace(blank, incident=incident, cause=kind)


def nonfinite(record: Record) -> Iterable[str]:
    """NaN or infinity anywhere."""
    values = record.values
    counted = any(values[key] > 0 for key in values if key.endswith((NONFINITE, "/nonfinite")))
    return ["numerics/nonfinite"] if counted else []


BOUNDS: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("policy/ratio/max", "policy/ratio_explosion", lambda value: value > 5),
    ("policy/ratio/min", "policy/ratio_explosion", lambda value: value < 0.1),
    ("policy/entropy_norm", "policy/entropy_collapse", lambda value: value < 0.1),
    ("policy/kl", "policy/kl_spike", lambda value: value > 0.1),
    ("value/explained_variance", "value/fit_collapse", lambda value: value < 0),
    ("grad/global/norm_preclip_max", "grad/explode", lambda value: value > 100),
)
"""(key, type, rule): the thresholds that are found most often in trainers and tutorials."""

WARM_UP = 10
"""Updates in which a negative explained variance means nothing yet."""


def beyond_bounds(record: Record) -> Iterable[str]:
    """Fixed thresholds, and NaN."""
    values, early = record.values, record.axes.update <= WARM_UP
    found = [
        kind
        for key, kind, breaks in BOUNDS
        if key in values and breaks(values[key]) and not (early and key == "value/explained_variance")
    ]
    return [*found, *nonfinite(record)]


class ReturnDrop:
    """A return 30 % below the best average so far."""

    def __init__(self) -> None:
        self._average: float | None = None
        self._best = -math.inf

    def __call__(self, record: Record) -> Iterable[str]:
        """Whether it is."""
        value = record.values.get("episode/return_mean")
        if value is None:
            return []
        self._average = value if self._average is None else 0.9 * self._average + 0.1 * value
        self._best = max(self._best, self._average)
        return ["task/return_drop"] if value < self._best - 0.3 * abs(self._best) else []


class RelativeDrift:
    """A gradient norm half above or below its slow average, with no warm-up."""

    def __init__(self) -> None:
        self._average: float | None = None

    def __call__(self, record: Record) -> Iterable[str]:
        """Whether it is."""
        value = record.values.get("grad/global/norm_preclip")
        if value is None:
            return []
        before, self._average = self._average, value if self._average is None else 0.99 * self._average + 0.01 * value
        if before is None or abs(value - before) <= 0.5 * before:
            return []
        return ["grad/explode" if value > before else "grad/vanish"]


BASELINES: Mapping[str, Callable[[Mapping[str, Any]], PlainBaseline]] = {
    "nan_only": lambda facts: PlainBaseline(nonfinite),
    "fixed_thresholds": lambda facts: PlainBaseline(beyond_bounds),
    "return_drop": lambda facts: PlainBaseline(ReturnDrop(), streak=3),
    "relative_ema": lambda facts: PlainBaseline(RelativeDrift()),
}
"""Each as a judge for a run with those facts."""
