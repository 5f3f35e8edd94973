import gc
import logging
import threading
from pathlib import Path

import pytest
from journals import add, begun, ended, record
from recording import ExitingSink, FlakySink, HopelessSink, RecordingSink, calls, seqs, statuses
from waiting import wait_until

from esper_telemetry.core.record import MetricInfo, RunStatus
from esper_telemetry.delivery import delivery as delivery_module
from esper_telemetry.delivery.delivery import Delivery
from esper_telemetry.delivery.status import Cursor, Cursors, SinkState
from esper_telemetry.journal.file import JournalReader
from esper_telemetry.journal.lines import encode_end, encode_metrics, encode_record


def delivery_of(run_dir: Path, sink: RecordingSink, batch: int = 200) -> Delivery:
    reader = JournalReader(run_dir / "journal.jsonl")
    return Delivery(sink, reader, cursors=Cursors(run_dir), batch=batch)


def test_a_sink_is_opened_written_in_batches_and_closed_with_the_status_of_the_end(tmp_path: Path) -> None:
    """The first batch includes the run line: 2 + 3 + 1 of 6 records."""
    sink = RecordingSink(tmp_path / "a")
    delivery = delivery_of(ended(tmp_path / "run", 6), sink, batch=3)

    delivery.run()

    assert [call["call"] for call in calls(sink.file)] == ["open", "write", "write", "write", "close"]
    assert [call["seqs"] for call in calls(sink.file)[1:-1]] == [[1, 2], [3, 4, 5], [6]]
    assert calls(sink.file)[1]["values"][0] == record(1).values
    assert statuses(sink.file) == ["finished"]
    assert (delivery.status.state, delivery.status.records, delivery.status.seq) == (SinkState.CLOSED, 6, 6)


def test_beside_a_trainer_it_rests_between_batches_until_the_run_ends(
    tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that arrive during the rest make one batch, and the end of the run ends the rest."""
    monkeypatch.setattr(delivery_module, "REST_SECONDS", 60.0)
    journal, sink = begun(tmp_path / "run", 1), RecordingSink(tmp_path / "a")
    delivery = Delivery(sink, journal.reader(), cursors=Cursors(tmp_path / "run"), in_child=True)
    thread = threading.Thread(target=delivery.run, daemon=True)
    thread.start()
    wait_until(lambda: delivery.status.records == 1, "the first record")

    for seq in (2, 3):
        add(journal, range(seq, seq + 1))
    delivery.finish(RunStatus.KILLED)
    thread.join(20.0)
    gc.unfreeze()

    assert [call["seqs"] for call in calls(sink.file) if call["call"] == "write"] == [[1], [2, 3]]
    assert statuses(sink.file) == ["killed"]


def test_the_cursor_survives(tmp_path: Path) -> None:
    run_dir, sink = ended(tmp_path / "run", 3), RecordingSink(tmp_path / "a")
    first = delivery_of(run_dir, sink, batch=2)
    first.step()
    first.stop()
    first.run()
    assert seqs(sink.file) == [1]

    second = delivery_of(run_dir, sink)
    second.run()

    assert seqs(sink.file) == [1, 2, 3]
    assert second.status.records == 3
    assert statuses(sink.file) == ["finished"]


def test_a_sink_that_has_everything_is_not_opened_again(tmp_path: Path) -> None:
    run_dir, sink = ended(tmp_path / "run", 3), RecordingSink(tmp_path / "a")
    delivery_of(run_dir, sink).run()
    before = calls(sink.file)

    again = delivery_of(run_dir, sink)
    again.run()

    assert again.status.state is SinkState.CLOSED
    assert calls(sink.file) == before


def test_a_run_that_goes_on_after_its_end_is_delivered_to_its_last_end(tmp_path: Path) -> None:
    run_dir, sink = tmp_path / "run", RecordingSink(tmp_path / "a")
    journal = begun(run_dir, 2)
    journal.write(encode_end(RunStatus.KILLED))
    delivery_of(run_dir, sink).run()
    journal.write(encode_record(record(3)), encode_end(RunStatus.FINISHED))

    delivery_of(run_dir, sink).run()

    assert seqs(sink.file) == [1, 2, 3]
    assert statuses(sink.file) == ["killed", "finished"]
    journal.close()


def test_the_older_end_of_a_run_that_goes_on_closes_no_sink(tmp_path: Path) -> None:
    """The delivery has read the end of the earlier run before the resumed run writes its first line."""
    run_dir, sink = tmp_path / "run", RecordingSink(tmp_path / "a")
    journal = begun(run_dir, 2)
    journal.write(encode_end(RunStatus.KILLED))
    delivery = Delivery(sink, JournalReader(run_dir / "journal.jsonl"), until_finish=True)

    for _ in range(4):
        delivery.step()
    waits = delivery.over, seqs(sink.file), statuses(sink.file)
    journal.write(encode_record(record(3)), encode_end(RunStatus.FINISHED))
    delivery.finish(RunStatus.KILLED)
    while delivery.step() or not delivery.over:
        pass
    delivery.release()
    journal.close()

    assert waits == (False, [1, 2], [])
    assert seqs(sink.file) == [1, 2, 3] and statuses(sink.file) == ["finished"]


def test_keys_described_later_reach_the_run_that_the_sink_was_given(tmp_path: Path) -> None:
    journal = begun(tmp_path / "run")
    journal.write(encode_metrics({"my/reward": MetricInfo("1", "How good?")}), encode_end(RunStatus.FINISHED))
    sink = RecordingSink(tmp_path / "a")

    delivery_of(tmp_path / "run", sink).run()

    assert calls(sink.file)[0]["metrics"] == ["my/reward", "policy/kl"]
    journal.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("failing", ["open", "write", "close"])
def test_a_sink_that_fails_three_times_loses_nothing_and_is_shown_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    sink = FlakySink(tmp_path / "a", failing=failing)
    delivery = delivery_of(ended(tmp_path / "run", 5), sink, batch=2)

    with caplog.at_level(logging.WARNING):
        delivery.run()

    assert seqs(sink.file) == [1, 2, 3, 4, 5]
    assert statuses(sink.file) == ["finished"]
    assert (delivery.status.errors, delivery.status.state) == (3, SinkState.CLOSED)
    assert [entry.getMessage() for entry in caplog.records] == [
        f"esper-telemetry: sink recording failed (ConnectionError: {failing} refused); it is tried again, and the journal keeps the records"
    ]


@pytest.mark.usefixtures("impatient")
def test_a_sink_that_calls_exit_is_tried_again(tmp_path: Path) -> None:
    sink = ExitingSink(tmp_path / "a")

    delivery_of(ended(tmp_path / "run", 1), sink).run()

    assert seqs(sink.file) == [1]


def test_a_permanent_error_disables_with_one_loud_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    delivery = delivery_of(ended(tmp_path / "run", 5), HopelessSink(tmp_path / "a"))

    delivery.run()

    assert delivery.status.state is SinkState.DISABLED
    assert [(entry.levelname, entry.getMessage()) for entry in caplog.records] == [
        ("ERROR", "esper-telemetry: sink recording is DISABLED for this run: PermanentSinkError: the key was revoked")
    ]


def test_each_of_many_writers_keeps_the_cursors_of_the_others(tmp_path: Path) -> None:
    """Four threads save 50 times each."""
    begun(tmp_path).close()

    def save(name: str) -> None:
        cursors = Cursors(tmp_path)
        for offset in range(1, 51):
            cursors.save(name, Cursor(offset=offset))

    threads = [threading.Thread(target=save, args=(f"sink {index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [Cursors(tmp_path).load(f"sink {index}").offset for index in range(4)] == [50] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cursors.json", "journal.jsonl"]


def test_cursors_that_cannot_be_read_begin_at_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "cursors.json").write_text("{")

    assert Cursors(tmp_path).load("a") == Cursor()
