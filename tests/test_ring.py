"""Memory that two processes share: nothing is overwritten before it is given back."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper_telemetry.messages import dumped
from esper_telemetry.ring import ALIGNMENT, Ring, shared_file, span

SIZE = 16 * ALIGNMENT


@pytest.fixture
def descriptor() -> Iterator[int]:
    opened = shared_file(SIZE)
    yield opened
    os.close(opened)


@given(st.lists(st.one_of(st.none(), st.lists(st.integers(1, 5 * ALIGNMENT), min_size=1, max_size=3))))
def test_what_is_put_stays_until_it_is_given_back(steps: list[list[int] | None]) -> None:
    """Lists of sizes are put, None gives back what was put first."""
    opened = shared_file(SIZE)
    ring, reader, held = Ring(opened, SIZE), Ring(opened, SIZE), deque[tuple[int, list[bytes]]]()
    os.close(opened)
    for number, sizes in enumerate(steps):
        if sizes is None:
            if held:
                held.popleft()
                ring.release()
            continue
        buffers = [bytes([(number + place) % 256]) * size for place, size in enumerate(sizes)]
        start = ring.put(map(memoryview, buffers), span(sizes))
        assert start is not None or held or span(sizes) > SIZE
        if start is not None:
            held.append((start, buffers))
        for begin, kept in held:
            place = begin
            for buffer in kept:
                assert place % ALIGNMENT == 0
                assert bytes(reader.look(place, len(buffer))) == buffer
                place += span([len(buffer)])


def test_a_message_stands_in_the_ring_while_there_is_room(descriptor: int) -> None:
    ring, tensors = Ring(descriptor, SIZE), (torch.arange(64.0), torch.ones(3, dtype=torch.bool), torch.zeros(0))

    first, second, third = (dumped(tensors, ring) for _ in range(3))
    tensors[0].zero_()

    assert (first.place, second.place, third.place) == (0, span([256, 3, 0]), 2 * span([256, 3, 0]))
    assert dumped(tensors, ring).place is None
    assert sum(map(len, first.parts())) < 1000 < sum(map(len, dumped((torch.zeros(500),), ring).parts()))
    for message in (first, second, third):
        numbers, flags, nothing = message.load()
        assert numbers.tolist() == list(range(64))
        assert flags.tolist() == [True] * 3
        assert nothing.shape == (0,)


def test_the_first_place_is_used_again_when_all_is_given_back(descriptor: int) -> None:
    ring = Ring(descriptor, SIZE)
    for _ in range(3):
        assert ring.put([memoryview(b"abc")], ALIGNMENT) == 0
        ring.release()
