"""Minibatches of any sizes as rows of one grid, so that one call measures them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from esper_telemetry.summary.snapshot import Details, Minibatches

Table = TypeVar("Table", Minibatches, Details)

OTHER = {"losses", "features", "details"}
"""What of minibatches is no column of rows."""


def in_grid(joined: Minibatches) -> Minibatches:
    """The same with [M, N, ...] in place of [R, ...], N the rows of the longest; shorter ones end in rows that do not count."""
    counts = joined.counts
    if joined.valid is None and len(set(counts)) > 1:
        joined = replace(joined, valid=torch.ones_like(joined.log_ratio, dtype=torch.bool))
    details = None if joined.details is None else _laid_out(joined.details, counts)
    return replace(_laid_out(joined, counts), details=details)


def _laid_out(table: Table, counts: tuple[int, ...]) -> Table:
    columns = {item.name: getattr(table, item.name) for item in fields(table) if item.name not in OTHER}
    return replace(table, **{name: _column(column, counts) for name, column in columns.items()})


def _column(column: Any, counts: tuple[int, ...]) -> Any:
    """A column, or one per head; anything else as it is."""
    if isinstance(column, Mapping):
        return {head: _grid(part, counts) for head, part in column.items()}
    return _grid(column, counts) if isinstance(column, Tensor) else column


def _grid(column: Tensor, counts: tuple[int, ...]) -> Tensor:
    if len(set(counts)) == 1:
        return column.view(len(counts), -1, *column.shape[1:])
    return torch.nn.utils.rnn.pad_sequence(list(column.split(list(counts))), batch_first=True)
