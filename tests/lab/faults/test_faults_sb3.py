"""Faults in Stable-Baselines3 begin in their update, are undone, and are scored by the same rules."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("sb3_contrib")

from esper_telemetry.alarms import Thresholds
from esper_telemetry.cli.arguments import WrongUse
from esper_telemetry.lab.faults.__main__ import run as command
from esper_telemetry.lab.faults.fault_catalogue import FAULTS as CATALOGUE
from esper_telemetry.lab.faults.fault_catalogue import find
from esper_telemetry.lab.faults.runs import FaultRun
from esper_telemetry.lab.faults.sb3_models import MODELS, BreakableVecEnv, ModelNotApplicableError
from esper_telemetry.lab.faults.sb3_runs import BREAKS, plan_sb3_runs, train_run
from esper_telemetry.lab.faults.score import BrokenRun
from esper_telemetry.lab.faults.verdicts import detect_by_rules, read_journaled_run

pytestmark = pytest.mark.sb3


@pytest.mark.parametrize("env", MODELS)
def test_every_fault_is_undone(env: str) -> None:
    """A fault that does not apply raises a clear error."""
    model = MODELS[env](0)
    before = {name: tensor.clone() for name, tensor in model.policy.state_dict().items()}
    attributes = [set(vars(owner)) for owner in (model, model.policy, model.rollout_buffer)]
    for name, broken in BREAKS.items():
        try:
            broken(model, find(name).dose)()
        except ModelNotApplicableError as lacks:
            assert str(lacks).startswith(("its ", "it has "))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.policy.state_dict().items())
    assert attributes == [set(vars(owner)) for owner in (model, model.policy, model.rollout_buffer)]
    assert all(parameter.requires_grad for parameter in model.policy.parameters())
    assert isinstance(model.env, BreakableVecEnv) and model.env.change is None


@pytest.mark.parametrize(
    ("env", "fault"),
    [
        ("sb3-cartpole", "obs_mismatch"),
        ("sb3-cartpole", "adv_sign"),
        ("sb3-cartpole-lstm", "h0_zero"),
        ("sb3-masked-arms", "mask_bug"),
        ("sb3-pendulum", "frozen_trunk"),
        ("sb3-pendulum", "nan_reward"),
    ],
)
def test_an_accepted_alarm_comes_in_the_first_broken_update(env: str, fault: str, tmp_path: Path) -> None:
    fault_run = FaultRun(env, 1, fault, find(fault).dose, at_update=3, last=4)

    assert train_run(fault_run, tmp_path, "normal").missing == ""

    verdict = detect_by_rules(read_journaled_run(tmp_path / fault_run.name), Thresholds())
    assert [alarm for alarm in verdict.alarms if alarm.update < 3] == []
    assert BrokenRun.of(verdict).strict


def test_a_fault_that_does_not_apply_is_not_trained(tmp_path: Path) -> None:
    fault_run = train_run(FaultRun("sb3-cartpole", 1, "h0_zero", at_update=3, last=4), tmp_path, "normal")

    assert fault_run.missing == "h0_zero does not apply to sb3-cartpole: its policy has no memory"
    assert list(tmp_path.iterdir()) == []


def test_the_plan_has_the_faults_that_can_be_injected_from_outside() -> None:
    assert {fault.name for fault in CATALOGUE} == set(BREAKS)
    with pytest.raises(ValueError, match="power_cut cannot be injected into sb3 from outside"):
        plan_sb3_runs([("power_cut", 5)], ["cartpole"], [3])
    plan = plan_sb3_runs([("lr_x100", 100), ("power_cut", 5)], ["cartpole"], [3], explicit=False)
    assert [fault_run.name for fault_run in plan] == ["sb3-cartpole-healthy-plain-s3", "sb3-cartpole-lr_x100-100-s3"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(("--faults", "power_cut"), "power_cut"), (("--envs", "acrobot"), "there is no environment 'acrobot' for sb3")],
)
def test_wrong_use_is_refused_in_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(WrongUse, match=sentence):
        command(["score", "--trainer", "sb3", *arguments])
