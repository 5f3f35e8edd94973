"""Updates of nothing but logged numbers are heard as they were told, whatever was left out because it was said before."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from esper_telemetry import Telemetry, read_run
from esper_telemetry.core.packing import NO_VALUES, Values
from esper_telemetry.core.record import Axes, Level, SinkLag
from esper_telemetry.pipeline import plain
from esper_telemetry.pipeline.plain import PlainListener, Teller
from esper_telemetry.pipeline.record import JournalOutput, Measured
from esper_telemetry.pipeline.window import Keys, Logged, Numbers
from esper_telemetry.updates import UpdateData

LAGGING = JournalOutput(3, 1, (SinkLag("mlflow", 3, 0.5, 1),))


def measured(numbers: Numbers, *, update: int = 1, delivery: JournalOutput = LAGGING, **others: Any) -> Measured:
    axes = Axes(update, 128 * update, 4 * update, 1.5)
    return Measured(
        *(update, axes, False, Level.NORMAL, NO_VALUES, (), 1e-4, 0.025, delivery), numbers=numbers
    )._replace(**others)


def logged(log: Logged, **values: float) -> Numbers:
    log.add(values)
    return log.take()


def content(one: Measured) -> tuple[Any, ...]:
    return (*one[:-1], one.numbers.by_key())


def test_updates_are_heard_as_they_were_told() -> None:
    """The same keys, others and the first again; numbers come last that JSON and text would round."""
    teller, listener, log = Teller(), PlainListener(), Logged()
    told = [
        measured(logged(log, a=1.0, b=-math.pi), update=1),
        measured(logged(log, a=5e-324, b=1.7976931348623157e308), update=2),
        measured(logged(log, c=0.1), update=3, delivery=JournalOutput(0, 0)),
        measured(logged(log, b=0.0, a=1.0), update=4, cpu_seconds=1e-4, metric_errors=2),
        measured(logged(log), update=5, level=Level.DEBUG),
        measured(logged(log, a=3.0, b=4.0), update=6),
    ]

    heard = [listener.hear(teller.tell(one)) for one in told]

    assert [content(one) for one in heard] == [content(one) for one in told]
    assert all(one.plain and type(one.level) is Level for one in heard)


def test_what_was_said_before_is_left_out() -> None:
    teller, log = Teller(), Logged()

    first, second = (teller.tell(measured(logged(log, loss=1.0, kl=2.0))) for _ in range(2))

    assert b"loss" in first and b"mlflow" in first
    assert len(second) == plain.HEAD.size + 16


def test_more_keys_than_are_numbered_are_said_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MOST_KEYS", 2)
    teller, listener = Teller(), PlainListener()
    known = [Keys((name,)) for name in "abcd"]
    for update in range(1, 4):
        for keys in known:
            told = measured(Numbers(keys, struct.pack("d", update)), update=update)
            assert listener.hear(teller.tell(told)).numbers.by_key() == {keys.names[0]: update}


@pytest.mark.parametrize(
    ("others", "is_plain"),
    [
        ({}, True),
        ({"partial": True}, False),
        ({"measured": Values({"policy/kl": 0.1}, {}, 0, {})}, False),
        ({"snapshots": (object(),)}, False),
        ({"witnesses": (object(),)}, False),
    ],
)
def test_what_else_there_is_takes_the_longer_way(others: dict[str, Any], is_plain: bool) -> None:
    assert measured(Numbers(Keys(()), b""), **others).plain is is_plain


def test_a_count_that_is_too_large_is_recorded_all_the_same(tmp_path: Path) -> None:
    env_step = 1 << 70
    with Telemetry(run_dir=tmp_path) as telemetry:
        telemetry.expect_updates(candidates=tuple, open_update=UpdateData)
        for step in (1, env_step):
            telemetry.log({"my/number": 1.0})
            telemetry.flush(env_step=step)

    assert [record.axes.env_step for record in read_run(tmp_path).records] == [1, env_step]


def test_the_run_is_announced_before_its_first_numbers(tmp_path: Path) -> None:
    """Also where a trainer is attached, whose updates the process makes from the start, and where the run goes on."""
    for resume in (False, True):
        with Telemetry(run_dir=tmp_path, resume=resume) as telemetry:
            telemetry.expect_updates(candidates=tuple, open_update=UpdateData)
            for step in (1, 2):
                telemetry.log({"my/number": 1.0})
                telemetry.flush(env_step=step + 2 * resume)

    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["run", "record", "record", "end"] * 2
