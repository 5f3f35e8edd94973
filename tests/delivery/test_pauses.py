"""After a process was stopped and continued, its silence does not look like a client that hangs."""

import os
import signal
import time
from pathlib import Path

import pytest
from journals import Clock, begun, end
from recording import AnnouncingSink, calls, seqs
from waiting import wait_until

from esper_telemetry.core.supervisor import PauseDetector
from esper_telemetry.delivery import process as process_module
from esper_telemetry.delivery.live import Deliveries
from esper_telemetry.delivery.sender import SinkCalls


def test_a_pause_is_a_look_that_comes_much_too_late(clock: Clock) -> None:
    """Ticks of 0.25 and 4 seconds are not pauses; one of a minute is, once."""
    pauses, pauses_seen = PauseDetector(), []
    for since in (0.25, 4.0, 60.0, 0.25):
        clock.now += since
        pauses_seen.append(pauses.seconds())

    assert pauses_seen == [0.0, 0.0, 60.0, 0.0]


def test_a_call_does_not_last_while_its_process_is_stopped(clock: Clock) -> None:
    """Three seconds, a pause of a minute and two seconds; the pause does not shorten the next call."""
    calls = SinkCalls("slow")
    with calls.timed():
        clock.now += 3.0 + 60.0
        calls.exclude_pause(60.0)
        clock.now += 2.0
        assert calls.seconds == 5.0
    assert calls.seconds == 0.0
    with calls.timed():
        clock.now += 7.0
        assert calls.seconds == 7.0


def test_a_call_that_does_not_come_back_is_called_slow_in_steps_that_double(clock: Clock) -> None:
    calls, told = SinkCalls("slow"), []
    with calls.timed():
        for seconds in (9.0, 1.0, 9.0, 1.0, 30.0):
            clock.now += seconds
            told.append(calls.slowness)

    assert told == ["", *["no answer for more than 10 s"] * 2, "no answer for more than 20 s", "no answer for more than 40 s"]
    assert calls.slowness == ""


@pytest.mark.system
def test_a_client_that_was_stopped_with_its_process_is_not_killed_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 8 s, stopped for 6 of them, with a limit of 4."""
    monkeypatch.setattr(process_module, "MAX_CALL_SECONDS", 4.0)
    journal, sink = begun(tmp_path / "run", 2), AnnouncingSink(tmp_path / "a", delay=8.0)
    deliveries = Deliveries(journal, [sink])
    wait_until(lambda: any(call["call"] == "begin" for call in calls(sink.file)), "the call to begin")
    child = deliveries.child_pid
    assert child is not None
    os.kill(child, signal.SIGSTOP)
    time.sleep(6.0)
    os.kill(child, signal.SIGCONT)
    wait_until(lambda: seqs(sink.file) == [1, 2], "two records in the sink")

    assert deliveries.child_pid == child
    end(journal)
    report = deliveries.close(20)
    assert (report.complete, report.sinks[0].errors) == (True, 0)
    journal.close()
