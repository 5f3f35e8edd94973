"""Sinks called by the training thread itself: they start no thread, and a terminal that stops output does not block training."""

import os
import threading
from pathlib import Path

import pytest
from journals import add, begun, end, info
from recording import LocalSink, seqs, statuses
from waiting import wait_until

from esper_telemetry.core.record import RunStatus
from esper_telemetry.delivery.live import Deliveries
from esper_telemetry.journal.lines import encode_run
from esper_telemetry.journal.memory_journal import MemoryJournal
from esper_telemetry.sinks import ConsoleSink
from esper_telemetry.sinks.console import make_console


class InlineSink(LocalSink):
    inline = True


def test_a_run_with_the_console_alone_has_no_second_thread(capsys: pytest.CaptureFixture[str]) -> None:
    journal = MemoryJournal()
    journal.write(encode_run(info()))
    threads = threading.active_count()
    deliveries = Deliveries(journal, [ConsoleSink()])
    add(journal, range(1, 2))
    deliveries.poll()

    assert threading.active_count() == threads
    assert capsys.readouterr().out.startswith("update 1")
    end(journal)
    assert deliveries.close().complete
    assert capsys.readouterr().out == "finished after 1 updates, 8 steps\n"


def test_an_inline_sink_gets_everything_in_order(tmp_path: Path) -> None:
    journal, sink = begun(tmp_path / "run", 3), InlineSink(tmp_path / "a")
    deliveries = Deliveries(journal, [sink])
    wait_until(lambda: deliveries.stats().queue_depth == 0, "the first records")
    add(journal, range(4, 201))
    end(journal)

    assert deliveries.close().complete

    assert seqs(sink.file) == list(range(1, 201))
    assert statuses(sink.file) == ["finished"]
    journal.close()


def test_lines_wait_for_a_terminal_that_takes_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full pipe acts like a terminal stopped by Ctrl-S."""
    source, target = os.pipe()
    os.set_blocking(target, False)
    with os.fdopen(source, "rb") as pipe, os.fdopen(target, "w") as output:
        monkeypatch.setattr("esper_telemetry.sinks.console.make_console", lambda **settings: make_console(file=output, **settings))
        sink = ConsoleSink()
        sink.open(info())
        filled = fill(target)
        sink._output.print("an alarm")  # type: ignore[union-attr]
        pipe.read(filled)
        sink.close(RunStatus.FINISHED)
        output.flush()

        assert pipe.read1() == b"an alarm\nfinished\n"


def fill(descriptor: int) -> int:
    """Write until the pipe is full; return the number of bytes."""
    written = 0
    while True:
        try:
            written += os.write(descriptor, b"x" * 4096)
        except BlockingIOError:
            return written
