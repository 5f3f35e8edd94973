"""Texts for users: suggestions for misspelt names, numbers in sentences, and untrusted texts without control sequences.

Readers of files clean each text when they read it. Commands, warnings and consoles clean their output too, because it contains names of
files and messages of clients.
"""

from __future__ import annotations

import logging
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Final


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean A or B?" from `names`, nearest names first, or an empty text if none is near."""
    return question(get_close_matches(name, list(names)))


def question(names: Sequence[str]) -> str:
    """Return "; did you mean A, B or C?", or an empty text without names."""
    if not names:
        return ""
    *others, last = names
    return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def without_numbers(text: str) -> str:
    """Return a sentence without its numbers, to recognise one that is said again."""
    return re.sub(r"[+-]?\d[\d.,]*(?:e[+-]?\d+)?", "", text)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def shown(value: object) -> str:
    """Return a short text of a value for a message, even if its `repr` raises."""
    if getattr(value, "is_nested", False):
        return "a nested tensor"
    if getattr(value, "ndim", 0):
        libraries = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
        if libraries & {"torch", "numpy"}:
            return f"a {'tensor' if 'torch' in libraries else 'NumPy array'} of shape {list(value.shape)}"  # type: ignore[attr-defined]
    try:
        return _short.repr(value)
    except Exception:  # an integer with more digits than Python prints, or a user's object
        return f"an instance of {type(value).__name__}"


MAX_WORD_CHARACTERS = 200
"""Characters of one word in a message; longer words are shortened in the middle."""

MAX_LINE_CHARACTERS = 1000

LONG_WORD = re.compile(rf"\S{{{MAX_WORD_CHARACTERS},}}")


def one_line(message: str) -> str:
    """Return a message on one line, with long words and texts shortened."""
    text = LONG_WORD.sub(lambda match: f"{match[0][:60]}...{match[0][-20:]}", " ".join(message.split()))
    return text if len(text) <= MAX_LINE_CHARACTERS else f"{text[:300]} ... {text[-100:]}"


MIN_SHARE = 1e-5
"""Smallest share that is shown in percent; smaller ones are shown as 0."""


def capitalized(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def number(x: float) -> str:
    """Return three digits of a number, without an exponent between 0.0001 and 100,000."""
    size = abs(x)
    if size == 0:
        return "0"
    if size >= 1e5 or size < 1e-4:
        return f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    if size >= 100:
        return f"{x:.0f}"
    return f"{x:.2g}" if size < 1 else f"{x:.3g}"


def percent(x: float) -> str:
    """Return a share in percent."""
    x = x if abs(x) >= MIN_SHARE else 0.0
    size = abs(100 * x)
    return f"{100 * x:.0f} %" if size >= 10 or size == 0 else f"{number(100 * x)} %"


def span(low: float, high: float, text: Callable[[float], str] = number) -> str:
    """Return a range in words; one number if both ends read alike. `text` formats a number."""
    first, last = text(low), text(high)
    return first if first == last else f"{first}-{last}" if low >= 0 and text is number else f"{first} to {last}"


def times(x: float) -> str:
    """Return a ratio in words: 3.2x."""
    return f"{number(x)}x"


def end_text(update: int | None) -> str:
    """Return the end of an alarm in words; an alarm without an end is still active."""
    return "still active" if update is None else f"ended at update {update:,}"


UNPRINTABLE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f\ud800-\udfff]"
)
"""Control characters except newline and tab, surrogates, which files cannot hold, and invisible characters.

Invisible characters reverse the writing direction, or hide a text from people but not from programs (tags from U+E0000 on).
"""
SEQUENCE: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, cursor, screen
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x00-\x08\x0b-\x1f\x7f-\x9f]*(?:\x07|\x1b\\|\x9c)"  # titles, links, clipboard
    r"|\x1b[ -/]*[0-Z\\^-~]"
)
HALF: Final = re.compile("[\ud800-\udfff]")
REPLACEMENT: Final = "\ufffd"


def printable(text: str) -> str:
    """Return the text without escape sequences and control characters, but with newlines and tabs."""
    if not UNPRINTABLE.search(text):
        return text
    return UNPRINTABLE.sub("", HALF.sub(REPLACEMENT, SEQUENCE.sub("", text)))


def printable_values(value: Any) -> Any:
    """Return decoded JSON with every text `printable`, including names."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(name): printable_values(item) for name, item in value.items()}
    if isinstance(value, list):
        return [printable_values(item) for item in value]
    return value


def clean_log_record(record: logging.LogRecord) -> bool:
    """Make the texts of a log record `printable`; a filter for loggers, which lets every record pass."""
    if isinstance(record.args, tuple):
        record.args = tuple(printable(str(item)) if isinstance(item, str | os.PathLike | BaseException) else item for item in record.args)
    if isinstance(record.msg, str):
        record.msg = printable(record.msg)
    return True


for _name in ("esper_telemetry", "esper_telemetry.sinks"):
    logging.getLogger(_name).addFilter(clean_log_record)  # a logger's filter does not see records of its child loggers
