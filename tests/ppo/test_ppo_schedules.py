"""Schedules over a run and within an update: rates, bonus, early stop, value clipping, normalisation of advantages."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ppo_builders import EventLog, cartpole, pendulum

from esper_telemetry.events import MinibatchEnd, UpdateEnd
from esper_telemetry.ppo import PPOConfig
from esper_telemetry.ppo.ppo_objective import adapted_rate, clipped_squared_error, entropy_coef, mean_kl, standardize, steps_for


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"anneal_learning_rate": False}, [1e-3, 1e-3, 1e-3]),
        ({"max_grad_norm": 1e-9}, [1e-3, 2e-3 / 3, 1e-3 / 3]),
        ({"desired_kl": 1e6}, [1e-3, 1.5e-3, 2.25e-3]),
    ],
)
def test_the_rate_of_each_update_stays_falls_to_zero_or_adapts(settings: dict[str, Any], rates: list[float]) -> None:
    """Three rollouts of 64 steps."""
    trainer = pendulum(learning_rate=1e-3, **settings)
    emitted = EventLog().listen(trainer, UpdateEnd)

    trainer.learn(192)

    assert [event.learning_rate for event in emitted.events] == pytest.approx(rates)


def test_the_adaptive_rate_follows_the_band_around_the_desired_kl() -> None:
    """Above twice the KL: / 1.5. Below half: x 1.5. Between: unchanged. Never beyond 1e-5 and 1e-2; without a KL, no change."""
    assert adapted_rate(3e-3, 0.021, 0.01) == pytest.approx(2e-3)
    assert adapted_rate(2e-3, 0.004, 0.01) == pytest.approx(3e-3)
    assert adapted_rate(2e-3, 0.015, 0.01) == 2e-3
    assert (adapted_rate(1e-5, 1.0, 0.01), adapted_rate(1e-2, 1e-4, 0.01)) == (1e-5, 1e-2)
    assert adapted_rate(2e-3, 0.0, 0.01) == 2e-3


def test_the_kl_of_a_pass_is_schulmans_estimator() -> None:
    """l = ln 2: 2 - 1 - ln 2 = 0.3069; l = 0: 0. Mean over both: 0.1534."""
    assert mean_kl([torch.tensor([2.0]).log(), torch.tensor([0.0])]) == pytest.approx(0.15342640972)


def test_an_update_ends_after_the_pass_that_went_too_far() -> None:
    """The KL is 0 before the first step. One pass with a large rate moves far."""
    trainer = cartpole(target_kl=1e-6, num_epochs=5, learning_rate=0.01)
    emitted = EventLog().listen(trainer, UpdateEnd, MinibatchEnd)

    trainer.learn(200)

    assert emitted.of(UpdateEnd)[0].epochs == 1
    assert {event.epoch for event in emitted.of(MinibatchEnd)} == {0}

    patient = cartpole(target_kl=1e6, num_epochs=5)
    emitted = EventLog().listen(patient, UpdateEnd)
    patient.learn(64)
    assert emitted.events[0].epochs == 5


def test_the_entropy_bonus_moves_linearly() -> None:
    config = PPOConfig(entropy_coef=0.1, final_entropy_coef=0.02)

    assert [entropy_coef(config, remaining) for remaining in (1.0, 0.5, 0.0)] == pytest.approx([0.1, 0.06, 0.02])
    assert entropy_coef(replace(config, final_entropy_coef=None), 0.5) == 0.1


def test_an_update_says_how_much_the_bonus_counted() -> None:
    """Two updates: full weight, then half of it."""
    trainer = pendulum(entropy_coef=0.1, final_entropy_coef=0.0, num_epochs=1)
    emitted = EventLog().listen(trainer, UpdateEnd)

    trainer.learn(128)

    assert [event.coefficients["entropy"] for event in emitted.events] == pytest.approx([0.1, 0.05])


def test_the_clipped_value_loss_takes_the_larger_error() -> None:
    """Old 0, return 1, clip 0.2. Value 0.5: errors 0.5² and 0.8², which is clipped and has no gradient. Value -1: 2² and 1.2². Mean / 2."""
    values, ones = torch.tensor([0.5, -1.0], requires_grad=True), torch.ones(2)

    loss = clipped_squared_error(values, ones, torch.zeros(2), clip=0.2)
    loss.backward()

    assert loss.item() == pytest.approx((0.64 + 4) / 4)
    assert values.grad is not None and values.grad.tolist() == [0.0, -1.0]
    assert steps_for(PPOConfig(clip_value=0.2)).value_loss(values, ones, torch.zeros(2)) == loss


def test_the_deviation_of_advantages_has_a_floor() -> None:
    """A deviation of 1 with a floor of 4: a quarter of the unfloored result."""
    advantages = torch.tensor([1.0, 2.0, 3.0])

    assert torch.allclose(standardize(advantages, 4.0), standardize(advantages) / 4)
    assert torch.allclose(steps_for(PPOConfig(advantage_std_floor=4.0)).normalize(advantages), standardize(advantages, 4.0))


@pytest.mark.parametrize("per_minibatch", [False, True])
def test_advantages_are_normalised_over_the_rollout_or_each_minibatch(per_minibatch: bool) -> None:
    trainer = pendulum(normalize_minibatches=per_minibatch, num_epochs=1)
    emitted = EventLog().listen(trainer, MinibatchEnd)

    trainer.learn(64)

    deviations = [event.advantages.std() for event in emitted.events]
    whole = torch.cat([event.advantages for event in emitted.events]).std()
    assert torch.allclose(torch.stack(deviations), torch.ones(4), atol=1e-4) == per_minibatch
    assert torch.allclose(whole, torch.tensor(1.0), atol=1e-4) != per_minibatch
