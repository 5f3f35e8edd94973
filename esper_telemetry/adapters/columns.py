"""Columns that adapters share: tensors of another trainer in the terms of `events`.

An adapter reads values, actions, distributions and episode ends from a trainer. The functions here convert them into columns of
`RolloutEnd`, `MinibatchEnd`, `JoinedMinibatches` and `EpisodeEnd`; `docs/writing_an_adapter.md` lists the columns.

Shapes: T steps, B environments, N rows, A actions, D action dimensions.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from esper_telemetry.events import NONE, EpisodeEnd
from esper_telemetry.updates.joining import joined_heads
from esper_telemetry.updates.update import JoinedMinibatches

Array: TypeAlias = npt.NDArray[Any]

Join: TypeAlias = Callable[[list[Tensor]], Tensor]
"""`torch.cat` or `torch.stack`."""

HEAD = "action"
"""Name of a policy's only head."""

ADVANTAGE_EPS = 1e-8
"""Added to the standard deviation by which advantages are divided, as in Stable-Baselines3 and CleanRL."""


class HeadColumns(NamedTuple):
    """Parameters of a policy's distributions by head, named as the events name them: `MinibatchEnd(..., **columns._asdict())`.

    Attributes:
        logits: per categorical head [N, A] or [T, B, A].
        means, log_std: per Gaussian head [N, D] or [T, B, D].
        action_masks: per categorical head with masks, of the shape of its logits, bool.
    """

    logits: Mapping[str, Tensor] = NONE
    means: Mapping[str, Tensor] = NONE
    log_std: Mapping[str, Tensor] = NONE
    action_masks: Mapping[str, Tensor] = NONE

    def map(self, change: Callable[[Tensor], Tensor]) -> HeadColumns:
        """Apply `change` to every column."""
        return HeadColumns(*({name: change(column) for name, column in part.items()} for part in self))


def head_names(count: int) -> tuple[str, ...]:
    """Return the names of a policy's heads: `action`, or `action_0`, `action_1`, ... for several."""
    return (HEAD,) if count == 1 else tuple(f"action_{index}" for index in range(count))


def head_columns(parts: Mapping[str, Any]) -> HeadColumns:
    """Return the detached columns of a policy's distributions.

    Args:
        parts: by head a distribution with `logits` (categorical; also its `masks`, if it has some), one with `mean` and `stddev`
            (Gaussian), or the log-odds [...] of a choice between 0 and 1.
    """
    logits: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    log_std: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for name, part in parts.items():
        if isinstance(part, Tensor):
            odds = part.detach()
            logits[name] = torch.stack([torch.zeros_like(odds), odds], -1)
        elif hasattr(part, "logits"):
            logits[name] = part.logits.detach()
            # scripts' classes have an empty list without a mask, and masks may be numbers 0 and 1
            mask = getattr(part, "masks", None)
            if isinstance(mask, Tensor) and mask.shape == logits[name].shape:
                masks[name] = mask.bool()
        else:
            means[name], log_std[name] = part.mean.detach(), part.stddev.detach().log()
    return HeadColumns(logits, means, log_std, masks)


def cat(columns: Sequence[Tensor]) -> Tensor:
    """Return columns concatenated; a single column is returned as it is."""
    return columns[0] if len(columns) == 1 else torch.cat(tuple(columns))


def join_columns(columns: Sequence[HeadColumns], join: Join) -> HeadColumns:
    """Join each column of several `HeadColumns`. Columns that some of them lack are left out."""
    if len(columns) == 1 and join is torch.cat:
        return columns[0]
    return HeadColumns(*(joined_heads(parts, join) for parts in zip(*columns, strict=True)))


def head_actions(actions: Tensor, names: Sequence[str], continuous: Collection[str], shape: Sequence[int]) -> dict[str, Tensor]:
    """Split actions by head: [*shape, D] of a continuous head, `shape` in int64 of a categorical one.

    Args:
        actions: [*shape, D]; also `shape` if there is one number per row.
        names: of the heads. A single head has all D entries, several heads one each.
        continuous: names of the heads whose actions are numbers.
        shape: of the rows, such as the shape of their log-probabilities: (N,) or (T, B).

    Raises:
        ValueError: if the actions do not have these shapes.
    """
    split = actions.unsqueeze(-1) if actions.shape == tuple(shape) else actions
    if split.shape[:-1] != tuple(shape) or 1 < len(names) > split.shape[-1]:
        raise ValueError(f"actions {[*actions.shape]} lack an entry for each of {len(names)} heads in rows {[*shape]}")
    parts = (split,) if len(names) == 1 else split.split(1, -1)
    return {name: part if name in continuous else part.squeeze(-1).long() for name, part in zip(names, parts, strict=False)}


def chosen_log_probs(logits: Tensor, actions: Tensor) -> Tensor:
    """Log-probabilities [...] of actions [...] under unnormalised logits [..., A]."""
    return logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


class LossColumns(NamedTuple):
    """Columns of PPO's losses, [N] each.

    Attributes:
        log_ratio, log_probs: of the chosen actions now.
        advantages: as they multiply the ratio.
        values, old_values, returns: the critic's estimates now and at collection, and its targets.
        entropy: of the policy.
    """

    log_ratio: Tensor
    log_probs: Tensor
    advantages: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    entropy: Tensor


def policy_loss(columns: LossColumns, clip: float | None, *, dual_clip: float | None = None) -> Tensor:
    """Return the clipped surrogate loss [N] of each row (Schulman 2017, equation 7).

    Args:
        columns: of the rows.
        clip: range of the ratio; None for a policy gradient without a ratio.
        dual_clip: factor above 1 that bounds the loss of negative advantages (Ye 2020, equation 5); None without this bound.
    """
    if clip is None:
        return -columns.advantages * columns.log_probs
    advantages, ratio = columns.advantages, columns.log_ratio.exp()
    gain = torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip))
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.max(gain, dual_clip * advantages), gain)
    return -gain


def value_loss(columns: LossColumns, clip: float | None, *, maximum: bool = False) -> Tensor:
    """Return half the squared error [N] of each row.

    Args:
        columns: of the rows.
        clip: limit of a value's change since collection; None if values are not clipped.
        maximum: take the larger of the losses of the value and of the clipped value, as OpenAI Baselines and RSL-RL do.
    """
    values = columns.values
    if clip is not None:
        values = columns.old_values + (values - columns.old_values).clamp(-clip, clip)
    error = (columns.returns - values).square()
    if maximum and clip is not None:
        error = torch.maximum(error, (columns.returns - columns.values).square())
    return 0.5 * error


def loss_columns(
    columns: LossColumns, clip: float | None, clip_value: float | None, *, dual_clip: float | None = None, clip_maximum: bool = False
) -> dict[str, Tensor]:
    """Return the losses of each row [N] by the names of `MinibatchEnd`: `policy`, `value` and `entropy` (its negative).

    Arguments are as in `policy_loss` and `value_loss`.
    """
    return {
        "policy": policy_loss(columns, clip, dual_clip=dual_clip),
        "value": value_loss(columns, clip_value, maximum=clip_maximum),
        "entropy": -columns.entropy,
    }


def minibatch_means(column: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the mean [M] of each minibatch's rows, from a column [R] of all minibatches with `counts` rows each."""
    if len(set(counts)) == 1:
        means: Tensor = column.view(len(counts), -1).mean(-1)
        return means
    return torch.stack([part.mean() for part in column.split(list(counts))])


class EvaluatedMinibatch(NamedTuple):
    """Columns [N] or [N, 1] of a minibatch that determine its losses.

    Attributes:
        epoch: pass over the rollout, from 0.
        rows: [n], transitions of the rollout, t B + b; other rows, after the first n, do not count. None if they are not known.
        advantages: as used.
        old_log_probs, old_values, returns: at collection.
        log_probs: of the actions now.
        gaussian: current mean and standard deviation of a Gaussian, [N, D] each, or only the latter; empty for other distributions.
        values: the critic's estimates now.
    """

    epoch: int
    rows: Tensor | None
    advantages: Tensor
    old_log_probs: Tensor
    old_values: Tensor
    returns: Tensor
    log_probs: Tensor
    gaussian: tuple[Tensor, ...]
    values: Tensor


@torch.no_grad()
def evaluated_minibatches(rows: Sequence[EvaluatedMinibatch], *, clip: float, clip_value: float | None) -> JoinedMinibatches:
    """Return the minibatches of an update, with RSL-RL's losses; see `loss_columns` for the clips."""
    fields: Any = EvaluatedMinibatch._make(zip(*rows, strict=True))  # each field of all minibatches
    sizes = tuple([log_probs.numel() for log_probs in fields.log_probs])
    counts = tuple([size if own is None else len(own) for own, size in zip(fields.rows, sizes, strict=True)])

    def counted(columns: Sequence[Tensor]) -> Tensor:
        """Columns [n, ...] joined. They are not cut if all rows count, because cutting takes as long as joining."""
        if sizes != counts:
            columns = [column[:count] for column, count in zip(columns, counts, strict=True)]
        return torch.cat(tuple(columns))

    def joined(name: str) -> Tensor:
        columns = getattr(fields, name)
        if sizes != counts or len({column.shape for column in columns}) > 1:
            columns = [column.flatten() for column in columns]
        return counted(columns).flatten()

    def joined_head(place: int) -> dict[str, Tensor]:
        return {HEAD: counted([parameters[place].flatten(0, -2) for parameters in fields.gaussian])}

    log_probs = joined("log_probs")
    columns = LossColumns(
        log_ratio=log_probs - joined("old_log_probs"),
        log_probs=log_probs,
        entropy=log_probs,  # no loss reads it
        **{name: joined(name) for name in ("advantages", "values", "old_values", "returns")},
    )
    losses = {"policy": policy_loss(columns, clip), "value": value_loss(columns, clip_value, maximum=True)}
    known = [own for own in fields.rows if own is not None]
    return JoinedMinibatches(
        epochs=fields.epoch,
        counts=counts,
        valid=None,
        losses={name: minibatch_means(loss, counts) for name, loss in losses.items()},
        log_std={name: std.log() for name, std in joined_head(-1).items()} if all(fields.gaussian) else {},
        means=joined_head(0) if all(len(parameters) > 1 for parameters in fields.gaussian) else {},
        rows=torch.cat(known) if len(known) == len(rows) else None,
        **{name: getattr(columns, name) for name in ("log_ratio", "advantages", "values", "old_values", "returns")},
    )


def rows_by_environment(lengths: Sequence[int]) -> Tensor:
    """Return the place t B + b in the grid [T, B] of each of R flat rows that follow environment by environment.

    Args:
        lengths: number of rows of each of the B environments.
    """
    counts = torch.tensor(lengths)
    envs = torch.repeat_interleave(torch.arange(len(counts)), counts)
    times = torch.arange(len(envs)) - (counts.cumsum(0) - counts)[envs]
    return times * len(counts) + envs


def places_of_chunks(lengths: Sequence[int], ended: Sequence[bool], num_envs: int) -> tuple[list[int], int]:
    """Return the place t B + b of the first step of each chunk of an episode, and B: `num_envs`, unless the chunks need more or less.

    Columns are filled evenly. A chunk whose episode continues comes last in its column, as at the end of a rollout.

    Args:
        lengths: steps of each chunk.
        ended: whether the chunk's last step ends its episode.
        num_envs: number of environments.
    """
    tails = [chunk for chunk, ends in enumerate(ended) if not ends]
    count = max(len(tails), min(num_envs, len(lengths)))
    reserved = [lengths[chunk] for chunk in tails] + [0] * (count - len(tails))
    shortest = [(steps, column) for column, steps in enumerate(reserved)]
    heapq.heapify(shortest)
    places, filled = [0] * len(lengths), [0] * count
    for chunk, ends in enumerate(ended):
        if ends:
            steps, column = shortest[0]
            heapq.heapreplace(shortest, (steps + lengths[chunk], column))
            places[chunk], filled[column] = filled[column] * count + column, filled[column] + lengths[chunk]
    for column, chunk in enumerate(tails):
        places[chunk] = filled[column] * count + column
    return places, count


def as_grid(column: Tensor, rows: Tensor, num_envs: int) -> Tensor:
    """Return a flat column [R, ...] as [T, B, ...], 0 in places of the grid without a row.

    Ones become the column `valid` of a rollout whose environments have unequal lengths.

    Args:
        column: of a rollout.
        rows: [R], the place t B + b of each entry: `rows_by_environment`, or `torch.arange(R)` if rows follow step by step.
        num_envs: B.
    """
    steps = -(-(int(rows.max()) + 1) // num_envs)
    grid = column.new_zeros((steps * num_envs, *column.shape[1:]))
    grid[rows] = column
    return grid.view(steps, num_envs, *column.shape[1:])


class RowColumns(NamedTuple):
    """Columns [N, ...] of rows by name, and the columns of a policy's heads by name and head."""

    columns: dict[str, Tensor]
    heads: dict[str, dict[str, Tensor]]

    @property
    def arguments(self) -> dict[str, Any]:
        """All columns, as arguments of an event."""
        return {**self.columns, **self.heads}

    def map(self, change: Callable[[Tensor], Tensor]) -> RowColumns:
        """Apply `change` to every column."""
        heads = {key: {head: change(x) for head, x in part.items()} for key, part in self.heads.items()}
        return RowColumns({key: change(x) for key, x in self.columns.items()}, heads)

    @classmethod
    def joined(cls, parts: Sequence[RowColumns]) -> RowColumns:
        """Return the rows of several policies, one policy after the other; a head is 0 in rows of other policies."""
        if len(parts) == 1:
            return parts[0]
        sizes = [len(next(iter(columns.values()))) for columns, _ in parts]
        joined: dict[str, dict[str, Tensor]] = {}
        for place, (_, heads) in enumerate(parts):
            around = sum(sizes[:place]), sum(sizes[place + 1 :])
            for key, part in heads.items():
                whole = {head: pad(x, (*(0,) * (2 * x.dim() - 2), *around)) for head, x in part.items()}
                joined[key] = joined.get(key, {}) | whole
        return cls({key: torch.cat([columns[key] for columns, _ in parts]) for key in parts[0].columns}, joined)


def normalized_advantages(advantages: Tensor, valid: Tensor | None = None) -> Tensor:
    """Advantages [N] less their mean, over their standard deviation; both of the valid rows."""
    counted = advantages if valid is None else advantages[valid]
    normalized: Tensor = (advantages - counted.mean()) / (counted.std() + ADVANTAGE_EPS)
    return normalized


def next_values(values: Tensor, last: Tensor, ended: Tensor, bootstrap: Tensor | None = None) -> Tensor:
    """Estimates [T, B] of the state after each step.

    Args:
        values: [T, B], estimates of the states before each step.
        last: [B], estimates of the states after the last step.
        ended: [T, B], bool: the step ended its episode.
        bootstrap: [T, B], estimates of the last states of episodes that a time limit ended, 0 elsewhere; None without any.
    """
    following = torch.cat([values[1:], last.reshape(1, -1).to(values)])
    return torch.where(ended, torch.zeros_like(following) if bootstrap is None else bootstrap, following)


class FinishedEpisode(NamedTuple):
    """Undiscounted return and steps of an episode, and the step of the rollout, from 0, with which it ended."""

    returned: float
    length: int
    time: int


def episodes_event(episodes: Iterable[FinishedEpisode], env_step: int) -> EpisodeEnd | None:
    """Return the event of a rollout's episodes; None if none finished."""
    columns = [list(column) for column in zip(*episodes, strict=True)]
    return EpisodeEnd(env_step, *columns) if columns else None


class EpisodeCounter:
    """Finds the episodes that finish in one rollout after another, without a loop over its steps.

    Args:
        num_envs: B, environments.
        complete: no episode has begun before the first rollout; else the first one of each environment is left out.
    """

    def __init__(self, num_envs: int, *, complete: bool) -> None:
        self._sums = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._complete = np.full(num_envs, complete)

    def episodes(self, rewards: Tensor, ended: Tensor, env_step: int) -> EpisodeEnd | None:
        """Return the event of the episodes that finished in a rollout with these columns [T, B]; None if none did."""
        steps = torch.stack([rewards.detach(), ended.to(rewards)]).cpu().double()  # one copy, which waits for the device
        sums = steps[0].cumsum(0).numpy() + self._sums
        envs, times = steps[1].numpy().T.nonzero()  # [K] ends, environment by environment
        lengths = self._lengths[envs] + times + 1
        self._sums, self._lengths = sums[-1].copy(), self._lengths + len(sums)
        if not len(envs):
            return None
        totals = sums[times, envs]
        follows = envs[1:] == envs[:-1]  # upon another episode of this rollout
        returned, taken = totals.copy(), lengths.copy()
        returned[1:] -= np.where(follows, totals[:-1], 0.0)
        taken[1:] -= np.where(follows, lengths[:-1], 0)
        counted = self._complete[envs]
        counted[1:] |= follows
        last = np.append(~follows, True)
        self._sums[envs[last]] -= totals[last]
        self._lengths[envs[last]] -= lengths[last]
        self._complete[envs] = True
        order = np.argsort(times, kind="stable")
        order = order[counted[order]]
        columns = (column[order].tolist() for column in (returned, taken, times))
        return episodes_event(map(FinishedEpisode._make, zip(*columns, strict=True)), env_step)


def numbers_by_key(prefix: str, logged: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that a trainer has logged, under keys that every backend takes: `Loss/value` becomes `rsl_rl/loss/value`."""
    return {_key(prefix, str(name)): float(value) for name, value in logged.items() if isinstance(value, Real)}


@cache
def _key(prefix: str, name: str) -> str:
    segments = [re.sub(r"[^a-z0-9_]+", "_", part) for part in name.lower().split("/") if part]
    return "/".join([prefix, *segments])


def cast_change(observation: Any, dtype: Any) -> float:
    """Return the largest change of an observation by the dtype of its space, relative to its largest entry.

    It is 0 for anything but real numbers.
    """
    if not isinstance(observation, np.ndarray | np.floating) or dtype is None or observation.dtype.kind != "f":
        return 0.0
    if observation.dtype == dtype or not observation.size or not np.isfinite(observation).all():
        return 0.0
    with np.errstate(all="ignore"):  # a number may be too large for the dtype
        change = np.abs(observation.astype(dtype).astype(np.float64) - observation).max()
    return float(change / max(float(np.abs(observation).max()), np.finfo(np.float32).tiny))
