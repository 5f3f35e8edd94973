"""Histograms with fixed edges: they add up over minibatches, calls and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from esper_telemetry.metrics.masking import Sample, constant
from esper_telemetry.reduction import Counts

PER_DECADE = 5
"""Bins per power of ten: a bin's ends differ by a factor of 1.6."""


def symmetric_edges(lowest: int, highest: int) -> tuple[float, ...]:
    """Edges from -10^highest to 10^highest, five per decade down to ±10^lowest, between which one bin holds zero."""
    steps = range(lowest * PER_DECADE, highest * PER_DECADE + 1)
    positive = [float(f"{10 ** (step / PER_DECADE):.3g}") for step in steps]
    return (*(-edge for edge in reversed(positive)), *positive)


LOG_RATIOS = symmetric_edges(-4, 1)
"""For log-ratios: from a change of 0.01 % to a factor of e^10."""

REWARDS = symmetric_edges(-3, 4)
"""For advantages, returns and errors in units of reward, whatever their scale."""

SHARES = tuple(index / 20 for index in range(21))
"""For what lies between 0 and 1."""


def bin_counts(s: Sample, edges: tuple[float, ...]) -> Tensor:
    """How many of the values that count lie between each two edges, [.., bins]; the outermost bins hold what lies outside."""
    places = torch.bucketize(s.values, constant(edges[1:-1], s.values.device))
    empty = s.values.new_zeros(*s.values.shape[:-1], len(edges) - 1)
    return empty.scatter_add_(-1, places, s.weight)


def histogram(s: Sample, edges: tuple[float, ...]) -> Counts:
    """The values that count between fixed edges."""
    return Counts(bin_counts(s, edges), edges)
