import pickle
import time

import pytest
from sink_runs import record, run_info

from esper_telemetry.core.record import RunStatus
from esper_telemetry.sinks import Sink
from esper_telemetry.testing import FailingSink, MemorySink


def test_memory_is_what_a_sink_was_given() -> None:
    sink = MemorySink()
    run = run_info()
    sink.open(run)
    sink.write([record(1)])
    sink.close(RunStatus.FINISHED)

    assert isinstance(sink, Sink)
    assert (sink.runs, sink.records, sink.statuses) == ([run], [record(1)], [RunStatus.FINISHED])


def test_a_failing_sink_fails_where_it_is_told_and_gets_well() -> None:
    sink = FailingSink(fail_in={"write"}, error=OSError("full"), times=1)
    sink.open(run_info())
    with pytest.raises(OSError, match="full"):
        sink.write([record(1)])
    sink.write([record(1)])

    assert sink.calls == ["open", "write", "write"]
    assert sink.records == [record(1)]


def test_a_failing_sink_can_only_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    sink = FailingSink(fail_in={"open"}, error=None, hang_seconds=0.05)

    sink.open(run_info())

    assert pauses == [0.05]
    assert sink.runs


def test_a_method_that_no_sink_has_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"got \['flush'\]"):
        FailingSink(fail_in={"flush"})


def test_a_failing_sink_can_be_sent_to_another_process() -> None:
    sink = FailingSink(error=None, in_process=False)

    assert pickle.loads(pickle.dumps(sink)) == sink
