"""`torchrun` with two processes, as a terminal starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TRAIN = ("-m", "esper_telemetry", "train")
PATIENCE_SECONDS = 60.0


def started(*program: str, cwd: Path) -> subprocess.Popen[str]:
    """`torchrun --nproc-per-node 2` with this program, in a process group of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    return subprocess.Popen(
        [*command, *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
        start_new_session=True,
    )


def pid_of(rank: int, launcher: subprocess.Popen[str]) -> int:
    """The process of a rank; the launcher's children carry their rank in their environment."""
    for child in _children(launcher.pid):
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return child
    raise LookupError(f"rank {rank} is not there")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def until(condition: Callable[[], bool], launcher: subprocess.Popen[str]) -> None:
    """Waits for it; fails, with what the processes said, where they end first."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if launcher.poll() is not None or time.monotonic() > deadline:
            launcher.kill()
            raise AssertionError(launcher.communicate())
        time.sleep(0.1)
