"""Which evidence goes into the journal of an update at DEBUG: all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from esper_telemetry.evidence.flight import flight_of
from esper_telemetry.evidence.layers import layer_table
from esper_telemetry.evidence.stability import stability_report
from esper_telemetry.summary import Snapshot


class Capture(NamedTuple):
    """One piece of evidence: what it is, and its plain data."""

    type: str
    data: Mapping[str, Any]


def captures(
    snapshot: Snapshot, facts: Mapping[str, Any], pairs: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[Capture]:
    """Everything that an update left behind.

    Args:
        snapshot: the update.
        facts: of the run.
        pairs: why modules learn as they do next to their hosts, by name.
    """
    yield Capture("stability", asdict(stability_report(snapshot)))
    yield Capture("flight", asdict(flight_of(snapshot, facts)))
    if pairs:
        yield Capture("pairs", pairs)
    if snapshot.sample is not None:
        yield Capture("gradients", {"layers": [asdict(line) for line in layer_table(snapshot)]})
