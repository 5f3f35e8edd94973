"""Trackio: rows and alerts in its local database."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from esper_telemetry.core.record import AlarmEvent, RunStatus
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.sinks import sink_from_uri
from esper_telemetry.sinks.trackio import TrackioSink
from esper_telemetry.testing import CHECKS, check_sink
from esper_telemetry.testing.sinks import alarm, delivered, record, run_in

pytestmark = pytest.mark.skipif(find_spec("trackio") is None, reason="needs trackio")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate local database, without requests to a server."""
    from trackio import sqlite_storage, utils

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # for processes of the kit: this one read it when it imported Trackio
    monkeypatch.setattr(utils, "TRACKIO_DIR", tmp_path)
    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_alarms_and_the_outcome_are_alerts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    sink, run = sink_from_uri("trackio:walker"), run_in(tmp_path / "run", name="first")
    assert isinstance(sink, TrackioSink)
    sink.open(run)
    sink.write([record(1), record(2)])
    sink.alarm(alarm(2, AlarmEvent.RAISE))
    sink.alarm(alarm(2, AlarmEvent.CLEAR))
    sink.outcome(JournalEvent("outcome", {"outcome": "flat", "text": "flat: return 1 -> 1"}, seq=2))
    sink.close(RunStatus.FINISHED)

    name = f"first-{run.run_id[:6]}"
    alerts = {(one["title"], one["level"], one["step"]) for one in SQLiteStorage.get_alerts("walker", name)}
    assert {("policy/kl_spike", "error", 256), ("policy/kl_spike", "info", 256)} < alerts
    assert ("outcome", "info") in {one[:2] for one in alerts}
    assert sink.place(run).command == "trackio show --project walker"
    assert [row[key] for row in SQLiteStorage.get_logs("walker", name) for key in ("step", "axis/update")] == [*(128, 1.0), *(256, 2.0)]
    assert capfd.readouterr().out == ""


def test_the_overview_comes_first_and_details_stay_in_the_journal(tmp_path: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    sink, run = TrackioSink("walker"), run_in(tmp_path / "run", name="first")
    delivered(sink, run, [record(1, values={"policy/kl": 0.1, "grad/layer/core_weight/norm": 2.0})])

    (row,) = SQLiteStorage.get_logs("walker", f"first-{run.run_id[:6]}")
    numbers = {key: value for key, value in row.items() if key not in ("step", "timestamp")}
    assert numbers == {"0_overview/04 KL": 0.1, "policy/kl": 0.1, "axis/update": 1.0}


@pytest.mark.system
def test_the_sink_passes_the_kit() -> None:
    slow = ("many records", "sigterm")

    assert set(check_sink(TrackioSink, leave_out=slow)) == CHECKS.keys() - set(slow)
