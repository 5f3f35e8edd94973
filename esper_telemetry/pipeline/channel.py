"""Messages from the trainer to its worker, and replies.

A message is a pickle, sent through a pipe, and the bytes of its tensors, which are in shared memory if there is room, and
otherwise follow through the pipe. Consecutive updates are similar, so their common parts are sent once: the shapes of the
tensors, and the types that a pickle would describe. Packing a tensor then means copying it to where a similar one was before.
Replies are small pickles with their lengths, sent through another pipe. A counter in the shared memory says how many messages are answered,
so most answers are sent without a reply.
"""

from __future__ import annotations

import copyreg
import io
import mmap
import os
import pickle
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from multiprocessing.shared_memory import SharedMemory
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from esper_telemetry.core.containment import NOTE_BYTES

ALIGNMENT: Final = 64
"""Buffers begin at multiples of this many bytes: a cache line, which is enough for any number."""

TAIL_BYTES: Final = 256
"""Bytes after a ring: its counters, and a `CallNote` from `NOTE_OFFSET` on."""
NOTE_OFFSET: Final = 64

WARM_BYTES: Final = 4 << 20
"""Bytes of a ring whose pages are mapped from the beginning, so that the first messages do not pay for them."""


class Ring:
    """A block of shared memory that one process writes and another reads.

    Only the writer knows which parts are in use: it tells the reader where to read, and the reader says when it is done. Counters after the
    block are set by the reader, so that the writer need not make a system call. They outlive the reader.

    Args:
        descriptor: shared file from `shared_file`.
        size: size in bytes; pages are allocated when messages first reach them.

    Attributes:
        used_bytes: bytes in use now.
        note: memory for the reader's `CallNote`.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        shared = memoryview(mmap.mmap(descriptor, size + TAIL_BYTES))
        self._memory = shared[:size]
        bytes(self._memory[: WARM_BYTES : mmap.PAGESIZE])  # reading a page maps it
        self._counters = shared[size : size + 32].cast("Q")
        self.note = shared[size + NOTE_OFFSET : size + NOTE_OFFSET + NOTE_BYTES]
        self._used: deque[tuple[int, int]] = deque()
        self.used_bytes = 0

    @property
    def answers(self) -> int:
        """Messages that the reader has answered."""
        return self._counters[0]

    @property
    def replies(self) -> int:
        """Replies through the pipe to these messages and to the next one."""
        return self._counters[1]

    @property
    def begun(self) -> int:
        """Messages that the reader has begun to work on."""
        return self._counters[2]

    @property
    def missing_records(self) -> int:
        """Records that the reader has made and could not write so far."""
        return self._counters[3]

    def begin(self) -> None:
        """Count another message that is being worked on; the reader calls it."""
        self._counters[2] += 1

    def answer(self, *, replied: bool = False, missing_records: int = 0) -> None:
        """Count another answer; the reader calls it, after its reply if it has `replied`."""
        self._counters[3] = missing_records
        self._counters[1] += replied
        self._counters[0] += 1

    def take(self, size: int) -> int | None:
        """Reserve this many bytes at an aligned offset; returns the offset, or None if there is not enough room now."""
        size = padded(size)
        start = self._room(size)
        if start is not None:
            self._used.append((start, start + size))
            self.used_bytes += size
        return start

    def release(self) -> None:
        """Release the oldest reservation."""
        start, end = self._used.popleft()
        self.used_bytes -= end - start

    def view(self, start: int, size: int) -> memoryview:
        """Return the bytes there, valid until they are released."""
        return self._memory[start : start + size]

    def _room(self, size: int) -> int | None:
        """Return an offset for this many bytes, preferring the beginning of the ring, whose pages are warm."""
        if not self._used:
            return 0 if size <= len(self._memory) else None
        first, last = self._used[0][0], self._used[-1][1]
        if last <= first:
            return last if size <= first - last else None
        if size <= first:
            return 0
        return last if size <= len(self._memory) - last else None


def aligned(size: int) -> int:
    """Return the distance from one buffer of that size to the next, in bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def padded(size: int) -> int:
    """Return the size rounded up by at most an eighth, so that updates that differ by a few rows reuse the same offsets."""
    return aligned(-(-size >> (step := max(0, size.bit_length() - 4))) << step)


HAS_SHARED_FILES: Final = hasattr(os, "memfd_create") or sys.platform == "darwin"
"""Whether `shared_file` works here. Linux without memory files is left out: its `/dev/shm` may be smaller than a ring."""


def shared_file(size: int) -> int:
    """Return the descriptor of memory for a ring of that size, a multiple of `ALIGNMENT`; it has no name.

    A file on a disk cannot be used: if the disk is full, writing into its mapping kills the process.
    """
    if not hasattr(os, "memfd_create"):  # macOS
        memory = SharedMemory(create=True, size=size + TAIL_BYTES)
        try:
            return os.dup(memory._fd)  # type: ignore[attr-defined]  # no public way leads to the descriptor
        finally:
            memory.close()
            memory.unlink()
    descriptor = os.memfd_create("esper-telemetry")
    try:
        os.truncate(descriptor, size + TAIL_BYTES)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


Reduction = Callable[[Any], tuple[type, tuple[Any, ...]]]


class Vocabulary:
    """Types and other objects that pickles need not describe; the same on both sides.

    Between two updates the trainer fills the processor's caches. Each type that a pickle describes then costs more than its numbers.

    Args:
        types: named tuples, and dataclasses of at least two fields that contain only these types.
        others: objects that live as long as the process, such as members of enumerations.

    Attributes:
        preamble: a pickle of all of them, which must be read just before any other.
        reductions: how objects of these types are pickled, for a pickler's `dispatch_table`.
    """

    def __init__(self, types: Sequence[type] = (), others: Sequence[object] = ()) -> None:
        content = io.BytesIO()
        pickler = pickle.Pickler(content, protocol=5)
        pickler.dump((*types, *others))
        self.preamble, self._memo = content.getvalue(), pickler.memo
        self.reductions: dict[type, Reduction] = {kind: _reduction(kind) for kind in types}

    def prime(self, pickler: pickle.Pickler) -> None:
        """Make a pickler begin as if it had just written the preamble."""
        pickler.memo = self._memo


def _reduction(kind: type) -> Reduction:
    """Return a function that reduces an object to its type and its fields, in order."""
    content: Callable[[Any], tuple[Any, ...]] = tuple
    if not issubclass(kind, tuple):
        content = attrgetter(*[field.name for field in fields(kind)])  # type: ignore[arg-type]  # a dataclass
    return lambda instance: (kind, content(instance))


NO_VOCABULARY: Final = Vocabulary()

Shapes: TypeAlias = tuple[tuple[torch.dtype, torch.Size], ...]
"""Types and shapes of the tensors of a message, in its order."""

HEAD: Final = struct.Struct(">5Q")
"""Bytes of the pickle, of the shapes (0 if they were sent before) and of the block; number of the shapes; offset of the block."""
IN_PIPE: Final = (1 << 64) - 1
"""Offset of a block that is sent through the pipe."""
LENGTH: Final = struct.Struct(">I")
"""Length of a reply, sent before it."""
PARENT_SECONDS: Final = 0.5
"""Time between two checks of the worker that its parent lives, while a reply waits."""
POLL_SECONDS: Final = 0.01
"""Time between two polls of the worker for the next message. If the worker slept until then, the training thread would have to wake it,
which takes 170 us of that thread instead of 20, because an idle core must be woken."""
MAX_LAYOUTS: Final = 256
"""Shapes and blocks that are remembered: more than a small run has."""


class Message(NamedTuple):
    """A pickle with a placeholder for each tensor, and the block with the tensors.

    Attributes:
        pickle: everything except the tensors.
        shapes: shapes of the tensors.
        block: bytes of the tensors.
        place: offset of the block in the shared memory; None if it is elsewhere.
        number: number of the shapes.
        new: whether the reader does not know the shapes yet.
        vocabulary: objects that the pickle leaves out.
    """

    pickle: bytes
    shapes: Shapes
    block: memoryview
    place: int | None = None
    number: int = 0
    new: bool = True
    vocabulary: Vocabulary = NO_VOCABULARY

    def parts(self) -> list[memoryview]:
        """Return what goes through the pipe: sizes, the pickle, the shapes if they are new, and the block if it is not shared."""
        shapes = pickle.dumps(self.shapes, protocol=5) if self.new else b""
        sizes = (len(self.pickle), len(shapes), len(self.block))
        head = HEAD.pack(*sizes, self.number, IN_PIPE if self.place is None else self.place)
        parts = (head, self.pickle, shapes, self.block if self.place is None else b"")
        return [memoryview(part) for part in parts if part]

    def load(self) -> Any:
        """Return the object that was packed."""
        return _Unpickler(self.pickle, tensor_views(self.block, self.shapes), self.vocabulary).load()


def placeholder() -> Tensor:
    """Represent the next tensor in a pickle."""
    raise AssertionError("only a message knows its tensors")


class _Unpickler(pickle.Unpickler):
    """Replaces placeholders by tensors; has read the preamble."""

    def __init__(self, content: bytes, tensors: Sequence[Tensor], vocabulary: Vocabulary) -> None:
        super().__init__(io.BytesIO(vocabulary.preamble + content))
        self._tensors = iter(tensors)
        self.load()

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a pickle names."""
        stands_in = (module, name) == (__name__, placeholder.__name__)
        return self._tensors.__next__ if stands_in else super().find_class(module, name)


class MessagePacker:
    """Packs objects into messages.

    Args:
        ring: shared with the reader; its places are released by the caller once a message is read.
        vocabulary: objects that the reader knows too.
    """

    def __init__(self, ring: Ring | None = None, vocabulary: Vocabulary = NO_VOCABULARY) -> None:
        self._ring, self._vocabulary = ring, vocabulary
        self._numbers: dict[Shapes, tuple[int, int]] = {}
        self._next_number = 0
        self._blocks: dict[tuple[int, int], tuple[memoryview, list[Tensor]]] = {}
        self._tensors: list[Tensor] = []
        self._stream = io.BytesIO()
        self._pickler = pickle.Pickler(self._stream, protocol=5)
        reductions = {**copyreg.dispatch_table, **vocabulary.reductions}
        self._pickler.dispatch_table = {**reductions, Tensor: self._leave_out}

    def pack(self, message: object) -> Message:
        """Return a message of any object that can be pickled, with copies of its tensors."""
        self._stream.seek(0)
        self._stream.truncate()
        self._vocabulary.prime(self._pickler)
        self._tensors.clear()
        self._pickler.dump(message)
        shapes = tuple([(tensor.dtype, tensor.shape) for tensor in self._tensors])
        layout = self._numbers.get(shapes)
        number, size = layout or self._learn(shapes)
        place = self._ring.take(size) if self._ring and size else None
        block, copies = self._block(number, place, shapes, size)
        if copies:
            with torch.no_grad():
                torch._foreach_copy_(copies, self._tensors)
        return Message(self._stream.getvalue(), shapes, block, place, number, layout is None, self._vocabulary)

    def _leave_out(self, tensor: Tensor) -> tuple[Callable[[], Tensor], tuple[()]]:
        """Pickle a tensor as a placeholder."""
        self._tensors.append(tensor)
        return placeholder, ()

    def _learn(self, shapes: Shapes) -> tuple[int, int]:
        """Return the number of new shapes, and the bytes of their block."""
        if len(self._numbers) >= MAX_LAYOUTS:
            self._numbers.clear()
            self._blocks.clear()
        self._numbers[shapes] = layout = self._next_number, sum(aligned(shape.numel() * dtype.itemsize) for dtype, shape in shapes)
        self._next_number += 1
        return layout

    def _block(self, number: int, place: int | None, shapes: Shapes, size: int) -> tuple[memoryview, list[Tensor]]:
        """Return room for these tensors, and tensors in it."""
        if place is None or self._ring is None:
            block = memoryview(bytearray(size))
            return block, tensor_views(block, shapes)
        views = self._blocks.get((number, place))
        if views is None:
            if len(self._blocks) >= MAX_LAYOUTS:
                self._blocks.clear()
            block = self._ring.view(place, size)
            self._blocks[number, place] = views = block, tensor_views(block, shapes)
        return views


def tensor_views(block: memoryview, shapes: Shapes) -> list[Tensor]:
    """Return tensors of these shapes in a block, one after the other, each at an aligned offset."""
    views, start = [], 0
    for dtype, shape in shapes:
        count = shape.numel()
        flat = torch.frombuffer(block, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        views.append(flat.view(shape))
        start += aligned(count * dtype.itemsize)
    return views


def messages(parent: int, ring: Ring | None = None, vocabulary: Vocabulary = NO_VOCABULARY) -> Iterator[Message]:
    """Yield whole messages from standard input; drop one that a killed trainer has left incomplete.

    Args:
        parent: process that sends them.
        ring, vocabulary: as for the packer.
    """
    os.set_blocking(0, False)
    layouts: dict[int, Shapes] = {}
    with suppress(EOFError):
        while True:
            first, second, size, number, place = HEAD.unpack(_read_exactly(HEAD.size, parent))
            content, shapes = bytes(_read_exactly(first, parent)), bytes(_read_exactly(second, parent))
            if shapes:
                if len(layouts) >= MAX_LAYOUTS:
                    layouts.clear()
                layouts[number] = pickle.loads(shapes)
            shared = ring.view(place, size) if ring and place != IN_PIPE else None
            block = _read_exactly(size, parent) if shared is None else bytearray(shared)  # a copy, because its place is reused
            yield Message(content, layouts[number], memoryview(block), vocabulary=vocabulary)


def _read_exactly(count: int, parent: int) -> bytearray:
    """Return that many bytes of standard input; raises EOFError if the parent is gone and no data follows.

    The end of the input alone is not reliable, because processes that the trainer has forked also hold the pipe open.
    """
    content = bytearray(count)
    rest = memoryview(content)
    while rest:
        is_orphan = os.getppid() != parent
        try:
            received = os.readv(0, [rest])
        except BlockingIOError:
            if is_orphan:
                raise EOFError from None
            time.sleep(POLL_SECONDS)
            continue
        if received == 0:
            raise EOFError
        rest = rest[received:]
    return content


def reply(descriptor: int, items: Sequence[Any], parent: int) -> None:
    """Answer a message through a non-blocking pipe; drop the answer if the parent is gone."""
    content = pickle.dumps(items, protocol=5) if items else b""
    rest = LENGTH.pack(len(content)) + content
    poll = select.poll()  # select cannot use descriptors above 1023
    poll.register(descriptor, select.POLLOUT)
    while rest:
        if poll.poll(1000 * PARENT_SECONDS):
            rest = rest[os.write(descriptor, rest) :]
        elif os.getppid() != parent:
            return


class Replies:
    """Reassembles replies from the pieces in which they arrive."""

    def __init__(self) -> None:
        self._received = b""

    def take(self, piece: bytes) -> Iterator[Sequence[Any]]:
        """Yield the replies that are complete with this piece, in order, including empty ones."""
        self._received += piece
        while len(self._received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received)
            end = LENGTH.size + length
            if len(self._received) < end:
                return
            content, self._received = self._received[LENGTH.size : end], self._received[end:]
            yield pickle.loads(content) if content else ()
