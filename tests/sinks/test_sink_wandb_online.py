"""W&B online: rows, alerts, settings and the exit code reach a server. A server that fails or is gone costs only time."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_wandb import KEY, FakeWandb
from waiting import wait_until

from esper_telemetry.core.record import AlarmEvent, RunStatus
from esper_telemetry.delivery.live import Deliveries
from esper_telemetry.delivery.status import SinkState
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.lines import encode_alarm, encode_end, encode_record, encode_run
from esper_telemetry.journal.read import read_run
from esper_telemetry.sinks import Place, WandbSink
from esper_telemetry.testing import alarm, record, run_in

pytestmark = pytest.mark.system

RECORDS = 40


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandb]:
    one = FakeWandb()
    monkeypatch.setenv("WANDB_BASE_URL", one.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield one
    one.stop()


def begun(tmp_path: Path) -> tuple[Journal, Deliveries, str]:
    journal, run = Journal.create(tmp_path / "run"), run_in(tmp_path / "run")
    journal.write(encode_run(run))
    return journal, Deliveries(journal, [WandbSink("online", mode="online")]), run.run_id


def ended(journal: Journal, deliveries: Deliveries, seconds: float = 60.0) -> SinkState:
    journal.write(encode_end(RunStatus.FAILED, seq=99))
    report = deliveries.close(seconds)
    journal.close()
    return report.sinks[0].state


def test_a_run_reaches_the_server(tmp_path: Path, server: FakeWandb) -> None:
    journal, deliveries, run_id = begun(tmp_path)
    for update in range(1, RECORDS + 1):
        journal.write(encode_record(record(update)))
    journal.write(encode_alarm(alarm(RECORDS, AlarmEvent.RAISE)))

    assert ended(journal, deliveries) is SinkState.CLOSED

    rows = server.rows[run_id]
    assert [row["axis/update"] for row in rows] == list(range(1, RECORDS + 1))
    assert [row["policy/key_1"] for row in rows] == [record(update).values["policy/key_1"] for update in range(1, RECORDS + 1)]
    assert [title for title, _ in server.alerts] == ["policy/kl_spike"]
    assert server.configs[run_id]["learning_rate"]["value"] == 3e-4
    assert server.exit_codes == {run_id: 1}
    place = WandbSink("online").place(read_run(tmp_path / "run").info)
    assert place == Place(f"run {run_id} of project online on the W&B server", "")
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []


def test_a_server_that_fails_for_a_while_gets_everything_later(tmp_path: Path, server: FakeWandb) -> None:
    journal, deliveries, run_id = begun(tmp_path)
    journal.write(encode_record(record(1)))
    wait_until(lambda: server.rows.get(run_id), "rows on the server")
    server.status = 500
    for update in range(2, RECORDS + 1):
        journal.write(encode_record(record(update)))
    wait_until(lambda: deliveries.stats().queue_depth == 0, "an empty queue")
    server.status = 200

    assert ended(journal, deliveries) is SinkState.CLOSED

    assert [row["axis/update"] for row in server.rows[run_id]] == list(range(1, RECORDS + 1))


@pytest.mark.slow
def test_without_a_server_the_run_is_kept_offline(tmp_path: Path, server: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is listening. W&B waits for twice its time-out, then the run continues without it."""
    server.stop()
    journal, deliveries, run_id = begun(tmp_path)
    for update in range(1, 4):
        journal.write(encode_record(record(update)))

    assert ended(journal, deliveries, 180.0) is SinkState.CLOSED

    assert list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}"))
