"""`stop_on_nonfinite`: training ends at the first gradient that is not finite, in the order of the backward pass."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ppo_builders import cartpole, equal, weights
from test_ppo_watchdog import poisoned
from torch import Tensor

from esper_telemetry import Telemetry, attach, read_run
from esper_telemetry.events import UpdateEnd


def infinite(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    return (log_ratio * torch.inf).sum()


@pytest.mark.system
def test_the_first_gradient_of_the_pass_is_named_and_no_step_is_taken(tmp_path: Path) -> None:
    """A reward of the second rollout is NaN, so every loss is. The pass reaches a head first, and no weight changes."""
    trainer = cartpole(stop_on_nonfinite=True)
    trainer.steps = replace(trainer.steps, rewards=poisoned({2}))
    states: list[list[Tensor]] = []
    trainer.hooks.on(UpdateEnd, lambda _: states.append(weights(trainer)))

    with (
        pytest.raises(FloatingPointError, match=r"the gradient of (heads|value)\.\S+ is the first .* \(\d+ of \d+ entries\)"),
        Telemetry(run_dir=tmp_path) as telemetry,
    ):
        attach(telemetry, trainer)
        trainer.learn(10_000)

    (before,) = states
    assert equal(weights(trainer), before)
    (failure,) = [event for event in read_run(tmp_path).events if event.type == "failure"]
    assert failure.data["exception"] == "FloatingPointError"


def test_only_the_faulty_part_of_a_loss_is_named() -> None:
    """Only the policy loss is infinite. The value head's gradients come first and are finite."""
    trainer = cartpole(stop_on_nonfinite=True)
    trainer.steps = replace(trainer.steps, policy_loss=infinite)

    with pytest.raises(FloatingPointError, match=r"the gradient of heads\.action\.\S+ is the first that is not finite"):
        trainer.learn(10_000)
