"""The watchdog restores weights after a bad rollout; `stop_on_nonfinite` ends training at the first gradient that is not finite."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ppo_builders import EventLog, cartpole, equal, pendulum, weights
from torch import Tensor

from esper_telemetry import Telemetry, attach, read_run
from esper_telemetry.events import Rollback, UpdateEnd


def poisoned(updates: set[int]) -> Callable[[Tensor], Tensor]:
    """Put one NaN into the rewards of these rollouts, numbered from 1."""
    count = 0

    def rewards(tensor: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if count not in updates:
            return tensor
        tensor = tensor.clone()
        tensor[3, 0] = torch.nan
        return tensor

    return rewards


def test_one_bad_rollout_is_undone_and_training_goes_on() -> None:
    trainer = pendulum(watchdog=True, normalize_observations=True)
    trainer.steps = replace(trainer.steps, rewards=poisoned({2}))
    emitted = EventLog().listen(trainer, Rollback)
    states: list[list[Tensor]] = []
    moments: list[int] = []

    def keep(_: UpdateEnd) -> None:
        states.append(weights(trainer))
        moments.append(len(trainer.optimizer.state))

    trainer.hooks.on(UpdateEnd, keep)
    trainer.learn(256)

    assert [(event.update, event.env_step, event.rollbacks) for event in emitted.events] == [(2, 128, 1)]
    assert equal(states[0], states[1]) and not equal(states[1], states[2])
    assert moments[1] == 0 and moments[0] == moments[2] > 0
    assert all(tensor.isfinite().all() for tensor in states[-1])


def test_three_bad_rollouts_in_a_row_end_the_run() -> None:
    trainer = pendulum(watchdog=True)
    trainer.steps = replace(trainer.steps, rewards=poisoned({2, 3, 4}))

    with pytest.raises(FloatingPointError, match="not finite after 3 updates in a row"):
        trainer.learn(1000)

    assert trainer.updates == 4


def test_bad_rollouts_apart_are_survived() -> None:
    trainer = pendulum(watchdog=True)
    trainer.steps = replace(trainer.steps, rewards=poisoned({1, 2, 4, 5}))

    trainer.learn(500)

    assert trainer.watchdog is not None and trainer.watchdog.rollbacks == 4


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
