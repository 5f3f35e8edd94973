"""Calls from signal handlers and several threads: none deadlocks, tears a line or ends training."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import run_python

from esper_telemetry import RunStatus, Telemetry, read_run
from esper_telemetry.core.interrupts import SerialCalls
from esper_telemetry.journal.file import Journal

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: no worker")


@pytest.fixture
def handler() -> Iterator[Callable[[Callable[[], object]], object]]:
    """Set the handler of SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda call: signal.signal(signal.SIGUSR1, lambda *_: call())
    signal.signal(signal.SIGUSR1, before)


def update(telemetry: Telemetry, number: int) -> None:
    telemetry.log({"my/number": float(number)})
    telemetry.flush(env_step=number)


def numbers(run_dir: Path) -> list[float]:
    rows = [record.values for record in read_run(run_dir).records]
    return [values["my/number"] for values in rows if "my/number" in values]


CALLS: dict[str, Callable[[Telemetry], object]] = {
    "close": lambda telemetry: telemetry.close("preempted"),
    "state_dict": lambda telemetry: telemetry.state_dict(),
    "flush": lambda telemetry: telemetry.flush(env_step=99),
    "log": lambda telemetry: telemetry.log({"my/other": 1.0}),
    "notify_intervention": lambda telemetry: telemetry.notify_intervention("by a handler"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("leaves", [False, True])
def test_a_signal_handler_may_call_anything_while_the_journal_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: Any, call: str, leaves: bool
) -> None:
    """The signal arrives while the third record is written, and again during the fourth. `leaves` ends the handler with sys.exit."""
    telemetry = Telemetry(run_dir=tmp_path)
    write, marks = os.write, [b'"my/number":3', b'"my/number":4']

    def interrupted(descriptor: int, data: bytes) -> int:
        if marks and marks[0] in data:
            del marks[0]
            write(descriptor, data[:10])
            signal.raise_signal(signal.SIGUSR1)
            return 10
        return write(descriptor, data)

    def handle() -> None:
        CALLS[call](telemetry)
        if leaves:
            raise SystemExit(0)

    handler(handle)
    monkeypatch.setattr("esper_telemetry.journal.file.os.write", interrupted)
    try:
        with telemetry:
            for number in range(1, 6):
                update(telemetry, number)
    except SystemExit:
        assert leaves

    run = read_run(tmp_path)
    assert numbers(tmp_path)[:3] == [1.0, 2.0, 3.0]
    assert not run.damaged and run.status is not None
    lines = (tmp_path / "journal.jsonl").read_bytes().splitlines()
    assert [line for line in lines if not isinstance(json.loads(line), dict)] == []


SIGTERM = """
import os, signal, sys, threading, time
from esper_telemetry import Telemetry

telemetry = Telemetry(run_dir=sys.argv[1], offload=sys.argv[2] == "worker")

def handle(*_):
    state = telemetry.state_dict()
    telemetry.close("preempted")
    print(state["update"])
    sys.exit(0)

signal.signal(signal.SIGTERM, handle)
delay = float(sys.argv[3])
threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGTERM)), daemon=True).start()
update = 0
while True:
    update += 1
    telemetry.log({f"my/number_{i}": float(update) for i in range(50)})
    telemetry.flush(env_step=update)
"""


@pytest.mark.system
@pytest.mark.parametrize("place", ["training process", "worker"])
def test_a_sigterm_that_saves_and_closes_at_any_moment_leaves_a_whole_journal(tmp_path: Path, place: str) -> None:
    for moment in range(8):
        run_dir = tmp_path / str(moment)
        ended = run_python("-c", SIGTERM, run_dir, place, str(0.6 + 0.0137 * moment), one_core=False)

        assert ended.returncode == 0, ended.stderr
        run = read_run(run_dir)
        assert not run.damaged and run.status is RunStatus.PREEMPTED
        updates = [record.axes.update for record in run.records]
        assert updates == [*range(1, len(updates) + 1)]
        assert int(ended.stdout) - len(updates) in (0, -1)  # a handler may run before the current update is counted


@pytest.mark.system
@two_cores
@pytest.mark.parametrize("offload", [True, False])
def test_threads_may_flush_save_and_note_side_by_side(tmp_path: Path, offload: bool) -> None:
    telemetry = Telemetry(run_dir=tmp_path, offload=offload)
    errors: list[BaseException] = []

    def repeat(call: Callable[[int], object]) -> None:
        try:
            for number in range(1, 101):
                call(number)
        except BaseException as error:
            errors.append(error)

    def save(number: int) -> None:
        if number % 10 == 0:
            telemetry.state_dict()

    calls = [
        *[lambda number: update(telemetry, number)] * 2,
        save,
        lambda number: telemetry.notify_intervention(str(number)) if number % 20 == 0 else None,
    ]
    threads = [threading.Thread(target=repeat, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    telemetry.close()

    assert not errors
    run = read_run(tmp_path)
    assert len(run.records) == 200 and not run.damaged and run.status is RunStatus.FINISHED


def test_a_callback_may_wait_for_a_thread_that_logs(tmp_path: Path) -> None:
    """Alarm callbacks run outside all other calls."""
    telemetry = Telemetry(run_dir=tmp_path)

    def callback(alarm: object) -> None:
        thread = threading.Thread(target=telemetry.log, args=({"my/other": 1.0},))
        thread.start()
        thread.join(20)
        assert not thread.is_alive()

    telemetry.on_alarm(callback)
    with telemetry:
        telemetry.log({"numerics/nonfinite": 5.0})
        telemetry.flush(env_step=1)
        telemetry.flush(env_step=2)

    assert [record.values.get("my/other") for record in read_run(tmp_path).records] == [None, 1.0]


def test_a_call_that_interrupts_another_comes_after_it() -> None:
    calls, order = SerialCalls(), list[str]()

    def outer() -> str:
        order.append("begin")
        assert calls.run(lambda: order.append("inner"), deferred=None) is None
        order.append("end")
        return "result"

    assert calls.run(outer, deferred="") == "result"
    assert order == ["begin", "end", "inner"]


def test_what_a_deferred_call_raises_does_not_reach_the_interrupted_one(caplog: pytest.LogCaptureFixture) -> None:
    calls = SerialCalls()

    assert calls.run(lambda: calls.run(lambda: 1 / 0, deferred=2.0), deferred=0.0) == 2.0
    (warned,) = caplog.records
    assert "ZeroDivisionError" in warned.getMessage()


def test_an_exception_between_a_write_and_its_result_costs_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, write, presses = Journal.create(tmp_path), os.write, [KeyboardInterrupt()]

    def interrupted(descriptor: int, data: bytes) -> int:
        count = write(descriptor, data[:20])
        if presses:
            raise presses.pop()
        return count

    monkeypatch.setattr("esper_telemetry.journal.file.os.write", interrupted)
    line = {"kind": "event", "seq": 1, "type": "note", "data": {"text": "x" * 100}}
    with pytest.raises(KeyboardInterrupt):
        journal.write(line)
    journal.write(line)
    journal.close()

    assert [json.loads(text) for text in journal.path.read_text().splitlines()] == [line, line]


def test_calls_that_come_faster_than_they_are_served_neither_nest_nor_hold_training_up() -> None:
    """Each of ten thousand calls is interrupted by the next one. Every call by the training serves two of them."""
    calls, served = SerialCalls(), list[int]()

    def interrupted() -> None:
        served.append(len(served))
        if len(served) < 10_000:
            calls.run(interrupted, deferred=None)

    calls.run(interrupted, deferred=None)
    assert len(served) == 2
    while len(served) < 10_000:
        before = len(served)
        calls.run(lambda: None, deferred=None)
        assert 0 < len(served) - before <= 2


def test_a_question_that_interrupts_a_call_is_answered_at_once_and_not_asked_again() -> None:
    calls, asked = SerialCalls(), list[str]()

    def answer() -> str:
        asked.append("again")
        return "counted"

    assert calls.run(lambda: calls.run(answer, deferred="known", is_question=True), deferred="") == "known"
    assert asked == [] and calls.run(answer, deferred="known", is_question=True) == "counted"
