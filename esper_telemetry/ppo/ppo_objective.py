"""The algorithm of an update: advantages, minibatches, losses, their gradients, and schedules over a run.

Replace a field of `UpdateSteps` to vary the algorithm, or to break it on purpose:

    trainer.steps = replace(trainer.steps, normalize=lambda advantages: advantages)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.core.event_parts import Shard
from esper_telemetry.core.minibatch_objective import LossRows
from esper_telemetry.ppo.config import PPOConfig
from esper_telemetry.ppo.environments.environment_protocol import Array
from esper_telemetry.ppo.gradient_ranks import ALONE, Ranks
from esper_telemetry.ppo.policy import ActorCritic, Tensors, add
from esper_telemetry.ppo.rollout import Batch, Rollout, remaining_sums

STD_FLOOR: Final = 1e-8  # keeps equal advantages finite; as in Stable-Baselines3 and CleanRL
STOP_FACTOR: Final = 1.5  # of `target_kl`; as in Stable-Baselines3 and Spinning Up
RATE_FACTOR, KL_BAND, RATE_BOUNDS = 1.5, 2.0, (1e-5, 1e-2)  # RSL-RL's adaptive schedule


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
    """Advantages [N] minus their mean, divided by their unbiased standard deviation or `floor`; a single advantage is not changed."""
    if len(advantages) < 2:
        return advantages
    std, mean = torch.std_mean(advantages, correction=1)
    return (advantages - mean) / (std.clamp(min=floor) + STD_FLOOR)


def standardize_globally(advantages: Tensor, floor: float, ranks: Ranks) -> Tensor:
    """Advantages [N] standardised by mean and deviation over the advantages of all ranks."""
    count, mean, squares = ranks.moments(advantages, advantages.new_zeros((), dtype=torch.float64))
    std = (squares / (count - 1)).sqrt().clamp(min=floor)
    return ((advantages - mean) / (std + STD_FLOOR)).to(advantages.dtype)


def shuffled_minibatches(batch: Batch, count: int, generator: torch.Generator) -> Iterable[Batch]:
    """All rows in random order, in `count` parts whose sizes differ by at most one.

    If the rows have an order in time, the environments are shuffled instead, and each part holds whole sequences.
    """
    if batch.sequences is None:
        rows = torch.randperm(len(batch), generator=generator).to(batch.log_probs.device, non_blocking=True)
        return batch.take(rows).split(count)
    envs = batch.sequences.environments()
    order = torch.randperm(len(envs), generator=generator)
    parts = [part.tolist() for part in order.tensor_split(max(1, min(count, len(envs))))]
    return (batch.whole([envs[env] for env in part]) for part in parts)


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Mean of max(-A r, -A clip(r, 1-ε, 1+ε)), 0-d (arXiv:1707.06347, eq. 7, as a loss). Shapes: [N] both."""
    ratio = log_ratio.exp()
    return -torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()


def squared_error(values: Tensor, returns: Tensor, old_values: Tensor | None = None) -> Tensor:
    """Half the mean squared error, 0-d. All shapes are [N]; the estimates at collection are ignored."""
    return 0.5 * torch.nn.functional.mse_loss(values, returns)


def clipped_squared_error(values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float) -> Tensor:
    """Half the mean of the larger squared error of the value and of the value clipped to the old one ± clip, 0-d."""
    near = torch.clamp(values, old_values - clip, old_values + clip)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square()).mean()


def identity(value: Any) -> Any:
    """Return the value unchanged."""
    return value


@dataclass(frozen=True, slots=True)
class UpdateSteps:
    """The steps of an update; replace a field to change that step.

    The first six decide how an update sees a rollout; by default it sees all of it unchanged.

    Attributes:
        rewards: [T, B] -> [T, B].
        observations: [T, B, ...] acted on -> the same shape, to train on.
        action_masks: per restricted head [T, B, A] -> the masks to train under.
        relevance: per head that is not always relevant [T, B], bool -> its relevance in training.
        initial_state: per trunk [layers, parts, B, H], stored -> the state in which training begins each rollout.
        resets: ends of episodes [B], bool -> resets of memory, in acting and in training; arrays on the host,
            tensors for tensor environments on a device.
        advantages: (rollout, gamma, gae_lambda) -> [T, B].
        returns: (advantages [T, B], values [T, B]) -> the critic's targets [T, B].
        normalize: advantages [N] -> [N], of all transitions or of a minibatch; called if `normalize_advantages` is on.
        minibatches: (batch, count, generator) -> one pass over the batch.
        scores: per head [N, width] -> the scores that the losses are computed from.
        log_probs: per head [N], of the actions taken -> the same, for the ratio.
        policy_loss: (log_ratio [N], advantages [N], clip) -> 0-d.
        value_loss: (values [N], returns [N], values at collection [N]) -> 0-d, without its coefficient.
        entropy_loss: mean entropy, 0-d -> 0-d, without its coefficient; called if there is a bonus.
        learning_rate: rate of the next update by the schedule -> the rate to use; not called if the rate follows the KL.
    """

    rewards: Callable[[Tensor], Tensor] = identity
    observations: Callable[[Tensor], Tensor] = identity
    action_masks: Callable[[Tensors], Tensors] = identity
    relevance: Callable[[Tensors], Tensors] = identity
    initial_state: Callable[[Tensors], Tensors] = identity
    resets: Callable[[Array], Array] = identity
    advantages: Callable[[Rollout, float, float], Tensor] = generalized_advantages
    returns: Callable[[Tensor, Tensor], Tensor] = operator.add
    normalize: Callable[[Tensor], Tensor] = standardize
    minibatches: Callable[[Batch, int, torch.Generator], Iterable[Batch]] = shuffled_minibatches
    scores: Callable[[Tensors], Tensors] = identity
    log_probs: Callable[[Tensors], Tensors] = identity
    policy_loss: Callable[[Tensor, Tensor, float], Tensor] = clipped_surrogate
    value_loss: Callable[[Tensor, Tensor, Tensor], Tensor] = squared_error
    entropy_loss: Callable[[Tensor], Tensor] = torch.neg
    learning_rate: Callable[[float], float] = identity

    def transform(self, rollout: Rollout) -> Rollout:
        """Return the rollout as the update sees it."""
        recurrence = rollout.recurrence
        if recurrence is not None:
            recurrence = replace(recurrence, states=self.initial_state(recurrence.states))
        return replace(
            rollout,
            rewards=self.rewards(rollout.rewards),
            observations=self.observations(rollout.observations),
            action_masks=self.action_masks(rollout.action_masks),
            relevance=self.relevance(rollout.relevance),
            recurrence=recurrence,
        )


def steps_for(config: PPOConfig, ranks: Ranks = ALONE) -> UpdateSteps:
    """Return the steps that the settings ask for."""
    steps = UpdateSteps()
    if not ranks.alone:
        steps = replace(steps, normalize=partial(standardize_globally, floor=config.advantage_std_floor, ranks=ranks))
    elif config.advantage_std_floor:
        steps = replace(steps, normalize=partial(standardize, floor=config.advantage_std_floor))
    if config.clip_value is not None:
        steps = replace(steps, value_loss=partial(clipped_squared_error, clip=config.clip_value))
    return steps


class TrunkOutputs(NamedTuple):
    """Trunk outputs [N, F] that the losses are computed from; the same tensor twice if actor and critic share a trunk."""

    actor: Tensor
    critic: Tensor

    def leaves(self) -> TrunkOutputs:
        """Return the outputs detached from their trunks, as leaves that collect gradients in `.grad`."""
        return TrunkOutputs(self.actor.detach().requires_grad_(), self.critic.detach().requires_grad_())

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of two leaves; zero if no loss reached one."""
        actor, critic = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self)
        return actor, critic


class ObjectiveResult(NamedTuple):
    """The losses of a minibatch and their inputs.

    Attributes:
        log_ratio, values: [N].
        scores: per head [N, width].
        head_log_probs: per head [N].
        losses: 0-d, by name.
    """

    log_ratio: Tensor
    values: Tensor
    scores: Tensors
    head_log_probs: Tensors
    losses: Tensors


def objective(policy: ActorCritic, steps: UpdateSteps, batch: Batch, outputs: TrunkOutputs, *, clip: float, bonus: bool) -> ObjectiveResult:
    """Return the losses of a minibatch as functions of the trunk outputs; the entropy only if there is a bonus for it."""
    return objective_of_scores(policy, steps, batch, policy.scores(outputs.actor), outputs.critic, clip=clip, bonus=bonus)


def objective_of_scores(
    policy: ActorCritic, steps: UpdateSteps, batch: Batch, scores: Tensors, critic: Tensor, *, clip: float, bonus: bool
) -> ObjectiveResult:
    """Return the losses as functions of the scores of each head, and of the output of the critic's trunk."""
    scores = steps.scores(scores)
    normalized = policy.normalize(scores, batch.action_masks)
    log_probs = steps.log_probs(policy.log_probs(normalized, batch.actions, batch.relevance))
    log_ratio = add(list(log_probs.values())) - batch.log_probs
    values = policy.values(critic)
    losses = {
        "policy": steps.policy_loss(log_ratio, batch.advantages, clip),
        "value": steps.value_loss(values, batch.returns, batch.values),
    }
    if bonus:
        losses["entropy"] = steps.entropy_loss(policy.entropy(normalized, batch.relevance))
    return ObjectiveResult(log_ratio, values, scores, log_probs, losses)


def head_gradients(
    policy: ActorCritic, steps: UpdateSteps, batch: Batch, output: Tensor, weights: Tensors, *, clip: float, bonus: bool
) -> dict[str, Tensor]:
    """Return the gradient [N, F] of the actor's loss at its trunk's output through each head; they add up to the whole gradient.

    Every head reads its own copy of the output, at which its gradient ends.
    """
    leaves = {name: output.detach().requires_grad_() for name in policy.heads}
    scores = {name: policy.head(name)(leaf) for name, leaf in leaves.items()}
    losses = objective_of_scores(policy, steps, batch, scores, output.detach(), clip=clip, bonus=bonus).losses
    loss = add([weights[name] * losses[name] for name in ("policy", "entropy") if name in losses])
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


@dataclass(frozen=True, slots=True)
class ActorLoss:
    """The part of the loss that depends on the actor's trunk, as a function that can be pickled with the policy.

    Attributes:
        objective: `objective`, compiled or not.
        policy, steps: its arguments.
        weights: weights of the losses.
        clip: range of the ratio.
        bonus: whether there is an entropy bonus.
    """

    objective: Callable[..., ObjectiveResult]
    policy: ActorCritic
    steps: UpdateSteps
    weights: Tensors
    clip: float
    bonus: bool

    def __call__(self, batch: Batch, actor: Tensor) -> Tensor:
        """Return the loss, 0-d, from the outputs [N, F] of the actor's trunk."""
        outputs = TrunkOutputs(actor, actor)
        losses = self.objective(self.policy, self.steps, batch, outputs, clip=self.clip, bonus=self.bonus).losses
        names = [name for name in losses if name != "value" or self.policy.critic is None]
        return add([self.weights[name] * losses[name] for name in names])


@contextmanager
def loss_rows(policy: ActorCritic, batch: Batch, raw_advantages: Tensor, config: PPOConfig) -> Iterator[LossRows]:
    """Pass a minibatch through the policy, without the steps of the update.

    Args:
        policy: the policy.
        batch: the minibatch.
        raw_advantages: [N], its advantages before normalisation within the minibatch.
        config: settings of the trainer.
    """
    outputs = policy.trunks(batch.observations, batch.grid())
    normalized = policy.normalize(policy.scores(outputs[0]), batch.action_masks)
    log_probs = policy.log_prob(normalized, batch.actions, batch.relevance)
    yield LossRows(
        log_ratio=log_probs - batch.log_probs,
        log_probs=log_probs,
        values=policy.values(outputs[-1]),
        entropy=policy.entropy(normalized, batch.relevance),
        advantages=batch.advantages,
        old_values=batch.values,
        returns=batch.returns,
        raw_advantages=None if config.normalize_advantages and not config.normalize_minibatches else raw_advantages,
        clip=config.clip,
        clip_value=config.clip_value,
    )


def backward_losses(losses: Tensors, weights: Tensors) -> None:
    """Backpropagate the weighted sum of the losses that have a graph, without building the sum."""
    names = [name for name, loss in losses.items() if loss.requires_grad]
    torch.autograd.backward([losses[name] for name in names], [weights[name] for name in names])


def backward_trunks(outputs: Sequence[Tensor], leaves: TrunkOutputs) -> None:
    """Propagate the gradients of the leaves to the parameters; if both leaves come from the same output, propagate their sum.

    A trunk whose parameters are all frozen has no graph and is skipped.
    """
    actor, critic = leaves.gradients()
    gradients = [actor + critic] if len(outputs) == 1 else [actor, critic]
    pairs = [(output, grad) for output, grad in zip(outputs, gradients, strict=True) if output.requires_grad]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])


def shard_gradients(batch: Batch, count: int, loss: Callable[[Batch], Tensor], parameters: Sequence[Tensor]) -> list[Shard]:
    """Return the gradient of the mean loss of each of `count` parts of a minibatch; `.grad` fields are not changed.

    Args:
        batch: the minibatch.
        count: number of parts; fewer if it has fewer independent samples (rows, or environments for sequences).
        loss: 0-d, of a part.
        parameters: K tensors.
    """
    if batch.sequences is None:
        parts = [(len(part), part) for part in batch.split(count)]
    else:
        envs = batch.sequences.environments()
        count = max(1, min(count, len(envs)))
        cuts = [len(envs) * part // count for part in range(count + 1)]
        parts = [(stop - start, batch.whole(envs[start:stop])) for start, stop in pairwise(cuts)]
    return [Shard(samples, flat_gradient(loss(part), parameters)) for samples, part in parts]


def flat_gradient(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return all gradients concatenated, [d], zero for parameters that are frozen or not reached."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad] if loss.requires_grad else []
    gradients = torch.autograd.grad(loss, trainable, allow_unused=True, materialize_grads=True) if trainable else ()
    by_parameter = {id(parameter): part for parameter, part in zip(trainable, gradients, strict=True)}
    parts = (by_parameter[id(p)] if id(p) in by_parameter else torch.zeros_like(p) for p in parameters)
    return torch.cat([part.reshape(-1) for part in parts])


def adapted_rate(rate: float, kl: float, desired: float) -> float:
    """Return the rate after an update whose last pass moved the policy by `kl`."""
    lowest, highest = RATE_BOUNDS
    if kl > KL_BAND * desired:
        return max(lowest, rate / RATE_FACTOR)
    return min(highest, rate * RATE_FACTOR) if 0 < kl < desired / KL_BAND else rate


def entropy_coef(config: PPOConfig, remaining: float) -> float:
    """Return the weight of the entropy bonus when a fraction `remaining` of the run, 1 to 0, is left."""
    if config.final_entropy_coef is None:
        return config.entropy_coef
    return config.final_entropy_coef + (config.entropy_coef - config.final_entropy_coef) * remaining


def mean_kl(log_ratios: Sequence[Tensor], ranks: Ranks = ALONE) -> float:
    """Return the mean of exp(l) - 1 - l over all rows of a pass, of all ranks (Schulman's k3 estimator); synchronises."""
    log_ratio = torch.cat(list(log_ratios))
    terms = (log_ratio.expm1() - log_ratio).double()
    total, count = ranks.sum(torch.stack([terms.sum(), terms.new_tensor(len(terms))])).tolist()
    return float(total / count)
