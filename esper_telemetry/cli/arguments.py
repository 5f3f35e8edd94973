"""Parse a command line into a dataclass; a mistake in it is one sentence, `WrongUse`."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final

from esper_telemetry.core.messages import question
from esper_telemetry.core.requirements import require_path

PROGRAM: Final = "esper-telemetry"
UNKNOWN: Final = "Unrecognized options: "
OPTION: Final = re.compile(r"--[\w-]+")


class WrongUse(Exception):  # noqa: N818  # it is the user's mistake, not an error of the program
    """A mistake in the arguments, in one sentence."""


@contextmanager
def wrong_use() -> Iterator[None]:
    """Turn the exceptions with which constructors refuse their arguments into `WrongUse`."""
    try:
        yield
    except (ValueError, TypeError, FileExistsError, FileNotFoundError, ImportError) as error:
        raise WrongUse(str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise WrongUse(f"{where}{error.strerror or error}") from error


def output_path(option: str) -> Path:
    """Return the path of a file that a command is to write; raises WrongUse for one that cannot be written."""
    with wrong_use():
        path = require_path("the output", option)
    if path.is_dir() or not path.absolute().parent.is_dir():
        reason = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise WrongUse(f"{option} cannot be written: {reason}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise WrongUse(f"{option} cannot be written: permission denied")
    return path


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence the warnings of sinks and journals, which are a part of the command's output."""
    logger = logging.getLogger("esper_telemetry")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def parse_arguments(arguments: Sequence[str], form: Any, *, program: str = PROGRAM, **settings: Any) -> Any:
    """Return the arguments as an instance of that form; raises WrongUse for wrong ones, and SystemExit after showing help.

    Args:
        arguments: the words after the program.
        form: a dataclass, or a union of them.
        program: for help and messages.
        settings: passed on to `tyro.cli`.
    """
    import tyro  # here, because `run` refuses wrong use too and imports nothing that the script may want to set up

    complaint, output = io.StringIO(), io.StringIO()
    no_color = bool(os.environ.get("NO_COLOR"))  # tyro ignores it and writes escape sequences to every terminal
    try:
        with redirect_stderr(complaint), redirect_stdout(output) if no_color else nullcontext():
            return tyro.cli(form, args=list(arguments), prog=program, config=(tyro.conf.OmitArgPrefixes,), **settings)
    except SystemExit as stop:
        sys.stdout.write(output.getvalue())
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
