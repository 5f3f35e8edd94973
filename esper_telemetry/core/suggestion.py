"""The known names that a misspelt one may stand for, for the end of an error message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean A or B?", with the nearest names first, or nothing where no name is near."""
    return question(get_close_matches(name, list(known)))


def question(names: Sequence[str]) -> str:
    """Return "; did you mean A, B or C?", or nothing where there are no names."""
    if not names:
        return ""
    *others, last = names
    return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
