"""Messages from the trainer to the process beside it, through a pipe.

A message is a pickle and the bytes of its tensors, which are never copied on the way into the pipe. What comes back, through another
pipe, are small pickles behind their lengths, or a length of 0 where there is nothing to say.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import select
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

NUMBER: Final = struct.Struct(">Q")
"""Of the parts of a message, and each one's length; they stand before it."""
LENGTH: Final = struct.Struct(">I")
"""Of an answer, before it."""
PARENT_SECONDS: Final = 0.5
"""How often a reader looks whether its parent still lives."""


class Message(NamedTuple):
    """A pickle and, in its order, the buffers that it leaves out: those of tensors, which nobody copies on this side."""

    pickle: bytes
    buffers: Sequence[memoryview | bytearray]

    def parts(self) -> list[memoryview]:
        """What goes through the pipe: how many parts there are and the length of each, then those that are not empty."""
        parts = [memoryview(part) for part in (self.pickle, *self.buffers)]
        lengths = struct.pack(f">{len(parts) + 1}Q", len(parts), *map(len, parts))
        return [memoryview(lengths), *filter(None, parts)]

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


def dumped(message: object) -> Message:
    """The message, whose tensors must not change from now on."""
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(message)
    return Message(stream.getvalue(), [buffer.raw() for buffer in buffers])


def messages(parent: int) -> Iterator[Message]:
    """Whole messages from standard input; one that a killed trainer left half written is dropped."""
    with suppress(EOFError):
        while True:
            (count,) = NUMBER.unpack(_exactly(NUMBER.size, parent))
            lengths = struct.unpack(f">{count}Q", _exactly(NUMBER.size * count, parent))
            first, *buffers = [_exactly(length, parent) for length in lengths]
            yield Message(bytes(first), buffers)


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
