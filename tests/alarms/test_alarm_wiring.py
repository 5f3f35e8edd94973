"""The path of an alarm: into the journal after its record, back to the trainer, and its effect on the next updates."""

import asyncio
import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Script, ScriptedAlarm, scripted
from waiting import wait_until

from esper_telemetry import PPO, PPOConfig, RunStatus, Telemetry, attach, make_env, read_run
from esper_telemetry.core.record import Alarm, AlarmEvent
from esper_telemetry.events import Rollback, RolloutEnd, UpdateEnd
from esper_telemetry.pipeline.in_process import AlarmReport, InProcessPipeline
from esper_telemetry.pipeline.worker import WorkerPipeline
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.recording import step_probe
from esper_telemetry.telemetry import session_of
from esper_telemetry.testing import MemorySink
from esper_telemetry.updates.update import Update

SPIKE = ScriptedAlarm("policy/kl_spike", remaining=3)
CLEAR = ScriptedAlarm("policy/kl_spike", AlarmEvent.CLEAR, 0.0)
DEBUG_ONLY = "grad/decades"


def cartpole(**settings: Any) -> PPO:
    return PPO(make_env("CartPole-v1", num_envs=4, seed=0), PPOConfig(num_steps=16, num_epochs=2, **settings))


def recall(**settings: Any) -> PPO:
    config = PPOConfig(policy="lstm", num_steps=16, num_epochs=2, num_minibatches=2, lstm_size=8, **settings)
    return PPO(CueRecall(8, seed=0), config)


def train(source: PPO, updates: int) -> None:
    while source.updates < updates:
        source.learn(source.env_steps + 1)


def trained(run_dir: Path | None, script: Script, *, updates: int = 8, **options: Any) -> PPO:
    source = options.pop("source", None) or cartpole()
    with Telemetry(run_dir=run_dir, detect=scripted(script), **options) as telemetry:
        attach(telemetry, source)
        train(source, updates)
    return source


def levels(run_dir: Path) -> list[float]:
    return [record.values["telemetry/level"] for record in read_run(run_dir).records]


def test_an_alarm_stands_behind_its_record_with_its_values_and_events(tmp_path: Path) -> None:
    trained(tmp_path, {2: SPIKE, 4: CLEAR}, updates=5, offload=False)

    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    kinds = [
        line["kind"]
        for line in lines
        if line.get("type", "") not in ("metrics", "environments") and "evidence" not in str(line.get("type"))
    ]
    assert kinds == ["run", "record", "record", "alarm", "event", *["record"] * 2, "alarm", "event", "record", "end"]
    run = read_run(tmp_path)
    assert [(alarm.event, alarm.axes, alarm.seq) for alarm in run.alarms] == [
        (AlarmEvent.RAISE, run.records[1].axes, run.records[1].seq),
        (AlarmEvent.CLEAR, run.records[3].axes, run.records[3].seq),
    ]
    spiked = [record.values.get("alarm/policy/kl_spike") for record in run.records]
    assert spiked == [None, 0.9, None, 0.0, None]
    remaining = [record.values["telemetry/escalation_remaining"] for record in run.records]
    assert remaining == [0, 3, 2, 1, 0]
    assert [event.type for event in run.events if event.type.startswith("task")] == ["task/plateau"] * 2


@pytest.mark.system
def test_the_trainer_hears_only_of_records_that_change_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer receives alarms and the remaining number of updates at DEBUG; other records contain no news."""
    heard: list[tuple[int, int]] = []
    take_reports = InProcessPipeline.take_reports

    def overheard(pipeline: InProcessPipeline) -> Sequence[AlarmReport]:
        reports = take_reports(pipeline)
        heard.extend((len(one.alarms), one.remaining) for one in reports)
        return reports

    monkeypatch.setattr(InProcessPipeline, "take_reports", overheard)
    trained(tmp_path, {2: SPIKE, 4: CLEAR}, updates=8, offload=False)

    assert heard == [(1, 3), (0, 2), (1, 1), (0, 0)]


@pytest.mark.system
def test_what_is_journalled_is_what_was_looked_at(tmp_path: Path) -> None:
    """Writing and reading the journal's JSON preserves every digit, so the journal yields the same alarms."""
    detectors: list[Any] = []

    def watches(facts: Any) -> Any:
        made = scripted({3: SPIKE})(facts)
        detectors.append(made)
        return made

    with Telemetry(run_dir=tmp_path, detect=watches, offload=False) as telemetry:
        source = cartpole()
        attach(telemetry, source)
        train(source, 5)

    journalled = [dict(record.values) for record in read_run(tmp_path).records]
    own = ("alarm/", "telemetry/escalation_remaining")
    stripped = [{key: value for key, value in values.items() if not key.startswith(own)} for values in journalled]
    assert stripped == [dict(record.values) for record in detectors[-1].records]


@pytest.mark.system
@pytest.mark.parametrize("level", ["normal", "minimal"])
def test_a_grave_alarm_makes_the_next_updates_debug_and_then_it_is_over(tmp_path: Path, level: str) -> None:
    """Without a worker, the three updates after update 2 are DEBUG; MINIMAL stays unchanged."""
    trained(tmp_path, {2: SPIKE}, level=level, offload=False)

    usual = {"normal": 2.0, "minimal": 1.0}[level]
    raised = 3.0 if level == "normal" else usual
    assert levels(tmp_path) == [usual, usual, raised, raised, raised, usual, usual, usual]
    detailed = [DEBUG_ONLY in record.histograms for record in read_run(tmp_path).records]
    assert detailed == [level == "normal" and 3 <= update <= 5 for update in range(1, 9)]


@pytest.mark.system
def test_an_escalated_update_has_everything_that_one_of_a_run_at_debug_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_probe, "EXPENSIVE_PASS_SECONDS", math.inf)  # whatever the clock says
    trained(tmp_path / "raised", {2: SPIKE}, offload=False, source=recall(), updates=4)
    trained(tmp_path / "debug", {}, offload=False, source=recall(), updates=4, level="debug")

    raised, debug = (read_run(tmp_path / name).records[2] for name in ("raised", "debug"))
    every_tenth = {"repr/capacity_loss"}
    assert debug.values.keys() - raised.values.keys() - every_tenth == set()
    assert debug.histograms.keys() == raised.histograms.keys()


@pytest.mark.system
def test_the_process_beside_the_trainer_sends_alarms_back(tmp_path: Path) -> None:
    """They arrive at the latest when the run is closed; at most three updates after the alarm are DEBUG."""
    heard: list[Alarm] = []

    def wait_for_the_alarm(event: UpdateEnd) -> None:
        if event.update == 3:
            wait_until(lambda: '"kind":"alarm"' in (tmp_path / "journal.jsonl").read_text(), "an alarm in the journal")

    with Telemetry(run_dir=tmp_path, detect=scripted({2: SPIKE, 6: CLEAR})) as telemetry:
        telemetry.on_alarm(heard.append)
        source = cartpole()
        attach(telemetry, source)
        source.hooks.on(UpdateEnd, wait_for_the_alarm)
        train(source, 8)

    run = read_run(tmp_path)
    assert heard == list(run.alarms)
    assert [alarm.axes.update for alarm in heard] == [2, 6]
    assert heard[0].evidence["worst"]
    raised = [update for update, level in enumerate(levels(tmp_path), 1) if level == 3.0]
    assert raised and raised[0] > 2 and len(raised) <= 3


@pytest.mark.system
def test_alarms_of_a_process_that_died_are_heard_all_the_same(tmp_path: Path) -> None:
    heard: list[Alarm] = []
    telemetry = Telemetry(run_dir=tmp_path, detect=scripted({2: SPIKE, 3: ScriptedAlarm("grad/explode"), 5: CLEAR}))
    telemetry.on_alarm(heard.append)
    session = session_of(telemetry)
    session.expect_updates(candidates=tuple, open_update=Update)
    session.start()
    assert session._recorder is not None
    worker = session._recorder.pipeline
    if not isinstance(worker, WorkerPipeline):
        pytest.skip("one core: no worker")
    for update in range(1, 4):
        telemetry.flush(env_step=update)
    wait_until(lambda: '"kind":"alarm"' in (tmp_path / "journal.jsonl").read_text(), "an alarm in the journal")
    os.kill(worker.pid, signal.SIGKILL)
    for update in range(4, 7):
        telemetry.flush(env_step=update)
    telemetry.close()

    assert [alarm.axes.update for alarm in heard] == [2, 3, 5]
    assert heard == list(read_run(tmp_path).alarms)


@pytest.mark.system
@pytest.mark.parametrize(("make", "offload"), [(cartpole, False), (recall, False), (recall, True)])
def test_weights_are_bit_identical_whatever_is_raised(tmp_path: Path, make: Callable[[], PPO], offload: bool) -> None:
    bare = make()
    train(bare, 6)

    script = {2: SPIKE, 3: ScriptedAlarm("grad/explode", key="grad/global/norm_preclip", remaining=2)}
    watched = trained(tmp_path, script, source=make(), updates=6, offload=offload)

    pairs = zip(bare.policy.parameters(), watched.policy.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert offload or 3.0 in levels(tmp_path)


def test_a_callback_may_change_the_trainer(tmp_path: Path) -> None:
    """Update 2 raises the alarm and its flush calls the callback: update 3 uses the new rate."""
    source = cartpole(desired_kl=0.01)
    with Telemetry(run_dir=tmp_path, detect=scripted({2: SPIKE}), offload=False) as telemetry:
        attach(telemetry, source)

        def calm(alarm: Alarm) -> None:
            source.optimizer.param_groups[0]["lr"] = 1e-5
            telemetry.notify_intervention("lower learning rate", learning_rate=1e-5)

        telemetry.on_alarm(calm)
        train(source, 4)

    run = read_run(tmp_path)
    assert run.records[2].values["opt/lr"] == 1e-5
    assert [record.values["alarm/interventions"] for record in run.records] == [0, 0, 1, 1]
    (event,) = (event for event in run.events if event.type == "intervention")
    assert event.data == {"reason": "lower learning rate", "learning_rate": 1e-5}
    assert event.axes == run.records[1].axes


def test_a_callback_that_close_calls_comes_too_late_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The last update is not flushed: closing the run raises its alarm."""
    heard: list[str] = []
    with Telemetry(run_dir=None, detect=scripted({2: SPIKE})) as telemetry:
        telemetry.on_alarm(lambda alarm: heard.append(alarm.type))
        telemetry.on_alarm(lambda alarm: telemetry.notify_intervention("lower rate"))
        telemetry.flush(env_step=1)
        telemetry.log({"policy/kl": 1.0})

    assert heard == ["policy/kl_spike"]
    assert not caplog.messages


@pytest.mark.parametrize("kind", [RuntimeError, asyncio.CancelledError, GeneratorExit])
def test_what_a_callback_raises_is_logged_once_and_an_interrupt_is_not_held(
    kind: type[BaseException], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = {1: SPIKE, 2: ScriptedAlarm("grad/explode"), 3: CLEAR}
    heard: list[str] = []

    def fail(alarm: Alarm) -> None:
        raise kind("no such trainer")

    with caplog.at_level(logging.WARNING, "esper_telemetry"), Telemetry(run_dir=None, detect=scripted(script)) as telemetry:
        telemetry.on_alarm(fail)
        remove = telemetry.on_alarm(lambda alarm: heard.append(alarm.type))
        telemetry.flush(env_step=1)
        telemetry.flush(env_step=2)
        remove()
        telemetry.flush(env_step=3)
    assert heard == ["policy/kl_spike", "grad/explode"]
    assert len([record for record in caplog.records if "no such trainer" in record.message]) == 1

    def interrupt(alarm: Alarm) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Telemetry(run_dir=tmp_path, detect=scripted(script)) as telemetry:
        telemetry.on_alarm(interrupt)
        telemetry.flush(env_step=1)
    assert read_run(tmp_path).status is RunStatus.INTERRUPTED


def test_the_time_of_a_callback_is_not_telemetrys() -> None:
    memory = MemorySink()
    with Telemetry([memory], run_dir=None, detect=scripted({1: SPIKE})) as telemetry:
        telemetry.on_alarm(lambda alarm: time.sleep(0.3))
        telemetry.flush(env_step=1)
        telemetry.flush(env_step=2)

    assert all(record.values["perf/telemetry_ms"] < 200 for record in memory.records)


def test_a_run_that_goes_on_has_seen_its_earlier_records(tmp_path: Path) -> None:
    """The run has earlier records and an intervention; changed settings are a second intervention."""
    with Telemetry(run_dir=tmp_path, detect=scripted({}), config={"lr": 1.0}) as telemetry:
        telemetry.flush(env_step=1)
        telemetry.notify_intervention("reward scale")
        telemetry.flush(env_step=2)
    with Telemetry(run_dir=tmp_path, detect=scripted({3: SPIKE}), config={"lr": 2.0}, resume=True) as telemetry:
        telemetry.flush(env_step=3)

    run = read_run(tmp_path)
    assert [record.values["alarm/seen"] for record in run.records] == [1, 2, 3]
    assert [record.values["alarm/interventions"] for record in run.records] == [0, 1, 2]
    assert run.events[-2].data == {"reason": "the run continues with other settings", "changed": ["lr"]}


def test_an_exception_in_training_is_seen_before_the_run_ends(tmp_path: Path) -> None:
    """The interrupted update is recorded and judged, and its alarm is reported."""
    heard: list[Alarm] = []
    source = cartpole()
    with (
        pytest.raises(FloatingPointError),
        Telemetry(run_dir=tmp_path, detect=scripted({3: ScriptedAlarm("numerics/nonfinite")}), offload=False) as telemetry,
    ):
        telemetry.on_alarm(heard.append)
        attach(telemetry, source)

        def poison(event: RolloutEnd) -> None:
            if event.update == 3:
                with torch.no_grad():
                    next(source.policy.parameters()).fill_(math.nan)

        source.hooks.on(RolloutEnd, poison)
        train(source, 5)

    run = read_run(tmp_path)
    assert run.status is RunStatus.FAILED
    assert [(alarm.type, alarm.axes.update) for alarm in run.alarms] == [("numerics/nonfinite", 3)]
    assert heard == list(run.alarms)
    assert run.records[-1].partial
    assert run.alarms[0].evidence["stability"]["first"]


def test_a_rollback_is_an_intervention(tmp_path: Path) -> None:
    source = cartpole()
    source.hooks.on(UpdateEnd, lambda event: source.hooks.emit(Rollback(event.update, event.env_step, 1)) if event.update == 1 else None)
    trained(tmp_path, {}, source=source, updates=2, offload=False)

    assert [event.type for event in read_run(tmp_path).events if event.type == "intervention"] == ["intervention"]


def test_nothing_is_looked_for_where_nobody_wants_it(tmp_path: Path) -> None:
    with Telemetry(run_dir=tmp_path, detect=False) as telemetry:
        telemetry.flush(env_step=1)
        telemetry.notify_intervention("in vain")

    run = read_run(tmp_path)
    assert run.alarms == ()
    assert not [key for record in run.records for key in record.values if key.startswith(("alarm", "telemetry/escal"))]
