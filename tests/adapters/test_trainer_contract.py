"""What holds for every trainer with an adapter: identical weights, alarms that name faults, silence in healthy runs, and the backends.

Each `*_models` module declares its trainer: `train`, `fingerprint`, `taps_of`, the number of steps of a `ROLLOUT`, the functions of the
adapter that are made to fail, and tables of small models by name.
"""

import importlib.util
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from adapter_runs import assert_identical, checked_equations, differing_equations, raised_alarms, recorded
from backends_read import BACKENDS, assert_the_same_numbers_in_all_four

from esper_telemetry import Telemetry
from esper_telemetry.adapters.taps import Tap

pytestmark = [pytest.mark.sb3, pytest.mark.filterwarnings("ignore")]  # rl_games and TorchRL emit warnings

TRAINERS: Mapping[str, Any] = {
    name: importlib.import_module(f"{name}_models")
    for name, package in (("sb3", "sb3_contrib"), *((name, name) for name in ("rl_games", "rsl_rl", "skrl", "torchrl")))
    if importlib.util.find_spec(package) is not None
}

CARTPOLE = {"ppo", "cartpole", "categorical", "discrete", "CartPole-v1"}
"""Models on CartPole, which pays 1 for each step."""


def entries(table: str) -> pytest.MarkDecorator:
    """Mark a test for every entry of this table of every trainer."""
    pairs = [(name, each) for name, module in TRAINERS.items() for each in getattr(module, table)]
    return pytest.mark.parametrize(("trainer", "name"), pairs)


@pytest.mark.parametrize("level", ["normal", "debug"])
@entries("MODELS")
def test_weights_are_bit_identical(trainer: str, name: str, level: str, tmp_path: Path) -> None:
    """Optimizer, normalisers and generator included; no metric fails, and rollouts and minibatches agree."""
    module = TRAINERS[trainer]
    expected = module.fingerprint(module.train(module.MODELS[name](), 3))

    run, trained = recorded(module.train, module.MODELS[name](), tmp_path, level=level)

    assert_identical(module.fingerprint(trained), expected)
    assert [record.axes.env_step for record in run.records] == [module.ROLLOUT * update for update in (1, 2, 3)]
    for record in run.records:
        assert "telemetry/metric_errors" not in record.values
        assert record.values["integrity/ratio_init"] <= 1e-6
        assert record.values["integrity/gae_identity"] <= 1e-5
        assert record.values["integrity/rows_repeated"] == 0
        if name in CARTPOLE and "episode/count" in record.values:
            assert record.values["episode/return_mean"] == pytest.approx(record.values["episode/length_mean"])
    if (trainer, level) == ("sb3", "debug"):  # the only adapter that replays single steps
        steps = {"gradient", "clipping", "optimizer_step"}
        assert steps <= checked_equations(run) and steps.isdisjoint(differing_equations(run))
    assert module.taps_of(trained) == []


@pytest.mark.parametrize("level", ["off", "minimal"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_off_installs_no_tap(trainer: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, owners, install = TRAINERS[trainer], [], Tap.__init__

    def installing(tap: Tap, owner: object, name: str) -> None:
        owners.append(owner)
        install(tap, owner, name)

    monkeypatch.setattr(Tap, "__init__", installing)
    with Telemetry([], run_dir=None, level=level) as telemetry:
        trained = module.train(next(iter(module.MODELS.values()))(), 1, telemetry)

    assert bool(owners) == (level == "minimal")
    assert module.taps_of(trained) == []


@entries("FAILING")
def test_a_failure_of_telemetry_does_not_reach_training(
    trainer: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("telemetry is broken")

    module = TRAINERS[trainer]
    make = next(iter(module.MODELS.values()))
    expected = module.fingerprint(module.train(make(), 3))
    monkeypatch.setattr(f"esper_telemetry.adapters.{trainer}.{name}", fails)

    run, trained = recorded(module.train, make(), tmp_path)

    assert_identical(module.fingerprint(trained), expected)
    late = (trainer, name) == ("torchrl", "acting_distribution")  # the steps of a rollout are counted with the next one
    assert [record.axes.env_step for record in run.records] == [module.ROLLOUT * (update - late) for update in (1, 2, 3)]
    assert "telemetry is broken" in caplog.text


@entries("IN_BACKENDS")
def test_all_three_backends_hold_what_the_journal_holds(trainer: str, name: str, tmp_path: Path) -> None:
    module = TRAINERS[trainer]

    recorded(module.train, module.MODELS[name](), tmp_path, sinks=list(BACKENDS), offload=True, close_timeout=60)

    assert_the_same_numbers_in_all_four(tmp_path)


@entries("CAUSES")
def test_the_first_incident_names_the_fault(trainer: str, name: str) -> None:
    module = TRAINERS[trainer]

    first = raised_alarms(partial(module.train, module.BROKEN[name](), 6))[0]

    assert first.type in module.CAUSES[name]
    assert first.cause in module.CAUSES[name]
    assert first.axes.update <= 5


@entries("HEALTHY")
def test_a_healthy_run_raises_nothing(trainer: str, name: str) -> None:
    module = TRAINERS[trainer]

    assert [alarm.type for alarm in raised_alarms(partial(module.train, module.HEALTHY[name](), 12))] == []
