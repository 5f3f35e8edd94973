"""Which evidence goes into the journal, and when: all of it at DEBUG, at NORMAL what a record's numbers call for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from esper_telemetry.evidence.flight import flight_of
from esper_telemetry.evidence.layers import layer_table
from esper_telemetry.evidence.stability import stability_report
from esper_telemetry.record import Level
from esper_telemetry.summary import Snapshot

QUIET = 20
"""Updates after which the same evidence may be written again at NORMAL."""

EXPLODED_RATIO, EXPLODED_ESS, COLLAPSED_ESS = 10.0, 0.8, 0.6
"""A ratio above the first with an effective sample size below the second, or one below the third: the policy has jumped."""

FINE = ("ok", "undefined", "host_fast")
"""Causes of an intensity ratio that nobody need look at."""


class Capture(NamedTuple):
    """One piece of evidence: what it is, and its plain data."""

    type: str
    data: Mapping[str, Any]


class Captures:
    """Decides update by update.

    Args:
        level: DEBUG keeps everything.
    """

    def __init__(self, level: Level) -> None:
        self._level = level
        self._update = 0
        self._silent_until: dict[str, int] = {}

    def of(
        self,
        snapshot: Snapshot,
        values: Mapping[str, float],
        facts: Mapping[str, Any],
        pairs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Iterator[Capture]:
        """The evidence of an update.

        Args:
            snapshot: what it left behind.
            values: of its record.
            facts: of the run.
            pairs: why modules learn as they do next to their hosts, by name.
        """
        self._update += 1
        if self._level < Level.NORMAL:
            return
        if self._due("stability", called_for=not_finite(values)):
            yield Capture("stability", asdict(stability_report(snapshot)))
        if self._due("flight", called_for=exploded(values) or not_finite(values)):
            yield Capture("flight", asdict(flight_of(snapshot, facts)))
        weak = {name: why for name, why in (pairs or {}).items() if why["cause"] not in FINE}
        if pairs and self._due("pairs", called_for=bool(weak)):
            yield Capture("pairs", pairs if self._level is Level.DEBUG else weak)
        if self._level is Level.DEBUG and snapshot.sample is not None:
            yield Capture("gradients", {"layers": [asdict(line) for line in layer_table(snapshot)]})

    def _due(self, kind: str, *, called_for: bool) -> bool:
        if self._level is Level.DEBUG:
            return True
        if not called_for or self._update < self._silent_until.get(kind, 0):
            return False
        self._silent_until[kind] = self._update + QUIET
        return True


def not_finite(values: Mapping[str, float]) -> bool:
    """Whether anything in the update was NaN or infinite."""
    return values.get("numerics/nonfinite", 0.0) > 0 or any(key.endswith("_nonfinite") for key in values)


def exploded(values: Mapping[str, float]) -> bool:
    """Whether probability ratios have exploded (Moalla 2024)."""
    size = values.get("policy/ess_frac_min", 1.0)
    return size < COLLAPSED_ESS or (values.get("policy/ratio/max", 1.0) > EXPLODED_RATIO and size < EXPLODED_ESS)
