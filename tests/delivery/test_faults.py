"""Real faults: processes are killed, sinks hang, the parent dies."""

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from journals import add, begun, end
from recording import DyingClientSink, HangingOnceSink, HangingSink, LocalSink, RecordingSink, calls, seqs, statuses
from waiting import wait_until

from esper_telemetry.core.record import RunStatus
from esper_telemetry.delivery import process as process_module
from esper_telemetry.delivery.live import Deliveries
from esper_telemetry.delivery.status import SinkState, read_status
from esper_telemetry.journal.read import read_run

pytestmark = pytest.mark.system

TRAINER = textwrap.dedent("""
    import os, sys, time
    from pathlib import Path
    from journals import add, begun, end
    from recording import RecordingSink, seqs
    from waiting import wait_until
    from esper_telemetry.delivery.live import Deliveries

    tmp_path = Path(sys.argv[1])
    journal = begun(tmp_path / "run")
    deliveries = Deliveries(journal, [RecordingSink(tmp_path / "fast", "fast"), RecordingSink(tmp_path / "slow", "slow", 0.05)])
""")
END = "end(journal)\nassert deliveries.close(20).complete\njournal.close()\n"


def trainer(tmp_path: Path, script: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    script_file = tmp_path / "trainer.py"
    script_file.write_text(TRAINER + textwrap.dedent(script))
    command = [sys.executable, str(script_file), str(tmp_path)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)


def run_to_its_end(tmp_path: Path, script: str) -> None:
    process = trainer(tmp_path, textwrap.dedent(script) + END)
    errors = process.communicate()[1]
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize("forked_worker", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_killed_trainer_loses_nothing_and_its_runs_end_as_killed(tmp_path: Path, forked_worker: bool) -> None:
    """While a forked worker lives, the child's input stays open: the child must notice that its parent has changed."""
    worker = "if os.fork() == 0: time.sleep(15), os._exit(0)\n" if forked_worker else ""
    opened = "wait_until((tmp_path / 'fast').exists, 'the fast sink to be opened')\n"
    process = trainer(tmp_path, opened + worker + "add(journal, range(1, 2_001))\ntime.sleep(60)\n")
    wait_until(lambda: seqs(tmp_path / "fast"), "records in the fast sink")
    process.kill()
    process.wait()

    wait_until(lambda: statuses(tmp_path / "fast") and statuses(tmp_path / "slow"), "both sinks to be closed")

    run = read_run(tmp_path / "run")
    recorded_seqs = [record.seq for record in run.records]
    assert run.status is RunStatus.KILLED
    assert recorded_seqs == list(range(1, len(recorded_seqs) + 1))
    assert seqs(tmp_path / "fast") == seqs(tmp_path / "slow") == recorded_seqs
    assert statuses(tmp_path / "fast") == statuses(tmp_path / "slow") == ["killed"]
    assert process.stderr is not None
    process.stderr.close()


def test_an_interrupt_of_the_whole_group_leaves_the_end_to_the_trainer(tmp_path: Path) -> None:
    script = """
        import signal
        wait_until((tmp_path / "fast").exists, "the fast sink to be opened")
        add(journal, range(1, 11))
        child = deliveries.child_pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(child, number)
        add(journal, range(11, 21))
        wait_until(lambda: seqs(tmp_path / "fast")[-1:] == [20], "the records after the signals")
        assert deliveries.child_pid == child
    """
    run_to_its_end(tmp_path, script)

    assert statuses(tmp_path / "fast") == ["finished"]


def test_a_forked_copy_of_the_trainer_delivers_and_closes_nothing(tmp_path: Path) -> None:
    script = """
        if os.fork() == 0:
            add(journal, range(1, 11))
            end(journal)
            assert deliveries.close(0).sinks == ()
            os._exit(0)
        assert os.wait()[1] == 0
        add(journal, range(1, 11))
    """
    run_to_its_end(tmp_path, script)

    assert seqs(tmp_path / "fast") == list(range(1, 11))


def test_a_script_without_a_main_guard_is_run_once(tmp_path: Path) -> None:
    script = """
        with open(tmp_path / "runs", "a") as file:
            file.write("x")
    """
    run_to_its_end(tmp_path, script)

    assert (tmp_path / "runs").read_text() == "x"


def test_a_killed_child_is_started_again_and_nothing_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Records of the killed child's last second may arrive twice; first deliveries are in order."""
    journal, sink = begun(tmp_path / "run"), RecordingSink(tmp_path / "a")
    deliveries = Deliveries(journal, [sink])
    add(journal, range(1, 11))
    wait_until(lambda: len(seqs(sink.file)) == 10, "ten records in the sink")
    first = deliveries.child_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    add(journal, range(11, 21))
    end(journal)

    with caplog.at_level(logging.WARNING):
        report = deliveries.close(20)

    assert report.complete
    assert sorted(set(seqs(sink.file))) == list(range(1, 21))
    assert seqs(sink.file)[-10:] == list(range(11, 21))
    assert statuses(sink.file) == ["finished"]
    assert len({call["pid"] for call in calls(sink.file)}) == 2
    assert [entry.getMessage() for entry in caplog.records] == [
        f"esper-telemetry: the process that feeds the sinks died (exit code -9) and is started again, see {tmp_path}/run/sinks.log"
    ]
    journal.close()


def test_a_dead_client_gets_a_fresh_process(tmp_path: Path) -> None:
    journal, sink = begun(tmp_path / "run", 2), DyingClientSink(tmp_path / "a")
    deliveries = Deliveries(journal, [sink])
    wait_until(lambda: seqs(sink.file) == [1, 2], "two records in the sink")
    add(journal, range(3, 6))
    end(journal)

    assert deliveries.close(20).complete

    assert seqs(sink.file) == [1, 2, 3, 4, 5]
    assert len({call["pid"] for call in calls(sink.file)}) == 2
    assert deliveries.stats().errors == 1
    journal.close()


def test_a_child_that_cannot_live_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("esper_telemetry.delivery.process.ENTRY", "raise SystemExit(3)")
    journal = begun(tmp_path / "run", 2)
    deliveries = Deliveries(journal, [RecordingSink(tmp_path / "a")])
    end(journal)

    with caplog.at_level(logging.WARNING):
        report = deliveries.close(20)

    assert [(sink.state, sink.pending) for sink in report.sinks] == [(SinkState.OPENING, 2)]
    assert [entry.getMessage().partition(", see")[0] for entry in caplog.records] == [
        "esper-telemetry: the process that feeds the sinks died (exit code 3) and is started again",
        "esper-telemetry: the process that feeds the sinks died again (exit code 3): it is given up",
    ]
    journal.close()


@pytest.mark.parametrize("kind", [HangingSink, type("HangingLocalSink", (HangingSink, LocalSink), {})])
def test_a_hanging_sink_cannot_make_closing_longer(tmp_path: Path, kind: type[RecordingSink]) -> None:
    journal, hanging = begun(tmp_path / "run", 5), kind(tmp_path / "hanging", "hanging")
    good = RecordingSink(tmp_path / "good", "good")
    deliveries = Deliveries(journal, [hanging, good])
    wait_until(lambda: calls(hanging.file)[1:] and seqs(good.file), "a call that hangs, and records in the other sink")
    child = deliveries.child_pid
    end(journal)

    report = deliveries.close(1.5)

    assert [(sink.name, sink.sent, sink.pending) for sink in report.sinks] == [("hanging", 0, 5), ("good", 5, 0)]
    assert report.sinks[0].command == f"esper_telemetry.replay('{tmp_path}/run', SINK)"
    assert not report.complete
    assert statuses(good.file) == ["finished"]
    wait_until(lambda: "pending" in read_status(tmp_path / "run")["hanging"], "the number of pending records in status.json")
    if report.sinks[0].goes_on:
        assert child is not None
        os.kill(child, signal.SIGKILL)
    entries = json.loads((tmp_path / "run" / "status.json").read_text())["sinks"]
    assert {name: (entry["sent"], entry["pending"]) for name, entry in entries.items()} == {"hanging": (0, 5), "good": (5, 0)}
    assert (entries["good"]["state"], entries["hanging"]["command"]) == ("closed", report.sinks[0].command)
    journal.close()


def test_a_client_that_hangs_is_killed_and_a_fresh_one_gets_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "MAX_CALL_SECONDS", 0.5)
    journal, sink = begun(tmp_path / "run", 2), HangingOnceSink(tmp_path / "a")
    good = RecordingSink(tmp_path / "good", "good")
    deliveries = Deliveries(journal, [sink, good])
    wait_until(lambda: deliveries.stats() and seqs(sink.file) == [1, 2], "two records in the sink")
    add(journal, range(3, 6))
    wait_until(lambda: deliveries.stats() and seqs(sink.file) == [1, 2, 3, 4, 5], "five records in the sink")
    end(journal)

    assert deliveries.close(20).complete

    assert len({call["pid"] for call in calls(sink.file)}) == 2
    assert seqs(good.file) == [1, 2, 3, 4, 5]
    journal.close()


@pytest.mark.slow
def test_a_sink_that_always_hangs_is_given_up_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_module, "MAX_CALL_SECONDS", 0.3)
    journal, good = begun(tmp_path / "run", 2), RecordingSink(tmp_path / "good", "good")
    deliveries = Deliveries(journal, [HangingSink(tmp_path / "hanging", "hanging"), good])

    with caplog.at_level(logging.ERROR):
        wait_until(lambda: deliveries.stats().sinks["hanging"].state is SinkState.DISABLED, "the hanging sink to be disabled")
    add(journal, range(3, 6))
    end(journal)
    report = deliveries.close(20)

    hanging, fine = report.sinks
    assert (hanging.state, hanging.pending) == (SinkState.DISABLED, 5)
    assert (fine.state, fine.pending) == (SinkState.CLOSED, 0)
    assert sorted(set(seqs(good.file))) == [1, 2, 3, 4, 5]
    assert [entry.getMessage() for entry in caplog.records if entry.levelno == logging.ERROR] == [
        "esper-telemetry: sink hanging is DISABLED for this run: it hung 3 times in a row for 0.3 s"
    ]
    journal.close()


def test_a_child_that_is_frozen_is_killed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a client that never releases the interpreter lock."""
    monkeypatch.setattr(process_module, "MAX_SILENT_SECONDS", 6.0)
    journal, sink = begun(tmp_path / "run", 2), RecordingSink(tmp_path / "a")
    deliveries = Deliveries(journal, [sink])
    wait_until(lambda: seqs(sink.file) == [1, 2], "two records in the sink")
    frozen = deliveries.child_pid
    assert frozen is not None
    os.kill(frozen, signal.SIGSTOP)
    add(journal, range(3, 6))

    wait_until(lambda: deliveries.child_pid not in (None, frozen), "a new sink process")
    end(journal)

    assert deliveries.close(20).complete
    assert sorted(set(seqs(sink.file))) == [1, 2, 3, 4, 5]
    journal.close()
