"""The steps of the update, against loops and numbers worked by hand."""

import pytest
import torch
from ppo_builders import random_rollout
from torch import Tensor

from esper_telemetry.ppo.ppo_objective import clipped_surrogate, generalized_advantages, shuffled_minibatches, squared_error, standardize
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
