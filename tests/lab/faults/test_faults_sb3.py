"""The fault bed over Stable-Baselines3: faults come when they should, are mended, and are judged as anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("sb3_contrib")

from esper_telemetry.alarms import Thresholds
from esper_telemetry.cli.arguments import WrongUse
from esper_telemetry.lab.faults.__main__ import run as command
from esper_telemetry.lab.faults.catalogue import FAULTS as CATALOGUE
from esper_telemetry.lab.faults.catalogue import find
from esper_telemetry.lab.faults.judging import ByDetectors, judged, kept
from esper_telemetry.lab.faults.runs import TrainingCourse
from esper_telemetry.lab.faults.sb3.breaks import BREAKS
from esper_telemetry.lab.faults.sb3.models import BEDS, Breakable, NotForThisModelError
from esper_telemetry.lab.faults.sb3.runs import courses, faults_among, run
from esper_telemetry.lab.faults.score import case

pytestmark = pytest.mark.sb3


@pytest.mark.parametrize("env", BEDS)
def test_every_fault_is_taken_back(env: str) -> None:
    """Or says in words why it does not fit; each fits somewhere, as the last assertion of the beds together shows."""
    model = BEDS[env](0)
    before = {name: tensor.clone() for name, tensor in model.policy.state_dict().items()}
    attributes = [set(vars(owner)) for owner in (model, model.policy, model.rollout_buffer)]
    for name, broken in BREAKS.items():
        try:
            broken(model, find(name).dose)()
        except NotForThisModelError as lacks:
            assert str(lacks).startswith(("its ", "it has "))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.policy.state_dict().items())
    assert attributes == [set(vars(owner)) for owner in (model, model.policy, model.rollout_buffer)]
    assert all(parameter.requires_grad for parameter in model.policy.parameters())
    assert isinstance(model.env, Breakable) and model.env.change is None


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
def test_a_fault_is_named_in_the_update_in_which_it_begins(env: str, fault: str, tmp_path: Path) -> None:
    course = TrainingCourse(env, 1, fault, find(fault).dose, at_update=3, last=4)

    assert run(course, tmp_path, "normal").missing == ""

    found = judged(kept(tmp_path / course.name), lambda facts: ByDetectors(facts, Thresholds()))
    assert [alarm for alarm in found.raised if alarm.update < 3] == []
    assert case(found).strict


def test_what_does_not_apply_trains_nothing(tmp_path: Path) -> None:
    found = run(TrainingCourse("sb3-cartpole", 1, "h0_zero", at_update=3, last=4), tmp_path, "normal")

    assert found.missing == "h0_zero does not apply to sb3-cartpole: its policy has no memory"
    assert list(tmp_path.iterdir()) == []


def test_the_plan_holds_what_can_be_injected_from_outside() -> None:
    assert {fault.name for fault in CATALOGUE} == set(BREAKS)
    assert faults_among([("lr_x100", 100), ("power_cut", 5)], named=False) == [("lr_x100", 100)]
    with pytest.raises(ValueError, match="power_cut cannot be injected into sb3 from outside"):
        faults_among([("power_cut", 5)], named=True)
    assert [course.name for course in courses([("lr_x100", 100)], ["cartpole"], [3])] == [
        "sb3-cartpole-healthy-plain-s3",
        "sb3-cartpole-lr_x100-100-s3",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--faults", "power_cut"), "power_cut"),
        (("--envs", "acrobot"), "there is no environment 'acrobot' for sb3"),
    ],
)
def test_mistakes_are_said_in_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(WrongUse, match=sentence):
        command(["score", "--trainer", "sb3", *arguments])
