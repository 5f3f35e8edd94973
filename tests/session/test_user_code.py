"""Every update is recorded and training continues, even if a user's alarm raises, exits or returns invalid values."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from hostile_alarms import ENDS, KEY, RESULTS, Ending, Returning, rule

from esper_telemetry import Record, RunStatus, Telemetry, read_run
from esper_telemetry.alarms import AlarmRule, Finding, View
from esper_telemetry.metrics import loss_terms

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: no worker")
UPDATES = 8


def train(telemetry: Telemetry, updates: int = UPDATES) -> None:
    with telemetry:
        for update in range(1, updates + 1):
            telemetry.log({KEY: float(update), "my/other": 1.0})
            telemetry.flush(env_step=update)


def numbers(run_dir: Path) -> list[float]:
    return [record.values[KEY] for record in read_run(run_dir).records]


def about_alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "alarm my/alarm" in record.getMessage()]


@pytest.mark.parametrize("what", RESULTS)
def test_whatever_a_judge_returns_or_raises_every_record_is_whole(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    train(Telemetry(run_dir=tmp_path, alarms=rule(Returning(what))))

    run = read_run(tmp_path)
    assert numbers(tmp_path) == [float(update) for update in range(1, UPDATES + 1)]
    assert all("my/other" in record.values and "alarm/active" in record.values for record in run.records)
    assert run.status is RunStatus.FINISHED and not run.damaged
    assert len(about_alarms(caplog)) <= 1 and all(len(message) < 1000 for message in about_alarms(caplog))


@pytest.mark.parametrize(
    ("what", "severity", "value", "threshold"),
    [
        ("infinite severity", 1.0, 1.0, None),
        ("NumPy severity", 0.9, 1.0, None),
        ("infinite value", 1.0, None, None),
        ("NumPy value", 1.0, 2.5, 1.0),
        ("tensor value", 1.0, 2.5, None),
    ],
)
def test_numbers_of_a_judge_are_plain_in_the_journal(
    tmp_path: Path, what: str, severity: float, value: float | None, threshold: float | None
) -> None:
    train(Telemetry(run_dir=tmp_path, alarms=rule(Returning(what))))

    (alarm,) = read_run(tmp_path).alarms
    assert alarm.severity == pytest.approx(severity)
    assert (alarm.value, alarm.threshold) == (value, threshold)
    assert type(alarm.adaptive) is bool


@pytest.mark.system
@two_cores
@pytest.mark.parametrize("what", ["text of an exception", "an exception that exits", "limits of other alarms"])
def test_other_alarms_hear_nothing_of_it_in_a_worker(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """A built-in alarm is raised as it is without the misbehaving alarm."""
    telemetry = Telemetry(run_dir=tmp_path, alarms=rule(Returning(what)), offload=True)
    with telemetry:
        for update in range(1, 9):
            telemetry.log({KEY: 1.0, "reward/nonfinite": 3.0, "numerics/nonfinite": 3.0})
            telemetry.flush(env_step=update)

    assert [alarm.type for alarm in read_run(tmp_path).alarms] == ["numerics/nonfinite"]
    assert "summarises updates" not in caplog.text


@pytest.mark.system
@two_cores
@pytest.mark.parametrize("what", ["infinite value", "SystemExit", "a cleared view"])
def test_the_same_in_a_worker(tmp_path: Path, what: str) -> None:
    train(Telemetry(run_dir=tmp_path, alarms=rule(Returning(what)), offload=True))

    assert numbers(tmp_path) == [float(update) for update in range(1, UPDATES + 1)]


@pytest.mark.system
@two_cores
@pytest.mark.parametrize("how", ENDS)
def test_a_judge_that_ends_the_worker_is_not_called_again(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(run_dir=tmp_path, alarms=rule(Ending(how)), offload=True, close_timeout=40.0)
    train(telemetry)

    run = read_run(tmp_path)
    assert [record.axes.update for record in run.records] == [*range(1, UPDATES + 1)]
    assert all(record.values["my/other"] == 1.0 for record in run.records)
    assert run.status is RunStatus.FINISHED
    (warned,) = [message for message in about_alarms(caplog) if "summarises" in message]
    assert "in alarm my/alarm, which is not called again in this run" in warned


def test_other_alarms_are_judged_as_without_the_one_that_raises(tmp_path: Path) -> None:
    sound = rule(lambda view: [Finding(1.0, KEY, view.get(KEY))], type="my/sound")
    train(Telemetry(run_dir=tmp_path, alarms=[rule(Returning("ValueError")), sound]))

    assert [alarm.type for alarm in read_run(tmp_path).alarms] == ["my/sound"]


@pytest.mark.parametrize(("count", "records"), [(1, 3), (9, 2)])
def test_a_ctrl_c_while_a_judge_runs_ends_training_and_the_journal(tmp_path: Path, count: int, records: int) -> None:
    """No record is lost unless the judge is interrupted in every update from the third on."""
    presses = [KeyboardInterrupt()] * count

    def interrupted(view: View) -> list[Finding]:
        if view.update >= 3 and presses:
            raise presses.pop()
        return []

    with pytest.raises(KeyboardInterrupt):
        train(Telemetry(run_dir=tmp_path, alarms=rule(interrupted)))

    assert numbers(tmp_path) == [1.0, 2.0, 3.0][:records]
    assert read_run(tmp_path).status is RunStatus.INTERRUPTED


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no text")


def test_whatever_is_noted_with_an_intervention_becomes_text(tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    with Telemetry(run_dir=tmp_path) as telemetry:
        telemetry.log({KEY: 1.0})
        telemetry.flush(env_step=1)
        telemetry.notify_intervention("\ud800", odd=Unprintable(), large=[0] * 1_000_000, deep=deep, nan=float("nan"))

    (event,) = (event for event in read_run(tmp_path).events if event.type == "intervention")
    assert event.data["odd"] == "<Unprintable>"
    assert event.data["large"][-1] == "... 990,000 more" and event.data["nan"] == "nan"
    assert all(len(line) < 4_000_000 for line in (tmp_path / "journal.jsonl").read_text().splitlines())


def test_facts_and_settings_may_be_any_objects(tmp_path: Path) -> None:
    train(Telemetry(run_dir=tmp_path, facts={"odd": Unprintable(), "call": lambda: 0}, config={"odd": Unprintable()}))

    info = read_run(tmp_path).info
    assert info.facts["odd"] == info.config["odd"] == "<Unprintable>"
    assert json.loads((tmp_path / "config.json").read_text())["facts"]["odd"] == "<Unprintable>"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), ValueError("\ud800" + "a" * 5_000_000)])
def test_a_sink_that_raises_anything_in_its_thread_is_tried_again(
    tmp_path: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[float] = []
    errors = [error]

    def sink(record: Record) -> None:
        if errors:
            raise errors.pop()
        taken.append(record.values[KEY])

    with caplog.at_level(logging.WARNING, "esper_telemetry"):
        train(Telemetry(sink, run_dir=tmp_path), updates=3)

    assert taken == [1.0, 2.0, 3.0]
    assert all(len(record.getMessage()) < 1000 for record in caplog.records)


@pytest.mark.system
def test_texts_of_any_length_are_written_as_readers_take_them(tmp_path: Path) -> None:
    """Names, notes, settings, alarms and interventions of three million characters each."""
    text = "x" * 3_000_000
    finding = Finding(1.0, KEY, 1.0, 0.5).with_text(lambda: text)
    long = AlarmRule(type="my/long", inputs=(KEY,), meaning=text, action=text, judge=lambda view: iter([finding]), n_on=1)
    settings = {"long": text, text: 1}
    with Telemetry(run_dir=tmp_path, name=text, notes=text, tags=[text], config=settings, alarms=long) as telemetry:
        for update in range(1, 4):
            telemetry.log({KEY: 1.0})
            with pytest.raises(ValueError, match="at most 250 characters, got 3,000,003, which begin with 'my/xxx"):
                telemetry.log({f"my/{text}": 1.0})
            telemetry.flush(env_step=update)
            telemetry.notify_intervention(text, why=text, **{text: 1})

    run = read_run(tmp_path)
    assert not run.damaged and len(run.records) == 3
    assert [alarm.type for alarm in run.alarms if not alarm.type.startswith("telemetry/")] == ["my/long"]
    assert len([event for event in run.events if event.type == "intervention"]) == 3
    assert run.info.name == f"{'x' * 50_000}... 2,950,000 characters more"


def test_a_rule_that_cannot_be_asked_whether_it_applies_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(facts: object) -> bool:
        raise SystemExit(2)

    train(Telemetry(run_dir=tmp_path, alarms=rule(Returning("nothing"), type="my/asked", applies=broken)))

    assert [one.getMessage() for one in caplog.records if "my/asked" in one.getMessage()] == [
        "alarm my/asked failed (SystemExit: 2): what it measures is missing from the records, training continues"
    ]


def test_a_group_without_rows_is_left_out(tmp_path: Path) -> None:
    nothing = torch.empty(0)
    with Telemetry(run_dir=tmp_path) as telemetry:
        telemetry.observe(loss_terms(nothing, nothing, nothing))
        telemetry.log({KEY: 1.0})
        telemetry.flush(env_step=1)

    (record,) = read_run(tmp_path).records
    assert record.values[KEY] == 1.0 and "loss/policy" not in record.values
