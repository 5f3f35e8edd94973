"""Parse a command line into a dataclass, or raise one sentence that says what is wrong with it."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from typing import Any, Final

import tyro

from esper_telemetry.cli.mistakes import WrongUse
from esper_telemetry.core.messages import question

PROGRAM: Final = "esper-telemetry"
UNKNOWN: Final = "Unrecognized options: "
OPTION: Final = re.compile(r"--[\w-]+")


def parse_arguments(arguments: Sequence[str], form: Any, *, program: str = PROGRAM, **settings: Any) -> Any:
    """Return the arguments as an instance of that form; raises WrongUse for wrong ones, and SystemExit after showing help.

    Args:
        arguments: the words after the program.
        form: a dataclass, or a union of them.
        program: for help and messages.
        settings: passed on to `tyro.cli`.
    """
    complaint, shown = io.StringIO(), io.StringIO()
    no_color = bool(os.environ.get("NO_COLOR"))  # tyro ignores it and writes escape sequences to every terminal
    try:
        with redirect_stderr(complaint), redirect_stdout(shown) if no_color else nullcontext():
            return tyro.cli(form, args=list(arguments), prog=program, config=(tyro.conf.OmitArgPrefixes,), **settings)
    except SystemExit as stop:
        sys.stdout.write(shown.getvalue())
        if not stop.code:
            raise
        raise WrongUse(with_help(sentence(complaint.getvalue()), program)) from None
    except ValueError as error:
        raise WrongUse(str(error)) from error


def sentence(box: str) -> str:
    """Return the message that the parser drew in a box as one sentence, with the options that it suggests."""
    lines = [line.strip("│ \n") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    rules = [place for place, line in enumerate(lines) if set(line) == {"─"}] or [len(lines)]
    message = " ".join(" ".join(lines[: rules[0]]).split()).partition(" Got errors:")[0].removesuffix(".")
    if not message.startswith(UNKNOWN):
        return message
    near = [option[0] for line in lines[rules[0] :] if (option := OPTION.match(line)) and option[0] != "--help"]
    return message + question(list(dict.fromkeys(near)))


def with_help(message: str, program: str) -> str:
    """Return the message with the command that shows the help."""
    return f"{message}{'' if message.endswith('?') else ';'} see {program} --help"
