"""The steps of the update, as functions that the trainer holds.

`UpdateSteps` is the seam for variants of the algorithm and for breaking it on purpose:

    trainer.steps = replace(trainer.steps, normalize=lambda advantages: advantages)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.ppo.rollout import Batch, Rollout

STD_FLOOR = 1e-8  # keeps equal advantages finite; as in Stable-Baselines3 and CleanRL


def generalized_advantages(rollout: Rollout, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates [T, B] (arXiv:1506.02438, eq. 16); 0 in invalid rows.

    δ_t = r_t + γ V(s_{t+1}) - V(s_t) and A_t = δ_t + γλ A_{t+1}, where the trace is cut at every end of an episode and
    V(s_{t+1}) is 0 only after termination. The recurrence is solved in log2(T) passes over whole tensors (Hillis and
    Steele 1986), in float64.
    """
    advantages = (rollout.rewards + gamma * rollout.next_values - rollout.values).double()
    goes_on = ~rollout.ended
    if rollout.valid is not None:
        advantages = torch.where(rollout.valid, advantages, 0.0)
        goes_on &= rollout.valid
    decay = (gamma * gae_lambda) * goes_on.double()
    distance = 1
    while distance < len(advantages):
        advantages[:-distance] += decay[:-distance] * advantages[distance:]
        decay[:-distance] = decay[:-distance] * decay[distance:]
        distance *= 2
    return advantages.to(rollout.values.dtype)


def standardize(advantages: Tensor) -> Tensor:
    """Advantages [N] less their mean, divided by their standard deviation (unbiased); a single one stays as it is."""
    if len(advantages) < 2:
        return advantages
    std, mean = torch.std_mean(advantages, correction=1)
    return (advantages - mean) / (std + STD_FLOOR)


def shuffled_minibatches(batch: Batch, count: int, generator: torch.Generator) -> Iterable[Batch]:
    """All rows in random order, in `count` parts whose sizes differ by one at most."""
    rows = torch.randperm(len(batch), generator=generator).to(batch.log_probs.device, non_blocking=True)
    return batch.take(rows).split(count)


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Mean of max(-A r, -A clip(r, 1-ε, 1+ε)), 0-d (arXiv:1707.06347, eq. 7, as a loss). Shapes: [N] both."""
    ratio = log_ratio.exp()
    return -torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()


def squared_error(values: Tensor, returns: Tensor) -> Tensor:
    """Half the mean squared error, 0-d. Shapes: [N] both."""
    return 0.5 * torch.nn.functional.mse_loss(values, returns)


@dataclass(frozen=True, slots=True)
class UpdateSteps:
    """What an update is made of; replace a field to change that step.

    Attributes:
        advantages: (rollout, gamma, gae_lambda) -> [T, B].
        normalize: advantages [N] of all transitions -> [N]; called where `normalize_advantages` is on.
        minibatches: (batch, count, generator) -> one pass over the batch.
        policy_loss: (log_ratio [N], advantages [N], clip) -> 0-d.
        value_loss: (values [N], returns [N]) -> 0-d, without its coefficient.
    """

    advantages: Callable[[Rollout, float, float], Tensor] = generalized_advantages
    normalize: Callable[[Tensor], Tensor] = standardize
    minibatches: Callable[[Batch, int, torch.Generator], Iterable[Batch]] = shuffled_minibatches
    policy_loss: Callable[[Tensor, Tensor, float], Tensor] = clipped_surrogate
    value_loss: Callable[[Tensor, Tensor], Tensor] = squared_error
