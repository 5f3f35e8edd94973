"""What an alarm is raised with: the pieces of evidence that belong to its kind, bounded in size.

Which evidence goes into the journal of an update at DEBUG: all of it.

The gradient of every parameter tensor, one line each.

Where numbers stopped being finite: the first tensor in forward order, and how far the others have come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from esper_telemetry.core.record import Alarm, Record, template_of
from esper_telemetry.metrics.gradients.concentration import DECADE_EDGES, decade_counts
from esper_telemetry.updates.data import BackwardGradients, Snapshot
from esper_telemetry.updates.flight_recorder import OptimizerStep, flight_of

SMALL_BINS, LARGE_BINS = DECADE_EDGES.index(-6.0), DECADE_EDGES.index(1.0)
"""Bins of the histogram by decade up to 1e-6, and from 10 on."""


@dataclass(frozen=True, slots=True)
class LayerLine:
    """The gradient of one tensor in the update's first minibatch, before clipping; statistics over its finite entries.

    Attributes:
        name: of the parameter.
        entries: how many there are.
        norm, mean, std, min, max: None where no entry is finite; the deviation is that of the population.
        zero_frac, small_frac, large_frac: share of entries that are exactly 0, below 1e-6, 10 or more.
        nan, infinite: how many entries are.
        norm_mean, norm_max: of the norms at all steps of the update.
        decades: how many entries lie in each power of ten; see `metrics.gradients.DECADE_EDGES`.
    """

    name: str
    entries: int
    norm: float | None
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    zero_frac: float
    small_frac: float
    large_frac: float
    nan: int
    infinite: int
    norm_mean: float | None
    norm_max: float | None
    decades: tuple[int, ...]


def layer_table(snapshot: Snapshot) -> tuple[LayerLine, ...]:
    """One line per tensor, in the order of the network; nothing where no gradient was kept whole."""
    sample = snapshot.sample
    if sample is None or not sample.minibatches:
        return ()
    norms = _norms(snapshot.gradients)
    parts = sample.minibatches[0].split(list(sample.numels))
    return tuple(_line(name, part, norms.get(name)) for name, part in zip(sample.names, parts, strict=True))


def _norms(gradients: tuple[BackwardGradients, ...]) -> Mapping[str, Tensor]:
    """Norms at all steps, by parameter."""
    return dict(item for part in gradients for item in _columns(part))


def _columns(part: BackwardGradients) -> Iterator[tuple[str, Tensor]]:
    return zip(part.names, part.norms.unbind(1), strict=True)


def _line(name: str, gradient: Tensor, norms: Tensor | None) -> LayerLine:
    decades = [int(count) for count in decade_counts(gradient).tolist()]
    entries, others = max(1, gradient.numel()), decades[-1]
    finite = (gradient[torch.isfinite(gradient)] if others else gradient).double()
    known = norms[torch.isfinite(norms)] if norms is not None else finite[:0]
    nan = int(torch.isnan(gradient).sum()) if others else 0
    return LayerLine(
        name=name,
        entries=gradient.numel(),
        norm=float(torch.linalg.vector_norm(finite)) if len(finite) else None,
        mean=float(finite.mean()) if len(finite) else None,
        std=float(finite.std(correction=0)) if len(finite) else None,
        min=float(finite.amin()) if len(finite) else None,
        max=float(finite.amax()) if len(finite) else None,
        zero_frac=decades[0] / entries,
        small_frac=sum(decades[:SMALL_BINS]) / entries,
        large_frac=sum(decades[LARGE_BINS:-1]) / entries,
        nan=nan,
        infinite=others - nan,
        norm_mean=float(known.double().mean()) if len(known) else None,
        norm_max=float(known.max()) if len(known) else None,
        decades=tuple(decades),
    )


@dataclass(frozen=True, slots=True)
class NormLine:
    """The norms of one tensor's gradient at all steps of an update, before clipping; None where none is finite."""

    name: str
    entries: int
    norm_first: float | None
    norm_mean: float | None
    norm_max: float | None


def norm_table(snapshot: Snapshot) -> tuple[NormLine, ...]:
    """One line per tensor with a gradient, in the order of the network; every update has it."""
    return tuple(
        _norm_line(name, entries, norms)
        for part in snapshot.gradients
        for name, entries, norms in zip(part.names, part.numels, part.norms.unbind(1), strict=True)
    )


def _norm_line(name: str, entries: int, norms: Tensor) -> NormLine:
    known = norms[torch.isfinite(norms)].double()
    first = float(norms[0]) if len(norms) and torch.isfinite(norms[0]) else None
    if not len(known):
        return NormLine(name, entries, first, None, None)
    return NormLine(name, entries, first, float(known.mean()), float(known.max()))


MOST_INDICES = 100


@dataclass(frozen=True, slots=True)
class Offender:
    """A tensor that is not finite everywhere.

    Attributes:
        name: of the tensor.
        shape: its shape.
        nan, infinite: how many entries are NaN, and how many infinite.
        indices: of the first hundred of them.
    """

    name: str
    shape: tuple[int, ...]
    nan: int
    infinite: int
    indices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StabilityReport:
    """What is not finite in an update.

    Attributes:
        first: name of the first tensor in forward order that is not finite; empty if all are.
        offenders: it and those after it.
        largest: largest finite |entry| of every tensor, by name.
    """

    first: str
    offenders: tuple[Offender, ...]
    largest: dict[str, float]


def stability_report(snapshot: Snapshot) -> StabilityReport:
    """Looks at everything that an update left behind, in the order in which it was computed."""
    tensors = [(name, tensor) for name, tensor in _tensors(snapshot) if tensor.numel()]
    offenders = [offender for name, tensor in tensors for offender in _offences(name, tensor)]
    largest = {name: _largest(tensor) for name, tensor in tensors}
    return StabilityReport(
        offenders[0].name if offenders else "",
        tuple(offenders),
        {name: size for name, size in largest.items() if size is not None},
    )


def _tensors(snapshot: Snapshot) -> Iterator[tuple[str, Tensor]]:
    if snapshot.rollout is not None:
        for name in ("rewards", "values", "log_probs", "next_values", "advantages", "returns"):
            yield name, getattr(snapshot.rollout, name)
    minibatches = snapshot.minibatches
    if minibatches is not None:
        yield from ((f"logits of {head}", logits) for head, logits in minibatches.logits.items())
        yield from ((f"log_std of {head}", log_std) for head, log_std in minibatches.log_std.items())
        yield "log_ratio", minibatches.log_ratio
        yield "normalized advantages", minibatches.advantages
        yield from ((f"loss {name}", loss) for name, loss in minibatches.losses.items())
    for part in snapshot.gradients:
        yield from ((f"gradient norms of {name}", part.norms[:, k]) for k, name in enumerate(part.names))
    if snapshot.sample is not None and snapshot.sample.states:
        weights = snapshot.sample.states[-1].tensors()
        yield from ((f"weights of {name}", w) for name, w in zip(snapshot.sample.state_names, weights, strict=True))


def _offences(name: str, tensor: Tensor) -> Iterator[Offender]:
    bad = ~torch.isfinite(tensor)
    if not bad.any():
        return
    nan = int(torch.isnan(tensor).sum())
    indices = tuple(tuple(index) for index in bad.nonzero()[:MOST_INDICES].tolist())
    yield Offender(name, tuple(tensor.shape), nan, int(bad.sum()) - nan, indices)


def _largest(tensor: Tensor) -> float | None:
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if len(finite) else None


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


class EvidenceChoice(Protocol):
    """The declaration of an alarm, as far as it chooses evidence; see `alarms.rule.AlarmRule`."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Keys and templates that it reads."""

    @property
    def pieces(self) -> tuple[str, ...]:
        """Names of `COLLECTORS`, and `pairs`."""

    @property
    def histogram_keys(self) -> tuple[str, ...]:
        """Beginnings of the keys of its histograms."""


def evidence_of(alarm: Alarm, scene: Scene, choice: EvidenceChoice | None) -> dict[str, Any]:
    """Evidence for an alarm, by name; plain values, dataclasses apart.

    `values` are the metrics that it reads; by its declaration come `steps`, `worst` (transitions), `layers`, `stability`, `histograms`
    and `pairs`, what spoils the gradients' health (`health_cause`), and of several ranks whose rows they are, `rank`. Without a
    declaration there is the deciding value alone.
    """
    if choice is None:
        return {"values": {key: value for key, value in scene.record.values.items() if key == alarm.key}}
    record = scene.record
    found: dict[str, Any] = {"values": dict(_values(alarm, record, choice)), **dict(_histograms(record, choice))}
    for collect in [COLLECTORS[piece] for piece in choice.pieces if piece in COLLECTORS]:
        for snapshot in scene.snapshots[-1:]:
            found.update(collect(snapshot, scene.facts))
    if "pairs" in choice.pieces:
        found |= {"pairs": weak(scene.pairs), "health_cause": scene.health_cause}
    whose = {"rank": 0} if scene.facts.get("ranks", 1) > 1 else {}
    return {name: piece for name, piece in found.items() if piece} | whose


def weak(pairs: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Of why modules learn as they do, by name, those that do not learn well."""
    return {name: why for name, why in pairs.items() if why["cause"] not in FINE}


def _values(alarm: Alarm, record: Record, choice: EvidenceChoice) -> Iterator[tuple[str, float]]:
    """The metrics that tell this kind of alarm, the deciding one first."""
    templates = dict.fromkeys(choice.inputs)
    keys = [alarm.key, *(key for key in record.values if template_of(key, templates) in templates)]
    for key in [key for key in dict.fromkeys(keys) if key in record.values][:MOST_VALUES]:
        yield key, record.values[key]


def _histograms(record: Record, choice: EvidenceChoice) -> Iterator[tuple[str, dict[str, Any]]]:
    """The histograms of its family: those of an LSTM's gates, of log-ratios, of returns."""
    names = [key for key in record.histograms if key.startswith(choice.histogram_keys)][:MOST_HISTOGRAMS]
    if names:
        yield "histograms", {key: asdict(record.histograms[key]) for key in names}


def _flight(snapshot: Snapshot, facts: Mapping[str, Any]) -> dict[str, Any]:
    flight = flight_of(snapshot, facts)
    return {"steps": [asdict(step) for step in _some(flight.steps)], "worst": [asdict(row) for row in flight.worst]}


def _some(steps: tuple[OptimizerStep, ...]) -> tuple[OptimizerStep, ...]:
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

COLLECTORS: Final[Mapping[str, Collector]] = {"transitions": _flight, "layers": _layers, "stability": _stability}
"""Builders of the parts of an update, by the names under which alarms choose them."""


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
