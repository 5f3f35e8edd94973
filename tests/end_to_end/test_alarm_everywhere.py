"""A learning rate multiplied by a hundred halfway through: the alarm is in the journal and in all three backends."""

import json
from pathlib import Path
from typing import Any

import pytest
from backends_read import (
    BACKEND_SECONDS,
    all_backends_closed,
    assert_the_same_numbers_in_all_four,
    mlflow_client,
    mlflow_run,
    wandb_entries,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from waiting import wait_until

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.alarms import Detectors
from esper_telemetry.core.record import Alarm, AlarmEvent, Record
from esper_telemetry.events import RolloutEnd
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.journal.read import Run, entries

pytestmark = [pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"), pytest.mark.system]

HALF, UPDATES = 24, 32
SINKS = ("tensorboard", "wandb:walker?mode=offline", "mlflow")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("spoilt") / "run"
    trainer = PPO(make_env("CartPole-v1", num_envs=8), PPOConfig(seed=1, anneal_learning_rate=False))

    def spoil(event: RolloutEnd) -> None:
        if event.update > HALF:
            trainer.optimizer.param_groups[0]["lr"] = 100 * trainer.config.learning_rate
        if event.update == HALF + 3:  # on a busy machine the worker lags behind the trainer
            telemetry.state_dict()  # waits until the journal holds all of it

    trainer.hooks.on(RolloutEnd, spoil)
    with Telemetry(SINKS, run_dir=run_dir, close_timeout=120.0) as telemetry:
        attach(telemetry, trainer)
        trainer.learn(UPDATES * 8 * trainer.config.num_steps)
    wait_until(lambda: all_backends_closed(run_dir), "the end of the run in every backend", BACKEND_SECONDS)
    return run_dir


@pytest.fixture(scope="module")
def run(run_dir: Path) -> Run:
    return read_run(run_dir)


@pytest.fixture(scope="module")
def first(run: Run) -> Alarm:
    return next(alarm for alarm in run.alarms if alarm.type == "policy/kl_spike")


def test_the_journal_names_it_with_evidence_and_not_before(run: Run, first: Alarm) -> None:
    assert first.event is AlarmEvent.RAISE
    assert min(alarm.axes.update for alarm in run.alarms) == first.since == first.axes.update == HALF + 1
    assert len(first.evidence["worst"]) == 16
    assert first.evidence["values"]["policy/kl"] == first.value
    assert run.records[first.axes.update - 1].values["alarm/policy/kl_spike"] == first.severity


def test_the_level_was_raised_afterwards(run: Run, first: Alarm) -> None:
    levels = [record.values["telemetry/level"] for record in run.records]
    raised = [update for update, level in enumerate(levels, 1) if level == 3]
    assert raised and min(raised) > first.axes.update


def test_the_journal_raises_the_same_alarms_again(run: Run, run_dir: Path) -> None:
    detectors, raised_again = Detectors(run.info.facts), list[Alarm]()
    for entry in entries(run_dir):
        if isinstance(entry, Record):
            raised_again.extend(detectors.step(entry).alarms)
        elif isinstance(entry, JournalEvent) and entry.type == "intervention":
            detectors.intervention()

    def told(alarms: Any) -> list[tuple[Any, ...]]:
        return [(a.axes, a.type, a.event, a.severity, a.value, a.incident, a.text) for a in alarms]

    assert told(raised_again) == told(run.alarms)


def test_tensorboard_has_its_page(run_dir: Path, first: Alarm) -> None:
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0}).Reload().Tensors("0_verdict")

    pages = [event.tensor_proto.string_val[0].decode() for event in events if event.step == first.axes.env_step]
    assert f"({first.level}, still active)" in pages[-1] and first.type.replace("_", "\\_") in pages[-1]


def test_wandb_has_its_alert_and_the_table(run_dir: Path, run: Run, first: Alarm) -> None:
    alerts = [entry["alert"] for entry in wandb_entries(run_dir) if entry["type"] == "alert"]
    assert any(alert["title"] == first.type and first.text in alert["text"] for alert in alerts)
    (table,) = run_dir.glob("wandb/offline-run-*/files/media/table/alarms/*.json")
    rows = json.loads(table.read_text())["data"]
    assert [(row[0], row[2], row[3]) for row in rows] == [(a.axes.update, a.event, a.type) for a in run.alarms]


def test_mlflow_has_its_verdict_and_the_incidents(run_dir: Path, run: Run, first: Alarm, tmp_path: Path) -> None:
    in_mlflow = mlflow_run(run_dir)
    note = in_mlflow.data.tags["mlflow.note.content"].replace("\\_", "_")
    # a later check may have found the cause
    cause = [alarm.cause for alarm in run.alarms if alarm.incident == first.incident][-1]
    begun = next(alarm.since for alarm in run.alarms if alarm.type == cause)
    assert f"**{cause}** (critical, still active): Since update {begun}, " in note
    assert f"{cause} since update {begun}" in in_mlflow.data.tags["esper.verdict"]
    client = mlflow_client(run_dir)
    stored = client.download_artifacts(in_mlflow.info.run_id, "incidents.json", str(tmp_path))
    incidents = json.loads(Path(stored).read_text())
    last = [alarm for alarm in run.alarms if alarm.incident == first.incident][-1]
    assert incidents[0]["cause"] == last.cause and incidents[0]["since"] == first.since


def test_the_numbers_are_the_same_everywhere_all_the_same(run_dir: Path) -> None:
    assert_the_same_numbers_in_all_four(run_dir)
