"""Minibatches of any sizes as rows of one grid, so that one call measures them all."""

from __future__ import annotations

from collections.abc import Mapping
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
        joined = joined._replace(valid=torch.ones_like(joined.log_ratio, dtype=torch.bool))
    details = None if joined.details is None else _laid_out(joined.details, counts)
    return _laid_out(joined, counts)._replace(details=details)


def _laid_out(table: Table, counts: tuple[int, ...]) -> Table:
    columns = {name: column for name, column in table._asdict().items() if name not in OTHER}
    return table._replace(**{name: _column(column, counts) for name, column in columns.items()})


def _column(column: Any, counts: tuple[int, ...]) -> Any:
    """A column, or one per head; anything else as it is."""
    if isinstance(column, Mapping):
        return {head: _grid(part, counts) for head, part in column.items()}
    return _grid(column, counts) if isinstance(column, Tensor) else column


def _grid(column: Tensor, counts: tuple[int, ...]) -> Tensor:
    if len(set(counts)) == 1:
        return column.view(len(counts), -1, *column.shape[1:])
    return torch.nn.utils.rnn.pad_sequence(list(column.split(list(counts))), batch_first=True)
