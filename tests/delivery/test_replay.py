import os
import signal
import threading
from pathlib import Path

import pytest
from journals import add, begun, end, ended
from recording import FlakySink, HangingSink, RecordingSink, calls, seqs, statuses
from waiting import wait_until

from esper_telemetry.delivery.catch_up import replay
from esper_telemetry.delivery.live import Deliveries
from esper_telemetry.delivery.status import SinkState


def test_a_replay_into_a_new_sink_sends_everything_and_reports_the_number_after_every_batch(tmp_path: Path) -> None:
    """The run line and 500 records are read in batches of 200 lines."""
    sink, counts = RecordingSink(tmp_path / "a"), list[int]()

    report = replay(ended(tmp_path / "run", 500), sink, progress=counts.append)

    assert report.complete
    assert report.sinks[0].sent == 500
    assert sorted(set(counts)) == [199, 399, 500]
    assert seqs(sink.file) == list(range(1, 501))
    assert statuses(sink.file) == ["finished"]


def test_a_replay_after_a_deadline_sends_only_the_rest(tmp_path: Path) -> None:
    journal, good = begun(tmp_path / "run", 5), RecordingSink(tmp_path / "good", "good")
    deliveries = Deliveries(journal, [HangingSink(tmp_path / "hanging", "hanging"), good])
    wait_until(lambda: seqs(good.file), "records in the good sink")
    end(journal)
    child = deliveries.child_pid
    deliveries.close(1.0)
    journal.close()
    assert child is not None
    os.kill(child, signal.SIGKILL)

    late = replay(tmp_path / "run", RecordingSink(tmp_path / "late", "hanging"))
    nothing = replay(tmp_path / "run", good)

    assert (late.complete, late.sinks[0].sent) == (True, 5)
    assert (nothing.complete, nothing.sinks[0].sent) == (True, 0)
    assert seqs(good.file) == [1, 2, 3, 4, 5]


def test_a_run_without_end_is_closed_as_killed_and_later_as_it_ended(tmp_path: Path) -> None:
    journal, sink = begun(tmp_path / "run", 2), RecordingSink(tmp_path / "a")
    assert replay(tmp_path / "run", sink).sinks[0].sent == 2
    add(journal, range(3, 5))
    end(journal)
    journal.close()

    assert replay(tmp_path / "run", sink).sinks[0].sent == 2

    assert seqs(sink.file) == [1, 2, 3, 4]
    assert statuses(sink.file) == ["killed", "finished"]


def test_following_waits_for_the_end(tmp_path: Path) -> None:
    journal, sink = begun(tmp_path / "run", 2), RecordingSink(tmp_path / "a")
    thread = threading.Thread(target=replay, args=(tmp_path / "run", sink), kwargs={"follow": True})
    thread.start()
    wait_until(lambda: seqs(sink.file) == [1, 2], "two records in the sink")
    add(journal, range(3, 5))
    end(journal)
    thread.join(20)

    assert seqs(sink.file) == [1, 2, 3, 4]
    assert statuses(sink.file) == ["finished"]
    journal.close()


@pytest.mark.usefixtures("impatient")
def test_a_backend_that_stays_away_ends_the_replay_and_what_is_left_is_said(tmp_path: Path) -> None:
    report = replay(ended(tmp_path / "run", 3), FlakySink(tmp_path / "a", failures=100))

    sink = report.sinks[0]
    assert (sink.state, sink.sent, sink.pending, sink.errors) == (SinkState.RETRYING, 0, 3, 8)
    assert str(sink) == (
        "recording: retrying, 0 records sent, 3 pending (ConnectionError: write refused); "
        f"send the rest with: esper_telemetry.replay('{tmp_path}/run', SINK)"
    )


def test_a_torn_last_line_is_not_sent(tmp_path: Path) -> None:
    journal, sink = begun(tmp_path / "run", 2), RecordingSink(tmp_path / "a")
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"kind":"record","seq":3,"ax')

    assert replay(tmp_path / "run", sink).complete

    assert seqs(sink.file) == [1, 2]
    assert [call["call"] for call in calls(sink.file)] == ["open", "write", "close"]


def test_what_is_no_run_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no run directory"):
        replay(tmp_path / "nowhere", RecordingSink(tmp_path / "a"))
