"""The minibatches of an update and their backward passes, joined once when it is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.events import NONE, BackwardsEnd, MinibatchesEnd
from esper_telemetry.ppo.config import PPOConfig
from esper_telemetry.ppo.objective import ObjectiveResult
from esper_telemetry.ppo.policy import ActorCritic
from esper_telemetry.ppo.rollout import Batch
from esper_telemetry.ppo.telling import describe


class StepTensors(NamedTuple):
    """What is kept of minibatches, of one after the other.

    Attributes:
        epoch: of the pass.
        log_ratio, advantages, rows, action_masks, relevance: as in `events.MinibatchEnd`.
        losses: 0-d, by name.
        scores: per head [N, width].
        log_probs, old_log_probs: per head [N], now and at collection; empty where there is one head.
        log_std: per Gaussian head where it does not depend on the state [D].
    """

    epoch: tuple[int, ...]
    log_ratio: tuple[Tensor, ...]
    advantages: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]
    losses: tuple[Mapping[str, Tensor], ...]
    scores: tuple[Mapping[str, Tensor], ...]
    log_probs: tuple[Mapping[str, Tensor], ...]
    old_log_probs: tuple[Mapping[str, Tensor], ...]
    action_masks: tuple[Mapping[str, Tensor], ...]
    relevance: tuple[Mapping[str, Tensor], ...]
    log_std: tuple[Mapping[str, Tensor], ...]


class Tape:
    """Takes minibatches as they come and gives them back as one event, and the norms of their gradients as another.

    Between two minibatches as little is done as can be: this code has left the processor's caches by then, and takes several times
    as long as it does when the update is over.
    """

    def __init__(self, policy: ActorCritic) -> None:
        self._policy = policy
        self._kept: list[tuple[Any, ...]] = []
        self._norms: list[tuple[int, tuple[str, ...], Tensor]] = []

    def add_norms(self, epoch: int, names: tuple[str, ...], norms: Tensor) -> None:
        """The gradients of the next backward pass: norms [K] of the parameters of these names."""
        self._norms.append((epoch, names, norms))

    def norms(self, parameters: Mapping[str, Tensor], config: PPOConfig) -> BackwardsEnd | None:
        """All backward passes since the tape was cleared; None where there are none."""
        if not self._norms:
            return None
        epochs, names, norms = zip(*self._norms, strict=True)
        return BackwardsEnd(epochs, names, norms, parameters, config.max_grad_norm)

    def add(self, epoch: int, batch: Batch, result: ObjectiveResult, log_ratio: Tensor) -> None:
        """The next minibatch, of which this is the log-ratio [N], detached: nothing is kept of its graph."""
        parts = detached(result.head_log_probs) if batch.head_log_probs else NONE
        self._kept.append(
            (
                *(epoch, log_ratio, batch.advantages, batch.rows, detached(result.losses), detached(result.scores)),
                *(parts, batch.head_log_probs, batch.action_masks, batch.relevance, self._policy.constant_log_std()),
            )
        )

    @torch.no_grad()
    def joined(self) -> MinibatchesEnd | None:
        """All minibatches since the tape was cleared; None where there are none."""
        if not self._kept:
            return None
        kept = StepTensors(*zip(*self._kept, strict=True))
        masks, counts = joined(kept.action_masks), tuple(map(len, kept.log_ratio))
        described = describe(self._policy, joined(kept.scores), masks)
        constant = {head: _by_row([spread[head] for spread in kept.log_std], counts) for head in kept.log_std[0]}
        return MinibatchesEnd(
            epochs=kept.epoch,
            counts=counts,
            log_ratio=torch.cat(kept.log_ratio),
            advantages=torch.cat(kept.advantages),
            valid=None,
            losses=joined(kept.losses, torch.stack),
            logits=described.logits,
            action_masks=masks,
            log_std={**described.log_std, **constant} if described.log_std else NONE,
            head_log_ratios=_head_log_ratios(kept),
            relevance=joined(kept.relevance),
            rows=torch.cat(kept.rows),
        )

    def clear(self) -> None:
        """Forgets everything."""
        self._kept.clear()
        self._norms.clear()


def detached(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each by its name, without its graph."""
    return {name: tensor.detach() for name, tensor in tensors.items()}


def joined(
    columns: Sequence[Mapping[str, Tensor]], join: Callable[[list[Tensor]], Tensor] = torch.cat
) -> dict[str, Tensor]:
    """Each column by its name, of all minibatches."""
    return {name: join([column[name] for column in columns]) for name in columns[0]}


def _head_log_ratios(kept: StepTensors) -> dict[str, Tensor]:
    """Log-ratio [R] of each head, 0 where it is irrelevant; empty where there is one head."""
    if not kept.old_log_probs[0]:
        return {}
    now, old = joined(kept.log_probs), joined(kept.old_log_probs)
    return {head: now[head] - old[head] for head in old}


def _by_row(log_std: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """[R, D] of [D] of each minibatch."""
    return torch.cat([spread.expand(count, -1) for spread, count in zip(log_std, counts, strict=True)])
