"""The losses of an update's minibatches, computed when they are asked for, all at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from esper_telemetry.adapters.sb3.losses import Rows, clip_of, clip_value_of, losses

NAMES = ("policy", "value", "entropy")


class UpdateLosses:
    """Keeps the rows of minibatches until somebody asks for a loss: sixteen at once take as long as one."""

    def __init__(self, model: Any) -> None:
        self._clip, self._clip_value = clip_of(model), clip_value_of(model)
        self._rows: list[Rows] = []
        self._valid: list[Tensor | None] = []
        self._found: dict[str, Tensor] = {}

    def of(self, rows: Rows, valid: Tensor | None) -> Mapping[str, Tensor]:
        """The losses of one more minibatch, 0-d each, later."""
        self._rows.append(rows)
        self._valid.append(valid)
        self._found = {}
        return Later(self, len(self._rows) - 1)

    def all(self) -> dict[str, Tensor]:
        """By name [M], of all minibatches so far."""
        if not self._found:
            valid = [torch.ones_like(rows.log_ratio, dtype=torch.bool) for rows in self._rows]
            known = [own if given is None else given for own, given in zip(valid, self._valid, strict=True)]
            table = Rows(*(_grid(column) for column in zip(*self._rows, strict=True)))
            self._found = losses(table, _grid(known), clip=self._clip, clip_value=self._clip_value)
        return self._found


class Later(Mapping[str, Tensor]):
    """The losses of one minibatch."""

    def __init__(self, update: UpdateLosses, index: int) -> None:
        self._update, self._index = update, index

    def __getitem__(self, name: str) -> Tensor:
        return self._update.all()[name][self._index]

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


def _grid(columns: Sequence[Tensor]) -> Tensor:
    """[M, N], N the rows of the longest."""
    if len({len(column) for column in columns}) == 1:
        return torch.stack(list(columns))
    return pad_sequence(list(columns), batch_first=True)
