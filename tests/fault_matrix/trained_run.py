"""Trainings that are disturbed from outside, and their outcomes."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import wait_until

from esper_telemetry import doctor, read_run, replay
from esper_telemetry.delivery.catch_up import audit, sink_uris
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
        speed: updates per second of processor time of the training thread.
        wall: updates per second.
        trained: number of completed updates.
        journalled: number of updates in the journal.
        whole: by sink, whether it equals the journal once missing records were sent.
    """

    ended: str
    speed: float | None
    wall: float | None
    trained: int
    journalled: int
    whole: dict[str, bool | None]
    note: str = ""


def started(run_dir: Path, *sinks: str, updates: int = UPDATES, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / "faulty_trainer.py"), str(run_dir), str(updates), *flags, *sinks],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "UPDATES_FILE": str(counter_of(run_dir)), "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def counter_of(run_dir: Path) -> Path:
    """Path of the trainer's own count of updates, outside the full disk."""
    return Path(tempfile.gettempdir()) / f"esper-faults-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:16]}"


def updates_of(run_dir: Path) -> int:
    try:
        return int(counter_of(run_dir).read_text() or 0)
    except OSError:
        return 0


def at_update(run_dir: Path, process: subprocess.Popen[str], update: int) -> None:
    wait_until(lambda: updates_of(run_dir) >= update or process.poll() is not None, f"update {update}", LIMIT_SECONDS)
    assert process.poll() is None, process.communicate()


def outcome(run_dir: Path, process: subprocess.Popen[str], *, mend: Callable[[], object] = lambda: None) -> Outcome:
    """Wait for the end of the training, repair the fault, wait for its helpers, send missing records and compare."""
    stdout, stderr = process.communicate(timeout=LIMIT_SECONDS)
    mend()
    seconds = MAX_DETACHED_SECONDS + LIMIT_SECONDS
    wait_until(lambda: not doctor_sees_processes(run_dir), "the end of the helper processes", seconds)
    report: dict[str, Any] = json.loads(stdout.splitlines()[-1]) if process.returncode == 0 else {}
    assert process.returncode <= 0, stderr
    run = read_run(run_dir)
    return Outcome(
        ended="finished" if process.returncode == 0 else f"died of {signal.Signals(-process.returncode).name}",
        speed=report["updates"] / report["cpu"] if report else None,
        wall=report["updates"] / report["wall"] if report else None,
        trained=updates_of(run_dir),
        journalled=len(run.records),
        whole=repaired(run_dir),
    )


def deserted(run_dir: Path, process: subprocess.Popen[str]) -> bool:
    return process.poll() is not None and not doctor_sees_processes(run_dir)


def doctor_sees_processes(run_dir: Path) -> bool:
    return any(f"{run_dir}{os.sep}" in command for command in commands())


def commands() -> Iterator[str]:
    """Locks that other processes hold open, by which a run's helper processes are found."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            yield from (link for link in _links(entry) if link.endswith(".lock"))


def _links(process: Path) -> Iterator[str]:
    """The files that a process has open, except files closed in the meantime."""
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                yield str(link.readlink())


def repaired(run_dir: Path) -> dict[str, bool | None]:
    """By sink, whether it equals the journal, if necessary after `replay --missing`."""
    equality: dict[str, bool | None] = {}
    for sink in doctor(run_dir, agreed=sink_uris(run_dir).values()).sinks:
        equality[sink.name] = sink.equal
        if sink.audit is not None and not sink.audit.equal and sink.command:
            uri = sink.command.split()[sink.command.split().index("--to") + 1].strip("'")
            replay(run_dir, as_sink(uri), missing=True)
            again = audit(run_dir, as_sink(uri))
            equality[sink.name] = again is not None and again.equal
    return equality


def descendants(process: subprocess.Popen[str], name: str) -> list[int]:
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
