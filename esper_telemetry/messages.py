"""Messages from the trainer to the process beside it, through a pipe.

A message is a pickle and the bytes of its tensors. The pickle goes through the pipe; the tensors lie in memory that both processes share
as long as there is room, and follow through the pipe where there is none. What comes back, through another pipe, are small pickles behind
their lengths, or a length of 0 where there is nothing to say.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import select
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.ring import Ring, aligned, span

NUMBER: Final = struct.Struct(">QQ")
"""How many parts a message has, and where in the shared memory all but the first stand; their lengths follow."""
IN_PIPE: Final = (1 << 64) - 1
"""Where parts stand that come through the pipe."""
LENGTH: Final = struct.Struct(">I")
"""Of an answer, before it."""
PARENT_SECONDS: Final = 0.5
"""How often a reader looks whether its parent still lives."""


class Message(NamedTuple):
    """A pickle and, in its order, the buffers that it leaves out: those of tensors.

    Attributes:
        pickle: all but the buffers.
        buffers: of bytes.
        place: where they stand in the shared memory; None where they stand elsewhere.
    """

    pickle: bytes
    buffers: Sequence[memoryview]
    place: int | None = None

    def parts(self) -> list[memoryview]:
        """What goes through the pipe: numbers and lengths, the pickle, and those buffers that are not shared or empty."""
        place = IN_PIPE if self.place is None else self.place
        sizes = (len(self.pickle), *map(len, self.buffers))
        lengths = struct.pack(f">{len(sizes) + 2}Q", len(sizes), place, *sizes)
        sent = filter(None, self.buffers) if self.place is None else ()
        return [memoryview(lengths), memoryview(self.pickle), *sent]

    def load(self) -> Any:
        """What was dumped."""
        return pickle.loads(self.pickle, buffers=self.buffers)


def _portable(tensor: Tensor) -> tuple[Any, ...]:
    array = np.ascontiguousarray(tensor.numpy())
    return _tensor, (pickle.PickleBuffer(array.data), array.dtype.char, tuple(tensor.shape))  # [1] for [] in the array


def _tensor(buffer: Any, kind: str, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.frombuffer(buffer, kind).reshape(shape))


class _Pickler(pickle.Pickler):
    """Pickles tensors as their bytes, several times faster than torch, whose way is made for files."""

    dispatch_table = copyreg.dispatch_table.copy()
    dispatch_table[Tensor] = _portable


def dumped(message: object, ring: Ring | None = None) -> Message:
    """The message; its tensors must not change from now on where it does not stand in the ring.

    Args:
        message: anything that can be pickled.
        ring: shared with the reader; whoever knows that the message is read gives its place back.
    """
    stream, found = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, protocol=5, buffer_callback=found.append).dump(message)
    buffers = [buffer.raw() for buffer in found]
    size = span(map(len, buffers)) if ring else 0
    place = ring.put(buffers, size) if ring and size else None
    if ring and place is not None:
        buffers = _cut(ring.look(place, size), map(len, buffers))
    return Message(stream.getvalue(), buffers, place)


def messages(parent: int, ring: Ring | None = None) -> Iterator[Message]:
    """Whole messages from standard input; one that a killed trainer left half written is dropped."""
    with suppress(EOFError):
        while True:
            count, place = NUMBER.unpack(_exactly(NUMBER.size, parent))
            first, *sizes = struct.unpack(f">{count}Q", _exactly(8 * count, parent))
            content = bytes(_exactly(first, parent))
            if place == IN_PIPE or ring is None:
                yield Message(content, [memoryview(_exactly(size, parent)) for size in sizes])
            else:
                block = bytearray(ring.look(place, span(sizes)))  # the trainer uses the place again
                yield Message(content, _cut(memoryview(block), sizes))


def _cut(block: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    """The buffers of a block."""
    found, start = [], 0
    for size in sizes:
        found.append(block[start : start + size])
        start += aligned(size)
    return found


def _exactly(count: int, parent: int) -> bytearray:
    """That many bytes of standard input; EOFError where the parent is gone and nothing more comes.

    The end of the input alone does not tell: workers that the trainer has forked hold the pipe open too.
    """
    found = bytearray(count)
    rest = memoryview(found)
    while rest:
        ready, _, _ = select.select([0], [], [], PARENT_SECONDS)
        got = os.readv(0, [rest]) if ready else 0
        if not got and (ready or os.getppid() != parent):
            raise EOFError
        rest = rest[got:]
    return found


def reply(descriptor: int, answer: Sequence[Any], parent: int) -> None:
    """Answers a message through a pipe that does not block; what a parent that is gone would not read is dropped."""
    content = pickle.dumps(answer, protocol=5) if answer else b""
    rest = LENGTH.pack(len(content)) + content
    while rest:
        _, writable, _ = select.select([], [descriptor], [], PARENT_SECONDS)
        if writable:
            rest = rest[os.write(descriptor, rest) :]
        elif os.getppid() != parent:
            return


class Replies:
    """Puts answers together again, whatever pieces they come in."""

    def __init__(self) -> None:
        self._received = b""

    def take(self, piece: bytes) -> Iterator[Sequence[Any]]:
        """The answers that are complete with this piece, in order; empty ones too."""
        self._received += piece
        while len(self._received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received)
            end = LENGTH.size + length
            if len(self._received) < end:
                return
            content, self._received = self._received[LENGTH.size : end], self._received[end:]
            yield pickle.loads(content) if content else ()
