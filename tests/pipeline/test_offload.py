"""The process beside the trainer: nothing is lost when it dies, when it hangs, or when the trainer dies."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from esper_telemetry import RunStatus, Telemetry, attach, read_run, value_fit
from esper_telemetry.pipeline.channel import MessagePacker
from esper_telemetry.pipeline.worker import OffloadedWriter
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments import CueRecall
from esper_telemetry.updates import Minibatches, Snapshot
from esper_telemetry.updates.data import RolloutData, TrainingProgress

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing is offloaded")


def submit(telemetry: Telemetry, update: int) -> None:
    progress = TrainingProgress(update=update, env_steps=1, learning_rate=float(update), elapsed=1.0, seconds={})
    telemetry.submit(Snapshot(progress=progress))
    telemetry.flush(env_step=update)


def offloaded(run_dir: Path) -> tuple[Telemetry, int]:
    """A telemetry whose updates are summarised elsewhere, and the process that does it."""
    telemetry = Telemetry(run_dir=run_dir, close_timeout=10.0)
    telemetry.expect_updates(candidates=tuple, open_update=Snapshot)
    telemetry.start()
    return telemetry, writer_of(telemetry).pid


def writer_of(telemetry: Telemetry) -> OffloadedWriter:
    writer = telemetry._recorder._writer  # type: ignore[union-attr]  # the process is nobody's business but this test's
    assert isinstance(writer, OffloadedWriter)
    return writer


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


def broken(update: int) -> Snapshot:
    """An update whose returns do not fit its values, as a bug would leave them."""
    steps = torch.zeros(4, 2)
    flags = torch.zeros(4, 2, dtype=torch.bool)
    rollout = RolloutData(
        rewards=steps,
        values=steps,
        advantages=torch.randn(4, 2),
        returns=torch.zeros(5, 3),
        log_probs=steps,
        next_values=steps,
        ended=flags,
        terminated=flags,
        gamma=0.9,
        valid=None,
    )
    progress = TrainingProgress(update=update, env_steps=1, learning_rate=float(update), elapsed=1.0, seconds={})
    return Snapshot(rollout=rollout, progress=progress)


@pytest.mark.parametrize("offload", [True, False])
def test_a_bug_in_a_metric_costs_what_it_measures_and_one_warning(
    tmp_path: Path, offload: bool, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry(run_dir=tmp_path, offload=offload)
    telemetry.expect_updates(candidates=tuple, open_update=Snapshot)
    with caplog.at_level(logging.WARNING, "esper_telemetry"):
        for update in range(1, 4):
            telemetry.submit(broken(update))
            telemetry.flush(env_step=update)
        telemetry.close()

    for record in read_run(tmp_path).records:
        assert "value/explained_variance" not in record.values
        assert {"adv/raw/std", "reward/mean", "value/td/mean"} <= record.values.keys()
        assert record.values["telemetry/metric_errors"] >= 1
    assert rates(tmp_path) == [1.0, 2.0, 3.0]
    (warned,) = [record.getMessage() for record in caplog.records if "value_fit" in record.getMessage()]
    assert "missing from the records" in warned


def test_a_wrong_call_of_the_user_raises_at_once() -> None:
    with Telemetry(run_dir=None) as telemetry, pytest.raises((ValueError, RuntimeError)):
        telemetry.observe(value_fit(torch.zeros(4), torch.zeros(5)))


def trained(run_dir: Path, *, offload: bool, stop: bool = False) -> list[dict[str, float]]:
    """What three updates of an LSTM policy say, times aside."""
    telemetry = Telemetry(run_dir=run_dir, offload=offload, level="debug")
    config = PPOConfig(num_steps=16, num_epochs=1, num_minibatches=2, lstm_size=8, hidden_sizes=(8,), policy="lstm")
    trainer = PPO(CueRecall(8, seed=0), config)
    attach(telemetry, trainer)
    if stop:
        os.kill(writer_of(telemetry).pid, signal.SIGSTOP)
    trainer.learn(3 * 16 * 8)
    if stop:
        os.kill(writer_of(telemetry).pid, signal.SIGKILL)
    telemetry.close()
    timed = ("perf/", "telemetry/", "train/env_steps_per_second")
    return [{k: v for k, v in record.values.items() if not k.startswith(timed)} for record in read_run(run_dir).records]


def test_later_rollouts_do_not_change_what_still_waits(tmp_path: Path) -> None:
    """The trainer collects in the same memory every time; the process is stopped until all is over, then the trainer does its work."""
    waited = trained(tmp_path / "waited", offload=True, stop=True)

    at_once = trained(tmp_path / "at_once", offload=False)
    for a, b in zip(waited, at_once, strict=True):
        assert {k: (a.get(k), b.get(k)) for k in a.keys() | b.keys() if a.get(k) != b.get(k)} == {}


def wide(update: int) -> Snapshot:
    """An update of six megabytes."""
    rows = torch.full((750_000,), 0.01)
    minibatches = Minibatches((0,), (len(rows),), rows, torch.zeros(1).expand(len(rows)), None, {}, {}, {}, {})
    return Snapshot(minibatches=minibatches, progress=TrainingProgress(update, 1, 1e-3, 1.0, {}))


def test_large_updates_that_waited_are_taken_in_as_soon_as_the_process_goes_on(tmp_path: Path) -> None:
    """While it stands still, 40 times what a pipe holds is said; then nothing more has to be said for all of it to arrive."""
    telemetry, pid = offloaded(tmp_path)
    os.kill(pid, signal.SIGSTOP)
    for update in range(1, 8):
        telemetry.submit(wide(update))
        telemetry.flush(env_step=update)
    os.kill(pid, signal.SIGCONT)

    wait_until(writer_of(telemetry).idle)
    telemetry.close()

    assert ["policy/kl" in record.values for record in read_run(tmp_path).records] == [True] * 7


def test_what_goes_through_the_pipe_goes_on_whenever_an_answer_is_looked_for(tmp_path: Path) -> None:
    telemetry, _ = offloaded(tmp_path)
    submit(telemetry, 1)
    telemetry.notify_intervention("a" * 5_000_000)
    writer = writer_of(telemetry)

    wait_until(lambda: not writer.found() and writer.idle())
    telemetry.close()

    assert "a" * 5_000_000 in journal(tmp_path)


def test_what_a_process_leaves_in_the_pipe_when_it_dies_is_written_here(tmp_path: Path) -> None:
    telemetry, pid = offloaded(tmp_path)
    submit(telemetry, 1)
    wait_until(lambda: '"record"' in journal(tmp_path))
    os.kill(pid, signal.SIGSTOP)
    telemetry.notify_intervention("a" * 5_000_000)
    os.kill(pid, signal.SIGKILL)

    wait_until(lambda: not writer_of(telemetry).found() and "a" * 5_000_000 in journal(tmp_path))
    telemetry.close()

    assert rates(tmp_path) == [1.0]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3)])
def test_a_tensor_arrives_in_its_shape(shape: tuple[int, ...]) -> None:
    (found,) = MessagePacker().pack((torch.ones(shape),)).load()

    assert found.shape == shape


KILLED = """
import os, signal, sys
from esper_telemetry import Telemetry
from esper_telemetry.updates.data import Snapshot, TrainingProgress as Progress
telemetry = Telemetry(["tensorboard"], run_dir=sys.argv[1])
telemetry.expect_updates(candidates=tuple, open_update=Snapshot)
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


def test_a_trainer_that_takes_over_knows_what_was_written_and_its_history(tmp_path: Path) -> None:
    """The process dies after five updates, without acknowledging the last: no update twice, and averages go on."""
    telemetry, pid = offloaded(tmp_path)
    for update in range(1, 6):
        telemetry.log({"policy/entropy": 2.0**-update})
        submit(telemetry, update)
    wait_until(lambda: journal(tmp_path).count('{"kind":"record"') == 5)
    os.kill(pid, signal.SIGKILL)
    for update in range(6, 9):
        telemetry.log({"policy/entropy": 2.0**-update})
        submit(telemetry, update)
    telemetry.close()

    assert rates(tmp_path) == [float(update) for update in range(1, 9)]
    assert journal(tmp_path).count('{"kind":"record"') == 8
    rate = read_run(tmp_path).records[-1].values["policy/entropy_rate"]
    assert rate == pytest.approx(-math.log(2))
    assert all("policy/entropy_rate" in record.values for record in read_run(tmp_path).records[1:])
