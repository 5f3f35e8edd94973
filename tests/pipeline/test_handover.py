"""A loop of one's own whose records move to a process beside it, once they cost enough: nothing is lost, doubled or told otherwise."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest

from esper_telemetry import RunInfo, RunStatus, Telemetry, read_run
from esper_telemetry.pipeline import worker as handover
from esper_telemetry.pipeline.run import Recorder
from esper_telemetry.pipeline.worker import OffloadedWriter

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing is handed over")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of five records is long enough."""
    monkeypatch.setattr(handover, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(handover, "WORTH_RECORDS", 5)


def recorder(telemetry: Telemetry) -> Recorder:
    found = telemetry._recorder
    assert isinstance(found, Recorder)
    return found


def updates(telemetry: Telemetry, first: int = 1) -> Iterator[int]:
    """Logs and flushes for ever, as a loop that takes next to no time itself; yields the updates."""
    update = first
    while True:
        telemetry.log({"my/number": float(update), "policy/kl": 0.01 + 0.005 * math.sin(update)})
        telemetry.flush(env_step=update)
        yield update
        update += 1


def handed_over(telemetry: Telemetry, running: Iterator[int]) -> tuple[int, OffloadedWriter]:
    """The first update that was made elsewhere, and by whom."""
    deadline = time.monotonic() + 60
    for update in running:
        if recorder(telemetry).offloaded:
            writer = recorder(telemetry)._writer
            assert isinstance(writer, OffloadedWriter)
            return update + 1, writer
        assert time.monotonic() < deadline
        time.sleep(0.01)
    raise AssertionError


def numbers(run_dir: Path) -> list[float]:
    return [record.values["my/number"] for record in read_run(run_dir).records]


def counted(last: int) -> list[float]:
    return [float(update) for update in range(1, last + 1)]


def test_records_go_on_where_they_were_and_histories_with_them(tmp_path: Path) -> None:
    """The averages of a key are those of a run whose records were all made in one place."""
    telemetry = Telemetry(run_dir=tmp_path / "moved")
    running = updates(telemetry)
    first, _ = handed_over(telemetry, running)
    while next(running) < first + 30:
        pass
    telemetry.close()
    with Telemetry(run_dir=tmp_path / "stayed", offload=False) as alone:
        for update in updates(alone):
            if update == first + 30:
                break
    moved, stayed = read_run(tmp_path / "moved"), read_run(tmp_path / "stayed")

    assert moved.status is RunStatus.FINISHED
    assert numbers(tmp_path / "moved") == counted(first + 30)
    assert {"policy/kl/ema", "policy/kl/ew_std"} <= moved.records[-1].values.keys()
    for one, other in zip(moved.records, stayed.records, strict=True):
        assert _lasting(one.values) == _lasting(other.values)


def _lasting(values: Mapping[str, float]) -> dict[str, float]:
    """What does not depend on the machine: not how long things took, and not what is said of that."""
    return {key: value for key, value in values.items() if key.startswith(("my/", "policy/"))}


def test_sinks_get_every_record_once(tmp_path: Path) -> None:
    got: list[float] = []
    telemetry = Telemetry([lambda record: got.append(record.values["my/number"])], run_dir=tmp_path)
    running = updates(telemetry)
    last, _ = handed_over(telemetry, running)
    next(running)
    report = telemetry.close()

    assert report is not None
    assert report.complete
    assert got == counted(last)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_process_that_dies_or_hangs_gives_the_records_back(
    tmp_path: Path, how: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry(run_dir=tmp_path, close_timeout=4.0)
    running = updates(telemetry)
    last, writer = handed_over(telemetry, running)
    next(running)
    os.kill(writer.pid, how)
    with caplog.at_level(logging.WARNING, "esper_telemetry"):
        while next(running) < last + 20:
            pass
        telemetry.close()

    assert numbers(tmp_path) == counted(last + 20)
    assert read_run(tmp_path).status is RunStatus.FINISHED


def test_a_process_that_dies_while_it_learns_is_no_loss(tmp_path: Path) -> None:
    telemetry = Telemetry(run_dir=tmp_path)
    running = updates(telemetry)
    while (beside := _learning(telemetry)) is None:
        next(running)
    os.kill(beside.pid, signal.SIGKILL)
    last, _ = handed_over(telemetry, running)
    while next(running) < last + 5:
        pass
    telemetry.close()

    assert numbers(tmp_path) == counted(last + 5)


def test_a_run_that_ends_while_the_process_learns_does_not_wait_for_it(tmp_path: Path) -> None:
    telemetry = Telemetry(run_dir=tmp_path)
    running = updates(telemetry)
    while _learning(telemetry) is None:
        last = next(running)
    began = time.monotonic()
    telemetry.close()

    assert time.monotonic() - began < 2.0
    assert numbers(tmp_path) == counted(last)
    assert not (tmp_path / "writer.lock").exists()


def _learning(telemetry: Telemetry) -> OffloadedWriter | None:
    hand_over = recorder(telemetry)._hand_over
    return None if hand_over is None else hand_over._learning


@pytest.mark.parametrize("pause", [0.0, 1.0])
def test_only_a_loop_that_records_slow_down_has_a_process(pause: float) -> None:
    """A millisecond per record is nothing beside a second, and everything beside nothing."""

    def start() -> OffloadedWriter:
        raise ChildProcessError

    weighed = handover.HandOver(start)
    for _ in range(100):
        weighed.weigh(0.001, 0.001 + pause)
    with nullcontext() if pause else pytest.raises(ChildProcessError):
        assert weighed.writer(RunInfo("run", "run", None, 0.0)) is None


@pytest.mark.parametrize("settings", [{"offload": False}, {"run_dir": None}])
def test_who_wants_no_process_gets_none(tmp_path: Path, settings: dict[str, object]) -> None:
    with Telemetry(**{"run_dir": tmp_path / "run", **settings}) as telemetry:  # type: ignore[arg-type]  # one at a time
        for update in updates(telemetry):
            assert recorder(telemetry)._hand_over is None
            if update == 20:
                break
