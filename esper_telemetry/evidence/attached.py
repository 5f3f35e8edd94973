"""What an alarm is raised with: the pieces of evidence that belong to its kind, bounded in size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from esper_telemetry.alarms import ALARMS
from esper_telemetry.evidence.flight import Step, flight_of
from esper_telemetry.evidence.layers import LayerLine, NormLine, layer_table, norm_table
from esper_telemetry.evidence.stability import StabilityReport, stability_report
from esper_telemetry.record import Alarm, Record, template_of
from esper_telemetry.summary import Snapshot

MOST_STEPS: Final = 32
MOST_LAYERS: Final = 32
MOST_OFFENDERS: Final = 8
MOST_VALUES: Final = 32
MOST_HISTOGRAMS: Final = 4
"""Of an alarm's evidence; so it stays within some tens of kilobytes, however large the update."""

FINE: Final = ("ok", "undefined", "host_fast")
"""Causes of an intensity ratio that nobody need look at."""


@dataclass(frozen=True, slots=True)
class Scene:
    """An update in which an alarm was raised.

    Attributes:
        record: what was measured of it.
        snapshots: what it left behind, of several ranks on the first one.
        facts: of the run.
        pairs: why modules learn as they do next to their hosts, by name.
        health_cause: what takes most from the health of the gradients: `nonfinite`, `vanish`, `explode`, `imbalance` or `zero`.
    """

    record: Record
    snapshots: tuple[Snapshot, ...]
    facts: Mapping[str, Any]
    pairs: Mapping[str, Mapping[str, Any]]
    health_cause: str | None = None


def evidence_of(alarm: Alarm, scene: Scene) -> dict[str, Any]:
    """What there is to show for an alarm, by name; plain values, dataclasses apart.

    `values` are the metrics that it reads; by its family come `steps`, `worst` (transitions), `layers`, `stability`, `histograms`
    and `pairs`, what spoils the gradients' health (`health_cause`), and of several ranks whose rows they are, `rank`.
    """
    found: dict[str, Any] = {"values": dict(_values(alarm, scene.record)), **dict(_histograms(alarm, scene.record))}
    for collect in COLLECTORS.get(alarm.type.partition("/")[0], ()):
        for snapshot in scene.snapshots[-1:]:
            found.update(collect(snapshot, scene.facts))
    if alarm.type.startswith("grad/"):
        found |= {"pairs": weak(scene.pairs), "health_cause": scene.health_cause}
    whose = {"rank": 0} if scene.facts.get("ranks", 1) > 1 else {}
    return {name: piece for name, piece in found.items() if piece} | whose


def weak(pairs: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Of why modules learn as they do, by name, those that do not learn well."""
    return {name: why for name, why in pairs.items() if why["cause"] not in FINE}


def _values(alarm: Alarm, record: Record) -> Iterator[tuple[str, float]]:
    """The metrics that tell this kind of alarm, the deciding one first."""
    templates = {key: None for kind in ALARMS if kind.type == alarm.type for key in kind.reads}
    keys = [alarm.key, *(key for key in record.values if template_of(key, templates) in templates)]
    for key in [key for key in dict.fromkeys(keys) if key in record.values][:MOST_VALUES]:
        yield key, record.values[key]


def _histograms(alarm: Alarm, record: Record) -> Iterator[tuple[str, dict[str, Any]]]:
    """The histograms of its family: those of an LSTM's gates, of log-ratios, of returns."""
    family = alarm.type.partition("/")[0]
    related = RELATED.get(family, (f"{family}/",))
    names = [key for key in record.histograms if key.startswith(related)][:MOST_HISTOGRAMS]
    if names:
        yield "histograms", {key: asdict(record.histograms[key]) for key in names}


RELATED: Final[Mapping[str, tuple[str, ...]]] = {"value": ("value/", "ret/"), "grad": ("grad/decades",)}


def _flight(snapshot: Snapshot, facts: Mapping[str, Any]) -> dict[str, Any]:
    flight = flight_of(snapshot, facts)
    return {"steps": [asdict(step) for step in _some(flight.steps)], "worst": [asdict(row) for row in flight.worst]}


def _some(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """All steps, or as many as there may be, evenly spaced from the first to the last."""
    if len(steps) <= MOST_STEPS:
        return steps
    return tuple(steps[round(place * (len(steps) - 1) / (MOST_STEPS - 1))] for place in range(MOST_STEPS))


def _stability(snapshot: Snapshot, _: Mapping[str, Any]) -> dict[str, Any]:
    report = stability_report(snapshot)
    return {"stability": asdict(_bounded(report))} if report.offenders else {}


def _bounded(report: StabilityReport) -> StabilityReport:
    """The first offenders, and the largest of what is finite."""
    largest = sorted(report.largest, key=lambda name: -report.largest[name])[:MOST_LAYERS]
    kept = {name: report.largest[name] for name in largest}
    return StabilityReport(report.first, report.offenders[:MOST_OFFENDERS], kept)


def _layers(snapshot: Snapshot, _: Mapping[str, Any]) -> dict[str, Any]:
    """The whole table where the update was looked at closely, else the norms; the largest where there are many."""
    lines: tuple[LayerLine | NormLine, ...] = layer_table(snapshot) or norm_table(snapshot)
    largest = sorted(lines, key=lambda line: -_size(line.norm_max))[:MOST_LAYERS]
    names = {line.name for line in largest}
    return {"layers": [asdict(line) for line in lines if line.name in names]}


def _size(norm: float | None) -> float:
    """What is not finite is larger than all that is."""
    return float("inf") if norm is None else norm


Collector = Callable[[Snapshot, Mapping[str, Any]], dict[str, Any]]

COLLECTORS: Final[Mapping[str, tuple[Collector, ...]]] = {
    "numerics": (_stability, _layers),
    "integrity": (_flight, _stability),
    "policy": (_flight,),
    "value": (_flight,),
    "adv": (_flight,),
    "grad": (_layers, _flight),
    "opt": (_layers,),
    "repr": (_layers,),
    "lstm": (_flight,),
}
"""By family of alarms, what is collected from the update."""
