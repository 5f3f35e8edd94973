"""Actions that are stored after a tanh, and log-probabilities of training that take them for the draws."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from esper_telemetry.core.facts import Facts
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.equations.equation import EQUATION_KEY
from esper_telemetry.events import RolloutEnd
from esper_telemetry.updates.equation_checks import equation_checks
from esper_telemetry.updates.update import JoinedMinibatches, Update

STEPS, ENVS = 24, 4
ACTING = f"{EQUATION_KEY}replayed_log_probs"


def explanations(collected: Tensor, trained: Tensor, actions: Tensor, means: Tensor, log_std: Tensor) -> dict[str, float]:
    """Return the values of the checks of one minibatch that holds the whole rollout."""
    zeros, never, rows = torch.zeros(STEPS, ENVS), torch.zeros(STEPS, ENVS, dtype=torch.bool), torch.arange(STEPS * ENVS)
    columns: dict[str, Any] = {
        "actions": {"action": actions},
        "means": {"action": means},
        "log_std": {"action": log_std},
        "bounds": {"action": torch.tensor([[-2.0], [2.0]])},
    }
    rollout = RolloutEnd(*(1, 1, zeros, zeros, zeros, zeros, collected, never, never), next_values=zeros, gamma=0.9, **columns)
    joined = JoinedMinibatches((0,), (len(rows),), (trained - collected).flatten(), zeros.flatten(), None, {}, rows=rows)
    checks = equation_checks(Update(rollout=rollout, minibatches=joined, sampled=True), Facts(columns_by_name=True))
    groups = [group for check in checks for group in check()]  # type: ignore[union-attr]  # all return groups
    return {key: value for group in groups if isinstance(group, MetricGroup) for key, value in group.values().items()}


@pytest.mark.parametrize("with_slope", [True, False])
def test_a_loss_that_takes_squashed_actions_for_draws_is_named(with_slope: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    means, log_std = 0.3 * torch.randn(STEPS, ENVS, 1, generator=draw), torch.full((STEPS, ENVS, 1), -1.0)
    policy = Normal(means, log_std.exp())
    drawn = means + log_std.exp() * torch.randn(STEPS, ENVS, 1, generator=draw)
    actions = 2 * drawn.tanh()

    def density(at: Tensor) -> Tensor:
        total: Tensor = policy.log_prob(at).sum(-1)
        return total - with_slope * torch.log(1 - at.tanh().square()).sum(-1)

    wrong = explanations(density(drawn), density(actions), actions, means, log_std)
    right = explanations(density(drawn), density(drawn), actions, means, log_std)

    assert wrong[f"{ACTING}_squashed_in_loss"] < 1e-4 < wrong[ACTING]
    assert f"{ACTING}_squashed_in_loss" not in right


@pytest.mark.parametrize("in_acting", [True, False])
def test_a_correction_of_the_tanh_on_one_side_is_named(in_acting: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    means, log_std = 0.3 * torch.randn(STEPS, ENVS, 1, generator=draw), torch.full((STEPS, ENVS, 1), -1.0)
    drawn = means + log_std.exp() * torch.randn(STEPS, ENVS, 1, generator=draw)
    plain = Normal(means, log_std.exp()).log_prob(drawn).sum(-1)
    corrected = plain - torch.log(1 - drawn.tanh().square()).sum(-1)
    sides = (corrected, plain) if in_acting else (plain, corrected)

    assert explanations(*sides, drawn, means, log_std)[f"{ACTING}_squashed_once"] < 1e-4
