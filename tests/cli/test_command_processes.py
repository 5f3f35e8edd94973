"""Commands as separate processes: their imports, and their output to a terminal and to a pipe."""

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from esper_telemetry import Telemetry

pytestmark = pytest.mark.system

ESCAPE = b"\x1b"
REPORT_TORCH = """
import sys
from esper_telemetry.__main__ import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
sys.stderr.write(f"torch is {'in' if 'torch' in sys.modules else 'out'}")
"""

OWN_LOOP = """
from esper_telemetry import ConsoleSink, Telemetry
with Telemetry([ConsoleSink(every_seconds=0)], run_dir="own", config=%s) as telemetry:
    for update in range(1, 4):
        telemetry.log({"policy/kl": 0.01})
        telemetry.flush(env_step=1000 * update)
"""


@pytest.fixture
def run_dir(delivered_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(delivered_run, tmp_path / "runs" / "run")


@pytest.fixture(scope="module")
def delivered_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a user's own loop, delivered to TensorBoard, with a KL that is far too large."""
    directory = tmp_path_factory.mktemp("processes") / "run"
    with Telemetry(["tensorboard"], run_dir=directory) as telemetry:
        for update in range(1, 31):
            telemetry.log({"policy/kl": 5.0 if update > 20 else 0.01, "policy/clip_frac": 0.1})
            telemetry.flush(env_step=1000 * update)
    return directory


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--help",),
        ("--version",),
        *((command, "--help") for command in ("train", "run", "check", "replay", "doctor", "compress", "diagnose", "metrics")),
        ("diagnose", "RUN"),
        ("diagnose", "RUN", "--json"),
        ("diagnose", "RUNS"),
        ("diagnose", "--from", "csv:progress.csv"),
        ("doctor", "RUN"),
        ("metrics", "policy/kl"),
        ("replay", "RUN", "--to", "tensorboard:elsewhere"),
        ("workspace", "--help"),
    ],
    ids=" ".join,
)
def test_a_command_that_measures_nothing_starts_without_torch_and_writes_no_escape_sequence_to_a_pipe(
    arguments: Sequence[str], run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "progress.csv").write_text("time/total_timesteps,rollout/ep_rew_mean,train/approx_kl\n1000,1,0.1\n2000,2,0.2\n")
    places = {"RUN": str(run_dir), "RUNS": str(run_dir.parent)}

    done = in_pipe([places.get(word, word) for word in arguments], tmp_path, code=REPORT_TORCH)

    assert done.stderr.endswith("torch is out")
    assert done.stdout
    assert "\x1b" not in done.stdout + done.stderr


def in_pipe(
    arguments: Sequence[str], cwd: Path, *, code: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    program = ["-c", code] if code else ["-m", "esper_telemetry"]
    return subprocess.run([sys.executable, *program, *arguments], cwd=cwd, env=environment(env), capture_output=True, text=True)


def in_terminal(arguments: Sequence[str], cwd: Path, *, code: str = "", env: Mapping[str, str] | None = None, columns: int = 80) -> bytes:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    program = ["-c", code] if code else ["-m", "esper_telemetry"]
    process = subprocess.Popen(
        [sys.executable, *program, *arguments], cwd=cwd, env=environment(env), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    output = b"".join(iter(lambda: read_terminal(ours), b""))
    os.close(ours)
    assert process.wait() == 0, output.decode()
    return output


def read_terminal(descriptor: int) -> bytes:
    """The next bytes; empty once the last process has closed the terminal."""
    try:
        return os.read(descriptor, 65536)
    except OSError:  # EIO, which is how Linux reports that
        return b""


def environment(changes: Mapping[str, str] | None) -> dict[str, str]:
    """Our environment without variables that affect terminal output."""
    decides = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
    unchanged = {name: value for name, value in os.environ.items() if name not in decides}
    return {**unchanged, "TERM": "xterm-256color", **(changes or {})}


COMMANDS = (("diagnose", "RUN"), ("doctor", "RUN"), ("metrics", "policy/kl"), ("replay", "RUN", "--to", "tensorboard:else"), ("--help",))


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_no_color_means_no_escape_sequence_at_all(arguments: Sequence[str], run_dir: Path, tmp_path: Path) -> None:
    words = [str(run_dir) if word == "RUN" else word for word in arguments]

    assert ESCAPE in in_terminal(words, tmp_path)
    assert ESCAPE not in in_terminal(words, tmp_path, env={"NO_COLOR": "1"})


def test_force_color_colours_a_pipe(run_dir: Path, tmp_path: Path) -> None:
    assert "\x1b[" in in_pipe(["diagnose", str(run_dir)], tmp_path, env={"FORCE_COLOR": "1"}).stdout


def test_columns_says_how_wide_a_box_in_a_pipe_is(run_dir: Path, tmp_path: Path) -> None:
    done = in_pipe(["diagnose", str(run_dir)], tmp_path, env={"COLUMNS": "60"})

    assert "╭" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if line.startswith("╭")) == 60


def test_at_80_columns_the_bar_of_a_loop_shows_steps_total_and_the_time_that_is_left(tmp_path: Path) -> None:
    code = OWN_LOOP % {"total_timesteps": 100_000}

    output = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", in_terminal([], tmp_path, code=code).decode())

    assert re.search(r"3,000/100,000 steps [-\d:]+ kl 0.01", output)


def test_with_no_color_the_bar_is_a_line_for_each_update(tmp_path: Path) -> None:
    code = OWN_LOOP % {"total_timesteps": 100_000}

    output = in_terminal([], tmp_path, code=code, env={"NO_COLOR": "1"})

    assert ESCAPE not in output
    assert b"update 3  step 3,000/100,000 (3%)  kl 0.01" in output
