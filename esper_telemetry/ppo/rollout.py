"""Rollouts: what is collected, and the batches that the update takes from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esper_telemetry.ppo.sequences import Grid, Sequences, Whole, on

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class RolloutRecurrence:
    """What a rollout with memory must tell in addition; flags are on the host.

    Attributes:
        states: per trunk [layers, parts, B, H]: the state in which the rollout began.
        fresh: [T, B], bool: the step began without memory, as the first of an episode.
        after: [T, layers, parts, B, H]: state of the actor's core after each step.
        valid: [T, B], bool; None where every row is a transition.
    """

    states: Mapping[str, Tensor]
    fresh: Array
    after: Tensor
    valid: Array | None

    def before(self, envs: int | None = None) -> Tensor:
        """State of the actor's core in which each step began, [T, layers, parts, B, H]; of the first `envs` environments."""
        begin, after = self.states["actor"][:, :, :envs], self.after[:-1, :, :, :envs]
        shifted = torch.cat([begin.unsqueeze(0), after])
        steps, fresh = (torch.from_numpy(index).to(shifted.device) for index in np.nonzero(self.fresh[:, :envs]))
        shifted[steps, :, :, fresh] = 0.0  # few: a mask over all of them takes ten times as long
        return shifted

    def sequences(self) -> Sequences:
        """How the transitions follow one another, by environment, then by time."""
        begins = self.fresh.copy()
        begins[0] = True
        carried = np.zeros_like(begins)
        carried[0] = True
        envs: Array = np.broadcast_to(np.arange(begins.shape[1]), begins.shape)
        kept = slice(None) if self.valid is None else self.valid.T.reshape(-1)
        begins, carried, envs = (column.T.reshape(-1)[kept] for column in (begins, carried, envs))
        begins = begins | (np.diff(envs, prepend=-1) != 0)
        starts = np.flatnonzero(begins)
        return Sequences(np.diff(starts, append=len(begins)), carried[starts], envs[starts], self.states)


@dataclass(frozen=True, slots=True)
class Rollout:
    """T steps of B environments, time-major, on the device of the policy.

    Attributes:
        observations: [T, B, ...] acted on: normalised where normalisation is on.
        actions: per head [T, B] or [T, B, D].
        log_probs: [T, B] of the joint action, under the distribution it was sampled from.
        rewards: [T, B], what is learned from: scaled where normalisation is on.
        values: [T, B], the critic's estimates.
        next_values: [T, B], its estimates of the state that follows: after a time limit that of the episode's last
            observation, after termination 0.
        ended: [T, B], bool: the step taken at t ended its episode.
        terminated: [T, B], bool: it did so by termination.
        valid: [T, B], bool; None where every row is a transition.
        transitions: how many rows are.
        raw_rewards: [T, B], as the environment gave them; None where they are the `rewards`.
        head_log_probs: per head [T, B], where there are several heads: the parts of `log_probs`.
        action_masks: per restricted head [T, B, A], bool: the choices there were.
        relevance: per head that is not always relevant [T, B], bool.
        scores: per head [T, B, size] that were acted on; see `Head`.
        recurrence: None for a feed-forward policy.
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
    raw_rewards: Tensor | None = None
    head_log_probs: Mapping[str, Tensor] = field(default_factory=dict)
    action_masks: Mapping[str, Tensor] = field(default_factory=dict)
    relevance: Mapping[str, Tensor] = field(default_factory=dict)
    scores: Mapping[str, Tensor] = field(default_factory=dict)
    recurrence: RolloutRecurrence | None = None


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
        head_log_probs: per head [N] at collection; empty where there is one head.
        action_masks: per restricted head [N, A], bool.
        relevance: per head that is not always relevant [N], bool.
        sequences: how the rows follow one another; None for a feed-forward policy.
        rows: [N], which transitions of the rollout they are, counted time by time; None where nobody asks.
    """

    observations: Tensor
    actions: Mapping[str, Tensor]
    log_probs: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor
    head_log_probs: Mapping[str, Tensor] = field(default_factory=dict)
    action_masks: Mapping[str, Tensor] = field(default_factory=dict)
    relevance: Mapping[str, Tensor] = field(default_factory=dict)
    sequences: Sequences | None = None
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.log_probs)

    def map(self, change: Callable[[Tensor], Tensor], sequences: Sequences | None = None) -> Batch:
        """The batch with every column changed in the same way."""

        def each(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: change(column) for name, column in columns.items()}

        return Batch(
            observations=change(self.observations),
            actions=each(self.actions),
            log_probs=change(self.log_probs),
            advantages=change(self.advantages),
            returns=change(self.returns),
            values=change(self.values),
            head_log_probs=each(self.head_log_probs),
            action_masks=each(self.action_masks),
            relevance=each(self.relevance),
            sequences=sequences,
            rows=None if self.rows is None else change(self.rows),
        )

    def take(self, rows: Tensor) -> Batch:
        """The rows with these indices, copied, without their order in time."""
        return self.map(lambda column: column.index_select(0, rows))

    def split(self, parts: int) -> list[Batch]:
        """The rows in order, in `parts` batches whose sizes differ by one at most; fewer where there are fewer rows."""
        parts = max(1, min(parts, len(self)))
        size, longer = divmod(len(self), parts)
        cuts = [part * size + min(part, longer) for part in range(parts + 1)]
        return [self._slice(start, stop) for start, stop in itertools.pairwise(cuts)]

    def _slice(self, start: int, stop: int) -> Batch:
        return self.map(lambda column: column[start:stop])

    def whole(self, parts: Sequence[Whole]) -> Batch:
        """The rows of some environments, as `Sequences.environments` names them, with their order in time."""
        assert self.sequences is not None
        rows = on(np.concatenate([part.rows for part in parts]), self.log_probs.device)
        sequences = self.sequences.take(np.concatenate([part.runs for part in parts]))
        return self.map(lambda column: column.index_select(0, rows), sequences)

    def grid(self) -> Grid | None:
        """Where the rows stand in time; None for a feed-forward policy."""
        return None if self.sequences is None else self.sequences.grid(shared=self.sequences.separable)


def flatten(rollout: Rollout, advantages: Tensor, returns: Tensor, *, numbered: bool = False) -> Batch:
    """The transitions of a rollout as one batch: [T x B] rows less the invalid ones.

    They are ordered by time, and for a recurrent policy by environment, then by time. Where they are `numbered`, each says which
    it is.
    """
    numbers = torch.arange(advantages.numel(), device=advantages.device) if numbered else None
    table = columns(rollout, advantages, returns, rows=None if numbers is None else numbers.view(advantages.shape))
    if rollout.recurrence is None:
        batch = table.map(lambda column: column.flatten(0, 1))
        return batch if rollout.valid is None else batch.take(valid_rows(rollout.valid, rollout.transitions))
    batch = table.map(lambda column: column.transpose(0, 1).flatten(0, 1), rollout.recurrence.sequences())
    if rollout.valid is None:
        return batch
    rows = valid_rows(rollout.valid.t(), rollout.transitions)
    return batch.map(lambda column: column.index_select(0, rows), batch.sequences)


def columns(rollout: Rollout, advantages: Tensor, returns: Tensor, *, rows: Tensor | None = None) -> Batch:
    """The rollout as a batch whose columns are [T, B], rows that are no transitions among them."""
    return Batch(
        observations=rollout.observations,
        actions=rollout.actions,
        log_probs=rollout.log_probs,
        advantages=advantages,
        returns=returns,
        values=rollout.values,
        head_log_probs=rollout.head_log_probs,
        action_masks=rollout.action_masks,
        relevance=rollout.relevance,
        rows=rows,
    )


def valid_rows(valid: Tensor, count: int) -> Tensor:
    """Indices of the `count` rows that hold in the flattened flags, without waiting for the device."""
    return torch.nonzero_static(valid.flatten(), size=count).squeeze(-1)
