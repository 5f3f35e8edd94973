"""The process itself: how it is started, and what it does."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from esper_telemetry.courtesy import collect_rarely, step_back
from esper_telemetry.journal import Journal, Role, end_after, lock_for
from esper_telemetry.offload.messages import messages, reply
from esper_telemetry.offload.plain import Listener
from esper_telemetry.offload.ring import Ring
from esper_telemetry.offload.words import AWAITED, RING_BYTES, WORDS
from esper_telemetry.record import Level
from esper_telemetry.writer import JournalWriter

ENTRY: Final = "from esper_telemetry.offload.process import main; main()"
LOG_NAME: Final = "summary.log"

PIPE_BYTES: Final = 1 << 20
"""What the pipe should hold: the descriptions of all metrics, and several updates besides their tensors."""

NICENESS: Final = 10
"""The trainer goes first where cores are scarce; the sinks' process is nicer still."""

_logger = logging.getLogger("esper_telemetry")


def worth_offloading() -> bool:
    """Return whether this system can run the process, which takes memory files (Linux), and has a second core for it."""
    if not hasattr(os, "memfd_create"):
        return False
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) > 1


def started(run_dir: Path, level: Level, acknowledgements: int, shared: int) -> subprocess.Popen[bytes]:
    """Starts it: it answers through one descriptor, and shares the memory behind the other."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    lock = lock_for(run_dir, Role.WRITER)
    try:
        with (run_dir / LOG_NAME).open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-c", ENTRY, str(run_dir), level.name),
                    *map(str, (os.getpid(), acknowledgements, shared)),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[acknowledgements, shared, lock],
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            )
    finally:
        os.close(lock)


def private_pipe(process: subprocess.Popen[bytes]) -> int:
    """Our end of the process's input: large, and never blocking."""
    assert process.stdin is not None
    with process.stdin:
        pipe = os.dup(process.stdin.fileno())
    os.set_blocking(pipe, False)
    with suppress(OSError, AttributeError):  # where the system allows less, or has no such call, more waits in memory
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return pipe


class Told(logging.Handler):
    """Keeps what is warned of, for the trainer, who sees no log of this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one warning."""
        self._warnings.append(" ".join(record.getMessage().split()))

    def take(self) -> Sequence[str]:
        """What was warned of since the last call, a line each."""
        warnings, self._warnings = self._warnings, []
        return warnings


def main() -> None:
    """Does what comes in, in order, and answers each with warnings and what was found, until the end of the input."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    run_dir, level = Path(sys.argv[1]), Level[sys.argv[2]]
    parent, acknowledgements, shared = map(int, sys.argv[3:])
    step_back(NICENESS)
    collect_rarely()
    torch.set_num_threads(1)
    logging.basicConfig(format="%(asctime)s %(message)s")
    told = Told()
    _logger.addHandler(told)
    _logger.setLevel(logging.DEBUG)
    os.set_blocking(acknowledgements, False)
    ring = Ring(shared, RING_BYTES)
    listener = Listener()
    incoming = messages(parent, ring, WORDS, lambda content: ("record", (listener.hear(content),)))
    watches = next(incoming, None)
    if watches is None:
        return
    writer = JournalWriter(Journal.open(run_dir), level, watches.load())
    method = ""
    for message in incoming:
        method, arguments = message.load()
        getattr(writer, method)(*arguments)
        answer = [*told.take(), *writer.found()]
        speaks = bool(answer) or method in AWAITED
        if speaks:
            with suppress(BrokenPipeError):
                reply(acknowledgements, answer, parent)
        ring.answer(told=speaks)
    if method not in ("", "end"):
        end_after(parent, run_dir)
