"""The file and the port, read by Prometheus' own parser."""

import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from esper_telemetry.core.record import AlarmEvent, RunStatus
from esper_telemetry.sinks import PrometheusSink
from esper_telemetry.testing import alarm, record, run_in


def samples(text: str) -> dict[tuple[str, str], float]:
    """Return the samples by name and by their label in addition to the run."""
    numbers = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["run"] == "conformance"
            numbers[sample.name, sample.labels.get("type", sample.labels.get("status", ""))] = sample.value
    return numbers


def opened(run_dir: Path, port: int | None = None) -> PrometheusSink:
    sink = PrometheusSink(port=port)
    sink.open(run_in(run_dir))
    return sink


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def fetched(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return str(answer.read().decode())


def test_the_file_holds_the_latest_values_and_how_the_run_ended(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.write((record(1), record(2)))

    running = samples((tmp_path / "metrics.prom").read_text())
    sink.close(RunStatus.FINISHED)
    ended = samples((tmp_path / "metrics.prom").read_text())

    assert running["esper_policy_key_1", ""] == 2.001
    assert running["esper_axis_env_step", ""] == 256
    assert running["esper_last_update_timestamp_seconds", ""] == record(2).axes.wall_time
    assert ("esper_run_status", "running") in running
    assert ("esper_run_status", "finished") in ended
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.prom"]


def test_alarms_are_counted_and_told_while_they_last(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.recall([alarm(1, AlarmEvent.RAISE), alarm(2, AlarmEvent.CLEAR)])
    sink.alarm(alarm(3, AlarmEvent.RAISE))
    raised = samples((tmp_path / "metrics.prom").read_text())
    sink.alarm(alarm(4, AlarmEvent.CLEAR))
    over = samples((tmp_path / "metrics.prom").read_text())

    assert (raised["esper_alarms_total", "policy/kl_spike"], raised["esper_alarm_active", "policy/kl_spike"]) == (2, 1)
    assert (over["esper_alarms_total", "policy/kl_spike"], over["esper_alarm_active", "policy/kl_spike"]) == (2, 0)


def test_keys_that_become_the_same_name_are_told_apart(tmp_path: Path) -> None:
    opened(tmp_path).write((record(1, values={"my/key": 1.0, "my_key": 2.0}),))

    numbers = samples((tmp_path / "metrics.prom").read_text())

    assert sorted([numbers["esper_my_key", ""], numbers["esper_my_key_2", ""]]) == [1.0, 2.0]


def test_a_port_is_served_on_this_machine_only_and_free_again_after_the_run(tmp_path: Path) -> None:
    port = free_port()
    sink = opened(tmp_path, port)
    sink.write((record(3),))
    numbers_on_port = samples(fetched(port))
    listening = Path("/proc/net/tcp").read_text()
    sink.close(RunStatus.FINISHED)

    assert numbers_on_port["esper_axis_update", ""] == 3
    assert f"0100007F:{port:04X} 00000000:0000 0A" in listening  # 127.0.0.1
    assert f"00000000:{port:04X} " not in listening
    with pytest.raises(OSError, match="refused"):
        fetched(port)
    sink.open(run_in(tmp_path))
    assert "esper_run_status" in fetched(port)
    sink.close(RunStatus.FINISHED)


def test_a_port_that_is_taken_is_an_error_that_is_tried_again(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            opened(tmp_path, other.getsockname()[1])
