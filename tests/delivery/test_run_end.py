"""The end of a run with undelivered records is as safe as the end of a killed trainer."""

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import run_python
from journals import Clock, add, begun, end
from recording import GatedSink, LocalSink, RecordingSink, calls, gate, seqs, statuses
from waiting import wait_until

from esper_telemetry import Telemetry
from esper_telemetry.cli.arguments import WrongUse
from esper_telemetry.cli.main import run as run_command
from esper_telemetry.core.record import RunStatus
from esper_telemetry.delivery import live as waiting
from esper_telemetry.delivery.catch_up import doctor, replay
from esper_telemetry.delivery.live import Deliveries, DeliveryWait
from esper_telemetry.delivery.status import CURSORS_NAME, STATUS_NAME, SinkState, SinkStatus, read_status
from esper_telemetry.journal.lock import Role, holder_pid, is_held
from esper_telemetry.pipeline.run_recorder import lease_existing_run

pytestmark = pytest.mark.system

SCRIPT = textwrap.dedent("""
    import sys
    from pathlib import Path
    from journals import begun, end
    from recording import GatedSink
    from esper_telemetry.delivery.live import Deliveries

    tmp_path = Path(sys.argv[1])
    journal = begun(tmp_path / "run", 3)
    deliveries = Deliveries(journal, [GatedSink(tmp_path / "slow", "slow")])
    end(journal)
""")


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Path]:
    """The directory of a run that ended while its backend was opening. The fixture waits for the remaining process."""
    journal = begun(tmp_path / "run", 3)
    deliveries = Deliveries(journal, [GatedSink(tmp_path / "slow", "slow"), RecordingSink(tmp_path / "good", "good")])
    wait_until(lambda: seqs(tmp_path / "good"), "records in the good sink")
    end(journal)
    report = deliveries.close(0.5)
    journal.close()
    assert [(sink.name, sink.pending, sink.goes_on) for sink in report.sinks] == [("slow", 3, True), ("good", 0, False)]
    assert str(report.sinks[0]) == "slow: opening, 0 records sent, 3 pending; a background process continues"
    yield tmp_path / "run"
    open_gate(tmp_path)


def open_gate(tmp_path: Path) -> None:
    gate(tmp_path / "slow").touch()
    wait_until(lambda: not is_held(tmp_path / "run", Role.SINKS), "the end of the sink process")


def script(tmp_path: Path, last_lines: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", SCRIPT + textwrap.dedent(last_lines), str(tmp_path)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)


def delivered(tmp_path: Path, status: str = "finished") -> None:
    assert seqs(tmp_path / "slow") == [1, 2, 3]
    assert statuses(tmp_path / "slow") == [status]


def test_a_backend_that_opens_late_gets_everything_after_the_end(tmp_path: Path, left: Path) -> None:
    status = read_status(left)
    assert status["slow"]["under_way"]
    assert (status["good"]["under_way"], status["good"]["state"]) == (False, "closed")

    open_gate(tmp_path)

    delivered(tmp_path)
    assert seqs(tmp_path / "good") == [1, 2, 3]
    slow = read_status(left)["slow"]
    assert (slow["under_way"], slow["state"], slow["sent"], slow["pending"]) == (False, "closed", 3, 0)
    assert len({call["pid"] for call in calls(tmp_path / "slow")}) == 1


def test_a_forked_worker_keeps_nothing_from_going_on(tmp_path: Path) -> None:
    """The worker holds the pipe open that the sink process listens to."""
    last_lines = """
        import os, signal
        if os.fork() == 0:
            signal.pause()
        deliveries.close(0.1)
        print("closed", flush=True)
        signal.pause()
    """
    process = script(tmp_path, last_lines)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        # the sink process writes this once it is an orphan
        wait_until(lambda: read_status(tmp_path / "run")["slow"].get("pending") == 3, "the orphan's status")
        open_gate(tmp_path)
    finally:
        os.killpg(os.getpgid(process.pid), 0)
        for pid in (*children_of(process.pid), process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    delivered(tmp_path)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_interrupt_ends_the_wait_and_leaves_the_process(tmp_path: Path) -> None:
    last_lines = """
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        try:
            print("closing", flush=True)
            deliveries.close(600.0)
        except KeyboardInterrupt:
            assert [sink.goes_on for sink in deliveries.close(1.0).sinks] == [True]
            print("interrupted", flush=True)
    """
    process = script(tmp_path, last_lines)
    assert process.stdout is not None
    assert process.stdout.readline() == "closing\n"
    process.send_signal(signal.SIGINT)

    assert process.communicate()[0] == "interrupted\n"
    assert process.returncode == 0
    open_gate(tmp_path)
    delivered(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_trainer_that_is_killed_while_it_waits_leaves_the_end_as_it_is(tmp_path: Path, number: signal.Signals) -> None:
    process = script(tmp_path, "print('closing', flush=True)\ndeliveries.close(600.0)\n")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    process.communicate()

    open_gate(tmp_path)
    delivered(tmp_path)


def test_closing_again_does_not_end_what_goes_on(tmp_path: Path) -> None:
    """The disk refused the end line, so the status is what the trainer said."""
    journal = begun(tmp_path / "run", 3)
    deliveries = Deliveries(journal, [GatedSink(tmp_path / "slow", "slow")])
    report = deliveries.close(0.1, status=RunStatus.PREEMPTED)

    assert deliveries.close(60.0) is report
    assert is_held(tmp_path / "run", Role.SINKS)
    open_gate(tmp_path)
    delivered(tmp_path, "preempted")
    journal.close()


def test_telemetry_that_nobody_closes_says_in_one_line_what_goes_on(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from recording import GatedSink
        from esper_telemetry import Telemetry

        tmp_path = Path(sys.argv[1])
        telemetry = Telemetry([GatedSink(tmp_path / "slow", "slow")], run_dir=tmp_path / "run", close_timeout=0.5)
        for update in range(1, 4):
            telemetry.log({"my/number": 1.0})
            telemetry.flush(env_step=update)
    """
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = run_python("-c", textwrap.dedent(code), tmp_path, env={**os.environ, "PYTHONPATH": path})

    assert done.stderr.splitlines() == [
        "esper-telemetry: not everything is delivered yet: slow (3 records). A background process continues for at most 5 minutes. Run "
        f"`esper-telemetry doctor {tmp_path}/run` to see whether it is done, and how to send the rest if the machine or container "
        "stops before."
    ]
    open_gate(tmp_path)
    delivered(tmp_path)


def test_an_interrupted_close_has_closed_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run can be resumed, and the caller receives the interrupt."""
    telemetry = Telemetry([LocalSink(tmp_path / "local")], run_dir=tmp_path / "run")
    telemetry.flush(env_step=1)

    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(DeliveryWait, "goes_on", interrupted)
    with pytest.raises(KeyboardInterrupt):
        telemetry.close()

    assert telemetry.close() is None
    assert not is_held(tmp_path / "run", Role.TRAINER)


def test_doctor_tells_that_it_goes_on_and_when_it_is_done(tmp_path: Path, left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(left).under_way
    run_command(["doctor", str(left)])
    output = capsys.readouterr().out
    assert "ended as finished, and a background process still delivers it" in output
    assert "still being delivered" in output
    open_gate(tmp_path)

    run_command(["doctor", str(left)])
    output = capsys.readouterr().out
    assert "the run ended as finished\n" in output
    assert "still" not in output


def test_a_process_that_hangs_is_named(tmp_path: Path, left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is stopped, and has written nothing for ten minutes."""
    pid = int(holder_pid(left, Role.SINKS))
    os.kill(pid, signal.SIGSTOP)
    try:
        for name in (STATUS_NAME, CURSORS_NAME):
            if (left / name).is_file():
                os.utime(left / name, (time.time() - 600,) * 2)
        sentence = f"the background process {pid} hangs: it has delivered nothing for 10 minutes. End it with `kill -9 {pid}`"
        with pytest.raises(BlockingIOError, match=sentence):
            replay(left, RecordingSink(tmp_path / "slow", "slow"))
        run_command(["doctor", str(left)])
        assert sentence in capsys.readouterr().out
    finally:
        os.kill(pid, signal.SIGCONT)
        open_gate(tmp_path)
    delivered(tmp_path)


def test_a_replay_waits_for_the_process_that_goes_on(tmp_path: Path, left: Path, caplog: pytest.LogCaptureFixture) -> None:
    reports: list[Any] = []
    sink = RecordingSink(tmp_path / "slow", "slow")
    thread = threading.Thread(target=lambda: reports.append(replay(left, sink)))
    with caplog.at_level(logging.WARNING):
        thread.start()
        wait_until(lambda: "waiting for the background process that delivers" in caplog.text, "the replay to wait")
        assert replay(left, RecordingSink(tmp_path / "another", "another")).complete, "the other sink has its own delivery"
        assert not reports
        open_gate(tmp_path)
        thread.join()

    delivered(tmp_path)
    assert (reports[0].complete, reports[0].sinks[0].sent) == (True, 0)


def test_a_replay_into_what_the_trainer_itself_delivers_is_refused(tmp_path: Path) -> None:
    with Telemetry([GatedSink(tmp_path / "slow", "slow")], run_dir=tmp_path / "run") as telemetry:
        telemetry.flush(env_step=1)
        with pytest.raises(BlockingIOError, match=f"{tmp_path}/run is still being trained, and delivers to slow itself"):
            replay(tmp_path / "run", RecordingSink(tmp_path / "slow", "slow"))
        gate(tmp_path / "slow").touch()


def test_a_run_that_is_being_delivered_is_neither_resumed_nor_compressed(
    tmp_path: Path, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper_telemetry.pipeline.run_recorder.MAX_HELPER_SECONDS", 0.1)
    with pytest.raises(BlockingIOError, match="still delivers records from before the run stopped"):
        lease_existing_run(left)
    with pytest.raises(WrongUse, match="is still being trained, or delivered"):
        run_command(["compress", str(left)])
    open_gate(tmp_path)

    assert run_command(["compress", str(left)]) == 0
    lease_existing_run(left).release()


def test_a_resumed_run_begins_where_the_process_that_went_on_has_ended(tmp_path: Path, left: Path) -> None:
    gate(tmp_path / "slow").touch()
    claim = lease_existing_run(left)
    sink = RecordingSink(tmp_path / "slow", "slow")
    deliveries = Deliveries(claim.journal, [sink])
    add(claim.journal, range(4, 6))
    end(claim.journal)

    assert deliveries.close().complete

    claim.release()
    assert seqs(sink.file) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("state", "last_record", "seconds"),
    [
        (SinkState.DELIVERING, 1000.0, 60.0),
        (SinkState.DELIVERING, 20.0, 35.0),
        (SinkState.OPENING, 0.0, 60.0),
        (SinkState.RETRYING, 0.0, 15.0),
    ],
)
def test_the_wait_goes_on_while_a_backend_opens_or_takes_records(
    state: SinkState, last_record: float, seconds: float, clock: Clock
) -> None:
    """There is a record every 10 s until the last one. The wait ends after 15 s without a record, and at its cap of 60 s."""
    clock.now = 0.0
    wait = DeliveryWait(60.0)
    while wait.goes_on([SinkStatus("slow", state, int(min(clock.now, last_record) // 10))]):
        clock.now += 1.0

    assert clock.now == seconds


def test_a_wait_says_for_what_once_it_is_longer_than_some_seconds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal shows a counting line that disappears, a log one line."""
    opening = [SinkStatus("mlflow", SinkState.OPENING), SinkStatus("wandb", SinkState.CLOSED)]
    for terminal in (False, True):
        monkeypatch.setattr(waiting, "_on_terminal", lambda terminal=terminal: terminal)
        clock.now = 0.0
        wait = DeliveryWait(60.0)
        for clock.now in (0.0, 3.0, 12.0, 12.1, 13.0):
            wait.goes_on(opening)
        wait.end()

    log, _, lines = capsys.readouterr().err.partition("\n")
    assert log == "esper-telemetry: delivering to mlflow (12 s)... Ctrl-C leaves it to a background process"
    erase, hint = "\r\x1b[2K", "... Ctrl-C leaves it to a background process"
    assert lines == f"{erase}delivering to mlflow (12 s){hint}{erase}delivering to mlflow (13 s){hint}{erase}"


def test_status_says_of_every_sink_from_the_beginning_that_it_is_under_way(tmp_path: Path) -> None:
    journal = begun(tmp_path / "run", 1)
    deliveries = Deliveries(journal, [LocalSink(tmp_path / "a")])
    sinks = json.loads((tmp_path / "run" / "status.json").read_text())["sinks"]
    assert sinks["recording"]["under_way"]
    end(journal)
    deliveries.close()

    assert not read_status(tmp_path / "run")["recording"]["under_way"]
    journal.close()
