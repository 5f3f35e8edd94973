"""What holds for every trainer with an adapter: identical weights, alarms that name faults, silence in healthy runs, and the backends.

Each `*_models` module declares its trainer: `train`, `fingerprint`, `taps_of`, and tables of small models by name.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from backends_read import BACKENDS, assert_the_same_numbers_in_all_four

from esper_telemetry import Alarm, Telemetry, read_run
from esper_telemetry.alarms import Thresholds

pytestmark = [pytest.mark.sb3, pytest.mark.filterwarnings("ignore")]  # rl_games and TorchRL emit warnings

QUIET = Thresholds(off=frozenset({"telemetry/overhead"}))
"""Tests share their cores, so only the benchmark judges the cost of telemetry."""


TRAINERS: Mapping[str, Any] = {
    name: importlib.import_module(f"{name}_models")
    for name in ("rl_games", "rsl_rl", "skrl", "torchrl")
    if importlib.util.find_spec(name) is not None
}


def entries(table: str) -> pytest.MarkDecorator:
    """Mark a test for every entry of this table of every trainer."""
    pairs = [(name, each) for name, module in TRAINERS.items() for each in getattr(module, table)]
    return pytest.mark.parametrize(("trainer", "name"), pairs)


def recorded(trainer: str, model: Any, run_dir: Path, *, updates: int = 3, sinks: Any = (), **settings: Any) -> Any:
    """Return the journal of a model that has learned with telemetry, in process by default, and the trained model."""
    with Telemetry(sinks, run_dir=run_dir, **{"offload": False, **settings}) as telemetry:
        trained = TRAINERS[trainer].train(model, updates, telemetry)
    return read_run(run_dir), trained


def raised_alarms(trainer: str, model: Any, updates: int) -> list[Alarm]:
    """Return the alarms that `on_alarm` receives during training."""
    received: list[Alarm] = []
    with Telemetry([], run_dir=None, detect=QUIET) as telemetry:
        telemetry.on_alarm(received.append)
        TRAINERS[trainer].train(model, updates, telemetry)
        live = list(received)
    return [alarm for alarm in live if alarm.event == "raise"]


@pytest.mark.parametrize("level", ["normal", "debug"])
@entries("MODELS")
def test_weights_are_bit_identical(trainer: str, name: str, level: str, tmp_path: Path) -> None:
    """Optimizer, normalisers and generator included; no metric fails, and rollouts and minibatches agree."""
    module = TRAINERS[trainer]
    expected = module.fingerprint(module.train(module.MODELS[name](), 3))

    run, trained = recorded(trainer, module.MODELS[name](), tmp_path, level=level)

    actual = module.fingerprint(trained)
    assert actual.keys() == expected.keys()
    assert [key for key in actual if not torch.equal(actual[key], expected[key])] == []
    assert [record.axes.env_step for record in run.records] == [module.ROLLOUT * update for update in (1, 2, 3)]
    for record in run.records:
        assert "telemetry/metric_errors" not in record.values
        assert record.values["integrity/ratio_init"] <= 1e-6
        assert record.values["integrity/gae_identity"] <= 1e-5
        assert record.values["integrity/rows_repeated"] == 0
    assert module.taps_of(trained) == []


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_failure_of_telemetry_does_not_reach_training(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("telemetry is broken")

    module = TRAINERS[trainer]
    make = next(iter(module.MODELS.values()))
    expected = module.fingerprint(module.train(make(), 3))
    for function in module.FAILING:
        monkeypatch.setattr(f"esper_telemetry.adapters.{trainer}.{function}", fails)

    _, trained = recorded(trainer, make(), tmp_path)

    assert all(torch.equal(expected[key], value) for key, value in module.fingerprint(trained).items())


@entries("IN_BACKENDS")
def test_all_three_backends_hold_what_the_journal_holds(trainer: str, name: str, tmp_path: Path) -> None:
    model = TRAINERS[trainer].MODELS[name]()

    recorded(trainer, model, tmp_path, sinks=list(BACKENDS), offload=True, close_timeout=60)

    assert_the_same_numbers_in_all_four(tmp_path)


@entries("CAUSES")
def test_the_first_incident_names_the_fault(trainer: str, name: str) -> None:
    module = TRAINERS[trainer]

    first = raised_alarms(trainer, module.BROKEN[name](), updates=6)[0]

    assert first.type in module.CAUSES[name]
    assert first.cause in module.CAUSES[name]
    assert first.axes.update <= 5


@entries("HEALTHY")
def test_a_healthy_run_raises_nothing(trainer: str, name: str) -> None:
    raised = raised_alarms(trainer, TRAINERS[trainer].HEALTHY[name](), updates=12)

    assert [alarm.type for alarm in raised] == []


@entries("LEARNING")
def test_cartpole_is_learned(trainer: str, name: str, tmp_path: Path) -> None:
    """The mean return of the last hundred episodes rises from 20 to over 100."""
    run, _ = recorded(trainer, TRAINERS[trainer].LEARNING[name](), tmp_path, updates=20)

    assert run.records[0].values["episode/return_mean_100"] < 35
    assert run.records[-1].values["episode/return_mean_100"] > 100
