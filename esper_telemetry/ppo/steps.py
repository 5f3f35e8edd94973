"""The steps of the update, as functions that the trainer holds.

`UpdateSteps` is the seam for variants of the algorithm and for breaking it on purpose:

    trainer.steps = replace(trainer.steps, normalize=lambda advantages: advantages)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from esper_telemetry.ppo.config import PPOConfig
from esper_telemetry.ppo.ranks import ALONE, Ranks
from esper_telemetry.ppo.rollout import Batch, Rollout
from esper_telemetry.ppo.scan import remaining_sums

Array = npt.NDArray[Any]

STD_FLOOR = 1e-8  # keeps equal advantages finite; as in Stable-Baselines3 and CleanRL


def generalized_advantages(rollout: Rollout, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates [T, B] (arXiv:1506.02438, eq. 16); 0 in invalid rows.

    δ_t = r_t + γ V(s_{t+1}) - V(s_t) and A_t = δ_t + γλ A_{t+1}, where the trace is cut at every end of an episode and
    V(s_{t+1}) is 0 only after termination. The recurrence is solved in float64.
    """
    advantages = (rollout.rewards + gamma * rollout.next_values - rollout.values).double()
    goes_on = ~rollout.ended
    if rollout.valid is not None:
        advantages = torch.where(rollout.valid, advantages, 0.0)
        goes_on &= rollout.valid
    decay = (gamma * gae_lambda) * goes_on.double()
    return remaining_sums(advantages, decay).to(rollout.values.dtype)


def standardize(advantages: Tensor, floor: float = 0.0) -> Tensor:
    """Advantages [N] less their mean, divided by their standard deviation (unbiased); a single one stays as it is.

    Args:
        floor: smallest standard deviation to divide by.
    """
    if len(advantages) < 2:
        return advantages
    std, mean = torch.std_mean(advantages, correction=1)
    return (advantages - mean) / (std.clamp(min=floor) + STD_FLOOR)


def standardize_globally(advantages: Tensor, floor: float, ranks: Ranks) -> Tensor:
    """The same with mean and deviation over the advantages of all ranks."""
    count, mean, squares = ranks.moments(advantages, advantages.new_zeros((), dtype=torch.float64))
    std = (squares / (count - 1)).sqrt().clamp(min=floor)
    return ((advantages - mean) / (std + STD_FLOOR)).to(advantages.dtype)


def shuffled_minibatches(batch: Batch, count: int, generator: torch.Generator) -> Iterable[Batch]:
    """All rows in random order, in `count` parts whose sizes differ by one at most.

    Where the rows have an order in time, all environments in random order: each part holds whole sequences.
    """
    if batch.sequences is not None:
        return shuffled_sequences(batch, count, generator)
    rows = torch.randperm(len(batch), generator=generator).to(batch.log_probs.device, non_blocking=True)
    return batch.take(rows).split(count)


def shuffled_sequences(batch: Batch, count: int, generator: torch.Generator) -> Iterable[Batch]:
    """All environments in random order, in `count` parts whose sizes differ by one environment at most."""
    assert batch.sequences is not None
    envs = batch.sequences.environments()
    order = torch.randperm(len(envs), generator=generator)
    parts = [part.tolist() for part in order.tensor_split(max(1, min(count, len(envs))))]
    return (batch.whole([envs[env] for env in part]) for part in parts)


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Mean of max(-A r, -A clip(r, 1-ε, 1+ε)), 0-d (arXiv:1707.06347, eq. 7, as a loss). Shapes: [N] both."""
    ratio = log_ratio.exp()
    return -torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()


def squared_error(values: Tensor, returns: Tensor, old_values: Tensor | None = None) -> Tensor:
    """Half the mean squared error, 0-d. Shapes: [N] all; the estimates at collection play no part."""
    return 0.5 * torch.nn.functional.mse_loss(values, returns)


def clipped_squared_error(values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float) -> Tensor:
    """Half the mean of the larger squared error of the value and of the value clipped to the old one ± clip, 0-d."""
    near = torch.clamp(values, old_values - clip, old_values + clip)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square()).mean()


def same(value: Any) -> Any:
    """The value as it is."""
    return value


@dataclass(frozen=True, slots=True)
class UpdateSteps:
    """What an update is made of; replace a field to change that step.

    The first six decide what an update sees of a rollout; by default all of it, as it was.

    Attributes:
        rewards: [T, B] -> [T, B].
        observations: [T, B, ...] acted on -> the same shape, to train on.
        action_masks: per restricted head [T, B, A] -> the masks to train under.
        relevance: per head that is not always relevant [T, B], bool -> where it matters in training.
        initial_state: per trunk [layers, parts, B, H], stored -> the state in which training begins each rollout.
        resets: [B], bool: where an episode ended -> where memory begins anew, in acting and in training; arrays on the host,
            tensors for tensor environments on a device.
        advantages: (rollout, gamma, gae_lambda) -> [T, B].
        returns: (advantages [T, B], values [T, B]) -> the critic's targets [T, B].
        normalize: advantages [N] -> [N]: of all transitions, or of a minibatch; called where `normalize_advantages` is on.
        minibatches: (batch, count, generator) -> one pass over the batch.
        scores: per head [N, width] -> the scores that the losses are computed from.
        log_probs: per head [N], of the actions taken -> the same, for the ratio.
        policy_loss: (log_ratio [N], advantages [N], clip) -> 0-d.
        value_loss: (values [N], returns [N], values at collection [N]) -> 0-d, without its coefficient.
        entropy_loss: mean entropy, 0-d -> 0-d, without its coefficient; called where there is a bonus.
        learning_rate: rate of the next update by the schedule -> the one to use; where the rate follows the KL nothing asks.
    """

    rewards: Callable[[Tensor], Tensor] = same
    observations: Callable[[Tensor], Tensor] = same
    action_masks: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = same
    relevance: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = same
    initial_state: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = same
    resets: Callable[[Array], Array] = same
    advantages: Callable[[Rollout, float, float], Tensor] = generalized_advantages
    returns: Callable[[Tensor, Tensor], Tensor] = operator.add
    normalize: Callable[[Tensor], Tensor] = standardize
    minibatches: Callable[[Batch, int, torch.Generator], Iterable[Batch]] = shuffled_minibatches
    scores: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = same
    log_probs: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = same
    policy_loss: Callable[[Tensor, Tensor, float], Tensor] = clipped_surrogate
    value_loss: Callable[[Tensor, Tensor, Tensor], Tensor] = squared_error
    entropy_loss: Callable[[Tensor], Tensor] = torch.neg
    learning_rate: Callable[[float], float] = same

    def seen(self, rollout: Rollout) -> Rollout:
        """The rollout as the update sees it."""
        memory = rollout.recurrence
        if memory is not None:
            memory = replace(memory, states=self.initial_state(memory.states))
        return replace(
            rollout,
            rewards=self.rewards(rollout.rewards),
            observations=self.observations(rollout.observations),
            action_masks=self.action_masks(rollout.action_masks),
            relevance=self.relevance(rollout.relevance),
            recurrence=memory,
        )


def steps_for(config: PPOConfig, ranks: Ranks = ALONE) -> UpdateSteps:
    """The steps that the settings ask for."""
    steps = UpdateSteps()
    if not ranks.alone:
        steps = replace(steps, normalize=partial(standardize_globally, floor=config.advantage_std_floor, ranks=ranks))
    elif config.advantage_std_floor:
        steps = replace(steps, normalize=partial(standardize, floor=config.advantage_std_floor))
    if config.clip_value is not None:
        steps = replace(steps, value_loss=partial(clipped_squared_error, clip=config.clip_value))
    return steps
