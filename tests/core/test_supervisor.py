"""One helper process: start, replies, kill, restart and reaping. The programs are Python code that the helper runs."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from esper_telemetry.core.supervisor import ProcessSupervisor

ECHO = """
import os, sys
for line in sys.stdin.buffer:
    os.write(int(sys.argv[1]), line.upper())
"""
STUBBORN = """
import os, sys, time
os.write(int(sys.argv[1]), b"ready")
time.sleep(3600)
"""

Start = Callable[..., ProcessSupervisor]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    supervisors: list[ProcessSupervisor] = []

    def started(entry: str, **settings: Any) -> ProcessSupervisor:
        supervisors.append(ProcessSupervisor(entry, tmp_path / "helper.log", **settings))
        supervisors[-1].start()
        return supervisors[-1]

    yield started
    for supervisor in supervisors:
        if supervisor.pid is not None:
            supervisor.stop()


def heard(supervisor: ProcessSupervisor) -> bytes:
    return wait_until(lambda: supervisor.read(0.1), "a reply of the helper")


def test_a_helper_replies_to_what_it_is_sent(start: Start) -> None:
    supervisor = start(ECHO)
    supervisor.send(b"hello\n")

    assert heard(supervisor) == b"HELLO\n"
    assert supervisor.stop(60.0) == 0  # the helper ends with its input
    assert supervisor.pid is None


def test_a_helper_that_does_not_end_is_killed(start: Start) -> None:
    supervisor = start(STUBBORN)
    heard(supervisor)

    assert supervisor.stop(0.0) == -9


def test_the_last_words_of_a_dead_helper_are_read(start: Start) -> None:
    supervisor = start("import os, sys; os.write(int(sys.argv[1]), b'last'); sys.exit(3)")
    wait_until(lambda: supervisor.has_ended, "the end of the helper")

    assert supervisor.read() == b"last"
    assert supervisor.reap() == 3


def test_a_silent_helper_is_killed(start: Start) -> None:
    supervisor = start(STUBBORN, max_silent_seconds=0.0)
    heard(supervisor)
    wait_until(lambda: supervisor.read() or supervisor.has_ended, "the end of the helper")

    assert supervisor.reap() == -9


GRANDCHILD = """
import os, subprocess, sys
code = "import sys; print(" + repr(sys.argv[2]) + " in sys.path)"
os.write(int(sys.argv[1]), ascii(sys.path).encode() + b"\\n" + subprocess.check_output([sys.executable, "-c", code]))
"""


def test_a_helper_has_the_import_path_of_this_process_and_what_it_starts_has_not(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the folder of a script that contains a `logging.py`."""
    folder = str(tmp_path / "it's \udcff")
    monkeypatch.syspath_prepend(folder)
    path = [str(Path(entry).absolute()) for entry in sys.path]

    reply = heard(start(GRANDCHILD, arguments=[folder]))

    assert reply == ascii(path).encode() + b"\nFalse\n"


def test_output_is_appended_to_the_log(start: Start, tmp_path: Path) -> None:
    (tmp_path / "helper.log").write_text("before\n")

    assert start("print('noise', __import__('sys').argv[2])", arguments=["extra"]).reap() == 0

    assert (tmp_path / "helper.log").read_text() == "before\nnoise extra\n"


def test_restarts_wait_longer_each_time_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second after one death, one second after two. Progress resets the count, and the third death in a row is too many."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    supervisor = ProcessSupervisor("", tmp_path / "log", max_restarts=2)
    for delay, progressed in ((0.5, False), (1.0, False), (0.5, True), (1.0, False)):
        supervisor.schedule_restart(progressed=progressed)
        assert not supervisor.given_up
        now += delay - 0.01
        assert not supervisor.restart_due(0.0)
        now += 0.02
        assert supervisor.restart_due(0.0)

    supervisor.schedule_restart(progressed=False)

    assert supervisor.given_up


def test_a_start_that_is_refused_leaves_nothing_open(tmp_path: Path) -> None:
    supervisor = ProcessSupervisor("", tmp_path / "no such directory" / "log")
    before = open_descriptors()

    with pytest.raises(FileNotFoundError):
        supervisor.start()

    assert open_descriptors() == before
    assert supervisor.pid is None


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
