"""Telemetry of rl_games' agents does not affect training, and its numbers equal the trainer's."""

from __future__ import annotations

import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("rl_games", reason="needs rl_games")
pytest.importorskip("gymnasium", reason="needs gymnasium")

import rl_games_models
from adapter_runs import checked_equations, differing_equations, recorded, recorded_norms

from esper_telemetry import RunStatus, Telemetry, attach, read_run
from esper_telemetry.adapters.rl_games import TelemetryObserver
from esper_telemetry.adapters.taps import ClipFunction

pytestmark = [pytest.mark.sb3, pytest.mark.filterwarnings("ignore")]  # rl_games and tensorboardX emit warnings


@pytest.mark.parametrize("name", ["separate", "normalized_value", "discrete", "central_value"])
def test_numbers_equal_those_of_the_trainer(name: str, tmp_path: Path) -> None:
    """Losses and entropy equal rl_games' logs; norms equal the values it computes; episodes match its counts.

    Its function for clipping is not replaced if something else has replaced it before.
    """
    from rl_games.common import a2c_common

    settings = rl_games_models.CONFIGURATIONS[name]
    with recorded_norms(a2c_common) if name == "separate" else recorded_norms(ClipFunction, "__call__") as norms:
        run, algo = recorded(rl_games_models.train, settings, tmp_path / "run")

    for update, record in enumerate(run.records):
        values = record.values
        of_update = norms[8 * update : 8 * update + 8]
        assert values["grad/global/norm_preclip"] == pytest.approx(statistics.mean(of_update), rel=1e-5)
        assert values["loss/policy"] == pytest.approx(values["rl_games/losses/a_loss"], abs=1e-6)
        assert 2 * values.get("loss/value", 0.0) == pytest.approx(values["rl_games/losses/c_loss"], rel=1e-5)
        assert values["policy/entropy"] == pytest.approx(values["rl_games/losses/entropy"], rel=1e-5)
        assert values["rl_games/learning_rate/min"] <= values["opt/lr"] <= values["rl_games/learning_rate/max"]
    buffer, last = algo.experience_buffer.tensor_dict, run.records[-1].values
    assert last["ret/mean"] - last["adv/raw/mean"] == pytest.approx(float(buffer["values"].mean()), rel=1e-4)
    if name == "normalized_value":
        assert last["reward/mean"] > float(buffer["rewards"].mean())  # without the values added at time limits
        assert last["episode/length_mean"] == 20
        assert last["episode/return_mean_100"] == pytest.approx(float(algo.game_rewards.get_mean()[0]), rel=1e-5)
        assert last["episode/truncated_frac"] == 1


def test_equations_match_and_the_time_limits_of_rl_games_are_named_a_variant(tmp_path: Path) -> None:
    run, _ = recorded(rl_games_models.train, {}, tmp_path, level="debug")

    assert {"advantages", "returns", "normalized_advantages", "log_probs", "minibatches"} <= checked_equations(run)
    assert differing_equations(run) == {"advantages": ["time_limit_current_value"], "minibatches": ["unshuffled"]}
    assert not any(alarm.type == "integrity/equation" for alarm in run.alarms)


def test_a_compiled_model_is_measured(tmp_path: Path) -> None:
    """rl_games compiles its model by default, after telemetry has been attached."""
    run, algo = recorded(rl_games_models.train, {"torch_compile": True}, tmp_path)

    assert hasattr(algo.model, "_orig_mod")
    for record in run.records:
        assert record.values["integrity/ratio_init"] <= 1e-5
        assert record.values["loss/policy"] == pytest.approx(record.values["rl_games/losses/a_loss"], abs=1e-6)
        assert record.values["grad/actor/norm_preclip"] > 0


def test_the_observer_passes_everything_on_and_is_a_source(tmp_path: Path) -> None:
    calls: list[str] = []
    methods = ["before_init", "after_init", "process_infos", "after_steps", "after_print_stats", "after_clear_stats"]
    other = SimpleNamespace(**{name: lambda *_, name=name: calls.append(name) for name in methods})

    with Telemetry([], run_dir=tmp_path) as telemetry, Telemetry([], run_dir=None) as second:
        observer = TelemetryObserver(telemetry, other)
        attach(second, observer)
        for name in methods:
            if name != "after_init":
                getattr(observer, name)(None)

    assert calls == [name for name in methods if name != "after_init"]
    with pytest.raises(TypeError, match="takes a Telemetry"):
        TelemetryObserver(object())  # type: ignore[arg-type] # what is tested
    with Telemetry([], run_dir=None) as telemetry, pytest.raises(TypeError, match="watches PPO"):
        TelemetryObserver(telemetry, other).after_init(object())


def test_an_exception_ends_the_run_as_failed_and_leaves_no_tap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_games.algos_torch.a2c_continuous import A2CAgent

    agents: list[Any] = []
    losses = A2CAgent.calc_losses

    def breaking(self: Any, *args: Any, **kwargs: Any) -> Any:
        agents.append(self)
        if len(agents) == 10:
            raise RuntimeError("broken loss")
        return losses(self, *args, **kwargs)

    monkeypatch.setattr(A2CAgent, "calc_losses", breaking)
    with pytest.raises(RuntimeError, match="broken loss"), Telemetry([], run_dir=tmp_path) as telemetry:
        rl_games_models.train({}, 5, telemetry)

    run = read_run(tmp_path)
    assert run.status is RunStatus.FAILED
    assert [record.axes.gradient_step for record in run.records] == [8, 9]
    assert rl_games_models.taps_of(agents[0]) == []
