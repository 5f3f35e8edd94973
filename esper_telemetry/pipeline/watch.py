"""What the way of a record needs to know of whatever watches it, and what goes back to the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from esper_telemetry.core.record import Alarm, Axes, Record
from esper_telemetry.updates.evidence import EvidenceChoice


class Judgement(Protocol):
    """What was found in one record; see `detectors.Verdict`."""

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Those that begin, get worse or end with it."""

    @property
    def remaining(self) -> int:
        """Updates for which the level is to be DEBUG; 0 for none."""

    @property
    def values(self) -> Mapping[str, float]:
        """What joins the record."""

    @property
    def events(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """What else happened, by type."""


class Detector(Protocol):
    """Looks at the records of a run in order; see `detectors.Detectors`."""

    def step(self, record: Record) -> Judgement:
        """Looks at the next one."""

    def rule(self, kind: str) -> EvidenceChoice | None:
        """The declaration of a type of alarm, which chooses its evidence."""

    def intervention(self) -> None:
        """Hears that someone has changed the run on purpose."""

    def failure(self, seq: int, axes: Axes, data: Mapping[str, Any]) -> Judgement:
        """Judges the exception that ended the run, by the data of its `failure` event; records follow where the run is resumed."""


Watches = Callable[[Mapping[str, Any]], Detector]
"""Makes a watch from the facts of a run; it can be pickled, because it works in the process that writes the journal."""


class Found(NamedTuple):
    """What goes back to the trainer of one record: its alarms, and for how many updates the level is to be DEBUG."""

    alarms: tuple[Alarm, ...]
    remaining: int
