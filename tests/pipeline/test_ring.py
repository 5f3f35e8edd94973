"""Memory that two processes share: nothing is overwritten before it is given back."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper_telemetry.pipeline.channel import (
    ALIGNMENT,
    MOST_KNOWN,
    MessagePacker,
    Ring,
    aligned,
    messages,
    roomy,
    shared_file,
)

SIZE = 16 * ALIGNMENT


@pytest.fixture
def descriptor() -> Iterator[int]:
    opened = shared_file(SIZE)
    yield opened
    os.close(opened)


@given(st.lists(st.one_of(st.none(), st.integers(1, 5 * ALIGNMENT))))
def test_what_is_taken_stays_until_it_is_given_back(steps: list[int | None]) -> None:
    """Sizes are taken, None gives back what was taken first."""
    opened = shared_file(SIZE)
    ring, reader, held = Ring(opened, SIZE), Ring(opened, SIZE), deque[tuple[int, bytes]]()
    os.close(opened)
    for number, size in enumerate(steps):
        if size is None:
            if held:
                held.popleft()
                ring.release()
            continue
        start, content = ring.take(size), bytes([number % 256]) * size
        assert start is not None or held or roomy(size) > SIZE
        if start is not None:
            assert start % ALIGNMENT == 0
            ring.look(start, size)[:] = content
            held.append((start, content))
        for begin, kept in held:
            assert bytes(reader.look(begin, len(kept))) == kept


def test_a_message_stands_in_the_ring_while_there_is_room(descriptor: int) -> None:
    ring, tensors = Ring(descriptor, SIZE), (torch.arange(64.0), torch.ones(3, dtype=torch.bool), torch.zeros(0))
    packer, size = MessagePacker(ring), roomy(aligned(256) + aligned(3))

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


def test_shapes_are_said_once(descriptor: int) -> None:
    packer = MessagePacker(Ring(descriptor, SIZE))

    said = [packer.pack(torch.zeros(size)).new for size in (3, 4, 3, 4)]

    assert said == [True, True, False, False]


def test_a_reader_knows_shapes_that_were_said_before(descriptor: int) -> None:
    """More kinds of messages than are remembered, each twice, in the ring and, where it is full, through the pipe."""
    ring = Ring(descriptor, SIZE)
    packer = MessagePacker(ring)
    sent = [torch.full((size % 7 + 1, size), float(size)).half() for size in range(MOST_KNOWN + 20) for _ in range(2)]
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


def test_the_first_place_is_used_again_when_all_is_given_back(descriptor: int) -> None:
    ring = Ring(descriptor, SIZE)
    for _ in range(3):
        assert ring.take(ALIGNMENT) == 0
        ring.release()
