"""Unrolling a memory over whole environments equals unrolling step by step, gradients included."""

import numpy as np
import pytest
import torch

from esper_telemetry.ppo.networks import MLP, Core, RecurrentTrunk
from esper_telemetry.ppo.trainer_replay import unroll

STEPS, ENVS, SIZE = 6, 3, 5


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("begins", [[], [(2, 0)], [(0, 1), (3, 2), (3, 0), (5, 1)]])
def test_features_and_gradients_are_those_of_single_steps(kind: str, begins: list[tuple[int, int]]) -> None:
    torch.manual_seed(1)
    trunk = RecurrentTrunk(MLP(4, [4], "tanh"), Core(kind, 4, SIZE, 2), MLP(SIZE, [7], "tanh"))
    observations = torch.randn(STEPS, ENVS, 4)
    fresh = np.zeros((STEPS, ENVS), bool)
    for when, env in begins:
        fresh[when, env] = True
    first = torch.randn(trunk.core.state_shape(ENVS)).requires_grad_()
    weights = torch.randn(STEPS * ENVS, 7)

    features, outputs = unroll(trunk, observations, first, fresh)
    state, rows = first, []
    for x, new in zip(observations, torch.from_numpy(fresh), strict=True):
        row, state = trunk.step(x, state.masked_fill(new[:, None], 0.0))
        rows.append(row)
    last = outputs[-1].detach().requires_grad_()
    expected = torch.cat(rows)

    torch.testing.assert_close(features, expected, atol=1e-6, rtol=1e-5)
    at_first, at_outputs = torch.autograd.grad((weights * features).sum(), [first, outputs])
    (step_by_step,) = torch.autograd.grad((weights * expected).sum(), first)
    (own,) = torch.autograd.grad((weights[-ENVS:] * trunk.decoder(last)).sum(), last)
    torch.testing.assert_close(at_first, step_by_step, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(at_outputs[-1], own, atol=1e-6, rtol=1e-5)
