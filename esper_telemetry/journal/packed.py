"""A compressed journal, read from any position without unpacking it into memory or onto the disk; packed, and unpacked."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import zlib
from pathlib import Path
from typing import IO, Final

from esper_telemetry.core.files import draft_of, open_regular

PACKED_SUFFIX: Final = ".gz"
CHUNK_BYTES: Final = 1 << 20
MAX_RATIO: Final = 200
"""Maximum size of a journal relative to its packed file: journals pack to about a fifth, equal records to a hundredth, a bomb to a
thousandth."""
MIN_LIMIT_BYTES: Final = 64 << 20
"""Size up to which the ratio is not limited."""


class PackedFile:
    """The bytes of a packed file. Everything after damage, or beyond the maximum ratio, is left out.

    Attributes:
        fault: why the rest is left out; empty if reading has not come to such a place.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_regular(path, os.O_RDONLY, follow_links=True), "rb")
        self._limit = max(MIN_LIMIT_BYTES, MAX_RATIO * os.fstat(self._file.fileno()).st_size)
        self._rewind()

    def _rewind(self) -> None:
        self._file.seek(0)
        self._unpacked = gzip.GzipFile(fileobj=self._file, mode="rb")
        self.fault = ""
        self._window, self._begin, self._count = b"", 0, 0

    @property
    def size(self) -> int:
        """Number of bytes, unpacked; reads all of them."""
        while self._next():
            pass
        self._window, self._begin = b"", self._count
        return self._count

    def read_at(self, offset: int, size: int) -> bytes:
        """Return this many bytes from a position on, fewer at the end. Going back beyond the last bytes read starts at the beginning."""
        if offset < self._begin:
            self._rewind()
        rest = self._window[offset - self._begin :]
        parts, missing = [rest], size - len(rest)
        while missing > 0 and (chunk := self._next()):
            part = chunk[max(0, offset - (self._count - len(chunk))) :]
            parts.append(part)
            missing -= len(part)
        self._window, self._begin = b"".join(parts), offset
        return self._window[:size]

    def _next(self) -> bytes:
        """Return the next chunk of unpacked bytes; empty at the end."""
        if self.fault:
            return b""
        chunk = b""
        try:
            chunk = self._unpacked.read1(CHUNK_BYTES)
        except EOFError:
            self.fault = "the compressed file ends here"
        except (gzip.BadGzipFile, zlib.error) as error:
            self.fault = f"the compressed file is damaged here: {error}"
        if self._count + len(chunk) > self._limit:
            self.fault = f"the compressed file unpacks to more than {MAX_RATIO} times its size"
            chunk = chunk[: self._limit - self._count]
        self._count += len(chunk)
        return chunk

    def close(self) -> None:
        """Release the file; harmless when repeated."""
        self._file.close()


def unpack(packed: Path, path: Path) -> None:
    """Unpack a journal and remove the packed file; raises OSError, and leaves it, if a part of it cannot be unpacked."""
    source, position = PackedFile(packed), 0
    try:
        with draft_of(path) as draft, draft.open("wb") as target:
            while chunk := source.read_at(position, CHUNK_BYTES):
                position += target.write(chunk)
            if source.fault:
                raise OSError(errno.EIO, source.fault, str(packed))
    finally:
        source.close()
    packed.unlink()


def pack(path: Path) -> Path:
    """Compress a finished journal, and remove it once the result has been read back and is equal.

    Raises OSError, and leaves the journal unchanged, if the disk cannot hold both.
    """
    packed = path.with_name(path.name + PACKED_SUFFIX)
    with draft_of(packed) as draft:
        with path.open("rb") as source, draft.open("wb") as target:
            # level 9 takes twice the time of level 6 to save 4 % more
            with gzip.GzipFile("", "wb", 6, fileobj=target, mtime=0) as zipped:
                shutil.copyfileobj(source, zipped, CHUNK_BYTES)
            target.flush()
            os.fsync(target.fileno())
        with path.open("rb") as source, gzip.open(draft, "rb") as zipped:
            if _checksum(source) != _checksum(zipped):
                raise OSError(f"{path} was changed while it was packed")
    path.unlink()
    return packed


def _checksum(file: IO[bytes] | gzip.GzipFile) -> tuple[int, int]:
    size, checksum = 0, 0
    while chunk := file.read(CHUNK_BYTES):
        size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return size, checksum
