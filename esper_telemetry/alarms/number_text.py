"""Numbers in sentences of alarms."""

from __future__ import annotations

MIN_SHARE = 1e-5
"""Smallest share that is shown in percent; less is 0."""


def number(x: float) -> str:
    """Three digits of a number, without an exponent between 0.0001 and 100,000."""
    size = abs(x)
    if size == 0:
        return "0"
    if size >= 1e5 or size < 1e-4:
        return f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    if size >= 100:
        return f"{x:.0f}"
    return f"{x:.2g}" if size < 1 else f"{x:.3g}"


def percent(x: float) -> str:
    """A share in percent."""
    x = x if abs(x) >= MIN_SHARE else 0.0
    size = abs(100 * x)
    return f"{100 * x:.0f} %" if size >= 10 or size == 0 else f"{number(100 * x)} %"


def span(low: float, high: float) -> str:
    """A range in words; one number where both ends read alike."""
    first, last = number(low), number(high)
    return first if first == last else f"{first} to {last}" if low < 0 else f"{first}-{last}"


def times(x: float) -> str:
    """A ratio in words: 3.2x."""
    return f"{number(x)}x"
