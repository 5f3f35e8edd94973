"""Memory that two processes share, taken and given back in order.

What goes through a pipe is copied into pages that the kernel finds for every message anew, and no more at a time than the pipe holds; here
the same pages serve again and again, while they are still in the processor's caches, and what is larger takes more of them.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from typing import Final

ALIGNMENT: Final = 64
"""Bytes at whose multiples buffers begin: a cache line, more than any number needs."""

WARM_BYTES = 4 << 20
"""Of a ring that have their pages from the beginning, or the first messages would pay for them; the rest gets its pages as it is used."""


class Ring:
    """A block of shared memory in which one process writes and another reads.

    The writer knows alone what is taken: the reader is told where to look, and says when it has looked. Behind the block stands how many
    messages the reader has answered, and how many of these answers come through a pipe, so that the writer need not ask the system.

    Args:
        descriptor: of the shared file, from `shared_file`.
        size: bytes; memory is used up to where messages have stood so far.

    Attributes:
        taken: bytes that are taken now.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        shared = memoryview(mmap.mmap(descriptor, size + ALIGNMENT))
        self._memory = shared[:size]
        bytes(self._memory[: WARM_BYTES : mmap.PAGESIZE])  # who reads a page gets it
        self._answered = shared[size : size + 16].cast("Q")
        self._taken: deque[tuple[int, int]] = deque()
        self.taken = 0

    @property
    def answered(self) -> int:
        """Messages that the reader has answered."""
        return self._answered[0]

    @property
    def told(self) -> int:
        """Answers that come through a pipe, of those and of the next."""
        return self._answered[1]

    def answer(self, *, told: bool = False) -> None:
        """Says that one more is answered: for the reader, behind its answer if it has `told` one."""
        self._answered[1] += told
        self._answered[0] += 1

    def take(self, size: int) -> int | None:
        """Takes so many bytes, from an aligned place on.

        Returns:
            where they begin; None where there is no room now.
        """
        size = roomy(size)
        start = self._room(size)
        if start is not None:
            self._taken.append((start, start + size))
            self.taken += size
        return start

    def release(self) -> None:
        """Gives back what was taken first."""
        start, end = self._taken.popleft()
        self.taken -= end - start

    def look(self, start: int, size: int) -> memoryview:
        """What stands there, for as long as it is not given back; to write into for whoever has taken it."""
        return self._memory[start : start + size]

    def _room(self, size: int) -> int | None:
        """Where so many bytes fit: at the very beginning as soon as they fit there, because those pages are warm."""
        if not self._taken:
            return 0 if size <= len(self._memory) else None
        first, last = self._taken[0][0], self._taken[-1][1]
        if last <= first:
            return last if size <= first - last else None
        if size <= first:
            return 0
        return last if size <= len(self._memory) - last else None


def aligned(size: int) -> int:
    """Bytes from one buffer of that size to the next."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def roomy(size: int) -> int:
    """The same, rounded up by an eighth at most: what differs by a few rows takes the same places again."""
    return aligned(-(-size >> (step := max(0, size.bit_length() - 4))) << step)


def shared_file(size: int) -> int:
    """Return the descriptor of a file in memory for a ring of that size, a multiple of `ALIGNMENT`.

    A file on a disk would not do: where the disk is full, writing into its mapping kills the process.
    """
    descriptor = os.memfd_create("esper-telemetry")
    try:
        os.truncate(descriptor, size + ALIGNMENT)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
