"""Train under a system limit: `refused_run.py TRAINING RESOURCE MOMENT` prints the weights and telemetry's warnings as JSON."""

import json
import logging
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trainings import TRAININGS, Middle, nothing

from esper_telemetry import Record, Telemetry
from esper_telemetry.pipeline.worker import WorkerPipeline
from esper_telemetry.telemetry import session_of

FILE_BYTES = 60 << 10
USER = 54321
"""A user without processes, because root may start any number."""


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def ignore(record: Record) -> None:
    """A sink that runs in a thread of this process."""


def file_size(run_dir: Path, telemetry: Telemetry | None) -> None:
    """Let no file grow beyond a size, in the worker too."""
    journal, limit = run_dir / "journal.jsonl", FILE_BYTES
    if telemetry is not None:
        while b'"record"' not in journal.read_bytes():
            time.sleep(0.02)
        limit = journal.stat().st_size
        pipeline = session_of(telemetry)._recorder.pipeline  # type: ignore[union-attr]
        if isinstance(pipeline, WorkerPipeline):
            resource.prlimit(pipeline.pid, resource.RLIMIT_FSIZE, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def descriptors(run_dir: Path, telemetry: Telemetry | None) -> None:
    """Let no more descriptors be opened."""
    count = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) + 1
    spare = [os.dup(0) for _ in range(count)]  # no gap may be left below the limit
    limit = max(spare) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def processes(run_dir: Path, telemetry: Telemetry | None) -> None:
    """Let no process and no thread be started."""
    if os.geteuid() == 0:
        for path in (run_dir.parent, *run_dir.parent.rglob("*")):
            os.chown(path, USER, USER)
        os.setresuid(USER, USER, USER)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))


def read_only(run_dir: Path, telemetry: Telemetry | None) -> None:
    """Make the parent of the run directory read-only."""
    run_dir.parent.chmod(0o555)


LIMITS: dict[str, Callable[[Path, Telemetry | None], None]] = {
    limit.__name__: limit for limit in (file_size, descriptors, processes, read_only)
}


def main(training: str, name: str, moment: str) -> None:
    """Train once without the limit, because imports open files too, then under it."""
    os.sched_getaffinity = lambda pid: {0, 1}  # a worker is started on any machine
    warnings = Warnings()
    train, limit = TRAININGS[training], LIMITS[name]
    place = Path(tempfile.mkdtemp(prefix="refused-run-"))
    try:
        with Telemetry([ignore], run_dir=place / "before", offload=False, close_timeout=120.0) as telemetry:
            train(telemetry, nothing)
        shutil.rmtree(place / "before")
        logging.getLogger("esper_telemetry").addHandler(warnings)
        run_dir = place / "run"
        if moment == "start":
            limit(run_dir, None)
        with Telemetry([ignore], run_dir=run_dir, offload=True, close_timeout=120.0) as telemetry:
            middle: Middle = nothing if moment == "start" else lambda: limit(run_dir, telemetry)
            weights = train(telemetry, middle)
    finally:
        if name != "descriptors":
            place.chmod(0o755)
            shutil.rmtree(place)
    print(json.dumps({"weights": weights, "warnings": warnings.texts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
