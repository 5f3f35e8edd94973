"""Alarms reach a sink once and in the journal's order, and they never lose or block records permanently."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from journals import add, begun, end, info, record
from recording import RecordingSink, calls, seqs
from waiting import wait_until

from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Record, RunStatus
from esper_telemetry.delivery.catch_up import replay
from esper_telemetry.delivery.delivery import Delivery
from esper_telemetry.delivery.live import Deliveries
from esper_telemetry.delivery.status import Cursors, SinkState
from esper_telemetry.journal.file import Journal, JournalReader
from esper_telemetry.journal.lines import JournalEvent, encode_alarm, encode_event, encode_run
from esper_telemetry.journal.memory_journal import MemoryJournal
from esper_telemetry.testing import FailingSink, MemorySink


def alarm(seq: int, kind: str = "policy/kl_spike") -> Alarm:
    return Alarm(seq, record(seq).axes, kind, AlarmEvent.RAISE, 0.9, AlarmLevel.CRITICAL, "policy/kl", since=seq)


def journal_with_alarms(run_dir: Path, records: int, alarms: Sequence[int]) -> Journal:
    journal = begun(run_dir)
    go_on(journal, range(1, records + 1), alarms)
    return journal


def go_on(journal: Journal | MemoryJournal, seqs: range, alarms: Sequence[int]) -> None:
    for seq in seqs:
        add(journal, range(seq, seq + 1))
        if seq in alarms:
            journal.write(encode_alarm(alarm(seq)))


@dataclass
class OrderSink(MemorySink):
    name: str = "told"
    order: list[int | str] = field(default_factory=list)
    recalled: list[int] = field(default_factory=list)

    def write(self, records: Sequence[Record]) -> None:
        super().write(records)
        self.order.extend(entry.seq for entry in records)

    def alarm(self, alarm: Alarm) -> None:
        super().alarm(alarm)
        self.order.append(f"alarm {alarm.seq}")

    def recall(self, alarms: Sequence[Alarm]) -> None:
        self.recalled.extend(entry.seq for entry in alarms)

    def outcome(self, event: JournalEvent) -> None:
        super().outcome(event)
        self.order.append(f"outcome {event.data['outcome']}")


def test_outcomes_come_between_the_records_and_once(tmp_path: Path) -> None:
    """Two outcomes, the last one after all records; a second replay repeats none."""
    journal = begun(tmp_path)
    for seq, kind in ((1, ""), (2, "learning"), (3, "flat")):
        add(journal, range(seq, seq + 1))
        if kind:
            journal.write(encode_event(JournalEvent("outcome", {"outcome": kind, "text": kind}, seq, record(seq).axes)))
    end(journal)
    sink, again = OrderSink(), OrderSink()

    replay(tmp_path, sink)
    replay(tmp_path, again)

    assert sink.order == [1, 2, "outcome learning", 3, "outcome flat"]
    assert again.order == []


def test_alarms_come_between_the_records_and_a_second_replay_sends_only_what_is_new(tmp_path: Path) -> None:
    journal = journal_with_alarms(tmp_path, 4, [2, 3])
    first, second = OrderSink(), OrderSink()

    report = replay(tmp_path, first)
    go_on(journal, range(5, 7), [5])
    end(journal)
    replay(tmp_path, second)

    assert first.order == [1, 2, "alarm 2", 3, "alarm 3", 4]
    assert (first.alarms, first.recalled) == ([alarm(2), alarm(3)], [])
    assert report.complete and report.sinks[0].sent == 4
    assert second.order == [5, "alarm 5", 6]
    assert second.recalled == [2, 3]


def test_a_sink_without_the_method_gets_its_records(tmp_path: Path) -> None:
    end(journal_with_alarms(tmp_path, 3, [1, 3]))
    written_seqs: list[int] = []

    class Plain:
        def open(self, run: object) -> None: ...

        def write(self, records: Sequence[Record]) -> None:
            written_seqs.extend(entry.seq for entry in records)

        def close(self, status: RunStatus) -> None: ...

    assert replay(tmp_path, Plain()).complete
    assert written_seqs == [1, 2, 3]


@pytest.mark.parametrize("method", ["alarm", "write"])
def test_a_failure_is_tried_again_and_nothing_comes_twice(tmp_path: Path, method: str) -> None:
    end(journal_with_alarms(tmp_path, 4, [2, 3]))
    sink = FailingSink(fail_in={method}, times=2)
    delivery = Delivery(sink, JournalReader(tmp_path / "journal.jsonl"), cursors=Cursors(tmp_path))

    delivery.run()

    assert delivery.status.state is SinkState.CLOSED
    assert [entry.seq for entry in sink.records] == [1, 2, 3, 4]
    assert [entry.seq for entry in sink.alarms] == [2, 3]
    assert delivery.cursor.records == 4
    assert sink.failures == 2


def test_a_delivery_that_goes_on_after_it_was_stopped_counts_every_record_once(tmp_path: Path) -> None:
    """It stops when an alarm fails: its batch is sent again, including the record before the alarm."""
    end(journal_with_alarms(tmp_path, 4, [2]))
    stopped = Delivery(
        FailingSink(fail_in={"alarm"}), JournalReader(tmp_path / "journal.jsonl"), name="x", cursors=Cursors(tmp_path), patience=1
    )
    stopped.run()
    assert stopped.cursor.records == 0
    sink = OrderSink()

    Delivery(sink, JournalReader(tmp_path / "journal.jsonl"), name="x", cursors=Cursors(tmp_path)).run()

    assert sink.order == [1, 2, "alarm 2", 3, 4]
    assert Cursors(tmp_path).load("x").records == 4


@dataclass
class Backend(OrderSink):
    """Knows that it holds the first three updates."""

    def held(self, run: object) -> int:
        return 3


def test_a_backend_that_holds_some_updates_is_not_told_of_their_alarms_again(tmp_path: Path) -> None:
    end(journal_with_alarms(tmp_path, 5, [2, 3, 5]))
    sink = Backend()

    assert replay(tmp_path, sink).complete

    assert sink.order == [4, 5, "alarm 5"]
    assert sink.recalled == [2, 3]


def test_a_run_without_a_directory_tells_its_alarms_too_and_delivers_in_this_process(tmp_path: Path) -> None:
    journal, sink, remote = MemoryJournal(), OrderSink(), RecordingSink(tmp_path / "a")
    journal.write(encode_run(info()))
    deliveries = Deliveries(journal, [sink, remote])
    go_on(journal, range(1, 4), [2])
    end(journal)

    assert deliveries.close(20).complete
    assert sink.order == [1, 2, "alarm 2", 3]
    assert seqs(remote.file) == [1, 2, 3]
    assert calls(remote.file)[0]["pid"] == os.getpid()


def test_a_live_sink_hears_of_an_alarm_while_the_run_goes_on(tmp_path: Path) -> None:
    sink = OrderSink()
    journal = begun(tmp_path)
    deliveries = Deliveries(journal, [sink])
    go_on(journal, range(1, 3), [2])
    wait_until(lambda: sink.alarms, "the alarm in the sink")
    end(journal)
    deliveries.close()

    assert sink.order == [1, 2, "alarm 2"]
