"""Evidence for alarms: plain values that show what an update looked like, computed only when an alarm calls for it.

It covers the flight recorder (optimizer steps, and the transitions whose probability changed most) and the gradient of every
parameter tensor. It also lists tensors with non-finite entries, in forward order. Sizes are bounded to some tens of kilobytes per
alarm.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from esper_telemetry.core.facts import Facts
from esper_telemetry.core.record import Alarm, Record, template_of
from esper_telemetry.core.reduction import Mean
from esper_telemetry.events import RolloutEnd
from esper_telemetry.metrics.gradients.directions import DECADE_EDGES, decade_counts
from esper_telemetry.metrics.gradients.norms import gradient_norms
from esper_telemetry.updates.extensions import Capture, SupportsAlarmEvidence, SupportsEvents
from esper_telemetry.updates.update import BackwardGradients, JoinedMinibatches, Update

SMALL_BINS, LARGE_BINS = DECADE_EDGES.index(-6.0), DECADE_EDGES.index(1.0)
"""Bins of the histogram by decade up to 1e-6, and from 10 on."""

MAX_ROWS = 16
"""Transitions of the flight recorder."""
MAX_INDICES = 100
"""Entries that are not finite whose indices are listed, per tensor."""
MAX_STEPS: Final = 32
MAX_LAYERS: Final = 32
MAX_OFFENDERS: Final = 8
MAX_VALUES: Final = 32
MAX_HISTOGRAMS: Final = 4

CAUSES_WITHOUT_EVIDENCE: Final = ("ok", "undefined", "host_fast")
"""Harmless causes of an intensity ratio."""


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """One optimizer step, counted from 0.

    Attributes:
        kl: k3 estimate of the policy's change, nats.
        norm, groups: of the gradient before clipping, whole and of the declared groups.
        clip_coef: factor of the clipping.
    """

    step: int
    epoch: int
    kl: float | None = None
    norm: float | None = None
    clip_coef: float | None = None
    groups: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeadShift:
    """Choice of one head, and its log-probability at collection and now; None if the source does not give it."""

    action: int | float | list[float] | None = None
    old_log_prob: float | None = None
    new_log_prob: float | None = None


@dataclass(frozen=True, slots=True)
class WorstRow:
    """A transition whose probability changed most.

    Attributes:
        log_ratio: log-probability now minus at collection.
        advantage: factor of the ratio.
        step, epoch: the optimizer step whose minibatch it was in; `Flight.steps` has the gradient of that minibatch.
        time, env: its place in the rollout; None if the trainer does not say.
        old_log_prob, new_log_prob: of all heads together.
        heads: the choice of each head.
    """

    log_ratio: float
    advantage: float
    step: int
    epoch: int
    time: int | None = None
    env: int | None = None
    old_log_prob: float | None = None
    new_log_prob: float | None = None
    heads: Mapping[str, HeadShift] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Flight:
    """Optimizer steps of an update, and the transitions whose probability changed most."""

    steps: tuple[StepEvidence, ...] = ()
    worst: tuple[WorstRow, ...] = ()


def flight_of(update: Update, facts: Facts, *, rows: int = MAX_ROWS) -> Flight:
    """Return every step of an update and its `rows` largest |log-ratio|, non-finite ones first."""
    return Flight(tuple(_steps(update, facts)), tuple(_worst_rows(update, rows)))


def _steps(update: Update, facts: Facts) -> Iterator[StepEvidence]:
    norms = [row for part in update.gradients for row in _step_norms(part, facts)]
    epochs: Sequence[int] = [epoch for part in update.gradients for epoch in part.epochs]
    divergences: list[float | None] = []
    if update.minibatches is not None:
        counts, epochs = list(update.minibatches.counts), update.minibatches.epochs
        ratios, flags = update.minibatches.log_ratio.double().split(counts), _valid(update.minibatches).split(counts)
        parts = [ratio[flag & torch.isfinite(ratio)] for ratio, flag in zip(ratios, flags, strict=True)]
        # k3 of each minibatch over its valid, finite rows
        divergences = [float((torch.expm1(x.clamp(-20, 20)) - x).mean()) if len(x) else None for x in parts]
    for step, epoch in enumerate(epochs):
        kl = divergences[step] if step < len(divergences) else None
        yield StepEvidence(step, epoch, kl, **(norms[step] if step < len(norms) else {}))


def _step_norms(part: BackwardGradients, facts: Facts) -> list[dict[str, Any]]:
    """Per step the arguments of `StepEvidence` that come from gradients."""
    metrics = gradient_norms(part.norms, part.names, facts.groups, max_norm=part.max_norm)
    total, coefs = _table(metrics.total.norm_preclip), _table(metrics.clip.coef)
    groups, names = _table(metrics.groups.norm_preclip), metrics.groups.group
    return [
        {
            "norm": total[step][0] if total else None,
            "clip_coef": coefs[step][0] if coefs else None,
            "groups": dict(zip(names, groups[step], strict=True)) if groups else {},
        }
        for step in range(len(part.epochs))
    ]


def _table(mean: Mean | None) -> list[list[float | None]]:
    """One number per label for each step; None if it is undefined."""
    if mean is None:
        return []
    totals, counts = torch.as_tensor(mean.total), torch.as_tensor(mean.count)
    defined = torch.where(counts > 0, totals, torch.nan)
    return [[None if n != n else n for n in row] for row in defined.reshape(len(defined), -1).tolist()]


def _valid(minibatches: JoinedMinibatches) -> Tensor:
    valid = minibatches.valid
    return torch.ones_like(minibatches.log_ratio, dtype=torch.bool) if valid is None else valid


def _worst_rows(update: Update, count: int) -> Iterator[WorstRow]:
    minibatches = update.minibatches
    if minibatches is None:
        return
    sizes = minibatches.log_ratio.abs().nan_to_num(nan=torch.inf).masked_fill(~_valid(minibatches), -1.0)
    largest = torch.topk(sizes, min(count, len(sizes)))
    ends = torch.tensor(minibatches.counts).cumsum(0)
    for size, row in zip(largest.values.tolist(), largest.indices.tolist(), strict=True):
        if size >= 0:
            step = int(torch.searchsorted(ends, row, right=True))
            log_ratio, advantage = minibatches.log_ratio[row].item(), minibatches.advantages[row].item()
            worst = WorstRow(log_ratio, advantage, step, minibatches.epochs[step])
            if update.rollout is not None and minibatches.rows is not None:
                worst = _with_place(worst, minibatches, update.rollout, row)
            yield worst


def _with_place(worst: WorstRow, minibatches: JoinedMinibatches, rollout: RolloutEnd, row: int) -> WorstRow:
    """Return the row with its place in the rollout, and the columns collected there."""
    assert minibatches.rows is not None
    place = divmod(int(minibatches.rows[row]), rollout.log_probs.shape[1])
    old = rollout.log_probs[place].item()
    heads: dict[str, HeadShift] = {}
    for head, actions in rollout.actions.items():
        ratios, olds = minibatches.head_log_ratios.get(head), rollout.head_log_probs.get(head)
        old_part = None if olds is None else olds[place].item()
        new_part = None if old_part is None or ratios is None else old_part + ratios[row].item()
        heads[head] = HeadShift(actions[place].tolist(), old_part, new_part)
    time, env = place
    new = old + worst.log_ratio
    return replace(worst, time=time, env=env, old_log_prob=old, new_log_prob=new, heads=heads)


@dataclass(frozen=True, slots=True)
class LayerLine:
    """The gradient of one tensor in the update's first minibatch, before clipping; statistics over its finite entries.

    Attributes:
        name: of the parameter.
        entries: how many there are.
        norm, mean, std, min, max: None if no entry is finite; `std` is the population's.
        zero_frac, small_frac, large_frac: share of entries that are exactly 0, below 1e-6, 10 or more.
        nan, infinite: numbers of such entries.
        norm_mean, norm_max: over all steps of the update.
        decades: number of entries in each power of ten; see `metrics.gradients.DECADE_EDGES`.
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


def layer_table(update: Update) -> tuple[LayerLine, ...]:
    """Return one line per tensor, in the order of the network; empty if no gradient was kept whole."""
    sample = update.sample
    if sample is None or not sample.minibatches:
        return ()
    columns = (zip(part.names, part.norms.unbind(1), strict=True) for part in update.gradients)
    norms = dict(chain.from_iterable(columns))
    parts = sample.minibatches[0].split(list(sample.numels))
    return tuple(_layer_line(name, part, norms.get(name)) for name, part in zip(sample.names, parts, strict=True))


def _layer_line(name: str, gradient: Tensor, norms: Tensor | None) -> LayerLine:
    decades = [int(count) for count in decade_counts(gradient).tolist()]
    entries, others = max(1, gradient.numel()), decades[-1]
    finite = (gradient[torch.isfinite(gradient)] if others else gradient).double()
    finite_norms = norms[torch.isfinite(norms)] if norms is not None else finite[:0]
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
        norm_mean=float(finite_norms.double().mean()) if len(finite_norms) else None,
        norm_max=float(finite_norms.max()) if len(finite_norms) else None,
        decades=tuple(decades),
    )


@dataclass(frozen=True, slots=True)
class NormLine:
    """The norms of one tensor's gradient over an update's steps, before clipping; None if none is finite."""

    name: str
    entries: int
    norm_first: float | None
    norm_mean: float | None
    norm_max: float | None


def norm_table(update: Update) -> tuple[NormLine, ...]:
    """Return one line per tensor with a gradient, in the order of the network; every update has it."""
    lines: list[NormLine] = []
    for part in update.gradients:
        for name, entries, norms in zip(part.names, part.numels, part.norms.unbind(1), strict=True):
            finite = norms[torch.isfinite(norms)].double()
            first = float(norms[0]) if len(norms) and torch.isfinite(norms[0]) else None
            mean, largest = (float(finite.mean()), float(finite.max())) if len(finite) else (None, None)
            lines.append(NormLine(name, entries, first, mean, largest))
    return tuple(lines)


@dataclass(frozen=True, slots=True)
class Offender:
    """A tensor with non-finite entries: numbers of NaN and of infinite entries, and `indices` of the first `MAX_INDICES`."""

    name: str
    shape: tuple[int, ...]
    nan: int
    infinite: int
    indices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StabilityReport:
    """Tensors of an update with non-finite entries, by minibatch, then in forward order.

    `first` is the name of the first, empty if all are finite; `origin` is the program's variable that was not finite before them, if it
    is known. `largest` is the largest finite |entry| of every tensor by name.
    """

    first: str
    offenders: tuple[Offender, ...]
    largest: dict[str, float]
    origin: str = ""


def stability_report(update: Update) -> StabilityReport:
    """Return the tensors of an update with non-finite entries, in the order in which they were computed."""
    found: list[tuple[int, Offender]] = []  # with the number of the minibatch
    largest: dict[str, float] = {}
    counts = () if update.minibatches is None else update.minibatches.counts
    begins = [0, *accumulate(counts)]
    for name, tensor in _tensors(update):
        finite = torch.isfinite(tensor)
        if tensor.numel() and not finite.all():
            nan, bad = int(torch.isnan(tensor).sum()), ~finite
            indices = tuple(tuple(index) for index in bad.nonzero()[:MAX_INDICES].tolist())
            size, row = len(tensor), indices[0][0]
            of_minibatches = update.minibatches is not None and (update.rollout is None or not hasattr(update.rollout, name))
            place = bisect_right(begins, row) if size == begins[-1] else row + 1 if size == len(counts) else len(counts) + 1
            found.append((place if of_minibatches else 0, Offender(name, tuple(tensor.shape), nan, int(bad.sum()) - nan, indices)))
        if len(numbers := tensor[finite]):
            largest[name] = float(numbers.abs().max())
    offenders = tuple(offender for _, offender in sorted(found, key=lambda one: one[0]))
    return StabilityReport(offenders[0].name if offenders else "", offenders, largest, update.origin)


def first_nonfinite(evidence: Mapping[str, Any]) -> str:
    """Return a sentence on the first tensor with non-finite entries, after a space; empty if the evidence has none."""
    stability = evidence.get("stability", {})
    if stability.get("origin"):
        return f" The first non-finite tensor is {stability['origin']}."
    if not stability.get("offenders"):
        return ""
    first = stability["offenders"][0]
    count, size = first["nan"] + first["infinite"], math.prod(first["shape"])
    return f" The first non-finite tensor is {first['name']}, in {count:,} of {size:,} entries."


def _tensors(update: Update) -> Iterator[tuple[str, Tensor]]:
    if update.rollout is not None:
        for name in ("rewards", "values", "log_probs", "next_values", "advantages", "returns"):
            yield name, getattr(update.rollout, name)
    minibatches = update.minibatches
    if minibatches is not None:
        yield from ((f"logits of {head}", logits) for head, logits in minibatches.logits.items())
        yield from ((f"log_std of {head}", log_std) for head, log_std in minibatches.log_std.items())
        yield "log_ratio", minibatches.log_ratio
        yield "normalized advantages", minibatches.advantages
        yield from ((f"loss {name}", loss) for name, loss in minibatches.losses.items())
    for part in update.gradients:
        yield from ((f"gradient norms of {name}", part.norms[:, k]) for k, name in enumerate(part.names))
    if update.sample is not None and update.sample.states:
        weights = update.sample.states[-1].tensors()
        yield from ((f"weights of {name}", w) for name, w in zip(update.sample.state_names, weights, strict=True))


@dataclass(frozen=True, slots=True)
class AlarmedUpdate:
    """An update in which an alarm was raised.

    Attributes:
        record: its metrics.
        updates: its data; rank 0's data if there are several ranks.
        facts: of the run.
        pairs: cause of each module's learning speed relative to its host, by name.
        health_cause: largest deduction from the health of the gradients: `nonfinite`, `vanish`, `explode`, `imbalance` or `zero`.
    """

    record: Record
    updates: tuple[Update, ...]
    facts: Facts
    pairs: Mapping[str, Mapping[str, Any]]
    health_cause: str | None = None


class EvidenceChoice(Protocol):
    """The evidence that an alarm's declaration asks for; see `alarms.rule.AlarmRule`."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Keys and key templates that it reads."""

    @property
    def pieces(self) -> tuple[str, ...]:
        """Names of `COLLECTORS`, and `pairs`."""

    @property
    def histogram_keys(self) -> tuple[str, ...]:
        """Beginnings of the keys of its histograms."""


def evidence_of(alarm: Alarm, alarmed: AlarmedUpdate, choice: EvidenceChoice | None) -> dict[str, Any]:
    """Return the evidence for an alarm that the update of `alarmed` raised, by name, as plain values.

    `values` are the metrics that it reads. Its declaration can add `steps`, `worst` (transitions), `layers`, `stability`,
    `histograms`, `pairs`, the cause of unhealthy gradients (`health_cause`), and the `rank` of the rows if there are several ranks.
    Without a declaration, only the deciding value is returned.
    """
    values = alarmed.record.values
    if choice is None:
        return {"values": {key: value for key, value in values.items() if key == alarm.key}}
    templates = dict.fromkeys(choice.inputs)
    keys = [alarm.key, *(key for key in values if template_of(key, templates) in templates)]
    evidence: dict[str, Any] = {"values": {key: values[key] for key in [key for key in dict.fromkeys(keys) if key in values][:MAX_VALUES]}}
    histograms = alarmed.record.histograms
    related = [key for key in histograms if key.startswith(choice.histogram_keys)][:MAX_HISTOGRAMS]
    if related:
        evidence["histograms"] = {key: asdict(histograms[key]) for key in related}
    for collect in [COLLECTORS[piece] for piece in choice.pieces if piece in COLLECTORS]:
        for update in alarmed.updates[-1:]:
            evidence.update(collect(update, alarmed.facts))
    for extension in chain.from_iterable(update.extensions for update in alarmed.updates):
        if isinstance(extension, SupportsAlarmEvidence):
            evidence |= extension.alarm_evidence(alarm)
    if "pairs" in choice.pieces:
        evidence |= {"pairs": weak_pairs(alarmed.pairs), "health_cause": alarmed.health_cause}
    whose = {"rank": 0} if alarmed.facts.ranks > 1 else {}
    return {name: piece for name, piece in evidence.items() if piece} | whose


def weak_pairs(pairs: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the pairs, by name, whose module does not learn well in its host."""
    return {name: why for name, why in pairs.items() if why["cause"] not in CAUSES_WITHOUT_EVIDENCE}


def _flight(update: Update, facts: Facts) -> dict[str, Any]:
    """All steps, or as many as are allowed, evenly spaced from the first to the last; and the worst transitions."""
    flight = flight_of(update, facts)
    steps = flight.steps
    if len(steps) > MAX_STEPS:
        steps = tuple(steps[round(index * (len(steps) - 1) / (MAX_STEPS - 1))] for index in range(MAX_STEPS))
    return {"steps": [asdict(step) for step in steps], "worst": [asdict(row) for row in flight.worst]}


def _stability(update: Update, _: Facts) -> dict[str, Any]:
    """The first tensors with non-finite entries, and the finite tensors with the largest entries."""
    report = stability_report(update)
    if not report.offenders:
        return {}
    names = sorted(report.largest, key=lambda name: -report.largest[name])[:MAX_LAYERS]
    largest = {name: report.largest[name] for name in names}
    return {"stability": asdict(replace(report, offenders=report.offenders[:MAX_OFFENDERS], largest=largest))}


def _layers(update: Update, _: Facts) -> dict[str, Any]:
    """The whole table of a sampled update, else the norms. If there are many tensors, only the largest and the non-finite norms are
    kept.
    """
    lines: tuple[LayerLine | NormLine, ...] = layer_table(update) or norm_table(update)
    by_size = sorted(lines, key=lambda line: -(float("inf") if line.norm_max is None else line.norm_max))
    names = {line.name for line in by_size[:MAX_LAYERS]}
    return {"layers": [asdict(line) for line in lines if line.name in names]}


COLLECTORS: Final[Mapping[str, Callable[[Update, Facts], dict[str, Any]]]] = {
    "transitions": _flight,
    "layers": _layers,
    "stability": _stability,
}
"""Builders of evidence from an update, by the names under which alarms choose them."""


def captures(update: Update, facts: Facts, pairs: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[Capture]:
    """Yield the evidence that the journal keeps of an update at DEBUG: all of it; `pairs` as in `AlarmedUpdate`."""
    yield Capture("stability", asdict(stability_report(update)))
    yield Capture("flight", asdict(flight_of(update, facts)))
    if pairs:
        yield Capture("pairs", pairs)
    if update.sample is not None:
        yield Capture("gradients", {"layers": [asdict(line) for line in layer_table(update)]})
    for extension in update.extensions:
        yield from extension.evidence(facts)


def update_events(update: Update, facts: Facts) -> Iterator[Capture]:
    """Yield the events of plugins that the journal keeps of every update."""
    for extension in update.extensions:
        if isinstance(extension, SupportsEvents):
            yield from extension.events(facts)
