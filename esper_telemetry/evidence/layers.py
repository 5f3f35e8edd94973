"""The gradient of every parameter tensor, one line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.metrics.gradients import DECADE_EDGES, decade_counts
from esper_telemetry.summary import Gradients, Snapshot

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


def _norms(gradients: tuple[Gradients, ...]) -> Mapping[str, Tensor]:
    """Norms at all steps, by parameter."""
    return dict(item for part in gradients for item in _columns(part))


def _columns(part: Gradients) -> Iterator[tuple[str, Tensor]]:
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
