"""The process beside the trainer: nothing is lost when it dies, when it hangs, or when the trainer dies."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from esper_telemetry import RunStatus, Telemetry, read_run
from esper_telemetry.offload import OffloadedWriter
from esper_telemetry.summary import Gradients, Progress, Snapshot

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing is offloaded")


def submit(telemetry: Telemetry, update: int) -> None:
    progress = Progress(update=update, env_steps=1, learning_rate=float(update), elapsed=1.0, seconds={})
    telemetry.submit(Snapshot(progress=progress))
    telemetry.flush(env_step=update)


def offloaded(run_dir: Path) -> tuple[Telemetry, int]:
    """A telemetry whose updates are summarised elsewhere, and the process that does it."""
    telemetry = Telemetry(run_dir=run_dir, close_timeout=10.0)
    telemetry.expect_updates(suspects=tuple, open_update=Snapshot)
    telemetry.start()
    writer = telemetry._recorder._writer  # type: ignore[union-attr]  # the process is nobody's business but this test's
    assert isinstance(writer, OffloadedWriter)
    return telemetry, writer.pid


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def journal(run_dir: Path) -> str:
    return (run_dir / "journal.jsonl").read_text()


def rates(run_dir: Path) -> list[float]:
    return [record.values["opt/lr"] for record in read_run(run_dir).records]


def test_every_update_arrives_in_order(tmp_path: Path) -> None:
    telemetry, _ = offloaded(tmp_path)
    for update in range(1, 51):
        submit(telemetry, update)
    telemetry.close()

    assert rates(tmp_path) == [float(update) for update in range(1, 51)]
    assert read_run(tmp_path).status is RunStatus.FINISHED
    assert not (tmp_path / "writer.lock").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_hangs_costs_a_warning(
    tmp_path: Path, how: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry, pid = offloaded(tmp_path)
    submit(telemetry, 1)
    wait_until(lambda: '"record"' in journal(tmp_path))
    os.kill(pid, how)
    with caplog.at_level(logging.WARNING, "esper_telemetry"):
        for update in range(2, 21):
            start = time.monotonic()
            submit(telemetry, update)
            assert time.monotonic() - start < 1.0
        telemetry.close()

    assert rates(tmp_path) == [float(update) for update in range(1, 21)]
    assert read_run(tmp_path).status is RunStatus.FINISHED
    assert len([record for record in caplog.records if "summarises updates" in record.message]) == 1


def test_what_the_trainer_changes_afterwards_does_not_change_the_record(tmp_path: Path) -> None:
    telemetry, pid = offloaded(tmp_path)
    os.kill(pid, signal.SIGSTOP)
    norms = torch.ones(1, 1)
    part = Gradients(epochs=(0,), names=("w",), numels=(1,), norms=norms, max_norm=None, leaves=None)
    telemetry.submit(Snapshot(gradients=(part,)))
    telemetry.flush(env_step=1)
    norms.fill_(5.0)
    os.kill(pid, signal.SIGKILL)
    telemetry.close()

    assert read_run(tmp_path).records[0].values["grad/global/norm_preclip"] == 1.0


KILLED = """
import os, signal, sys
from esper_telemetry import Telemetry
from esper_telemetry.summary import Gradients, Progress, Snapshot
telemetry = Telemetry(["tensorboard"], run_dir=sys.argv[1])
telemetry.expect_updates(suspects=tuple, open_update=Snapshot)
telemetry.start()
if os.fork() == 0:  # a worker that holds every pipe open
    signal.pause()
for update in range(1, 31):
    progress = Progress(update=update, env_steps=1, learning_rate=float(update), elapsed=1.0, seconds={})
    telemetry.submit(Snapshot(progress=progress))
    telemetry.flush(env_step=update)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_trainer_loses_no_finished_update(tmp_path: Path) -> None:
    """The process still finds the updates in the pipe, and the run ends as killed after the last of them."""
    run_dir = tmp_path / "run"
    trainer = subprocess.Popen([sys.executable, "-c", KILLED, str(run_dir)], start_new_session=True)
    try:
        assert trainer.wait(60) == -signal.SIGKILL
        wait_until(lambda: '"end"' in journal(run_dir))
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)

    assert rates(run_dir) == [float(update) for update in range(1, 31)]
    assert read_run(run_dir).status is RunStatus.KILLED
