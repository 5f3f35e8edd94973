"""Histograms of a record in the forms that backends take."""

from __future__ import annotations

from collections.abc import Mapping

from esper_telemetry.record import Histogram, Record


def with_at_most(bins: int, histogram: Histogram) -> Histogram:
    """The same counts in at most that many bins, neighbours joined."""
    width = -(-len(histogram.counts) // bins)
    if width <= 1:
        return histogram
    starts = range(0, len(histogram.counts), width)
    counts = tuple(sum(histogram.counts[start : start + width]) for start in starts)
    return Histogram((*(histogram.edges[start] for start in starts), histogram.edges[-1]), counts)


def midpoints(histogram: Histogram) -> list[float]:
    """The middle of each bin."""
    return [(low + high) / 2 for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)]


def by_tag(record: Record) -> Mapping[str, Histogram]:
    """The record's histograms under names that no scalar of the record has."""
    return {f"{key}_hist" if key in record.values else key: value for key, value in record.histograms.items()}
