"""Clients are imported one after the other, before any delivery has a thread."""

import logging
from pathlib import Path

import pytest
from journals import add, end
from recording import ImportingSink, LateImportingSink, LocalSink, RecordingSink, calls, seqs

from esper_telemetry.delivery.live import Deliveries
from esper_telemetry.delivery.status import SinkState
from esper_telemetry.journal.file import Journal


class LocalImportingSink(ImportingSink, LocalSink):
    """The same in the training process."""


@pytest.fixture
def journal(journal: Journal) -> Journal:
    add(journal, range(1, 4))
    return journal


@pytest.mark.parametrize("kind", [ImportingSink, LocalImportingSink])
def test_the_main_thread_imports_all_clients_before_any_sink_is_opened(tmp_path: Path, journal: Journal, kind: type[ImportingSink]) -> None:
    """All sinks write to one file, which shows the order."""
    deliveries = Deliveries(journal, [kind(tmp_path / "a", name) for name in ("one", "two", "three")])
    end(journal)

    assert deliveries.close().complete

    import_calls = calls(tmp_path / "a")
    assert [call["call"] for call in import_calls[:3]] == ["import", "import", "import"]
    assert all(call["thread"] for call in import_calls[:3])
    assert sum(call["call"] == "import" for call in import_calls) == 3


@pytest.mark.system
def test_an_import_that_breaks_is_tried_again_in_a_fresh_process(tmp_path: Path, journal: Journal) -> None:
    sink, good = ImportingSink(tmp_path / "a", "broken", failures=1), RecordingSink(tmp_path / "good", "good")
    deliveries = Deliveries(journal, [sink, good])
    end(journal)

    assert deliveries.close().complete

    assert seqs(sink.file) == seqs(good.file) == [1, 2, 3]
    assert len({call["pid"] for call in calls(sink.file)}) == 2
    assert len({call["pid"] for call in calls(good.file)}) == 1, "a process with a broken import opens nothing"


@pytest.mark.system
def test_a_client_that_cannot_be_imported_is_given_up_and_the_others_go_on(
    tmp_path: Path, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    broken = [ImportingSink(tmp_path / name, name, failures=100) for name in ("first", "second")]
    deliveries = Deliveries(journal, [*broken, RecordingSink(tmp_path / "good", "good")])
    end(journal)

    with caplog.at_level(logging.ERROR):
        first, second, good = deliveries.close().sinks

    assert (first.state, second.state, good.state) == (SinkState.DISABLED, SinkState.DISABLED, SinkState.CLOSED)
    assert seqs(tmp_path / "good") == [1, 2, 3]
    assert len(calls(tmp_path / "first")) == 3
    assert "sink first is DISABLED for this run: DeadClientError: its client cannot be imported" in caplog.text


@pytest.mark.system
@pytest.mark.parametrize(
    "sink",
    [
        ImportingSink(Path("a"), "absent", failures=100, error=ModuleNotFoundError),
        LocalImportingSink(Path("a"), "absent", failures=100, error=ModuleNotFoundError),
        LateImportingSink(Path("a"), "absent"),
    ],
)
def test_a_client_that_is_not_installed_is_one_warning(
    tmp_path: Path, journal: Journal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, sink: RecordingSink
) -> None:
    monkeypatch.chdir(tmp_path)
    good = RecordingSink(tmp_path / "good", "good")
    with caplog.at_level(logging.WARNING):
        deliveries = Deliveries(journal, [sink, good])
        add(journal, range(4, 6))
        end(journal)
        absent, _ = deliveries.close().sinks

    assert (absent.state, absent.pending) == (SinkState.DISABLED, 5)
    assert seqs(good.file) == [1, 2, 3, 4, 5]
    assert len({call["pid"] for call in calls(good.file)}) == 1
    (warning,) = [entry.getMessage() for entry in caplog.records]
    assert "sink absent is DISABLED for this run: PermanentSinkError: it needs a module that is not installed" in warning


def test_an_import_that_breaks_in_the_training_process_gives_the_sink_up(tmp_path: Path, journal: Journal) -> None:
    """The training process cannot be replaced by a fresh one, and a second import has never succeeded."""
    deliveries = Deliveries(journal, [LocalImportingSink(tmp_path / "a", failures=1)])
    end(journal)

    (sink,) = deliveries.close().sinks

    assert (sink.state, sink.pending) == (SinkState.DISABLED, 3)
    assert "its client cannot be imported: RecursionError" in sink.last_error
