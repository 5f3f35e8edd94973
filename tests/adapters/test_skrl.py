"""Telemetry of skrl's agents does not affect training, and its numbers equal the trainer's."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from torch import nn

pytest.importorskip("skrl", reason="needs skrl")
pytest.importorskip("gymnasium", reason="needs gymnasium")

import skrl_models
from adapter_runs import differing_equations, recorded_norms

from esper_telemetry import RunStatus, Telemetry, read_run, watch_pair
from esper_telemetry.adapters.skrl import attach_agent

pytestmark = pytest.mark.sb3


@pytest.mark.parametrize("scalers", [(), ("value",)])
def test_numbers_equal_those_of_the_trainer(scalers: tuple[str, ...], tmp_path: Path) -> None:
    """Losses, divergence and rate equal skrl's logs; norms equal the values it computes; advantages equal its memory's."""
    settings = skrl_models.adaptive(scalers=scalers, time_limit_bootstrap=True)
    bare = skrl_models.skrl_agent(skrl_models.short_pendulum, **settings)
    with recorded_norms() as norms:
        bare.learn(4)
    model = skrl_models.skrl_agent(skrl_models.short_pendulum, **settings)

    run = skrl_models.recorded_run(model, tmp_path / "run", updates=4)

    for update, record in enumerate(run.records):
        values = record.values
        assert values["grad/global/norm_preclip"] == pytest.approx(statistics.mean(norms[8 * update : 8 * update + 8]))
        assert values["loss/policy"] == pytest.approx(values["skrl/loss/policy_loss"], abs=1e-6)
        assert 5 * values["loss/value"] == pytest.approx(values["skrl/loss/value_loss"], rel=1e-5)
        assert values["policy/entropy"] == pytest.approx(-100 * values["skrl/loss/entropy_loss"], rel=1e-5)
        assert values["policy/kl"] == pytest.approx(values["skrl/kl/mean"], rel=1e-3)
        assert values["skrl/learning_rate/min"] <= values["opt/lr"] <= values["skrl/learning_rate/max"]
    tensors, raw = bare.agent.memory.tensors, run.records[-1].values
    returns, estimates = (tensors[name] for name in ("returns", "values"))
    if not scalers:
        assert raw["adv/raw/mean"] == pytest.approx(float((returns - estimates).mean()), rel=1e-4)
        assert raw["ret/mean"] == pytest.approx(float(returns.mean()), rel=1e-5)
    assert raw["reward/mean"] > float(tensors["rewards"].mean())  # without the values that skrl adds at time limits
    assert raw["episode/length_mean"] == 20
    assert raw["episode/truncated_frac"] == 1


def test_time_limits_without_bootstrap_are_named(tmp_path: Path) -> None:
    """skrl's default runs its advantages on over time limits; with `time_limit_bootstrap` all equations match."""
    run = skrl_models.recorded_run(skrl_models.skrl_agent(skrl_models.short_pendulum), tmp_path / "default", level="debug")
    bootstrapped = skrl_models.skrl_agent(skrl_models.short_pendulum, time_limit_bootstrap=True)
    other = skrl_models.recorded_run(bootstrapped, tmp_path / "bootstrapped", level="debug")

    assert differing_equations(run) == {"advantages": ["ends_ignored", "time_limit_no_end"]}
    assert {alarm.type for alarm in run.alarms} == {"integrity/equation"}
    assert differing_equations(other) == {}
    assert not other.alarms


def test_states_of_an_lstm_and_the_shared_dictionary_of_skrl(tmp_path: Path) -> None:
    """`PPO_RNN` keeps initial and final states in one dictionary, so the memory holds the state after a step: the ratio shows it."""
    model = skrl_models.MODELS["lstm"]()
    run = skrl_models.recorded_run(model, tmp_path / "repaired", level="debug")
    stored = model.agent.memory.tensors["rnn_policy_0"]
    assert run.records[-1].values["lstm/h/rms"] == pytest.approx(float(stored.square().mean().sqrt()), rel=1e-4)

    unrepaired = skrl_models.skrl_agent(skrl_models.short_pendulum, "lstm")
    run = skrl_models.recorded_run(unrepaired, tmp_path / "unrepaired")

    assert run.records[1].values["integrity/ratio_init"] > 1e-3
    assert "integrity/ratio_init" in {alarm.type for alarm in run.alarms}


def test_an_agent_learns_again_and_telemetry_is_detached(tmp_path: Path) -> None:
    model = skrl_models.skrl_agent()
    with Telemetry([], run_dir=tmp_path, offload=False) as telemetry:
        detach = attach_agent(telemetry, model.agent)
        model.learn(2)
        model.agent.enable_training_mode(False)  # an evaluation between two trainings
        model.learn(1)
        detach()
        assert skrl_models.taps_of(model) == []
        model.learn(1)

    assert [record.axes.update for record in read_run(tmp_path).records] == [1, 2, 3]


def test_an_exception_ends_the_run_as_failed_and_leaves_no_tap(tmp_path: Path) -> None:
    model = skrl_models.skrl_agent()
    act = model.agent.value.act
    calls: list[None] = []

    def breaking(inputs: Any, *, role: str) -> Any:
        calls.append(None)
        if len(calls) > 2 * skrl_models.STEPS + 12:
            raise RuntimeError("broken critic")
        return act(inputs, role=role)

    model.agent.value.act = breaking
    with pytest.raises(RuntimeError, match="broken critic"), Telemetry([], run_dir=tmp_path) as telemetry:
        attach_agent(telemetry, model.agent)
        model.learn(5)

    run = read_run(tmp_path)
    assert run.status is RunStatus.FAILED
    assert [record.axes.gradient_step for record in run.records] == [8, 10]
    assert skrl_models.taps_of(model) == []


def test_other_agents_are_refused() -> None:
    with Telemetry([], run_dir=None) as telemetry, pytest.raises(TypeError, match="has no policy"):
        attach_agent(telemetry, object())
    with pytest.raises(TypeError, match="takes a Telemetry"):
        attach_agent(object(), skrl_models.skrl_agent().agent)  # type: ignore[arg-type] # what is tested


def test_advice_has_the_names_of_skrl(tmp_path: Path) -> None:
    model = skrl_models.skrl_agent(learning_rate=0.1, grad_norm_clip=50.0)

    first = skrl_models.recorded_run(model, tmp_path, updates=4).alarms[0]

    assert "grad_norm_clip is 50" in first.text or "learning_rate is 0.1" in first.text


def test_a_module_beside_its_host(tmp_path: Path) -> None:
    model = skrl_models.skrl_agent()
    with Telemetry([], run_dir=tmp_path) as telemetry:
        attached = attach_agent(telemetry, model.agent)
        layers = [layer for layer in model.agent.policy.modules() if isinstance(layer, nn.Linear)]
        watch_pair(telemetry, attached, "head", module=layers[-1], host=layers[0])
        model.learn(2)

    for record in read_run(tmp_path).records:
        assert record.values["grad/pair/head/connected"] == 1
