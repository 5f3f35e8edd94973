"""Events of the trainer, built from what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper_telemetry.events import MinibatchEnd, RecurrentForward, RolloutEnd
from esper_telemetry.ppo.networks.recurrent import RecurrentTrunk
from esper_telemetry.ppo.objective import ObjectiveResult
from esper_telemetry.ppo.policy import ActorCritic
from esper_telemetry.ppo.rollout import Batch, Rollout


def rollout_event(
    rollout: Rollout, policy: ActorCritic, advantages: Tensor, returns: Tensor, **numbers: Any
) -> RolloutEnd:
    """The event of a rollout; `numbers` are its `update`, `env_step`, `gamma`, and `scales`."""
    descriptions = describe(policy, rollout.scores, rollout.action_masks)
    return RolloutEnd(
        rewards=rollout.rewards,
        values=rollout.values,
        advantages=advantages,
        returns=returns,
        log_probs=rollout.log_probs,
        ended=rollout.ended,
        terminated=rollout.terminated,
        next_values=rollout.next_values,
        actions=rollout.actions,
        valid=rollout.valid,
        raw_rewards=rollout.raw_rewards,
        head_log_probs=rollout.head_log_probs,
        action_masks=rollout.action_masks,
        relevance=rollout.relevance,
        logits=descriptions.logits,
        means=descriptions.means,
        log_std=descriptions.log_std,
        bounds=policy.bounds(),
        **numbers,
        states=None if rollout.recurrence is None else rollout.recurrence.before(),
        observations=rollout.observations,
    )


@torch.no_grad()
def recurrent_event(policy: ActorCritic, rollout: Rollout, envs: int) -> RecurrentForward | None:
    """The event of the actor's LSTM in the first `envs` environments; None for a policy without one."""
    trunk, memory = policy.actor, rollout.recurrence
    if memory is None or not isinstance(trunk, RecurrentTrunk):
        return None
    cells = [cell for cell in trunk.core.cells if isinstance(cell, nn.LSTM)]
    if not cells:
        return None
    below = [memory.after[:, layer, 0, :envs] for layer in range(len(cells) - 1)]
    with policy.autocast():
        encoded = trunk.encoder(rollout.observations[:, :envs].flatten(0, 1)).float()
    inputs = [encoded.unflatten(0, (-1, envs)), *below]
    return RecurrentForward(cells, inputs, memory.before(envs).unbind(1))


def minibatch_event(
    batch: Batch, place: tuple[int, int], result: ObjectiveResult, policy: ActorCritic, losses: Mapping[str, Tensor]
) -> MinibatchEnd:
    """The event of the minibatch of pass `place[0]`, optimizer step `place[1]`."""
    descriptions = describe(policy, result.scores, batch.action_masks)
    log_ratio = result.log_ratio.detach()
    return MinibatchEnd(
        *place,
        log_ratio=log_ratio,
        advantages=batch.advantages,
        values=result.values.detach(),
        old_values=batch.values,
        returns=batch.returns,
        losses=losses,
        logits=descriptions.logits,
        action_masks=batch.action_masks,
        log_std=descriptions.log_std,
        head_log_ratios=head_log_ratios(batch, result) or dict.fromkeys(result.scores, log_ratio),
        relevance=batch.relevance,
        means=descriptions.means,
        rows=batch.rows,
    )


def head_log_ratios(batch: Batch, result: ObjectiveResult) -> dict[str, Tensor]:
    """Log-ratio [N] of each head, 0 where it is irrelevant; empty where there is one head."""
    return {name: result.head_log_probs[name].detach() - old for name, old in batch.head_log_probs.items()}


class Descriptions(NamedTuple):
    """What the heads say of their distributions, by head; see `events.MinibatchEnd`."""

    logits: dict[str, Tensor]
    log_std: dict[str, Tensor]
    means: dict[str, Tensor]


def describe(policy: ActorCritic, scores: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Descriptions:
    """What each head says of its distribution."""
    found = Descriptions({}, {}, {})
    for name, score in scores.items():
        for part, value in policy.head(name).description(score, masks.get(name)).items():
            getattr(found, part)[name] = value
    return found
