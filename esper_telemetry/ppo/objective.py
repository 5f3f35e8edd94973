"""The losses of a minibatch, from the trunk outputs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from esper_telemetry.ppo.policy import ActorCritic, add
from esper_telemetry.ppo.rollout import Batch
from esper_telemetry.ppo.steps import UpdateSteps


class ObjectiveResult(NamedTuple):
    """What the policy says of a minibatch now.

    Attributes:
        log_ratio, values: [N].
        scores: per head [N, width].
        head_log_probs: per head [N].
        losses: 0-d, by name.
    """

    log_ratio: Tensor
    values: Tensor
    scores: Mapping[str, Tensor]
    head_log_probs: Mapping[str, Tensor]
    losses: Mapping[str, Tensor]


class ObjectiveLeaves(NamedTuple):
    """Trunk outputs [N, F] that the losses are computed from."""

    actor: Tensor
    critic: Tensor


def objective(
    policy: ActorCritic, steps: UpdateSteps, batch: Batch, leaves: ObjectiveLeaves, *, clip: float, bonus: bool
) -> ObjectiveResult:
    """The losses of a minibatch as functions of the trunk outputs; the entropy only where there is a bonus for it."""
    scores = steps.scores(policy.scores(leaves.actor))
    normalized = policy.normalize(scores, batch.action_masks)
    log_probs = steps.log_probs(policy.log_probs(normalized, batch.actions, batch.relevance))
    log_ratio = add(list(log_probs.values())) - batch.log_probs
    values = policy.values(leaves.critic)
    losses = {
        "policy": steps.policy_loss(log_ratio, batch.advantages, clip),
        "value": steps.value_loss(values, batch.returns, batch.values),
    }
    if bonus:
        losses["entropy"] = steps.entropy_loss(policy.entropy(normalized, batch.relevance))
    return ObjectiveResult(log_ratio, values, scores, log_probs, losses)
