"""A journal that is packed: `journal.jsonl.gz` in place of `journal.jsonl`, a fifth of its size, and read just as it is."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

PACKED_SUFFIX: Final = ".gz"
CHUNK_BYTES: Final = 1 << 20


def opened(path: Path) -> IO[bytes]:
    """A file to read at any position; a packed one is unpacked into a temporary file that has no name."""
    if path.suffix != PACKED_SUFFIX:
        return path.open("rb", buffering=0)
    plain = tempfile.TemporaryFile("w+b", buffering=0)  # noqa: SIM115  # the reader closes it
    with gzip.open(path, "rb") as packed:
        shutil.copyfileobj(packed, plain, CHUNK_BYTES)
    return plain


def pack(path: Path) -> Path:
    """Packs a journal that nobody writes any more, and removes it once what was packed is read back the same.

    Raises OSError where there is no space for both, and leaves the journal as it is then.
    """
    packed = path.with_name(path.name + PACKED_SUFFIX)
    draft = packed.with_name(f"{packed.name}.{os.getpid()}")
    try:
        with path.open("rb") as source, draft.open("wb") as target:
            with gzip.GzipFile("", "wb", fileobj=target, mtime=0) as zipped:
                shutil.copyfileobj(source, zipped, CHUNK_BYTES)
            target.flush()
            os.fsync(target.fileno())
        with path.open("rb") as source, gzip.open(draft, "rb") as zipped:
            if _checksum(source) != _checksum(zipped):
                raise OSError(f"{path} was changed while it was packed")
        draft.replace(packed)
    finally:
        with suppress(OSError):
            draft.unlink()
    path.unlink()
    return packed


def unpack(packed: Path) -> Path:
    """The journal as it was, in place of the packed one."""
    path = packed.with_suffix("")
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with gzip.open(packed, "rb") as source, draft.open("wb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink()
    packed.unlink()
    return path


def _checksum(file: IO[bytes] | gzip.GzipFile) -> tuple[int, int]:
    size, checksum = 0, 0
    while chunk := file.read(CHUNK_BYTES):
        size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return size, checksum
