"""Removes control sequences from untrusted texts: escape sequences, control characters, invisible characters.

Readers of files clean each text when they read it. Commands, warnings and consoles clean their output too, because it contains names of
files and messages of clients.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any, Final

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
        record.args = tuple(
            printable(str(item)) if isinstance(item, str | os.PathLike | BaseException) else item
            for item in record.args
        )
    if isinstance(record.msg, str):
        record.msg = printable(record.msg)
    return True


for _name in ("esper_telemetry", "esper_telemetry.sinks"):
    logging.getLogger(_name).addFilter(clean_log_record)  # a logger's filter does not see records of its child loggers
