"""Histograms of a record in the forms that backends take."""

from __future__ import annotations

from collections.abc import Mapping

from esper_telemetry.core.record import Histogram, Record


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


def trimmed(histogram: Histogram) -> Histogram:
    """The same without the empty bins at both ends, which would fill most of a chart; as it is where all are empty."""
    filled = [index for index, count in enumerate(histogram.counts) if count > 0]
    if not filled:
        return histogram
    first, last = filled[0], filled[-1] + 1
    return Histogram(histogram.edges[first : last + 1], histogram.counts[first:last])


def by_tag(record: Record) -> Mapping[str, Histogram]:
    """The record's histograms, trimmed, under names that no scalar of the record has."""
    found = {key: trimmed(histogram) for key, histogram in record.histograms.items()}
    return {f"{key}_hist" if key in record.values else key: histogram for key, histogram in found.items()}
