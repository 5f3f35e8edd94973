import logging
import os
from pathlib import Path

import pytest
from journals import add, end
from recording import HangingSink, HopelessSink, LocalSink, NoisySink, RecordingSink, StartingSink, calls, seqs, statuses
from waiting import wait_until

from esper_telemetry.core.record import RunStatus
from esper_telemetry.delivery.live import Deliveries
from esper_telemetry.delivery.status import SinkState
from esper_telemetry.journal.file import Journal

pytestmark = pytest.mark.system


def test_sinks_in_the_child_and_in_threads_get_everything_once_and_in_order(tmp_path: Path, journal: Journal) -> None:
    remote, slow = RecordingSink(tmp_path / "remote", "remote"), RecordingSink(tmp_path / "slow", "slow", delay=0.2)
    local = LocalSink(tmp_path / "local", "local")
    deliveries = Deliveries(journal, [remote, local, slow])
    add(journal, range(1, 301))
    assert deliveries.stats().queue_depth == 300
    wait_until(lambda: deliveries.stats().queue_depth == 0, "all records in the sinks")
    assert deliveries.stats().sinks["slow"].records == 300
    end(journal)

    report = deliveries.close(20)

    assert report.complete
    assert deliveries.close(20) is report
    assert deliveries.child_pid is None
    assert [(sink.name, sink.sent, sink.pending) for sink in report.sinks] == [("remote", 300, 0), ("local", 300, 0), ("slow", 300, 0)]
    assert all(seqs(sink.file) == list(range(1, 301)) for sink in (remote, local, slow))
    assert all(statuses(sink.file) == ["finished"] for sink in (remote, local, slow))
    assert calls(local.file)[0]["pid"] == os.getpid() != calls(remote.file)[0]["pid"]
    assert calls(remote.file)[0]["pid"] == calls(slow.file)[0]["pid"]


def test_sinks_of_one_name_are_told_apart(tmp_path: Path, journal: Journal) -> None:
    deliveries = Deliveries(journal, [LocalSink(tmp_path / "a"), LocalSink(tmp_path / "b")])

    assert list(deliveries.stats().sinks) == ["recording", "recording-2"]
    deliveries.close(20)


def test_what_the_child_is_told_is_shown_here_once(tmp_path: Path, journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    deliveries = Deliveries(journal, [HopelessSink(tmp_path / "a"), RecordingSink(tmp_path / "b", "good")])
    add(journal, range(1, 4))
    end(journal)

    with caplog.at_level(logging.WARNING):
        report = deliveries.close(20)

    assert [entry.getMessage() for entry in caplog.records] == [
        "esper-telemetry: sink recording is DISABLED for this run: PermanentSinkError: the key was revoked"
    ]
    hopeless, good = report.sinks
    assert (hopeless.state, hopeless.pending) == (SinkState.DISABLED, 3)
    assert hopeless.command == f"esper_telemetry.replay('{tmp_path}/run', SINK)"
    assert (good.state, good.pending, good.command) == (SinkState.CLOSED, 0, "")
    assert str(good) == "good: closed, 3 records sent"
    assert deliveries.stats().errors == 1


def test_backends_print_into_the_log_and_cannot_ask_and_a_warning_reaches_the_trainer(
    tmp_path: Path, journal: Journal, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    deliveries = Deliveries(journal, [NoisySink(tmp_path / "a")])
    end(journal)

    assert deliveries.close(20).complete

    assert capfd.readouterr() == ("", "")
    assert "noise of a backend" in (tmp_path / "run" / "sinks.log").read_text()
    assert [record.getMessage() for record in caplog.records] == ["esper-telemetry: 2 keys are left out"]


def test_processes_that_a_sink_starts_do_not_import_from_the_folders_of_the_trainer(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink's class is on the import path of the trainer, which also gets the folder `scripts`."""
    monkeypatch.syspath_prepend(tmp_path / "scripts")
    sink = StartingSink(tmp_path / "a")
    deliveries = Deliveries(journal, [sink])
    end(journal)

    assert deliveries.close(20).complete

    (path,) = [call["path"] for call in calls(sink.file) if call["call"] == "open"]
    assert str(tmp_path / "scripts") not in path
    assert str(Path(__file__).parent) not in path


def test_a_sink_that_cannot_be_pickled_is_named(tmp_path: Path, journal: Journal) -> None:
    class Nested(RecordingSink):
        pass

    with pytest.raises(TypeError, match="sink nested runs in another process and cannot be pickled"):
        Deliveries(journal, [Nested(tmp_path / "a", "nested")])


def test_a_run_whose_end_could_not_be_written_ends_with_the_given_status(tmp_path: Path, journal: Journal) -> None:
    remote, local = RecordingSink(tmp_path / "remote", "remote"), LocalSink(tmp_path / "local", "local")
    deliveries = Deliveries(journal, [remote, local])

    deliveries.close(20, status=RunStatus.PREEMPTED)

    assert statuses(remote.file) == statuses(local.file) == ["preempted"]


def test_each_sink_is_told_how_far_it_is_behind(tmp_path: Path, journal: Journal) -> None:
    """Records of these journals are made at 1 + seq seconds after the epoch."""
    deliveries = Deliveries(journal, [LocalSink(tmp_path / "fast", "Fast!"), HangingSink(tmp_path / "a", "wandb:stuck")])
    add(journal, range(1, 4))
    wait_until(lambda: deliveries.stats().sinks["Fast!"].records == 3, "the records in the fast sink")

    fast, stuck = deliveries.stats().lags

    assert fast == ("fast", 0, 0.0, 0)
    assert (stuck.sink, stuck.records, stuck.errors) == ("wandb_stuck", 3, 0)
    assert 0 <= stuck.seconds < 60
    add(journal, range(4, 5))
    wait_until(lambda: deliveries.stats().sinks["Fast!"].records == 4, "the records in the fast sink")
    deliveries.close(0.5)
