"""Rollouts, and the batches that an update takes from them.

The rows of a batch stay rows even for recurrent policies. Only inside the recurrent core are they arranged in a padded grid, whose columns
are runs of steps that share a memory. So losses, events and metrics need not mask any padding. Several runs share a column, separated
by cells at which the core forgets everything, so that one fused call per cell needs at most half the cells. With a GRU and
cuDNN every run has its own column.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.ppo.environments.environment_protocol import Array

PARTS = {"lstm": 2, "gru": 1}
"""Parts of a state: hidden and cell state of an LSTM, the hidden state of a GRU."""

GRID_HEIGHT_STRIDE: Final = 8
"""Heights of grids are multiples of it, because oneDNN prepares each new shape for as long as a pass takes."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Positions of N rows in a grid of `length` x `columns`.

    Attributes:
        cells: [N], int64: index of each row in the flattened grid.
        separators: [M], int64: indices of the cells at which the core forgets everything; None without separators.
        length, columns: the grid's size.
        states: per trunk [layers, parts, columns, H]: the state in which each column begins.
    """

    cells: Tensor
    separators: Tensor | None
    length: int
    columns: int
    states: Mapping[str, Tensor]

    def pad(self, rows: Tensor) -> Tensor:
        """Rows [N, F] in the grid [length, columns, F], zero elsewhere."""
        empty = rows.new_zeros(self.length * self.columns, rows.shape[-1])
        return empty.index_copy(0, self.cells, rows).view(self.length, self.columns, -1)

    def gather(self, grid: Tensor) -> Tensor:
        """The rows [N, F] of a grid [length, columns, F]."""
        return grid.flatten(0, 1).index_select(0, self.cells)

    def marks(self) -> Tensor | None:
        """[length, columns, 1]: 1 at separators, 0 elsewhere; None without separators."""
        if self.separators is None:
            return None
        state = next(iter(self.states.values()))
        empty = state.new_zeros(self.length * self.columns)
        return empty.index_fill(0, self.separators, 1.0).view(self.length, self.columns, 1)


class EnvironmentPart(NamedTuple):
    """One environment's part of a batch: indices of its rows and of its runs."""

    rows: Array
    runs: Array


@dataclass(frozen=True, slots=True)
class Sequences:
    """R runs of steps that share a memory, in the N rows of a batch; ordered by environment, then by time.

    The arrays are on the host, so that the size of a grid is known without synchronising.

    Attributes:
        lengths: [R], int: rows of each run.
        carried: [R], bool: the run continues from the state stored when the rollout began.
        envs: [R], int: its environment, as an index into `states`.
        states: per trunk [layers, parts, B, H], stored when the rollout began.
    """

    lengths: Array
    carried: Array
    envs: Array
    states: Mapping[str, Tensor]

    def take(self, runs: Array) -> Sequences:
        """The runs with these indices."""
        return replace(self, lengths=self.lengths[runs], carried=self.carried[runs], envs=self.envs[runs])

    def environments(self) -> list[EnvironmentPart]:
        """The parts of the batch, one per environment that has rows."""
        cuts = np.flatnonzero(np.diff(self.envs)) + 1
        ends = np.cumsum(self.lengths)
        rows = np.split(np.arange(ends[-1]), ends[cuts - 1])
        runs = np.split(np.arange(len(self.envs)), cuts)
        return [EnvironmentPart(*part) for part in zip(rows, runs, strict=True)]

    @property
    def separable(self) -> bool:
        """True if the core can forget within a column, as an LSTM on the CPU can. cuDNN needs its weights in one piece."""
        state = next(iter(self.states.values()))
        return state.is_cpu and state.shape[1] == PARTS["lstm"]

    def grid(self, *, shared: bool = False) -> Grid:
        """Return the rows in columns.

        Args:
            shared: let runs share columns, with separators, if they fit; otherwise each has its own.
        """
        lengths = self.lengths
        height = -(-int(lengths.max()) // GRID_HEIGHT_STRIDE) * GRID_HEIGHT_STRIDE
        alone = (np.arange(len(lengths)), np.zeros_like(lengths))
        column, top = pack(lengths, self.carried, height) if shared else alone
        columns = int(column.max()) + 1
        starts = np.cumsum(lengths) - lengths
        rows = np.arange(starts[-1] + lengths[-1])
        cells = rows * columns + np.repeat((top - starts) * columns + column, lengths)
        device = next(iter(self.states.values())).device
        behind = np.flatnonzero(top)
        return Grid(
            index_on(cells, device),
            index_on((top[behind] - 1) * columns + column[behind], device) if len(behind) else None,
            height,
            columns,
            self._begin(columns, column[self.carried]),
        )

    def _begin(self, columns: int, carried: Array) -> dict[str, Tensor]:
        """The states in which the columns begin, per trunk: stored ones in the columns `carried`, zero in the others."""
        device = next(iter(self.states.values())).device
        targets, sources = index_on(carried, device), index_on(self.envs[self.carried], device)
        return {
            name: state.new_zeros(*state.shape[:2], columns, state.shape[-1]).index_copy_(2, targets, state.index_select(2, sources))
            for name, state in self.states.items()
        }


def pack(lengths: Array, carried: Array, room: int) -> tuple[Array, Array]:
    """Return column and first position of each run: the longest first, each after the first run that leaves room for it.

    A run that continues a stored state is at the top of a column; the others need a separator before them.
    """
    columns, offsets = np.zeros_like(lengths), np.zeros_like(lengths)
    ends: list[int] = []
    order = np.lexsort((-lengths, ~carried)).tolist()
    sizes, tops = lengths.tolist(), carried.tolist()
    for run in order:
        size = sizes[run]
        column = len(ends) if tops[run] else next((c for c, end in enumerate(ends) if end + size <= room), len(ends))
        if column == len(ends):
            ends.append(0)
        columns[run], offsets[run] = column, ends[column]
        ends[column] += size + 1
    return columns, offsets


def index_on(indices: Array, device: torch.device) -> Tensor:
    """Return indices on a device, without synchronising."""
    return torch.from_numpy(indices.astype(np.int64, copy=False)).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class RolloutRecurrence:
    """Recurrent states of a rollout; flags are on the host.

    Attributes:
        states: per trunk [layers, parts, B, H]: the state in which the rollout began.
        fresh: [T, B], bool: the step began without memory, as the first of an episode.
        after: [T, layers, parts, B, H]: state of the actor's core after each step.
        valid: [T, B], bool; None if every row is a transition.
    """

    states: Mapping[str, Tensor]
    fresh: Array
    after: Tensor
    valid: Array | None

    def before(self, envs: int | None = None) -> Tensor:
        """State of the actor's core at the beginning of each step, [T, layers, parts, B, H], in the first `envs` environments."""
        begin, after = self.states["actor"][:, :, :envs], self.after[:-1, :, :, :envs]
        shifted = torch.cat([begin.unsqueeze(0), after])
        steps, fresh = (torch.from_numpy(index).to(shifted.device) for index in np.nonzero(self.fresh[:, :envs]))
        shifted[steps, :, :, fresh] = 0.0  # these are few: a mask over all of them takes ten times as long
        return shifted

    def sequences(self) -> Sequences:
        """Return the runs of the transitions, by environment, then by time."""
        begins = self.fresh.copy()
        begins[0] = True
        carried = np.zeros_like(begins)
        carried[0] = True
        envs: Array = np.broadcast_to(np.arange(begins.shape[1]), begins.shape)
        valid_rows_of_envs = slice(None) if self.valid is None else self.valid.T.reshape(-1)
        begins, carried, envs = (column.T.reshape(-1)[valid_rows_of_envs] for column in (begins, carried, envs))
        begins = begins | (np.diff(envs, prepend=-1) != 0)
        starts = np.flatnonzero(begins)
        return Sequences(np.diff(starts, append=len(begins)), carried[starts], envs[starts], self.states)


@dataclass(frozen=True, slots=True)
class Rollout:
    """T steps of B environments, time-major, on the device of the policy.

    Attributes:
        observations: [T, B, ...] as used for acting: normalised if normalisation is on.
        actions: per head [T, B] or [T, B, D].
        log_probs: [T, B] of the joint action, under the distribution it was sampled from.
        rewards: [T, B], as used for learning: scaled if normalisation is on.
        values: [T, B], the critic's estimates.
        next_values: [T, B], its estimates of the next state; after a time limit, of the episode's last
            observation; 0 after termination.
        ended: [T, B], bool: the step taken at t ended its episode.
        terminated: [T, B], bool: it did so by termination.
        valid: [T, B], bool; None if every row is a transition.
        transitions: number of transitions.
        raw_rewards: [T, B], as the environment gave them; None if they equal `rewards`.
        head_log_probs: the parts of `log_probs`, per head [T, B], if there are several heads.
        action_masks: per restricted head [T, B, A], bool: the allowed choices.
        relevance: per head that is not always relevant [T, B], bool.
        scores: per head [T, B, size], as used for acting; see `Head`.
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
    """N rows to learn from, all of them transitions.

    Attributes:
        observations: [N, ...].
        actions: per head [N] or [N, D].
        log_probs: [N] at collection.
        advantages: [N], the values that multiply the ratio.
        returns: [N], the critic's targets.
        values: [N], the critic's estimates at collection.
        head_log_probs: per head [N] at collection; empty if there is one head.
        action_masks: per restricted head [N, A], bool.
        relevance: per head that is not always relevant [N], bool.
        sequences: order of the rows in time; None for a feed-forward policy.
        rows: [N], their transitions in the rollout, counted time by time; None if they are not needed.
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
        """Return the batch with every column changed in the same way."""

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
        """Return copies of the rows with these indices, without their order in time."""
        return self.map(lambda column: column.index_select(0, rows))

    def split(self, parts: int) -> list[Batch]:
        """Return the rows in order, in `parts` batches whose sizes differ by at most one; fewer if there are fewer rows."""
        parts = max(1, min(parts, len(self)))
        size, longer = divmod(len(self), parts)
        cuts = [part * size + min(part, longer) for part in range(parts + 1)]
        return [self.map(itemgetter(slice(*cut))) for cut in itertools.pairwise(cuts)]

    def whole(self, parts: Sequence[EnvironmentPart]) -> Batch:
        """Return the rows of some environments, as listed by `Sequences.environments`, with their order in time."""
        assert self.sequences is not None
        rows = index_on(np.concatenate([part.rows for part in parts]), self.log_probs.device)
        sequences = self.sequences.take(np.concatenate([part.runs for part in parts]))
        return self.map(lambda column: column.index_select(0, rows), sequences)

    def grid(self) -> Grid | None:
        """Return the positions of the rows in time; None for a feed-forward policy."""
        return None if self.sequences is None else self.sequences.grid(shared=self.sequences.separable)


def flatten(rollout: Rollout, advantages: Tensor, returns: Tensor, *, numbered: bool = False) -> Batch:
    """Return the transitions of a rollout as one batch: [T x B] rows minus the invalid ones.

    They are ordered by time; for a recurrent policy by environment, then by time. With `numbered`, each row has the number of its
    transition.
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
    """Return the rollout as a batch with columns [T, B], including rows that are not transitions."""
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
    """Return the indices of the `count` true rows in the flattened flags, without synchronising."""
    return torch.nonzero_static(valid.flatten(), size=count).squeeze(-1)


def running_sums(amounts: Tensor, decay: Tensor) -> Tensor:
    """Return y_t = x_t + d_t y_{t-1} from x and d, both [T, B]; d_0 is ignored."""
    return remaining_sums(amounts.flip(0), decay.flip(0)).flip(0)


def remaining_sums(amounts: Tensor, decay: Tensor) -> Tensor:
    """Return y_t = x_t + d_t y_{t+1} from x and d, both [T, B]; d_{T-1} is ignored."""
    sums, decay = amounts.clone(), decay.clone()
    distance = 1
    while distance < len(sums):
        sums[:-distance] += decay[:-distance] * sums[distance:]
        decay[:-distance] = decay[:-distance] * decay[distance:]
        distance *= 2
    return sums
