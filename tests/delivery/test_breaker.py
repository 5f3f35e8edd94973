"""A failing sink is left alone for a while, then tried with one record; a record that it refuses does not block the rest."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from journals import add, begun, ended
from recording import FlakySink, PickySink, calls, seqs, statuses

from esper_telemetry.core.record import RunStatus
from esper_telemetry.delivery.catch_up import replay
from esper_telemetry.delivery.delivery import Delivery
from esper_telemetry.delivery.sender import CircuitBreaker
from esper_telemetry.delivery.status import Cursors, SinkState
from esper_telemetry.journal.file import JournalReader
from esper_telemetry.testing import FailingSink


def delivery_of(run_dir: Path, sink: Any, **settings: Any) -> Delivery:
    return Delivery(sink, JournalReader(run_dir / "journal.jsonl"), cursors=Cursors(run_dir), **settings)


def dead_letters(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "dead_letter.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_pauses_double_to_a_minute_and_are_short_once_the_run_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.random", lambda: 0.0)
    one, pauses = CircuitBreaker(), []
    for _ in range(9):
        one.record_failure()
        pauses.append(round(one.pause(), 1))

    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    one.record_failure(at_end=True)
    assert round(one.pause(), 1) == 2.0


def test_pauses_are_shortened_at_random_by_up_to_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.random", lambda: 0.8)
    one = CircuitBreaker()
    one.record_failure()

    assert round(one.pause(), 2) == 0.4  # 0.5 (1 - 0.25 * 0.8)


def test_a_breaker_that_worked_is_closed_and_begins_anew() -> None:
    one = CircuitBreaker(failures=5)
    assert one.failures == 5
    assert one.pause() > 5

    one.record_success()

    assert one.failures == 0
    assert one.pause() <= 0


@pytest.mark.usefixtures("impatient")
def test_after_a_failure_one_record_is_tried_before_the_others(tmp_path: Path) -> None:
    sink = FlakySink(tmp_path / "a", failures=1)

    delivery_of(ended(tmp_path / "run", 6), sink).run()

    assert [call["seqs"] for call in calls(sink.file) if call["call"] == "write"] == [[1], [2, 3, 4, 5, 6]]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "settings",
    [{}, {"kind": TypeError}, {"kind": RuntimeError}, {"names_it": True}],
    ids=["a ValueError", "a TypeError", "an exception that says nothing", "a sink that names the record"],
)
def test_a_record_that_is_refused_is_put_aside_and_all_others_arrive_in_order(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = ended(tmp_path / "run", 50)
    sink = PickySink(tmp_path / "a", refused=(17, 18, 31), **settings)
    delivery = delivery_of(run_dir, sink)

    with caplog.at_level(logging.WARNING):
        delivery.run()

    assert seqs(sink.file) == [seq for seq in range(1, 51) if seq not in (17, 18, 31)]
    assert [letter["record"]["seq"] for letter in dead_letters(run_dir)] == [17, 18, 31]
    assert {letter["sink"] for letter in dead_letters(run_dir)} == {"recording"}
    status = delivery.status
    assert (status.state, status.records, status.quarantined, status.lag(50)) == (SinkState.CLOSED, 47, 3, 0)
    assert statuses(sink.file) == ["finished"]
    refusals = [entry.getMessage() for entry in caplog.records if "refuses record" in entry.getMessage()]
    assert len(refusals) == 1
    assert "refuses record 17" in refusals[0]
    assert "dead_letter.jsonl" in refusals[0]


@pytest.mark.usefixtures("impatient")
def test_the_last_records_of_a_run_can_be_refused_too(tmp_path: Path) -> None:
    run_dir, sink = ended(tmp_path / "run", 6), PickySink(tmp_path / "a", refused=(5, 6))

    report = replay(run_dir, sink)

    assert seqs(sink.file) == [1, 2, 3, 4]
    assert [letter["record"]["seq"] for letter in dead_letters(run_dir)] == [5, 6]
    assert not report.complete
    assert "4 records sent, 2 refused (dead_letter.jsonl)" in str(report)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("no")])
def test_a_sink_that_takes_nothing_at_all_refuses_no_record(tmp_path: Path, error: Exception) -> None:
    """The sink is at fault, not the records: all of them stay pending."""
    run_dir, sink = ended(tmp_path / "run", 5), FailingSink(fail_in=["write"], error=error)

    report = replay(run_dir, sink)

    assert (report.sinks[0].pending, report.sinks[0].quarantined) == (5, 0)
    assert dead_letters(run_dir) == []


@pytest.mark.usefixtures("impatient")
def test_a_connection_that_fails_ten_times_is_nobodys_fault(tmp_path: Path) -> None:
    run_dir, sink = ended(tmp_path / "run", 5), FailingSink(fail_in=["write"], error=ConnectionError("down"), times=10)

    delivery_of(run_dir, sink).run()

    assert [record.seq for record in sink.records] == [1, 2, 3, 4, 5]
    assert dead_letters(run_dir) == []


@pytest.mark.usefixtures("impatient")
def test_a_refused_record_is_remembered_by_the_cursor(tmp_path: Path) -> None:
    journal = begun(tmp_path / "run", 5)
    first = delivery_of(tmp_path / "run", PickySink(tmp_path / "a", refused=(2,)))
    first.finish(RunStatus.KILLED)
    first.run()
    add(journal, range(6, 8))
    second = delivery_of(tmp_path / "run", PickySink(tmp_path / "a", refused=(2,)))
    second.finish(RunStatus.FINISHED)
    second.run()

    assert seqs(tmp_path / "a") == [1, 3, 4, 5, 6, 7]
    assert (second.cursor.records, second.cursor.quarantined) == (6, 1)
    journal.close()
