"""Untrusted files: opened without following links or waiting for a FIFO, read up to a bound, replaced atomically."""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final

from esper_telemetry.core.messages import printable_values

MAX_JSON_FILE_BYTES: Final = 16 << 20
"""Maximum size of a file whose JSON is read at once, such as `config.json`; its objects may take fifty times as much memory."""
NOT_REGULAR_ERRORS: Final = (errno.ELOOP, errno.EINVAL, errno.ENXIO)
"""Errors of `open_regular` for a link, another kind of file, and a FIFO without a reader."""
MAX_NESTING: Final = 64
"""Levels of lists and objects in JSON; this package writes about 20."""

_NO_LINKS, _NO_WAIT, _BINARY = (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
"""POSIX has the first two, Windows the last."""


def open_regular(path: str | os.PathLike[str], flags: int, *, follow_links: bool = False) -> int:
    """Return a descriptor of a regular file; a new file follows the umask.

    Raises OSError for a link, unless `follow_links`, and for a directory, a FIFO, a socket or a device.
    """
    try:
        descriptor = os.open(path, flags | _NO_WAIT | _BINARY | (0 if follow_links else _NO_LINKS), 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", str(path)) from None
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if _NO_WAIT and hasattr(os, "set_blocking"):  # POSIX has both
        os.set_blocking(descriptor, True)
    return descriptor


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """Return a descriptor of a file that this package keeps in a run directory, created if needed.

    A link, a FIFO or a device with that name is removed first. Raises OSError.
    """
    flags |= os.O_CREAT
    try:
        return open_regular(path, flags)
    except OSError as error:
        if error.errno not in NOT_REGULAR_ERRORS:
            raise
    Path(path).unlink()
    return open_regular(path, flags)


def read_file(path: str | os.PathLike[str], max_bytes: int = -1) -> bytes:
    """Return the content of a regular file; raises OSError for another kind of file, and for one above `max_bytes` if that is not -1."""
    with os.fdopen(open_regular(path, os.O_RDONLY, follow_links=True), "rb") as file:
        content = file.read(max_bytes + 1 if max_bytes >= 0 else -1)
    if 0 <= max_bytes < len(content):
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes >> 20} MiB", str(path))
    return content


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the JSON of a file, its texts `printable`; raises OSError as `read_file`, and ValueError for other content."""
    return printable_values(parse_json(read_file(path, MAX_JSON_FILE_BYTES)))


def parse_json(text: str | bytes) -> Any:
    """Return decoded JSON; raises ValueError for anything else, and for JSON that is nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check_nesting(value)
    return value


TOO_DEEP: Final = f"JSON nested more than {MAX_NESTING} levels deep"


def check_nesting(value: Any) -> None:
    """Raise ValueError for decoded JSON with more than `MAX_NESTING` levels, which recursive functions cannot process."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_NESTING + 1:
            raise ValueError(TOO_DEEP)
        groups = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for group in groups for item in group]


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield the path of a new, empty file that atomically becomes `path`, or is removed if an exception is raised.

    A link at `path` is replaced, and not the file that it points to. Raises OSError if the file cannot be written.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    os.close(open_regular(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    try:
        yield draft
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink()


def replace_file(path: Path, content: str) -> None:
    """Replace the content of a file atomically; raises OSError if it cannot be written."""
    with draft_of(path) as draft:
        draft.write_text(content, encoding="utf-8", errors="backslashreplace")


def write_output(path: Path, content: str) -> None:
    """Write to the place that a user has named: replace a file, also through a link, or write into a FIFO or a device.

    Raises OSError.
    """
    if path.exists() and not path.is_file():
        try:
            path.write_text(content, encoding="utf-8", errors="backslashreplace")
        except OSError as error:  # from a device, whose name it lacks
            raise OSError(error.errno, error.strerror, str(path)) from None
    else:
        replace_file(path.resolve(), content)
