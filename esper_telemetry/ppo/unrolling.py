"""Memory unrolled step by step, so that the gradient of the loss at every state can be asked for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.policy_replay import StateGradients
from esper_telemetry.ppo.policy import ActorCritic
from esper_telemetry.ppo.recurrent import RecurrentTrunk
from esper_telemetry.ppo.rollout import Batch, Rollout
from esper_telemetry.ppo.sequences import on


def state_gradients(
    policy: ActorCritic, rollout: Rollout, columns: Batch, loss: Callable[[Batch, Tensor], Tensor], *, envs: int
) -> StateGradients | None:
    """Gradients at the actor's h before the first step and after the last, in the first `envs` environments that remember.

    Args:
        policy: with a recurrent actor.
        rollout: T steps.
        columns: its rows as [T, B, ...], with the advantages that multiply the ratio.
        loss: of a batch and the outputs [N, F] of the actor's trunk, 0-d.
        envs: how many environments.

    None where no environment begins the rollout with memory.
    """
    trunk, memory = policy.actor, rollout.recurrence
    assert isinstance(trunk, RecurrentTrunk) and memory is not None
    known = np.flatnonzero(~memory.fresh[0])[:envs]
    if not len(known):
        return None
    device = rollout.rewards.device
    remembering, fresh = on(known, device), torch.from_numpy(memory.fresh[:, known]).to(device)
    first = memory.states["actor"][:, :, remembering].detach().requires_grad_()
    with policy.autocast():
        features, last = unrolled(trunk, rollout.observations[:, remembering], first, fresh)
    features = features.float()
    batch = columns.map(lambda column: column[:, remembering].flatten(0, 1))
    if memory.valid is not None:
        rows = on(np.flatnonzero(memory.valid[:, known]), device)
        batch, features = batch.map(lambda column: column[rows]), features[rows]
    gradients = torch.autograd.grad(loss(batch, features), [first, last], materialize_grads=True)
    return StateGradients(gradients[0][:, 0], gradients[1][-1, 0])


def unrolled(trunk: RecurrentTrunk, observations: Tensor, state: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """Features [T x b, F] of observations [T, b, ...], time by time, and the state after the last of them.

    Memory begins anew where `fresh` [T, b]. Features are read off the state and not off the output beside it, which is the same
    number: so the gradient at the state holds that of its own step.
    """
    features = []
    for x, begins in zip(observations, fresh, strict=True):
        _, state = trunk.core(trunk.encoder(x).unsqueeze(0), state.masked_fill(begins[:, None], 0.0))
        features.append(trunk.decoder(state[-1, 0]))
    return torch.cat(features), state
