"""Rollouts of Stable-Baselines3 that were collected in a wrong way: the mistake is named live, and correct programs raise nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from sb3_collection import HEALTHY, PROGRAMS
from sb3_models import MODELS, recorded_run

from esper_telemetry import Telemetry
from esper_telemetry.adapters.sb3 import TelemetryCallback
from esper_telemetry.core.equations.equation import EQUATION_KEY, equations
from esper_telemetry.core.record import Record
from esper_telemetry.journal import Run, read_run

pytestmark = pytest.mark.sb3

OWN = ("log_probs", "replayed_log_probs", "values", "actions", "transitions", "stored_rewards", "executed_actions")
"""Equations of collection."""

STEPS = 3 * 64 * 4


def trained(model: Any, run_dir: Path, steps: int = STEPS) -> Run:
    with Telemetry([], level="debug", run_dir=run_dir, offload=False) as telemetry:
        model.learn(steps, callback=TelemetryCallback(telemetry))
    return read_run(run_dir)


def explanations(records: Iterable[Record]) -> set[str]:
    """Labels of the hypotheses of collection that explain a difference in any record."""
    labels = {
        equation.label(one) for equation in equations().values() if equation.name in OWN for one in equation.hypotheses
    }
    return {key.removeprefix(EQUATION_KEY) for record in records for key in record.values} & labels


def differences(records: Iterable[Record]) -> set[str]:
    """Names of the equations of collection that do not hold in some record."""
    records = list(records)
    return {
        name
        for name in OWN
        for record in records
        if record.values.get(EQUATION_KEY + name, 0.0) > equations()[name].tolerance_at(None)
    }


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_mistake_is_named_and_no_other(program: str, seed: int, tmp_path: Path) -> None:
    build, expected = PROGRAMS[program]

    model = build(seed)
    run = trained(model, tmp_path, 3 * model.n_steps * model.n_envs)

    found = explanations(run.records)
    assert expected <= found
    # cut actions are seen twice: by their log-probabilities, and by how many lie at the bounds
    assert found - expected <= {"actions_cut_at_bounds"}
    assert "integrity/equation" in {alarm.type for alarm in run.alarms}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("program", HEALTHY)
def test_correct_programs_match_every_equation(program: str, seed: int, tmp_path: Path) -> None:
    run = trained(HEALTHY[program](seed), tmp_path, 2100 if program == "A2C" else STEPS)

    checked = {name for name in OWN for record in run.records if EQUATION_KEY + name in record.values}
    assert differences(run.records) == set()
    assert checked == set(OWN) - ({"actions"} if "gSDE" in program else set())
    assert "integrity/actions" not in {alarm.type for alarm in run.alarms}


@pytest.mark.parametrize(
    "program",
    ["dropout in training", "a memory that begins empty in training", "a memory that is never reset in acting"],
)
def test_passes_leave_no_trace_in_a_policy_that_has_modes_or_memory(program: str, tmp_path: Path) -> None:
    watched = PROGRAMS[program][0](5)
    trained(watched, tmp_path)
    alone = PROGRAMS[program][0](5)
    alone.learn(STEPS)

    for name, tensor in alone.policy.state_dict().items():
        assert torch.equal(tensor, watched.policy.state_dict()[name]), name


@pytest.mark.parametrize(("name", "steps"), [("ppo", 1024), ("pendulum", 1024), ("a2c", 6144)])
def test_a_rollout_of_which_only_the_ends_are_recorded_gives_the_same_numbers(
    name: str, steps: int, tmp_path: Path
) -> None:
    """At NORMAL the first update of these is sampled, and the others are recorded in part; at DEBUG all are recorded whole."""
    whole = recorded_run(MODELS[name](), tmp_path / "whole", steps=steps, level="debug")
    partly = recorded_run(MODELS[name](), tmp_path / "partly", steps=steps)

    measured = ("perf/", "telemetry/", "sb3/time/", "train/env_steps_per_second")
    compared = [
        {key: value for key, value in record.values.items() if not key.startswith(measured)}
        for record in partly.records[1:]
    ]
    assert EQUATION_KEY + "transitions" in partly.records[0].values
    assert all(EQUATION_KEY + "transitions" not in values for values in compared[:2])
    for values, record in zip(compared, whole.records[1:], strict=True):
        assert values == pytest.approx({key: record.values[key] for key in values}, nan_ok=True, rel=1e-6, abs=1e-9)
