"""Parse a command line into a dataclass; a mistake raises `WrongUse` with one sentence."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final

from esper_telemetry.core.messages import printable, question
from esper_telemetry.core.redaction import masked
from esper_telemetry.core.requirements import require_path

PROGRAM: Final = "esper-telemetry"
UNKNOWN: Final = "Unrecognized options: "
OPTION: Final = re.compile(r"--[\w-]+")
PAGE_SUFFIXES: Final = (".html", ".htm", ".md", ".txt")


class WrongUse(Exception):  # noqa: N818  # a mistake of the user, not an error of the program
    """A mistake in the arguments, described in one sentence without secrets."""

    def __init__(self, sentence: str) -> None:
        super().__init__(masked(sentence))

    def __str__(self) -> str:
        """Return the sentence, `printable`, because it may quote untrusted names and messages."""
        return printable(super().__str__())


def is_first_rank() -> bool:
    """Return whether this process is the only one, or rank 0 of the processes that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"


def agrees(text: str) -> bool:
    """Ask a question and return whether the answer is yes; False without a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(f"esper-telemetry: {printable(text)} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def output_path(option: str, *, sources: Iterable[str] = (), default: str = "") -> Path:
    """Return the path of a page that a command is to write; raises WrongUse if it cannot or must not be written.

    Args:
        option: path as the user has typed it.
        sources: paths that the page is made from, or other words.
        default: name of the page that the command itself writes into a run directory.
    """
    from esper_telemetry.journal.file import holds_run

    with wrong_use():
        path = require_path("the output", option)
    reason = ""
    if path.is_dir():
        reason = "it is a directory"
    elif not path.absolute().parent.is_dir():
        reason = f"the directory {path.parent} does not exist"
    elif not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        reason = "permission denied"
    elif any(Path(source).is_file() and path.exists() and path.samefile(source) for source in sources):
        reason = "it is made from that file"
    elif path.is_symlink() and holds_run(path.parent):
        reason = "it is a symbolic link in a run directory"
    elif path.is_file() and path.suffix not in PAGE_SUFFIXES and path.name != default and holds_run(path.parent):
        reason = "it is a file of the run"
    if reason:
        raise WrongUse(f"the page cannot be written to {path}: {reason}")
    return path


def echo(text: str) -> None:
    """Print a text that may contain untrusted names and messages."""
    print(printable(text))


@contextmanager
def wrong_use() -> Iterator[None]:
    """Turn exceptions of constructors that refuse their arguments into `WrongUse`."""
    try:
        yield
    except (ValueError, TypeError, FileExistsError, FileNotFoundError, ImportError) as error:
        raise WrongUse(str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise WrongUse(f"{where}{error.strerror or error}") from error


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence the warnings of sinks and journals, which the command reports in its output."""
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
        form: a dataclass, or a union of dataclasses.
        program: name of the program in help and messages.
        settings: passed to `tyro.cli`.
    """
    import tyro  # imported here, because `run` also reports wrong use and must not import modules that the script may set up

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
    """Return the message that the parser printed in a box as one sentence, with the options that it suggests."""
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
