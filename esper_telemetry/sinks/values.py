"""Histograms and settings in the forms that backends accept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from esper_telemetry.core.record import Histogram, Record
from esper_telemetry.journal.lines import plain


def with_at_most(bins: int, histogram: Histogram) -> Histogram:
    """Return the same counts in at most that many bins, neighbours joined."""
    width = -(-len(histogram.counts) // bins)
    if width <= 1:
        return histogram
    starts = range(0, len(histogram.counts), width)
    counts = tuple(sum(histogram.counts[start : start + width]) for start in starts)
    return Histogram((*(histogram.edges[start] for start in starts), histogram.edges[-1]), counts)


def midpoints(histogram: Histogram) -> list[float]:
    """Return the middle of each bin."""
    return [(low + high) / 2 for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)]


def trimmed(histogram: Histogram) -> Histogram:
    """Return the histogram without the empty bins at both ends, which would fill most of a chart; unchanged if all are empty."""
    filled = [index for index, count in enumerate(histogram.counts) if count > 0]
    if not filled:
        return histogram
    first, last = filled[0], filled[-1] + 1
    return Histogram(histogram.edges[first : last + 1], histogram.counts[first:last])


def by_tag(record: Record) -> Mapping[str, Histogram]:
    """Return the record's histograms, trimmed, under names that no scalar of the record has."""
    return {
        f"{key}_hist" if key in record.values else key: trimmed(histogram)
        for key, histogram in record.histograms.items()
    }


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of nested settings by dotted path; lists become text."""
    return dict(_leaves("", plain(config)))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, item)
    elif path:
        yield path, str(value) if isinstance(value, list | dict) else value
