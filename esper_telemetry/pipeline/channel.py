"""Messages from the trainer to the process beside it, through a pipe.

A message is a pickle and the bytes of its tensors. The pickle goes through the pipe; the tensors lie in memory that both processes share
as long as there is room, and follow through the pipe where there is none. What shapes they have is said once, since one update is
like the next: then to pack a tensor is to copy it to where one like it stood before. What comes back, through another pipe, are small
pickles behind their lengths, or a length of 0 where there is nothing to say.

Memory that two processes share, taken and given back in order.

What writer and reader of a pickle both know, left out of it.
"""

from __future__ import annotations

import copyreg
import io
import mmap
import os
import pickle
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

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


Reduction = Callable[[Any], tuple[type, tuple[Any, ...]]]


class Vocabulary:
    """Types and other objects that pickles need not describe; the same on both sides.

    Args:
        kinds: named tuples, and dataclasses of at least two fields that are made of these alone.
        others: objects that live as long as the process, such as members of enumerations.

    Attributes:
        preamble: a pickle of all of them; whoever reads another one must have read it just before.
        reductions: how objects of these types are pickled, for a pickler's `dispatch_table`.
    """

    def __init__(self, kinds: Sequence[type] = (), others: Sequence[object] = ()) -> None:
        content = io.BytesIO()
        pickler = pickle.Pickler(content, protocol=5)
        pickler.dump((*kinds, *others))
        self.preamble, self._memo = content.getvalue(), pickler.memo
        self.reductions: dict[type, Reduction] = {kind: _reduction(kind) for kind in kinds}

    def teach(self, pickler: pickle.Pickler) -> None:
        """Makes it begin a pickle as if it had just written the preamble."""
        pickler.memo = self._memo


def _reduction(kind: type) -> Reduction:
    """The type and its fields, in order."""
    content: Callable[[Any], tuple[Any, ...]] = tuple
    if not issubclass(kind, tuple):
        content = attrgetter(*[field.name for field in fields(kind)])  # type: ignore[arg-type]  # a dataclass
    return lambda instance: (kind, content(instance))


NOTHING = Vocabulary()
"""Knows nothing."""


Shapes: TypeAlias = tuple[tuple[torch.dtype, torch.Size], ...]
"""Of the tensors of a message, in its order."""

HEAD: Final = struct.Struct(">5Q")
"""Bytes of the pickle, of the shapes (0 where they were said before) and of the block; number of the shapes; place of the block."""
IN_PIPE: Final = (1 << 64) - 1
"""Where a block stands that comes through the pipe."""
PLAIN: Final = (1 << 64) - 1
"""Instead of the number of the shapes, where a message is `PlainMessage`."""
LENGTH: Final = struct.Struct(">I")
"""Of an answer, before it."""
PARENT_SECONDS: Final = 0.5
"""How often whoever answers looks whether its parent still lives."""
POLL_SECONDS: Final = 0.01
"""How often a reader looks for the next message. One that slept until it comes would have to be woken by whoever writes it, at the price
of a core that is called back from idleness: measured, 170 us of the training thread instead of 20."""
MOST_KNOWN: Final = 256
"""Blocks that are remembered with the tensors that see them: more than a small run has."""


class Message(NamedTuple):
    """A pickle with a gap for each tensor, and the block in which the tensors stand.

    Attributes:
        pickle: all but the tensors.
        shapes: of the tensors.
        block: their bytes.
        place: where the block stands in the shared memory; None where it stands elsewhere.
        number: of the shapes.
        new: whether the reader does not know them yet.
        vocabulary: what the pickle leaves out.
    """

    pickle: bytes
    shapes: Shapes
    block: memoryview
    place: int | None = None
    number: int = 0
    new: bool = True
    vocabulary: Vocabulary = NOTHING

    def parts(self) -> list[memoryview]:
        """What goes through the pipe: sizes, the pickle, the shapes if they are new, and the block if it is not shared."""
        shapes = pickle.dumps(self.shapes, protocol=5) if self.new else b""
        sizes = (len(self.pickle), len(shapes), len(self.block))
        head = HEAD.pack(*sizes, self.number, IN_PIPE if self.place is None else self.place)
        sent = (head, self.pickle, shapes, self.block if self.place is None else b"")
        return [memoryview(part) for part in sent if part]

    def load(self) -> Any:
        """What was packed."""
        return _Unpickler(self.pickle, lying(self.block, self.shapes), self.vocabulary).load()


class PlainMessage(NamedTuple):
    """A message that sender and reader put into bytes and take out by themselves: what it says, and those bytes."""

    said: Any
    content: bytes
    place: None = None

    def parts(self) -> list[memoryview]:
        """What goes through the pipe, in one piece."""
        return [memoryview(HEAD.pack(len(self.content), 0, 0, PLAIN, IN_PIPE) + self.content)]

    def load(self) -> Any:
        """What was said."""
        return self.said


def gap() -> Tensor:
    """Stands in a pickle for the next tensor."""
    raise AssertionError("only a message knows its tensors")


GAP: Final = (gap, ())


class _Unpickler(pickle.Unpickler):
    """Fills the gaps with these tensors; has read the preamble."""

    def __init__(self, content: bytes, tensors: Sequence[Tensor], vocabulary: Vocabulary) -> None:
        super().__init__(io.BytesIO(vocabulary.preamble + content))
        self._tensors = iter(tensors)
        self.load()

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle names."""
        return (
            self._tensors.__next__ if (module, name) == (__name__, gap.__name__) else super().find_class(module, name)
        )


class Known(NamedTuple):
    """Shapes that the reader knows: their number, and bytes of a block."""

    number: int
    size: int


class MessagePacker:
    """Makes messages.

    Args:
        ring: shared with the reader; whoever knows that a message is read gives its place back.
        vocabulary: what the reader knows too.
    """

    def __init__(self, ring: Ring | None = None, vocabulary: Vocabulary = NOTHING) -> None:
        self._ring, self._vocabulary = ring, vocabulary
        self._known: dict[Shapes, Known] = {}
        self._said = 0
        self._blocks: dict[tuple[int, int], tuple[memoryview, list[Tensor]]] = {}
        self._tensors: list[Tensor] = []
        self._stream = io.BytesIO()
        self._pickler = pickle.Pickler(self._stream, protocol=5)
        reductions = {**copyreg.dispatch_table, **vocabulary.reductions}
        self._pickler.dispatch_table = {**reductions, Tensor: self._leave_gap}

    def pack(self, message: object) -> Message:
        """The message, with copies of its tensors.

        Args:
            message: anything that can be pickled.
        """
        content, tensors = self._pickled(message)
        shapes = tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
        known = self._known.get(shapes)
        number, size = known or self._learn(shapes)
        place = self._ring.take(size) if self._ring and size else None
        block, copies = self._block(number, place, shapes, size)
        if tensors:
            with torch.no_grad():
                torch._foreach_copy_(copies, tensors)
        return Message(content, shapes, block, place, number, known is None, self._vocabulary)

    def _pickled(self, message: object) -> tuple[bytes, list[Tensor]]:
        """The pickle with gaps, and the tensors that belong there."""
        self._stream.seek(0)
        self._stream.truncate()
        self._vocabulary.teach(self._pickler)
        self._tensors.clear()
        self._pickler.dump(message)
        return self._stream.getvalue(), self._tensors

    def _leave_gap(self, tensor: Tensor) -> tuple[Callable[[], Tensor], tuple[()]]:
        """How a tensor is pickled."""
        self._tensors.append(tensor)
        return GAP

    def _learn(self, shapes: Shapes) -> Known:
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
            self._blocks.clear()
        self._known[shapes] = known = Known(self._said, span(shapes))
        self._said += 1
        return known

    def _block(self, number: int, place: int | None, shapes: Shapes, size: int) -> tuple[memoryview, list[Tensor]]:
        """Room for these tensors, and tensors that lie in it."""
        if place is None or self._ring is None:
            block = memoryview(bytearray(size))
            return block, lying(block, shapes)
        found = self._blocks.get((number, place))
        if found is None:
            if len(self._blocks) >= MOST_KNOWN:
                self._blocks.clear()
            block = self._ring.look(place, size)
            self._blocks[number, place] = found = block, lying(block, shapes)
        return found


def lying(block: memoryview, shapes: Shapes) -> list[Tensor]:
    """Tensors of these shapes in a block, one behind the other, each on an aligned place."""
    found, start = [], 0
    for dtype, shape in shapes:
        count = shape.numel()
        flat = torch.frombuffer(block, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        found.append(flat.view(shape))
        start += aligned(count * dtype.itemsize)
    return found


def span(shapes: Shapes) -> int:
    """Bytes of the block in which they lie."""
    return sum(aligned(shape.numel() * dtype.itemsize) for dtype, shape in shapes)


def messages(
    parent: int,
    ring: Ring | None = None,
    vocabulary: Vocabulary = NOTHING,
    hear: Callable[[bytes], Any] = bytes,
) -> Iterator[Message | PlainMessage]:
    """Whole messages from standard input; one that a killed trainer left half written is dropped.

    Args:
        parent: process that they come from.
        ring, vocabulary: as the packer has them.
        hear: what is said by the bytes of a message that is `PlainMessage`.
    """
    os.set_blocking(0, False)
    known: dict[int, Shapes] = {}
    with suppress(EOFError):
        while True:
            first, second, size, number, place = HEAD.unpack(_exactly(HEAD.size, parent))
            content, shapes = bytes(_exactly(first, parent)), bytes(_exactly(second, parent))
            if number == PLAIN:
                yield PlainMessage(hear(content), content)
                continue
            if shapes:
                if len(known) >= MOST_KNOWN:
                    known.clear()
                known[number] = pickle.loads(shapes)
            shared = ring.look(place, size) if ring and place != IN_PIPE else None
            block = _exactly(size, parent) if shared is None else bytearray(shared)  # whose place is used again
            yield Message(content, known[number], memoryview(block), vocabulary=vocabulary)


def _exactly(count: int, parent: int) -> bytearray:
    """That many bytes of standard input; EOFError where the parent is gone and nothing more comes.

    The end of the input alone does not tell: workers that the trainer has forked hold the pipe open too.
    """
    found = bytearray(count)
    rest = memoryview(found)
    while rest:
        gone = os.getppid() != parent
        got = _received(rest)
        if got == 0 or (got is None and gone):
            raise EOFError
        if got is None:
            time.sleep(POLL_SECONDS)
        else:
            rest = rest[got:]
    return found


def _received(into: memoryview) -> int | None:
    """How many bytes of standard input there were; None where more may come, 0 where nothing more will."""
    try:
        return os.readv(0, [into])
    except BlockingIOError:
        return None


def reply(descriptor: int, answer: Sequence[Any], parent: int) -> None:
    """Answers a message through a pipe that does not block; what a parent that is gone would not read is dropped."""
    content = pickle.dumps(answer, protocol=5) if answer else b""
    rest = LENGTH.pack(len(content)) + content
    waiting = select.poll()  # select takes no descriptor above 1023
    waiting.register(descriptor, select.POLLOUT)
    while rest:
        if waiting.poll(1000 * PARENT_SECONDS):
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
