"""Memory of the training process, of its children and of the devices, and the limit of the machine or its control group.

It is read from `/proc` and `/sys/fs/cgroup` at most once per second, by the process that makes the records: the worker, if there is one.
Systems without `/proc` do not have values.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

SAMPLE_SECONDS: Final = 1.0
"""Minimum time between two samples: reading dozens of processes takes a millisecond."""
MAX_FORKED_FRAC: Final = 0.01
"""Share of the time that may be spent on counting the private pages of forked processes."""
MAX_CHILDREN: Final = 512
MIB: Final = 2**20
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class MemoryUsage(NamedTuple):
    """One sample; None if the system does not say.

    Attributes:
        process: resident bytes of the training process.
        children: private bytes of its descendants; shared memory is not counted twice.
        limit: bytes that all of them may use: the smallest limit of a control group, or the machine's memory.
        device: bytes that the process has reserved on its devices.
        device_frac: share of the fullest device that is taken, by any process.
    """

    process: int | None = None
    children: int | None = None
    limit: int | None = None
    device: int | None = None
    device_frac: float | None = None


class DeviceUsage(NamedTuple):
    """Memory of devices, as in `MemoryUsage`; only the process that uses them can measure it."""

    device: int | None = None
    device_frac: float | None = None


class DeviceSampler:
    """Samples the memory of the devices of this process."""

    def __init__(self) -> None:
        self._due, self._last = -1.0, DeviceUsage()

    def sample(self) -> DeviceUsage:
        """Return the memory now, or a sample of at most `SAMPLE_SECONDS` ago."""
        now = time.monotonic()
        if now >= self._due:
            self._due, self._last = now + SAMPLE_SECONDS, _devices()
        return self._last


class MemorySampler:
    """Samples the memory of one process.

    Args:
        pid: process ID; the calling process by default.
        clock: time in seconds.
    """

    def __init__(self, pid: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._clock = clock
        self._limit = memory_limit(self._pid)
        self._due, self._last = -1.0, MemoryUsage()
        self._forked: dict[int, int] = {}  # private bytes of forked processes, by process ID, the latest reading last
        self._forked_due = -1.0

    def sample(self, devices: DeviceUsage = DeviceUsage()) -> MemoryUsage:  # noqa: B008  # a tuple, which nothing changes
        """Return the memory now, or a sample of at most `SAMPLE_SECONDS` ago; `devices` as another process sees them."""
        now = self._clock()
        if now >= self._due or self._due < 0:
            self._due = now + SAMPLE_SECONDS
            seen = _devices() if self._pid == os.getpid() else devices
            self._last = MemoryUsage(resident_bytes(self._pid), self._children(now), self._limit, *seen)
        return self._last

    def _children(self, now: float) -> int | None:
        """Return the private memory of all descendants of the trainer; None if the system does not list them.

        In `statm`, pages that a forked process shares with its parent count as private. Counting them takes the kernel 10 ms or more,
        so one forked process is read at a time; processes that have not been read yet are estimated by the average of the others.
        """
        if not (PROC / str(self._pid) / "task" / str(self._pid) / "children").exists():
            return None
        others, forked = 0, []
        for pid, parent in _descendants(self._pid):
            if _command(pid) == _command(parent):
                forked.append(pid)
            else:
                others += resident_bytes(pid, private=True) or 0
        self._forked = {pid: count for pid, count in self._forked.items() if pid in forked}
        if forked and (now >= self._forked_due or not self._forked):
            pid = next((pid for pid in forked if pid not in self._forked), next(iter(self._forked), forked[0]))
            begun = time.perf_counter()
            self._forked.pop(pid, None)
            self._forked[pid] = private_bytes(pid)
            self._forked_due = now + (time.perf_counter() - begun) / MAX_FORKED_FRAC
        return others + round(len(forked) * sum(self._forked.values()) / max(1, len(self._forked)))


def resident_bytes(pid: int, *, private: bool = False) -> int | None:
    """Return the resident memory of a process, or only its private part; None if the process is gone or unknown."""
    with suppress(OSError, ValueError, IndexError):
        pages = (PROC / str(pid) / "statm").read_text().split()
        return (int(pages[1]) - (int(pages[2]) if private else 0)) * os.sysconf("SC_PAGE_SIZE")
    return None


def private_bytes(pid: int) -> int:
    """Return the private memory of a process, without pages that it shares with its parent since a fork."""
    with suppress(OSError, ValueError, IndexError):
        rows = (line.split() for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines())
        return sum(int(row[1]) << 10 for row in rows if row[0] in ("Private_Clean:", "Private_Dirty:"))
    return resident_bytes(pid, private=True) or 0


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes()
    return b""


def _descendants(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the ID of each process and of its parent."""
    unvisited, count = [pid], 0
    while unvisited and count < MAX_CHILDREN:
        parent = unvisited.pop()
        with suppress(OSError):
            for task in (PROC / str(parent) / "task").iterdir():
                with suppress(OSError):
                    children = [int(child) for child in (task / "children").read_text().split()]
                    unvisited += children
                    count += len(children)
                    yield from ((child, parent) for child in children)


def memory_limit(pid: int) -> int | None:
    """Return the smallest limit of the control groups of a process and of the machine's memory; None if neither is known."""
    limits = []
    with suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):
        for line in (PROC / str(pid) / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                limits += _group_limits(CGROUPS, path, "memory.max")
            elif "memory" in controllers.split(","):
                limits += _group_limits(CGROUPS / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _group_limits(root: Path, path: str, name: str) -> Iterator[int]:
    """Yield the limits of a control group and of its parents; a container may show its own group as the root."""
    group = root / path.lstrip("/")
    for place in {*(parent for parent in (group, *group.parents) if parent.is_relative_to(root)), root}:
        with suppress(OSError, ValueError):  # a missing file, or `max`
            yield int((place / name).read_text())


def _devices() -> DeviceUsage:
    """Return the memory of CUDA devices; unknown if torch is not imported or has not begun to use CUDA, because asking would begin it."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return DeviceUsage()
    with suppress(RuntimeError):
        reserved = {device: torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count())}
        free = [torch.cuda.mem_get_info(device) for device, count in reserved.items() if count]
        return DeviceUsage(sum(reserved.values()), max((1 - unused / total for unused, total in free), default=None))
    return DeviceUsage()
