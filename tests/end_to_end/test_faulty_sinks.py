"""Backends that raise or hang during real training, which continues without waiting and warns once."""

import logging
import os
import signal
from pathlib import Path

import pytest
from waiting import wait_until

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.journal.lock import Role, holder_pid
from esper_telemetry.testing import FailingSink, MemorySink

pytestmark = pytest.mark.system

DEADLINE_SECONDS = 2.0


def trainer() -> PPO:
    return PPO(make_env("CartPole-v1", num_envs=4), PPOConfig(num_steps=32, num_epochs=2))


def learn_until(ppo: PPO, reached: int) -> None:
    while ppo.updates < reached:
        ppo.learn(ppo.env_steps + 1)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]


@pytest.mark.parametrize("in_process", [pytest.param(True, marks=pytest.mark.slow), False], ids=["in a thread", "in the child process"])
def test_a_sink_that_raises_costs_one_warning_and_is_counted(in_process: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raising, memory = FailingSink(name="raising", fail_in=["write"], in_process=in_process), MemorySink()
    ppo = trainer()

    with Telemetry([raising, memory], run_dir=tmp_path / "run", close_timeout=4 * DEADLINE_SECONDS) as telemetry:
        attach(telemetry, ppo)

        def of_the_sink() -> list[str]:  # on a loaded machine the worker may be slow, which is another warning
            return [warning for warning in warnings(caplog) if "raising" in warning]

        def has_warned() -> bool:  # the training thread learns of the child process between two updates
            learn_until(ppo, ppo.updates + 1)
            return bool(of_the_sink())

        wait_until(has_warned, "the warning about the sink that raises")
        learn_until(ppo, ppo.updates + 3)

    assert len(memory.records) == ppo.updates
    assert memory.records[0].values["telemetry/errors"] == 0
    assert memory.records[-1].values["telemetry/errors"] >= 1
    warning, left = of_the_sink()
    if in_process:
        assert f"raising: retrying, 0 records sent, {ppo.updates} pending" in left
    else:
        assert f"not everything is delivered yet: raising ({ppo.updates} records; RuntimeError: this sink fails on purpose)" in left
        os.kill(int(holder_pid(tmp_path / "run", Role.SINKS)), signal.SIGKILL)
    assert "sink raising failed (RuntimeError: this sink fails on purpose); it is tried again" in warning


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("in_process", [True, False], ids=["in a thread", "in the child process"])
def test_a_sink_that_hangs_stops_neither_training_nor_the_other_sinks_nor_the_end(
    in_process: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = FailingSink(name="hanging", fail_in=["write"], in_process=in_process, hang_seconds=3600)
    memory = MemorySink()
    ppo = trainer()
    telemetry = Telemetry([hanging, memory], run_dir=tmp_path / "run", close_timeout=DEADLINE_SECONDS)
    attach(telemetry, ppo)

    def shows_the_queue() -> bool:
        learn_until(ppo, ppo.updates + 1)
        return bool(memory.records) and memory.records[-1].values.get("telemetry/queue_depth", 0) >= 3

    wait_until(shows_the_queue, "a record that shows the queue of the hanging sink")
    count = ppo.updates
    report = telemetry.close()

    assert len(memory.records) == len(read_run(tmp_path / "run").records) == count
    assert report is not None
    assert {sink.name: sink.pending for sink in report.sinks} == {"hanging": count, "memory": 0}
    assert report.sinks[0].command == f"esper_telemetry.replay('{tmp_path / 'run'}', SINK)"
    assert report.sinks[0].goes_on is not in_process
    if in_process:
        assert f"{count} pending; send the rest with: {report.sinks[0].command}" in caplog.text
    else:
        assert f"not everything is delivered yet: hanging ({count} records)" in caplog.text
        os.kill(int(holder_pid(tmp_path / "run", Role.SINKS)), signal.SIGKILL)
