"""Agreement between the processes of one `torchrun`, and the detection of a rank that has ended.

Every rank checks its own arguments, and a mistake on one rank is raised on all of them before anything is created. A signal to one rank
stops all of them after the same update. If a rank has ended, the next exchange of the others fails, and they report which rank it was.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from esper_telemetry.cli.arguments import WrongUse, wrong_use
from esper_telemetry.ppo.gradient_ranks import Ranks

T = TypeVar("T")

EXCHANGE_TIMEOUT: Final = timedelta(minutes=10)
"""Maximum wait for another rank that is alive but does not answer, including evaluations and checkpoints of rank 0."""
SEARCH_SECONDS: Final = 3.0
"""Maximum time to search for the rank that made an exchange fail."""
SEARCH_POLL_SECONDS: Final = 0.05
WATCH_SECONDS: Final = 1.0
"""Time between two checks of the other ranks."""
GRACE_SECONDS: Final = 5.0
"""Time in which the training thread should notice that a rank has ended."""
FAILED: Final = 1


class RankLostError(RuntimeError):
    """Another process of the run has ended, and this process cannot continue without it."""


class RankProcess(NamedTuple):
    """The process of a rank."""

    host: str
    pid: int


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the processes that `torchrun` started, if it did."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    # A missing device is reported with the other arguments.
    if device == "cuda" and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
    dist.init_process_group(backends(device), timeout=EXCHANGE_TIMEOUT)
    try:
        yield
    finally:
        with suppress(RuntimeError):  # raised if a rank has ended
            dist.destroy_process_group()


def backends(device: str) -> str:
    """Return torch's backends: counts and plain values are exchanged on the host, gradients on the device.

    NCCL needs an accelerator for each rank; all ranks share a device such as `cuda:1`.
    """
    if not (device.startswith("cuda") and torch.cuda.is_available()):
        return "gloo"
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "cpu:gloo,cuda:gloo"


def own_device(device: str) -> str:
    """Return the device, with `cuda` resolved to the accelerator of this process."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and not Ranks.current().alone else device


def agreed(prepare: Callable[[], T]) -> T:
    """Return the result of `prepare`; raises WrongUse on all ranks if `prepare` finds a mistake on one."""
    result: T | None = None
    mistake: str | None = None
    try:
        with wrong_use():
            result = prepare()
    except WrongUse as error:
        mistake = str(error)
    mistakes = _from_all(mistake)
    for rank, text in enumerate(mistakes):
        if text is not None:
            raise WrongUse(text if mistakes[0] is not None else f"on rank {rank}: {text}")
    assert result is not None
    return result


def largest_over_ranks(number: int) -> int:
    """Return the largest of the ranks' numbers."""
    return int(max(_from_all(number)))


@contextmanager
def watching_ranks(give_up: Callable[[RankLostError], None]) -> Iterator[None]:
    """Raise RankLostError, with the rank's number, for an exchange that fails because a rank has ended.

    An exchange over NCCL does not fail if a peer has ended, and a thread that waits for it cannot be interrupted. Another thread
    therefore watches the ranks of this host: if one has ended and nothing was raised, it calls `give_up` and ends the process.
    """
    processes = [RankProcess(*values) for values in _from_all((socket.gethostname(), os.getpid()))]
    done = threading.Event()
    if len(processes) > 1:
        threading.Thread(target=_watch, args=(processes, done, give_up), daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        may_be_lost = len(processes) > 1 and not isinstance(error, FloatingPointError)
        lost = _lost_within(processes, SEARCH_SECONDS) if may_be_lost else []
        if not lost:
            raise
        raise _lost_error(processes, lost) from error
    finally:
        done.set()


def _watch(processes: list[RankProcess], done: threading.Event, give_up: Callable[[RankLostError], None]) -> None:
    while not done.wait(WATCH_SECONDS):
        lost = _lost_within(processes, 0.0)
        if lost:
            if not done.wait(GRACE_SECONDS):
                give_up(_lost_error(processes, lost))
                os._exit(FAILED)
            return


def _lost_error(processes: list[RankProcess], lost: list[int]) -> RankLostError:
    names = " and ".join(f"rank {rank} (process {processes[rank].pid} on {processes[rank].host})" for rank in lost)
    return RankLostError(f"{names} of {len(processes)} ended early: the run cannot continue")


def _from_all(value: Any) -> list[Any]:
    if Ranks.current().alone:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _lost_within(processes: list[RankProcess], seconds: float) -> list[int]:
    """Return the ranks of this host whose process has ended; the end of a killed process may take a moment to show."""
    deadline = time.monotonic() + seconds
    local_ranks = [rank for rank, process in enumerate(processes) if process.host == socket.gethostname()]
    while True:
        lost = [rank for rank in local_ranks if not _is_running(processes[rank].pid)]
        if lost or time.monotonic() >= deadline:
            return lost
        time.sleep(SEARCH_POLL_SECONDS)


def _is_running(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    status = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        with suppress(OSError):
            return status.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] not in ("Z", "X")
        return False
    if os.name == "nt":  # its `os.kill` would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
