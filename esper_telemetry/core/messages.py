"""Texts for users: suggestions for misspelt names, and numbers in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean A or B?" from `names`, with the nearest names first, or nothing where no name is near."""
    return question(get_close_matches(name, list(names)))


def question(names: Sequence[str]) -> str:
    """Return "; did you mean A, B or C?", or nothing where there are no names."""
    if not names:
        return ""
    *others, last = names
    return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


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
