"""The minibatches of an update, joined when it is over: R rows, and none of padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.adapters.sb3.drawn import DrawnRecorder, described
from esper_telemetry.adapters.sb3.heads import Description, Heads
from esper_telemetry.adapters.sb3.losses import (
    NORMALIZER_EPS,
    LossRows,
    clip_of,
    clip_value_of,
    policy_loss,
    value_loss,
)
from esper_telemetry.events import MinibatchesEnd, RolloutEnd
from esper_telemetry.ppo.environments.protocol import Array

MinibatchRow: TypeAlias = tuple[int, int, Array, Tensor | None, tuple[Tensor, ...], Tensor, Tensor, Tensor | None, Any]
"""A minibatch that the policy was asked about: epoch, place of its rollout among those of the record, numbers of its samples in the buffer,
padding mask, samples (see `minibatches.SAMPLES`), the answer (values, log-probabilities, entropy), and what was drawn from."""


class Block(NamedTuple):
    """Some minibatches, one after the other, without padding.

    Attributes:
        epochs, counts: epoch and rows of each.
        rows: [R], which transitions of the record's rollouts they are, counted time by time.
        columns: [R] each: samples as in `minibatches.SAMPLES`, then values and log-probabilities now.
        entropy: [R]; None where the policy gives none.
        described: what was drawn from.
    """

    epochs: tuple[int, ...]
    counts: tuple[int, ...]
    rows: Array
    columns: tuple[Tensor, ...]
    entropy: Tensor | None
    described: Description


class Segments:
    """Sums over the rows of each of M minibatches.

    Args:
        counts: rows of each.
    """

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.counts = torch.tensor(counts, device=device)
        self._of = torch.repeat_interleave(torch.arange(len(counts), device=device), self.counts)

    def mean(self, column: Tensor) -> Tensor:
        """[M] in float64, of [R]."""
        empty = torch.zeros(len(self.counts), dtype=torch.float64, device=column.device)
        return empty.index_add_(0, self._of, column.double()) / self.counts

    def spread(self, each: Tensor) -> Tensor:
        """[R]: what each minibatch [M] has, in all its rows."""
        return each[self._of]


class Columns:
    """Joins what was kept of an update's minibatches.

    Args:
        model: says how advantages are normalised and losses are clipped.
        heads: of its actions.
        drawn: kept what the policy drew from.
    """

    def __init__(self, model: Any, heads: Heads, drawn: DrawnRecorder) -> None:
        self._model, self._heads, self._drawn = model, heads, drawn
        self._order = np.arange(model.n_envs * model.n_steps).reshape(model.n_steps, model.n_envs).T.ravel()

    @torch.no_grad()
    def block(self, done: Sequence[MinibatchRow]) -> Block:
        """These minibatches."""
        epochs, places, numbers, masks, samples, values, log_probs, entropies, kept = zip(*done, strict=True)
        keep = _Keep(masks)
        size = len(self._order)
        rows = [self._order[own] + place * size for place, own in zip(places, numbers, strict=True)]
        return Block(
            epochs=epochs,
            counts=tuple([len(own) for own in numbers]),
            rows=np.concatenate(rows),
            columns=tuple([keep(column) for column in (*zip(*samples, strict=True), values, log_probs)]),
            entropy=None if entropies[0] is None else keep(entropies),
            described=keep.description(self._drawn.joined(kept, torch.cat)),
        )

    @torch.no_grad()
    def joined(self, blocks: Sequence[Block], rollout: RolloutEnd | None) -> MinibatchesEnd:
        """All of them; `rollout` is what was told of their rollouts."""
        each: Any = Block._make(zip(*blocks, strict=True))  # each field of all of them
        counts = tuple(chain.from_iterable(each.counts))
        old_log_probs, advantages, old_values, returns, actions, values, now = map(
            _cat, zip(*each.columns, strict=True)
        )
        segments = Segments(counts, old_log_probs.device)
        rows = LossRows(
            log_ratio=now - old_log_probs,
            log_probs=now,
            advantages=self._used(advantages, segments),
            values=values.flatten(),
            old_values=old_values,
            returns=returns,
            entropy=-now if blocks[0].entropy is None else _cat(each.entropy),
        )
        known = described(each.described)
        numbers = torch.from_numpy(np.concatenate(each.rows)).to(now.device)
        return MinibatchesEnd(
            epochs=tuple(chain.from_iterable(each.epochs)),
            valid=None,
            counts=counts,
            log_ratio=rows.log_ratio,
            advantages=rows.advantages,
            values=rows.values,
            old_values=old_values,
            returns=returns,
            losses=self._losses(rows, segments),
            logits=known.logits,
            action_masks=known.masks,
            log_std=known.log_std,
            head_log_ratios=self._head_log_ratios(known.logits, actions, numbers, rollout),
            means=known.means,
            rows=numbers,
        )

    def _used(self, advantages: Tensor, segments: Segments) -> Tensor:
        """What multiplies the ratio: normalised over each minibatch where the model does so."""
        if not self._model.normalize_advantage:
            return advantages
        centred = advantages.double() - segments.spread(segments.mean(advantages))
        std = (segments.mean(centred.square()) * segments.counts / (segments.counts - 1)).sqrt()
        used = (centred / (segments.spread(std) + NORMALIZER_EPS)).to(advantages.dtype)
        if hasattr(self._model, "clip_range") and not hasattr(self._model.policy, "lstm_actor"):
            used = torch.where(
                segments.spread(segments.counts) < 2, advantages, used
            )  # PPO leaves a single row as it is
        return used

    def _losses(self, rows: LossRows, segments: Segments) -> dict[str, Tensor]:
        """By name [M]."""
        columns = {
            "policy": policy_loss(rows, clip_of(self._model)),
            "value": value_loss(rows, clip_value_of(self._model)),
            "entropy": -rows.entropy,
        }
        return {name: segments.mean(column).to(column.dtype) for name, column in columns.items()}

    def _head_log_ratios(
        self, logits: Mapping[str, Tensor], actions: Tensor, rows: Tensor, rollout: RolloutEnd | None
    ) -> dict[str, Tensor]:
        names = self._heads.names
        if len(names) < 2 or rollout is None:
            return {}
        now = self._heads.log_probs(logits, self._heads.actions(actions))
        return {name: now[name] - rollout.head_log_probs[name].flatten()[rows] for name in names}


def _cat(columns: Sequence[Tensor]) -> Tensor:
    return columns[0] if len(columns) == 1 else torch.cat(tuple(columns))


class _Keep:
    """Joins a column of minibatches and leaves padding out."""

    def __init__(self, masks: Sequence[Tensor | None]) -> None:
        known = [mask for mask in masks if mask is not None]
        self._rows = (torch.cat(known) > 1e-8).nonzero().flatten() if known else None

    def __call__(self, column: Sequence[Tensor]) -> Tensor:
        return self.rows(_cat(column))

    def rows(self, column: Tensor) -> Tensor:
        return column if self._rows is None else column[self._rows]

    def description(self, found: Description) -> Description:
        """The same of each column of it."""
        return Description(*({name: self.rows(column) for name, column in part.items()} for part in found))
