"""Minibatches of any sizes as rows of one grid, so that one call measures them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from esper_telemetry.summary.snapshot import Minibatches


def in_grid(joined: Minibatches) -> Minibatches:
    """The same with [M, N, ...] in place of [R, ...], N the rows of the longest; shorter ones end in rows that do not count."""
    counts = joined.counts
    every = joined.valid
    if every is None and len(set(counts)) > 1:
        every = torch.ones_like(joined.log_ratio, dtype=torch.bool)

    def each(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _grid(column, counts) for name, column in columns.items()}

    return replace(
        joined,
        log_ratio=_grid(joined.log_ratio, counts),
        advantages=_grid(joined.advantages, counts),
        valid=None if every is None else _grid(every, counts),
        logits=each(joined.logits),
        action_masks=each(joined.action_masks),
        log_std=each(joined.log_std),
        head_log_ratios=each(joined.head_log_ratios),
        relevance=each(joined.relevance),
    )


def _grid(column: Tensor, counts: tuple[int, ...]) -> Tensor:
    if len(set(counts)) == 1:
        return column.view(len(counts), -1, *column.shape[1:])
    return torch.nn.utils.rnn.pad_sequence(list(column.split(list(counts))), batch_first=True)
