"""Rollouts: what is collected, and the batches that the update takes from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rollout:
    """T steps of B environments, time-major, on the device of the policy.

    Attributes:
        observations: [T, B, ...] acted on.
        actions: per head [T, B] or [T, B, D].
        log_probs: [T, B] of the joint action, under the distribution it was sampled from.
        rewards: [T, B], as the environment gave them.
        values: [T, B], the critic's estimates.
        next_values: [T, B], its estimates of the state that follows: after a time limit that of the episode's last
            observation, after termination 0.
        ended: [T, B], bool: the step taken at t ended its episode.
        terminated: [T, B], bool: it did so by termination.
        valid: [T, B], bool; None where every row is a transition.
        transitions: how many rows are.
    """

    observations: Tensor
    actions: Mapping[str, Tensor]
    log_probs: Tensor
    rewards: Tensor
    values: Tensor
    next_values: Tensor
    ended: Tensor
    terminated: Tensor
    valid: Tensor | None
    transitions: int


@dataclass(frozen=True, slots=True)
class Batch:
    """N rows to learn from, every one a transition.

    Attributes:
        observations: [N, ...].
        actions: per head [N] or [N, D].
        log_probs: [N] at collection.
        advantages: [N], the values that multiply the ratio.
        returns: [N], the critic's targets.
        values: [N], the critic's estimates at collection.
    """

    observations: Tensor
    actions: Mapping[str, Tensor]
    log_probs: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.log_probs)

    def take(self, rows: Tensor) -> Batch:
        """The rows with these indices, copied."""
        return Batch(
            observations=self.observations[rows],
            actions={name: action[rows] for name, action in self.actions.items()},
            log_probs=self.log_probs[rows],
            advantages=self.advantages[rows],
            returns=self.returns[rows],
            values=self.values[rows],
        )

    def split(self, parts: int) -> list[Batch]:
        """The rows in order, in `parts` batches whose sizes differ by one at most; fewer where there are fewer rows."""
        parts = max(1, min(parts, len(self)))
        columns = [
            self.observations,
            *self.actions.values(),
            self.log_probs,
            self.advantages,
            self.returns,
            self.values,
        ]
        pieces = zip(*(column.tensor_split(parts) for column in columns), strict=True)
        return [
            Batch(observations, dict(zip(self.actions, rest[:-4], strict=True)), *rest[-4:])
            for observations, *rest in pieces
        ]


def flatten(rollout: Rollout, advantages: Tensor, returns: Tensor) -> Batch:
    """The transitions of a rollout as one batch, [T x B] rows less the invalid ones, in the order of time."""
    batch = Batch(
        observations=rollout.observations.flatten(0, 1),
        actions={name: action.flatten(0, 1) for name, action in rollout.actions.items()},
        log_probs=rollout.log_probs.flatten(),
        advantages=advantages.flatten(),
        returns=returns.flatten(),
        values=rollout.values.flatten(),
    )
    if rollout.valid is None:
        return batch
    return batch.take(torch.nonzero_static(rollout.valid.flatten(), size=rollout.transitions).squeeze(-1))
