"""The worker: no data is lost if it dies, if it hangs, or if the trainer dies."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_python
from waiting import wait_until

from esper_telemetry import RunStatus, Telemetry, attach, read_run, value_fit
from esper_telemetry.core.record import MAX_COUNT
from esper_telemetry.events import RolloutEnd, RunStart, UpdateEnd
from esper_telemetry.pipeline.in_process import InProcessPipeline
from esper_telemetry.pipeline.worker import WorkerPipeline
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.telemetry import session_of
from esper_telemetry.updates.update import JoinedMinibatches, TrainingProgress, Update

pytestmark = [pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: no worker"), pytest.mark.system]


LARGE = {f"text_{number}": f"{number} " * 12_000 for number in range(10, 110)}
"""Details of an intervention, larger than the pipe to the worker."""


def submit(telemetry: Telemetry, number: int, update: Update | None = None) -> None:
    """Flush an update, by default one without data."""
    progress = TrainingProgress(UpdateEnd(number, number, number, float(number), {}), env_steps=1, elapsed=1.0)
    session_of(telemetry).submit((update or Update())._replace(progress=progress))
    telemetry.flush(env_step=number)


def offloaded(run_dir: Path) -> tuple[Telemetry, int]:
    """Return a telemetry with a worker, and the worker's process."""
    telemetry = Telemetry(run_dir=run_dir, close_timeout=10.0)
    session_of(telemetry).expect_updates(candidates=tuple, open_update=Update)
    session_of(telemetry).start()
    return telemetry, worker_of(telemetry).pid


def worker_of(telemetry: Telemetry) -> WorkerPipeline:
    recorder = session_of(telemetry)._recorder
    assert recorder is not None and isinstance(recorder.pipeline, WorkerPipeline)
    return recorder.pipeline


def journal(run_dir: Path) -> str:
    return (run_dir / "journal.jsonl").read_text()


def rates(run_dir: Path) -> list[float]:
    return [record.values["opt/lr"] for record in read_run(run_dir).records]


def test_every_update_arrives_in_order_and_a_message_larger_than_the_pipe_piece_by_piece(tmp_path: Path) -> None:
    telemetry, _ = offloaded(tmp_path)
    for update in range(1, 51):
        submit(telemetry, update)
    telemetry.notify_intervention(**LARGE)
    worker = worker_of(telemetry)
    wait_until(lambda: not worker.take_reports() and worker.idle(), "the worker to read the message")
    telemetry.close()

    assert all(text in journal(tmp_path) for text in LARGE.values())
    assert rates(tmp_path) == [float(update) for update in range(1, 51)]
    assert read_run(tmp_path).status is RunStatus.FINISHED
    assert not (tmp_path / "writer.lock").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_hangs_costs_a_warning(tmp_path: Path, how: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    telemetry, pid = offloaded(tmp_path)
    submit(telemetry, 1)
    wait_until(lambda: '"record"' in journal(tmp_path), "the first record")
    os.kill(pid, how)
    with caplog.at_level(logging.WARNING, "esper_telemetry"):
        for update in range(2, 21):
            submit(telemetry, update)
        telemetry.close()

    assert rates(tmp_path) == [float(update) for update in range(1, 21)]
    assert read_run(tmp_path).status is RunStatus.FINISHED
    assert len([record for record in caplog.records if "summarises updates" in record.message]) == 1


def broken(update: int) -> Update:
    """An update with a bug: its returns do not match its values."""
    steps = torch.zeros(4, 2)
    flags = torch.zeros(4, 2, dtype=torch.bool)
    columns: dict[str, Any] = dict.fromkeys(("rewards", "values", "log_probs", "next_values"), steps)
    columns |= {"ended": flags, "terminated": flags, "advantages": torch.randn(4, 2), "returns": torch.zeros(5, 3)}
    return Update(rollout=RolloutEnd(update=update, env_step=update, actions={}, gamma=0.9, valid=None, **columns))


@pytest.mark.parametrize("offload", [True, False])
def test_a_bug_in_a_metric_costs_what_it_measures_and_one_warning(tmp_path: Path, offload: bool, caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(run_dir=tmp_path, offload=offload)
    session_of(telemetry).expect_updates(candidates=tuple, open_update=Update)
    with caplog.at_level(logging.WARNING, "esper_telemetry"):
        for update in range(1, 4):
            submit(telemetry, update, broken(update))
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
    """Return the records of three updates of an LSTM policy, without times."""
    telemetry = Telemetry(run_dir=run_dir, offload=offload, level="debug")
    config = PPOConfig(num_steps=16, num_epochs=1, num_minibatches=2, lstm_size=8, hidden_sizes=(8,), policy="lstm")
    trainer = PPO(CueRecall(8, seed=0), config)
    attach(telemetry, trainer)
    if stop:
        trainer.hooks.on(RunStart, lambda _: os.kill(worker_of(telemetry).pid, signal.SIGSTOP), last=True)
    trainer.learn(3 * 16 * 8)
    if stop:
        os.kill(worker_of(telemetry).pid, signal.SIGKILL)
    telemetry.close()
    timed = ("perf/", "telemetry/", "train/env_steps_per_second")
    return [{k: v for k, v in record.values.items() if not k.startswith(timed)} for record in read_run(run_dir).records]


def test_later_rollouts_do_not_change_what_still_waits(tmp_path: Path) -> None:
    """The trainer reuses the memory of its rollouts. The worker is stopped until the end, then the trainer measures the updates."""
    waited = trained(tmp_path / "waited", offload=True, stop=True)

    at_once = trained(tmp_path / "at_once", offload=False)
    for a, b in zip(waited, at_once, strict=True):
        assert {k: (a.get(k), b.get(k)) for k in a.keys() | b.keys() if a.get(k) != b.get(k)} == {}


def wide() -> Update:
    """An update of six megabytes."""
    rows = torch.full((750_000,), 0.01)
    return Update(minibatches=JoinedMinibatches((0,), (len(rows),), rows, torch.zeros(1).expand(len(rows)), None, {}))


def test_large_updates_that_waited_are_measured_as_soon_as_the_worker_goes_on(tmp_path: Path) -> None:
    """While the worker is stopped, 40 times the pipe's capacity is sent. All of it then arrives without further calls."""
    telemetry, pid = offloaded(tmp_path)
    os.kill(pid, signal.SIGSTOP)
    for update in range(1, 8):
        submit(telemetry, update, wide())
    os.kill(pid, signal.SIGCONT)

    wait_until(worker_of(telemetry).idle, "the worker to measure all updates")
    telemetry.close()

    assert ["policy/kl" in record.values for record in read_run(tmp_path).records] == [True] * 7


def test_updates_that_a_worker_could_not_be_given_are_recorded_marked_and_raise_no_alarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Six updates are measured, then the worker is stopped. Ten updates of six megabytes fit into the backlog; the rest are marked."""
    telemetry, pid = offloaded(tmp_path)
    for update in range(1, 27):
        submit(telemetry, update, wide())
        if update == 6:
            wait_until(worker_of(telemetry).idle, "the worker to measure six updates")
            os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGCONT)
    wait_until(worker_of(telemetry).idle, "the worker to write all records")
    telemetry.close()

    run = read_run(tmp_path)
    measured = ["policy/kl" in record.values for record in run.records]
    assert measured == ["telemetry/unmeasured" not in record.values for record in run.records]
    assert measured.count(False) >= 5 and len(measured) == 26
    assert "telemetry/missing_metric" not in [alarm.type for alarm in run.alarms]
    assert len([record for record in caplog.records if "does not keep up" in record.getMessage()]) == 1


def test_a_worker_that_is_behind_is_given_less_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry, _ = offloaded(tmp_path)
    monkeypatch.setattr(WorkerPipeline, "is_late", property(lambda _: True))
    for update in range(1, 5):
        submit(telemetry, update)

    assert session_of(telemetry).sampling.is_late
    telemetry.close()


def test_updates_that_take_long_do_not_make_a_worker_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour passes between two updates."""
    telemetry, _ = offloaded(tmp_path)
    submit(telemetry, 1)
    now = time.monotonic()
    monkeypatch.setattr("esper_telemetry.pipeline.worker.time.monotonic", lambda: now + 3600)
    is_late = worker_of(telemetry).is_late
    monkeypatch.undo()
    telemetry.close()

    assert not is_late


def test_a_worker_is_late_once_half_of_what_may_wait_does(tmp_path: Path) -> None:
    """A single sampled update in progress, which may have 20 MB, does not make the worker late."""
    telemetry, pid = offloaded(tmp_path)
    os.kill(pid, signal.SIGSTOP)
    worker, waiting = worker_of(telemetry), []
    for _ in range(12):
        waiting.append((worker.is_late, worker._waiting_bytes > 32 << 20))
        telemetry.notify_intervention(**LARGE)
    os.kill(pid, signal.SIGCONT)
    telemetry.close()

    assert waiting[0] == (False, False) and waiting[-1] == (True, True)
    assert all(is_late == is_half for is_late, is_half in waiting)


def test_a_message_left_in_the_pipe_of_a_dead_worker_is_written_in_process(tmp_path: Path) -> None:
    telemetry, pid = offloaded(tmp_path)
    submit(telemetry, 1)
    wait_until(lambda: '"record"' in journal(tmp_path), "the first record")
    os.kill(pid, signal.SIGSTOP)
    telemetry.notify_intervention(**LARGE)
    os.kill(pid, signal.SIGKILL)

    worker = worker_of(telemetry)
    wait_until(lambda: not worker.take_reports() and LARGE["text_109"] in journal(tmp_path), "the message")
    telemetry.close()

    assert rates(tmp_path) == [1.0]


KILLED = """
import os, signal, sys
from esper_telemetry import Telemetry
from esper_telemetry.telemetry import session_of
from esper_telemetry.events import UpdateEnd
from esper_telemetry.updates.update import TrainingProgress, Update
telemetry = Telemetry(["tensorboard"], run_dir=sys.argv[1])
session_of(telemetry).expect_updates(candidates=tuple, open_update=Update)
session_of(telemetry).start()
if os.fork() == 0:  # a process that holds every pipe open
    signal.pause()
for update in range(1, 31):
    progress = TrainingProgress(UpdateEnd(update, update, update, float(update), {}), env_steps=1, elapsed=1.0)
    session_of(telemetry).submit(Update(progress=progress))
    telemetry.flush(env_step=update)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_trainer_loses_no_finished_update(tmp_path: Path) -> None:
    """The worker still reads the updates in the pipe, and the run ends as killed after the last one."""
    run_dir = tmp_path / "run"
    trainer = subprocess.Popen([sys.executable, "-c", KILLED, str(run_dir)], start_new_session=True)
    try:
        assert trainer.wait(60) == -signal.SIGKILL
        wait_until(lambda: '"end"' in journal(run_dir), "the worker to end the run")
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)

    assert rates(run_dir) == [float(update) for update in range(1, 31)]
    assert read_run(run_dir).status is RunStatus.KILLED


def test_a_trainer_that_replaces_its_worker_knows_the_journal_and_its_history(tmp_path: Path) -> None:
    """The worker dies after five updates, before the trainer reads its last answer. No update is recorded twice, and averages continue."""
    telemetry, pid = offloaded(tmp_path)
    for update in range(1, 6):
        telemetry.log({"policy/entropy": 2.0**-update})
        submit(telemetry, update)
    wait_until(lambda: journal(tmp_path).count('{"kind":"record"') == 5, "five records")
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


def logged(telemetry: Telemetry, updates: range) -> None:
    """Log and flush like a user's loop whose own work takes a negligible time."""
    for update in updates:
        telemetry.log({"my/number": float(update), "policy/kl": 0.01 + 0.005 * math.sin(update)})
        telemetry.flush(env_step=update)


def own_values(values: Mapping[str, float]) -> dict[str, float]:
    """Drop values that depend on the machine: times, and alarms about them."""
    return {key: value for key, value in values.items() if key.startswith(("my/", "policy/"))}


def test_records_of_a_users_loop_are_the_same_in_process_and_in_a_worker(tmp_path: Path) -> None:
    """A sink gets each record once. The last record has the largest count."""
    records = []
    for offload in (True, False):
        got: list[float] = []
        sink = [lambda record, got=got: got.append(record.values["my/number"])]
        with Telemetry(sink, run_dir=tmp_path / str(offload), offload=offload, close_timeout=60.0) as telemetry:
            logged(telemetry, range(1, 41))
            telemetry.log({"my/number": 41.0})
            telemetry.flush(env_step=MAX_COUNT)
        assert (tmp_path / str(offload) / "summary.log").exists() is offload
        assert got == [float(update) for update in range(1, 42)]
        records.append(read_run(tmp_path / str(offload)).records)

    assert [own[-1].axes.env_step for own in records] == [MAX_COUNT, MAX_COUNT]
    assert {"policy/kl/ema", "policy/kl/ew_std"} <= records[0][-2].values.keys()
    assert [own_values(record.values) for record in records[0]] == [own_values(record.values) for record in records[1]]


@pytest.mark.parametrize("settings", [{}, {"offload": False}, {"offload": True, "run_dir": None}])
def test_a_users_loop_has_a_worker_only_where_it_asks_for_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    with Telemetry(**{"run_dir": tmp_path / "run", **settings}) as telemetry:
        logged(telemetry, range(1, 3))
        recorder = session_of(telemetry)._recorder
        assert recorder is not None and isinstance(recorder.pipeline, InProcessPipeline)


def test_a_detector_of_the_script_itself_is_kept_in_process(tmp_path: Path) -> None:
    """A worker could not import the detector."""
    script = """
from esper_telemetry import Telemetry
from esper_telemetry.alarms import Detectors
class Mine(Detectors):
    pass
with Telemetry(run_dir="run", detect=Mine, offload=True) as telemetry:
    telemetry.flush(env_step=1)
"""
    done = run_python("-c", script, cwd=tmp_path, one_core=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "run" / "summary.log").exists()
    assert len(read_run(tmp_path / "run").records) == 1


@pytest.mark.parametrize(("budget", "warnings"), [(1e-6, 1), (1.0, 0)])
def test_a_loop_that_records_slow_down_is_told_once_that_a_worker_could_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, budget: float, warnings: int
) -> None:
    monkeypatch.setattr("esper_telemetry.pipeline.usage.RECOMMENDATION_SECONDS", 0.0)
    monkeypatch.setattr("esper_telemetry.pipeline.usage.RECOMMENDATION_RECORDS", 5)
    with Telemetry(run_dir=tmp_path, budget=budget) as telemetry:
        logged(telemetry, range(1, 11))

    assert len([record for record in caplog.records if "offload=True" in record.message]) == warnings


def test_the_run_is_announced_before_its_first_numbers(tmp_path: Path) -> None:
    """The same holds for a resumed run."""
    for resume in (False, True):
        with Telemetry(run_dir=tmp_path, resume=resume, offload=True) as telemetry:
            logged(telemetry, range(1 + 2 * resume, 3 + 2 * resume))

    kinds = [json.loads(line)["kind"] for line in journal(tmp_path).splitlines()]
    numbers = ["record", "record", "end"]
    assert kinds == ["run", "event", *numbers, "run", *numbers]  # the first part described all keys of the second
