"""If the system refuses a call of telemetry, training ends with the same weights as without telemetry, and each affected part warns once.

What telemetry asks the system for, and the test that refuses it:

| call | for | refused in |
|---|---|---|
| `os.memfd_create`, `os.truncate`, `mmap.mmap` | memory shared with the worker | MONKEY, `file size` |
| `os.pipe`, `select.poll` | the worker's and the sink process's messages | MONKEY, `descriptors` |
| `subprocess.Popen` | both processes | MONKEY, `processes` |
| `os.open` of `*.lock`, `fcntl.flock` | who trains, who delivers | MONKEY |
| `fcntl.fcntl(F_SETPIPE_SZ)` | a larger pipe | MONKEY, `test_platforms.py` |
| `Path.open` of `*.log` | logs of both processes | MONKEY |
| `Path.mkdir`, `os.open` of the journal | the run directory | MONKEY, `read-only` |
| `os.write` of the journal | records | `file size`, at the start and in the middle |
| `Path.write_text` | `config.json`, `cursors.json`, `status.json` | MONKEY |
| `JournalReader` (`Path.open`) | deliveries in this process | MONKEY, `descriptors` |
| `threading.Thread.start` | deliveries in this process | MONKEY, `processes` |
| a port | `prometheus:PORT` | `test_a_port_that_is_taken...` |
| `os.writev`, `os.read`, `Journal.open`, the life of the worker | a worker at work | `test_a_worker_that_is_killed...` |
| `torch.save` of the command's checkpoints | checkpoints | `test_the_command_...` |

Real refusals are process limits (`resource`), which child processes inherit. They are set in a separate program. `tests/fault_matrix` tests
the descriptors and files of backends. Readers (`diagnose`, `replay`, `compress`) run without training.
"""

import errno
import fcntl
import json
import logging
import mmap
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import run_python
from permissions import keep_to_permissions
from trainings import TRAININGS, UPDATES, nothing
from waiting import wait_until

from esper_telemetry import PrometheusSink, Record, RunStatus, Telemetry, read_run
from esper_telemetry.pipeline.worker import WorkerPipeline
from esper_telemetry.sinks import SinkLike
from esper_telemetry.telemetry import session_of

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
PROGRAM = HERE / "refused_run.py"
WORKER = "cannot start the process that summarises updates"
SINKS = "cannot start the process that feeds the sinks"
THREAD = "sink .* cannot start"
JOURNAL = "cannot write to run directory"
REPORTS = re.compile("send the rest with|not everything is delivered yet|sink [^ ]+ is slow")
"""Lines in which `close` reports undelivered records, or a busy machine a slow backend."""

Patch = Callable[[pytest.MonkeyPatch], None]


def names(*endings: str) -> Callable[[tuple[Any, ...]], bool]:
    """Return a test: the first argument is a path with one of these endings."""
    return lambda arguments: str(arguments[0]).endswith(endings)


def reads(*endings: str) -> Callable[[tuple[Any, ...]], bool]:
    """Return a test: the first argument is a path with one of these endings, and the second opens it for reading only."""
    return lambda arguments: names(*endings)(arguments) and arguments[1] & os.O_ACCMODE == os.O_RDONLY


def ignore(record: Record) -> None:
    """A sink that runs in a thread of this process."""


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def refuse(owner: Any, name: str, number: int, when: Callable[[tuple[Any, ...]], bool] = lambda _: True) -> Patch:
    """Let a system call fail for such arguments."""
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if when(arguments):
            raise OSError(number, os.strerror(number))
        return original(*arguments, **options)

    return lambda patch: patch.setattr(owner, name, call)


MONKEY: dict[str, tuple[Patch, tuple[str, ...]]] = {
    "memory file": (refuse(os, "memfd_create", errno.EMFILE), (WORKER,)),
    "size of the memory file": (refuse(os, "truncate", errno.ENOSPC), (WORKER,)),
    "mapping": (refuse(mmap, "mmap", errno.ENOMEM), (WORKER,)),
    "pipe": (refuse(os, "pipe", errno.EMFILE), (WORKER, SINKS)),
    "process": (refuse(subprocess, "Popen", errno.EAGAIN), (WORKER, SINKS)),
    "larger pipe": (refuse(fcntl, "fcntl", errno.EPERM), ()),
    "lock": (refuse(fcntl, "flock", errno.ENOLCK), ()),
    "lock of the trainer": (refuse(os, "open", errno.EACCES, names("trainer.lock")), ("cannot lock run directory",)),
    "lock of the worker": (refuse(os, "open", errno.ENOSPC, names("writer.lock")), (WORKER,)),
    "lock of the sink process": (refuse(os, "open", errno.ENOSPC, names("sinks.lock")), (SINKS,)),
    "log of the worker": (refuse(os, "open", errno.ENOSPC, names("summary.log")), (WORKER,)),
    "log of the sink process": (refuse(os, "open", errno.ENOSPC, names("sinks.log")), (SINKS,)),
    "directory": (refuse(Path, "mkdir", errno.EROFS), (JOURNAL,)),
    "journal": (refuse(os, "open", errno.ENOSPC, names("journal.jsonl")), (JOURNAL,)),
    "small files": (refuse(Path, "write_text", errno.ENOSPC), ("cannot write config.json", "cannot save .*cursors.json")),
    "reader": (refuse(os, "open", errno.EMFILE, reads("journal.jsonl")), (THREAD,)),
    "thread": (lambda patch: patch.setattr(threading.Thread, "start", no_thread), (THREAD,)),
}


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker be started on any machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


@cache
def untouched(training: str) -> str:
    """Return the weights without telemetry."""
    return TRAININGS[training](None, nothing)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in map(logging.LogRecord.getMessage, records) if not REPORTS.search(message)]


def check(warnings: list[str], expected: tuple[str, ...]) -> None:
    """Expect exactly these warnings, in any order."""
    assert len(warnings) == len(expected), warnings
    for pattern in expected:
        assert any(re.search(pattern, warning) for warning in warnings), (pattern, warnings)


WITHOUT_WORKER = (*("lock of the trainer", "lock of the sink process", "log of the sink process", "small files", "reader", "thread"),)
"""Resources of the trainer and the sinks. `make test` refuses them to a run without a worker, because starting one takes two seconds of a
core.
"""

OF_EACH_PART = ("mapping", "process", "journal", "thread")
"""Resources that `make test` refuses to one trainer only, because these parts of telemetry do not depend on the trainer."""


def marks(training: str, refusal: str, offload: bool) -> list[pytest.MarkDecorator]:
    if training == "sb3":
        return [pytest.mark.sb3]
    is_repeated = training == "own_loop" and refusal not in OF_EACH_PART
    return [pytest.mark.slow] if is_repeated or (offload and refusal in WITHOUT_WORKER) else []


@pytest.mark.parametrize(
    ("training", "refusal", "offload"),
    [pytest.param(*case, marks=marks(*case)) for case in product(TRAININGS, MONKEY, (True, False)) if case[2] or case[1] in WITHOUT_WORKER],
)
def test_training_ends_as_without_telemetry(
    training: str, refusal: str, offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = untouched(training)
    patch, patterns = MONKEY[refusal]
    sinks: list[SinkLike] = [PrometheusSink(tmp_path / "metrics.prom")] if SINKS in patterns else [ignore]
    patch(monkeypatch)
    with Telemetry(sinks, run_dir=tmp_path / "run", offload=offload, close_timeout=120.0) as telemetry:
        weights = TRAININGS[training](telemetry, nothing)
    monkeypatch.undo()

    assert weights == expected
    check(warnings_of(caplog), patterns)


def test_a_port_that_is_taken_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with Telemetry([PrometheusSink(port=port)], run_dir=tmp_path / "run", close_timeout=20.0) as telemetry:
            weights = TRAININGS["own_loop"](telemetry, nothing)

    assert weights == untouched("own_loop")
    check(warnings_of(caplog), (f"sink prometheus:{port} failed .*in use",))


@pytest.mark.parametrize(
    ("training", "readable"),
    [
        pytest.param("bundled", True, marks=pytest.mark.slow),
        ("bundled", False),
        ("own_loop", True),
        pytest.param("own_loop", False, marks=pytest.mark.slow),
        *(pytest.param("sb3", readable, marks=pytest.mark.sb3) for readable in (True, False)),
    ],
)
def test_a_worker_that_is_killed_in_the_middle_is_replaced_even_where_no_file_can_be_opened(
    training: str, readable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = untouched(training)

    def middle() -> None:
        pipeline = session_of(telemetry)._recorder.pipeline  # type: ignore[union-attr]
        assert isinstance(pipeline, WorkerPipeline)
        wait_until(lambda: '"record"' in (tmp_path / "run" / "journal.jsonl").read_text(), "the first record")
        os.kill(pipeline.pid, signal.SIGKILL)
        if not readable:
            refuse(Path, "open", errno.EMFILE, names("journal.jsonl"))(monkeypatch)
            refuse(os, "open", errno.EMFILE, names("journal.jsonl"))(monkeypatch)

    with Telemetry([ignore], run_dir=tmp_path / "run", offload=True, close_timeout=120.0) as telemetry:
        weights = TRAININGS[training](telemetry, middle)
    monkeypatch.undo()

    assert weights == expected
    cursors = () if readable else ("cannot save .*cursors.json",)
    check(warnings_of(caplog), ("the process that summarises updates has died", *cursors))
    run = read_run(tmp_path / "run")
    assert len(run.records) >= UPDATES
    assert [record.axes.update for record in run.records] == [*range(1, len(run.records) + 1)]
    assert run.status is RunStatus.FINISHED


def test_a_sink_process_that_dies_and_cannot_be_started_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def middle() -> None:
        pid = session_of(telemetry)._deliveries.child_pid  # type: ignore[union-attr]
        assert pid is not None
        refuse(os, "pipe", errno.EMFILE)(monkeypatch)
        os.kill(pid, signal.SIGKILL)

    sink = PrometheusSink(tmp_path / "metrics.prom")
    with Telemetry([sink], run_dir=tmp_path / "run", offload=False, close_timeout=60.0) as telemetry:
        weights = TRAININGS["own_loop"](telemetry, middle)

    assert weights == untouched("own_loop")
    check(warnings_of(caplog), ("feeds the sinks died", SINKS))


LOST = r"\d+ of \d+ records are not in the journal, because the disk did not take them; \d+ are lost"

REAL = [
    ("bundled", "file_size", "start", (WORKER, "cannot write to .*journal.jsonl", LOST)),
    ("bundled", "file_size", "middle", ("cannot write to .*journal.jsonl", LOST)),
    pytest.param("own_loop", "file_size", "start", (WORKER, "cannot write to .*journal.jsonl", LOST), marks=pytest.mark.slow),
    pytest.param("own_loop", "file_size", "middle", ("cannot write to .*journal.jsonl", LOST), marks=pytest.mark.slow),
    ("bundled", "descriptors", "start", (JOURNAL,)),
    pytest.param("bundled", "descriptors", "middle", ("cannot save .*cursors.json",), marks=pytest.mark.slow),
    pytest.param("own_loop", "descriptors", "start", (JOURNAL,), marks=pytest.mark.slow),
    ("own_loop", "descriptors", "middle", ("cannot save .*cursors.json",)),
    pytest.param("bundled", "processes", "start", (WORKER, THREAD), marks=pytest.mark.slow),
    ("own_loop", "processes", "start", (WORKER, THREAD)),
    pytest.param("own_loop", "processes", "middle", (), marks=pytest.mark.slow),
    ("bundled", "read_only", "start", (JOURNAL,)),
    pytest.param("own_loop", "read_only", "start", (JOURNAL,), marks=pytest.mark.slow),
    pytest.param("sb3", "file_size", "start", (WORKER, "cannot write to .*journal.jsonl", LOST), marks=pytest.mark.sb3),
    pytest.param("sb3", "file_size", "middle", ("cannot write to .*journal.jsonl", LOST), marks=pytest.mark.sb3),
    pytest.param("sb3", "descriptors", "start", (JOURNAL,), marks=pytest.mark.sb3),
    pytest.param("sb3", "processes", "start", (WORKER, THREAD), marks=pytest.mark.sb3),
]


@pytest.mark.parametrize(("training", "resource", "moment", "patterns"), REAL)
def test_training_ends_as_without_telemetry_where_the_system_itself_refuses(
    training: str, resource: str, moment: str, patterns: tuple[str, ...]
) -> None:
    words: list[str | Path] = [PROGRAM, training, resource, moment]
    if resource == "read_only":
        program = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, preexec_fn=keep_to_permissions)
    else:
        program = run_python(*words, one_core=False)

    assert program.returncode == 0, program.stderr
    report = json.loads(program.stdout)
    assert report["weights"] == untouched(training)
    check([warning for warning in report["warnings"] if not REPORTS.search(warning)], patterns)


def test_the_command_trains_where_no_file_may_be_larger_than_60_kb_and_says_that_no_checkpoint_is_there(tmp_path: Path) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (60 << 10, 60 << 10));from esper_telemetry.__main__ import main; main()"
    )
    options = ["train", "--env", "CartPole-v1", "--total-steps", "4096", "--run-dir", "run"]
    command = run_python("-c", code, *options, cwd=tmp_path, one_core=False)

    assert "Traceback" not in command.stderr
    messages = [line for line in command.stderr.splitlines() if "esper-telemetry: cannot" in line]
    check(messages, (WORKER, "cannot write to .*journal.jsonl", "cannot write a checkpoint"))
    assert command.returncode == 1, "the trained policy is lost"
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_library_that_cannot_be_imported_in_the_middle_costs_what_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NumPy imports parts of itself at their first use, which needs a descriptor."""
    expected = untouched("bundled")
    with Telemetry([ignore], run_dir=tmp_path / "run", offload=False) as telemetry:
        weights = TRAININGS["bundled"](telemetry, lambda: refuse(np, "unique", errno.EMFILE)(monkeypatch))
    monkeypatch.undo()

    assert weights == expected
    check(warnings_of(caplog), ("Too many open files.* is missing from the records",))
    assert len(read_run(tmp_path / "run").records) >= UPDATES


def test_a_trainer_with_more_than_a_thousand_open_files_uses_the_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`select` does not accept a descriptor above 1023, which would end training when `close` waits for the worker."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    opened = [os.dup(0) for _ in range(1100)]
    try:
        with Telemetry([ignore], run_dir=tmp_path / "run", close_timeout=120.0) as telemetry:
            weights = TRAININGS["bundled"](telemetry, nothing)
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert weights == untouched("bundled")
    check(warnings_of(caplog), ())
    assert read_run(tmp_path / "run").status is RunStatus.FINISHED
