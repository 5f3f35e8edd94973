"""Systems without some of Linux's names, simulated by removing the names in the program and in its child processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainings import TRAININGS, nothing

pytestmark = pytest.mark.system

HERE = Path(__file__).parent

MACOS = """
import fcntl, os, signal, sys, sysconfig, urllib.request
sysconfig.get_config_vars()  # it and urllib read the name of the system
sys.platform = "darwin"
for module, names in {
    os: ["memfd_create", "eventfd", "pidfd_open", "pipe2", "posix_fallocate", "fdatasync", "splice", "sched_getaffinity",
         "sched_setaffinity", "sched_setscheduler", "SCHED_BATCH", "SCHED_IDLE", "sched_param", "getrandom"],
    fcntl: ["F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_ADD_SEALS"],
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
os.cpu_count = lambda: 2
"""
WINDOWS = """
import os, select, signal, subprocess, sys
import portalocker
sys.stdout.reconfigure(encoding="cp1252")  # as for a pipe
for name in ["fcntl", "resource", "termios", "pwd", "grp"]:
    sys.modules[name] = None
for module, names in {
    os: ["memfd_create", "fork", "forkpty", "pread", "pwrite", "readv", "writev", "set_blocking", "killpg",
         "nice", "getuid", "geteuid", "getpgid", "setsid", "statvfs", "sched_getaffinity", "sched_setaffinity",
         "sched_setscheduler", "eventfd", "pidfd_open", "mkfifo", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"],
    signal: ["SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGSTOP", "SIGALRM", "setitimer"],
    select: ["poll", "epoll"],
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""


def without(names: str, place: Path, training: str) -> subprocess.CompletedProcess[str]:
    """Run a training in which these names are missing from the start, also in its child processes."""
    (place / "sitecustomize.py").write_text(names)
    return subprocess.run(
        [sys.executable, str(HERE / "every_platform.py"), training],
        cwd=place,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(place), *sys.path])},
        capture_output=True,
        encoding="cp1252",
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    "training",
    # Processes and pipes do not depend on the trainer.
    ["bundled", pytest.param("own_loop", marks=pytest.mark.slow), pytest.param("sb3", marks=pytest.mark.sb3)],
)
@pytest.mark.parametrize(("names", "files"), [(MACOS, {"summary.log", "sinks.log"}), (WINDOWS, set())])
def test_a_run_is_recorded_delivered_locked_resumed_and_read(names: str, files: set[str], training: str, tmp_path: Path) -> None:
    """macOS has a worker and a sink process. On Windows the trainer makes the records, and its threads feed the sinks."""
    process = without(names, tmp_path, training)

    warnings = [line for line in process.stderr.splitlines() if "delivering to" not in line]  # on a busy machine
    assert (process.returncode, warnings) == (0, [])
    assert process.stdout.splitlines()[0] == TRAININGS[training](None, nothing)
    assert {path.name for path in (tmp_path / "run").glob("*.log")} == files
