"""Users' alarms, passed to `Telemetry` or installed as entry points: in this process, in the worker and in `diagnose`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from healthy_run import judged, raised, record, run, set_to

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.alarms import AboveBound, AlarmRule, Detectors, Finding, Thresholds, View, alarm_rules, diagnose
from esper_telemetry.alarms.alarm_bounds import above
from esper_telemetry.core.record import AlarmEvent, Level
from esper_telemetry.pipeline.in_process import PipelineSettings
from esper_telemetry.pipeline.worker import LOG_NAME, can_use_worker

KEY = "my/number"
MY_BOUND = above("my_bound", 3.0, "a number of mine")


def my_rule(**changes: Any) -> AlarmRule:
    declared = AlarmRule(
        type="my/alarm",
        inputs=(KEY,),
        meaning="My number is too large.",
        action="Make it smaller.",
        judge=AboveBound(KEY, MY_BOUND, "my number is {number}"),
        bounds=(MY_BOUND,),
        source="my own experience",
    )
    return replace(declared, **changes)


@dataclass
class Growing:
    """The number has grown twice in a row."""

    before: float = 0.0
    times: int = 0

    def __call__(self, view: View) -> Iterator[Finding]:
        value = view.get(KEY)
        if value is not None:
            self.times = self.times + 1 if value > self.before else 0
            self.before = value
            yield Finding(float(self.times >= 2), KEY, value)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Entry-point values that tests add to."""
    values: list[object] = []

    @dataclass
    class Entry:
        name: str

        def load(self) -> object:
            return values[int(self.name)]

    def entries(group: str) -> list[Entry]:
        return [Entry(str(number)) for number in range(len(values))]

    monkeypatch.setattr("esper_telemetry.alarms.thresholds.entry_points", entries)
    alarm_rules.cache_clear()
    yield values
    monkeypatch.undo()
    alarm_rules.cache_clear()


def log(telemetry: Telemetry, *numbers: float) -> None:
    with telemetry:
        for update, number in enumerate(numbers, 1):
            telemetry.log({KEY: number})
            telemetry.flush(env_step=100 * update)


@pytest.mark.system
@pytest.mark.parametrize("offload", [False, True])
def test_an_alarm_given_to_telemetry_is_raised_wherever_records_are_judged(tmp_path: Path, offload: bool) -> None:
    log(Telemetry(run_dir=tmp_path / "run", alarms=my_rule(), offload=offload), 1, 2, 5, 5)

    (alarm,) = read_run(tmp_path / "run").alarms
    assert (alarm.type, alarm.axes.update, alarm.value, alarm.threshold) == ("my/alarm", 3, 5.0, 3.0)
    assert alarm.text == "Since update 3, my number is 5. Try: Make it smaller."
    assert alarm.evidence["values"] == {KEY: 5.0}


def test_a_judge_has_its_state_per_run() -> None:
    rule = my_rule(judge=Growing())
    for _ in range(2):
        detectors = Detectors(alarms=[rule])
        alarms = [a for n in (1, 2, 3) for a in detectors.step(record(n, {KEY: float(n)})).alarms]
        assert [(alarm.type, alarm.axes.update) for alarm in alarms] == [("my/alarm", 2)]


def test_an_alarm_that_is_not_installed_is_read_back_from_the_journal(tmp_path: Path) -> None:
    log(Telemetry(run_dir=tmp_path / "run", alarms=[my_rule()], offload=False), 1, 5, 5, 1, 1, 1)
    journal = read_run(tmp_path / "run")

    diagnosis = diagnose(journal.info.facts, journal.records, alarms=journal.alarms)

    (incident,) = diagnosis.incidents
    assert (incident.cause, incident.since, incident.ends()) == ("my/alarm", 2, {"my/alarm": 6})
    assert diagnose(journal.info.facts, journal.records).incidents == ()


def test_an_alarm_of_an_entry_point_is_raised_and_its_bound_can_be_changed(installed: list[object]) -> None:
    installed.append([my_rule()])
    records = run(40, set_to({KEY: 5.0}))

    assert raised(judged(records)) == {"my/alarm": 30}
    assert raised(judged(records, thresholds=Thresholds.parse(["my_bound=9"]))) == {}
    assert raised(judged(records, thresholds=Thresholds.parse(["my/alarm=off"]))) == {}


def test_a_plugin_that_is_no_alarm_costs_a_warning(installed: list[object], caplog: pytest.LogCaptureFixture) -> None:
    installed += [7, my_rule(type="policy/kl_spike"), my_rule()]

    assert [rule.type for rule in alarm_rules() if rule.type.startswith("my/")] == ["my/alarm"]
    assert [line.split(" cannot")[0] for line in caplog.messages] == ["The alarms of 0", "The alarms of 1"]


def test_rank_is_the_place_among_causes() -> None:
    """A gradient that explodes (280) is raised in the same update."""
    for rank, cause in ((5, "my/alarm"), (500, "grad/explode")):
        detectors = Detectors(alarms=[my_rule(rank=rank)])
        records = run(40, set_to({KEY: 5.0, "grad/global/norm_preclip_max": 1e6}))
        alarms = [alarm for made in records for alarm in detectors.step(made).alarms]
        assert {alarm.cause for alarm in alarms if alarm.event is AlarmEvent.RAISE} == {cause}


@pytest.fixture
def script_rule(monkeypatch: pytest.MonkeyPatch) -> AlarmRule:
    """A rule whose judge the running script defines."""
    monkeypatch.setattr(Growing, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Growing", Growing, raising=False)
    return my_rule(judge=Growing())


class Trap:
    """A judge that cannot be pickled and raises its own error."""

    def __call__(self, view: View) -> Iterator[Finding]:
        yield from Growing()(view)

    def __reduce__(self) -> NoReturn:
        raise ValueError("no")


def test_an_alarm_that_the_script_defines_is_judged_in_this_process(tmp_path: Path, script_rule: AlarmRule) -> None:
    for rule in (script_rule, my_rule(judge=Trap())):
        settings = PipelineSettings(Level.NORMAL, partial(Detectors, alarms=(rule,)), dict)
        assert not can_use_worker(settings)

    log(Telemetry(run_dir=tmp_path / "run", alarms=script_rule), 1, 2, 3)

    assert [alarm.type for alarm in read_run(tmp_path / "run").alarms] == ["my/alarm"]
    assert not (tmp_path / "run" / LOG_NAME).exists()


def test_an_attached_trainer_with_such_an_alarm_is_recorded_in_this_process(tmp_path: Path, script_rule: AlarmRule) -> None:
    trainer = PPO(make_env("CartPole-v1", num_envs=2, seed=1), PPOConfig(num_steps=16, seed=1))
    with Telemetry(run_dir=tmp_path / "run", alarms=iter([script_rule])) as telemetry:
        attach(telemetry, trainer)
        trainer.learn(total_steps=64)

    assert read_run(tmp_path / "run").records
    assert not (tmp_path / "run" / LOG_NAME).exists()


def test_a_worker_is_refused_for_an_alarm_that_the_script_defines(tmp_path: Path, script_rule: AlarmRule) -> None:
    with pytest.raises(TypeError, match=r"'my/alarm' cannot be sent .* .*script that runs.* leave out offload"):
        Telemetry(run_dir=tmp_path / "run", alarms=iter([script_rule]), offload=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"alarms": [my_rule(judge=lambda _: ())], "offload": True}, TypeError, "cannot be sent to the worker process"),
        ({"alarms": [my_rule(type="policy/kl_spike")]}, ValueError, "an alarm 'policy/kl_spike' already exists"),
        ({"alarms": [my_rule(), my_rule()]}, ValueError, "an alarm 'my/alarm' already exists"),
        ({"alarms": [7]}, TypeError, "alarms must be instances of AlarmRule, got 7"),
        ({"alarms": my_rule(), "detect": False}, ValueError, "alarms are for detect=True"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, settings: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        Telemetry(run_dir=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
