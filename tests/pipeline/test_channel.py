"""Messages to the worker: shared memory is reused only after release, and data that both sides have is not pickled again."""

import inspect
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper_telemetry.core.record import Axes, Level
from esper_telemetry.pipeline.channel import ALIGNMENT, MAX_LAYOUTS, MessagePacker, Ring, Vocabulary, aligned, messages, padded, shared_file
from esper_telemetry.pipeline.worker import PAYLOAD
from esper_telemetry.updates import update as update_module

SIZE = 16 * ALIGNMENT


@pytest.fixture
def descriptor() -> Iterator[int]:
    opened = shared_file(SIZE)
    yield opened
    os.close(opened)


@given(st.lists(st.one_of(st.none(), st.integers(1, 5 * ALIGNMENT))))
def test_reserved_bytes_stay_until_they_are_released(steps: list[int | None]) -> None:
    """Sizes are reserved; None releases the oldest reservation."""
    opened = shared_file(SIZE)
    ring, reader, reserved = Ring(opened, SIZE), Ring(opened, SIZE), deque[tuple[int, bytes]]()
    os.close(opened)
    for number, size in enumerate(steps):
        if size is None:
            if reserved:
                reserved.popleft()
                ring.release()
            continue
        start, content = ring.take(size), bytes([number % 256]) * size
        assert start is not None or reserved or padded(size) > SIZE
        if start is not None:
            assert start % ALIGNMENT == 0
            ring.view(start, size)[:] = content
            reserved.append((start, content))
        for begin, content in reserved:
            assert bytes(reader.view(begin, len(content))) == content


def test_a_message_lies_in_the_ring_while_there_is_room(descriptor: int) -> None:
    ring, tensors = Ring(descriptor, SIZE), (torch.arange(64.0), torch.ones(3, dtype=torch.bool), torch.zeros(0))
    packer, size = MessagePacker(ring), padded(aligned(256) + aligned(3))

    first, second, third = (packer.pack(tensors) for _ in range(3))
    tensors[0].zero_()

    assert (first.place, second.place, third.place) == (0, size, 2 * size)
    assert packer.pack(tensors).place is None
    assert sum(map(len, first.parts())) < 1000 < sum(map(len, packer.pack((torch.zeros(500),)).parts()))
    for message in (first, second, third):
        numbers, flags, nothing = message.load()
        assert numbers.tolist() == list(range(64))
        assert flags.tolist() == [True] * 3
        assert nothing.shape == (0,)


def test_shapes_are_sent_once(descriptor: int) -> None:
    packer = MessagePacker(Ring(descriptor, SIZE))

    new = [packer.pack(torch.zeros(size)).new for size in (3, 4, 3, 4)]

    assert new == [True, True, False, False]


def test_a_reader_remembers_shapes_that_were_sent_before(descriptor: int) -> None:
    """There are more kinds of messages than the cache holds. Each is sent twice, through the ring or, if that is full, the pipe."""
    ring = Ring(descriptor, SIZE)
    packer = MessagePacker(ring)
    sent = [torch.full((size % 7 + 1, size), float(size)).half() for size in range(MAX_LAYOUTS + 20) for _ in range(2)]
    read, write = os.pipe()
    stdin = os.dup(0)
    os.dup2(read, 0)
    try:
        incoming = messages(os.getppid(), Ring(descriptor, SIZE))
        for tensor in sent:
            message = packer.pack((tensor, tensor.t(), "text"))
            os.writev(write, message.parts())
            straight, transposed, text = next(incoming).load()
            assert torch.equal(straight, tensor)
            assert torch.equal(transposed, tensor.t())
            assert text == "text"
            if message.place is not None:
                ring.release()
    finally:
        os.dup2(stdin, 0)
        for opened in (stdin, read, write):
            os.close(opened)


def test_the_first_place_is_used_again_when_all_is_released(descriptor: int) -> None:
    ring = Ring(descriptor, SIZE)
    for _ in range(3):
        assert ring.take(ALIGNMENT) == 0
        ring.release()


class Point(NamedTuple):
    x: float
    name: str = "here"


@dataclass(frozen=True, slots=True)
class UnknownType:
    point: Point
    level: Level


AXES = Axes(update=3, env_step=4096, gradient_step=48, wall_time=1.5)
VOCABULARY = Vocabulary((Point, Axes), tuple(Level))


@pytest.mark.parametrize(
    "sent",
    [
        (),
        Point(1.5),
        (Point(1.0), Point(2.0, "there"), AXES, AXES, Level.DEBUG),
        {"unknown": [UnknownType(Point(0.5), Level.NORMAL)] * 2, "same": (AXES,) * 3},
    ],
)
def test_known_types_are_read_as_they_were_written(sent: Any) -> None:
    plain, short = MessagePacker(), MessagePacker(None, VOCABULARY)
    for _ in range(3):  # each message is independent
        assert short.pack(sent).load() == plain.pack(sent).load() == sent

    assert type(short.pack(sent).load()) is type(sent)


def test_a_message_leaves_out_known_types() -> None:
    sent = [Point(float(x)) for x in range(3)]

    plain, short = (bytes(packer.pack(sent).pickle) for packer in (MessagePacker(), MessagePacker(None, VOCABULARY)))

    assert b"Point" in plain
    assert b"Point" not in short
    assert MessagePacker(None, VOCABULARY).pack(Level.MINIMAL).load() is Level.MINIMAL


def test_tensors_replace_their_placeholders() -> None:
    numbers = torch.arange(3.0)

    loaded = MessagePacker(None, VOCABULARY).pack((Point(1.0), numbers, numbers, {"flags": numbers > 1})).load()

    assert torch.equal(loaded[1], numbers)
    assert loaded[2] is loaded[1]
    assert loaded[3]["flags"].tolist() == [False, False, True]


def test_the_vocabulary_has_every_type_of_an_update() -> None:
    classes = [kind for _, kind in inspect.getmembers(update_module, inspect.isclass)]
    kinds = {kind for kind in classes if issubclass(kind, tuple) or is_dataclass(kind)}

    assert kinds == set(update_module.KINDS)
    assert kinds | {Axes} <= set(PAYLOAD.reductions)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3)])
def test_a_tensor_arrives_in_its_shape(shape: tuple[int, ...]) -> None:
    (tensor,) = MessagePacker().pack((torch.ones(shape),)).load()

    assert tensor.shape == shape
