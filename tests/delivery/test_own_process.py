"""Clients give up soon on the command line, as in the child process of a run, but keep their settings in the user's process."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from journals import begun, end, ended, record

from esper_telemetry.cli.main import run as run_command
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, RunInfo
from esper_telemetry.delivery.catch_up import replay
from esper_telemetry.delivery.status import Cursor, Cursors, read_status, write_uris
from esper_telemetry.journal.lines import encode_alarm
from esper_telemetry.sinks import register_sink
from esper_telemetry.sinks import sink_registry as uri
from esper_telemetry.testing import MemorySink

pytestmark = pytest.mark.system

calls: list[str] = []


class NotedSink(MemorySink):
    def prepare_child(self) -> None:
        calls.append("prepare_child")

    def open(self, run: Any) -> None:
        calls.append("open")
        super().open(run)


class AheadSink(MemorySink):
    """Its backend holds two updates."""

    def held(self, run: RunInfo) -> int:
        return 2


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uri, "_registered", {})
    register_sink("noted", lambda rest, options: NotedSink(name="noted"))
    calls.clear()


def test_replay_on_the_command_line_prepares_the_client_first(tmp_path: Path) -> None:
    run_command(["replay", str(ended(tmp_path / "run", 2)), "--to", "noted"])

    assert calls == ["prepare_child", "open"]


def test_replay_on_the_command_line_uses_every_optional_member_of_the_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alarms are delivered, and updates that the backend already has are skipped."""
    raised = Alarm(3, record(3).axes, "policy/kl_spike", AlarmEvent.RAISE, 0.9, AlarmLevel.CRITICAL, "policy/kl")
    journal = begun(tmp_path / "run", 3)
    journal.write(encode_alarm(raised))
    end(journal)
    journal.close()
    sink = AheadSink(name="ahead")
    monkeypatch.setattr(uri, "_registered", {"ahead": lambda rest, options: sink})

    run_command(["replay", str(tmp_path / "run"), "--to", "ahead"])

    assert [record.seq for record in sink.records] == [3]
    assert [alarm.type for alarm in sink.alarms] == ["policy/kl_spike"]


def test_doctor_prepares_the_clients_of_all_backends(tmp_path: Path) -> None:
    run_dir = ended(tmp_path / "run", 2)
    Cursors(run_dir).save("noted", Cursor())
    Cursors(run_dir).save("gone:long ago", Cursor())

    run_command(["doctor", str(run_dir)])

    assert calls == ["prepare_child"]


class UnreadableSink(NotedSink):
    def stored(self, run: Any) -> Any:
        raise ConnectionError("no server")


def test_doctor_fails_where_a_backend_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    register_sink("unreadable", lambda rest, options: UnreadableSink(name="unreadable"))
    run_dir = ended(tmp_path / "run", 2)
    Cursors(run_dir).save("unreadable", Cursor())

    assert run_command(["doctor", str(run_dir)]) == 1
    assert "unreadable: cannot be read: ConnectionError: no server" in capsys.readouterr().out


def test_doctor_notes_that_nothing_is_under_way_after_a_kill(tmp_path: Path) -> None:
    """The `status.json` of a sink process that was killed a minute ago."""
    run_dir = ended(tmp_path / "run", 2)
    write_uris(run_dir, {"noted": "noted"})
    long_ago = time.time() - 60.0
    os.utime(run_dir / "journal.jsonl", (long_ago, long_ago))

    run_command(["doctor", str(run_dir)])

    assert read_status(run_dir)["noted"]["under_way"] is False


def test_replay_in_the_users_process_changes_nothing_of_theirs(tmp_path: Path) -> None:
    replay(ended(tmp_path / "run", 2), NotedSink(name="noted"))

    assert calls == ["open"]
