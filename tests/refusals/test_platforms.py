"""Systems without some of Linux's names, simulated by removing the names in the program and in its child processes."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainings import TRAININGS, nothing

from esper_telemetry import Telemetry, read_run

pytestmark = pytest.mark.system

HERE = Path(__file__).parent

MACOS = """
import fcntl, os, signal
for module, names in {
    os: ["memfd_create", "eventfd", "pidfd_open", "pipe2", "posix_fallocate", "fdatasync", "splice", "sched_getaffinity",
         "sched_setaffinity", "sched_setscheduler", "SCHED_BATCH", "SCHED_IDLE", "sched_param", "getrandom"],
    fcntl: ["F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_ADD_SEALS"],
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""
WINDOWS = """
import os, select, signal, sys
sys.modules["fcntl"] = sys.modules["resource"] = None
for module, names in {
    os: ["memfd_create", "fork", "pread", "pwrite", "readv", "writev", "set_blocking", "killpg", "nice", "getuid",
         "geteuid", "statvfs", "sched_getaffinity", "sched_setaffinity", "sched_setscheduler", "eventfd", "pidfd_open"],
    signal: ["SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGSTOP"],
    select: ["poll", "epoll"],
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""


def without(names: str, place: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in which these names are missing from the start, also in its child processes."""
    (place / "sitecustomize.py").write_text(names)
    path = os.pathsep.join([str(place), str(HERE), str(HERE.parents[1])])
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=place,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


OWN_LOOP = pytest.param("own_loop", marks=pytest.mark.slow)  # processes and pipes do not depend on the trainer


@pytest.mark.parametrize("training", ["bundled", OWN_LOOP])
def test_a_linux_whose_python_cannot_size_pipes_uses_the_worker_all_the_same(
    training: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.delattr(fcntl, "F_SETPIPE_SZ")
    with Telemetry([], run_dir=tmp_path / "run", offload=True, close_timeout=120.0) as telemetry:
        weights = TRAININGS[training](telemetry, nothing)

    assert (tmp_path / "run" / "summary.log").exists(), "the worker was started"
    assert weights == TRAININGS[training](None, nothing)
    assert not caplog.messages


@pytest.mark.parametrize("training", ["bundled", OWN_LOOP, pytest.param("sb3", marks=pytest.mark.sb3)])
def test_macos_measures_in_process_and_feeds_sinks_from_a_process(training: str, tmp_path: Path) -> None:
    program = f"""
import esper_telemetry as et
from trainings import TRAININGS, nothing
with et.Telemetry([et.PrometheusSink("metrics.prom")], run_dir="run", offload=True, close_timeout=120.0) as telemetry:
    weights = TRAININGS["{training}"](telemetry, nothing)
print(weights)
"""
    process = without(MACOS, tmp_path, program)

    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.strip() == TRAININGS[training](None, nothing)
    assert not (tmp_path / "run" / "summary.log").exists(), "no worker was started"
    assert "esper_" in (tmp_path / "metrics.prom").read_text()
    assert len(read_run(tmp_path / "run").records) > 5


def test_windows_measures_trains_reads_runs_and_is_told_what_to_use_for_telemetry(tmp_path: Path) -> None:
    with Telemetry([], run_dir=tmp_path / "run", offload=False) as telemetry:
        TRAININGS["bundled"](telemetry, nothing)
    program = """
import json
from trainings import TRAININGS, nothing
import torch
try:
    from esper_telemetry import Telemetry
except ImportError as error:
    refusal = str(error)
from esper_telemetry import read_run, value_fit
from esper_telemetry.cli.main import main
value_fit(torch.zeros(4), torch.ones(4))
said = {"weights": TRAININGS["bundled"](None, nothing), "records": len(read_run("run").records), "refusal": refusal}
print(json.dumps(said))
main(["diagnose", "run"])
"""
    process = without(WINDOWS, tmp_path, program)

    progress, _, verdict = process.stdout.partition("\n")
    assert process.stderr == ""
    report = json.loads(progress)
    refusal = report.pop("refusal")
    assert refusal.startswith("esper_telemetry.Telemetry does not run on this system") and "WSL 2 on Windows" in refusal
    assert report == {
        "weights": TRAININGS["bundled"](None, nothing),
        "records": len(read_run(tmp_path / "run").records),
    }
    assert verdict
