"""What the processes of one `torchrun` agree on, and how one is told of the death of another.

Every rank checks its own arguments, so a mistake of one is raised on all of them before anything is created. A signal to one rank stops
all of them after the same update. A rank that is gone makes the others' next exchange fail: they look who it was and say so.
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

from esper_telemetry.cli.mistakes import WrongUse, wrong_use

Prepared = TypeVar("Prepared")

PATIENCE: Final = timedelta(minutes=10)
"""How long a rank waits for another one that lives but says nothing, evaluations and checkpoints of rank 0 included."""
SEARCH_SECONDS: Final = 3.0
"""How long the ranks that are left look for the one that has gone."""
LOOK_SECONDS: Final = 0.05
WATCH_SECONDS: Final = 1.0
"""How often a rank looks after the others."""
GRACE_SECONDS: Final = 5.0
"""How long the training thread has to notice by itself that a rank has gone."""
FAILED: Final = 1


class RankLostError(RuntimeError):
    """Another process of the run has ended, and this one cannot go on without it."""


class RankPlace(NamedTuple):
    """Where a rank runs."""

    host: str
    pid: int


def first() -> bool:
    """Whether this process is the one that speaks: the only one, or rank 0 of those that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Joins the processes that `torchrun` started, if it did."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    place = int(os.environ["LOCAL_RANK"])
    if device == "cuda" and place < torch.cuda.device_count():  # a missing one is refused with the other arguments
        torch.cuda.set_device(place)
    dist.init_process_group(backends(device), timeout=PATIENCE)
    try:
        yield
    finally:
        with suppress(RuntimeError):  # where a rank is gone the group cannot be left in order
            dist.destroy_process_group()


def backends(device: str) -> str:
    """What exchanges tensors, by where they are: counts and plain values on the host, gradients on the device.

    NCCL wants an accelerator for each rank; a named one is shared by all.
    """
    if not (device.startswith("cuda") and torch.cuda.is_available()):
        return "gloo"
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "cpu:gloo,cuda:gloo"


def own_device(device: str) -> str:
    """`cuda` as the accelerator of this process: each has its own."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and _together() else device


def agreed(prepare: Callable[[], Prepared]) -> Prepared:
    """What `prepare` gives, on every rank; WrongUse on all of them where it finds a mistake on one."""
    found: Prepared | None = None
    mistake: str | None = None
    try:
        with wrong_use():
            found = prepare()
    except WrongUse as error:
        mistake = str(error)
    mistakes = _from_all(mistake)
    for rank, text in enumerate(mistakes):
        if text is not None:
            raise WrongUse(text if mistakes[0] is not None else f"on rank {rank}: {text}")
    assert found is not None
    return found


def strongest(number: int) -> int:
    """The largest of the ranks' numbers, such as the signals that came."""
    return int(max(_from_all(number)))


@contextmanager
def watching_ranks(give_up: Callable[[RankLostError], None]) -> Iterator[None]:
    """Within it, an exchange that fails because a rank has gone raises RankLostError with its number.

    An exchange over NCCL does not fail where a peer is gone, and a thread that waits for it cannot be called back. Another thread
    therefore looks after the ranks of this host: if one is gone and nothing has been raised, it calls `give_up` and ends the process.
    """
    places = [RankPlace(*place) for place in _from_all((socket.gethostname(), os.getpid()))]
    left = threading.Event()
    if len(places) > 1:
        threading.Thread(target=_watch, args=(places, left, give_up), daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        lost = (
            _lost_within(places, SEARCH_SECONDS)
            if len(places) > 1 and not isinstance(error, FloatingPointError)
            else []
        )
        if not lost:
            raise
        raise _lost_error(places, lost) from error
    finally:
        left.set()


def _watch(places: list[RankPlace], left: threading.Event, give_up: Callable[[RankLostError], None]) -> None:
    while not left.wait(WATCH_SECONDS):
        lost = _lost_within(places, 0.0)
        if lost:
            if not left.wait(GRACE_SECONDS):
                give_up(_lost_error(places, lost))
                os._exit(FAILED)
            return


def _lost_error(places: list[RankPlace], lost: list[int]) -> RankLostError:
    names = " and ".join(f"rank {rank} (process {places[rank].pid} on {places[rank].host})" for rank in lost)
    return RankLostError(f"{names} of {len(places)} ended before its time: the run cannot go on")


def _together() -> bool:
    return dist.is_available() and dist.is_initialized()


def _from_all(value: Any) -> list[Any]:
    """Every rank's value."""
    if not _together():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _lost_within(places: list[RankPlace], seconds: float) -> list[int]:
    """Ranks of this host whose process has ended; a process that is killed may take a moment to be seen so."""
    deadline = time.monotonic() + seconds
    here = [rank for rank, place in enumerate(places) if place.host == socket.gethostname()]
    while True:
        lost = [rank for rank in here if not _lives(places[rank].pid)]
        if lost or time.monotonic() >= deadline:
            return lost
        time.sleep(LOOK_SECONDS)


def _lives(pid: int) -> bool:
    """Whether the process runs; one that has ended and that nobody has asked about yet does not."""
    status = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        with suppress(OSError):
            return status.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] not in ("Z", "X")
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
