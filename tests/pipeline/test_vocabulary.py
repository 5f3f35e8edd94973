"""What both processes know is left out of pickles, and nothing else changes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from esper_telemetry.core.record import Axes, Level
from esper_telemetry.events import MinibatchesEnd, RolloutEnd, UpdateEnd
from esper_telemetry.pipeline.channel import MessagePacker, Vocabulary
from esper_telemetry.pipeline.worker import WORDS
from esper_telemetry.updates import data


class Point(NamedTuple):
    x: float
    name: str = "here"


@dataclass(frozen=True, slots=True)
class Stranger:
    point: Point
    level: Level


AXES = Axes(update=3, env_step=4096, gradient_step=48, wall_time=1.5)
KNOWING = Vocabulary((Point, Axes), tuple(Level))


@pytest.mark.parametrize(
    "sent",
    [
        (),
        Point(1.5),
        (Point(1.0), Point(2.0, "there"), AXES, AXES, Level.DEBUG),
        {"strangers": [Stranger(Point(0.5), Level.NORMAL)] * 2, "same": (AXES,) * 3},
    ],
)
def test_what_is_known_is_read_as_it_was_written(sent: Any) -> None:
    plain, short = MessagePacker(), MessagePacker(None, KNOWING)
    for _ in range(3):  # what one message has said, the next one says again
        assert short.pack(sent).load() == plain.pack(sent).load() == sent

    assert type(short.pack(sent).load()) is type(sent)


def test_a_message_leaves_out_what_is_known() -> None:
    sent = [Point(float(x)) for x in range(3)]

    plain, short = (bytes(packer.pack(sent).pickle) for packer in (MessagePacker(), MessagePacker(None, KNOWING)))

    assert b"Point" in plain
    assert b"Point" not in short
    assert MessagePacker(None, KNOWING).pack(Level.MINIMAL).load() is Level.MINIMAL


def test_tensors_find_their_gaps() -> None:
    numbers = torch.arange(3.0)

    found = MessagePacker(None, KNOWING).pack((Point(1.0), numbers, numbers, {"flags": numbers > 1})).load()

    assert torch.equal(found[1], numbers)
    assert found[2] is found[1]
    assert found[3]["flags"].tolist() == [False, False, True]


def test_records_of_updates_are_described_in_no_pickle() -> None:
    kinds = {kind for _, kind in inspect.getmembers(data, inspect.isclass) if issubclass(kind, tuple)}

    assert kinds | {RolloutEnd, MinibatchesEnd, UpdateEnd} == set(data.KINDS)
    assert kinds | {Axes} <= set(WORDS.reductions)
