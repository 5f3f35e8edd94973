"""Memory unrolled over whole environments, so that the gradient of the loss at its first and last states can be asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esper_telemetry.events import StateGradients
from esper_telemetry.ppo.policy import ActorCritic
from esper_telemetry.ppo.recurrent import Core, RecurrentTrunk
from esper_telemetry.ppo.rollout import Batch, Rollout
from esper_telemetry.ppo.sequences import on

Flags = npt.NDArray[np.bool_]


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
    remembering = on(known, device)
    first = memory.states["actor"][:, :, remembering].detach().requires_grad_()
    with policy.autocast():
        features, outputs = unrolled(trunk, rollout.observations[:, remembering], first, memory.fresh[:, known])
    features = features.float()
    batch = columns.map(lambda column: column[:, remembering].flatten(0, 1))
    if memory.valid is not None:
        rows = on(np.flatnonzero(memory.valid[:, known]), device)
        batch, features = batch.map(lambda column: column[rows]), features[rows]
    at_first, at_outputs = torch.autograd.grad(loss(batch, features), [first, outputs], materialize_grads=True)
    return StateGradients(at_first[:, 0], at_outputs[-1])


def unrolled(trunk: RecurrentTrunk, observations: Tensor, state: Tensor, fresh: Flags) -> tuple[Tensor, Tensor]:
    """Features [T x b, F] of observations [T, b, ...], and h [T, b, H] after every step, which they are read off.

    Memory begins anew where `fresh` [T, b]. The gradient at an h is that of its own step's features alone: after the last step that is all.
    """
    inputs = trunk.encoder(observations.flatten(0, 1)).unflatten(0, observations.shape[:2])
    outputs = remembered(trunk.core, inputs, state, fresh)
    return trunk.decoder(outputs.flatten(0, 1)), outputs


def remembered(core: Core, inputs: Tensor, state: Tensor, fresh: Flags) -> Tensor:
    """What memory gives [T, b, H], in one call from each step in which it begins anew anywhere to the next."""
    begins = [0, *np.flatnonzero(fresh[1:].any(1)) + 1]
    outputs = []
    for first, after in itertools.pairwise([*begins, len(inputs)]):
        begun = torch.from_numpy(fresh[first]).to(inputs.device)
        output, state = core(inputs[first:after], state.masked_fill(begun[:, None], 0.0))
        outputs.append(output)
    return torch.cat(outputs)
