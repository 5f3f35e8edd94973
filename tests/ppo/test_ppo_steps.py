"""The steps of the update and their schedules over a run, against loops and numbers worked by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ppo_builders import cartpole, pendulum, random_rollout
from short_trainings import learned
from torch import Tensor

from esper_telemetry.events import MinibatchEnd, UpdateEnd
from esper_telemetry.ppo import PPOConfig
from esper_telemetry.ppo.ppo_objective import (
    adapted_rate,
    clipped_squared_error,
    clipped_surrogate,
    entropy_coef,
    generalized_advantages,
    mean_kl,
    shuffled_minibatches,
    squared_error,
    standardize,
    steps_for,
)
from esper_telemetry.ppo.rollout import Rollout, flatten


def brute_force(rollout: Rollout, gamma: float, gae_lambda: float) -> Tensor:
    """Return each advantage as the sum of its discounted errors up to the end of its episode or of the rollout."""
    steps, envs = rollout.rewards.shape
    errors = (rollout.rewards + gamma * rollout.next_values - rollout.values).double()
    advantages = torch.zeros(steps, envs, dtype=torch.float64)
    for start in range(steps):
        for env in range(envs):
            for offset, t in enumerate(range(start, steps)):
                advantages[start, env] += (gamma * gae_lambda) ** offset * errors[t, env]
                if rollout.ended[t, env]:
                    break
    return advantages


@pytest.mark.parametrize("steps", [1, 2, 31, 32, 37])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_advantages_equal_the_sum_of_discounted_errors(steps: int, gae_lambda: float) -> None:
    rollout = random_rollout(steps)

    advantages = generalized_advantages(rollout, 0.99, gae_lambda)

    assert torch.allclose(advantages.double(), brute_force(rollout, 0.99, gae_lambda), atol=1e-6)


def test_invalid_rows_change_no_advantage() -> None:
    rollout = random_rollout(invalid=True)
    assert rollout.valid is not None
    before = generalized_advantages(rollout, 0.99, 0.95)
    for tensor in (rollout.rewards, rollout.values, rollout.next_values):
        tensor[~rollout.valid] = torch.nan

    after = generalized_advantages(rollout, 0.99, 0.95)

    assert torch.equal(before[rollout.valid], after[rollout.valid])
    assert (after[~rollout.valid] == 0).all()


def test_invalid_rows_never_reach_a_minibatch() -> None:
    rollout = random_rollout(invalid=True)
    assert rollout.valid is not None
    rollout.values[~rollout.valid] = torch.nan

    batch = flatten(rollout, rollout.rewards, rollout.rewards)

    assert len(batch) == int(rollout.valid.sum())
    assert torch.isfinite(batch.values).all()


def test_minibatches_hold_every_row_once_with_its_columns() -> None:
    """185 rows in 4 parts: 47, 46, 46, 46."""
    rollout = random_rollout()
    batch = flatten(rollout, rollout.rewards, rollout.rewards)

    minibatches = list(shuffled_minibatches(batch, 4, torch.Generator().manual_seed(0)))

    assert [len(minibatch) for minibatch in minibatches] == [47, 46, 46, 46]
    assert all(torch.equal(minibatch.observations.squeeze(-1), minibatch.log_probs) for minibatch in minibatches)
    values = torch.cat([minibatch.values for minibatch in minibatches])
    assert torch.equal(values.sort().values, batch.values.sort().values)
    assert not torch.equal(values, batch.values)


def test_fewer_rows_than_minibatches_make_fewer_minibatches() -> None:
    rollout = random_rollout(1, 2)
    batch = flatten(rollout, rollout.rewards, rollout.rewards)

    assert [len(part) for part in shuffled_minibatches(batch, 8, torch.Generator())] == [1, 1]


def test_standardized_advantages_have_mean_zero_and_unbiased_deviation_one() -> None:
    """(1, 2, 3) has mean 2 and unbiased deviation 1. A single advantage stays as it is."""
    assert torch.allclose(standardize(torch.tensor([1.0, 2.0, 3.0])), torch.tensor([-1.0, 0.0, 1.0]))
    assert standardize(torch.tensor([7.0])).tolist() == [7.0]


def test_the_surrogate_takes_the_worse_of_both_ratios() -> None:
    """Ratios 2 and 0.5 with ε = 0.2. A = 1: min(2, 1.2) = 1.2 and 0.5. A = -1: -2 and min(-0.5, -0.8) = -0.8.

    The clipped rows, the first and the last, have no gradient.
    """
    log_ratio = torch.tensor([2.0, 0.5, 2.0, 0.5]).log().requires_grad_()

    loss = clipped_surrogate(log_ratio, torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.2)
    loss.backward()

    assert loss.item() == pytest.approx(-(1.2 + 0.5 - 2 - 0.8) / 4)
    assert log_ratio.grad is not None
    assert torch.allclose(log_ratio.grad, torch.tensor([0.0, -0.125, 0.5, 0.0]))


def test_the_value_loss_is_half_the_mean_square() -> None:
    """(1 + 9) / 2 / 2."""
    assert squared_error(torch.tensor([1.0, 3.0]), torch.zeros(2)) == 2.5


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
    emitted = learned(pendulum(learning_rate=1e-3, **settings), 192, UpdateEnd)

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
    emitted = learned(cartpole(target_kl=1e-6, num_epochs=5, learning_rate=0.01), 200, UpdateEnd, MinibatchEnd)

    assert emitted.of(UpdateEnd)[0].epochs == 1
    assert {event.epoch for event in emitted.of(MinibatchEnd)} == {0}

    emitted = learned(cartpole(target_kl=1e6, num_epochs=5), 64, UpdateEnd)
    assert emitted.events[0].epochs == 5


def test_the_entropy_bonus_moves_linearly() -> None:
    config = PPOConfig(entropy_coef=0.1, final_entropy_coef=0.02)

    assert [entropy_coef(config, remaining) for remaining in (1.0, 0.5, 0.0)] == pytest.approx([0.1, 0.06, 0.02])
    assert entropy_coef(replace(config, final_entropy_coef=None), 0.5) == 0.1


def test_an_update_says_how_much_the_bonus_counted() -> None:
    """Two updates: full weight, then half of it."""
    emitted = learned(pendulum(entropy_coef=0.1, final_entropy_coef=0.0, num_epochs=1), 128, UpdateEnd)

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
    emitted = learned(pendulum(normalize_minibatches=per_minibatch, num_epochs=1), 64, MinibatchEnd)

    deviations = [event.advantages.std() for event in emitted.events]
    whole = torch.cat([event.advantages for event in emitted.events]).std()
    assert torch.allclose(torch.stack(deviations), torch.ones(4), atol=1e-4) == per_minibatch
    assert torch.allclose(whole, torch.tensor(1.0), atol=1e-4) != per_minibatch
