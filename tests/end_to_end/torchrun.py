"""`torchrun` with two processes, as a terminal starts it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from command_line import python_path
from waiting import wait_until

TRAIN = ("-m", "esper_telemetry", "train")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PATIENCE_SECONDS = 120.0


@contextmanager
def started(*program: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """`torchrun --nproc-per-node 2` with this program; remaining processes are killed at the end."""
    launcher = subprocess.Popen(
        [sys.executable, *LAUNCHER, *program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment()
    )
    try:
        yield launcher
    finally:
        for pid in _children(launcher.pid) if launcher.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
        launcher.kill()
        launcher.communicate()


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}


def output(launcher: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """Return stdout and stderr once the launcher has ended; raise after that many seconds."""
    return launcher.communicate(timeout=seconds)


def pid_of(rank: int, launcher: subprocess.Popen[str]) -> int:
    """The process of a rank; the launcher's children have their rank in their environment."""
    for child in _children(launcher.pid):
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return child
    raise LookupError(f"rank {rank} is not there")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def until(condition: Callable[[], bool], launcher: subprocess.Popen[str]) -> None:
    def holds() -> bool:
        assert launcher.poll() is None, "torchrun has ended"
        return condition()

    wait_until(holds, "the ranks", PATIENCE_SECONDS)
