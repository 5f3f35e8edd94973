"""Trainings that are disturbed from outside, and what became of them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper_telemetry import doctor, read_run, replay
from esper_telemetry.delivery.catch_up import audit
from esper_telemetry.delivery.child import MAX_DETACHED_SECONDS
from esper_telemetry.sinks import as_sink

HERE = Path(__file__).parent
UPDATES = 120
LIMIT_SECONDS = 240.0


@dataclass
class Outcome:
    """One row of the table.

    Attributes:
        ended: how the process ended, in words.
        speed: of the trainer, updates per second of its thread's processor time.
        wall: updates per second.
        trained: updates that were trained to their end.
        journalled: of these, how many the journal holds.
        whole: by sink, whether it holds what the journal holds, once what is missing was sent.
    """

    ended: str
    speed: float | None
    wall: float | None
    trained: int
    journalled: int
    whole: dict[str, bool | None]
    note: str = ""


def started(run_dir: Path, *sinks: str, updates: int = UPDATES, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """The training, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, str(HERE / "faulty_trainer.py"), str(run_dir), str(updates), *flags, *sinks],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "UPDATES_FILE": str(counter_of(run_dir)), "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def counter_of(run_dir: Path) -> Path:
    """Where the trainer notes how far it is: not on a disk that is full."""
    return Path(tempfile.gettempdir()) / f"esper-faults-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:16]}"


def updates_of(run_dir: Path) -> int:
    """How many updates the trainer says that it has trained."""
    try:
        return int(counter_of(run_dir).read_text() or 0)
    except OSError:
        return 0


def at_update(run_dir: Path, process: subprocess.Popen[str], update: int) -> None:
    """Waits until the training has come so far."""
    until(lambda: updates_of(run_dir) >= update or process.poll() is not None)
    assert process.poll() is None, process.communicate()


def until(condition: Callable[[], object], seconds: float = LIMIT_SECONDS) -> None:
    """Waits for it; raises TimeoutError where it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s in vain")
        time.sleep(0.05)


def outcome(run_dir: Path, process: subprocess.Popen[str], *, mend: Callable[[], object] = lambda: None) -> Outcome:
    """Waits for the end of the training, mends what was broken, lets its helpers end, sends what is missing and compares."""
    stdout, stderr = process.communicate(timeout=LIMIT_SECONDS)
    mend()
    until(lambda: not doctor_sees_processes(run_dir), MAX_DETACHED_SECONDS + LIMIT_SECONDS)
    told: dict[str, Any] = json.loads(stdout.splitlines()[-1]) if process.returncode == 0 else {}
    assert process.returncode <= 0, stderr
    run = read_run(run_dir)
    return Outcome(
        ended="finished" if process.returncode == 0 else f"died of {signal.Signals(-process.returncode).name}",
        speed=told["updates"] / told["cpu"] if told else None,
        wall=told["updates"] / told["wall"] if told else None,
        trained=updates_of(run_dir),
        journalled=len(run.records),
        whole=repaired(run_dir),
    )


def deserted(run_dir: Path, process: subprocess.Popen[str]) -> bool:
    """Whether the training has ended, and its helpers with it."""
    return process.poll() is not None and not doctor_sees_processes(run_dir)


def doctor_sees_processes(run_dir: Path) -> bool:
    """Whether helpers of the run are still at work."""
    return any(f"{run_dir}{os.sep}" in command for command in commands())


def commands() -> Iterator[str]:
    """The command lines of processes that are part of a run; the deliveries's child is found by its lock."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            yield from (link for link in _links(entry) if link.endswith(".lock"))


def _links(process: Path) -> Iterator[str]:
    """The files that a process has open, but for those that it closes meanwhile."""
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                yield str(link.readlink())


def repaired(run_dir: Path) -> dict[str, bool | None]:
    """Whether each sink holds what the journal holds, after `replay --missing` where it did not."""
    found: dict[str, bool | None] = {}
    for sink in doctor(run_dir).sinks:
        found[sink.name] = sink.equal
        if sink.audit is not None and not sink.audit.equal and sink.command:
            uri = sink.command.split()[sink.command.split().index("--to") + 1].strip("'")
            replay(run_dir, as_sink(uri), missing=True)
            again = audit(run_dir, as_sink(uri))
            found[sink.name] = again is not None and again.equal
    return found


def descendants(process: subprocess.Popen[str], name: str) -> list[int]:
    """Processes of that name that the training started, directly or not."""
    parents = {int(entry.name): _parent(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    return [pid for pid in parents if name in _command(pid) and process.pid in _line(pid, parents)]


def _line(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while (pid := parents.get(pid, 0)) > 1:
        yield pid


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
