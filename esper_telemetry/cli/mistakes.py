"""Mistakes of the user: the exceptions that wrong arguments cause, as one sentence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


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
