"""From the words of a command line to a form filled in, or to the one sentence that says what is wrong with them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import tyro

from esper_telemetry.commands.mistakes import WrongUse


def parse_arguments(arguments: Sequence[str], form: Any, *, program: str = "esper-telemetry", **settings: Any) -> Any:
    """Arguments as that form; raises WrongUse for those that make none, and SystemExit after showing help."""
    complaint = io.StringIO()
    settings = {"prog": program, "config": (tyro.conf.OmitArgPrefixes,), **settings}
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(form, args=list(arguments), **settings)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise WrongUse(sentence(complaint.getvalue(), program)) from None
    except ValueError as error:
        raise WrongUse(str(error)) from error


def sentence(box: str, program: str) -> str:
    """What the parser drew in a box, as one sentence."""
    lines = [line.strip("│ \n") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    message: list[str] = []
    for line in lines:
        if set(line) == {"─"}:
            break
        message.append(line)
    return f"{' '.join(' '.join(message).split())}; see {program.removesuffix(' train')} --help"
