"""Memory that two processes share, taken and given back in order.

What goes through a pipe is copied into pages that the kernel finds for every message anew; here the same pages serve again and again, while
they are still in the processor's caches.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Iterable
from typing import Final

ALIGNMENT: Final = 64
"""Bytes at whose multiples buffers begin: a cache line, more than any number needs."""


class Ring:
    """A block of shared memory in which one process writes and another reads.

    The writer knows alone what is taken: the reader is told where to look, and says when it has looked.

    Args:
        descriptor: of the shared file, from `shared_file`.
        size: bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        populated = getattr(mmap, "MAP_POPULATE", 0)  # or the first messages pay for the pages
        self._memory = memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | populated))
        self._taken: deque[tuple[int, int]] = deque()

    def put(self, buffers: Iterable[memoryview], size: int) -> int | None:
        """Copies buffers one behind the other, each on an aligned place.

        Args:
            buffers: of bytes.
            size: bytes that they need, as `span` says.

        Returns:
            where they begin; None where there is no room now.
        """
        start = self._room(size)
        if start is None:
            return None
        self._taken.append((start, start + size))
        place = start
        for buffer in buffers:
            self._memory[place : place + len(buffer)] = buffer
            place += aligned(len(buffer))
        return start

    def release(self) -> None:
        """Gives back what was put first."""
        self._taken.popleft()

    def look(self, start: int, size: int) -> memoryview:
        """What stands there, for as long as it is not given back."""
        return self._memory[start : start + size]

    def _room(self, size: int) -> int | None:
        """Where so many bytes fit: at the very beginning where nothing is taken, because those pages are warm."""
        if not self._taken:
            return 0 if size <= len(self._memory) else None
        first, last = self._taken[0][0], self._taken[-1][1]
        if last <= first:
            return last if size <= first - last else None
        if size <= len(self._memory) - last:
            return last
        return 0 if size <= first else None


def aligned(size: int) -> int:
    """Bytes from one buffer of that size to the next."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def span(sizes: Iterable[int]) -> int:
    """Bytes that buffers of these sizes take together."""
    return sum(map(aligned, sizes))


def shared_file(size: int) -> int:
    """A file of that size in memory, without a name; its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("esper-telemetry")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, size)
    return descriptor
