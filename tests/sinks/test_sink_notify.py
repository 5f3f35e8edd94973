"""Messages through Apprise, to a local HTTP server: critical incidents once, the outcome at the end, no secret anywhere."""

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from esper_telemetry import Telemetry
from esper_telemetry.alarms import AlarmRule, Finding, View
from esper_telemetry.core.record import AlarmEvent, AlarmLevel, RunStatus
from esper_telemetry.sinks.notify import NotifySink
from esper_telemetry.testing import CHECKS, check_sink
from esper_telemetry.testing.sinks import alarm, run_in

pytest.importorskip("apprise")
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated")  # imported by Apprise
PASSWORD = "hunter2-Zk94xQp1"


class Service(ThreadingHTTPServer):
    """A server that keeps the messages that it receives."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.messages: list[dict[str, Any]] = []
        self.address = f"json://robot:{PASSWORD}@127.0.0.1:{self.server_address[1]}/hook"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        self.server.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.shutdown()
    service.server_close()


def always_critical(view: View) -> Iterator[Finding]:
    yield Finding(1.0, "my/number", view.get("my/number"))


BROKEN = AlarmRule(type="my/broken", inputs=("my/number",), meaning="It is broken.", action="Mend it.", judge=always_critical)


def train(run_dir: Path, address: str) -> None:
    with Telemetry(run_dir=run_dir, name="a run", notify=address, alarms=BROKEN, close_timeout=20) as telemetry:
        for update in range(1, 6):
            telemetry.log({"my/number": 1.0})
            telemetry.flush(env_step=100 * update)


@pytest.mark.system
def test_a_critical_incident_and_the_outcome_are_sent_and_the_password_is_nowhere(service: Service, tmp_path: Path) -> None:
    train(tmp_path / "run", service.address)

    begin, end = service.messages
    assert begin["title"] == "a run: my/broken" and begin["message"].endswith("Try: Mend it.")
    assert end["title"] == "a run: finished"
    assert f"esper-telemetry diagnose {tmp_path / 'run'}" in end["message"]
    texts = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert texts and not [text for text in texts if PASSWORD.encode() in text]
    assert PASSWORD not in repr(NotifySink(service.address)) + NotifySink(service.address).name


def test_an_incident_has_one_message_and_what_is_not_critical_has_none(service: Service, tmp_path: Path) -> None:
    sink = NotifySink(service.address)
    first = alarm(3, AlarmEvent.RAISE)
    sink.open(run_in(tmp_path))
    sink.recall([replace(first, incident=1)])

    sink.alarm(first)
    sink.alarm(replace(first, incident=2, level=AlarmLevel.WARN))
    sink.alarm(replace(first, incident=2, event=AlarmEvent.UPDATE))
    sink.alarm(replace(first, incident=2, type="grad/explode"))
    sink.alarm(replace(first, incident=3, event=AlarmEvent.CLEAR))
    sink.close(RunStatus.FAILED)
    sink.close(RunStatus.FAILED)

    assert [message["title"].partition(": ")[2] for message in service.messages] == ["policy/kl_spike", "failed"]
    assert [message["type"] for message in service.messages] == ["failure", "failure"]


@pytest.mark.system
def test_a_dead_service_costs_one_warning(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    service.server_close()
    service.shutdown()
    caplog.set_level(logging.WARNING, "esper_telemetry")

    train(tmp_path / "run", service.address)

    lines = [record.getMessage() for record in caplog.records if "did not take a message" in record.getMessage()]
    assert len(lines) == 1 and "not everything is delivered" not in caplog.text
    assert PASSWORD not in caplog.text + "".join(capfd.readouterr())


def test_a_wrong_address_is_refused_where_it_is_given() -> None:
    with pytest.raises(ValueError, match="notify takes addresses of Apprise such as slack://"):
        Telemetry(run_dir=None, notify="my-channel")
    with pytest.raises(ValueError, match="Apprise knows no foo:// address"):
        Telemetry(run_dir=None, notify="foo://x")


@pytest.mark.system
def test_the_sink_passes_the_kit(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper_telemetry.testing.sinks.MANY_RECORDS", 2000)
    slow = ("many records", "sigterm")

    assert set(check_sink(lambda: NotifySink(service.address), leave_out=slow)) == CHECKS.keys() - set(slow)
