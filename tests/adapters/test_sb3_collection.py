"""Stable-Baselines3 rollouts that were collected wrongly: live checks name the mistake, and correct programs raise no alarm."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_runs import assert_identical
from sb3_collection import (
    HEALTHY,
    PROGRAMS,
    ClippedRewards,
    ListedCopies,
    ListedMinibatches,
    NextFetched,
    OtherActionsInTraining,
    ScaledRewards,
    late_effects,
    ppo,
    short_pendulum,
    vec_env,
)
from sb3_models import MINIBATCHES, MODELS, Parts, fingerprint, recorded_run
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from esper_telemetry import Telemetry
from esper_telemetry.adapters.sb3 import TelemetryCallback
from esper_telemetry.core.record import Record
from esper_telemetry.equations.equation import EQUATION_KEY, equations
from esper_telemetry.journal.read import Run, read_run
from esper_telemetry.updates.replays import FirstPasses

pytestmark = pytest.mark.sb3

OWN = ("log_probs", "replayed_log_probs", "values", "actions", "transitions", "stored_rewards", "executed_actions")
"""Equations of collection."""

STEPS = 3 * 64 * 4


def trained(model: Any, run_dir: Path, steps: int = STEPS, *, offload: bool = False) -> Run:
    with Telemetry([], level="debug", run_dir=run_dir, offload=offload) as telemetry:
        model.learn(steps, callback=TelemetryCallback(telemetry))
    return read_run(run_dir)


def explanations(records: Iterable[Record]) -> set[str]:
    """Labels of the collection hypotheses that explain a difference in any record."""
    labels = {equation.label(one) for equation in equations().values() if equation.name in OWN for one in equation.hypotheses}
    return {key.removeprefix(EQUATION_KEY) for record in records for key in record.values} & labels


def differences(records: Iterable[Record]) -> set[str]:
    """Names of the collection equations that do not hold in some record."""
    records = list(records)
    return {
        name for name in OWN for record in records if record.values.get(EQUATION_KEY + name, 0.0) > equations()[name].tolerance_at(None)
    }


@pytest.mark.parametrize(("seed", "offload"), [(1, False), (2, True)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_mistake_is_named_and_no_other(program: str, seed: int, offload: bool, tmp_path: Path) -> None:
    build, *expected = PROGRAMS[program]

    model = build(seed)
    run = trained(model, tmp_path, 3 * model.n_steps * model.n_envs, offload=offload)

    found = explanations(run.records)
    assert set(expected) <= found
    # clipped actions show twice: in their log-probabilities, and in the number of actions at the bounds
    assert found - set(expected) <= {"actions_cut_at_bounds"}
    assert all(any(label.startswith(name) for label in found) for name in differences(run.records))
    assert "integrity/equation" in {alarm.type for alarm in run.alarms}


def test_training_that_differs_from_acting_in_an_unknown_way_is_reported_without_a_name(tmp_path: Path) -> None:
    model = ppo(vec_env(), OtherActionsInTraining)
    with torch.no_grad():
        model.policy.get_parameter("action_net.weight").mul_(100)
    run = trained(model, tmp_path)

    assert differences(run.records[1:]) == {"replayed_log_probs"}
    assert explanations(run.records) == set()


@pytest.mark.parametrize("seed", [1, 2])
def test_actions_that_take_effect_late_are_named_without_an_alarm(seed: int, tmp_path: Path) -> None:
    run = trained(late_effects(seed), tmp_path, 4608)

    assert explanations(run.records) == {"executed_actions_late_effect"}
    assert "integrity/equation" not in {alarm.type for alarm in run.alarms}


@pytest.mark.parametrize(("seed", "offload"), [(1, False), (2, True)])
@pytest.mark.parametrize("program", HEALTHY)
def test_correct_programs_match_every_equation(program: str, seed: int, offload: bool, tmp_path: Path) -> None:
    run = trained(HEALTHY[program](seed), tmp_path, 2100 if program == "A2C" else STEPS, offload=offload)

    checked = {name for name in OWN for record in run.records if EQUATION_KEY + name in record.values}
    assert differences(run.records) == set()
    assert checked == set(OWN) - ({"actions"} if "gSDE" in program else set())
    assert "integrity/actions" not in {alarm.type for alarm in run.alarms}


@pytest.mark.parametrize(("buffer", "name"), [(ClippedRewards, "clipped"), (ScaledRewards, "scaled")])
def test_rewards_that_are_changed_with_the_values_after_time_limits_are_named_without_an_alarm(
    buffer: Any, name: str, tmp_path: Path
) -> None:
    run = trained(ppo(short_pendulum(1), rollout_buffer_class=buffer), tmp_path)

    assert explanations(run.records) == {f"stored_rewards_{name}"}
    assert "integrity/equation" not in {alarm.type for alarm in run.alarms}


@pytest.mark.parametrize(("buffer", "rows_known"), [(ListedMinibatches, True), (NextFetched, True), (ListedCopies, False)])
def test_minibatches_may_be_fetched_before_they_are_used(buffer: Any, rows_known: bool, tmp_path: Path) -> None:
    run = trained(ppo(vec_env(), rollout_buffer_class=buffer), tmp_path)

    found = {name: [record.values.get(EQUATION_KEY + name) for record in run.records] for name in equations()}
    assert not [
        name for name, errors in found.items() for error in errors if error is not None and error > equations()[name].tolerance_at(None)
    ]
    assert (found["minibatches"] != [None] * len(run.records)) == rows_known


@pytest.mark.parametrize(
    "program", ["dropout in training", "a memory that begins empty in training", "a memory that is never reset in acting"]
)
def test_passes_leave_no_trace_in_a_policy_that_has_modes_or_memory(program: str, tmp_path: Path) -> None:
    """A model seeds the global generators when it is made, so each learns before the next is made."""
    watched = PROGRAMS[program][0](5)
    trained(watched, tmp_path)
    alone = PROGRAMS[program][0](5)
    alone.learn(STEPS)

    assert_identical(watched.policy.state_dict(), alone.policy.state_dict())


MEASURED = ("perf/", "telemetry/", "sb3/time/", "train/env_steps_per_second")
"""Beginnings of the keys of times."""


def no_pass(*arguments: object) -> None:
    raise AssertionError("the policy itself passes the rollout")


@pytest.mark.parametrize("name", ["pendulum", "pendulum_sde", "recurrent", "recurrent_shared", "maskable"])
def test_a_worker_passes_the_rollout_through_a_copy_of_the_policy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread makes none of the passes. Numbers, weights and random numbers stay the same."""
    here = recorded_run(MODELS[name](), tmp_path / "here", level="debug")
    alone = MODELS[name]()
    alone.learn(384)
    expected = fingerprint(alone)
    monkeypatch.setattr(FirstPasses, "take", no_pass)
    watched = MODELS[name]()

    there = recorded_run(watched, tmp_path / "there", level="debug", offload=True)

    assert_identical(fingerprint(watched), expected)
    assert EQUATION_KEY + "values" in there.records[0].values
    for one, other in zip(here.records, there.records, strict=True):
        values = {key: value for key, value in one.values.items() if not key.startswith(MEASURED)}
        rest = {key: value for key, value in other.values.items() if not key.startswith(MEASURED)}
        assert rest == pytest.approx(values, nan_ok=True, rel=1e-6, abs=1e-9)


def test_a_policy_that_cannot_be_copied_passes_the_rollout_itself(tmp_path: Path) -> None:
    model = MODELS["ppo"]()
    model.policy.of_the_script = lambda: None

    run = recorded_run(model, tmp_path, level="debug", offload=True)

    assert all({EQUATION_KEY + "values", "repr/drift_cos"} <= record.values.keys() for record in run.records)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("offload", [False, True])
def test_the_capacity_of_a_network_is_measured_with_observations_of_several_parts(
    offload: bool, shared: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs = {"share_features_extractor": shared}
    model = PPO("MultiInputPolicy", make_vec_env(Parts, 4, seed=1), policy_kwargs=kwargs, **MINIBATCHES)

    run = recorded_run(model, tmp_path, level="debug", offload=offload)

    assert 0 < run.records[0].values["repr/capacity_loss"] < 2
    assert "failed" not in caplog.text


@pytest.mark.parametrize(("name", "steps"), [("ppo", 1024), ("pendulum", 1024), ("a2c", 6144)])
def test_a_rollout_of_which_only_the_ends_are_recorded_gives_the_same_numbers(name: str, steps: int, tmp_path: Path) -> None:
    """At NORMAL the first of these updates is sampled and the others are recorded in part; at DEBUG all are recorded in full."""
    whole = recorded_run(MODELS[name](), tmp_path / "whole", steps=steps, level="debug")
    partly = recorded_run(MODELS[name](), tmp_path / "partly", steps=steps)

    compared = [{key: value for key, value in record.values.items() if not key.startswith(MEASURED)} for record in partly.records[1:]]
    assert EQUATION_KEY + "transitions" in partly.records[0].values
    assert all(EQUATION_KEY + "transitions" not in values for values in compared[:2])
    for values, record in zip(compared, whole.records[1:], strict=True):
        assert values == pytest.approx({key: record.values[key] for key in values}, nan_ok=True, rel=1e-6, abs=1e-9)
